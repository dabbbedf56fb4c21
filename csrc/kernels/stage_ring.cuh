// The ring of stages of the kernels in which some warps fill and others multiply, and its barriers: addresses in shared
// memory. Included where STAGES, STAGE_WORDS, INPUT_WORDS and BARRIERS are known.
#pragma once

/// Where a warp is in the ring: the stage, and the parity of its phase.
struct Ring {
  u32 base;
  int stage = 0;
  u32 parity = 0;

  __device__ __forceinline__ explicit Ring(u32 base) : base(base) {}
  __device__ __forceinline__ u32 input() const { return base + stage * (STAGE_WORDS * 4); }
  __device__ __forceinline__ u32 weights() const { return input() + round_up(INPUT_WORDS, 4) * 4; }
  __device__ __forceinline__ u32 full() const { return base + BARRIERS + stage * 8; }
  __device__ __forceinline__ u32 empty() const { return base + BARRIERS + (STAGES + stage) * 8; }
  __device__ __forceinline__ u32 empty_before() const {
    return base + BARRIERS + (STAGES + (stage == 0 ? STAGES - 1 : stage - 1)) * 8;
  }
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};
