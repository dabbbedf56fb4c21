// Constants of a layer, from those of its plan: IN_CHANNELS, OUT_CHANNELS, GROUPS, KERNEL_*, STRIDE_*, PADDING_*,
// DILATION_* (_H vertical, _W horizontal), CHANNELS_LAST (layout of activations), WEIGHT_CHANNELS_LAST, and the type Index
// (int, or long long where a tensor holds more than 2^31 - 1 elements).
#pragma once

#include "common/integers.cuh"

constexpr int CI_GROUP = IN_CHANNELS / GROUPS;
constexpr int CO_GROUP = OUT_CHANNELS / GROUPS;
constexpr int TAPS = KERNEL_H * KERNEL_W;

/// Offset of weight[ci, co, kh, kw]; co is counted within its group.
__device__ __forceinline__ Index at_weight(int ci, int co, int kh, int kw) {
  return WEIGHT_CHANNELS_LAST ? (((Index)ci * KERNEL_H + kh) * KERNEL_W + kw) * CO_GROUP + co
                              : (((Index)ci * CO_GROUP + co) * KERNEL_H + kh) * KERNEL_W + kw;
}

