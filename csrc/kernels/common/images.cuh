// Index arithmetic of kernels that get the sizes of the images at their launch.
#pragma once
#include "common/layer.cuh"
#include "common/sizes.cuh"

/// Offset of element [n, c, h, w] of an activation tensor of C channels and height x width pixels.
template <int C>
__device__ __forceinline__ Index at_activation(Index n, int c, int h, int w, int height, int width) {
  return CHANNELS_LAST ? ((n * height + h) * width + w) * C + c : ((n * C + c) * height + h) * width + w;
}
template <class Sizes>
__device__ __forceinline__ Index at_input(const Sizes& sizes, Index n, int c, int h, int w) {
  return at_activation<IN_CHANNELS>(n, c, h, w, sizes.height, sizes.width);
}
template <class Sizes>
__device__ __forceinline__ Index at_output(const Sizes& sizes, Index n, int c, int h, int w) {
  return at_activation<OUT_CHANNELS>(n, c, h, w, sizes.out_height, sizes.out_width);
}
/// Elements of one image.
template <class Sizes>
__device__ __forceinline__ long long input_elements(const Sizes& sizes) {
  return (long long)IN_CHANNELS * sizes.height * sizes.width;
}
template <class Sizes>
__device__ __forceinline__ long long output_elements(const Sizes& sizes) {
  return (long long)OUT_CHANNELS * sizes.out_height * sizes.out_width;
}

/// The pixel of the input, or the position of a phase, that has this number, counted through all images.
struct Pixel {
  Index image;
  int row, column;

  __device__ __forceinline__ static Pixel of(const ImageSizes& sizes, long long number) {
    if constexpr (sizeof(Index) == 4) {
      const int line = sizes.columns.quotient((int)number), image = sizes.rows.quotient(line);
      return {image, sizes.rows.remainder(line, image), sizes.columns.remainder((int)number, line)};
    } else {
      const long long line = number / sizes.columns.value;
      return {line / sizes.rows.value, (int)(line % sizes.rows.value), (int)(number % sizes.columns.value)};
    }
  }
};
