// Transposed convolution, forward, on Hopper's warpgroup multiply (sm_90a), of inputs in channels_last (outputs in either
// layout): forward/implicit_gemm_wgmma.cu with the input brought by the copy engine, as rows [pixel][CHUNK_WORDS words] with a swizzle
// (common/tma.cuh). A tap's shift by one pixel is a start address one row further on. One thread asks for everything, so that
// those that multiply have nearly all registers.
//
// The weights are packed (one run of them is a chunk's), or with WEIGHT_BOXES (16 bits, channels_last) come as they lie, rows
// of 64 output channels that the multiplier reads across k: nothing has to run before then. With WEIGHTS_STAY all of them
// stay in shared memory while a block works on its tiles.
//
// NARROW maps come once for each shift by columns, [shift][image][row][column]: cells of one image are neighbours then.
//
// ARRANGED: the input is a copy that the launch before this one makes (common/nchw_to_nhwc.cu, of an NCHW input).
//
// PIXEL_BOXES (16 bits, FLAT): the input is NCHW and comes as it lies, [channel][64 pixels]; the multiplier reads it across k.
//
// STAGGER (stride 1): the second warpgroup begins each tile when the first has multiplied so many taps of it, and the
// two take turns tap by tap: while one stores, the other multiplies.
//
// Covers: float32 (TF32, rounded by the copy engine), float16, bfloat16; channels_last with 16-byte multiples of channels of
// a group; any kernel, stride, padding, output padding, dilation, groups; any map (those 5 to 7 cells wide waste some).
// Input: 16-byte aligned. PARTIAL: as in forward/implicit_gemm_mma.cu.
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

/// The threads that follow those that multiply: a whole warpgroup, as only such give back registers.
constexpr int FILL_THREADS = 128;

#include "forward/implicit_gemm_scheduler.cuh"
#include "forward/implicit_gemm_consumer.cuh"

/// The weights as they lie, by boxes of the tensor [channel of the group][input channel of the group][tap][group].
struct WeightBoxFill {
  const TensorMap* weight;
  int channel, input_channel, group, phase_group;
  u32 bytes;

  __device__ __forceinline__ explicit WeightBoxFill(const TensorMap& weight) : weight(&weight) {}
  __device__ __forceinline__ void aim(const Work& work) {
    channel = work.m_block * BLOCK_CHANNELS;
    input_channel = work.first_chunk * CHUNK_CHANNELS;
    group = work.group;
    phase_group = work.phase_group;
    int taps = group_taps(0);
    static_for<1, PHASE_GROUPS>([&](auto index) {
      constexpr int GROUP = decltype(index)::value;
      if (phase_group == GROUP) taps = group_taps(GROUP);
    });
    bytes = taps * (BLOCK_M / 64) * TAP_WEIGHTS * 16;
  }
  __device__ __forceinline__ void advance() { input_channel += CHUNK_CHANNELS; }
  __device__ __forceinline__ void copy(u32 to, u32 barrier) const {
    if (bytes == 0) return;
    static_for<0, TAPS / TAPS_OF_BOX>([&](auto index) {
      constexpr int TAP = decltype(index)::value, KH = TAP / KERNEL_W, KW = TAP % KERNEL_W;
      constexpr int GROUP_ROW = ROWS_AXIS.group(KH), GROUP_COL = COLS_AXIS.group(KW);
      constexpr int RANK = ROWS_AXIS.rank(KH) * COLS_AXIS.count(GROUP_COL) + COLS_AXIS.rank(KW);
      if (phase_group == GROUP_ROW * GROUP_COLS + GROUP_COL)
#pragma unroll
        for (int part = 0; part < BLOCK_M / 64; ++part)
          ptx::tma_load(to + RANK * TAP_WEIGHTS * 16 + part * WARPGROUP_WEIGHTS, *weight, channel + part * 64, input_channel, TAP,
                        group, barrier);
    });
  }
};

template <bool BOXED>
struct WeightsOf {
  using Argument = const u32*;
  using Fill = WeightFill;
};
template <>
struct WeightsOf<true> {
  using Argument = TensorMap;
  using Fill = WeightBoxFill;
};
using Weights = WeightsOf<WEIGHT_BOXES>;

/// The thread that asks for one chunk after another.
struct Filler {
  Ring ring;
  Walk walk;
  BoxFill fill;
  Weights::Fill weights;
  int first_turn;

  __device__ __forceinline__ Filler(u32 shared, const Weights::Argument& argument, const Sizes& sizes)
      : ring(shared), walk(sizes), weights(argument), first_turn(walk.index) {
    aim();
  }
  __device__ __forceinline__ void aim() {
    fill.aim(walk.work.origin, walk.work.group, walk.work.first_chunk, walk.sizes);
    weights.aim(walk.work);
    if (WEIGHTS_STAY && walk.index != first_turn) weights.bytes = 0;
  }
  __device__ __forceinline__ void advance() {
    ring.advance();
    fill.advance();
    weights.advance();
    if (walk.next()) aim();
  }
  __device__ __forceinline__ void copy_input(const TensorMap& input) const {
    ptx::arrive_expect_tx(ring.full(), BOX_PIXELS * CHUNK_WORDS * 4 + weights.bytes);
    fill.copy(ring.input(), input, ring.full());
  }

  __device__ __forceinline__ void run(const TensorMap& input) {
    // The first chunks of input are asked for before the launch that packs the weights is over, unless one before this
    // kernel writes the input, too.
    if constexpr (ARRANGED) ptx::wait_for_previous_launch();
    Filler early = *this;
#pragma unroll 1
    for (int i = 0; i < STAGES && !early.walk.done(); ++i) {
      early.copy_input(input);
      early.advance();
    }
    if constexpr (!ARRANGED) ptx::wait_for_previous_launch();
#pragma unroll 1
    for (int i = 0; !walk.done(); ++i) {
      if (i >= STAGES) {
        ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
        copy_input(input);
      }
      weights.copy(WEIGHTS_STAY ? ring.base + STAYING + i * (WEIGHT_WORDS * 4) : ring.weights(), ring.full());
      advance();
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS + FILL_THREADS, BLOCKS_PER_MULTIPROCESSOR)
    forward_implicit_gemm_tma(const __grid_constant__ TensorMap input, const __grid_constant__ Weights::Argument weights,
                  const __grid_constant__ Epilogue epilogue, Out* __restrict__ output, const __grid_constant__ Sizes sizes) {
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
    if constexpr (MOVE_REGISTERS) ptx::shrink_registers<FILL_REGISTERS>();
    if (threadIdx.x == THREADS) Filler(shared, weights, sizes).run(input);
  } else {
    if constexpr (MOVE_REGISTERS) ptx::grow_registers<MULTIPLY_REGISTERS>();
    multiply_and_store(shared, reinterpret_cast<char*>(memory), epilogue, output, sizes);
  }
}
