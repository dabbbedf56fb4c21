// The gradients of norm_forward.cu: of its input, of the weight and of the bias, from the gradient of z. The input of
// the activation is computed again from x and the saved statistics. With d its gradient, n values a statistic:
//   grad_bias = sum d    grad_weight = sum d * (x - mean) * inverse
//   grad_x = weight * inverse * (d - grad_bias / n - (x - mean) * inverse * grad_weight / n)
// Where the statistics were not the batch's (Shape::trains), grad_x is weight * inverse * d.
//
// With ADDS d is computed from z. It is also the gradient of the added tensor, and the pass that reads grad_z first
// writes it to grad_added, where later passes read it.
//
// STAGE as there; partial sums are [partials][groups][2]. APPLY without partials: the sums are not needed. `saved`:
// [2][groups], means and 1 / sqrt(variance + eps). Gradient: the type of grad_weight and grad_bias, [groups].
#include "norm/norm_reduce.cuh"

/// An item of x and of the gradient.
struct Operands {
  Item x, gradient;
};

/// Per statistic: x - mean is scaled and shifted to give the activation's input.
struct Constants {
  float mean[STATISTICS], scale[STATISTICS], shift[STATISTICS];
};

/// The gradient d of the activation's input. With ADDS the operands' gradient is that of `z`, or d already where `z` is
/// null. `centered` becomes x - mean.
__device__ __forceinline__ float activation_input_gradient(const Operands& operands, const Item* z, int v, const Constants& constants, float slope,
                                                   float& centered) {
  const int j = CHANNELS_LAST ? v : 0;
  centered = operands.x[v] - constants.mean[j];
  if constexpr (ADDS) return z ? activation_gradient_from_output((*z)[v], operands.gradient[v]) : operands.gradient[v];
  return activation_gradient(operands.gradient[v], centered * constants.scale[j] + constants.shift[j], slope);
}

/// With ADDS: d as it is stored, from the gradient of z.
__device__ __forceinline__ Item added_gradient(const Item& gradient, const Item& z) {
  float values[VALUES];
#pragma unroll
  for (int v = 0; v < VALUES; ++v) values[v] = activation_gradient_from_output(z[v], gradient[v]);
  return Item::of(values);
}

/// Adds COUNT items to the sums of this thread. With ADDS the gradients are of `z`, and the sums are of d before it is rounded.
template <int COUNT>
__device__ __forceinline__ void accumulate(const Operands (&operands)[COUNT], const Item* z, Sums (&mine)[STATISTICS], const Constants& constants,
                                     float slope) {
  constexpr int STEP = CHANNELS_LAST ? VALUES : 1;
#pragma unroll
  for (int j = 0; j < STATISTICS; ++j) {
    Sums part;
#pragma unroll
    for (int u = 0; u < COUNT; ++u)
#pragma unroll
      for (int v = j; v < VALUES; v += STEP) {
        float centered;
        const float d = activation_input_gradient(operands[u], ADDS ? z + u : nullptr, v, constants, slope, centered);
        part.gradient += d, part.product += d * centered;
      }
    merge(mine[j], 0.f, part, 0.f);
  }
}

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, 1)
    norm_backward(const Element* __restrict__ grad_z, const Element* __restrict__ x, const float* __restrict__ saved,
                  const Parameter* __restrict__ weight, const Parameter* __restrict__ bias, Element* __restrict__ grad_x,
                  Gradient* grad_weight, Gradient* grad_bias, float* partial, const Element* __restrict__ z,
                  Element* grad_added, const Shape s) {
  __shared__ Reduction<Sums> reduction;
  __shared__ float mean_gradients[WIDTH], mean_products[WIDTH];
  const Tile tile(s, STAGE == APPLY ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  const int t = threadIdx.x, width = tile.width();
  if constexpr (STAGE == APPLY) ptx::wait_for_previous_launch();
  Constants constants{};
  if (tile.inside) {
#pragma unroll
    for (int j = 0; j < STATISTICS; ++j) {
      constants.mean[j] = saved[tile.statistic + j], constants.scale[j] = saved[s.groups + tile.statistic + j];
      if (weight) constants.scale[j] *= load_as(weight[tile.parameter + j]);
      constants.shift[j] = bias ? load_as(bias[tile.parameter + j]) : 0.f;
    }
  }

  Sums tile_result;
  if constexpr (STAGE != APPLY) {
    Sums mine[STATISTICS];
    int i = tile.first, k = 0;
    for (; i + (UNROLL - 1) * tile.step < tile.end; i += UNROLL * tile.step, k += UNROLL) {
      Operands operands[UNROLL];
      Item outputs[ADDS ? UNROLL : 1];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        const long long at = tile.offset(s, i + u * tile.step);
        operands[u].x.load(x + at, true), operands[u].gradient.load(grad_z + at, true);
        if constexpr (ADDS) outputs[u].load(z + at, true);
      }
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        Item second = operands[u].gradient;
        if constexpr (ADDS) {
          second = added_gradient(operands[u].gradient, outputs[u]);
          second.write(grad_added + tile.offset(s, i + u * tile.step));
        }
        if (STAGE == FUSED && k + u < s.cached) store_cached(2 * (k + u), operands[u].x), store_cached(2 * (k + u) + 1, second);
      }
      accumulate(operands, outputs, mine, constants, s.slope);
    }
    if (i < tile.end) {
      Operands operands[UNROLL][1];
      Item outputs[ADDS ? UNROLL : 1];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        const int item = i + u * tile.step;
        const bool inside = item < tile.end;
        const long long at = inside ? tile.offset(s, item) : 0;
        operands[u][0].x.load(x + at, inside), operands[u][0].gradient.load(grad_z + at, inside);
        if constexpr (ADDS) outputs[u].load(z + at, inside);
      }
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        const int item = i + u * tile.step;
        if (item >= tile.end) break;
        Item second = operands[u][0].gradient;
        if constexpr (ADDS) {
          second = added_gradient(operands[u][0].gradient, outputs[u]);
          second.write(grad_added + tile.offset(s, item));
        }
        if (STAGE == FUSED && k + u < s.cached) store_cached(2 * (k + u), operands[u][0].x), store_cached(2 * (k + u) + 1, second);
        accumulate(operands[u], outputs + (ADDS ? u : 0), mine, constants, s.slope);
      }
    }
    reduction.reduce_threads(mine, 0.f, tile.lanes);
    tile_result = reduction.reduce_cluster(s, tile, 0.f);
    if constexpr (STAGE == REDUCE) {
      const int group = t < width ? tile.group(s, t) : -1;
      if (group >= 0 && tile.split % CLUSTER == 0)
        *reinterpret_cast<float2*>(partial + 2 * ((long long)(tile.split / CLUSTER) * s.groups + group)) =
            make_float2(tile_result.gradient, tile_result.product);
      leave_cluster();
      return;
    }
  } else if (s.partials) {
    tile_result = reduction.reduce_partials(s, tile, partial, 0.f);
  }

  if (t < width) {
    const int group = tile.group(s, t);
    if (group >= 0) {
      const float inverse = saved[s.groups + group], product = tile_result.product * inverse;
      mean_gradients[t] = s.trains ? tile_result.gradient / s.count : 0.f;
      mean_products[t] = s.trains ? product * inverse / s.count : 0.f;
      if (tile.split == 0) {
        if (grad_weight) grad_weight[group] = store_as<Gradient>(product);
        if (grad_bias) grad_bias[group] = store_as<Gradient>(tile_result.gradient);
      }
    }
  }
  __syncthreads();

  if (tile.inside && grad_x) {
    float mean_gradient[STATISTICS], mean_product[STATISTICS];
#pragma unroll
    for (int j = 0; j < STATISTICS; ++j) {
      const int at = CHANNELS_LAST ? tile.lane * VALUES + j : 0;
      mean_gradient[j] = mean_gradients[at], mean_product[j] = mean_products[at];
    }
    // Without sums no pass has read grad_z before this one.
    const bool added_is_stored = ADDS && (STAGE == FUSED || s.partials);
    for (int i = tile.first, k = 0; i < tile.end; i += UNROLL * tile.step, k += UNROLL) {
      Operands operands[UNROLL];
      Item outputs[ADDS ? UNROLL : 1];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        const int item = i + u * tile.step;
        if (STAGE == FUSED && k + u < s.cached) {
          if (item < tile.end) load_cached(2 * (k + u), operands[u].x), load_cached(2 * (k + u) + 1, operands[u].gradient);
        } else {
          const long long at = item < tile.end ? tile.offset(s, item) : 0;
          operands[u].x.load(x + at, item < tile.end);
          if (added_is_stored)
            operands[u].gradient.load(grad_added + at, item < tile.end);
          else
            operands[u].gradient.load(grad_z + at, item < tile.end);
          if constexpr (ADDS)
            if (!added_is_stored) outputs[u].load(z + at, item < tile.end);
        }
      }
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        const int item = i + u * tile.step;
        if (item >= tile.end) break;
        if constexpr (ADDS)
          if (!added_is_stored) {
            operands[u].gradient = added_gradient(operands[u].gradient, outputs[u]);
            operands[u].gradient.write(grad_added + tile.offset(s, item));
          }
        float values[VALUES];
#pragma unroll
        for (int v = 0; v < VALUES; ++v) {
          const int j = CHANNELS_LAST ? v : 0;
          float centered;
          const float d = activation_input_gradient(operands[u], nullptr, v, constants, s.slope, centered);
          values[v] = constants.scale[j] * (d - mean_gradient[j] - centered * mean_product[j]);
        }
        Item::store(grad_x + tile.offset(s, item), values);
      }
    }
  }
  leave_cluster();
}
