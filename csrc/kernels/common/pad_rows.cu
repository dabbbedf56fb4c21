// Copies rows to rows of more columns, which TMA and copies of several elements can read: whole pieces of 16 bytes each. The
// added columns are zeros: channels of zeros, or columns that tensor maps leave out, where writing whole sectors of memory is
// faster than writing parts of them.
//
// A thread writes EACH pieces. The elements of a piece may begin anywhere: it loads the two aligned pieces that hold them,
// or, where these reach beyond the source, one element after the other.
#include "common/sizes.cuh"
#include "common/types.cuh"

struct RowSizes {
  int rows, width;
  Divisor pieces;  // of a row of the copy
};

constexpr int PIECE_BYTES = 16, PIECE = PIECE_BYTES / static_cast<int>(sizeof(Element));

union Piece {
  uint4 vector;
  unsigned words[4];
  Element elements[PIECE];
};

/// Returns the 16 bytes that begin `offset` bytes (0 to 15) behind the first of `low`, followed by `high`.
__device__ __forceinline__ Piece joined(const uint4& low, const uint4& high, int offset) {
  unsigned words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int by = 2; by > 0; by /= 2)
#pragma unroll
    for (int i = 0; i + by < 8; ++i) words[i] = offset & 4 * by ? words[i + by] : words[i];
  Piece piece;
#pragma unroll
  for (int i = 0; i < 4; ++i) piece.words[i] = __funnelshift_r(words[i], words[i + 1], offset % 4 * 8);
  return piece;
}

/// Returns the `count` elements that begin at `from`, and zeros behind them.
__device__ __forceinline__ Piece load_piece(const Element* from, int count, const Element* begin, const Element* end) {
  const char* const address = reinterpret_cast<const char*>(from);
  const int offset = static_cast<int>(reinterpret_cast<unsigned long long>(address) % PIECE_BYTES);
  const char* const aligned = address - offset;
  Piece piece{};
  if (aligned >= reinterpret_cast<const char*>(begin) && aligned + 2 * PIECE_BYTES <= reinterpret_cast<const char*>(end)) {
    const uint4* const pieces = reinterpret_cast<const uint4*>(aligned);
    piece = joined(__ldg(pieces), __ldg(pieces + 1), offset);
#pragma unroll
    for (int i = 0; i < PIECE; ++i)
      if (i >= count) piece.elements[i] = Element{};
  } else {
#pragma unroll
    for (int i = 0; i < PIECE; ++i)
      if (i < count) piece.elements[i] = from[i];
  }
  return piece;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    pad_rows(const Element* __restrict__ source, uint4* __restrict__ to, const __grid_constant__ RowSizes sizes) {
  const int first = static_cast<int>(blockIdx.x * (THREADS * EACH) + threadIdx.x);
  const Element* const end = source + sizes.rows * static_cast<long long>(sizes.width);
  Piece pieces[EACH];
#pragma unroll
  for (int k = 0; k < EACH; ++k) {
    const int i = first + k * THREADS, row = sizes.pieces.quotient(i), column = sizes.pieces.remainder(i, row) * PIECE;
    pieces[k] = row < sizes.rows && column < sizes.width
                    ? load_piece(source + row * static_cast<long long>(sizes.width) + column, sizes.width - column, source, end)
                    : Piece{};
  }
#pragma unroll
  for (int k = 0; k < EACH; ++k) {
    const int i = first + k * THREADS;
    if (i < sizes.rows * static_cast<int>(sizes.pieces.value)) to[i] = pieces[k].vector;
  }
}
