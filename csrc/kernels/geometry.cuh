// The index arithmetic all general kernels share, from the constants a plan gives: IN_CHANNELS, OUT_CHANNELS,
// GROUPS, HEIGHT, WIDTH, OUT_HEIGHT, OUT_WIDTH, KERNEL_*, STRIDE_*, PADDING_*, DILATION_* (_H vertical, _W
// horizontal), CHANNELS_LAST (layout of activations), WEIGHT_CHANNELS_LAST, and the type Index (int, or long
// long where a tensor holds more than 2^31 - 1 elements).
#pragma once

constexpr int CI_GROUP = IN_CHANNELS / GROUPS;
constexpr int CO_GROUP = OUT_CHANNELS / GROUPS;
constexpr int TAPS = KERNEL_H * KERNEL_W;

// Offset of element [n, c, h, w] of an activation tensor of C channels and H x W pixels.
template <int C, int H, int W>
__device__ __forceinline__ Index activation(Index n, int c, int h, int w) {
  return CHANNELS_LAST ? ((n * H + h) * W + w) * C + c : ((n * C + c) * H + h) * W + w;
}
__device__ __forceinline__ Index at_input(Index n, int c, int h, int w) {
  return activation<IN_CHANNELS, HEIGHT, WIDTH>(n, c, h, w);
}
__device__ __forceinline__ Index at_output(Index n, int c, int h, int w) {
  return activation<OUT_CHANNELS, OUT_HEIGHT, OUT_WIDTH>(n, c, h, w);
}
// Offset of weight[ci, co, kh, kw], co counted within its group.
__device__ __forceinline__ Index at_weight(int ci, int co, int kh, int kw) {
  return WEIGHT_CHANNELS_LAST ? (((Index)ci * KERNEL_H + kh) * KERNEL_W + kw) * CO_GROUP + co
                              : (((Index)ci * CO_GROUP + co) * KERNEL_H + kh) * KERNEL_W + kw;
}

constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }

// The taps of one axis that reach the output positions congruent to `residue` (= (o + padding) mod stride):
// first, first + step, ..., `count` of them. None when no k * dilation is congruent to the residue.
struct PhaseTaps {
  int first, count;
};
template <int KERNEL, int STRIDE, int DILATION>
struct Axis {
  static constexpr int STEP = STRIDE / gcd(STRIDE, DILATION);
  __device__ static PhaseTaps taps(int residue) {
    int first = 0;
    while (first < KERNEL && first * DILATION % STRIDE != residue) ++first;
    return {first, first < KERNEL ? (KERNEL - 1 - first) / STEP + 1 : 0};
  }
};
