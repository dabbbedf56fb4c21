// The sizes and strides of a tiny problem, which come with the launch (kernels/common/tiny.py writes the same words), so that
// one kernel of each dtype computes every geometry and layout.
#pragma once

#include "common/types.cuh"

/// The strides of an activation or the weight, in elements.
struct Strides {
  int batch, channel, row, col;

  __device__ __forceinline__ int at(int n, int c, int h, int w) const {
    return n * batch + c * channel + h * row + w * col;
  }
};

/// One axis, with sizes in pixels. `step` is the distance of neighbouring taps that reach the same output, `step_back` the
/// distance of the input pixels that they read.
struct Axis {
  int in, out, kernel, stride, padding, dilation, step, step_back;

  /// Returns the first tap that reaches an output, or `kernel` if there is none. `input` receives the input pixel that it
  /// reads, which may lie outside.
  __device__ __forceinline__ int first_tap(int output, int& input) const {
    int tap = 0, from = output + padding;
    while (tap < kernel && from % stride != 0) ++tap, from -= dilation;
    input = from / stride;
    return tap;
  }
};

struct Problem {
  int channels_in, channels_out, group_in, group_out;  // of all groups, of one
  Axis vertical, horizontal;
  int counts[3];      // elements of the output, or of the gradients of input, weight and bias
  int end_blocks[2];  // the first block behind those of the gradient of the input, and of the weight
  int pixels_in, pixels_out;  // of all images
};

using Sum = Accumulate<Element>::type;
