// Of grad_weight/im2col_nhwc.cu: which entries of the gradient a block computes, and the layout of a stage.
//
// A stage is 32 pixels of the input, in boxes of 32 channels, [box][pixel][32 channels], and
// the pixels of grad_output that they reach, [row of taps][box of columns][32 channels][image][row][column]. The launch
// gives how many images, rows and columns they are. Taps whose offsets differ by a multiple of the stride read the same box
// of columns, shifted; BOX_PER_TAP_COL: each column of taps has its own box.
#pragma once

#include "common/integers.cuh"
#include "common/sizes.cuh"
#include "common/stages.cuh"

using ptx::u32;

constexpr int BOX_CHANNELS = 32, ROW_BYTES = BOX_CHANNELS * 4;
constexpr int CI_GROUP = IN_CHANNELS / GROUPS, CO_GROUP = OUT_CHANNELS / GROUPS, TAPS = KERNEL_H * KERNEL_W;
constexpr int CI_TILES = ceil_div(CI_GROUP, TILE_CI), CO_TILES = ceil_div(CO_GROUP, CO_BOXES * BOX_CHANNELS);
constexpr int TAP_TILES_H = ceil_div(KERNEL_H, TAP_ROWS), TAP_TILES_W = ceil_div(KERNEL_W, TAP_COLS);
constexpr int TAP_TILES = TAP_TILES_H * TAP_TILES_W, TILES = CI_TILES * TAP_TILES * CO_TILES;

constexpr int STAGE_PIXELS = BOX_CHANNELS, STEPS = STAGE_PIXELS / 8;

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
constexpr int COLUMN_BOXES = count_boxes();
constexpr int INPUT_BOXES = TILE_CI / BOX_CHANNELS, INPUT_BOX_BYTES = STAGE_PIXELS * ROW_BYTES, INPUT_BYTES = INPUT_BOXES * INPUT_BOX_BYTES;
constexpr int OUTPUT_BOXES = TAP_ROWS * COLUMN_BOXES * CO_BOXES;
static_assert(TILE_CI % BOX_CHANNELS == 0);

/// Columns of a box of grad_output; bytes that it loads, and from one box to the next.
__device__ __forceinline__ int pitch(const Im2colNhwcSizes& sizes) { return sizes.cols + max_shift(); }
__device__ __forceinline__ int copied_bytes(const Im2colNhwcSizes& sizes) { return sizes.images * sizes.rows * pitch(sizes) * ROW_BYTES; }
__device__ __forceinline__ int output_box_bytes(const Im2colNhwcSizes& sizes) { return round_up(copied_bytes(sizes), 1024); }

/// A consumer warp has M_TILES x 16 = 32 channels of one tap.
constexpr int M_TILES = 2, WARP_TILES = TAP_ROWS * TAP_COLS * CO_BOXES;
static_assert(WARP_TILES <= WARPGROUPS * 4);
/// One step's A fragments (grad_output), as wgmma_from_registers takes them.
using AFragments = u32[M_TILES][4];
constexpr int THREADS = 128 * (WARPGROUPS + 1), TRANSPOSE_WARPS = 2;
constexpr int CONSUMER_THREADS = 128 * WARPGROUPS;
static_assert(CLUSTER == 1 || CLUSTER == 2);
// Together they are as many as at the start of the block: 168 a thread (of 384 threads) or 128 (of 512).
constexpr int PRODUCER_REGISTERS = WARPGROUPS == 2 ? 104 : 80, CONSUMER_REGISTERS = WARPGROUPS == 2 ? 200 : 144;
static_assert(PRODUCER_REGISTERS + WARPGROUPS * CONSUMER_REGISTERS == (WARPGROUPS == 2 ? 168 * 3 : 128 * 4));

/// The barriers come first, then the stages.
constexpr int FIXED_BYTES = 1024;
static_assert(3 * MAX_STAGES * 8 <= FIXED_BYTES);
struct Ring : LaunchRing<MAX_STAGES> {
  __device__ __forceinline__ Ring(u32 shared, const Im2colNhwcSizes& sizes)
      : LaunchRing(shared, shared + FIXED_BYTES, sizes.stages, INPUT_BYTES + OUTPUT_BOXES * output_box_bytes(sizes)) {}
  /// The barrier that completes when the input is transposed.
  __device__ __forceinline__ u32 transposed() const { return barriers + (2 * MAX_STAGES + stage) * 8; }
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

/// The boxes from the first of grad_output in a stage to the first that a tap reads.
__device__ constexpr int tap_boxes(int i, int j) { return (i * COLUMN_BOXES + column_box(j)) * CO_BOXES; }
