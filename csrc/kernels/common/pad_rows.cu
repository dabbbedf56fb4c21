// Copies rows to rows of `padded` columns, a multiple of 16 bytes, which TMA and copies of several elements can read. The
// added columns are zeros: channels of zeros, or columns that tensor maps leave out, where writing whole sectors of memory is
// faster than writing parts of them.
#include "common/sizes.cuh"
#include "common/types.cuh"

struct RowSizes {
  int rows, width;
  Divisor padded;  // columns of a padded row
};

extern "C" __global__ void __launch_bounds__(THREADS)
    pad_rows(const Element* __restrict__ source, Element* __restrict__ to, const __grid_constant__ RowSizes sizes) {
  const int first = static_cast<int>(blockIdx.x * (THREADS * EACH) + threadIdx.x);
  Element values[EACH];
#pragma unroll
  for (int k = 0; k < EACH; ++k) {
    const int i = first + k * THREADS, row = sizes.padded.quotient(i), column = sizes.padded.remainder(i, row);
    values[k] = row < sizes.rows && column < sizes.width ? source[row * static_cast<long long>(sizes.width) + column] : Element{};
  }
#pragma unroll
  for (int k = 0; k < EACH; ++k) {
    const int i = first + k * THREADS;
    if (i < sizes.rows * static_cast<int>(sizes.padded.value)) to[i] = values[k];
  }
}
