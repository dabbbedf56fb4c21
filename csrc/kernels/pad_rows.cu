// float32 rows copied to rows of `padded` columns, which the copy engine can read: multiples of 16 bytes. What is added is
// not written: tensor maps leave it out.
#include "sizes.cuh"

struct RowSizes {
  int elements;  // of all rows
  int padded;
  Divisor columns;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    pad_rows(const float* __restrict__ source, float* __restrict__ to, const __grid_constant__ RowSizes sizes) {
  const int first = static_cast<int>(blockIdx.x * (THREADS * EACH) + threadIdx.x);
  float values[EACH];
#pragma unroll
  for (int k = 0; k < EACH; ++k) {
    const int i = first + k * THREADS;
    values[k] = i < sizes.elements ? source[i] : 0.f;
  }
#pragma unroll
  for (int k = 0; k < EACH; ++k) {
    const int i = first + k * THREADS, row = sizes.columns.quotient(i);
    if (i < sizes.elements) to[row * static_cast<long long>(sizes.padded) + sizes.columns.remainder(i, row)] = values[k];
  }
}
