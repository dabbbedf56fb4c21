// Transposed convolution, forward, on Hopper's wgmma (sm_90a): the implicit GEMM of forward/implicit_gemm_mma.cu, where the
// tensor cores read both operands from shared memory.
//
//   M = 64 output channels for each warpgroup, or fewer of several rows (STACK): the packed weights
//       (forward/implicit_gemm_pack.cu)
//   N = WARP_ROWS rows of 8 positions, or 8 * WARP_COLS positions of one row (and with FLAT); one multiply for each column
//       of 8 positions, image and tap
//   K = input channels, in chunks of CHUNK_WORDS words, through a ring of STAGES stages
//
// Without a swizzle, 8 positions of one plane (forward/implicit_gemm_wgmma_producer.cuh) are 128 contiguous bytes wherever
// they begin, so that a tap's shift of the input is just another start address.
//
// Blocks are persistent: each computes one tile after another. The first THREADS threads are consumers, which multiply and
// store. The PRODUCER_THREADS threads behind them are producers, which load the input; some of them issue the bulk copies of
// the weights, too. Barriers in shared memory say which stages are full and which are empty, so that the chunks of the next
// tile are loaded while the outputs of this one are stored.
//
// Covers: float32 (TF32), float16, bfloat16; NCHW inputs (forward/implicit_gemm_tma.cu computes channels_last); any kernel,
// stride, padding, output padding, dilation, groups; any map (maps of fewer than 8 columns of positions waste some work).
// The input is 16-byte aligned. PARTIAL: as in forward/implicit_gemm_mma.cu.
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

/// A producer thread of one of the PRODUCER_GROUPS groups, which load the chunks alternately.
struct Producer {
  Ring ring;
  ChunkIterator chunks;
  InputLoader loader;
  WeightLoader weights;
  const Element* input;

  __device__ __forceinline__ Producer(u32 shared, const Element* input, const u32* packed, const Sizes& sizes)
      : ring(shared), chunks(sizes), weights(packed), input(input) {
    set_tile();
  }
  __device__ __forceinline__ void set_tile() {
    loader.set_tile(input, chunks.work.origin, chunks.work.group, chunks.work.first_chunk, chunks.sizes);
    weights.set_tile(chunks.work);
  }
  /// Goes to the next chunk.
  __device__ __forceinline__ void advance() {
    if (chunks.done()) return;
    ring.advance();
    loader.advance();
    weights.advance();
    if (chunks.next()) set_tile();
  }

  __device__ __forceinline__ void run() {
    const int thread = threadIdx.x - THREADS;
    for (int i = 0; i < thread / GROUP_THREADS; ++i) advance();
    // The first chunks of the input are loaded while the launch that packs the weights still runs.
    if (!chunks.done()) loader.load<0>();
    ptx::wait_for_previous_launch();
    while (!chunks.done()) {
      ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
      if (thread % GROUP_THREADS == 0) {
        ptx::arrive_expect_tx(ring.full(), weights.bytes);
        weights.copy(ring.weights(), ring.full());
      }
      static_for<0, PASSES>([&](auto pass) {
        constexpr int PASS = decltype(pass)::value;
        if (PASS > 0) loader.load<PASS>();
        loader.store<PASS>(ring.input());
      });
      ptx::fence_proxy_async();
      // Each thread arrives for itself, which is as fast as one thread for its warp, and which racecheck understands
      // (benchmarks/racecheck.cu).
      ptx::arrive(ring.full());
      for (int i = 0; i < PRODUCER_GROUPS; ++i) advance();
      if (!chunks.done()) loader.load<0>();
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS + PRODUCER_THREADS, BLOCKS_PER_MULTIPROCESSOR)
    forward_implicit_gemm_wgmma(const Element* __restrict__ input, const u32* __restrict__ packed, const __grid_constant__ Epilogue epilogue,
                  Out* __restrict__ output, const __grid_constant__ Sizes sizes) {
  extern __shared__ __align__(128) u32 memory[];
  const u32 shared = ptx::keep_in_register(ptx::shared_address(memory));
  if (threadIdx.x == 0) {
    Ring ring(shared);
    for (int s = 0; s < STAGES; ++s, ring.advance()) {
      // One of the arrivals announces the bytes of the weights.
      ptx::init_barrier(ring.full(), 1 + GROUP_THREADS);
      ptx::init_barrier(ring.empty(), WARPS);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();

  if (threadIdx.x >= THREADS) {
    if constexpr (MOVE_REGISTERS) ptx::shrink_registers<PRODUCER_REGISTERS>();
    Producer(shared, input, packed, sizes).run();
  } else {
    if constexpr (MOVE_REGISTERS) ptx::grow_registers<CONSUMER_REGISTERS>();
    run_consumer(shared, reinterpret_cast<char*>(memory), epilogue, output, sizes);
  }
}
