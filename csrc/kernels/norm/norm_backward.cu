// The gradients of norm_forward.cu: of what was normalised, of the weight and of the bias, from the gradient of z. What the
// activation was given is computed again from x and the saved statistics. With d its gradient, n values a statistic:
//   grad_bias = sum d    grad_weight = sum d * (x - mean) * inverse
//   grad_x = weight * inverse * (d - grad_bias / n - (x - mean) * inverse * grad_weight / n)
// Where the statistics were not the batch's (Shape::trains), grad_x is weight * inverse * d.
//
// With ADDS d comes from z, is the gradient of what was added, too, and is written as such by whoever reads grad_z: what comes
// after that reads it there.
//
// STAGE as there; partial sums are [partials][groups][2]. APPLY without partials: nobody wants the sums.
// `saved`: [2][groups], means and 1 / sqrt(variance + eps). Gradient: the type of grad_weight and grad_bias, [groups].
#include "norm/norm_reduce.cuh"

struct Given {
  Item x, gradient;
};

struct Constants {
  float mean[STATISTICS], scale[STATISTICS], shift[STATISTICS];
};

/// With ADDS the gradient in `given` is d already, or else that of `z`.
__device__ __forceinline__ float before_activation(const Given& given, const Item* z, int v, const Constants& of, float slope,
                                                   float& off) {
  const int j = CHANNELS_LAST ? v : 0;
  off = given.x[v] - of.mean[j];
  if constexpr (ADDS) return z ? passed_back_from((*z)[v], given.gradient[v]) : given.gradient[v];
  return passed_back(given.gradient[v], off * of.scale[j] + of.shift[j], slope);
}

/// With ADDS: d as it is written, from the gradient of z.
__device__ __forceinline__ Item settled(const Item& gradient, const Item& z) {
  float values[VALUES];
#pragma unroll
  for (int v = 0; v < VALUES; ++v) values[v] = passed_back_from(z[v], gradient[v]);
  return Item::of(values);
}

/// With ADDS the gradients are of `z`: sums are of d as it is before it is rounded.
template <int COUNT>
__device__ __forceinline__ void take(const Given (&given)[COUNT], const Item* z, Sums (&mine)[STATISTICS], const Constants& of,
                                     float slope) {
  constexpr int STEP = CHANNELS_LAST ? VALUES : 1;
#pragma unroll
  for (int j = 0; j < STATISTICS; ++j) {
    Sums some;
#pragma unroll
    for (int u = 0; u < COUNT; ++u)
#pragma unroll
      for (int v = j; v < VALUES; v += STEP) {
        float off;
        const float d = before_activation(given[u], ADDS ? z + u : nullptr, v, of, slope, off);
        some.gradient += d, some.product += d * off;
      }
    merge(mine[j], 0.f, some, 0.f);
  }
}

extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, 1)
    norm_backward(const Element* __restrict__ grad_z, const Element* __restrict__ x, const float* __restrict__ saved,
                  const Parameter* __restrict__ weight, const Parameter* __restrict__ bias, Element* __restrict__ grad_x,
                  Gradient* grad_weight, Gradient* grad_bias, float* partial, const Element* __restrict__ z,
                  Element* grad_added, const Shape s) {
  __shared__ Reduction<Sums> reduction;
  __shared__ float firsts[WIDTH], seconds[WIDTH];
  const Tile tile(s, STAGE == APPLY ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  const int t = threadIdx.x, width = tile.width();
  if constexpr (STAGE == APPLY) ptx::wait_for_previous_launch();
  Constants of{};
  if (tile.inside) {
#pragma unroll
    for (int j = 0; j < STATISTICS; ++j) {
      of.mean[j] = saved[tile.statistic + j], of.scale[j] = saved[s.groups + tile.statistic + j];
      if (weight) of.scale[j] *= load_as(weight[tile.parameter + j]);
      of.shift[j] = bias ? load_as(bias[tile.parameter + j]) : 0.f;
    }
  }

  Sums of_tile;
  if constexpr (STAGE != APPLY) {
    Sums mine[STATISTICS];
    int i = tile.first, k = 0;
    for (; i + (UNROLL - 1) * tile.step < tile.end; i += UNROLL * tile.step, k += UNROLL) {
      Given given[UNROLL];
      Item outputs[ADDS ? UNROLL : 1];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        const long long at = tile.offset(s, i + u * tile.step);
        given[u].x.load(x + at, true), given[u].gradient.load(grad_z + at, true);
        if constexpr (ADDS) outputs[u].load(z + at, true);
      }
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        Item second = given[u].gradient;
        if constexpr (ADDS) {
          second = settled(given[u].gradient, outputs[u]);
          second.write(grad_added + tile.offset(s, i + u * tile.step));
        }
        if (STAGE == TOGETHER && k + u < s.cached) keep(2 * (k + u), given[u].x), keep(2 * (k + u) + 1, second);
      }
      take(given, outputs, mine, of, s.slope);
    }
    for (; i < tile.end; i += tile.step, ++k) {
      Given given[1];
      const long long at = tile.offset(s, i);
      given[0].x.load(x + at, true), given[0].gradient.load(grad_z + at, true);
      Item output, second = given[0].gradient;
      if constexpr (ADDS) {
        output.load(z + at, true);
        second = settled(given[0].gradient, output);
        second.write(grad_added + at);
      }
      if (STAGE == TOGETHER && k < s.cached) keep(2 * k, given[0].x), keep(2 * k + 1, second);
      take(given, &output, mine, of, s.slope);
    }
    reduction.of_threads(mine, 0.f, tile.lanes);
    of_tile = reduction.of_cluster(s, tile, 0.f);
    if constexpr (STAGE == REDUCE) {
      const int group = t < width ? tile.group(s, t) : -1;
      if (group >= 0 && tile.slice % CLUSTER == 0)
        *reinterpret_cast<float2*>(partial + 2 * ((long long)(tile.slice / CLUSTER) * s.groups + group)) =
            make_float2(of_tile.gradient, of_tile.product);
      leave_cluster();
      return;
    }
  } else if (s.partials) {
    of_tile = reduction.of_partials(s, tile, partial, 0.f);
  }

  if (t < width) {
    const int group = tile.group(s, t);
    if (group >= 0) {
      const float inverse = saved[s.groups + group], product = of_tile.product * inverse;
      firsts[t] = s.trains ? of_tile.gradient / s.count : 0.f;
      seconds[t] = s.trains ? product * inverse / s.count : 0.f;
      if (tile.slice == 0) {
        if (grad_weight) grad_weight[group] = store_as<Gradient>(product);
        if (grad_bias) grad_bias[group] = store_as<Gradient>(of_tile.gradient);
      }
    }
  }
  __syncthreads();

  if (tile.inside && grad_x) {
    float first[STATISTICS], second[STATISTICS];
#pragma unroll
    for (int j = 0; j < STATISTICS; ++j) {
      const int at = CHANNELS_LAST ? tile.lane * VALUES + j : 0;
      first[j] = firsts[at], second[j] = seconds[at];
    }
    // Without sums nobody has read grad_z yet.
    const bool is_settled = ADDS && (STAGE == TOGETHER || s.partials);
    for (int i = tile.first, k = 0; i < tile.end; i += UNROLL * tile.step, k += UNROLL) {
      Given given[UNROLL];
      Item outputs[ADDS ? UNROLL : 1];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        const int one = i + u * tile.step;
        if (STAGE == TOGETHER && k + u < s.cached) {
          if (one < tile.end) recall(2 * (k + u), given[u].x), recall(2 * (k + u) + 1, given[u].gradient);
        } else {
          const long long at = one < tile.end ? tile.offset(s, one) : 0;
          given[u].x.load(x + at, one < tile.end);
          if (is_settled)
            given[u].gradient.load(grad_added + at, one < tile.end);
          else
            given[u].gradient.load(grad_z + at, one < tile.end);
          if constexpr (ADDS)
            if (!is_settled) outputs[u].load(z + at, one < tile.end);
        }
      }
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        const int one = i + u * tile.step;
        if (one >= tile.end) break;
        if constexpr (ADDS)
          if (!is_settled) {
            given[u].gradient = settled(given[u].gradient, outputs[u]);
            given[u].gradient.write(grad_added + tile.offset(s, one));
          }
        float values[VALUES];
#pragma unroll
        for (int v = 0; v < VALUES; ++v) {
          const int j = CHANNELS_LAST ? v : 0;
          float off;
          const float d = before_activation(given[u], nullptr, v, of, s.slope, off);
          values[v] = of.scale[j] * (d - first[j] - off * second[j]);
        }
        Item::store(grad_x + tile.offset(s, one), values);
      }
    }
  }
  leave_cluster();
}
