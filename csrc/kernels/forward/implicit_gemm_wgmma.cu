// Transposed convolution, forward, on Hopper's warpgroup multiply (sm_90a): the implicit GEMM of forward/implicit_gemm_mma.cu
// with both operands read from shared memory by the tensor cores.
//
//   M = 64 output channels a warpgroup, or fewer of several rows (STACK): the packed weights (forward/implicit_gemm_pack.cu)
//   N = WARP_ROWS rows of 8 cells, or of one row (and with FLAT) 8 * WARP_COLS cells; one multiply for each column of 8
//       cells, image and tap
//   K = input channels, by chunks of CHUNK_WORDS words through a ring of STAGES stages
//
// Without swizzle, 8 cells of one plane (forward/implicit_gemm_wgmma_producer.cuh) are 128 bytes in one piece wherever they begin, so
// a tap's shift of the input is only another start address.
//
// A block works on one tile after another. Its first THREADS threads multiply and store, the FILL_THREADS after them
// bring the input, and some of those ask for the weights (one run, by bulk copy); barriers in shared memory say which
// stages are full and which empty, so that the next tile's chunks come while this one's outputs leave.
//
// Covers: float32 (TF32), float16, bfloat16; NCHW inputs (forward/implicit_gemm_tma.cu computes channels_last); any kernel, stride,
// padding, output padding, dilation, groups; any map (those below 8 cells wide waste some).
// Input: 16-byte aligned. PARTIAL: as in forward/implicit_gemm_mma.cu.
#include "common/mma.cuh"
#include "common/wgmma.cuh"
#include "common/pipeline.cuh"
#include "forward/implicit_gemm_taps.cuh"
#include "forward/implicit_gemm_layout.cuh"
#include "forward/implicit_gemm_copy.cuh"
#include "forward/implicit_gemm_wgmma_producer.cuh"
#include "forward/implicit_gemm_store.cuh"
#include "forward/epilogue_warp.cuh"
#include "forward/epilogue_lines.cuh"
#include "common/static_for.cuh"
#include "forward/implicit_gemm_scheduler.cuh"
#include "forward/implicit_gemm_consumer.cuh"

/// A thread of one of the FILL_GROUPS groups, which take the chunks in turn.
struct Filler {
  Ring ring;
  Walk walk;
  InputFill fill;
  WeightFill weights;
  const Element* input;

  __device__ __forceinline__ Filler(u32 shared, const Element* input, const u32* packed, const Sizes& sizes)
      : ring(shared), walk(sizes), weights(packed), input(input) {
    aim();
  }
  __device__ __forceinline__ void aim() {
    fill.aim(input, walk.work.origin, walk.work.group, walk.work.first_chunk, walk.sizes);
    weights.aim(walk.work);
  }
  /// To the chunk after this one.
  __device__ __forceinline__ void advance() {
    if (walk.done()) return;
    ring.advance();
    fill.advance();
    weights.advance();
    if (walk.next()) aim();
  }

  __device__ __forceinline__ void run() {
    const int thread = threadIdx.x - THREADS;
    for (int i = 0; i < thread / GROUP_THREADS; ++i) advance();
    // The first chunks of input are asked for before the launch that packs the weights is over.
    if (!walk.done()) fill.load<0>();
    ptx::wait_for_previous_launch();
    while (!walk.done()) {
      ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
      if (thread % GROUP_THREADS == 0) {
        ptx::arrive_expect_tx(ring.full(), weights.bytes);
        weights.copy(ring.weights(), ring.full());
      }
      static_for<0, PASSES>([&](auto pass) {
        constexpr int PASS = decltype(pass)::value;
        if (PASS > 0) fill.load<PASS>();
        fill.store<PASS>(ring.input());
      });
      ptx::fence_proxy_async();
      // Each thread for itself: as fast as one for its warp, and racecheck follows it (benchmarks/racecheck.cu).
      ptx::arrive(ring.full());
      for (int i = 0; i < FILL_GROUPS; ++i) advance();
      if (!walk.done()) fill.load<0>();
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS + FILL_THREADS, BLOCKS_PER_MULTIPROCESSOR)
    forward_implicit_gemm_wgmma(const Element* __restrict__ input, const u32* __restrict__ packed, const __grid_constant__ Epilogue epilogue,
                  Out* __restrict__ output, const __grid_constant__ Sizes sizes) {
  extern __shared__ __align__(128) u32 memory[];
  const u32 shared = ptx::keep_in_register(ptx::shared_address(memory));
  if (threadIdx.x == 0) {
    Ring ring(shared);
    for (int s = 0; s < STAGES; ++s, ring.advance()) {
      // One arrival expects the weights.
      ptx::init_barrier(ring.full(), 1 + GROUP_THREADS);
      ptx::init_barrier(ring.empty(), WARPS);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();

  if (threadIdx.x >= THREADS) {
    if constexpr (MOVE_REGISTERS) ptx::shrink_registers<FILL_REGISTERS>();
    Filler(shared, input, packed, sizes).run();
  } else {
    if constexpr (MOVE_REGISTERS) ptx::grow_registers<MULTIPLY_REGISTERS>();
    multiply_and_store(shared, reinterpret_cast<char*>(memory), epilogue, output, sizes);
  }
}
