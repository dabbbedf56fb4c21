// How the operands of grad_weight/implicit_gemm_{mma,wgmma}.cu lie in shared memory: for a tile of TILE_N images x TILE_H rows x
// TILE_W columns, positions counted [image][row phase][row][column phase][column].
#pragma once

#include "grad_weight/implicit_gemm_layout.cuh"

/// The input: pixels without phases or shifts.
using Unshifted = TapAxis<1, 1, 1, 0, 1, 1>;

/// One operand's window in shared memory: CHANNELS channels of a tile of pixels, with the halo that the taps read.
///   float32, NCHW            [channel][position], words
///   float32, channels_last   [position][channel], words
///   16 bits                  [8 channels][position][16 bytes]
/// The pitches are padded so that loading fragments has no bank conflicts.
template <int CHANNELS_, int TENSOR_CHANNELS_, int GROUP_, class Rows_, class Cols_, int SH_, int SW_, int COPY_>
struct Window {
  static constexpr int CHANNELS = CHANNELS_, TENSOR_CHANNELS = TENSOR_CHANNELS_, GROUP = GROUP_;
  static constexpr int SH = SH_, SW = SW_, COPY = COPY_;
  using Rows = Rows_;
  using Cols = Cols_;
  /// NCHW: a copy moves COPY columns, so a row may have to begin before the column of its first tap.
  static constexpr int MAX_MISALIGNMENT = CHANNELS_LAST ? 0 : Cols::max_misalignment(COPY);
  static constexpr int ROWS = TILE_H + Rows::MAX_SHIFT;
  static constexpr int COLS = SW == 1 && !CHANNELS_LAST ? round_up(TILE_W + Cols::MAX_SHIFT + MAX_MISALIGNMENT, COPY)
                                                        : TILE_W + Cols::MAX_SHIFT;
  static constexpr int ROW_PITCH = Cols::PHASES * COLS;
  static constexpr int IMAGE_PITCH = Rows::PHASES * ROWS * ROW_PITCH;
  static constexpr int POSITIONS = TILE_N * IMAGE_PITCH;

  static constexpr int OCTET_BYTES = (POSITIONS | 1) * 16;
  static constexpr int CHANNEL_STRIDE = CHANNELS_LAST ? 1 : (POSITIONS + 3) / 8 * 8 + 4;
  static constexpr int POSITION_STRIDE = CHANNELS_LAST ? (CHANNELS % 16 == 8 ? CHANNELS : CHANNELS + 8) : 1;
  static constexpr int BYTES = IS_16_BIT ? CHANNELS / 8 * OCTET_BYTES
                                         : round_up(CHANNELS_LAST ? POSITIONS * POSITION_STRIDE : CHANNELS * CHANNEL_STRIDE, 4) * 4;

  /// Bytes from the beginning of the window to a position's first channel.
  __device__ static constexpr int position_bytes(int position) {
    return IS_16_BIT ? position * 16 : position * POSITION_STRIDE * 4;
  }
  /// The position of pixel k of the tile for a tap without shift. It may be computed for the summands of k apart, if
  /// adding them carries nothing.
  __device__ static constexpr int position(int k) {
    return k / (TILE_W * TILE_H) * IMAGE_PITCH + k / TILE_W % TILE_H * ROW_PITCH + k % TILE_W;
  }
  /// Positions from there to what tap (i, j) of the block reads.
  __device__ static constexpr int tap_offset(int i, int j) {
    return (Rows::phase(i) * ROWS + Rows::shift(i)) * ROW_PITCH + Cols::phase(j) * COLS + Cols::shift(j);
  }
};
using InputWindow = Window<BLOCK_M, IN_CHANNELS, CI_GROUP, Unshifted, Unshifted, 1, 1, INPUT_COPY>;
using OutputWindow = Window<BLOCK_N, OUT_CHANNELS, CO_GROUP, TapsH, TapsW, STRIDE_H, STRIDE_W, OUTPUT_COPY>;

constexpr int TILE_PIXELS = TILE_N * TILE_H * TILE_W;
constexpr int STAGE_BYTES = InputWindow::BYTES + OutputWindow::BYTES;

/// Positions in grad_output's window of what a tap of a block reads, by its number. Numbers beyond BLOCK_TAPS repeat the last
/// tap.
__device__ __forceinline__ int tap_offset(const Place& place, int number) {
  const int tap = number < BLOCK_TAPS ? number : BLOCK_TAPS - 1;
  const int offset = OutputWindow::tap_offset(tap / TAP_COLS, tap % TAP_COLS);
  return STRIDE_W == 1 && !CHANNELS_LAST ? offset + TapsW::misalignment(place.tap_block_w, OUTPUT_COPY) : offset;
}
