// Gradient of the weight (and of the bias) with wgmma (sm_90a): the implicit GEMM of grad_weight/implicit_gemm_mma.cu
// in TF32.
//
//   M = 64 output channels of a warpgroup, N = WARP_M input channels, WARP_TAPS taps; K = 8 pixels of a multiply
//
// In TF32 wgmma reads from shared memory only operands that are contiguous along k. The input is, in quads of pixels
// and without shifts; grad_output, at each tap's shift, comes from registers, 4 words a thread. While the taps of one
// step are multiplied, the next step's words are loaded. The input is rounded to TF32 in its stage, one tile ahead.
//
// Covers: float32 (TF32); NCHW and channels_last; any kernel, stride, padding, output padding, dilation, groups.
// Flushes, splits and the bias as in grad_weight/implicit_gemm_mma.cu.
#include "common/mma.cuh"
#include "common/wgmma.cuh"
#include "grad_weight/implicit_gemm_layout.cuh"
#include "grad_weight/implicit_gemm_producer.cuh"
#include "grad_weight/implicit_gemm_store.cuh"

using In = InputWindow;
using Out = OutputWindow;

constexpr int STEP = 8;
constexpr int STEPS = TILE_PIXELS / STEP / WARPS_K;
static_assert(SWAPPED && PRECISION == ptx::TF32 && WARP_N == 16 && WARPS_N % 4 == 0 && WARPS_M == 1 && STAGES >= 3);
static_assert(TILE_PIXELS % (2 * STEP * WARPS_K) == 0, "steps come in pairs");

/// The A fragments (grad_output) of one step: [tap][word].
using AFragments = u32[WARP_TAPS][4];

/// `from`: this lane's address in the step. `bias_masks`: all bits for a tap that counts for the bias (of channels g and
/// g + 8), none for another. There must be no branch here: the compiler would wait for the multiplies that are in flight.
__device__ __forceinline__ void load_fragments(AFragments& fragments, u32 from, const int (&tap_bytes)[WARP_TAPS], const u32 (&bias_masks)[WARP_TAPS],
                                          float (&bias)[2]) {
  constexpr int HALF = Out::position_bytes(Out::position(4)), EIGHT = 8 * Out::CHANNEL_STRIDE * 4;
#pragma unroll
  for (int tap = 0; tap < WARP_TAPS; ++tap) {
    const u32 at = from + tap_bytes[tap];
    fragments[tap][0] = ptx::load_shared(at);
    fragments[tap][1] = ptx::load_shared(at + EIGHT);
    fragments[tap][2] = ptx::load_shared(at + HALF);
    fragments[tap][3] = ptx::load_shared(at + EIGHT + HALF);
  }
#pragma unroll
  for (int tap = 0; tap < WARP_TAPS; ++tap) {
    if constexpr (WITH_BIAS) {
      const u32 mask = bias_masks[tap];
      bias[0] += __uint_as_float(fragments[tap][0] & mask) + __uint_as_float(fragments[tap][2] & mask);
      bias[1] += __uint_as_float(fragments[tap][1] & mask) + __uint_as_float(fragments[tap][3] & mask);
    }
#pragma unroll
    for (u32& word : fragments[tap]) word = ptx::round_to_tf32(word);
  }
}

/// Begins the multiplies of one step.
__device__ __forceinline__ void multiply_fragments(float (&sums)[FRAGMENTS][4], const AFragments& fragments, ptx::u64 input) {
  ptx::fence_wgmma();
#pragma unroll
  for (int tap = 0; tap < WARP_TAPS; ++tap)
    ptx::wgmma_from_registers<WARP_M>(sums[tap * N_FRAGMENTS], fragments[tap], input);
  ptx::commit_wgmma();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_MULTIPROCESSOR)
    grad_weight_implicit_gemm_wgmma_tf32(const Element* __restrict__ input, const Element* __restrict__ grad_output, Element* __restrict__ gradient,
                           float4* __restrict__ partial, float* __restrict__ bias_partial,
                           const __grid_constant__ GradWeightTileSizes sizes) {
  extern __shared__ __align__(128) u32 shared[];
  const u32 stages = ptx::keep_in_register(ptx::shared_address(shared));
  const Place place = Place::of(blockIdx.x);
  Producer producer(input, grad_output, place, sizes, stages);

  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % TILE_WARPS, warp_k = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32 / TILE_WARPS), 0);
  const WarpPlace at(warp);
  int tap_bytes[WARP_TAPS];
  u32 bias_masks[WARP_TAPS];
#pragma unroll
  for (int i = 0; i < WARP_TAPS; ++i) {
    const Tap tap = Tap::of(place, at.t * WARP_TAPS + i);
    tap_bytes[i] = Out::position_bytes(tap.offset);
    bias_masks[i] = tap.reads_each_once && place.m0 == 0 ? ~0u : 0u;
  }
  const u32 lane_bytes = (at.n * WARP_N + lane / 4) * Out::CHANNEL_STRIDE * 4 + Out::position_bytes(Out::position(lane % 4));
  float bias[2] = {0.f, 0.f};

#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) producer.copy(s);
  ptx::wait_copies<STAGES - 2>();
  __syncthreads();
  producer.round_input(0);
  int index = 0;
  float sums[FRAGMENTS][4];
  do {
    const int first = index, end = sizes.flush < producer.count - index ? index + sizes.flush : producer.count;
#pragma unroll
    for (auto& fragment : sums)
#pragma unroll
      for (float& sum : fragment) sum = 0.f;
    AFragments even, odd;
    for (; index < end; ++index) {
      ptx::wait_copies<STAGES - 3>();
      ptx::fence_proxy_async();
      // Every warpgroup has multiplied the tile before: its stage may be loaded again.
      ptx::wait_wgmma<0>();
      __syncthreads();
      const u32 from = producer.output_stage(index) + lane_bytes;
      const ptx::u64 b = ptx::matrix_descriptor(producer.input_stage(index), In::QUAD_BYTES, 128);
      const auto fragments_at = [&](int i) { return from + Out::position_bytes(Out::position((i * WARPS_K + warp_k) * STEP)); };
      const auto input_at = [&](int i) { return b + (i * WARPS_K + warp_k) * (STEP / 4 * In::QUAD_BYTES / 16); };
      load_fragments(even, fragments_at(0), tap_bytes, bias_masks, bias);
      multiply_fragments(sums, even, input_at(0));
      producer.copy(index + STAGES - 1);
      producer.round_input(index + 1);
#pragma unroll 1
      for (int i = 0;; i += 2) {
        load_fragments(odd, fragments_at(i + 1), tap_bytes, bias_masks, bias);
        multiply_fragments(sums, odd, input_at(i + 1));
        if (i + 2 >= STEPS) break;
        ptx::wait_wgmma<1>();
        load_fragments(even, fragments_at(i + 2), tap_bytes, bias_masks, bias);
        multiply_fragments(sums, even, input_at(i + 2));
        ptx::wait_wgmma<1>();
      }
    }
    ptx::wait_wgmma<0>();
    if (end == producer.count) ptx::let_next_launch_start();
    if (sizes.through_workspace) store_partial(sums, place, warp, lane, place.split * WARPS_K + warp_k, partial, first > 0);
  } while (index < producer.count);
  if (!sizes.through_workspace) store_gradient(sums, place, warp, lane, reinterpret_cast<float*>(shared), gradient);

  if (WITH_BIAS && place.m0 == 0) {
    const int row = place.split * BIAS_ROWS + (place.tap_block_w * TapsH::BLOCKS + place.tap_block_h) * BIAS_WRITERS +
                    warp_k * WARPS_T + at.t;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = bias[half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const int channel = place.n0 + at.n * WARP_N + half * 8 + lane / 4;
      if (lane % 4 == 0 && channel < CO_GROUP) bias_partial[row * OUT_CHANNELS + place.group * CO_GROUP + channel] = sum;
    }
  }
}
