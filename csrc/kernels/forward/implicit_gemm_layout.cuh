// The layout in shared memory of a block's tile of the input with its halo. Constants only.
#pragma once

#include "common/tile_shape.cuh"

// FLAT: the plan ensures that there are as many positions as input pixels, and that they cover the output exactly.
static_assert(!FLAT || (POSITION_INPUT_ROWS == 1 && TILE_H == 1 && TILE_N == 1));
static_assert(!SHAPED || (TMA_INPUT && !BY_ROWS && POSITION_INPUT_ROWS == 1));
static_assert(!NARROW || TMA_INPUT);

constexpr int ITEM = sizeof(Element);
constexpr bool IS_16_BIT = ITEM == 2;
constexpr int MIN_SHIFT_H = FLAT ? 0 : ROWS_AXIS.min_shift(), MAX_SHIFT_H = FLAT ? 0 : ROWS_AXIS.max_shift();
constexpr int MIN_SHIFT_W = FLAT ? 0 : COLS_AXIS.min_shift(), MAX_SHIFT_W = FLAT ? 0 : COLS_AXIS.max_shift();

/// Elements of one copy: neighbouring pixels of a channel (NCHW), or neighbouring channels of a pixel (channels_last).
constexpr int MAX_COPY = PLANES ? 4 : 16 / ITEM;
constexpr int COPY = INPUT_CHANNELS_LAST ? power_of_two_dividing(CI_GROUP, MAX_COPY)
                                         : power_of_two_dividing(ROW_MULTIPLE, power_of_two_dividing(TILE_W, MAX_COPY));
/// Whether boxes of an NCHW input are transposed in shared memory (forward/implicit_gemm_tma_nchw.cu). The rows of such boxes
/// begin and end at multiples of 16 bytes.
constexpr bool TRANSPOSES_INPUT = NCHW_STAGES > 0;
constexpr int COPY_PIXELS = INPUT_CHANNELS_LAST ? 1 : TRANSPOSES_INPUT ? 16 / ITEM : COPY;

// Pixels in front of each row of the halo, so that the row begins where a copy of several pixels may begin.
constexpr int LEFT_PAD = NARROW ? 0 : ((MIN_SHIFT_W % COPY_PIXELS) + COPY_PIXELS) % COPY_PIXELS;
constexpr int HALO_H = (TILE_H - 1) * POSITION_INPUT_ROWS + 1 + MAX_SHIFT_H - MIN_SHIFT_H;
constexpr int HALO_W = round_up(LEFT_PAD + TILE_W + MAX_SHIFT_W - MIN_SHIFT_W, COPY_PIXELS);

// The addresses of a fragment's 8 pixels differ modulo 8, so that loading a fragment has no bank conflicts.
constexpr int ROW_PITCH = NARROW ? TILE_W : FRAGMENT_H > 1 ? aligned_to(HALO_W, COPY_PIXELS, 8, FRAGMENT_W) : HALO_W;
constexpr int SHIFTS = MAX_SHIFT_W - MIN_SHIFT_W + 1;
constexpr int SHIFTED_PITCH = TMA_INPUT ? round_up(TILE_N * HALO_H * TILE_W, 8) : HALO_H * TILE_W;
constexpr int IMAGE_PITCH = NARROW ? (TMA_INPUT ? 1 : SHIFTS) * HALO_H * TILE_W
                            : FRAGMENT_N > 1
                                ? aligned_to(HALO_H * ROW_PITCH, COPY_PIXELS, 8, FRAGMENT_W * FRAGMENT_H % 8)
                                : HALO_H * ROW_PITCH;
constexpr int HALO_PIXELS = SHAPED ? SHAPED_PIXELS : NARROW && TMA_INPUT ? SHIFTS * SHIFTED_PITCH : TILE_N * IMAGE_PITCH;

// Words of one chunk of k. For mma.sync: [k][pixel] in NCHW, [pixel][k] in channels_last. With PLANES, for wgmma: planes of
// 4 words, [k / 4][pixel][4], whose pitch puts neighbouring lanes, which write neighbouring planes, in different banks. With
// TMA_INPUT: [pixel][k] with a swizzle (common/tma.cuh), which begins at a multiple of 1024 bytes.
constexpr int K_PITCH = aligned_to(HALO_PIXELS, 8, 32, 8);
constexpr int PIXEL_PITCH = CHUNK_WORDS + 4;
constexpr int CHUNK_PLANES = CHUNK_WORDS / 4;
constexpr int PLANE_PITCH = aligned_to(HALO_PIXELS, 1, 8, CHUNK_PLANES > 2 ? 1 : 2);
// PIXEL_MAJOR: a box is CHUNK_CHANNELS rows of BOX_ROW_PIXELS pixels of a channel. No box lies in two images.
constexpr int BOX_ROW_PIXELS = 64, BOX_ROW_BYTES = 128;
constexpr int INPUT_WORDS = TMA_INPUT                 ? round_up(HALO_PIXELS * CHUNK_WORDS, 256)
                            : PLANES                ? CHUNK_WORDS * PLANE_PITCH
                            : INPUT_CHANNELS_LAST ? HALO_PIXELS * PIXEL_PITCH
                                                  : CHUNK_WORDS * K_PITCH;

/// Words between two pixels, and between two words of k.
constexpr int PIXEL_STEP = INPUT_CHANNELS_LAST ? PIXEL_PITCH : 1;
constexpr int K_STEP = INPUT_CHANNELS_LAST ? 1 : K_PITCH;

/// The most taps of a phase group.
__device__ constexpr int max_taps() {
  int taps = 0;
  for (int g = 0; g < PHASE_GROUPS; ++g) taps = max_of(taps, group_taps(g));
  return taps;
}
constexpr int WEIGHT_WORDS = CHUNK_STEPS * max_taps() * TAP_WORDS;
constexpr int STAGE_WORDS = round_up(INPUT_WORDS, 4) + (RESIDENT_WEIGHTS ? 0 : WEIGHT_WORDS);
