// The last step of grad_weight_{direct,in_place,rows,strips}.cu: adds up the slices' sums [slice][ci][tap][co] of the
// weight's gradient in a fixed order, and brings them to the order of the weight. SHARERS threads share the slices of a
// sum.
//
// With few slices a block makes COLUMNS output channels of all taps of one input channel, and writes them in whole lines.
// With SHARERS > 1 the slices are most of what moves: a block makes THREADS / SHARERS sums that follow one another.
#include "common/mma.cuh"

constexpr int TAPS = KERNEL_H * KERNEL_W;
constexpr int CO_GROUP = OUT_CHANNELS / GROUPS;
constexpr long long SLICE = static_cast<long long>(IN_CHANNELS) * TAPS * CO_GROUP;

__device__ __forceinline__ void reduce_runs(const float* __restrict__ partial, Element* __restrict__ gradient, int slices) {
  constexpr int SUMS = THREADS / SHARERS;
  __shared__ float parts[SHARERS][SUMS];
  const int lane = threadIdx.x % SUMS, sharer = threadIdx.x / SUMS;
  const long long at = static_cast<long long>(blockIdx.x) * SUMS + lane;
  float sum = 0.f;
  if (at < SLICE) {
#pragma unroll 4
    for (int s = sharer; s < slices; s += SHARERS) sum += __ldg(partial + s * SLICE + at);
  }
  parts[sharer][lane] = sum;
  __syncthreads();
  if (sharer > 0 || at >= SLICE) return;
#pragma unroll
  for (int other = 1; other < SHARERS; ++other) sum += parts[other][lane];
  const long long row = at / CO_GROUP, ci = row / TAPS;
  gradient[WEIGHT_CHANNELS_LAST ? at : (ci * CO_GROUP + at % CO_GROUP) * TAPS + row % TAPS] = store_as<Element>(sum);
}

__device__ __forceinline__ void reduce_lines(const float* __restrict__ partial, Element* __restrict__ gradient, int slices) {
  constexpr int BLOCKS = (CO_GROUP + COLUMNS - 1) / COLUMNS, PITCH = TAPS | 1;
  __shared__ float turned[WEIGHT_CHANNELS_LAST ? 1 : COLUMNS * PITCH];
  const long long ci = blockIdx.x / BLOCKS;
  const int first = blockIdx.x % BLOCKS * COLUMNS, columns = first + COLUMNS < CO_GROUP ? COLUMNS : CO_GROUP - first;
#pragma unroll 4
  for (int e = threadIdx.x; e < TAPS * COLUMNS; e += THREADS) {
    const int tap = e / COLUMNS, column = e % COLUMNS;
    if (column >= columns) continue;
    const long long at = (ci * TAPS + tap) * CO_GROUP + first + column;
    float sum = 0.f;
#pragma unroll 4
    for (int s = 0; s < slices; ++s) sum += __ldg(partial + s * SLICE + at);
    if constexpr (WEIGHT_CHANNELS_LAST) {
      gradient[at] = store_as<Element>(sum);
    } else {
      turned[column * PITCH + tap] = sum;
    }
  }
  if constexpr (!WEIGHT_CHANNELS_LAST) {
    __syncthreads();
    for (int e = threadIdx.x; e < TAPS * columns; e += THREADS)
      gradient[(ci * CO_GROUP + first) * TAPS + e] = store_as<Element>(turned[e / TAPS * PITCH + e % TAPS]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    grad_weight_pixel_rows_reduce(const float* __restrict__ partial, Element* __restrict__ gradient, long long slices) {
  ptx::wait_for_previous_launch();
  ptx::let_next_launch_start();
  if constexpr (SHARERS > 1) {
    reduce_runs(partial, gradient, static_cast<int>(slices));
  } else {
    reduce_lines(partial, gradient, static_cast<int>(slices));
  }
}
