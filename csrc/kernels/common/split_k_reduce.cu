// output[i] = sum over splits s of partial[s, i]: the last step of every sum that was split over blocks. LANES threads share
// an output: each adds up every LANES-th split in the order of s, then pairs of lanes add up their sums until one is left.
#include "common/compensated_sum.cuh"
#include "common/mma.cuh"

constexpr int COLUMNS = THREADS / LANES;
using Sum = Accumulate<Element>::type;

extern "C" __global__ void __launch_bounds__(THREADS)
    split_k_reduce(const Sum* __restrict__ partial, Element* __restrict__ output, long long count,
                  long long splits) {
  __shared__ CompensatedSum<Sum> shared[LANES][COLUMNS];
  const int column = threadIdx.x % COLUMNS, lane = threadIdx.x / COLUMNS;
  const long long i = (long long)blockIdx.x * COLUMNS + column;
  CompensatedSum<Sum> sum{};
  ptx::wait_for_previous_launch();
  if (i < count) {
#pragma unroll 8
    for (long long s = lane; s < splits; s += LANES) sum.add(partial[s * count + i]);
  }
  static_assert((LANES & (LANES - 1)) == 0, "lanes are added up in pairs");
  if constexpr (LANES > 1) {
#pragma unroll
    for (int half = LANES / 2; half > 0; half /= 2) {
      if (lane >= half && lane < 2 * half) shared[lane][column] = sum;
      __syncthreads();
      if (lane < half) sum.add(shared[lane + half][column]);
    }
    if (lane > 0) return;
  }
  if (i < count) output[i] = store_as<Element>(sum.value());
}
