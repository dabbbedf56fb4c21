// The last step of grad_weight_rows.cu: adds up the slices' sums [slice][ci][tap][co] of the weight's gradient in a fixed
// order, and brings them to the order of the weight. A block makes COLUMNS output channels of all taps of one input
// channel; SHARERS threads share the slices of a sum.
#include "mma.cuh"

constexpr int TAPS = KERNEL_H * KERNEL_W;
constexpr int CO_GROUP = OUT_CHANNELS / GROUPS;
constexpr int BLOCKS = (CO_GROUP + COLUMNS - 1) / COLUMNS;
constexpr int UNITS = THREADS / SHARERS;
constexpr int PITCH = TAPS | 1;

extern "C" __global__ void __launch_bounds__(THREADS)
    grad_weight_rows_reduce(const float* __restrict__ partial, float* __restrict__ gradient, long long slices) {
  __shared__ float parts[SHARERS][UNITS];
  __shared__ float turned[WEIGHT_CHANNELS_LAST ? 1 : COLUMNS * PITCH];
  ptx::wait_for_previous_launch();
  ptx::let_next_launch_start();
  constexpr long long SLICE = static_cast<long long>(IN_CHANNELS) * TAPS * CO_GROUP;
  const long long ci = blockIdx.x / BLOCKS;
  const int first = blockIdx.x % BLOCKS * COLUMNS, columns = first + COLUMNS < CO_GROUP ? COLUMNS : CO_GROUP - first;
  const int lane = threadIdx.x % UNITS, sharer = threadIdx.x / UNITS;
#pragma unroll 4
  for (int e0 = 0; e0 < TAPS * COLUMNS; e0 += UNITS) {
    const int e = e0 + lane, tap = e / COLUMNS, column = e % COLUMNS;
    const bool exists = tap < TAPS && column < columns;
    const long long at = (ci * TAPS + tap) * CO_GROUP + first + column;
    float sum = 0.f;
    if (exists) {
#pragma unroll 4
      for (int s = sharer; s < static_cast<int>(slices); s += SHARERS) sum += __ldg(partial + s * SLICE + at);
    }
    if constexpr (SHARERS > 1) {
      parts[sharer][lane] = sum;
      __syncthreads();
      if (sharer == 0) {
#pragma unroll
        for (int other = 1; other < SHARERS; ++other) sum += parts[other][lane];
      }
    }
    if (sharer == 0 && exists) {
      if constexpr (WEIGHT_CHANNELS_LAST) {
        gradient[at] = sum;
      } else {
        turned[column * PITCH + tap] = sum;
      }
    }
    if constexpr (SHARERS > 1) __syncthreads();
  }
  if constexpr (!WEIGHT_CHANNELS_LAST) {
    __syncthreads();
    for (int e = threadIdx.x; e < TAPS * columns; e += THREADS)
      gradient[(ci * CO_GROUP + first) * TAPS + e] = turned[e / TAPS * PITCH + e % TAPS];
  }
}
