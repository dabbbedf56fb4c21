// The last launch of grad_weight/implicit_gemm_*.cu: adds up the splits' partial sums of the weight's gradient and of
// the bias's in a fixed order. A thread adds up a unit of 4 sums; where there are many splits, several threads share a
// unit. The last blocks add up the bias: BIAS_LANES threads share the rows of a channel.
#include "common/compensated_sum.cuh"
#include "common/mma.cuh"
#include "grad_weight/implicit_gemm_layout.cuh"
#include "grad_weight/implicit_gemm_store.cuh"

struct ReduceSizes {
  int copies;         // partial sums of the weight's gradient
  int bias_rows;      // partial sums of the bias's gradient
  int weight_blocks;  // blocks that add up the weight's gradient
  int unit_bits;      // a block has 2^unit_bits units, which its threads share
};

__device__ __forceinline__ void add(float4& sum, const float4& part) {
  sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
}

__device__ __forceinline__ void reduce_bias(int block, int rows, const float* bias_partial, Element* bias_gradient) {
  constexpr int COLUMNS = REDUCE_THREADS / BIAS_LANES;
  __shared__ CompensatedSum<float> shared[BIAS_LANES][COLUMNS];
  const int column = threadIdx.x % COLUMNS, rank = threadIdx.x / COLUMNS, channel = block * COLUMNS + column;
  CompensatedSum<float> sum{};
  if (channel < OUT_CHANNELS) {
#pragma unroll 8
    for (int row = rank; row < rows; row += BIAS_LANES) sum.add(bias_partial[row * OUT_CHANNELS + channel]);
  }
  shared[rank][column] = sum;
  __syncthreads();
  if (rank || channel >= OUT_CHANNELS) return;
#pragma unroll
  for (int s = 1; s < BIAS_LANES; ++s) sum.add(shared[s][column]);
  bias_gradient[channel] = store_as<Element>(sum.value());
}

extern "C" __global__ void __launch_bounds__(REDUCE_THREADS)
    grad_weight_split_k_reduce(const float4* __restrict__ partial, const float* __restrict__ bias_partial,
                       Element* __restrict__ gradient, Element* __restrict__ bias_gradient,
                       const __grid_constant__ ReduceSizes sizes) {
  __shared__ float4 shared[REDUCE_THREADS];
  ptx::wait_for_previous_launch();
  const int block = static_cast<int>(blockIdx.x);
  if (block >= sizes.weight_blocks) {
    reduce_bias(block - sizes.weight_blocks, sizes.bias_rows, bias_partial, bias_gradient);
    return;
  }
  const int units = 1 << sizes.unit_bits, ranks = REDUCE_THREADS >> sizes.unit_bits;
  const int lane = threadIdx.x & (units - 1), rank = threadIdx.x >> sizes.unit_bits;
  const unsigned unit = (static_cast<unsigned>(block) << sizes.unit_bits) + lane;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  if (unit < SPLIT_UNITS) {
    const float4* from = partial + unit;
#pragma unroll 4
    for (int s = rank; s < sizes.copies; s += ranks) add(sum, from[s * SPLIT_UNITS]);
  }
  shared[threadIdx.x] = sum;
  __syncthreads();
  if (rank) return;
  for (int s = 1; s < ranks; ++s) add(sum, shared[(s << sizes.unit_bits) + lane]);
  if (unit >= SPLIT_UNITS) return;
  const unsigned fragment = unit / 32;
  const float values[4] = {sum.x, sum.y, sum.z, sum.w};
  for_each_sum(Place::of(static_cast<int>(fragment / (FRAGMENTS * TILE_WARPS))), WarpPlace(static_cast<int>(fragment / FRAGMENTS % TILE_WARPS)),
           static_cast<int>(fragment % FRAGMENTS), static_cast<int>(unit % 32),
           [&](long long offset, int r) { gradient[offset] = store_as<Element>(values[r]); });
}
