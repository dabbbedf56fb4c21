// Gradient of the weight (and of the bias) with wgmma (sm_90a): the implicit GEMM of grad_weight/implicit_gemm_mma.cu
// in 16 bits, with both operands read from shared memory by the tensor cores.
//
//   M = 64 input channels of a warpgroup, N = WARP_N output channels, WARP_TAPS taps; K = 16 pixels of a multiply
//
// Both operands lie across k, [8 channels][position][16 bytes]: 16 pixels are two groups of 8, and a tap's shift of
// grad_output only changes the start address. Multiplies are asynchronous; those of one tile still run while the next
// tile's begin, so a stage is loaded again two tiles after it was multiplied.
//
// Covers: float16, bfloat16; NCHW and channels_last; any kernel, stride, padding, output padding, dilation, groups;
// TILE_W 8 or a multiple of 16. Flushes and splits as in grad_weight/implicit_gemm_mma.cu; the bias is added up by all
// threads from grad_output's stages.
#include "common/mma.cuh"
#include "common/wgmma.cuh"
#include "grad_weight/implicit_gemm_windows.cuh"
#include "grad_weight/implicit_gemm_producer.cuh"
#include "grad_weight/implicit_gemm_store.cuh"

using In = InputWindow;
using Out = OutputWindow;

constexpr int STEP = 16;
constexpr int STEPS = TILE_PIXELS / STEP;
static_assert(IS_16_BIT && WARP_M == 16 && WARPS_M % 4 == 0 && STEPS % WARPS_K == 0 && STAGES >= 3);
static_assert(TILE_W % STEP == 0 || (TILE_W == 8 && TILE_H * TILE_W % STEP == 0));
static_assert(BIAS_WRITERS == M_BLOCKS);

/// Bytes from one group of 8 pixels to the next.
constexpr int OUT_GROUP_BYTES = (Out::position(8) - Out::position(0)) * 16;

/// The bias: a thread adds up every BIAS_RANKS-th pixel of 8 channels, for all taps of the block that read each pixel
/// once. The blocks of different input channels, which load the same of grad_output, take turns.
constexpr int BIAS_RANKS = THREADS / (BLOCK_N / 8);

__device__ __forceinline__ void add_bias(float (&sum)[8], u32 window, u32 bias_taps, const Place& place) {
  const int rank = threadIdx.x / (BLOCK_N / 8), octet = threadIdx.x % (BLOCK_N / 8);
  if (rank >= BIAS_RANKS) return;
#pragma unroll
  for (int number = 0; number < BLOCK_TAPS; ++number) {
    if (!(bias_taps >> number & 1)) continue;
    const u32 from = window + octet * Out::OCTET_BYTES + tap_offset(place, number) * 16;
#pragma unroll 1
    for (int pixel = rank; pixel < TILE_PIXELS; pixel += BIAS_RANKS) {
      const uint4 v = ptx::load_shared_vector(from + Out::position(pixel) * 16);
      const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[2 * i] += load_as(Element{static_cast<unsigned short>(words[i])});
        sum[2 * i + 1] += load_as(Element{static_cast<unsigned short>(words[i] >> 16)});
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_MULTIPROCESSOR)
    grad_weight_implicit_gemm_wgmma(const Element* __restrict__ input, const Element* __restrict__ grad_output, Element* __restrict__ gradient,
                      float4* __restrict__ partial, float* __restrict__ bias_partial,
                      const __grid_constant__ GradWeightTileSizes sizes) {
  extern __shared__ __align__(128) u32 shared[];
  const u32 stages = ptx::keep_in_register(ptx::shared_address(shared));
  const Place place = Place::of(blockIdx.x);
  Producer producer(input, grad_output, place, sizes, stages);

  const int lane = threadIdx.x % 32;
  // The shuffle tells the compiler that all threads of a warpgroup have the same value.
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
  const int warp = threadIdx.x / 32 % TILE_WARPS, warp_k = warpgroup * 4 / TILE_WARPS;
  const WarpPlace at(warpgroup * 4 % TILE_WARPS);
  int tap_offsets[WARP_TAPS];
#pragma unroll
  for (int i = 0; i < WARP_TAPS; ++i) tap_offsets[i] = tap_offset(place, at.t * WARP_TAPS + i);
  u32 bias_taps = 0;
  const int bias_writer = place.m0 / BLOCK_M;
  if (WITH_BIAS)
    for (int i = 0; i < BLOCK_TAPS; ++i) bias_taps |= static_cast<u32>(reads_each_once(place, i)) << i;
  const u32 input_first = at.m * (WARP_M / 8) * In::OCTET_BYTES, output_first = at.n * (WARP_N / 8) * Out::OCTET_BYTES;

  float bias[8] = {};

  producer.load(0);
#pragma unroll
  for (int s = 0; s < STAGES - 2; ++s) producer.copy(s);
  producer.store(0);
  producer.load(1);
  int index = 0;
  float sums[FRAGMENTS][4];
  do {
    const int first = index, end = sizes.flush < producer.count - index ? index + sizes.flush : producer.count;
#pragma unroll
    for (auto& fragment : sums)
#pragma unroll
      for (float& sum : fragment) sum = 0.f;
    for (; index < end; ++index) {
      ptx::wait_copies<STAGES - 3>();
      ptx::fence_proxy_async();
      // Every warpgroup has multiplied the tile before the last: its stage may be loaded again.
      ptx::wait_wgmma<1>();
      __syncthreads();
      ptx::fence_wgmma();
      const ptx::u64 a = ptx::matrix_descriptor(producer.input_stage(index) + input_first, 128, In::OCTET_BYTES);
      const ptx::u64 b = ptx::matrix_descriptor(producer.output_stage(index) + output_first, OUT_GROUP_BYTES, Out::OCTET_BYTES);
#pragma unroll 1
      for (int i = 0; i < STEPS / WARPS_K; ++i) {
        const int step = i * WARPS_K + warp_k;
#pragma unroll
        for (int tap = 0; tap < WARP_TAPS; ++tap)
          ptx::wgmma<PRECISION, WARP_N, true, true>(sums[tap * N_FRAGMENTS], a + In::position(step * STEP),
                                              b + Out::position(step * STEP) + tap_offsets[tap]);
      }
      ptx::commit_wgmma();
      producer.copy(index + STAGES - 2);
      if (WITH_BIAS && bias_taps && index % BIAS_WRITERS == bias_writer) add_bias(bias, producer.output_stage(index), bias_taps, place);
      producer.store(index + 1);
      producer.load(index + 2);
    }
    ptx::wait_wgmma<0>();
    if (end == producer.count) ptx::let_next_launch_start();
    if (sizes.through_workspace) store_partial(sums, place, warp, lane, place.split * WARPS_K + warp_k, partial, first > 0);
  } while (index < producer.count);
  if (!sizes.through_workspace) store_gradient<STAGED_BYTES <= SHARED_BYTES>(sums, place, warp, lane, reinterpret_cast<float*>(shared), gradient);
  if (WITH_BIAS) {
    // Everything is multiplied, so the stages are free.
    __syncthreads();
    float* all = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int c = 0; c < 8; ++c) all[threadIdx.x * 8 + c] = bias[c];
    __syncthreads();
    const int row = place.split * BIAS_ROWS + (place.tap_block_w * TapsH::BLOCKS + place.tap_block_h) * BIAS_WRITERS + bias_writer;
    for (int c = threadIdx.x; c < BLOCK_N && place.n0 + c < CO_GROUP; c += THREADS) {
      float sum = 0.f;
      for (int rank = 0; rank < BIAS_RANKS; ++rank) sum += all[rank * BLOCK_N + c];
      bias_partial[row * OUT_CHANNELS + place.group * CO_GROUP + place.n0 + c] = sum;
    }
  }
}
