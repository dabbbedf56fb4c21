// How one tile of pixels lies in a stage of grad_weight/implicit_gemm_tma.cu: rows of 128 bytes, 64 channels of one
// pixel, as TMA writes them.
//
//   input        [64 channels][pixel]
//   grad_output  [phase row][phase column][64 channels][image][row][column]: one box for each phase, with the pixels
//                that the tile's pixels read for tap 0 and those to which the other taps reach. BOX_PER_TAP_COL: one
//                box for each phase row and tap column, so that no tap shifts a box's columns and rows of fewer than 8
//                pixels are contiguous.
#pragma once

constexpr int ROW_BYTES = 128, BOX_CHANNELS = 64;
/// A box must begin where the swizzle pattern does.
constexpr int BOX_ALIGNMENT = 1024;

/// The boxes of grad_output in a stage.
struct OutputBoxes {
  static constexpr int PHASE_ROWS = TapsH::PHASES, PHASE_COLS = BOX_PER_TAP_COL ? TAP_COLS : TapsW::PHASES;
  static constexpr int ROWS = TILE_H + TapsH::MAX_SHIFT, COLS = TILE_W + (BOX_PER_TAP_COL ? 0 : TapsW::MAX_SHIFT);
  static constexpr int CHANNEL_BLOCKS = ceil_div(BLOCK_N, BOX_CHANNELS);
  static constexpr int COPIED = TILE_N * ROWS * COLS * ROW_BYTES;
  static constexpr int BYTES = round_up(COPIED, BOX_ALIGNMENT);
  static constexpr int PHASE_BYTES = CHANNEL_BLOCKS * BYTES;
  static constexpr int COUNT = PHASE_ROWS * PHASE_COLS * CHANNEL_BLOCKS;

  /// The row of a box that holds pixel k of the tile, for a tap without shift.
  __device__ static constexpr int position(int k) {
    return (k / (TILE_W * TILE_H) * ROWS + k / TILE_W % TILE_H) * COLS + k % TILE_W;
  }
  /// Bytes from there to what tap (i, j) of the block reads.
  __device__ static constexpr int tap_offset(int i, int j) {
    return (TapsH::phase(i) * PHASE_COLS + (BOX_PER_TAP_COL ? j : TapsW::phase(j))) * PHASE_BYTES +
           (TapsH::shift(i) * COLS + (BOX_PER_TAP_COL ? 0 : TapsW::shift(j))) * ROW_BYTES;
  }
  /// Columns of grad_output from the block's first tap to the first of the phase.
  __device__ static constexpr int phase_col(int phase) { return BOX_PER_TAP_COL ? phase * TapsW::PITCH : TapsW::residue(phase); }
};

constexpr int STEP = 16, STEPS = TILE_PIXELS / STEP;
/// Rows from 8 pixels of a multiply to the next 8.
constexpr int OUT_GROUP = OutputBoxes::position(8) - OutputBoxes::position(0);

/// Whether both groups of 8 pixels of every multiply are contiguous and OUT_GROUP rows apart.
constexpr bool groups_are_contiguous() {
  for (int k = 0; k < TILE_PIXELS; ++k)
    if (OutputBoxes::position(k) != OutputBoxes::position(k / STEP * STEP) + k / 8 % 2 * OUT_GROUP + k % 8) return false;
  return TILE_PIXELS % STEP == 0;
}
static_assert(groups_are_contiguous());

/// Bytes from tap 0 without shift to what the block's taps read; numbers beyond BLOCK_TAPS repeat the last tap.
__device__ constexpr int tap_offset(int number) {
  const int tap = number < BLOCK_TAPS ? number : BLOCK_TAPS - 1;
  return OutputBoxes::tap_offset(tap / TAP_COLS, tap % TAP_COLS);
}

/// One multiply may take several taps, if all their blocks of 64 channels are equally far apart.
constexpr int WARP_BLOCKS = ceil_div(WARP_N, BOX_CHANNELS);
/// That distance for `taps` taps of a warpgroup from its `first` on; 0 if the distances differ.
constexpr int block_distance(int first, int taps) {
  int distance = taps == 1 ? OutputBoxes::BYTES : 0;
  for (int t = 0; t < WARPS_T; ++t) {
    int before = tap_offset(t * WARP_TAPS + first);
    for (int block = 1; block < taps * WARP_BLOCKS; ++block) {
      const int in_bounds = tap_offset(t * WARP_TAPS + first + block / WARP_BLOCKS) + block % WARP_BLOCKS * OutputBoxes::BYTES;
      if (distance == 0) distance = in_bounds - before;
      if (in_bounds - before != distance || distance < 0) return 0;
      before = in_bounds;
    }
  }
  return distance;
}
/// How many taps the multiply takes that begins with a warpgroup's `first`.
constexpr int joined_taps(int first) {
  for (int taps = 4; taps > 1; taps /= 2)
    if (first + taps <= WARP_TAPS && taps * WARP_N <= 256 && WARP_N % BOX_CHANNELS == 0 && block_distance(first, taps) > 0) return taps;
  return 1;
}

constexpr int INPUT_BLOCKS = BLOCK_M / BOX_CHANNELS;
constexpr int INPUT_COPIED = TILE_PIXELS * ROW_BYTES;
constexpr int INPUT_BYTES = round_up(INPUT_COPIED, BOX_ALIGNMENT);
constexpr int COPIED = INPUT_BLOCKS * INPUT_COPIED + OutputBoxes::COUNT * OutputBoxes::COPIED;

// The constants that common/stage_ring.cuh needs.
constexpr int INPUT_WORDS = INPUT_BLOCKS * INPUT_BYTES / 4;
constexpr int STAGE_WORDS = INPUT_WORDS + OutputBoxes::COUNT * OutputBoxes::BYTES / 4;
constexpr int BARRIERS = STAGES * STAGE_WORDS * 4;
