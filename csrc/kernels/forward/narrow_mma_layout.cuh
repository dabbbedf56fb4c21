// How forward/narrow_mma.cu turns a transposed convolution into products of matrices, and the order of its packed
// weights; shared with forward/narrow_mma_pack.cu.
//
// The output is cut into cells of STRIDE_H x STRIDE_W pixels (common/phases.cuh). For one group and one pass,
//   M = the outputs of a cell that have taps: pixels of the cell x output channels, 16 to a tile;
//   N = cells; K = shifts of the input x input channels.
// A pass is one row of the cell (vertical taps: V of them, V_STEP input rows apart), or with STACKED the whole cell
// (then every shift of the input by rows is one of the V, with zeros for the pixels it does not reach). By columns a
// tile of M takes all shifts that any of its pixels needs, again with zeros for the others. For each vertical tap,
// K is cut into halves of 8 input channels (4 words of two), [shift][channels, padded]; two make one multiply.
//
// Packed weights: [pass][group][tile of M][pair of halves][vertical tap][part], an A fragment of common/mma.cuh each.
// float32 has PARTS = 2 or 3 (common/parts.cuh).
#pragma once
#include "common/parts.cuh"
#include "common/phases.cuh"

constexpr int FRAGMENT_WORDS = 32 * 4;
constexpr int HALF_CHANNELS = 8;
/// Halves that the input channels of a group fill.
constexpr int GROUP_HALVES = ceil_div(CI_GROUP, HALF_CHANNELS);

constexpr int PASSES = STACKED ? 1 : STRIDE_H;
constexpr int PASS_ROWS = STRIDE_H / PASSES;
constexpr int V = STACKED ? Vertical::SPAN + 1 : Vertical::COUNT;
constexpr int V_STEP = STACKED ? 1 : Vertical::REACH;

/// The input row, after the cell's own, that vertical tap V - 1 of a pass reads; tap v reads V - 1 - v steps further.
__device__ constexpr int first_row(int pass) {
  return STACKED ? Vertical::LOWEST : Vertical::phase(pass).origin - (V - 1) * V_STEP;
}
__device__ constexpr bool has_taps(int pass) { return STACKED || Vertical::phase(pass).count > 0; }

/// Columns of a cell that have taps.
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

/// Place m of M: [row of the pass][column][channel], or with COLUMNS_FASTEST [row of the pass][channel][column].
struct Place {
  int row, column, channel;
};
__device__ constexpr Place place_of(int m, const UsedColumns& used) {
  if (COLUMNS_FASTEST) return {m / (COLUMNS * CO_GROUP), used.at[m % COLUMNS], m / COLUMNS % CO_GROUP};
  return {m / (COLUMNS * CO_GROUP), used.at[m / CO_GROUP % COLUMNS], m % CO_GROUP};
}
/// Whether places m and m + 1 of M, m even, are neighbours in memory; then one lane holds them, in rows g and g + 8.
constexpr bool NEIGHBOURS =
    CHANNELS_LAST ? !COLUMNS_FASTEST && (CO_GROUP % 2 == 0 || (GROUPS == 1 && ALL_COLUMNS && STRIDE_W * CO_GROUP % 2 == 0))
                  : COLUMNS_FASTEST && ALL_COLUMNS && STRIDE_W % 2 == 0;
__device__ constexpr int m_of_row(int tile, int row) {
  return tile * 16 + (NEIGHBOURS ? row % 8 * 2 + row / 8 : row);
}

/// Shifts by columns that each tile of M takes: `count` from `first` on, counted from the least of all.
struct Shifts {
  int first[M_TILES], count[M_TILES], least, most;
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
  shifts.least = 1 << 30;
  for (int tile = 0; tile < M_TILES; ++tile) {
    int least = 1 << 30, most = 0;
    for (int m = tile * 16; m < M && m < tile * 16 + 16; ++m) {
      const int column = place_of(m, used).column;
      if (low[column] < least) least = low[column];
      if (high[column] > most) most = high[column];
    }
    shifts.first[tile] = least;
    shifts.count[tile] = most - least + 1;
    if (shifts.count[tile] > shifts.most) shifts.most = shifts.count[tile];
    if (shifts.count[tile] < shifts.least) shifts.least = shifts.count[tile];
  }
  return shifts;
}
__constant__ UsedColumns USED_COLUMNS = used_columns();
__constant__ Shifts SHIFTS = tile_shifts();

constexpr int PAIRS = ceil_div(tile_shifts().most * GROUP_HALVES, 2);
/// Whether all tiles take equally many.
constexpr bool EQUAL_SHIFTS = tile_shifts().least == tile_shifts().most;
constexpr int TILE_FRAGMENTS = PAIRS * V * PARTS;
constexpr int PASS_FRAGMENTS = GROUPS * M_TILES * TILE_FRAGMENTS;
