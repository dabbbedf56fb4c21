// Transposed convolution, forward, on Hopper's wgmma (sm_90a), of channels_last inputs (outputs in either layout):
// forward/implicit_gemm_wgmma.cu with an input that the copy engine (TMA) loads, as rows [pixel][CHUNK_WORDS words] with a
// swizzle (common/tma.cuh). A tap's shift by one pixel is a start address one row further on. One thread issues all loads, so
// that the consumers have nearly all registers.
//
// The weights are packed, those of a chunk contiguous. With TMA_WEIGHTS (16 bits, channels_last) the copy engine loads them in
// their own layout, rows of 64 output channels, which the multiplier reads as an M-major operand: nothing is packed. With
// RESIDENT_WEIGHTS all weights stay in shared memory while a block computes its tiles.
//
// NARROW maps are loaded once for each horizontal shift, [shift][image][row][column], so that the positions of an image are
// neighbours.
//
// SHAPED (strides above 1): the shape of a tile is an argument (kernels/forward/implicit_gemm_shape.py).
// A tile is a part of a map, or dense: so many positions in a row, wherever they begin. The pixels that dense positions read
// are a row, too, which the copy engine loads in im2col mode. A row of the map has a place for each pixel that is read, those
// outside of the input shared by the end of a row and the beginning of the next; the last places of a row are no positions.
//
// NHWC_COPY: the input is a copy that the launch before this one makes of an NCHW input (common/nchw_to_nhwc.cu).
//
// PIXEL_MAJOR (16 bits, FLAT): the input is NCHW, loaded in its own layout, [channel][64 pixels]; the multiplier reads it as a
// pixel-major operand.
//
// STAGGER (stride 1): the second warpgroup begins each tile when the first has multiplied STAGGER taps of it. The two then
// alternate tap by tap, and one multiplies while the other stores.
//
// Covers: float32 (TF32, rounded by the copy engine), float16, bfloat16; channels_last, where the channels of a group are a
// multiple of 16 bytes; any kernel, stride, padding, output padding, dilation, groups; any map (maps of 5 to 7 columns of
// positions waste some work). The input is 16-byte aligned. PARTIAL: as in forward/implicit_gemm_mma.cu.
#include "common/mma.cuh"
#include "common/wgmma.cuh"
#include "common/pipeline.cuh"
#include "common/tma.cuh"
#include "forward/implicit_gemm_taps.cuh"
#include "forward/implicit_gemm_layout.cuh"
#include "forward/implicit_gemm_copy.cuh"
#include "forward/implicit_gemm_tma_producer.cuh"
#include "forward/implicit_gemm_store.cuh"
#include "forward/epilogue_warp.cuh"
#include "forward/epilogue_lines.cuh"
#include "common/static_for.cuh"

/// The producers are a whole warpgroup, because only whole warpgroups can release registers.
constexpr int PRODUCER_THREADS = 128;

#include "forward/implicit_gemm_scheduler.cuh"
#include "forward/implicit_gemm_consumer.cuh"
#include "forward/implicit_gemm_tma_weights.cuh"

/// The producer thread, which issues the loads of one chunk after another.
struct Producer {
  Ring ring;
  ChunkIterator chunks;
  TmaInputLoader loader;
  Weights::Loader weights;
  int first_tile;

  __device__ __forceinline__ Producer(u32 shared, const Weights::Argument& argument, const TileSizes& sizes)
      : ring(shared), chunks(sizes), weights(argument), first_tile(chunks.index) {
    set_tile();
  }
  __device__ __forceinline__ void set_tile() {
    loader.set_tile(chunks.work.origin, chunks.work.group, chunks.work.first_chunk, chunks.sizes);
    weights.set_tile(chunks.work);
    if (RESIDENT_WEIGHTS && chunks.index != first_tile) weights.bytes = 0;
  }
  __device__ __forceinline__ void advance() {
    ring.advance();
    loader.advance();
    weights.advance();
    if (chunks.next()) set_tile();
  }
  __device__ __forceinline__ void copy_input(const TensorMap& input) const {
    ptx::arrive_expect_tx(ring.full(), loaded_pixels(chunks.sizes) * (CHUNK_WORDS * 4) + weights.bytes);
    loader.copy(ring.input(), input, ring.full());
  }

  __device__ __forceinline__ void run(const TensorMap& input) {
    // The first chunks of the input are loaded while the launch that packs the weights still runs, unless a launch before
    // this one writes the input, too.
    if constexpr (NHWC_COPY) ptx::wait_for_previous_launch();
    Producer early = *this;
#pragma unroll 1
    for (int i = 0; i < STAGES && !early.chunks.done(); ++i) {
      early.copy_input(input);
      early.advance();
    }
    if constexpr (!NHWC_COPY) ptx::wait_for_previous_launch();
#pragma unroll 1
    for (int i = 0; !chunks.done(); ++i) {
      if (i >= STAGES) {
        ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
        copy_input(input);
      }
      weights.copy(RESIDENT_WEIGHTS ? ring.base + RESIDENT_AT + i * (WEIGHT_WORDS * 4) : ring.weights(), ring.full());
      advance();
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS + PRODUCER_THREADS, BLOCKS_PER_MULTIPROCESSOR)
    forward_implicit_gemm_tma(const __grid_constant__ TensorMap input, const __grid_constant__ Weights::Argument weights,
                  const __grid_constant__ Epilogue epilogue, Out* __restrict__ output, const __grid_constant__ TileSizes sizes) {
  extern __shared__ __align__(1024) u32 memory[];
  const u32 shared = ptx::keep_in_register(ptx::shared_address(memory));
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(input);
    Ring ring(shared);
    for (int s = 0; s < STAGES; ++s, ring.advance()) {
      ptx::init_barrier(ring.full(), 1);
      ptx::init_barrier(ring.empty(), WARPS);
    }
    if constexpr (STAGGER > 0) ptx::init_barrier(shared + STAGGER_BARRIER, 4);
    ptx::fence_barrier_init();
  }
  __syncthreads();

  if (threadIdx.x >= THREADS) {
    if constexpr (MOVE_REGISTERS) ptx::shrink_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x == THREADS) Producer(shared, weights, sizes).run(input);
  } else {
    if constexpr (MOVE_REGISTERS) ptx::grow_registers<CONSUMER_REGISTERS>();
    run_consumer(shared, reinterpret_cast<char*>(memory), epilogue, output, sizes);
  }
}
