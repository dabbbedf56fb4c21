// Of grad_weight/stride1.cu: what a block computes, and where the rows of a column tile lie in shared memory.
//
// Stage s of the ring holds a row of the input, [BOX pixels][channel][pixel] in rows of 128 bytes, swizzled, and a row
// of grad_output as TMA writes it: NCHW [PLANES][channel][OUTPUT_PITCH pixels], where every PLANES-th channel is in
// the same plane, so that its distance in memory is a multiple of 16 bytes; channels_last [32
// channels][pixel][channel], swizzled.
#pragma once

#include "common/integers.cuh"
#include "common/stages.cuh"
#include "common/sizes.cuh"

using ptx::u32;

constexpr int CI_GROUP = IN_CHANNELS / GROUPS, CO_GROUP = OUT_CHANNELS / GROUPS, TAPS = KERNEL_H * KERNEL_W;
constexpr int N = TILE_TAP_ROWS * TILE_CI;

/// A fragment is what one warp multiplies: 16 output channels of one column of taps, counted [channels][column of taps].
constexpr int FRAGMENTS = ceil_div(CO_GROUP, 16) * KERNEL_W;
constexpr int BLOCK_FRAGMENTS = 4 * WARPGROUPS * M_TILES;
constexpr int FRAGMENT_BLOCKS = ceil_div(FRAGMENTS, BLOCK_FRAGMENTS);
constexpr int CI_TILES = ceil_div(CI_GROUP, TILE_CI), TAP_ROW_TILES = ceil_div(KERNEL_H, TILE_TAP_ROWS);

constexpr int ITEM = static_cast<int>(sizeof(Element));
constexpr int BOX_ROW_BYTES = 128, BOX = BOX_ROW_BYTES / ITEM, BOXES = TILE_W / BOX;
/// Elements of 16 bytes: a box begins at a multiple of them; every PLANES-th channel lies at a multiple of them.
constexpr int ALIGNMENT = 16 / ITEM, PLANES = LINEAR_OUTPUT ? ALIGNMENT : 1;
/// Rows of the input that a row of grad_output needs beside the one that is loaded with it.
constexpr int HALO_ROWS = TILE_TAP_ROWS - 1;
constexpr int ROW_BYTES = TILE_CI * BOX_ROW_BYTES, BOX_PITCH = (STAGES + HALO_ROWS) * ROW_BYTES;

/// From a channel of a plane (in channels_last, a pixel) of grad_output to the next.
constexpr int OUTPUT_PITCH_BYTES = CHANNELS_LAST ? BOX_ROW_BYTES : OUTPUT_PITCH * ITEM;
constexpr int OUTPUT_PIXELS = TILE_W + KERNEL_W - 1, OUTPUT_BOXES = CHANNELS_LAST ? OUTPUT_CHANNELS / BOX : PLANES;
constexpr int OUTPUT_COPIED = (CHANNELS_LAST ? OUTPUT_PIXELS : OUTPUT_CHANNELS / PLANES) * OUTPUT_PITCH_BYTES;
constexpr int OUTPUT_BOX_BYTES = round_up(OUTPUT_COPIED, CHANNELS_LAST ? 1024 : 128);
constexpr int OUTPUT_AT = BOXES * BOX_PITCH, OUTPUT_BYTES = OUTPUT_BOXES * OUTPUT_BOX_BYTES;
/// channels_last: rows of the input as TMA writes them, [32 channels][pixel][channel].
constexpr int RAW_AT = OUTPUT_AT + STAGES * OUTPUT_BYTES, RAW_BYTES = CHANNELS_LAST ? TILE_W * TILE_CI * 4 : 0;
constexpr int BARRIERS = RAW_AT + RAW_STAGES * RAW_BYTES, RAW_BARRIERS = BARRIERS + STAGES * 16;
static_assert(SHARED_BYTES == RAW_BARRIERS + RAW_STAGES * 16 + 1024, "the plan and the kernel must agree");
static_assert(TILE_W % BOX == 0 && STAGES > TILE_TAP_ROWS && ROW_BYTES % 1024 == 0);
static_assert(CHANNELS_LAST ? ITEM == 4 && TILE_CI % BOX == 0 && OUTPUT_CHANNELS % BOX == 0 : OUTPUT_PITCH_BYTES % 32 == 16 && 8 % PLANES == 0);

struct Ring : StageRing<STAGES, OUTPUT_AT, OUTPUT_BYTES, BARRIERS> {
  using StageRing::StageRing;
  __device__ __forceinline__ u32 output() const { return data(); }
  /// Where this stage's input is stored; if it `wraps`, also behind the last stage's.
  __device__ __forceinline__ u32 row() const { return base + stage * ROW_BYTES; }
  __device__ __forceinline__ bool wraps() const { return stage < HALO_ROWS; }
  /// Where the input of the HALO_ROWS stages before and of this one lies.
  __device__ __forceinline__ u32 rows() const { return base + (stage < HALO_ROWS ? stage + STAGES - HALO_ROWS : stage - HALO_ROWS) * ROW_BYTES; }
};
using RawRing = StageRing<RAW_STAGES, RAW_AT, RAW_BYTES, RAW_BARRIERS>;

/// Which tile and split a block computes; blocks that read the same data are neighbours.
struct Place {
  int first_fragment, ci, tap_row, group, split;

  __device__ __forceinline__ explicit Place(int block) {
    first_fragment = block % FRAGMENT_BLOCKS * BLOCK_FRAGMENTS;
    block /= FRAGMENT_BLOCKS;
    ci = block % CI_TILES * TILE_CI;
    block /= CI_TILES;
    tap_row = block % TAP_ROW_TILES * TILE_TAP_ROWS;
    block /= TAP_ROW_TILES;
    group = block % GROUPS;
    split = block / GROUPS;
  }
  __device__ __forceinline__ int first_channel() const { return first_fragment / KERNEL_W * 16; }
};

/// `rows` rows of grad_output in a column tile of an image.
struct Segment {
  int image, col, begin, rows;

  __device__ __forceinline__ Segment(const GradWeightStride1Sizes& sizes, int number) {
    unsigned rest = number;
    col = sizes.column_tiles.digit(rest) * TILE_W;
    begin = sizes.segments.digit(rest) * sizes.segment;
    image = static_cast<int>(rest);
    rows = begin + sizes.segment < sizes.out_height ? sizes.segment : sizes.out_height - begin;
  }
};

/// Pixels by which a plane's boxes begin earlier than those of the plane before it, so that the eight channels that a warp
/// reads at once, 8 / PLANES of each plane, lie in different banks.
constexpr int PLANE_STAGGER = 8 / PLANES * ALIGNMENT;

/// Pixels from where a row's box of a plane begins (in NCHW a multiple of 16 bytes) to what the first column of taps
/// reads.
__device__ __forceinline__ int misalignment(const GradWeightStride1Sizes& sizes, int row, int plane) {
  if constexpr (CHANNELS_LAST) return 0;
  if constexpr (!LINEAR_OUTPUT) return (ALIGNMENT - PADDING_W % ALIGNMENT) % ALIGNMENT;
  return plane * PLANE_STAGGER + (row * (sizes.out_width % ALIGNMENT) + plane * (sizes.out_height * sizes.out_width % ALIGNMENT)) % ALIGNMENT;
}
