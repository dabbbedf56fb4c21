// Normalisation and the activation behind it:
//   z = activation((x - mean) / sqrt(variance + eps) * weight + bias [+ added, with ADDS])
// of each channel (BatchNorm) or of each channel of an image (InstanceNorm), by the batch's statistics or the running ones,
// which are brought up to date. norm.cuh says what lies where.
//
// STAGE  TOGETHER  one launch: a block or a cluster reads its tile once, keeps it in shared memory as far as that goes,
//                  reduces it and writes it.
//        REDUCE    the statistics of each slice, or cluster of slices, to `partial`: [partials][groups][2].
//        APPLY     every block puts the slices' statistics together once more, and normalises its own slice. The blocks
//                  begin with what the launch before read last and the L2 still has.
// Statistics are computed in float32: of as many values as a thread has at once by two passes over registers, the rest is
// merged (norm_reduce.cuh). `saved`, where it is wanted: [2][groups], means and 1 / sqrt(variance + eps).
#include "norm/norm_reduce.cuh"

/// The moments of COUNT items of this thread, which had n values of each statistic before.
template <int COUNT>
__device__ __forceinline__ void take(const Item (&items)[COUNT], Moments (&mine)[STATISTICS], float n) {
  constexpr int EACH = VALUES / STATISTICS * COUNT, STEP = CHANNELS_LAST ? VALUES : 1;
#pragma unroll
  for (int j = 0; j < STATISTICS; ++j) {
    Moments some;
#pragma unroll
    for (int u = 0; u < COUNT; ++u)
#pragma unroll
      for (int v = j; v < VALUES; v += STEP) some.mean += items[u][v];
    some.mean *= 1.f / EACH;
#pragma unroll
    for (int u = 0; u < COUNT; ++u)
#pragma unroll
      for (int v = j; v < VALUES; v += STEP) {
        const float off = items[u][v] - some.mean;
        some.squares += off * off;
      }
    merge(mine[j], n, some, EACH);
  }
}

extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, 1)
    norm_forward(const Element* __restrict__ x, Element* __restrict__ z, const Parameter* __restrict__ weight,
                 const Parameter* __restrict__ bias, Parameter* running_mean, Parameter* running_variance,
                 long long* batches, float* saved, float* partial, const Element* __restrict__ added, const Shape s) {
  __shared__ Reduction<Moments> reduction;
  __shared__ float means[WIDTH], scales[WIDTH];
  const Tile tile(s, STAGE == APPLY ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  const int t = threadIdx.x, width = tile.width();
  constexpr float OF_ITEM = VALUES / STATISTICS;
  if constexpr (STAGE == APPLY) ptx::wait_for_previous_launch();

  Moments of_tile;
  if constexpr (STAGE != APPLY) {
    Moments mine[STATISTICS];
    float n = 0.f;
    int i = tile.first, k = 0;
    for (; i + (UNROLL - 1) * tile.step < tile.end; i += UNROLL * tile.step, k += UNROLL) {
      Item items[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) items[u].load(x + tile.offset(s, i + u * tile.step), true);
      if constexpr (STAGE == TOGETHER)
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
          if (k + u < s.cached) keep(k + u, items[u]);
      take(items, mine, n);
      n += UNROLL * OF_ITEM;
    }
    for (; i < tile.end; i += tile.step, ++k) {
      Item items[1];
      items[0].load(x + tile.offset(s, i), true);
      if (STAGE == TOGETHER && k < s.cached) keep(k, items[0]);
      take(items, mine, n);
      n += OF_ITEM;
    }
    reduction.of_threads(mine, n, tile.lanes);
    of_tile = reduction.of_cluster(s, tile, OF_ITEM);
    if constexpr (STAGE == REDUCE) {
      const int group = t < width ? tile.group(s, t) : -1;
      if (group >= 0 && tile.slice % CLUSTER == 0)
        *reinterpret_cast<float2*>(partial + 2 * ((long long)(tile.slice / CLUSTER) * s.groups + group)) =
            make_float2(of_tile.mean, of_tile.squares);
      leave_cluster();
      return;
    }
  } else if (s.trains) {
    of_tile = reduction.of_partials(s, tile, partial, OF_ITEM);
  }

  if (t < width) {
    const int group = tile.group(s, t), channel = group % s.channels;
    if (group >= 0) {
      float mean = of_tile.mean, variance = of_tile.squares / s.count;
      if (!s.trains) mean = load_as(running_mean[channel]), variance = load_as(running_variance[channel]);
      const float inverse = __frsqrt_rn(variance + s.eps);
      means[t] = mean, scales[t] = weight ? inverse * load_as(weight[channel]) : inverse;
      if (tile.slice == 0) {
        if (saved) saved[group] = mean, saved[s.groups + group] = inverse;
        if (s.trains && running_mean) {
          const float part = s.counts < 0 ? 1.f / static_cast<float>(*batches) : s.momentum;
          const float unbiased = of_tile.squares / (s.count - 1.f);
          running_mean[channel] = store_as<Parameter>((1.f - part) * load_as(running_mean[channel]) + part * mean);
          running_variance[channel] = store_as<Parameter>((1.f - part) * load_as(running_variance[channel]) + part * unbiased);
        }
        if (s.counts > 0 && group == 0) *batches += 1;
      }
    }
  }
  __syncthreads();

  if (tile.inside) {
    float mean[STATISTICS], scale[STATISTICS], shift[STATISTICS];
#pragma unroll
    for (int j = 0; j < STATISTICS; ++j) {
      const int at = CHANNELS_LAST ? tile.lane * VALUES + j : 0;
      mean[j] = means[at], scale[j] = scales[at], shift[j] = bias ? load_as(bias[tile.parameter + j]) : 0.f;
    }
    for (int i = tile.first, k = 0; i < tile.end; i += UNROLL * tile.step, k += UNROLL) {
      Item items[UNROLL], others[ADDS ? UNROLL : 1];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        const int one = i + u * tile.step;
        if constexpr (ADDS) others[u].load(added + (one < tile.end ? tile.offset(s, one) : 0), one < tile.end);
        if (STAGE == TOGETHER && k + u < s.cached) {
          if (one < tile.end) recall(k + u, items[u]);
        } else {
          items[u].load(x + (one < tile.end ? tile.offset(s, one) : 0), one < tile.end);
        }
      }
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        const int one = i + u * tile.step;
        if (one >= tile.end) break;
        float values[VALUES];
#pragma unroll
        for (int v = 0; v < VALUES; ++v) {
          const int j = CHANNELS_LAST ? v : 0;
          float before = (items[u][v] - mean[j]) * scale[j] + shift[j];
          if constexpr (ADDS) before += others[u][v];
          values[v] = activate(before, s.slope);
        }
        Item::store(z + tile.offset(s, one), values);
      }
    }
  }
  leave_cluster();
}
