// How a tiny problem lies in memory: sizes and strides come with the launch (kernels/common/tiny.py writes the same words), so
// that one kernel of each dtype serves every geometry and layout.
#pragma once

#include "common/types.cuh"

/// Of an image tensor or the weight, in elements.
struct Strides {
  int batch, channel, row, col;

  __device__ __forceinline__ int at(int n, int c, int h, int w) const {
    return n * batch + c * channel + h * row + w * col;
  }
};

/// One axis: sizes in pixels; `step`: of two neighbouring taps that reach the same output, and `step_back` the input
/// pixels between theirs.
struct Axis {
  int in, out, kernel, stride, padding, dilation, step, step_back;

  /// The first tap that reaches an output, and the input pixel that it comes from, perhaps outside; `kernel`: none.
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
  int end_blocks[2];  // the first block behind those of the gradient of the input, of the weight
  int pixels_in, pixels_out;  // of all images
};

using Sum = Accumulate<Element>::type;
