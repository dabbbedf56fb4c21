// The addresses of a ring of stages in shared memory, which producer warps fill and consumer warps multiply, and of its
// barriers.
#pragma once

#include "common/mma.cuh"
#include "common/pipeline.cuh"

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
  /// Initialises the barriers: so many arrivals make a stage full, and so many empty. By one thread, before
  /// fence_barrier_init.
  __device__ __forceinline__ void init(ptx::u32 full_arrivals, ptx::u32 empty_arrivals) const {
    for (StageRing each = *this; each.stage < STAGES; ++each.stage) {
      ptx::init_barrier(each.full(), full_arrivals);
      ptx::init_barrier(each.empty(), empty_arrivals);
    }
  }
};

/// The same where the launch says how many stages there are, at most MAX_STAGES, and how many bytes they lie apart. At
/// `barriers` lie the `full` barriers, then, MAX_STAGES barriers further on, the `empty` ones.
template <int MAX_STAGES>
struct LaunchRing {
  ptx::u32 barriers, stages_begin;
  int stages, pitch;
  int stage = 0;
  ptx::u32 parity = 0;

  __device__ __forceinline__ LaunchRing(ptx::u32 barriers, ptx::u32 stages_begin, int stages, int pitch)
      : barriers(barriers), stages_begin(stages_begin), stages(stages), pitch(pitch) {}
  __device__ __forceinline__ ptx::u32 data() const { return stages_begin + stage * pitch; }
  __device__ __forceinline__ ptx::u32 full() const { return barriers + stage * 8; }
  __device__ __forceinline__ ptx::u32 empty() const { return barriers + (MAX_STAGES + stage) * 8; }
  __device__ __forceinline__ ptx::u32 empty_before() const {
    return barriers + (MAX_STAGES + (stage == 0 ? stages : stage) - 1) * 8;
  }
  __device__ __forceinline__ void advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  /// As above.
  __device__ __forceinline__ void init(ptx::u32 full_arrivals, ptx::u32 empty_arrivals) const {
    for (LaunchRing each = *this; each.stage < stages; ++each.stage) {
      ptx::init_barrier(each.full(), full_arrivals);
      ptx::init_barrier(each.empty(), empty_arrivals);
    }
  }
};
