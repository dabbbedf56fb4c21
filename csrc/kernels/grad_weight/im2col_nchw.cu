// Gradient of the weight (and of the bias) with wgmma (sm_90a) in TF32 and NCHW, without a copy of grad_output: an
// implicit GEMM whose im2col happens on the way from shared memory to registers.
//
//   M = KERNEL_W taps of a row of the kernel x TILE_CO output channels, N = TILE_CI input channels, K = pixels
//
// In TF32 wgmma reads from shared memory only operands that are contiguous along k, and k are pixels. The input is. In
// grad_output k advances by the stride, so it comes from registers: TMA loads boxes of it in its own layout, and each lane
// loads its A fragments from them. A tap is an address (grad_weight/im2col_nchw_fragments.cuh).
//
// Covers: float32 (TF32), NCHW; what grad_weight/im2col_nchw.py claims. Warpgroup 0 is the producer, the others are
// the consumers, which multiply M_TILES times 64 rows each. The pixels are cut into splits; a split's sums are
// gradient[split][ci][tap][co], which grad_weight/pixel_rows_reduce.cu adds up (sizes.in_weight_order: [ci][co][tap],
// of a single split). WITH_BIAS: for the first input channels, two warps of warpgroup 0 add up grad_output where a row
// of taps has its offset in [0, STRIDE_H): bias_partial[split][offset][2][co], the sum and what rounding left of it.
// Without it TMA rounds grad_output to TF32.
#include "common/compensated_sum.cuh"
#include "common/mma.cuh"
#include "common/wgmma.cuh"
#include "common/pipeline.cuh"
#include "common/stages.cuh"
#include "common/sizes.cuh"
#include "common/tma.cuh"
#include "grad_weight/im2col_nchw_layout.cuh"
#include "grad_weight/im2col_nchw_fragments.cuh"
#include "grad_weight/im2col_nchw_producer.cuh"
#include "grad_weight/im2col_multiply.cuh"
#include "grad_weight/ring_barriers.cuh"

__device__ __forceinline__ void store(const float (&sums)[M_TILES][TILE_CI / 2], const Place& place, int warp, int lane, bool in_weight_order,
                                      float* gradient) {
  const int tap_stride = in_weight_order ? 1 : CO_GROUP, channel_stride = in_weight_order ? TAPS : 1;
  gradient += (static_cast<long long>(place.split) * IN_CHANNELS + place.group * CI_GROUP) * (TAPS * CO_GROUP);
#pragma unroll
  for (int b = 0; b < M_TILES; ++b) {
    const FragmentRows rows = FragmentRows::of(warp, b, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int co = place.co + rows.channel[half];
      float* const to = gradient + (place.kh * KERNEL_W + rows.kw) * tap_stride + co * channel_stride;
#pragma unroll
      for (int j = 0; j < TILE_CI / 8; ++j)
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
    init_ring<STAGES>(ring, 1, 4 * WARPGROUPS + (place.adds_bias() ? BIAS_WARPS : 0));
    ptx::fence_barrier_init();
  }
  __syncthreads();
  const long long all_stages = (long long)ceil_div(sizes.batch, IMAGES) * sizes.down * sizes.across;
  const int first_stage = static_cast<int>(all_stages * place.split / sizes.splits);
  const int stages = static_cast<int>(all_stages * (place.split + 1) / sizes.splits) - first_stage;
  ptx::wait_for_previous_launch();
  ptx::let_next_launch_start();
  if (warp < 4) {
    ptx::shrink_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) produce(ring, input, grad_output, place, sizes, first_stage, stages);
    if (warp >= 4 - BIAS_WARPS && place.adds_bias()) add_bias(ring, place, warp - (4 - BIAS_WARPS), lane, stages, bias_partial);
  } else {
    ptx::grow_registers<CONSUMER_REGISTERS>();
    float sums[M_TILES][TILE_CI / 2];
    const AAddresses addresses(warp - 4, lane, sizes.out_width);
    multiply_stages<BOX * 4>(
        ring, sums, lane, stages, [](const Ring& full) { ptx::wait_for_phase(full.full(), full.parity); },
        [&](AFragments& fragments, u32 stage, int step) { addresses.load(fragments, stage, step); },
        [](int step) { return step * 8 / BOX * BOX_BYTES + step * 8 % BOX * 4; },
        [] {
          if constexpr (STEPS % 2 != 0) ptx::wait_wgmma<0>();
        });
    store(sums, place, warp - 4, lane, sizes.in_weight_order, gradient);
  }
}
