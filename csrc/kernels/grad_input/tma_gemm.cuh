// What the kernels share that load both operands of an implicit GEMM through TMA (grad_input/implicit_gemm_tma.cu and
// grad_input/im2col.cu): accumulators, work tiles, and the barriers of the rings.
#pragma once

#include "common/integers.cuh"
#include "common/mma.cuh"
#include "common/wgmma.cuh"
#include "common/pipeline.cuh"
#include "common/tma.cuh"
#include "common/stages.cuh"
#include "common/sizes.cuh"

using ptx::u32;
using ptx::u64;

/// Bytes of a swizzled row of an operand.
constexpr int ROW = 128;
constexpr int K_GROUP = IN_CHANNELS / GROUPS, CHANNELS_GROUP = OUT_CHANNELS / GROUPS;
constexpr int M_BLOCKS = ceil_div(CHANNELS_GROUP, BLOCK_CHANNELS);
/// Bytes of a stage of the weights.
constexpr int WEIGHT_BYTES = BLOCK_CHANNELS * ROW;

/// The accumulators of a thread: M_TILES multiplies of 64 positions by BLOCK_CHANNELS channels.
struct Accumulators {
  float of[M_TILES][BLOCK_CHANNELS / 2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int i = 0; i < BLOCK_CHANNELS / 2; ++i) of[m][i] = 0.f;
  }
  /// Waits for the last multiplies. Without the empty instructions the compiler reads the registers before they are written.
  __device__ __forceinline__ void wait() {
    ptx::wait_wgmma<0>();
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int i = 0; i < BLOCK_CHANNELS / 2; ++i) asm volatile("" : "+f"(of[m][i]));
  }
};

/// Returns how many work tiles all blocks have together.
__device__ __forceinline__ int work_tiles(const Sizes& sizes) {
  return sizes.tiles * (GROUPS * M_BLOCKS) * (PARTIAL ? static_cast<int>(sizes.splits.value) : 1);
}

/// Returns where a split begins in an output of `PARTIAL` sums.
__device__ __forceinline__ long long split_offset(int split, const Sizes& sizes) {
  return static_cast<long long>(split) * sizes.batch * OUT_CHANNELS * sizes.out_pixels();
}

/// Signals that this warp no longer reads a stage.
__device__ __forceinline__ void release(u32 barrier, bool wanted = true) {
  if (wanted && threadIdx.x % 32 == 0) ptx::arrive(barrier);
}

/// Sets up the barriers of a ring: one producer loads a stage, and `consumer_warps` warps read it.
template <int STAGES, class Ring>
__device__ __forceinline__ void set_up_ring(Ring ring, int consumer_warps) {
  for (int s = 0; s < STAGES; ++s, ring.advance()) {
    ptx::init_barrier(ring.full(), 1);
    ptx::init_barrier(ring.empty(), consumer_warps);
  }
}
