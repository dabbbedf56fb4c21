// Fragments of mma.sync in TF32 out of boxes of the copy engine whose rows are k (pixels, images) and hold 32 channels
// each, [k][128 bytes] swizzled. A lane reads several channels of a k at a time. Which channel is which row or column of a
// fragment, and which row of a box which k, is chosen so that those reads meet all banks, and need no moves after them:
//
//   k of a step: lanes t = lane % 4 read 2t and 2t + 1
//   rows (A):    of a box's two tiles of 16, lanes g = lane / 4 read channels 16 i + 2g and the next
//   columns (B): of a box's four tiles of 8, lanes g read channels 4g to 4g + 3, one for each tile
#pragma once

#include "common/mma.cuh"

/// What one warp reads for 8 k of BOXES boxes, BOX_BYTES apart. `first`: where the first begins, a multiple of 1024.
template <int BOXES, int BOX_BYTES>
struct GatheredRows {
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

template <int BOXES, int BOX_BYTES>
struct GatheredColumns {
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

/// sums[2 * box + i][4 * box + q] += 16 rows, rounded, times 8 columns, which are rounded here.
template <int M_BOXES, int N_BOXES, int ROWS_BYTES, int COLUMNS_BYTES>
__device__ __forceinline__ void multiply_gathered(float (&sums)[M_BOXES * 2][N_BOXES * 4][4], const GatheredRows<M_BOXES, ROWS_BYTES>& rows,
                                                  const GatheredColumns<N_BOXES, COLUMNS_BYTES>& columns) {
#pragma unroll
  for (int j = 0; j < N_BOXES * 4; ++j) {
    const ptx::u32 column[2] = {ptx::round_to_nearest_tf32(columns.of[j / 4][0][j % 4]),
                                ptx::round_to_nearest_tf32(columns.of[j / 4][1][j % 4])};
#pragma unroll
    for (int i = 0; i < M_BOXES * 2; ++i) ptx::mma<ptx::TF32>(sums[i][j], rows.of[i / 2][i % 2], column);
  }
}

/// Calls store(number, row, column, four sums) for what this lane has: the row and the first of four columns, in the
/// warp's boxes. Two numbers that follow one another are neighbours; `four` may be changed.
template <int M_BOXES, int N_BOXES, typename Store>
__device__ __forceinline__ void each_gathered(float (&sums)[M_BOXES * 2][N_BOXES * 4][4], int lane, Store store) {
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
