// Which taps contribute to which outputs, at compile time, and the order of packed weights; shared by all kernels of the
// forward implicit GEMM and by those of grad_input/ with stride 1.
//
// A position stands for STRIDE_H x STRIDE_W outputs, one of each phase: output o = j * STRIDE + b is phase b of position j.
// Tap k contributes to it from input j + shift(k) exactly when b = phase(k). A block computes PHASE_ROWS x PHASE_COLS phases
// of its positions, a "phase group". Packed weights are ordered by phase group, then by tap within the group.
//
// STACK > 1 (few output channels, DILATION_H 1): a position is STACK rows high, a multiple of STRIDE_H, and a block of M is
// [row v of the position][channel], so that 32 channels fill 64 rows of a multiply. Each shift of the input by rows is then
// one "tap", whose row v holds kernel row v + PADDING_H - STRIDE_H * shift, or zeros where the kernel has no such row.
//
// Constants, from the plan: KERNEL_*, STRIDE_*, PADDING_*, DILATION_*, PHASE_ROWS, PHASE_COLS, STACK.
#pragma once

#include "common/integers.cuh"

struct Axis {
  int kernel, stride, padding, dilation, group_phases;

  __device__ constexpr int phase(int k) const {
    return ((k * dilation - padding) % stride + stride) % stride;
  }
  __device__ constexpr int shift(int k) const { return (phase(k) + padding - k * dilation) / stride; }
  __device__ constexpr int group(int k) const { return phase(k) / group_phases; }
  __device__ constexpr int groups() const { return stride / group_phases; }
  /// The number of taps of a group.
  __device__ constexpr int count(int g) const {
    int n = 0;
    for (int k = 0; k < kernel; ++k) n += group(k) == g;
    return n;
  }
  /// The index of tap k among the taps of its group.
  __device__ constexpr int rank(int k) const {
    int n = 0;
    for (int i = 0; i < k; ++i) n += group(i) == group(k);
    return n;
  }
  __device__ constexpr int min_shift() const {
    int found = shift(0);
    for (int k = 1; k < kernel; ++k) found = min_of(found, shift(k));
    return found;
  }
  __device__ constexpr int max_shift() const {
    int found = shift(0);
    for (int k = 1; k < kernel; ++k) found = max_of(found, shift(k));
    return found;
  }
  /// Whether all groups have the same taps, so that the same code computes them: taps of equal rank have equal shifts, and
  /// their phases have equal indices within their groups.
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

constexpr int STACK_MAX_SHIFT = floor_div(STACK - 1 + PADDING_H, STRIDE_H);
constexpr int STACK_MIN_SHIFT = -floor_div(KERNEL_H - 1 - PADDING_H, STRIDE_H);
/// The kernel row of stacked tap `tap` in row v of a position; outside the kernel where there is none.
__device__ constexpr int stacked_kernel_row(int v, int tap) {
  return v + PADDING_H - STRIDE_H * (STACK_MAX_SHIFT - tap);
}

/// The height of a position, in rows of the output and of the input.
constexpr int POSITION_ROWS = STACK > 1 ? STACK : STRIDE_H;
constexpr int POSITION_INPUT_ROWS = STACK > 1 ? STACK / STRIDE_H : 1;
static_assert(STACK == 1 || (STACK % STRIDE_H == 0 && DILATION_H == 1 && PHASE_ROWS == 1 && PLANES));

constexpr Axis ROWS_AXIS =
    STACK > 1 ? Axis{STACK_MAX_SHIFT - STACK_MIN_SHIFT + 1, 1, STACK_MAX_SHIFT, 1, 1}
              : Axis{KERNEL_H, STRIDE_H, PADDING_H, DILATION_H, PHASE_ROWS};
constexpr Axis COLS_AXIS{KERNEL_W, STRIDE_W, PADDING_W, DILATION_W, PHASE_COLS};
constexpr int TAPS = ROWS_AXIS.kernel * KERNEL_W;
constexpr int GROUP_ROWS = ROWS_AXIS.groups(), GROUP_COLS = COLS_AXIS.groups();
constexpr int PHASE_GROUPS = GROUP_ROWS * GROUP_COLS;

__device__ constexpr int group_taps(int group) {
  return ROWS_AXIS.count(group / GROUP_COLS) * COLS_AXIS.count(group % GROUP_COLS);
}
/// The number of taps of all groups before this one.
__device__ constexpr int taps_before(int group) {
  int n = 0;
  for (int g = 0; g < group; ++g) n += group_taps(g);
  return n;
}

// ---- the packed weights -------------------------------------------------------------------------------------
//
// [phase group][channel group][block of BLOCK_M channels][step of 8 words of k][tap], then for mma.sync [tile of 16
// channels][lane][4 words of an A fragment], with IEEE [high, low parts] before the tile; for wgmma (PLANES) [64
// channels][half of the step][channel][4 words]. A word of k is one input channel, or two of 16 bits. Rows past the
// last channel and words past the last input channel are zeros.

constexpr int CHANNELS_PER_WORD = PRECISION == ptx::FP16 || PRECISION == ptx::BF16 ? 2 : 1;
constexpr int CI_GROUP = IN_CHANNELS / GROUPS, CO_GROUP = OUT_CHANNELS / GROUPS;
constexpr int PARTS = PRECISION == ptx::IEEE ? 2 : 1;
constexpr int BLOCK_M = WARPS_M * WARP_M_TILES * 16;
constexpr int BLOCK_CHANNELS = BLOCK_M / STACK;
constexpr int M_BLOCKS = (CO_GROUP + BLOCK_CHANNELS - 1) / BLOCK_CHANNELS;
constexpr int BLOCK_M_TILES = BLOCK_M / 16;
constexpr int FRAGMENT_WORDS = 32 * 4;
constexpr int STEP_WORDS = 8;
constexpr int CI_WORDS = (CI_GROUP + CHANNELS_PER_WORD - 1) / CHANNELS_PER_WORD;
constexpr int CHUNKS = (CI_WORDS + CHUNK_WORDS - 1) / CHUNK_WORDS;
constexpr int CHUNK_STEPS = CHUNK_WORDS / STEP_WORDS;
constexpr int STEPS = CHUNKS * CHUNK_STEPS;

/// Words of the weights of one tap and step, for one block of channels.
constexpr int TAP_WORDS = PARTS * BLOCK_M_TILES * FRAGMENT_WORDS;

/// The channel, counted within its block (with STACK, [v][channel]), of row `row` of tile `tile`. With PAIRED_ROWS
/// (channels_last outputs of packed weights) the rows of one lane (g and g + 8 of each of its warp's tiles) are neighbouring
/// channels, so that it stores vectors.
__device__ constexpr int channel_of_row(int tile, int row) {
  const int warp = tile / WARP_M_TILES, i = tile % WARP_M_TILES;
  return PAIRED_ROWS ? warp * WARP_M_TILES * 16 + (row % 8) * 2 * WARP_M_TILES + i * 2 + row / 8
                              : tile * 16 + row;
}

/// The inverse: the tile and the row of channel `unit` of the block; or, with two CHANNELS, of the `unit`-th pair of channels
/// in rows g and g + 8.
template <int CHANNELS>
__device__ constexpr int tile_of_unit(int unit) {
  constexpr int WARP_UNITS = WARP_M_TILES * 16 / CHANNELS;
  return PAIRED_ROWS ? unit / WARP_UNITS * WARP_M_TILES + unit % (WARP_M_TILES * 2 / CHANNELS) * CHANNELS / 2
                              : unit * CHANNELS / 16;
}
template <int CHANNELS>
__device__ constexpr int row_of_unit(int unit) {
  constexpr int WARP_UNITS = WARP_M_TILES * 16 / CHANNELS;
  return PAIRED_ROWS
             ? unit % WARP_UNITS / (WARP_M_TILES * 2 / CHANNELS) + (CHANNELS == 1 ? unit % 2 * 8 : 0)
             : unit % (16 / CHANNELS);
}
