// Which taps reach which outputs, at compile time; shared by pack_weights.cu and forward_tile.cu.
//
// The output is cut into cells of STRIDE_H x STRIDE_W pixels. Output o = j * STRIDE + b is phase b of cell j, and
// tap k reaches it from input j + shift(k) exactly when b = phase(k). A block computes PHASE_ROWS x PHASE_COLS
// phases of its cells, a "phase group"; packed weights are ordered by group, then by tap within the group.
//
// Constants, from the plan: KERNEL_*, STRIDE_*, PADDING_*, DILATION_*, PHASE_ROWS, PHASE_COLS.
#pragma once

struct Axis {
  int kernel, stride, padding, dilation, group_phases;

  __device__ constexpr int phase(int k) const {
    return ((k * dilation - padding) % stride + stride) % stride;
  }
  __device__ constexpr int shift(int k) const { return (phase(k) + padding - k * dilation) / stride; }
  __device__ constexpr int group(int k) const { return phase(k) / group_phases; }
  __device__ constexpr int groups() const { return stride / group_phases; }
  /// Taps of a group.
  __device__ constexpr int count(int g) const {
    int n = 0;
    for (int k = 0; k < kernel; ++k) n += group(k) == g;
    return n;
  }
  /// Place of tap k among the taps of its group.
  __device__ constexpr int rank(int k) const {
    int n = 0;
    for (int i = 0; i < k; ++i) n += group(i) == group(k);
    return n;
  }
  __device__ constexpr int min_shift() const {
    int least = shift(0);
    for (int k = 1; k < kernel; ++k) least = shift(k) < least ? shift(k) : least;
    return least;
  }
  __device__ constexpr int max_shift() const {
    int most = shift(0);
    for (int k = 1; k < kernel; ++k) most = shift(k) > most ? shift(k) : most;
    return most;
  }
  /// Whether every group has the same taps, so that one code serves them all: tap of equal rank, equal shift and
  /// equal place of the phase in its group.
  __device__ constexpr bool uniform() const {
    for (int g = 1; g < groups(); ++g)
      if (count(g) != count(0)) return false;
    for (int k = 0; k < kernel; ++k)
      for (int i = 0; i < kernel; ++i)
        if (rank(i) == rank(k) &&
            (shift(i) != shift(k) || phase(i) % group_phases != phase(k) % group_phases))
          return false;
    return true;
  }
};

constexpr Axis ROWS_AXIS{KERNEL_H, STRIDE_H, PADDING_H, DILATION_H, PHASE_ROWS};
constexpr Axis COLS_AXIS{KERNEL_W, STRIDE_W, PADDING_W, DILATION_W, PHASE_COLS};
constexpr int TAPS = KERNEL_H * KERNEL_W;
constexpr int GROUP_ROWS = ROWS_AXIS.groups(), GROUP_COLS = COLS_AXIS.groups();
constexpr int PHASE_GROUPS = GROUP_ROWS * GROUP_COLS;

__device__ constexpr int group_taps(int group) {
  return ROWS_AXIS.count(group / GROUP_COLS) * COLS_AXIS.count(group % GROUP_COLS);
}
/// Taps of all groups before this one.
__device__ constexpr int taps_before(int group) {
  int n = 0;
  for (int g = 0; g < group; ++g) n += group_taps(g);
  return n;
}

// ---- the packed weights -------------------------------------------------------------------------------------
//
// [phase group][channel group][block of BLOCK_M channels][step of 8 words of k][tap][tile of 16 channels][lane]
// [4 words of an A fragment]; with IEEE, [high, low parts] before the tile. A word of k is one input channel, or
// two of 16 bits. Rows past the last channel and words past the last input channel are zeros.

constexpr int CHANNELS_PER_WORD = PRECISION == ptx::FP16 || PRECISION == ptx::BF16 ? 2 : 1;
constexpr int CI_GROUP = IN_CHANNELS / GROUPS, CO_GROUP = OUT_CHANNELS / GROUPS;
constexpr int PARTS = PRECISION == ptx::IEEE ? 2 : 1;
constexpr int BLOCK_M = WARPS_M * WARP_M_TILES * 16;
constexpr int M_BLOCKS = (CO_GROUP + BLOCK_M - 1) / BLOCK_M;
constexpr int BLOCK_M_TILES = BLOCK_M / 16;
constexpr int FRAGMENT_WORDS = 32 * 4;
constexpr int STEP_WORDS = 8;
constexpr int CI_WORDS = (CI_GROUP + CHANNELS_PER_WORD - 1) / CHANNELS_PER_WORD;
constexpr int CHUNKS = (CI_WORDS + CHUNK_WORDS - 1) / CHUNK_WORDS;
constexpr int CHUNK_STEPS = CHUNK_WORDS / STEP_WORDS;
constexpr int STEPS = CHUNKS * CHUNK_STEPS;

/// Words of one tap of one step for one block of channels.
constexpr int TAP_WORDS = PARTS * BLOCK_M_TILES * FRAGMENT_WORDS;

/// Channel, counted within its block, that lies in row `row` of tile `tile`. For channels_last outputs the rows
/// that one lane holds (row g and g + 8 of each of its warp's tiles) are neighbours, so that it stores vectors.
__device__ constexpr int channel_of_row(int tile, int row) {
  const int warp = tile / WARP_M_TILES, i = tile % WARP_M_TILES;
  return OUTPUT_CHANNELS_LAST ? warp * WARP_M_TILES * 16 + (row % 8) * 2 * WARP_M_TILES + i * 2 + row / 8
                              : tile * 16 + row;
}
