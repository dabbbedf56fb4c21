// What a block of grad_weight/stride1.cu computes, and where a strip's rows lie in shared memory.
//
// Slot s of the ring: a row of the input, [BOX pixels][channel][pixel] in rows of 128 bytes, swizzled, and of grad_output as
// the copy engine brings it: NCHW [PLANES][channel][OUTPUT_PITCH pixels], every PLANES-th channel in a plane, whose distance
// in memory is a multiple of 16 bytes; channels_last [32 channels][pixel][channel], swizzled.
#pragma once

#include "common/integers.cuh"
#include "common/stages.cuh"
#include "common/sizes.cuh"

using ptx::u32;

constexpr int CI_GROUP = IN_CHANNELS / GROUPS, CO_GROUP = OUT_CHANNELS / GROUPS, TAPS = KERNEL_H * KERNEL_W;
constexpr int N = TILE_TAP_ROWS * TILE_CI;

// A granule is what one warp multiplies: 16 output channels of one column of taps; counted [channels][column of taps].
constexpr int GRANULES = ceil_div(CO_GROUP, 16) * KERNEL_W;
constexpr int BLOCK_GRANULES = 4 * WARPGROUPS * UNITS;
constexpr int GRANULE_BLOCKS = ceil_div(GRANULES, BLOCK_GRANULES);
constexpr int CI_TILES = ceil_div(CI_GROUP, TILE_CI), TAP_ROW_TILES = ceil_div(KERNEL_H, TILE_TAP_ROWS);

constexpr int ITEM = static_cast<int>(sizeof(Element));
constexpr int BOX_ROW_BYTES = 128, BOX = BOX_ROW_BYTES / ITEM, BOXES = STRIP / BOX;
/// Elements of 16 bytes, at whose multiples a box begins.
constexpr int ALIGNMENT = 16 / ITEM;
/// Rows of input that a row of grad_output needs beside the one that comes with it.
constexpr int LAG = TILE_TAP_ROWS - 1;
constexpr int ROW_BYTES = TILE_CI * BOX_ROW_BYTES, BOX_PITCH = (SLOTS + LAG) * ROW_BYTES;

/// From a channel of a plane (a pixel, in channels_last) of grad_output to the next.
constexpr int OUTPUT_PITCH_BYTES = CHANNELS_LAST ? BOX_ROW_BYTES : OUTPUT_PITCH * ITEM;
constexpr int OUTPUT_PIXELS = STRIP + KERNEL_W - 1, OUTPUT_BOXES = CHANNELS_LAST ? OUTPUT_CHANNELS / BOX : PLANES;
constexpr int OUTPUT_COPIED = (CHANNELS_LAST ? OUTPUT_PIXELS : OUTPUT_CHANNELS / PLANES) * OUTPUT_PITCH_BYTES;
constexpr int OUTPUT_BOX_BYTES = round_up(OUTPUT_COPIED, CHANNELS_LAST ? 1024 : 128);
constexpr int OUTPUT_AT = BOXES * BOX_PITCH, OUTPUT_BYTES = OUTPUT_BOXES * OUTPUT_BOX_BYTES;
/// channels_last: rows of the input as they come, [32 channels][pixel][channel].
constexpr int RAW_AT = OUTPUT_AT + SLOTS * OUTPUT_BYTES, RAW_BYTES = CHANNELS_LAST ? STRIP * TILE_CI * 4 : 0;
constexpr int BARRIERS = RAW_AT + RAW_SLOTS * RAW_BYTES, RAW_BARRIERS = BARRIERS + SLOTS * 16;
static_assert(SHARED_BYTES == RAW_BARRIERS + RAW_SLOTS * 16 + 1024, "the plan and the kernel must agree");
static_assert(STRIP % BOX == 0 && SLOTS > TILE_TAP_ROWS && ROW_BYTES % 1024 == 0);
static_assert(CHANNELS_LAST ? ITEM == 4 && TILE_CI % BOX == 0 && OUTPUT_CHANNELS % BOX == 0 : OUTPUT_PITCH_BYTES % 32 == 16 && 8 % PLANES == 0);
static_assert(LINES || PLANES == 1);

struct Ring : StageRing<SLOTS, OUTPUT_AT, OUTPUT_BYTES, BARRIERS> {
  using StageRing::StageRing;
  __device__ __forceinline__ u32 output() const { return data(); }
  /// Where this slot's input comes; `twice`: and behind the last slot's.
  __device__ __forceinline__ u32 row() const { return base + stage * ROW_BYTES; }
  __device__ __forceinline__ bool twice() const { return stage < LAG; }
  /// Where the input of the LAG slots before and of this one lies.
  __device__ __forceinline__ u32 rows() const { return base + (stage < LAG ? stage + SLOTS - LAG : stage - LAG) * ROW_BYTES; }
};
using RawRing = StageRing<RAW_SLOTS, RAW_AT, RAW_BYTES, RAW_BARRIERS>;

/// What a block computes; blocks that read the same are neighbours.
struct Place {
  int first_granule, ci, tap_row, group, slice;

  __device__ __forceinline__ explicit Place(int block) {
    first_granule = block % GRANULE_BLOCKS * BLOCK_GRANULES;
    block /= GRANULE_BLOCKS;
    ci = block % CI_TILES * TILE_CI;
    block /= CI_TILES;
    tap_row = block % TAP_ROW_TILES * TILE_TAP_ROWS;
    block /= TAP_ROW_TILES;
    group = block % GROUPS;
    slice = block / GROUPS;
  }
  __device__ __forceinline__ int first_channel() const { return first_granule / KERNEL_W * 16; }
};

/// So many rows of grad_output in a strip of an image.
struct Column {
  int image, strip, begin, rows;

  __device__ __forceinline__ Column(const GradWeightStride1Sizes& sizes, int number) {
    unsigned rest = number;
    strip = sizes.column_tiles.digit(rest) * STRIP;
    begin = sizes.segments.digit(rest) * sizes.segment;
    image = static_cast<int>(rest);
    rows = begin + sizes.segment < sizes.out_height ? sizes.segment : sizes.out_height - begin;
  }
};

/// Pixels from where a row's box of a plane begins, in NCHW at a multiple of 16 bytes, to what the first column of taps
/// reads.
__device__ __forceinline__ int lead(const GradWeightStride1Sizes& sizes, int row, int plane) {
  if constexpr (CHANNELS_LAST) return 0;
  if constexpr (!LINES) return (ALIGNMENT - PADDING_W % ALIGNMENT) % ALIGNMENT;
  return (row * (sizes.out_width % ALIGNMENT) + plane * (sizes.out_height * sizes.out_width % ALIGNMENT)) % ALIGNMENT;
}
