// What both ways of filling shared memory share: strides of the input, the copy of packed weights.
#pragma once

using ptx::u32;

constexpr long long CHANNEL_BYTES = (INPUT_CHANNELS_LAST ? 1LL : PIXELS) * ITEM;
constexpr long long CHUNK_BYTES = CHANNEL_BYTES * CHUNK_WORDS * CHANNELS_PER_WORD;
constexpr bool RAGGED_K = CI_GROUP % (CHUNK_WORDS * CHANNELS_PER_WORD) != 0;

/// The packed weights of one chunk are one contiguous run.
template <int CHUNK_WEIGHT_WORDS>
__device__ __forceinline__ void copy_weights(u32 to, const u32* from) {
  constexpr int VECTORS = CHUNK_WEIGHT_WORDS / 4;
#pragma unroll
  for (int i = 0; i < ceil_div(VECTORS, THREADS); ++i) {
    const int v = threadIdx.x + i * THREADS;
    if (VECTORS % THREADS == 0 || v < VECTORS) ptx::copy_async<16>(to + v * 16, from + v * 4);
  }
}

__device__ __forceinline__ void zero_shared(u32 from, int words) {
  const u32 zeros[4] = {0, 0, 0, 0};
  for (int i = threadIdx.x * 4; i < words; i += THREADS * 4) ptx::store_shared<4>(from + i * 4, zeros);
}
