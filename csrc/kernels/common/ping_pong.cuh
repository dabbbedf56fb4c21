// The work tiles of a persistent block, and consumers (some of its warps) that take them alternately (ping-pong): while
// one stores what it multiplied, the other multiplies. Both use the same rings of stages, so each skips the stages of the
// other's tiles.
#pragma once

/// Calls body(index) for each work tile of this block, or, for one of several consumers, for each of its own.
template <class Body>
__device__ __forceinline__ void for_each_work_tile(int tiles, const Body& body, int consumer = 0, int consumers = 1) {
  for (int index = blockIdx.x + consumer * gridDim.x; index < tiles; index += gridDim.x * consumers) body(index);
}

/// The order of the consumers. Each may wait for its stages only when it is its turn: the parity of a barrier tells a phase
/// from the next one, but not from the one after. There is one barrier for each consumer, in shared memory.
template <int CONSUMERS>
struct ConsumerOrder {
  ptx::u32 mine, theirs, parity;

  /// The first turn of the first consumer needs no signal.
  __device__ __forceinline__ ConsumerOrder(ptx::u32 barriers, int consumer)
      : mine(barriers + consumer * 8), theirs(barriers + (CONSUMERS - 1 - consumer) * 8), parity(consumer == 0) {}
  __device__ __forceinline__ static void init_barriers(ptx::u32 barriers, int warps) {
    for (int consumer = 0; consumer < CONSUMERS; ++consumer) ptx::init_barrier(barriers + consumer * 8, warps);
  }
  __device__ __forceinline__ void wait() {
    if constexpr (CONSUMERS > 1) ptx::wait_for_phase(mine, parity);
    parity ^= 1;
  }
  /// Lets the other consumer go on. Called by every warp.
  __device__ __forceinline__ void signal_next() const {
    if (CONSUMERS > 1 && threadIdx.x % 32 == 0) ptx::arrive(theirs);
  }
};
