// Of grad_weight/im2col_nhwc.cu: which of the gradient's entries a block holds, and how a stage lies.
//
// A stage is IMAGES x ROWS x COLS = 32 pixels of the input, in boxes of 32 channels, [box][pixel][32 channels], and of
// grad_output the pixels that they reach, [row of taps][box of columns][32 channels][image][row][column]. Taps whose
// offsets differ by a multiple of the stride read one box of columns, shifted; FLAT: each tap has its own.
#pragma once

#include "common/integers.cuh"
#include "common/sizes.cuh"

using ptx::u32;

constexpr int BOX = 32, ROW_BYTES = BOX * 4;
constexpr int CI_GROUP = IN_CHANNELS / GROUPS, CO_GROUP = OUT_CHANNELS / GROUPS, TAPS = KERNEL_H * KERNEL_W;
constexpr int INPUT_TILES = ceil_div(CI_GROUP, TILE_COLS), CHUNK_TILES = ceil_div(CO_GROUP, CHUNKS * BOX);
constexpr int TAP_TILES_H = ceil_div(KERNEL_H, TAP_ROWS), TAP_TILES_W = ceil_div(KERNEL_W, TAP_COLS);
constexpr int TAP_TILES = TAP_TILES_H * TAP_TILES_W, TILES = INPUT_TILES * TAP_TILES * CHUNK_TILES;

constexpr int STAGE_PIXELS = IMAGES * ROWS * COLS, STEPS = STAGE_PIXELS / 8;
static_assert(STAGE_PIXELS == BOX);

/// Of the tile's columns of taps: the first one that reads the same box.
__device__ constexpr int first_alike(int column) {
  for (int first = 0; !FLAT && first < column; ++first)
    if ((column - first) * DILATION_W % STRIDE_W == 0) return first;
  return column;
}
/// Columns of grad_output (in steps of the stride) that a tap reads after those of the first tap of its box.
__device__ constexpr int shift_of(int column) { return (column - first_alike(column)) * DILATION_W / STRIDE_W; }
/// Boxes of columns before a tap's.
__device__ constexpr int column_box(int column) {
  int boxes = 0;
  for (int other = 0; other < first_alike(column); ++other) boxes += first_alike(other) == other;
  return boxes;
}
__device__ constexpr int longest_shift() {
  int most = 0;
  for (int column = 0; column < TAP_COLS; ++column) most = shift_of(column) > most ? shift_of(column) : most;
  return most;
}
__device__ constexpr int count_boxes() {
  int boxes = 0;
  for (int column = 0; column < TAP_COLS; ++column) boxes += first_alike(column) == column;
  return boxes;
}
constexpr int PITCH = COLS + longest_shift(), COLUMN_BOXES = count_boxes();
constexpr int INPUT_BOXES = TILE_COLS / BOX, INPUT_BOX_BYTES = STAGE_PIXELS * ROW_BYTES, INPUT_BYTES = INPUT_BOXES * INPUT_BOX_BYTES;
constexpr int COPIED = IMAGES * ROWS * PITCH * ROW_BYTES, OUTPUT_BOX_BYTES = ceil_div(COPIED, 1024) * 1024;
constexpr int OUTPUT_BOXES = TAP_ROWS * COLUMN_BOXES * CHUNKS;
constexpr int STAGE_BYTES = INPUT_BYTES + OUTPUT_BOXES * OUTPUT_BOX_BYTES, STAGE_COPIED = INPUT_BYTES + OUTPUT_BOXES * COPIED;
static_assert(TILE_COLS % BOX == 0);

/// Warps that multiply hold BLOCKS x 16 = 32 channels of one tap each.
constexpr int BLOCKS = 2, UNITS = TAP_ROWS * TAP_COLS * CHUNKS;
static_assert(UNITS <= WARPGROUPS * 4);
constexpr int THREADS = 128 * (WARPGROUPS + 1), TURNING_WARPS = 2;
constexpr int MULTIPLYING_THREADS = 128 * WARPGROUPS;
static_assert(TOGETHER == 1 || (TOGETHER == 2 && STAGES * STAGE_BYTES >= MULTIPLYING_THREADS * BLOCKS * TILE_COLS));
// As many as the threads begin with: 168 (of 384 threads) or 128 (of 512).
constexpr int FILL_REGISTERS = WARPGROUPS == 2 ? 104 : 80, MULTIPLY_REGISTERS = WARPGROUPS == 2 ? 200 : 144;
static_assert(FILL_REGISTERS + WARPGROUPS * MULTIPLY_REGISTERS == (WARPGROUPS == 2 ? 168 * 3 : 128 * 4));

struct Ring : StageRing<STAGES, 0, STAGE_BYTES, STAGES * STAGE_BYTES> {
  using StageRing::StageRing;
  /// Says that the input is turned.
  __device__ __forceinline__ u32 turned() const { return full() + 2 * STAGES * 8; }
};

/// What a block computes. Neighbours that are a cluster hold slices of the same sums.
struct Place {
  int ci, co;  // the first, in the group
  int kh, kw, group, slice;

  __device__ __forceinline__ explicit Place(int block) {
    const int tile = block / TOGETHER % TILES, rest = block / TOGETHER / TILES, tap_tile = tile / INPUT_TILES % TAP_TILES;
    ci = tile % INPUT_TILES * TILE_COLS;
    kh = tap_tile / TAP_TILES_W * TAP_ROWS;
    kw = tap_tile % TAP_TILES_W * TAP_COLS;
    co = tile / (INPUT_TILES * TAP_TILES) * (CHUNKS * BOX);
    group = rest % GROUPS;
    slice = rest / GROUPS * TOGETHER + block % TOGETHER;
  }
  __device__ __forceinline__ int row_offset(int i) const { return (kh + i) * DILATION_H - PADDING_H; }
  __device__ __forceinline__ int col_offset(int j) const { return (kw + j) * DILATION_W - PADDING_W; }
};

/// Which pixel of a stage is k = half * 4 + t of a step. So chosen that neither who turns nor who multiplies meets another
/// lane in a bank: of neighbouring rows of 128 bytes the swizzle keeps those apart that differ by 2, 4 and 6, and the
/// rows of a step are in another order in each step.
__device__ __forceinline__ constexpr int pixel_of(int step, int half, int t) { return step * 8 + (t + step) % 4 * 2 + half; }

/// Where the first of the boxes begins that a tap reads, in bytes of a stage.
__device__ constexpr int tap_bytes(int i, int j) {
  return INPUT_BYTES + (i * COLUMN_BOXES + column_box(j)) * CHUNKS * OUTPUT_BOX_BYTES;
}
/// The row of a box in which a pixel lies.
__device__ __forceinline__ constexpr int row_of(int pixel) { return pixel / COLS * PITCH + pixel % COLS; }
