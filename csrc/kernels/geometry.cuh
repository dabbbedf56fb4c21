// The index arithmetic of kernels with the sizes compiled in, from the constants of layer.cuh and HEIGHT, WIDTH, OUT_HEIGHT,
// OUT_WIDTH.
#pragma once
#include "layer.cuh"

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
