// The last launch of grad_weight/{im2col_nchw,im2col_nhwc,stride1}.cu: adds up the splits' sums [split][ci][tap][co] of the
// weight's gradient in a fixed order, and writes them in the layout of the weight. THREADS_PER_SUM threads share the splits
// of a sum. Those sums lie as a weight does; split_k_reduce.cu adds up the tiles of the implicit GEMM.
//
// With few splits a block makes COLUMNS output channels of all taps of one input channel, and writes them
// contiguously. With THREADS_PER_SUM > 1 reading the splits is most of the work: a block makes THREADS /
// THREADS_PER_SUM neighbouring sums.
#include "common/mma.cuh"

constexpr int TAPS = KERNEL_H * KERNEL_W;
constexpr int CO_GROUP = OUT_CHANNELS / GROUPS;
constexpr long long SPLIT_SUMS = static_cast<long long>(IN_CHANNELS) * TAPS * CO_GROUP;

__device__ __forceinline__ void reduce_contiguous(const float* __restrict__ partial, Element* __restrict__ gradient, int splits) {
  constexpr int SUMS = THREADS / THREADS_PER_SUM;
  __shared__ float parts[THREADS_PER_SUM][SUMS];
  const int lane = threadIdx.x % SUMS, rank = threadIdx.x / SUMS;
  const long long at = static_cast<long long>(blockIdx.x) * SUMS + lane;
  float sum = 0.f;
  if (at < SPLIT_SUMS) {
#pragma unroll 4
    for (int s = rank; s < splits; s += THREADS_PER_SUM) sum += __ldg(partial + s * SPLIT_SUMS + at);
  }
  parts[rank][lane] = sum;
  __syncthreads();
  if (rank > 0 || at >= SPLIT_SUMS) return;
#pragma unroll
  for (int other = 1; other < THREADS_PER_SUM; ++other) sum += parts[other][lane];
  const long long row = at / CO_GROUP, ci = row / TAPS;
  gradient[WEIGHT_CHANNELS_LAST ? at : (ci * CO_GROUP + at % CO_GROUP) * TAPS + row % TAPS] = store_as<Element>(sum);
}

__device__ __forceinline__ void reduce_channels(const float* __restrict__ partial, Element* __restrict__ gradient, int splits) {
  constexpr int BLOCKS = (CO_GROUP + COLUMNS - 1) / COLUMNS, PITCH = TAPS | 1;
  __shared__ float transposed[WEIGHT_CHANNELS_LAST ? 1 : COLUMNS * PITCH];
  const long long ci = blockIdx.x / BLOCKS;
  const int first = blockIdx.x % BLOCKS * COLUMNS, columns = first + COLUMNS < CO_GROUP ? COLUMNS : CO_GROUP - first;
#pragma unroll 4
  for (int e = threadIdx.x; e < TAPS * COLUMNS; e += THREADS) {
    const int tap = e / COLUMNS, column = e % COLUMNS;
    if (column >= columns) continue;
    const long long at = (ci * TAPS + tap) * CO_GROUP + first + column;
    float sum = 0.f;
#pragma unroll 4
    for (int s = 0; s < splits; ++s) sum += __ldg(partial + s * SPLIT_SUMS + at);
    if constexpr (WEIGHT_CHANNELS_LAST) {
      gradient[at] = store_as<Element>(sum);
    } else {
      transposed[column * PITCH + tap] = sum;
    }
  }
  if constexpr (!WEIGHT_CHANNELS_LAST) {
    __syncthreads();
    for (int e = threadIdx.x; e < TAPS * columns; e += THREADS)
      gradient[(ci * CO_GROUP + first) * TAPS + e] = store_as<Element>(transposed[e / TAPS * PITCH + e % TAPS]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    grad_weight_split_k_reduce_untiled(const float* __restrict__ partial, Element* __restrict__ gradient, long long splits) {
  ptx::wait_for_previous_launch();
  ptx::let_next_launch_start();
  if constexpr (THREADS_PER_SUM > 1) {
    reduce_contiguous(partial, gradient, static_cast<int>(splits));
  } else {
    reduce_channels(partial, gradient, static_cast<int>(splits));
  }
}
