// The taps of each phase of the output, at compile time, for kernels that gather the inputs of their outputs. The output is
// divided into blocks of STRIDE_H x STRIDE_W pixels, one for each position (i, j). Pixel (phase_h, phase_w) of a position
// reads the inputs (i + a, j + b), where (a, b) depends only on the phase and the tap.
#pragma once
#include "common/layer.cuh"
#include "common/tile_index.cuh"

// The taps of one phase on one axis: first, first + STEP, first + 2 STEP, `count` in all. The first tap reads the input
// `origin` pixels after the position, each further tap REACH pixels before the last.
struct Phase {
  int first, count, origin;
};
template <int KERNEL, int STRIDE, int PADDING, int DILATION>
struct PhaseAxis {
  static constexpr int COMMON = gcd(STRIDE, DILATION);
  static constexpr int STEP = STRIDE / COMMON;
  static constexpr int REACH = DILATION / COMMON;
  static constexpr int COUNT = ceil_div(KERNEL, STEP);  // the most taps of a phase

  // The tap 0 <= k < STEP with k * REACH congruent to 1 modulo STEP: k * DILATION = r then has the first solution
  // r / COMMON * INVERSE.
  static constexpr int inverse() {
    int k = 0;
    while (k < STEP && k * REACH % STEP != 1 % STEP) ++k;
    return k;
  }
  static constexpr int INVERSE = inverse();

  static constexpr Phase phase(int index) {
    const int residue = (index + PADDING) % STRIDE;
    const int first = residue / COMMON * INVERSE % STEP;
    if (residue % COMMON != 0 || first >= KERNEL) return {0, 0, 0};
    return {first, (KERNEL - 1 - first) / STEP + 1, (index + PADDING - first * DILATION) / STRIDE};
  }
  static constexpr int lowest() {
    int minimum = 1 << 30;
    for (int index = 0; index < STRIDE; ++index) {
      const Phase p = phase(index);
      const int low = p.origin - (p.count - 1) * REACH;
      if (p.count > 0 && low < minimum) minimum = low;
    }
    return minimum;
  }
  static constexpr int highest() {
    int maximum = -(1 << 30);
    for (int index = 0; index < STRIDE; ++index)
      if (phase(index).count > 0 && phase(index).origin > maximum) maximum = phase(index).origin;
    return maximum;
  }
  static constexpr bool full() {
    for (int index = 0; index < STRIDE; ++index)
      if (phase(index).count != COUNT) return false;
    return true;
  }
  // A position reads the inputs LOWEST to LOWEST + SPAN pixels after it. FULL: every phase has COUNT taps.
  static constexpr int LOWEST = lowest();
  static constexpr int SPAN = highest() - LOWEST;
  static constexpr bool FULL = full();
};
using Vertical = PhaseAxis<KERNEL_H, STRIDE_H, PADDING_H, DILATION_H>;
using Horizontal = PhaseAxis<KERNEL_W, STRIDE_W, PADDING_W, DILATION_W>;
