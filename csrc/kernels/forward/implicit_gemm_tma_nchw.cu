// Transposed convolution, forward, NCHW, on Hopper's wgmma (sm_90a): forward/implicit_gemm_wgmma.cu with an input that the
// copy engine loads in its own layout. Producer warps transpose it within shared memory, because the multiplier needs
// neighbouring channels of a pixel together, and has to begin at any pixel.
//
// The copy engine loads [row][channel][pixel] of the tile with its halo, NCHW_STAGES chunks ahead. The transposed chunks are
// planes of 4 words, [k / 4][pixel][4], in STAGES stages.
//
// Covers: float32 (TF32, rounded by the copy engine), float16, bfloat16; inputs whose rows are multiples of 16 bytes (FLAT:
// each image is one row, which tiles divide); with several groups, chunks that end where a group ends; otherwise all that
// forward/implicit_gemm_wgmma.cu covers except NARROW.
#include "common/mma.cuh"
#include "common/wgmma.cuh"
#include "common/pipeline.cuh"
#include "common/tma.cuh"
#include "forward/implicit_gemm_taps.cuh"
#include "forward/implicit_gemm_layout.cuh"
#include "forward/implicit_gemm_copy.cuh"

constexpr int PRODUCER_THREADS = 32 * PRODUCER_WARPS;

#include "forward/implicit_gemm_store.cuh"
#include "forward/epilogue_warp.cuh"
#include "forward/epilogue_lines.cuh"
#include "common/static_for.cuh"
#include "forward/implicit_gemm_scheduler.cuh"
#include "forward/implicit_gemm_consumer.cuh"
#include "forward/implicit_gemm_tma_nchw_producer.cuh"

extern "C" __global__ void __launch_bounds__(THREADS + PRODUCER_THREADS, BLOCKS_PER_MULTIPROCESSOR)
    forward_implicit_gemm_tma_nchw(const __grid_constant__ TensorMap input, const u32* __restrict__ packed, const __grid_constant__ Epilogue epilogue,
                   Out* __restrict__ output, const __grid_constant__ Sizes sizes) {
  extern __shared__ __align__(1024) u32 memory[];
  const u32 shared = ptx::keep_in_register(ptx::shared_address(memory));
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(input);
    Ring ring(shared);
    for (int s = 0; s < STAGES; ++s, ring.advance()) {
      // One of the arrivals announces the bytes of the weights.
      ptx::init_barrier(ring.full(), 1 + PRODUCER_THREADS);
      ptx::init_barrier(ring.empty(), WARPS);
    }
    NchwRing nchw(shared);
    for (int s = 0; s < NCHW_STAGES; ++s, nchw.advance()) {
      ptx::init_barrier(nchw.full(), 1);
      ptx::init_barrier(nchw.empty(), PRODUCER_THREADS);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();

  if (threadIdx.x >= THREADS) {
    if constexpr (MOVE_REGISTERS) ptx::shrink_registers<PRODUCER_REGISTERS>();
    Producer(shared, packed, sizes).run(input);
  } else {
    if constexpr (MOVE_REGISTERS) ptx::grow_registers<CONSUMER_REGISTERS>();
    run_consumer(shared, reinterpret_cast<char*>(memory), epilogue, output, sizes);
  }
}
