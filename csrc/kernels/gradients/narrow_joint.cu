// Gradients of the input, the weight and (WITH_BIAS) the bias in one pass, where the output has few channels and taps:
// RGB heads. float32 (three products of TF32 parts), Half, BFloat16; NCHW with images, or channels_last with channels, of
// 16-byte multiples; either layout of the weight; one group; any kernel, stride, padding, dilation; sm_90a (TMA).
//
//   grad_input[ci][pixel] = sum over taps of weight[ci, tap] * im2col[pixel, tap]   (im2col: gradients/narrow_joint_im2col.cuh)
//   grad_weight[ci, tap] = sum over pixels of input[ci][pixel] * im2col[pixel, tap]
//
// A block computes every gridDim.x-th tile of PIXELS pixels, and all channels, padded to CHANNELS. INPUT_WARPS warps multiply
// the tile's im2col rows by the weight (fragments in shared memory) and store grad_input. WEIGHT_WARPS warps multiply them by
// the input, which TMA loads STAGES tiles ahead, and keep the sums in registers; at the end each block stores its sums as
// float32, which common/split_k_reduce.cu adds up. Meanwhile PRODUCER_WARPS warps store the im2col rows of the next tile and
// issue the loads of the one after it. If there are none, all warps do so: INPUT_WARPS before they multiply, WEIGHT_WARPS
// afterwards. Every sum has a fixed order.
//
// An input warp computes INPUT_C_TILES * 16 channels and INPUT_P_TILES * 16 pixels; INPUT_WARPS_C of them share the channels.
// A weight warp computes WEIGHT_M_TILES * 16 channels and all taps, from every WEIGHT_WARPS_K-th 16 pixels.
#include "gradients/narrow_joint_im2col.cuh"
#include "common/pipeline.cuh"
#include "common/tma.cuh"

constexpr int CHANNELS = 16 * INPUT_C_TILES * INPUT_WARPS_C;
constexpr int INPUT_WARPS_P = INPUT_WARPS / INPUT_WARPS_C, WEIGHT_WARPS_M = WEIGHT_WARPS / WEIGHT_WARPS_K;
static_assert(CHANNELS == 16 * WEIGHT_M_TILES * WEIGHT_WARPS_M && CHANNELS >= IN_CHANNELS && GROUPS == 1);
static_assert(PIXELS == 16 * INPUT_P_TILES * INPUT_WARPS_P && PIXELS / 16 % WEIGHT_WARPS_K == 0);

// TMA loads the input in boxes of rows of 128 bytes: pixels of a channel or (CHANNELS_LAST) channels of a pixel.
constexpr int ROW_ELEMENTS = 128 / ITEM;
constexpr int BOXES = (CHANNELS_LAST ? CHANNELS : PIXELS) / ROW_ELEMENTS, BOX_BYTES = (CHANNELS_LAST ? PIXELS : CHANNELS) * 128;
constexpr int STAGE_BYTES = BOXES * BOX_BYTES;
static_assert((CHANNELS_LAST ? CHANNELS : PIXELS) % ROW_ELEMENTS == 0);

// The weights are [16 channels][step][part][lane]: the four words of a lane's fragment.
constexpr int WEIGHT_BYTES = CHANNELS / 16 * K_STEPS * PARTS * 512;
constexpr int WEIGHTS_AT = STAGES * STAGE_BYTES, IM2COL_AT = WEIGHTS_AT + WEIGHT_BYTES;
constexpr int BARRIERS_AT = IM2COL_AT + 2 * IM2COL_BYTES;
static_assert(SHARED_BYTES == BARRIERS_AT + 8 * (STAGES + 1), "the plan and the kernel must agree");

/// Issues the copy of a tile's input. One thread calls it.
__device__ __forceinline__ void load_input(const TensorMap& input, const PatchSizes& sizes, int tile, u32 stage, u32 full) {
  const Tile at = Tile::of(sizes, tile);
  ptx::arrive_expect_tx(full, STAGE_BYTES);
#pragma unroll
  for (int box = 0; box < BOXES; ++box) {
    if constexpr (CHANNELS_LAST) {
      ptx::tma_load(stage + box * BOX_BYTES, input, box * ROW_ELEMENTS, at.pixel, at.image, full);
    } else {
      ptx::tma_load(stage + box * BOX_BYTES, input, at.pixel + box * ROW_ELEMENTS, 0, at.image, full);
    }
  }
}

#include "gradients/narrow_joint_input.cuh"
#include "gradients/narrow_joint_weight.cuh"

// Registers of a thread, which begin at 168 if there are producer warps.
constexpr int CONSUMER_REGISTERS = 208, PRODUCER_REGISTERS = 88;
static_assert(PRODUCER_WARPS == 0 || (PRODUCER_WARPS == 4 && INPUT_WARPS == 4 && WEIGHT_WARPS == 4));

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    gradients_narrow_joint(const __grid_constant__ TensorMap input, const Element* __restrict__ grad_output,
                       const Element* __restrict__ weight, Element* __restrict__ grad_input, float* __restrict__ partial,
                       float* __restrict__ bias_partial, const __grid_constant__ PatchSizes sizes) {
  extern __shared__ __align__(1024) char memory[];
  const u32 shared = ptx::keep_in_register(ptx::shared_address(memory));
  const int warp = threadIdx.x / 32;
  const int tiles = sizes.all_tiles, first = blockIdx.x, stride = gridDim.x;
  const auto full = [&](int stage) { return shared + BARRIERS_AT + stage * 8; };
  const u32 done = full(STAGES);
  const auto im2col = [&](int buffer) { return shared + IM2COL_AT + buffer * IM2COL_BYTES; };

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) ptx::init_barrier(full(stage), 1);
    ptx::init_barrier(done, THREADS);
    ptx::fence_barrier_init();
    for (int stage = 0; stage < STAGES; ++stage)
      if (first + stage * stride < tiles) load_input(input, sizes, first + stage * stride, shared + stage * STAGE_BYTES, full(stage));
  }
  Im2colProducer producer(sizes);
  const bool produces = PRODUCER_WARPS == 0 || warp >= INPUT_WARPS + WEIGHT_WARPS;
  if (produces && first < tiles) producer.load(grad_output, first);
  load_weights(memory + WEIGHTS_AT, weight);
  if (produces && first < tiles) producer.store(im2col(0));
  if (produces && first + stride < tiles) producer.load(grad_output, first + stride);

  int stage = 0, buffer = 0;
  u32 parity = 0;
  const auto produce = [&](int tile) {
    if (tile + stride < tiles) producer.store(im2col(buffer ^ 1));
    if (tile + 2 * stride < tiles) producer.load(grad_output, tile + 2 * stride);
  };
  // No warp reads the tile before this one any more, so its stage of the input is free.
  const auto prefetch_input = [&](int tile) {
    const int next = tile + (STAGES - 1) * stride, before = stage == 0 ? STAGES - 1 : stage - 1;
    if (threadIdx.x == 0 && tile != first && next < tiles)
      load_input(input, sizes, next, shared + before * STAGE_BYTES, full(before));
  };
  // All warps wait for each other after every tile. They use a barrier in shared memory, because the waits are at three places
  // of the code, which synccheck reports as divergence at a barrier of the block.
  const auto for_each_tile = [&](const auto& compute) {
#pragma unroll 1
    for (int tile = first; tile < tiles; tile += stride) {
      compute(tile);
      ptx::arrive(done);
      ptx::wait_for_phase(done, buffer);
      buffer ^= 1;
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    ptx::let_next_launch_start();
  };
  __syncthreads();
  if (warp < INPUT_WARPS) {
    if constexpr (PRODUCER_WARPS > 0) ptx::grow_registers<CONSUMER_REGISTERS>();
    const GradInputConsumer role(shared, warp);
    for_each_tile([&](int tile) {
      prefetch_input(tile);
      if constexpr (PRODUCER_WARPS == 0) produce(tile);
      role.compute(im2col(buffer), sizes, tile, grad_input);
    });
  } else if (warp < INPUT_WARPS + WEIGHT_WARPS) {
    if constexpr (PRODUCER_WARPS > 0) ptx::grow_registers<CONSUMER_REGISTERS>();
    GradWeightConsumer role(warp - INPUT_WARPS);
    for_each_tile([&](int tile) {
      ptx::wait_for_phase(full(stage), parity);
      role.compute(shared + stage * STAGE_BYTES, im2col(buffer));
      if constexpr (PRODUCER_WARPS == 0) produce(tile);
    });
    role.finish(reinterpret_cast<float*>(memory), partial + blockIdx.x * ((long long)IN_CHANNELS * ALL_TAPS));
  } else {
    if constexpr (PRODUCER_WARPS > 0) {
      ptx::shrink_registers<PRODUCER_REGISTERS>();
      for_each_tile(produce);
    }
  }

  if constexpr (WITH_BIAS) {
    constexpr int WARPS = THREADS / 32;
    const auto of_warps = reinterpret_cast<BiasSum*>(memory + IM2COL_AT);  // [channel][warp]
#pragma unroll
    for (int c = 0; c < OUT_CHANNELS; ++c) {
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) producer.bias[c].add_lane(mask);
      if (threadIdx.x % 32 == 0) of_warps[c * WARPS + warp] = producer.bias[c];
    }
    __syncthreads();
    for (int c = threadIdx.x; c < OUT_CHANNELS; c += THREADS) {
      BiasSum total{};
      for (int i = 0; i < WARPS; ++i) total.add(of_warps[c * WARPS + i]);
      bias_partial[2 * blockIdx.x * OUT_CHANNELS + c] = total.sum;
      bias_partial[(2 * blockIdx.x + 1) * OUT_CHANNELS + c] = total.remainder();
    }
  }
}
