// Of grad_weight/im2col_nchw.cu: which of the gradient's entries a block holds, and how a stage lies.
//
// A stage is IMAGES x ROWS x COLS pixels of the input, in boxes of BOX pixels, [box][channel][BOX pixels], then grad_output,
// [block of columns][image][row][channel][OUT_BLOCK columns], all swizzled as boxes are. Rows of the input are sizes.line pixels
// apart in memory; what lies beyond its width or height are zeros. WHOLE_ROWS: a stage has whole rows, and its boxes hold
// grad_output's columns from the first to the last, else from LEFT columns before the first pixel's.
#pragma once

#include "common/integers.cuh"

using ptx::u32;

constexpr int CI_GROUP = IN_CHANNELS / GROUPS, CO_GROUP = OUT_CHANNELS / GROUPS, TAPS = KERNEL_H * KERNEL_W;
constexpr int INPUT_TILES = ceil_div(CI_GROUP, TILE_COLS), CHUNKS = ceil_div(CO_GROUP, CHUNK), TILES = INPUT_TILES * CHUNKS * KERNEL_H;

constexpr int STAGE_PIXELS = IMAGES * ROWS * COLS, STEPS = STAGE_PIXELS / 8;
constexpr int BOXES_OF_IMAGE = ceil_div(ROWS * COLS, BOX), BOX_BYTES = TILE_COLS * BOX * 4, INPUT_BYTES = IMAGES * BOXES_OF_IMAGE * BOX_BYTES;
constexpr int ROW_BYTES = CHUNK * OUT_BLOCK * 4, BLOCK_BYTES = IMAGES * ROWS * ROW_BYTES, OUTPUT_BYTES = OUT_BLOCKS * BLOCK_BYTES;
constexpr int STAGE_BYTES = INPUT_BYTES + OUTPUT_BYTES;
static_assert(STAGE_PIXELS % 8 == 0 && (IMAGES == 1 || ROWS * COLS % BOX == 0));
static_assert(INPUT_BYTES % 1024 == 0 && BLOCK_BYTES % 1024 == 0);
static_assert(WHOLE_ROWS || (LEFT >= PADDING_W && OUT_BLOCKS * OUT_BLOCK >= LEFT - PADDING_W + (COLS - 1) * STRIDE_W +
                                                                                (KERNEL_W - 1) * DILATION_W + 1));
static_assert(!WHOLE_ROWS || (LEFT == 0 && OUT_BLOCKS * OUT_BLOCK >= LEAST_OUT_WIDTH));

constexpr int THREADS = 128 * (WARPGROUPS + 1), BIAS_WARPS = 2;
constexpr int FILL_REGISTERS = 56, MULTIPLY_REGISTERS = WARPGROUPS == 2 ? 224 : 152;
static_assert(WARPGROUPS * BLOCKS * 64 >= KERNEL_W * CHUNK && CHUNK % 16 == 0);

using Ring = StageRing<STAGES, 0, STAGE_BYTES, STAGES * STAGE_BYTES>;

/// What a block computes.
struct Place {
  int ci, co;  // the first, in the group
  int kh, group, slice;

  __device__ __forceinline__ explicit Place(int block) {
    const int tile = block % TILES, rest = block / TILES;
    ci = tile % INPUT_TILES * TILE_COLS;
    kh = tile / INPUT_TILES % KERNEL_H;
    co = tile / INPUT_TILES / KERNEL_H * CHUNK;
    group = rest % GROUPS;
    slice = rest / GROUPS;
  }
  __device__ __forceinline__ int offset() const { return kh * DILATION_H - PADDING_H; }
  __device__ __forceinline__ bool counts() const { return WITH_BIAS && ci == 0 && offset() >= 0 && offset() < STRIDE_H; }
};

