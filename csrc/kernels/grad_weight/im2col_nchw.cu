// Gradient of the weight (and of the bias) on Hopper's warpgroup multiply (sm_90a) in TF32, grad_output as it lies in NCHW.
//
//   M = KERNEL_W taps of a row of the kernel x CHUNK output channels, N = TILE_COLS input channels, K = pixels
//
// In TF32 the multiplier takes from shared memory only what lies along k, and k are pixels. The input lies so. Of
// grad_output k goes by the stride, so it comes from registers: the copy engine brings boxes of it as it lies, and a lane
// reads its words of them. A tap is an address (grad_weight/im2col_nchw_words.cuh).
//
// Covers: float32 (TF32), NCHW; what grad_weight/im2col_nchw.py claims. Warpgroup 0 asks for boxes, the others multiply,
// BLOCKS times 64 rows each. Pixels are split in `slices`; a slice's sums are gradient[slice][ci][tap][co], which
// grad_weight/pixel_rows_reduce.cu adds up (sizes.in_weight_order: [ci][co][tap], for a single slice). WITH_BIAS: two warps of
// warpgroup 0 add up grad_output where a row of taps has its offset in [0, STRIDE_H), for the first input channels:
// bias_partial[slice][offset][2][co], the sum and what rounding left of it. Without it grad_output comes rounded to TF32.
#include "common/compensated_sum.cuh"
#include "common/mma.cuh"
#include "common/wgmma.cuh"
#include "common/pipeline.cuh"
#include "common/stages.cuh"
#include "common/sizes.cuh"
#include "common/tma.cuh"
#include "grad_weight/im2col_nchw_layout.cuh"
#include "grad_weight/im2col_nchw_words.cuh"
#include "grad_weight/im2col_nchw_producer.cuh"

/// The multiplies of one warp. While a step is multiplied, the words of the next are read.
__device__ __forceinline__ void multiply_all(Ring ring, float (&sums)[BLOCKS][TILE_COLS / 2], int warp, int lane, int stages, u32 out_width) {
  const WordPlaces places(warp, lane, out_width);
#pragma unroll
  for (auto& block : sums)
#pragma unroll
    for (float& sum : block) sum = 0.f;
  Words even, odd;
  for (int s = 0; s < stages; ++s) {
    ptx::wait_for_phase(ring.full(), ring.parity);
    const ptx::u64 cols = ptx::swizzled_descriptor<BOX * 4>(ring.data(), 16, 8 * BOX * 4);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      Words& words = step % 2 ? odd : even;
      places.load(words, ring.data(), step);
      ptx::fence_wgmma();
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b)
        ptx::wgmma_from_registers<TILE_COLS>(sums[b], words[b], cols + (step * 8 / BOX * BOX_BYTES + step * 8 % BOX * 4) / 16);
      ptx::commit_wgmma();
      // The step before is multiplied: its words may go, and with the first step its stage.
      ptx::wait_wgmma<1>();
      if (step == 0 && s > 0 && lane == 0) ptx::arrive(ring.empty_before());
    }
    if constexpr (STEPS % 2 != 0) ptx::wait_wgmma<0>();
    ring.advance();
  }
  ptx::wait_wgmma<0>();
}

__device__ __forceinline__ void store(const float (&sums)[BLOCKS][TILE_COLS / 2], const Place& place, int warp, int lane, bool in_weight_order,
                                      float* gradient) {
  const int of_tap = in_weight_order ? 1 : CO_GROUP, of_channel = in_weight_order ? TAPS : 1;
  gradient += (static_cast<long long>(place.slice) * IN_CHANNELS + place.group * CI_GROUP) * (TAPS * CO_GROUP);
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    const Rows rows = Rows::of(warp, b, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int co = place.co + rows.channel[half];
      float* const to = gradient + (place.kh * KERNEL_W + rows.kw) * of_tap + co * of_channel;
#pragma unroll
      for (int j = 0; j < TILE_COLS / 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (const int ci = place.ci + j * 8 + lane % 4 * 2 + i; ci < CI_GROUP && co < CO_GROUP && rows.kw < KERNEL_W)
            to[static_cast<long long>(ci) * (TAPS * CO_GROUP)] = sums[b][j * 4 + half * 2 + i];
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    grad_weight_im2col_nchw(const __grid_constant__ TensorMap input, const __grid_constant__ TensorMap grad_output,
                       float* __restrict__ gradient, float* __restrict__ bias_partial, const __grid_constant__ Im2colNchwSizes sizes) {
  extern __shared__ __align__(1024) u32 shared[];
  const Ring ring((ptx::shared_address(shared) + 1023) & ~1023u);
  const Place place(blockIdx.x);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(input);
    ptx::prefetch_tensor_map(grad_output);
    Ring each = ring;
    for (each.stage = 0; each.stage < STAGES; ++each.stage) {
      ptx::init_barrier(each.full(), 1);
      ptx::init_barrier(each.empty(), 4 * WARPGROUPS + (place.counts() ? BIAS_WARPS : 0));
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();
  const long long all = (long long)ceil_div(sizes.batch, IMAGES) * sizes.down * sizes.across;
  const int first_stage = static_cast<int>(all * place.slice / sizes.splits);
  const int stages = static_cast<int>(all * (place.slice + 1) / sizes.splits) - first_stage;
  ptx::wait_for_previous_launch();
  ptx::let_next_launch_start();
  if (warp < 4) {
    ptx::shrink_registers<FILL_REGISTERS>();
    if (threadIdx.x == 0) fill(ring, input, grad_output, place, sizes, first_stage, stages);
    if (warp >= 4 - BIAS_WARPS && place.counts()) add_bias(ring, place, warp - (4 - BIAS_WARPS), lane, stages, bias_partial);
  } else {
    ptx::grow_registers<MULTIPLY_REGISTERS>();
    float sums[BLOCKS][TILE_COLS / 2];
    multiply_all(ring, sums, warp - 4, lane, stages, sizes.out_width);
    store(sums, place, warp - 4, lane, sizes.in_weight_order, gradient);
  }
}
