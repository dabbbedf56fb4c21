// Of grad_weight/im2col_nchw.cu: which entries of the gradient a block computes, and the layout of shared memory.
//
// The launch gives the shape of a stage (Im2colNchwSizes): sizes.images images of sizes.rows x sizes.cols pixels of the
// input. Either its rows are whole, or it has one row. Its pixels of one image are contiguous in memory, a run, whose rows
// are sizes.pitch pixels apart. A stage holds the runs in boxes of BOX pixels, [image][box][channel][BOX pixels], then
// grad_output, [box of columns][image][row][channel][OUT_BOX_COLS columns], all with TMA's swizzle. What lies beyond the
// tensors is zero. Whole rows: the boxes hold grad_output's columns from the first to the last; else they begin
// sizes.left_halo columns before the first pixel's.
#pragma once

#include "common/integers.cuh"
#include "common/stages.cuh"

using ptx::u32;

constexpr int CI_GROUP = IN_CHANNELS / GROUPS, CO_GROUP = OUT_CHANNELS / GROUPS, TAPS = KERNEL_H * KERNEL_W;
constexpr int CI_TILES = ceil_div(CI_GROUP, TILE_CI), CO_TILES = ceil_div(CO_GROUP, TILE_CO), TILES = CI_TILES * CO_TILES * KERNEL_H;

constexpr int BOX = 32, STEP_PIXELS = 8, BOX_STEPS = BOX / STEP_PIXELS;
constexpr int BOX_BYTES = TILE_CI * BOX * 4, ROW_BYTES = TILE_CO * OUT_BOX_COLS * 4;
static_assert(BOX_BYTES % 1024 == 0 && TILE_CO % 16 == 0 && ROW_BYTES % 512 == 0);

/// Shared memory begins with the barriers, then the tables of steps and of pixels (im2col_nchw_fragments.cuh), then the
/// stages. The tables have a step more: after the last comes the first one again.
constexpr int STEP_TABLE = 2 * MAX_STAGES * 8, PIXEL_TABLE = STEP_TABLE + 64;
constexpr int TABLE_STEP_BYTES = STEP_PIXELS * KERNEL_W * 4;
constexpr int FIXED_BYTES = round_up(PIXEL_TABLE + (MAX_STEPS + 1) * TABLE_STEP_BYTES, 1024);
static_assert((MAX_STEPS + 1) * 4 <= PIXEL_TABLE - STEP_TABLE);

constexpr int THREADS = 128 * (WARPGROUPS + 1), BIAS_WARPS = 2;
constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = WARPGROUPS == 2 ? 224 : 152;
static_assert(WARPGROUPS * M_TILES * 64 >= KERNEL_W * TILE_CO);

using Ring = LaunchRing<MAX_STAGES>;

__device__ __forceinline__ int input_bytes(const Im2colNchwSizes& sizes) { return sizes.images * sizes.run_boxes * BOX_BYTES; }
__device__ __forceinline__ int out_box_bytes(const Im2colNchwSizes& sizes) { return sizes.images * sizes.rows * ROW_BYTES; }
__device__ __forceinline__ Ring ring_at(u32 shared, const Im2colNchwSizes& sizes) {
  const int bytes = input_bytes(sizes) + sizes.out_boxes * out_box_bytes(sizes);
  return Ring(shared, shared + FIXED_BYTES, sizes.stages, round_up(bytes, 1024));
}

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
  __device__ __forceinline__ bool adds_bias() const { return WITH_BIAS && tap_row_offset() >= 0 && tap_row_offset() < STRIDE_H; }
};

/// A stage's place: its first image, and how many stages lie above it and to its left in an image.
struct StagePlace {
  int image, down, across;

  __device__ __forceinline__ StagePlace(int stage, const Im2colNchwSizes& sizes) {
    const int image_stages = sizes.down * sizes.across;
    image = stage / image_stages * sizes.images;
    down = stage % image_stages / sizes.across;
    across = stage % sizes.across;
  }
  __device__ __forceinline__ void advance(const Im2colNchwSizes& sizes) {
    if (++across < sizes.across) return;
    across = 0;
    if (++down < sizes.down) return;
    down = 0;
    image += sizes.images;
  }
};
