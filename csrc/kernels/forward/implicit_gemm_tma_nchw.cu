// Transposed convolution, forward, NCHW, on Hopper's warpgroup multiply (sm_90a): forward/implicit_gemm_wgmma.cu with an input that the
// copy engine brings as it lies. Filling warps turn it, from one place in shared memory to another: the multiplier
// wants neighbouring channels of a pixel together, and any pixel to begin at.
//
// Brought, RAW_STAGES chunks ahead: [row][channel][pixel] of the tile with its halo. Turned: planes of 4 words,
// [k / 4][pixel][4], STAGES of them.
//
// Covers: float32 (TF32, rounded by the copy engine), float16, bfloat16; inputs with rows of 16-byte multiples (FLAT: one
// row for each image, which tiles divide), and with several groups also chunks that end where a group does; otherwise what
// forward/implicit_gemm_wgmma.cu does but NARROW.
#include "common/mma.cuh"
#include "common/wgmma.cuh"
#include "common/pipeline.cuh"
#include "common/tma.cuh"
#include "forward/implicit_gemm_taps.cuh"
#include "forward/implicit_gemm_layout.cuh"
#include "forward/implicit_gemm_copy.cuh"

constexpr int FILL_THREADS = 32 * FILL_WARPS;

#include "forward/implicit_gemm_store.cuh"
#include "forward/epilogue_warp.cuh"
#include "forward/epilogue_lines.cuh"
#include "common/static_for.cuh"
#include "forward/implicit_gemm_scheduler.cuh"
#include "forward/implicit_gemm_consumer.cuh"
#include "forward/implicit_gemm_tma_nchw_producer.cuh"

extern "C" __global__ void __launch_bounds__(THREADS + FILL_THREADS, BLOCKS_PER_MULTIPROCESSOR)
    forward_implicit_gemm_tma_nchw(const __grid_constant__ TensorMap input, const u32* __restrict__ packed, const __grid_constant__ Epilogue epilogue,
                   Out* __restrict__ output, const __grid_constant__ Sizes sizes) {
  extern __shared__ __align__(1024) u32 memory[];
  const u32 shared = ptx::keep_in_register(ptx::shared_address(memory));
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(input);
    Ring ring(shared);
    for (int s = 0; s < STAGES; ++s, ring.advance()) {
      // One arrival expects the weights.
      ptx::init_barrier(ring.full(), 1 + FILL_THREADS);
      ptx::init_barrier(ring.empty(), WARPS);
    }
    RawRing raw(shared);
    for (int s = 0; s < RAW_STAGES; ++s, raw.advance()) {
      ptx::init_barrier(raw.full(), 1);
      ptx::init_barrier(raw.empty(), FILL_THREADS);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();

  if (threadIdx.x >= THREADS) {
    if constexpr (MOVE_REGISTERS) ptx::shrink_registers<FILL_REGISTERS>();
    Filler(shared, packed, sizes).run(input);
  } else {
    if constexpr (MOVE_REGISTERS) ptx::grow_registers<MULTIPLY_REGISTERS>();
    multiply_and_store(shared, reinterpret_cast<char*>(memory), epilogue, output, sizes);
  }
}
