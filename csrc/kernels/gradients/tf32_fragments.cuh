// TF32 fragments of mma.sync, loaded from swizzled TMA boxes [k][128 bytes]: a row of a box is a k (a pixel, an image) and
// holds 32 channels. A lane reads several channels of a k at a time. The assignment of channels to the rows and columns of a
// fragment, and of the rows of a box to k, lets those reads use all banks and makes moves after them unnecessary:
//
//   k of a step: lanes t = lane % 4 read 2t and 2t + 1
//   rows (A):    of a box's two tiles of 16, lanes g = lane / 4 read channels 16 i + 2g and the next one
//   columns (B): of a box's four tiles of 8, lanes g read channels 4g to 4g + 3, one for each tile
#pragma once

#include "common/mma.cuh"

/// The A fragments of a warp for 8 k of BOXES boxes, BOX_BYTES apart. `first`: the address of the first box, a multiple of
/// 1024.
template <int BOXES, int BOX_BYTES>
struct RowFragments {
  uint4 of[BOXES][2];

  __device__ __forceinline__ void load(ptx::u32 first, int step, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const ptx::u32 even = first + 2 * t * 128 + ((4 * i + g / 2) ^ (2 * t)) * 16 + g % 2 * 8;
      const ptx::u32 odd = first + (2 * t + 1) * 128 + ((4 * i + g / 2) ^ (2 * t + 1)) * 16 + g % 2 * 8;
#pragma unroll
      for (int b = 0; b < BOXES; ++b) {
        ptx::u32 words[4];
        ptx::load_shared_bytes<8>(words, even + b * BOX_BYTES + step * 1024);
        ptx::load_shared_bytes<8>(words + 2, odd + b * BOX_BYTES + step * 1024);
        of[b][i] = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
};

/// The B fragments of a warp for 8 k of BOXES boxes.
template <int BOXES, int BOX_BYTES>
struct ColumnFragments {
  ptx::u32 of[BOXES][2][4];

  __device__ __forceinline__ void load(ptx::u32 first, int step, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const ptx::u32 from = first + (2 * t + k) * 128 + (g ^ (2 * t + k)) * 16;
#pragma unroll
      for (int b = 0; b < BOXES; ++b) ptx::load_shared_bytes<16>(of[b][k], from + b * BOX_BYTES + step * 1024);
    }
  }
};

/// Adds to sums[2 * box + i][4 * box + q] the product of 16 rows, which are rounded already, and 8 columns, which this rounds.
template <int M_BOXES, int N_BOXES, int ROWS_BYTES, int COLUMNS_BYTES>
__device__ __forceinline__ void multiply_fragments(float (&sums)[M_BOXES * 2][N_BOXES * 4][4], const RowFragments<M_BOXES, ROWS_BYTES>& rows,
                                                  const ColumnFragments<N_BOXES, COLUMNS_BYTES>& columns) {
#pragma unroll
  for (int j = 0; j < N_BOXES * 4; ++j) {
    const ptx::u32 column[2] = {ptx::round_to_nearest_tf32(columns.of[j / 4][0][j % 4]),
                                ptx::round_to_nearest_tf32(columns.of[j / 4][1][j % 4])};
#pragma unroll
    for (int i = 0; i < M_BOXES * 2; ++i) ptx::mma<ptx::TF32>(sums[i][j], rows.of[i / 2][i % 2], column);
  }
}

/// Calls store(number, row, column, four sums) for each four neighbouring sums of this lane, with their row and first column in
/// the warp's boxes. Consecutive numbers are neighbours; `store` may change the sums.
template <int M_BOXES, int N_BOXES, typename Store>
__device__ __forceinline__ void each_four_sums(float (&sums)[M_BOXES * 2][N_BOXES * 4][4], int lane, Store store) {
#pragma unroll
  for (int b = 0; b < N_BOXES; ++b)
#pragma unroll
    for (int i = 0; i < M_BOXES * 2; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        auto& of = sums[i];
        float4 four = make_float4(of[b * 4][c], of[b * 4 + 1][c], of[b * 4 + 2][c], of[b * 4 + 3][c]);
        store((b * M_BOXES * 2 + i) * 4 + c, i * 16 + lane / 4 * 2 + c / 2, b * 32 + lane % 4 * 8 + c % 2 * 4, four);
        of[b * 4][c] = four.x, of[b * 4 + 1][c] = four.y, of[b * 4 + 2][c] = four.z, of[b * 4 + 3][c] = four.w;
      }
}
