// The stores of grad_input/im2col.cu: a work tile of accumulators to grad_input in NCHW or channels_last.
#pragma once

#include "common/tile_index.cuh"

/// Stores the first `count` of N neighbouring channels, which come in pairs.
template <int N>
__device__ __forceinline__ void store_channels(Out* to, const float (&values)[N], int count) {
  if (OUT_CHANNELS % N == 0 && CHANNELS_GROUP % N == 0) {
    PackOf<Out, N> pack;
#pragma unroll
    for (int i = 0; i < N; ++i) pack.elements[i] = store_as<Out>(values[i]);
    if (count > 0) *reinterpret_cast<PackOf<Out, N>*>(to) = pack;
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (i < count) to[i] = store_as<Out>(values[i]);
  }
}

/// Stores a pixel of grad_input, of which this lane has channels 2t and 2t + 1 of every eight in `values`; `count`: of channels
/// that there are. In 16 bits lanes exchange pairs of two eights, so that together they store whole sectors.
__device__ __forceinline__ void store_pixel(Out* to, const float* values, bool exists, int count) {
  constexpr bool EXCHANGES = sizeof(Out) == 2;
  const int t = threadIdx.x % 4;
  int c = 0;
#pragma unroll
  for (; EXCHANGES && c + 16 <= BLOCK_CHANNELS; c += 16) {
    const float* own = values + c / 2;
    const bool odd = t % 2;
    float given[2], taken[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) given[i] = odd ? own[i] : own[4 + i];
#pragma unroll
    for (int i = 0; i < 2; ++i) taken[i] = __shfl_xor_sync(~0u, given[i], 1);
    const float four[4] = {odd ? taken[0] : own[0], odd ? taken[1] : own[1], odd ? own[4] : taken[0], odd ? own[5] : taken[1]};
    const int channel = c + (odd ? 8 + 2 * (t - 1) : 2 * t);
    if (exists) store_channels(to + channel, four, count - channel);
  }
#pragma unroll
  for (; c < BLOCK_CHANNELS; c += 8) {
    const float pair[2] = {values[c / 2], values[c / 2 + 1]};
    if (exists) store_channels(to + c + 2 * t, pair, count - c - 2 * t);
  }
}

/// Stores a work tile: accumulators.of[m][c / 2 + 2 * half + i] of lane 4g + t belongs to position tile_position(m, half) and
/// channel c + 2t + i. IN_PAIRS: rows of grad_input have an even number of columns, so that pairs of positions are neighbours
/// in memory.
template <bool IN_PAIRS>
__device__ __forceinline__ void store(const Accumulators& accumulators, Out* output, const Work& work, const Sizes& sizes,
                                      const Im2colTileShape& shape) {
  const int channel = work.block * BLOCK_CHANNELS + threadIdx.x % 4 * 2;
  const long long out_pixels = sizes.out_pixels();
#pragma unroll
  for (int m = 0; m < M_TILES; ++m)
#pragma unroll
    for (int half = 0; half < (IN_PAIRS ? 1 : 2); ++half) {
      const TilePosition at(tile_position(m, half, IN_PAIRS || shape.paired), shape);
      const int col = work.col + at.col, row = work.row + at.row, image = work.image + at.image;
      const bool exists = at.image < shape.images && col < sizes.out_width && row < sizes.out_height && image < sizes.batch;
      const int pixel = row * sizes.out_width + col;
      if constexpr (OUTPUT_CHANNELS_LAST) {
        const int first = work.block * BLOCK_CHANNELS;
        Out* to = output + (image * out_pixels + pixel) * OUT_CHANNELS + first;
        store_pixel(to, accumulators.of[m] + half * 2, exists, CHANNELS_GROUP - first);
        continue;
      }
      const long long plane = static_cast<long long>(image) * OUT_CHANNELS + work.group * CHANNELS_GROUP + channel;
      Out* to = output + plane * out_pixels + pixel;
#pragma unroll
      for (int c = 0; c < BLOCK_CHANNELS; c += 8)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (!exists || channel + c + i >= CHANNELS_GROUP) continue;
          Out* there = to + (c + i) * out_pixels;
          const float* value = accumulators.of[m] + c / 2 + half * 2 + i;
          if constexpr (!IN_PAIRS) {
            *there = store_as<Out>(value[0]);
          } else if constexpr (sizeof(Out) == 4) {
            *reinterpret_cast<float2*>(there) = make_float2(value[0], value[2]);
          } else {
            *reinterpret_cast<u32*>(there) = ptx::pack_pair<PRECISION>(value[0], value[2]);
          }
        }
    }
}
