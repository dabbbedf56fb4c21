// The last step of grad_weight_*.cu: adds up the slices' partial sums of the weight's gradient, and of the bias's, in
// a fixed order. A thread adds up a unit of 4 sums; where there are many slices, SHARERS threads share them. The last
// blocks add up the bias: BIAS_LANES threads share the rows of a channel.
#include "compensated_sum.cuh"
#include "mma.cuh"
#include "grad_weight_layout.cuh"
#include "grad_weight_store.cuh"

constexpr int ALL_SLICES = SLICES * WARPS_K;
constexpr int UNITS = REDUCE_THREADS / SHARERS;
/// Without a workspace the gradient of the weight is done already.
constexpr long long WEIGHT_BLOCKS = THROUGH_WORKSPACE ? (SLICE_UNITS + UNITS - 1) / UNITS : 0;

__device__ __forceinline__ void add(float4& sum, const float4& part) {
  sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
}

__device__ __forceinline__ void reduce_bias(int block, const float* bias_partial, Element* bias_gradient) {
  constexpr int COLUMNS = REDUCE_THREADS / BIAS_LANES;
  __shared__ CompensatedSum<float> shared[BIAS_LANES][COLUMNS];
  const int column = threadIdx.x % COLUMNS, sharer = threadIdx.x / COLUMNS, channel = block * COLUMNS + column;
  CompensatedSum<float> sum{};
  if (channel < OUT_CHANNELS) {
#pragma unroll 8
    for (int row = sharer; row < SLICES * BIAS_ROWS; row += BIAS_LANES) sum.add(bias_partial[row * OUT_CHANNELS + channel]);
  }
  shared[sharer][column] = sum;
  __syncthreads();
  if (sharer || channel >= OUT_CHANNELS) return;
#pragma unroll
  for (int s = 1; s < BIAS_LANES; ++s) sum.add(shared[s][column]);
  bias_gradient[channel] = store_as<Element>(sum.value());
}

extern "C" __global__ void __launch_bounds__(REDUCE_THREADS)
    grad_weight_reduce(const float4* __restrict__ partial, const float* __restrict__ bias_partial,
                       Element* __restrict__ gradient, Element* __restrict__ bias_gradient) {
  __shared__ float4 shared[SHARERS][UNITS];
  ptx::wait_for_previous_launch();
  if (blockIdx.x >= WEIGHT_BLOCKS) {
    reduce_bias(static_cast<int>(blockIdx.x - WEIGHT_BLOCKS), bias_partial, bias_gradient);
    return;
  }
  const int lane = threadIdx.x % UNITS, sharer = threadIdx.x / UNITS;
  const unsigned unit = blockIdx.x * UNITS + lane;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  if (unit < SLICE_UNITS) {
    const float4* from = partial + unit;
#pragma unroll 4
    for (int s = sharer; s < ALL_SLICES; s += SHARERS) add(sum, from[s * SLICE_UNITS]);
  }
  shared[sharer][lane] = sum;
  __syncthreads();
  if (sharer) return;
#pragma unroll
  for (int s = 1; s < SHARERS; ++s) add(sum, shared[s][lane]);
  if (unit >= SLICE_UNITS) return;
  const unsigned fragment = unit / 32;
  const float values[4] = {sum.x, sum.y, sum.z, sum.w};
  each_sum(Place::of(static_cast<int>(fragment / (FRAGMENTS * TILE_WARPS))), WarpPlace(static_cast<int>(fragment / FRAGMENTS % TILE_WARPS)),
           static_cast<int>(fragment % FRAGMENTS), static_cast<int>(unit % 32),
           [&](long long offset, int r) { gradient[offset] = store_as<Element>(values[r]); });
}
