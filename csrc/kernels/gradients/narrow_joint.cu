// Gradients of the input, the weight and (WITH_BIAS) the bias in one pass, where the output has few channels and taps:
// RGB heads. float32 (three products of TF32 parts), Half, BFloat16; NCHW with images, or channels_last with channels, of
// 16-byte multiples; either layout of the weight; one group; any kernel, stride, padding, dilation; sm_90a (copy engine).
//
//   grad_input[ci][pixel] = sum over taps of weight[ci, tap] * patch[pixel, tap]          (patch: gradients/patches.cuh)
//   grad_weight[ci, tap] = sum over pixels of input[ci][pixel] * patch[pixel, tap]
//
// A block takes every gridDim.x-th tile of PIXELS pixels and all channels, CHANNELS of them with padding. INPUT_WARPS
// multiply the tile's patches by the weight (fragments in shared memory) and store; WEIGHT_WARPS multiply them by the input,
// which the copy engine brings STAGES tiles ahead, and keep sums: at the end those leave as float32 for common/split_k_reduce.cu, a
// slice a block. Meanwhile GATHER_WARPS, or where there are none all warps, the ones before and the others after they
// multiply, write the patches of the next tile and ask for those after it. Every sum has a fixed order.
//
// A warp of the first kind owns INPUT_C_TILES * 16 channels and INPUT_P_TILES * 16 pixels; INPUT_WARPS_C of them share the
// channels. One of the second owns WEIGHT_M_TILES * 16 channels, all taps, and every WEIGHT_WARPS_K-th 16 pixels.
#include "gradients/patches.cuh"
#include "common/pipeline.cuh"
#include "common/tma.cuh"

constexpr int CHANNELS = 16 * INPUT_C_TILES * INPUT_WARPS_C;
constexpr int INPUT_WARPS_P = INPUT_WARPS / INPUT_WARPS_C, WEIGHT_WARPS_M = WEIGHT_WARPS / WEIGHT_WARPS_K;
static_assert(CHANNELS == 16 * WEIGHT_M_TILES * WEIGHT_WARPS_M && CHANNELS >= IN_CHANNELS && GROUPS == 1);
static_assert(PIXELS == 16 * INPUT_P_TILES * INPUT_WARPS_P && PIXELS / 16 % WEIGHT_WARPS_K == 0);

// The input: boxes of lines of 128 bytes, which are pixels of a channel or (CHANNELS_LAST) channels of a pixel.
constexpr int LINE = 128 / ITEM;
constexpr int BOXES = (CHANNELS_LAST ? CHANNELS : PIXELS) / LINE, BOX_BYTES = (CHANNELS_LAST ? PIXELS : CHANNELS) * 128;
constexpr int STAGE_BYTES = BOXES * BOX_BYTES;
static_assert((CHANNELS_LAST ? CHANNELS : PIXELS) % LINE == 0);

// [16 channels][step][part][lane]: the four words of a lane's fragment.
constexpr int WEIGHT_BYTES = CHANNELS / 16 * K_STEPS * PARTS * 512;
constexpr int WEIGHTS_AT = STAGES * STAGE_BYTES, PATCHES_AT = WEIGHTS_AT + WEIGHT_BYTES;
constexpr int BARRIERS_AT = PATCHES_AT + 2 * PATCH_BYTES;
static_assert(SHARED_BYTES == BARRIERS_AT + 8 * (STAGES + 1), "the plan and the kernel must agree");

/// Ask for the input of a tile. By one thread.
__device__ __forceinline__ void bring(const TensorMap& input, const PatchSizes& sizes, int tile, u32 stage, u32 full) {
  const Run run = Run::of(sizes, tile);
  ptx::arrive_expect_tx(full, STAGE_BYTES);
#pragma unroll
  for (int box = 0; box < BOXES; ++box) {
    if constexpr (CHANNELS_LAST) {
      ptx::tma_load(stage + box * BOX_BYTES, input, box * LINE, run.pixel, run.image, full);
    } else {
      ptx::tma_load(stage + box * BOX_BYTES, input, run.pixel + box * LINE, 0, run.image, full);
    }
  }
}

#include "gradients/narrow_joint_input.cuh"
#include "gradients/narrow_joint_weight.cuh"

// Registers of a thread, of 168 where warps of their own gather.
constexpr int MULTIPLY_REGISTERS = 208, GATHER_REGISTERS = 88;
static_assert(GATHER_WARPS == 0 || (GATHER_WARPS == 4 && INPUT_WARPS == 4 && WEIGHT_WARPS == 4));

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
  const auto patches = [&](int buffer) { return shared + PATCHES_AT + buffer * PATCH_BYTES; };

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) ptx::init_barrier(full(stage), 1);
    ptx::init_barrier(done, THREADS);
    ptx::fence_barrier_init();
    for (int stage = 0; stage < STAGES; ++stage)
      if (first + stage * stride < tiles) bring(input, sizes, first + stage * stride, shared + stage * STAGE_BYTES, full(stage));
  }
  Gatherer gatherer(sizes);
  const bool gathers = GATHER_WARPS == 0 || warp >= INPUT_WARPS + WEIGHT_WARPS;
  if (gathers && first < tiles) gatherer.fetch(grad_output, first);
  load_weights(memory + WEIGHTS_AT, weight);
  if (gathers && first < tiles) gatherer.put(patches(0));
  if (gathers && first + stride < tiles) gatherer.fetch(grad_output, first + stride);

  int stage = 0, buffer = 0;
  u32 parity = 0;
  const auto gather = [&](int tile) {
    if (tile + stride < tiles) gatherer.put(patches(buffer ^ 1));
    if (tile + 2 * stride < tiles) gatherer.fetch(grad_output, tile + 2 * stride);
  };
  // The tile before this one is done with: its stage of the input takes one to come.
  const auto bring_ahead = [&](int tile) {
    const int next = tile + (STAGES - 1) * stride, before = stage == 0 ? STAGES - 1 : stage - 1;
    if (threadIdx.x == 0 && tile != first && next < tiles)
      bring(input, sizes, next, shared + before * STAGE_BYTES, full(before));
  };
  // The roles meet after every tile: by a barrier in memory, because they do so at three places of the code, which
  // synccheck takes for a divergence at a barrier of the block.
  const auto walk = [&](const auto& work) {
#pragma unroll 1
    for (int tile = first; tile < tiles; tile += stride) {
      work(tile);
      ptx::arrive(done);
      ptx::wait_for_phase(done, buffer);
      buffer ^= 1;
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    ptx::let_next_launch_start();
  };
  __syncthreads();
  if (warp < INPUT_WARPS) {
    if constexpr (GATHER_WARPS > 0) ptx::grow_registers<MULTIPLY_REGISTERS>();
    const InputRole role(shared, warp);
    walk([&](int tile) {
      bring_ahead(tile);
      if constexpr (GATHER_WARPS == 0) gather(tile);
      role.work(patches(buffer), sizes, tile, grad_input);
    });
  } else if (warp < INPUT_WARPS + WEIGHT_WARPS) {
    if constexpr (GATHER_WARPS > 0) ptx::grow_registers<MULTIPLY_REGISTERS>();
    WeightRole role(warp - INPUT_WARPS);
    walk([&](int tile) {
      ptx::wait_for_phase(full(stage), parity);
      role.work(shared + stage * STAGE_BYTES, patches(buffer));
      if constexpr (GATHER_WARPS == 0) gather(tile);
    });
    role.finish(reinterpret_cast<float*>(memory), partial + blockIdx.x * ((long long)IN_CHANNELS * ALL_TAPS));
  } else {
    if constexpr (GATHER_WARPS > 0) {
      ptx::shrink_registers<GATHER_REGISTERS>();
      walk(gather);
    }
  }

  if constexpr (WITH_BIAS) {
    constexpr int WARPS = THREADS / 32;
    const auto of_warps = reinterpret_cast<BiasSum*>(memory + PATCHES_AT);  // [channel][warp]
#pragma unroll
    for (int c = 0; c < OUT_CHANNELS; ++c) {
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) gatherer.bias[c].add_lane(mask);
      if (threadIdx.x % 32 == 0) of_warps[c * WARPS + warp] = gatherer.bias[c];
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
