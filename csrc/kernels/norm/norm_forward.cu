// Normalisation and the activation behind it:
//   z = activation((x - mean) / sqrt(variance + eps) * weight + bias [+ added, with ADDS])
// of each channel (BatchNorm) or of each channel of an image (InstanceNorm), by the batch's statistics or the running
// ones, which are updated. norm.cuh describes the tiles.
//
// STAGE  FUSED   one launch: a block or a cluster reads its tile once, keeps what fits in shared memory, reduces the
//                tile and writes it.
//        REDUCE  writes the statistics of each split, or cluster of splits, to `partial`: [partials][groups][2].
//        APPLY   every block merges the splits' statistics again, and normalises its own split. The blocks begin with
//                what the launch before read last, which the L2 still holds.
// Statistics are computed in float32: of the values that a thread has at once by two passes over registers, the rest
// is merged (norm_reduce.cuh). `saved`, where it is not null: [2][groups], means and 1 / sqrt(variance + eps).
#include "norm/norm_reduce.cuh"

/// Merges COUNT items into the moments of this thread, which had n values of each statistic before.
template <int COUNT>
__device__ __forceinline__ void accumulate(const Item (&items)[COUNT], Moments (&mine)[STATISTICS], float n) {
  constexpr int EACH = VALUES / STATISTICS * COUNT, STEP = CHANNELS_LAST ? VALUES : 1;
#pragma unroll
  for (int j = 0; j < STATISTICS; ++j) {
    Moments part;
#pragma unroll
    for (int u = 0; u < COUNT; ++u)
#pragma unroll
      for (int v = j; v < VALUES; v += STEP) part.mean += items[u][v];
    part.mean *= 1.f / EACH;
#pragma unroll
    for (int u = 0; u < COUNT; ++u)
#pragma unroll
      for (int v = j; v < VALUES; v += STEP) {
        const float centered = items[u][v] - part.mean;
        part.squares += centered * centered;
      }
    merge(mine[j], n, part, EACH);
  }
}

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, 1)
    norm_forward(const Element* __restrict__ x, Element* __restrict__ z, const Parameter* __restrict__ weight,
                 const Parameter* __restrict__ bias, Parameter* running_mean, Parameter* running_variance,
                 long long* batches, float* saved, float* partial, const Element* __restrict__ added, const Shape s) {
  __shared__ Reduction<Moments> reduction;
  __shared__ float means[WIDTH], scales[WIDTH];
  const Tile tile(s, STAGE == APPLY ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  const int t = threadIdx.x, width = tile.width();
  constexpr float VALUES_PER_ITEM = VALUES / STATISTICS;
  if constexpr (STAGE == APPLY) ptx::wait_for_previous_launch();

  Moments tile_result;
  if constexpr (STAGE != APPLY) {
    Moments mine[STATISTICS];
    float n = 0.f;
    int i = tile.first, k = 0;
    for (; i + (UNROLL - 1) * tile.step < tile.end; i += UNROLL * tile.step, k += UNROLL) {
      Item items[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) items[u].load(x + tile.offset(s, i + u * tile.step), true);
      if constexpr (STAGE == FUSED)
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
          if (k + u < s.cached) store_cached(k + u, items[u]);
      accumulate(items, mine, n);
      n += UNROLL * VALUES_PER_ITEM;
    }
    if (i < tile.end) {
      Item items[UNROLL][1];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        const int item = i + u * tile.step;
        items[u][0].load(x + (item < tile.end ? tile.offset(s, item) : 0), item < tile.end);
      }
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        if (i + u * tile.step >= tile.end) break;
        if (STAGE == FUSED && k + u < s.cached) store_cached(k + u, items[u][0]);
        accumulate(items[u], mine, n);
        n += VALUES_PER_ITEM;
      }
    }
    reduction.reduce_threads(mine, n, tile.lanes);
    tile_result = reduction.reduce_cluster(s, tile, VALUES_PER_ITEM);
    if constexpr (STAGE == REDUCE) {
      const int group = t < width ? tile.group(s, t) : -1;
      if (group >= 0 && tile.split % CLUSTER == 0)
        *reinterpret_cast<float2*>(partial + 2 * ((long long)(tile.split / CLUSTER) * s.groups + group)) =
            make_float2(tile_result.mean, tile_result.squares);
      leave_cluster();
      return;
    }
  } else if (s.trains) {
    tile_result = reduction.reduce_partials(s, tile, partial, VALUES_PER_ITEM);
  }

  if (t < width) {
    const int group = tile.group(s, t), channel = group % s.channels;
    if (group >= 0) {
      float mean = tile_result.mean, variance = tile_result.squares / s.count;
      if (!s.trains) mean = load_as(running_mean[channel]), variance = load_as(running_variance[channel]);
      const float inverse = __frsqrt_rn(variance + s.eps);
      means[t] = mean, scales[t] = weight ? inverse * load_as(weight[channel]) : inverse;
      if (tile.split == 0) {
        if (saved) saved[group] = mean, saved[s.groups + group] = inverse;
        if (s.trains && running_mean) {
          const float part = s.counts < 0 ? 1.f / static_cast<float>(*batches) : s.momentum;
          const float unbiased = tile_result.squares / (s.count - 1.f);
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
      Item items[UNROLL], added_items[ADDS ? UNROLL : 1];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        const int item = i + u * tile.step;
        if constexpr (ADDS) added_items[u].load(added + (item < tile.end ? tile.offset(s, item) : 0), item < tile.end);
        if (STAGE == FUSED && k + u < s.cached) {
          if (item < tile.end) load_cached(k + u, items[u]);
        } else {
          items[u].load(x + (item < tile.end ? tile.offset(s, item) : 0), item < tile.end);
        }
      }
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        const int item = i + u * tile.step;
        if (item >= tile.end) break;
        float values[VALUES];
#pragma unroll
        for (int v = 0; v < VALUES; ++v) {
          const int j = CHANNELS_LAST ? v : 0;
          float before = (items[u][v] - mean[j]) * scale[j] + shift[j];
          if constexpr (ADDS) before += added_items[u][v];
          values[v] = activate(before, s.slope);
        }
        Item::store(z + tile.offset(s, item), values);
      }
    }
  }
  leave_cluster();
}
