// The barriers of a ring of stages (common/stages.cuh), for the kernels of grad_weight whose operands are loaded by TMA.
#pragma once

/// Initialises the barriers of a ring: so many arrivals make a stage full, and so many empty. Calls also(ring) for each stage.
/// By one thread, before fence_barrier_init.
template <int STAGES, class Ring, class Also>
__device__ __forceinline__ void init_ring(Ring ring, u32 full_arrivals, u32 empty_arrivals, const Also& also) {
  for (ring.stage = 0; ring.stage < STAGES; ++ring.stage) {
    ptx::init_barrier(ring.full(), full_arrivals);
    ptx::init_barrier(ring.empty(), empty_arrivals);
    also(ring);
  }
}
template <int STAGES, class Ring>
__device__ __forceinline__ void init_ring(const Ring& ring, u32 full_arrivals, u32 empty_arrivals) {
  init_ring<STAGES>(ring, full_arrivals, empty_arrivals, [](const Ring&) {});
}
