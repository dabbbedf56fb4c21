// The addresses of a ring of stages in shared memory, which producer warps fill and consumer warps multiply, and of its
// barriers.
#pragma once

#include "common/mma.cuh"

/// The state of a warp in the ring: its stage, and the parity of the phase. Stages begin FIRST bytes after the base, PITCH
/// bytes apart. At BARRIERS lie the `full` barriers of all stages, then the `empty` barriers.
template <int STAGES, int FIRST, int PITCH, int BARRIERS>
struct StageRing {
  ptx::u32 base;
  int stage = 0;
  ptx::u32 parity = 0;

  __device__ __forceinline__ explicit StageRing(ptx::u32 base) : base(base) {}
  __device__ __forceinline__ ptx::u32 data() const { return base + FIRST + stage * PITCH; }
  __device__ __forceinline__ ptx::u32 full() const { return base + BARRIERS + stage * 8; }
  __device__ __forceinline__ ptx::u32 empty() const { return base + BARRIERS + (STAGES + stage) * 8; }
  __device__ __forceinline__ ptx::u32 empty_before() const {
    return base + BARRIERS + (STAGES + (stage == 0 ? STAGES - 1 : stage - 1)) * 8;
  }
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
  /// Skips COUNT stages, which belong to another warp.
  template <int COUNT>
  __device__ __forceinline__ void skip() {
    stage += COUNT % STAGES;
    parity ^= COUNT / STAGES % 2;
    if (stage >= STAGES) {
      stage -= STAGES;
      parity ^= 1;
    }
  }
};
