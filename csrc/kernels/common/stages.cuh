// A ring of stages in shared memory that some warps fill and others multiply, and its barriers: addresses.
#pragma once

#include "common/mma.cuh"

/// Where a warp is in the ring: the stage, and the parity of its phase. Stages begin FIRST bytes after the base, PITCH
/// bytes apart; at BARRIERS lie first those that say that a stage is full, then those that say that it is empty.
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
  /// Past so many stages that are somebody else's.
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
