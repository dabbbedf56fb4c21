// Of grad_weight/im2col_nhwc.cu: which entries of the gradient a block computes, and the layout of a stage.
//
// A stage is IMAGES x ROWS x COLS = 32 pixels of the input, in boxes of 32 channels, [box][pixel][32 channels], and
// the pixels of grad_output that they reach, [row of taps][box of columns][32 channels][image][row][column]. Taps
// whose offsets differ by a multiple of the stride read the same box of columns, shifted; BOX_PER_TAP_COL: each column
// of taps has its own box.
#pragma once

#include "common/integers.cuh"
#include "common/sizes.cuh"

using ptx::u32;

constexpr int BOX_CHANNELS = 32, ROW_BYTES = BOX_CHANNELS * 4;
constexpr int CI_GROUP = IN_CHANNELS / GROUPS, CO_GROUP = OUT_CHANNELS / GROUPS, TAPS = KERNEL_H * KERNEL_W;
constexpr int CI_TILES = ceil_div(CI_GROUP, TILE_CI), CO_TILES = ceil_div(CO_GROUP, CO_BOXES * BOX_CHANNELS);
constexpr int TAP_TILES_H = ceil_div(KERNEL_H, TAP_ROWS), TAP_TILES_W = ceil_div(KERNEL_W, TAP_COLS);
constexpr int TAP_TILES = TAP_TILES_H * TAP_TILES_W, TILES = CI_TILES * TAP_TILES * CO_TILES;

constexpr int STAGE_PIXELS = IMAGES * ROWS * COLS, STEPS = STAGE_PIXELS / 8;
static_assert(STAGE_PIXELS == BOX_CHANNELS);

/// The first of the tile's columns of taps that reads the same box as `column`.
__device__ constexpr int first_tap_of_box(int column) {
  for (int first = 0; !BOX_PER_TAP_COL && first < column; ++first)
    if ((column - first) * DILATION_W % STRIDE_W == 0) return first;
  return column;
}
/// Columns of grad_output, in steps of the stride, from those of the first tap of the box to those of this tap.
__device__ constexpr int shift_of(int column) { return (column - first_tap_of_box(column)) * DILATION_W / STRIDE_W; }
/// Boxes of columns before that of a tap.
__device__ constexpr int column_box(int column) {
  int boxes = 0;
  for (int other = 0; other < first_tap_of_box(column); ++other) boxes += first_tap_of_box(other) == other;
  return boxes;
}
__device__ constexpr int max_shift() {
  int largest = 0;
  for (int column = 0; column < TAP_COLS; ++column) largest = shift_of(column) > largest ? shift_of(column) : largest;
  return largest;
}
__device__ constexpr int count_boxes() {
  int boxes = 0;
  for (int column = 0; column < TAP_COLS; ++column) boxes += first_tap_of_box(column) == column;
  return boxes;
}
constexpr int PITCH = COLS + max_shift(), COLUMN_BOXES = count_boxes();
constexpr int INPUT_BOXES = TILE_CI / BOX_CHANNELS, INPUT_BOX_BYTES = STAGE_PIXELS * ROW_BYTES, INPUT_BYTES = INPUT_BOXES * INPUT_BOX_BYTES;
constexpr int COPIED = IMAGES * ROWS * PITCH * ROW_BYTES, OUTPUT_BOX_BYTES = ceil_div(COPIED, 1024) * 1024;
constexpr int OUTPUT_BOXES = TAP_ROWS * COLUMN_BOXES * CO_BOXES;
constexpr int STAGE_BYTES = INPUT_BYTES + OUTPUT_BOXES * OUTPUT_BOX_BYTES, STAGE_COPIED = INPUT_BYTES + OUTPUT_BOXES * COPIED;
static_assert(TILE_CI % BOX_CHANNELS == 0);

/// A consumer warp has M_TILES x 16 = 32 channels of one tap.
constexpr int M_TILES = 2, WARP_TILES = TAP_ROWS * TAP_COLS * CO_BOXES;
static_assert(WARP_TILES <= WARPGROUPS * 4);
/// One step's A fragments (grad_output), as wgmma_from_registers takes them.
using AFragments = u32[M_TILES][4];
constexpr int THREADS = 128 * (WARPGROUPS + 1), TRANSPOSE_WARPS = 2;
constexpr int CONSUMER_THREADS = 128 * WARPGROUPS;
static_assert(CLUSTER == 1 || (CLUSTER == 2 && STAGES * STAGE_BYTES >= CONSUMER_THREADS * M_TILES * TILE_CI));
// Together they are as many as at the start of the block: 168 a thread (of 384 threads) or 128 (of 512).
constexpr int PRODUCER_REGISTERS = WARPGROUPS == 2 ? 104 : 80, CONSUMER_REGISTERS = WARPGROUPS == 2 ? 200 : 144;
static_assert(PRODUCER_REGISTERS + WARPGROUPS * CONSUMER_REGISTERS == (WARPGROUPS == 2 ? 168 * 3 : 128 * 4));

struct Ring : StageRing<STAGES, 0, STAGE_BYTES, STAGES * STAGE_BYTES> {
  using StageRing::StageRing;
  /// The barrier that completes when the input is transposed.
  __device__ __forceinline__ u32 transposed() const { return full() + 2 * STAGES * 8; }
};

/// Which tile and split a block computes. Neighbouring blocks of a cluster compute splits of the same sums.
struct Place {
  int ci, co;  // first channels, in the group
  int kh, kw, group, split;

  __device__ __forceinline__ explicit Place(int block) {
    const int tile = block / CLUSTER % TILES, rest = block / CLUSTER / TILES, tap_tile = tile / CI_TILES % TAP_TILES;
    ci = tile % CI_TILES * TILE_CI;
    kh = tap_tile / TAP_TILES_W * TAP_ROWS;
    kw = tap_tile % TAP_TILES_W * TAP_COLS;
    co = tile / (CI_TILES * TAP_TILES) * (CO_BOXES * BOX_CHANNELS);
    group = rest % GROUPS;
    split = rest / GROUPS * CLUSTER + block % CLUSTER;
  }
  __device__ __forceinline__ int row_offset(int i) const { return (kh + i) * DILATION_H - PADDING_H; }
  __device__ __forceinline__ int col_offset(int j) const { return (kw + j) * DILATION_W - PADDING_W; }
};

/// Which pixel of a stage is k = half * 4 + t of a step. It is chosen so that neither the transposing nor the multiplying
/// lanes have bank conflicts: of neighbouring rows of 128 bytes the swizzle keeps those apart that differ by 2, 4 and 6,
/// and each step has its rows in another order.
__device__ __forceinline__ constexpr int pixel_of(int step, int half, int t) { return step * 8 + (t + step) % 4 * 2 + half; }

/// Bytes from the beginning of a stage to the first box that a tap reads.
__device__ constexpr int tap_bytes(int i, int j) {
  return INPUT_BYTES + (i * COLUMN_BOXES + column_box(j)) * CO_BOXES * OUTPUT_BOX_BYTES;
}
/// The row of a box that holds a pixel.
__device__ __forceinline__ constexpr int row_of(int pixel) { return pixel / COLS * PITCH + pixel % COLS; }
