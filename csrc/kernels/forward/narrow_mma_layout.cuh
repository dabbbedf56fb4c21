// The products of matrices as which forward/narrow_mma.cu computes a transposed convolution, and the order of its packed
// weights; shared with forward/narrow_mma_pack.cu.
//
// A position stands for STRIDE_H x STRIDE_W outputs (common/phases.cuh). For one group and one pass,
//   M = the outputs of a position that have taps: pixels of the position x output channels, 16 in a tile;
//   N = positions; K = shifts of the input x input channels.
// A pass is one row of the position, with V vertical taps, V_STEP input rows apart; or with STACKED the whole position, where
// every vertical shift of the input is one of the V, with zero weights for the pixels to which it does not contribute. A tile
// of M has all horizontal shifts that any of its pixels needs, again with zeros for the others. For each vertical tap, K is
// divided into halves of 8 input channels (4 words of two), [shift][channels, padded]; two halves are one multiply.
//
// Packed weights: [pass][group][tile of M][pair of halves][vertical tap][part], each an A fragment of common/mma.cuh.
// float32 has PARTS = 2 or 3 (common/parts.cuh).
#pragma once
#include "common/parts.cuh"
#include "common/phases.cuh"

constexpr int FRAGMENT_WORDS = 32 * 4;
constexpr int HALF_CHANNELS = 8;
/// Halves of K that the input channels of a group fill.
constexpr int GROUP_HALVES = ceil_div(CI_GROUP, HALF_CHANNELS);

constexpr int PASSES = STACKED ? 1 : STRIDE_H;
constexpr int PASS_ROWS = STRIDE_H / PASSES;
constexpr int V = STACKED ? Vertical::SPAN + 1 : Vertical::COUNT;
constexpr int V_STEP = STACKED ? 1 : Vertical::REACH;

/// The distance from a position to the input row that vertical tap V - 1 of a pass reads; tap v reads V - 1 - v steps further.
__device__ constexpr int first_row(int pass) {
  return STACKED ? Vertical::LOWEST : Vertical::phase(pass).origin - (V - 1) * V_STEP;
}
__device__ constexpr bool has_taps(int pass) { return STACKED || Vertical::phase(pass).count > 0; }

/// The columns of a position that have taps.
struct UsedColumns {
  int count, at[STRIDE_W];
};
__device__ constexpr UsedColumns used_columns() {
  UsedColumns used{};
  for (int column = 0; column < STRIDE_W; ++column)
    if (Horizontal::phase(column).count > 0) used.at[used.count++] = column;
  return used;
}
constexpr int COLUMNS = used_columns().count;
constexpr bool ALL_COLUMNS = COLUMNS == STRIDE_W;

constexpr int M = PASS_ROWS * COLUMNS * CO_GROUP;
constexpr int M_TILES = ceil_div(M, 16);

/// The output of row m of M: M is [row of the pass][column][channel], or with COLUMNS_FASTEST [row of the pass][channel]
/// [column].
struct Place {
  int row, column, channel;
};
__device__ constexpr Place place_of(int m, const UsedColumns& used) {
  if (COLUMNS_FASTEST) return {m / (COLUMNS * CO_GROUP), used.at[m % COLUMNS], m / COLUMNS % CO_GROUP};
  return {m / (COLUMNS * CO_GROUP), used.at[m / CO_GROUP % COLUMNS], m % CO_GROUP};
}
/// Whether outputs m and m + 1 of M, with m even, are neighbours in memory. One lane then holds both, in rows g and g + 8.
constexpr bool NEIGHBOURS =
    CHANNELS_LAST ? !COLUMNS_FASTEST && (CO_GROUP % 2 == 0 || (GROUPS == 1 && ALL_COLUMNS && STRIDE_W * CO_GROUP % 2 == 0))
                  : COLUMNS_FASTEST && ALL_COLUMNS && STRIDE_W % 2 == 0;
__device__ constexpr int m_of_row(int tile, int row) {
  return tile * 16 + (NEIGHBOURS ? row % 8 * 2 + row / 8 : row);
}

/// The horizontal shifts of each tile of M: `count` from `first` on, relative to the smallest of all; the smallest and the
/// largest count.
struct Shifts {
  int first[M_TILES], count[M_TILES], min_count, max_count;
};
__device__ constexpr Shifts tile_shifts() {
  const UsedColumns used = used_columns();
  int low[STRIDE_W] = {}, high[STRIDE_W] = {};
  for (int i = 0; i < COLUMNS; ++i) {
    const Phase phase = Horizontal::phase(used.at[i]);
    high[used.at[i]] = phase.origin - Horizontal::LOWEST;
    low[used.at[i]] = high[used.at[i]] - (phase.count - 1) * Horizontal::REACH;
  }
  Shifts shifts{};
  shifts.min_count = 1 << 30;
  for (int tile = 0; tile < M_TILES; ++tile) {
    int lowest = 1 << 30, highest = 0;
    for (int m = tile * 16; m < M && m < tile * 16 + 16; ++m) {
      const int column = place_of(m, used).column;
      lowest = min_of(lowest, low[column]);
      highest = max_of(highest, high[column]);
    }
    shifts.first[tile] = lowest;
    shifts.count[tile] = highest - lowest + 1;
    shifts.max_count = max_of(shifts.max_count, shifts.count[tile]);
    shifts.min_count = min_of(shifts.min_count, shifts.count[tile]);
  }
  return shifts;
}
__constant__ UsedColumns USED_COLUMNS = used_columns();
__constant__ Shifts SHIFTS = tile_shifts();

constexpr int PAIRS = ceil_div(tile_shifts().max_count * GROUP_HALVES, 2);
/// Whether all tiles have equally many shifts.
constexpr bool EQUAL_SHIFTS = tile_shifts().min_count == tile_shifts().max_count;
constexpr int TILE_FRAGMENTS = PAIRS * V * PARTS;
constexpr int PASS_FRAGMENTS = GROUPS * M_TILES * TILE_FRAGMENTS;
