// Gradient of the weight as an implicit GEMM: what a block computes.
//
//   M = input channels, N = output channels of one group, for TAP_ROWS x TAP_COLS taps; K = pixels of the input, in
//   tiles of images x rows x columns
//
// Tap (i, j) of a block reads grad_output at (base + pixel * STRIDE + j * tap step * DILATION): one phase of the
// stride, shifted by whole positions. So what a tile reads of grad_output is split by phase, and a tap is an offset into it.
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

/// Whether the offset of a block's `number`-th tap lies in [0, STRIDE): all such taps together read each pixel of grad_output
/// once. Numbers beyond BLOCK_TAPS repeat the last tap, and their sums are not stored.
__device__ __forceinline__ bool reads_each_once(const Place& place, int number) {
  const int tap = number < BLOCK_TAPS ? number : BLOCK_TAPS - 1;
  const int i = tap / TAP_COLS, j = tap % TAP_COLS;
  const int h = TapsH::base(place.tap_block_h) + i * TapsH::PITCH, w = TapsW::base(place.tap_block_w) + j * TapsW::PITCH;
  return number < BLOCK_TAPS && h >= 0 && h < STRIDE_H && w >= 0 && w < STRIDE_W && TapsH::tap(place.tap_block_h, i) < KERNEL_H &&
         TapsW::tap(place.tap_block_w, j) < KERNEL_W;
}

/// Offset of grad_weight[ci, co, kh, kw], ci counted over all groups, co within its group.
__device__ __forceinline__ long long at_weight(int ci, int co, int kh, int kw) {
  return WEIGHT_CHANNELS_LAST ? ((static_cast<long long>(ci) * KERNEL_H + kh) * KERNEL_W + kw) * CO_GROUP + co
                              : ((static_cast<long long>(ci) * CO_GROUP + co) * KERNEL_H + kh) * KERNEL_W + kw;
}
