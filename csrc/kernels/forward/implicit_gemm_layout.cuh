// Where a block's tile of the input lies in shared memory, with its halo. Constants only.
#pragma once

#include "common/tile_shape.cuh"

// FLAT: the plan sees to it that there are as many cells as pixels, and that they are the whole output.
static_assert(!FLAT || (CELL_INPUT_ROWS == 1 && TILE_H == 1 && TILE_N == 1));
static_assert(!NARROW || BOXES);

constexpr int ITEM = sizeof(Element);
constexpr bool IS_16_BIT = ITEM == 2;
constexpr int MIN_SHIFT_H = FLAT ? 0 : ROWS_AXIS.min_shift(), MAX_SHIFT_H = FLAT ? 0 : ROWS_AXIS.max_shift();
constexpr int MIN_SHIFT_W = FLAT ? 0 : COLS_AXIS.min_shift(), MAX_SHIFT_W = FLAT ? 0 : COLS_AXIS.max_shift();

/// Elements of one copy: neighbouring pixels of a channel (NCHW) or neighbouring channels of a pixel.
constexpr int COPY_MOST = PLANES ? 4 : 16 / ITEM;
constexpr int COPY = INPUT_CHANNELS_LAST ? power_of_two_dividing(CI_GROUP, COPY_MOST)
                                         : power_of_two_dividing(ROW_MULTIPLE, power_of_two_dividing(TILE_W, COPY_MOST));
/// Boxes of the input are turned in shared memory (forward/implicit_gemm_tma_nchw.cu): their rows begin and end at multiples of 16 bytes.
constexpr bool TURNED = RAW_STAGES > 0;
constexpr int COPY_PIXELS = INPUT_CHANNELS_LAST ? 1 : TURNED ? 16 / ITEM : COPY;

// A row of the halo begins this many pixels early, where a copy of several pixels may begin.
constexpr int LEAD = NARROW ? 0 : ((MIN_SHIFT_W % COPY_PIXELS) + COPY_PIXELS) % COPY_PIXELS;
constexpr int HALO_H = (TILE_H - 1) * CELL_INPUT_ROWS + 1 + MAX_SHIFT_H - MIN_SHIFT_H;
constexpr int HALO_W = round_up(LEAD + TILE_W + MAX_SHIFT_W - MIN_SHIFT_W, COPY_PIXELS);

// The 8 pixels of a fragment must differ modulo 8: then no fragment load meets a bank twice.
constexpr int ROW_PITCH = NARROW ? TILE_W : FRAGMENT_H > 1 ? aligned_to(HALO_W, COPY_PIXELS, 8, FRAGMENT_W) : HALO_W;
constexpr int SHIFTS = MAX_SHIFT_W - MIN_SHIFT_W + 1;
constexpr int SHIFTED_PITCH = BOXES ? round_up(TILE_N * HALO_H * TILE_W, 8) : HALO_H * TILE_W;
constexpr int IMAGE_PITCH = NARROW ? (BOXES ? 1 : SHIFTS) * HALO_H * TILE_W
                            : FRAGMENT_N > 1
                                ? aligned_to(HALO_H * ROW_PITCH, COPY_PIXELS, 8, FRAGMENT_W * FRAGMENT_H % 8)
                                : HALO_H * ROW_PITCH;
constexpr int HALO_PIXELS = NARROW && BOXES ? SHIFTS * SHIFTED_PITCH : TILE_N * IMAGE_PITCH;

// Words of one chunk of k. For mma.sync: [k][pixel] in NCHW, [pixel][k] in channels_last. For wgmma, PLANES of
// 4 words: [k / 4][pixel][4], pitched so that neighbouring lanes, which fill neighbouring planes, differ in banks;
// or BOXES, [pixel][k] with a swizzle (common/tma.cuh), from a multiple of 1024 bytes on.
constexpr int K_PITCH = aligned_to(HALO_PIXELS, 8, 32, 8);
constexpr int PIXEL_PITCH = CHUNK_WORDS + 4;
constexpr int CHUNK_PLANES = CHUNK_WORDS / 4;
constexpr int PLANE_PITCH = aligned_to(HALO_PIXELS, 1, 8, CHUNK_PLANES > 2 ? 1 : 2);
// PIXEL_BOXES: rows of so many pixels of a channel, CHUNK_CHANNELS of them in a box; no box lies in two images.
constexpr int BOX_ROW_PIXELS = 64, BOX_ROW_BYTES = 128;
constexpr int INPUT_WORDS = BOXES                 ? round_up(HALO_PIXELS * CHUNK_WORDS, 256)
                            : PLANES                ? CHUNK_WORDS * PLANE_PITCH
                            : INPUT_CHANNELS_LAST ? HALO_PIXELS * PIXEL_PITCH
                                                  : CHUNK_WORDS * K_PITCH;

/// Words between two pixels, and between two words of k.
constexpr int PIXEL_STEP = INPUT_CHANNELS_LAST ? PIXEL_PITCH : 1;
constexpr int K_STEP = INPUT_CHANNELS_LAST ? 1 : K_PITCH;

__device__ constexpr int most_taps() {
  int most = 0;
  for (int g = 0; g < PHASE_GROUPS; ++g) most = group_taps(g) > most ? group_taps(g) : most;
  return most;
}
constexpr int WEIGHT_WORDS = CHUNK_STEPS * most_taps() * TAP_WORDS;
constexpr int STAGE_WORDS = round_up(INPUT_WORDS, 4) + (WEIGHTS_STAY ? 0 : WEIGHT_WORDS);
