// Shared by the producers of forward/implicit_gemm_mma.cu, forward/implicit_gemm_wgmma.cu and the kernels of grad_input/:
// strides of the input, and the copy of packed weights.
#pragma once

using ptx::u32;

/// Bytes from one channel of an image to the next; `supports` of the planner ensures that they fit 32 bits.
__device__ __forceinline__ int channel_bytes(const Sizes& sizes) { return INPUT_CHANNELS_LAST ? ITEM : sizes.pixels() * ITEM; }
constexpr int CHUNK_INPUT_CHANNELS = CHUNK_WORDS * CHANNELS_PER_WORD;
constexpr bool RAGGED_K = CI_GROUP % (CHUNK_WORDS * CHANNELS_PER_WORD) != 0;

/// Copies the packed weights of one chunk, which are contiguous. With PINNED the addresses are one register each and
/// constants: where chunks lie in several places, the compiler otherwise keeps every address in registers of its own.
template <int CHUNK_WEIGHT_WORDS, bool PINNED = false>
__device__ __forceinline__ void copy_weights(u32 to, const u32* from) {
  constexpr int VECTORS = CHUNK_WEIGHT_WORDS / 4;
  if constexpr (PINNED) {
    to = ptx::keep_in_register(to + threadIdx.x * 16);
    from = ptx::keep_in_register(from + threadIdx.x * 4);
  }
#pragma unroll
  for (int i = 0; i < ceil_div(VECTORS, THREADS); ++i) {
    const int v = threadIdx.x + i * THREADS, offset = PINNED ? i * THREADS : v;
    if (VECTORS % THREADS == 0 || v < VECTORS) ptx::copy_async<16>(to + offset * 16, from + offset * 4);
  }
}

/// Writes zeros to WORDS words of shared memory.
template <int WORDS>
__device__ __forceinline__ void zero_shared(u32 to) {
  const u32 zeros[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < ceil_div(WORDS / 4, THREADS); ++i) {
    const int v = threadIdx.x + i * THREADS;
    if (WORDS / 4 % THREADS == 0 || v < WORDS / 4) ptx::store_shared<4>(to + v * 16, zeros);
  }
}
