// Gradient of the weight as an implicit GEMM: what a block computes, and how its operands lie in shared memory.
//
//   M = input channels, N = output channels of one group, for TAP_ROWS x TAP_COLS taps; K = pixels of the input, in
//   tiles of TILE_N images x TILE_H rows x TILE_W columns.
//
// Tap (i, j) of a block reads grad_output at (base + pixel * STRIDE + j * tap step * DILATION): one phase of the
// stride, shifted by whole positions. So the window of grad_output is split by phase, and a tap is an offset into it.
// Positions are counted [image][row phase][row][column phase][column].
#pragma once

#include "common/integers.cuh"
#include "common/sizes.cuh"

using ptx::u32;

constexpr int TAPS = KERNEL_H * KERNEL_W;
constexpr int CI_GROUP = IN_CHANNELS / GROUPS;
constexpr int CO_GROUP = OUT_CHANNELS / GROUPS;
constexpr bool IS_16_BIT = PRECISION == ptx::FP16 || PRECISION == ptx::BF16;
constexpr int ITEM = IS_16_BIT ? 2 : 4;

constexpr int THREADS = 32 * WARPS_M * WARPS_N * WARPS_T * WARPS_K;
constexpr int BLOCK_M = WARPS_M * WARP_M;
constexpr int BLOCK_N = WARPS_N * WARP_N;
constexpr int BLOCK_TAPS = TAP_ROWS * TAP_COLS;
constexpr int M_BLOCKS = ceil_div(CI_GROUP, BLOCK_M);
constexpr int N_BLOCKS = ceil_div(CO_GROUP, BLOCK_N);
static_assert(WARPS_T * WARP_TAPS >= BLOCK_TAPS && (WARPS_T - 1) * WARP_TAPS < BLOCK_TAPS);

/// The taps of one axis in blocks of COUNT taps, STEP apart. Blocks are counted by the residue class of their taps modulo
/// STEP, fastest first.
template <int KERNEL, int STRIDE, int DILATION, int PADDING, int COUNT, int STEP>
struct TapAxis {
  static constexpr int PITCH = STEP * DILATION;
  static constexpr int PERIOD = STRIDE / gcd(STRIDE, PITCH);
  static constexpr int PHASES = COUNT < PERIOD ? COUNT : PERIOD;
  static constexpr int MAX_SHIFT = (COUNT - 1) * PITCH / STRIDE;
  static constexpr int CLASSES = STEP < KERNEL ? STEP : KERNEL;
  // Blocks of the longest residue class.
  static constexpr int BLOCKS_PER_CLASS = ceil_div(ceil_div(KERNEL, STEP), COUNT);
  static constexpr int BLOCKS = CLASSES * BLOCKS_PER_CLASS;

  __device__ static constexpr int shift(int j) { return j * PITCH / STRIDE; }
  __device__ static constexpr int phase(int j) { return j % PERIOD; }
  __device__ static constexpr int residue(int phase) { return phase * PITCH % STRIDE; }
  __device__ static constexpr int phase_of_residue(int r) {
    for (int p = 0; p < PHASES; ++p)
      if (residue(p) == r) return p;
    return -1;
  }
  /// The j-th tap of a block, which may lie beyond the kernel.
  __device__ static constexpr int tap(int block, int j) { return block % CLASSES + (block / CLASSES * COUNT + j) * STEP; }
  /// The column (row) that the first tap reads for pixel 0, and its distance from the multiple of `align` before it.
  __device__ static constexpr int base(int block) { return tap(block, 0) * DILATION - PADDING; }
  __device__ static constexpr int misalignment(int block, int align) { return (base(block) % align + align) % align; }
  __device__ static constexpr int max_misalignment(int align) {
    int largest = 0;
    for (int block = 0; block < BLOCKS; ++block)
      if (misalignment(block, align) > largest) largest = misalignment(block, align);
    return largest;
  }
};
using TapsH = TapAxis<KERNEL_H, STRIDE_H, DILATION_H, PADDING_H, TAP_ROWS, TAP_ROW_STEP>;
using TapsW = TapAxis<KERNEL_W, STRIDE_W, DILATION_W, PADDING_W, TAP_COLS, TAP_COL_STEP>;
constexpr int TAP_BLOCKS = TapsH::BLOCKS * TapsW::BLOCKS;
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

/// Which tile and split a block computes.
struct Place {
  int m0, n0, group;           // first channels, in the group
  int tap_block_h, tap_block_w;
  int tile;                    // of the weight, counted by m, n, taps and group, fastest first
  int split;

  __device__ __forceinline__ static Place of(int block) {
    Place p;
    constexpr int TILES = M_BLOCKS * N_BLOCKS * TAP_BLOCKS * GROUPS;
    p.tile = block % TILES;
    p.split = block / TILES;
    p.m0 = p.tile % M_BLOCKS * BLOCK_M;
    int rest = p.tile / M_BLOCKS;
    p.n0 = rest % N_BLOCKS * BLOCK_N;
    rest /= N_BLOCKS;
    p.tap_block_h = rest % TapsH::BLOCKS;
    rest /= TapsH::BLOCKS;
    p.tap_block_w = rest % TapsW::BLOCKS;
    p.group = rest / TapsW::BLOCKS;
    return p;
  }
};

/// A tap of a block by its number. Numbers beyond BLOCK_TAPS repeat the last tap, and their sums are not stored.
struct Tap {
  int offset;       // positions in grad_output's window
  bool reads_each_once;  // its offset lies in [0, STRIDE): all such taps together read each pixel of grad_output once

  __device__ __forceinline__ static Tap of(const Place& place, int number) {
    const int tap = number < BLOCK_TAPS ? number : BLOCK_TAPS - 1;
    const int i = tap / TAP_COLS, j = tap % TAP_COLS;
    const int base_h = TapsH::base(place.tap_block_h), base_w = TapsW::base(place.tap_block_w);
    const int h = base_h + i * TapsH::PITCH, w = base_w + j * TapsW::PITCH;
    Tap made;
    made.offset = OutputWindow::tap_offset(i, j);
    if (STRIDE_W == 1 && !CHANNELS_LAST) made.offset += TapsW::misalignment(place.tap_block_w, OUTPUT_COPY);
    made.reads_each_once = number < BLOCK_TAPS && h >= 0 && h < STRIDE_H && w >= 0 && w < STRIDE_W &&
                      TapsH::tap(place.tap_block_h, i) < KERNEL_H && TapsW::tap(place.tap_block_w, j) < KERNEL_W;
    return made;
  }
};

/// Offset of grad_weight[ci, co, kh, kw], ci counted over all groups, co within its group.
__device__ __forceinline__ long long at_weight(int ci, int co, int kh, int kw) {
  return WEIGHT_CHANNELS_LAST ? ((static_cast<long long>(ci) * KERNEL_H + kh) * KERNEL_W + kw) * CO_GROUP + co
                              : ((static_cast<long long>(ci) * CO_GROUP + co) * KERNEL_H + kh) * KERNEL_W + kw;
}
