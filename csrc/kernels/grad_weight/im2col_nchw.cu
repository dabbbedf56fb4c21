// Gradient of the weight (and of the bias) with wgmma (sm_90a) in TF32 and NCHW, without a copy of grad_output: an
// implicit GEMM whose im2col happens on the way from shared memory to registers.
//
//   M = KERNEL_W taps of a row of the kernel x TILE_CO output channels, N = TILE_CI input channels, K = pixels
//
// In TF32 wgmma reads from shared memory only operands that are contiguous along k, and k are pixels. The input is. In
// grad_output k advances by the stride, so it comes from registers: TMA loads boxes of it in its own layout, and each lane
// loads its A fragments from them. A tap is an address (grad_weight/im2col_nchw_fragments.cuh). So is a pixel, which is read
// from a table in shared memory: the launch gives the shape of a stage, and one kernel computes maps of any size.
//
// Covers: float32 (TF32), NCHW; what grad_weight/im2col_nchw.py supports. Warpgroup 0 is the producer, the others are
// the consumers, which multiply M_TILES times 64 rows each. The pixels are cut into splits; a split's sums are
// gradient[split][ci][tap][co], which grad_weight/split_k_reduce_untiled.cu adds up (sizes.in_weight_order: [ci][co][tap],
// of a single split). WITH_BIAS: two warps of warpgroup 0 add up grad_output where a row of taps has its offset in
// [0, STRIDE_H); the blocks of different input channels, which load the same of it, take turns:
// bias_partial[split][tile of input channels][offset][2][co], the sum and what rounding left of it. Without it TMA rounds
// grad_output to TF32.
#include "common/compensated_sum.cuh"
#include "common/mma.cuh"
#include "common/wgmma.cuh"
#include "common/pipeline.cuh"
#include "common/sizes.cuh"
#include "common/tma.cuh"
#include "grad_weight/im2col_nchw_layout.cuh"
#include "grad_weight/im2col_nchw_fragments.cuh"
#include "grad_weight/im2col_nchw_producer.cuh"

/// The consumer: one warp's multiplies. While a step is multiplied, the next step's fragments are loaded.
__device__ __forceinline__ void multiply(Ring ring, float (&sums)[M_TILES][TILE_CI / 2], const AAddresses& addresses, ExistingPixels existing,
                                         const Im2colNchwSizes& sizes, int lane, int stages) {
#pragma unroll
  for (auto& m_tile : sums)
#pragma unroll
    for (float& sum : m_tile) sum = 0.f;
  const int steps = ptx::keep_in_register(sizes.steps);
  // A stage of several images has all of their pixels.
  const int step_pixels = ptx::keep_in_register(sizes.images == 1 ? STEP_PIXELS : 0);
  Entries entries = addresses.entries(0);
  AFragments even, odd;
  u32 before = 0;
#pragma unroll 1
  for (int s = 0; s < stages; ++s) {
    const u32 stage = ring.data();
    const ptx::u64 b = ptx::swizzled_descriptor<BOX * 4>(stage, 16, 8 * BOX * 4);
    int left = existing.left - lane % 4;
    ptx::wait_for_phase(ring.full(), ring.parity);
    const auto multiply_step = [&](AFragments& a, int step) {
      addresses.load(a, stage, entries, left);
      const ptx::u64 of_step = b + entries.step;
      entries = addresses.entries(step + 1);
      left -= step_pixels;
      ptx::fence_wgmma();
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) ptx::wgmma_from_registers<TILE_CI>(sums[m], a[m], of_step);
      ptx::commit_wgmma();
      // The step before is multiplied, so its registers are free; after the first step also the stage before is.
      ptx::wait_wgmma<1>();
    };
    multiply_step(even, 0);
    if (s > 0 && lane == 0) ptx::arrive(before);
    before = ring.empty();
    ring.advance();
    existing.advance();
    int step = 1;
#pragma unroll 1
    for (; step + 1 < steps; step += 2) {
      multiply_step(odd, step);
      multiply_step(even, step + 1);
    }
    if (step < steps) {
      multiply_step(odd, step);
    } else {
      // The next stage begins with the registers of this one's last step.
      ptx::wait_wgmma<0>();
    }
  }
  ptx::wait_wgmma<0>();
}

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
  extern __shared__ __align__(1024) u32 memory[];
  const u32 shared = (ptx::shared_address(memory) + 1023) & ~1023u;
  const Ring ring = ring_at(shared, sizes);
  const Place place(blockIdx.x);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(input);
    ptx::prefetch_tensor_map(grad_output);
    ring.init(1, 4 * WARPGROUPS + (place.adds_bias() ? BIAS_WARPS : 0));
    ptx::fence_barrier_init();
  }
  write_tables(shared, sizes);
  __syncthreads();
  const long long all_stages = (long long)ceil_div(sizes.batch, sizes.images) * sizes.down * sizes.across;
  const int first_stage = static_cast<int>(all_stages * place.split / sizes.splits);
  const int stages = static_cast<int>(all_stages * (place.split + 1) / sizes.splits) - first_stage;
  ptx::wait_for_previous_launch();
  ptx::let_next_launch_start();
  if (warp < 4) {
    ptx::shrink_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) produce(ring, input, grad_output, place, sizes, first_stage, stages);
    if (warp >= 4 - BIAS_WARPS && place.adds_bias())
      add_bias(ring, place, sizes, warp - (4 - BIAS_WARPS), lane, stages, bias_partial);
  } else {
    ptx::grow_registers<CONSUMER_REGISTERS>();
    float sums[M_TILES][TILE_CI / 2];
    multiply(ring, sums, AAddresses(shared, warp - 4, lane, sizes), ExistingPixels(StagePlace(first_stage, sizes), sizes), sizes, lane, stages);
    store(sums, place, warp - 4, lane, sizes.in_weight_order, gradient);
  }
}
