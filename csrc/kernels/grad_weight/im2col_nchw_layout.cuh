// Of grad_weight/im2col_nchw.cu: which entries of the gradient a block computes, and the layout of a stage.
//
// A stage is IMAGES x ROWS x COLS pixels of the input, in boxes of BOX pixels, [box][channel][BOX pixels], then
// grad_output, [box of columns][image][row][channel][OUT_BOX_COLS columns], all with TMA's swizzle. Rows of the input
// are sizes.line pixels apart in memory; what lies beyond its width or height is zero. WHOLE_ROWS: a stage has whole
// rows, and its boxes hold grad_output's columns from the first to the last; else they begin LEFT_HALO columns before
// the first pixel's.
#pragma once

#include "common/integers.cuh"

using ptx::u32;

constexpr int CI_GROUP = IN_CHANNELS / GROUPS, CO_GROUP = OUT_CHANNELS / GROUPS, TAPS = KERNEL_H * KERNEL_W;
constexpr int CI_TILES = ceil_div(CI_GROUP, TILE_CI), CO_TILES = ceil_div(CO_GROUP, TILE_CO), TILES = CI_TILES * CO_TILES * KERNEL_H;

constexpr int STAGE_PIXELS = IMAGES * ROWS * COLS, STEPS = STAGE_PIXELS / 8;
constexpr int IMAGE_BOXES = ceil_div(ROWS * COLS, BOX), BOX_BYTES = TILE_CI * BOX * 4, INPUT_BYTES = IMAGES * IMAGE_BOXES * BOX_BYTES;
constexpr int ROW_BYTES = TILE_CO * OUT_BOX_COLS * 4, OUT_BOX_BYTES = IMAGES * ROWS * ROW_BYTES, OUTPUT_BYTES = OUT_BOXES * OUT_BOX_BYTES;
constexpr int STAGE_BYTES = INPUT_BYTES + OUTPUT_BYTES;
static_assert(STAGE_PIXELS % 8 == 0 && (IMAGES == 1 || ROWS * COLS % BOX == 0));
static_assert(INPUT_BYTES % 1024 == 0 && OUT_BOX_BYTES % 1024 == 0);
static_assert(WHOLE_ROWS || (LEFT_HALO >= PADDING_W && OUT_BOXES * OUT_BOX_COLS >= LEFT_HALO - PADDING_W + (COLS - 1) * STRIDE_W +
                                                                                (KERNEL_W - 1) * DILATION_W + 1));
static_assert(!WHOLE_ROWS || (LEFT_HALO == 0 && OUT_BOXES * OUT_BOX_COLS >= MIN_OUT_WIDTH));

constexpr int THREADS = 128 * (WARPGROUPS + 1), BIAS_WARPS = 2;
constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = WARPGROUPS == 2 ? 224 : 152;
static_assert(WARPGROUPS * M_TILES * 64 >= KERNEL_W * TILE_CO && TILE_CO % 16 == 0);

using Ring = StageRing<STAGES, 0, STAGE_BYTES, STAGES * STAGE_BYTES>;

/// Which tile and split a block computes.
struct Place {
  int ci, co;  // first channels, in the group
  int kh, group, split;

  __device__ __forceinline__ explicit Place(int block) {
    const int tile = block % TILES, rest = block / TILES;
    ci = tile % CI_TILES * TILE_CI;
    kh = tile / CI_TILES % KERNEL_H;
    co = tile / CI_TILES / KERNEL_H * TILE_CO;
    group = rest % GROUPS;
    split = rest / GROUPS;
  }
  __device__ __forceinline__ int tap_row_offset() const { return kh * DILATION_H - PADDING_H; }
  __device__ __forceinline__ bool adds_bias() const { return WITH_BIAS && ci == 0 && tap_row_offset() >= 0 && tap_row_offset() < STRIDE_H; }
};

