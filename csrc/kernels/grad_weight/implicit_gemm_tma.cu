// Gradient of the weight (and of the bias) on Hopper (sm_90a), in 16 bits, both tensors in channels_last: the implicit
// GEMM of grad_weight/implicit_gemm_wgmma.cu, with both operands loaded by TMA as they lie in memory.
//
//   M = 64 input channels of a warpgroup, N = WARP_N output channels, WARP_TAPS taps; K = 16 pixels of a multiply
//
// Both operands lie across k, in rows of 64 channels (grad_weight/implicit_gemm_tma.cuh); a tap's shift of grad_output
// only changes the start address. What a box holds outside of its tensor is zero. A box may hold channels of the next
// group: they become rows and columns of the product that are not stored.
//
// The first THREADS threads are the consumers: they multiply and store. One thread of the next warp is the producer,
// which loads boxes into a ring of stages. BIAS_THREADS more threads add up the bias from the stages; the blocks of
// different input channels, which load the same of grad_output, take turns.
//
// Covers: float16, bfloat16; channels in multiples of 8; strides up to 8; any kernel, padding, output padding,
// dilation, groups. Flushes and splits as in grad_weight/implicit_gemm_mma.cu.
#include "common/mma.cuh"
#include "common/wgmma.cuh"
#include "common/pipeline.cuh"
#include "common/stages.cuh"
#include "common/tma.cuh"
#include "grad_weight/implicit_gemm_layout.cuh"
#include "grad_weight/implicit_gemm_store.cuh"
#include "grad_weight/implicit_gemm_tma.cuh"

static_assert(IS_16_BIT && CHANNELS_LAST && WARP_M == 16 && WARPS_M % 4 == 0 && WARPS_K == 1 && WARP_N % 32 == 0);
static_assert(WARPS_N == 1 || WARP_N % BOX_CHANNELS == 0);

constexpr int PRODUCER_THREADS = 32;
constexpr int BIAS_WARPS = BIAS_THREADS / 32;
/// Groups of 16 output channels that a warp adds up.
constexpr int BIAS_CHANNEL_GROUPS = BIAS_WARPS ? ceil_div(BLOCK_N / 16, BIAS_WARPS) : 1;
/// Steps of 16 pixels that a warp takes at a time, so that their products are independent.
constexpr int BIAS_STEPS = BIAS_CHANNEL_GROUPS < 2 && STEPS % 4 == 0 ? 4 : BIAS_CHANNEL_GROUPS < 4 && STEPS % 2 == 0 ? 2 : 1;
static_assert(WITH_BIAS == (BIAS_WARPS > 0) && BIAS_WRITERS == M_BLOCKS);

/// The producer, one thread.
__device__ __forceinline__ void produce(Ring ring, const Place& place, const GradWeightTmaSizes& sizes, const TensorMap& input,
                                              const TensorMap& grad_output) {
  const int input_channel = place.group * CI_GROUP + place.m0, output_channel = place.group * CO_GROUP + place.n0;
  const int base_row = TapsH::base(place.tap_block_h), base_col = TapsW::base(place.tap_block_w);
  ptx::prefetch_tensor_map(input);
  ptx::prefetch_tensor_map(grad_output);
  const int first = sizes.tiles.first_tile(place.split), count = sizes.tiles.tiles_of(place.split);
#pragma unroll 1
  for (int index = 0; index < count; ++index, ring.advance()) {
    const auto [image, row, col] = sizes.first_pixel(first + index);
    ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
    ptx::arrive_expect_tx(ring.full(), sizes.copied_bytes);
#pragma unroll
    for (int m = 0; m < INPUT_BLOCKS; ++m)
      ptx::tma_load(ring.input() + m * INPUT_BYTES, input, input_channel + m * BOX_CHANNELS, col, row, image, ring.full());
#pragma unroll
    for (int box = 0; box < OUTPUT_BOXES; ++box) {
      const int n = box % CHANNEL_BLOCKS, phase = box / CHANNEL_BLOCKS;
      ptx::tma_load(ring.grad_output() + box * sizes.box_bytes, grad_output, output_channel + n * BOX_CHANNELS,
                    col * STRIDE_W + base_col + phase_col(phase % PHASE_COLS),
                    row * STRIDE_H + base_row + TapsH::residue(phase / PHASE_COLS), image, ring.full());
    }
  }
}

/// The bias, by BIAS_THREADS threads: a row of ones times grad_output, 16 pixels x 16 channels at a time, for the taps of
/// the block that read each pixel once, in every M_BLOCKS-th stage.
__device__ __forceinline__ void add_bias(Ring ring, const Place& place, const GradWeightTmaSizes& sizes, float* bias_partial) {
  const int warp = (threadIdx.x - THREADS - PRODUCER_THREADS) / 32, lane = threadIdx.x % 32, rank = place.m0 / BLOCK_M;
  u32 taps = 0;
  u32 offsets[BLOCK_TAPS];
#pragma unroll
  for (int i = 0; i < BLOCK_TAPS; ++i) {
    taps |= static_cast<u32>(reads_each_once(place, i)) << i;
    offsets[i] = tap_offset(i).bytes(sizes);
  }
  constexpr u32 ONE = PRECISION == ptx::FP16 ? 0x3c003c00 : 0x3f803f80;
  const uint4 ones = make_uint4(ONE, ONE, ONE, ONE);
  float sums[BIAS_CHANNEL_GROUPS][2][4] = {};
  // The row that this lane addresses for ldmatrix: lanes 0 to 7 and 16 to 23 the first 8 pixels, the others the second.
  const u32 row = (lane / 8 % 2 * sizes.group_pixels + lane % 8) * ROW_BYTES;
  const int count = sizes.tiles.tiles_of(place.split);
#pragma unroll 1
  for (int index = 0; index < count; ++index, ring.advance()) {
    ptx::wait_for_phase(ring.full(), ring.parity);
    const u32 taps_of_stage = index % M_BLOCKS == rank ? taps : 0;
#pragma unroll
    for (int tap = 0; tap < BLOCK_TAPS; ++tap) {
      if (!(taps_of_stage >> tap & 1)) continue;
#pragma unroll 1
      for (int first = 0; first < STEPS; first += BIAS_STEPS) {
        // All loads are issued before the first is used: the compiler keeps the order.
        u32 m[BIAS_STEPS][BIAS_CHANNEL_GROUPS][4];
#pragma unroll
        for (int step = 0; step < BIAS_STEPS; ++step)
#pragma unroll
          for (int i = 0; i < BIAS_CHANNEL_GROUPS; ++i) {
            const int channel_group = warp + i * BIAS_WARPS;
            if (channel_group >= BLOCK_N / 16) continue;
            const u32 at = ring.grad_output() + channel_group / 4 * sizes.box_bytes + offsets[tap] + row + sizes.steps[first + step] * 16;
            ptx::load_matrices_transposed(m[step][i], at + ((channel_group % 4 * 2 + lane / 16) ^ at / ROW_BYTES % 8) * 16);
          }
#pragma unroll
        for (int step = 0; step < BIAS_STEPS; ++step)
#pragma unroll
          for (int i = 0; i < BIAS_CHANNEL_GROUPS; ++i) {
            if (warp + i * BIAS_WARPS >= BLOCK_N / 16) continue;
            ptx::mma<PRECISION>(sums[i][0], ones, {m[step][i][0], m[step][i][1]});
            ptx::mma<PRECISION>(sums[i][1], ones, {m[step][i][2], m[step][i][3]});
          }
      }
    }
    __syncwarp();
    if (lane == 0) ptx::arrive(ring.empty());
  }
  // All rows of a product with ones are the same.
  if (lane >= 4) return;
  const int at_row = place.split * BIAS_ROWS + (place.tap_block_w * TapsH::BLOCKS + place.tap_block_h) * BIAS_WRITERS + rank;
#pragma unroll
  for (int i = 0; i < BIAS_CHANNEL_GROUPS; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int channel = place.n0 + (warp + i * BIAS_WARPS) * 16 + c / 2 * 8 + lane * 2 + c % 2;
      if (channel < place.n0 + BLOCK_N && channel < CO_GROUP)
        bias_partial[at_row * OUT_CHANNELS + place.group * CO_GROUP + channel] = sums[i][c / 2][c % 2];
    }
}

/// What a warpgroup's multiply from its tap FIRST on adds to the descriptor of grad_output, whose lower half holds the address
/// and the distance between blocks, and neither carries into the other.
template <int FIRST>
__device__ __forceinline__ void set_operands(u32 (&operands)[WARP_TAPS], int warpgroup_tap, const GradWeightTmaSizes& sizes) {
  if constexpr (FIRST < WARP_TAPS) {
    constexpr int TAPS_JOINED = joined_taps(FIRST);
    const int distance = block_distance(FIRST, TAPS_JOINED).bytes(sizes);
    operands[FIRST] = tap_offset(warpgroup_tap * WARP_TAPS + FIRST).bytes(sizes) / 16 | distance / 16 << 16;
    set_operands<FIRST + TAPS_JOINED>(operands, warpgroup_tap, sizes);
  }
}
/// Multiplies 16 pixels for a warpgroup's taps from FIRST on. `b`: the halves of a descriptor without the distance.
template <int FIRST>
__device__ __forceinline__ void multiply_taps(float (&sums)[FRAGMENTS][4], ptx::u64 a, u32 b_low, u32 b_high, const u32 (&operands)[WARP_TAPS]) {
  if constexpr (FIRST < WARP_TAPS) {
    constexpr int TAPS_JOINED = joined_taps(FIRST);
    const ptx::u64 b = static_cast<ptx::u64>(b_high) << 32 | (b_low + operands[FIRST]);
    ptx::wgmma<PRECISION, TAPS_JOINED * WARP_N, true, true>(sums[FIRST * N_FRAGMENTS], a, b);
    multiply_taps<FIRST + TAPS_JOINED>(sums, a, b_low, b_high, operands);
  }
}

/// The consumers, THREADS threads.
__device__ __forceinline__ void consume(Ring ring, const Place& place, const GradWeightTmaSizes& sizes, char* shared, float4* partial,
                                        Element* gradient) {
  const int lane = threadIdx.x % 32;
  // The shuffle tells the compiler that all threads of a warpgroup have the same value.
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
  const int warp = threadIdx.x / 32;
  const WarpPlace at(warpgroup * 4);
  u32 operands[WARP_TAPS];
  set_operands<0>(operands, at.t, sizes);
  const u32 input_first = at.m / 4 * INPUT_BYTES, output_first = at.n * (WARP_N / BOX_CHANNELS) * sizes.box_bytes;

  const int count = sizes.tiles.tiles_of(place.split), flush = sizes.tiles.flush;
  int index = 0;
  float sums[FRAGMENTS][4];
  do {
    const int first = index, end = flush < count - index ? index + flush : count;
#pragma unroll
    for (auto& fragment : sums)
#pragma unroll
      for (float& sum : fragment) sum = 0.f;
#pragma unroll 1
    for (; index < end; ++index) {
      ptx::wait_for_phase(ring.full(), ring.parity);
      ptx::fence_wgmma();
      const ptx::u64 a = ptx::swizzled_descriptor(ring.input() + input_first, INPUT_BYTES, 8 * ROW_BYTES);
      const ptx::u64 b = ptx::swizzled_descriptor(ring.grad_output() + output_first, 0, sizes.group_pixels * ROW_BYTES);
      const u32 b_low = static_cast<u32>(b), b_high = static_cast<u32>(b >> 32);
      // In a rolled loop the compiler would wait between the multiplies.
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
        multiply_taps<0>(sums, a + step * (STEP * ROW_BYTES / 16), b_low + sizes.steps[step], b_high, operands);
      ptx::commit_wgmma();
      ptx::wait_wgmma<1>();
      if (index > first && lane == 0) ptx::arrive(ring.empty_before());
      ring.advance();
    }
    ptx::wait_wgmma<0>();
    if (lane == 0) ptx::arrive(ring.empty_before());
    if (end == count) ptx::let_next_launch_start();
    if (sizes.tiles.through_workspace) store_partial(sums, place, warp, lane, place.split, partial, first > 0);
  } while (index < count);
  if (sizes.tiles.through_workspace) return;
  // The sums take the stages' memory once all consumers and the bias's warps have read them.
  for (int s = 0; s < sizes.stages; ++s, ring.advance()) ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
  store_gradient<true>(sums, place, warp, lane, reinterpret_cast<float*>(shared + FIXED_BYTES), gradient);
}

extern "C" __global__ void __launch_bounds__(THREADS + PRODUCER_THREADS + BIAS_THREADS, 1)
    grad_weight_implicit_gemm_tma(const __grid_constant__ TensorMap input, const __grid_constant__ TensorMap grad_output,
                      Element* __restrict__ gradient, float4* __restrict__ partial, float* __restrict__ bias_partial,
                      const __grid_constant__ GradWeightTmaSizes sizes) {
  extern __shared__ __align__(1024) char memory[];
  char* const shared = memory + (BOX_ALIGNMENT - ptx::shared_address(memory) % BOX_ALIGNMENT) % BOX_ALIGNMENT;
  const Ring ring(ptx::keep_in_register(ptx::shared_address(shared)), sizes);
  const Place place = Place::of(blockIdx.x);
  if (threadIdx.x == 0) {
    ring.init(1, (THREADS + BIAS_THREADS) / 32);
    ptx::fence_barrier_init();
  }
  __syncthreads();

  if (threadIdx.x < THREADS) {
    consume(ring, place, sizes, shared, partial, gradient);
  } else if (threadIdx.x < THREADS + PRODUCER_THREADS) {
    if (threadIdx.x == THREADS) produce(ring, place, sizes, input, grad_output);
  } else if constexpr (WITH_BIAS) {
    add_bias(ring, place, sizes, bias_partial);
  }
}
