// The sizes of a call's tensors, which a kernel is told at its launch (plans/sizes.py writes the same words), and division by
// them.
#pragma once

/// Division of whole numbers below 2^31 by one that is known at the launch: with 2^shift the power of two at or above
/// `value` and magic = ceil(2^(31 + shift) / value), n / value is 2 n * magic / 2^(32 + shift), rounded down (Granlund and
/// Montgomery, Division by Invariant Integers using Multiplication, 1994).
struct Divisor {
  unsigned value, magic, shift;

  __device__ __forceinline__ int quotient(int n) const {
    return static_cast<int>(__umulhi(static_cast<unsigned>(n) << 1, magic) >> shift);
  }
  /// Of n, whose quotient is known.
  __device__ __forceinline__ int remainder(int n, int quotient) const { return n - quotient * static_cast<int>(value); }
  __device__ __forceinline__ int remainder(int n) const { return remainder(n, quotient(n)); }
};

/// Of the kernels that cut the map into tiles of cells (tile_shape.cuh, grad_input_boxes.cu, grad_input_unfolded.cu).
struct Sizes {
  int batch, height, width, out_height, out_width;
  int cells_h, cells_w;
  int tiles;                         // of all images, for one block of channels
  Divisor image_tiles, row_tiles;    // tiles of TILE_N images, and of one row of them
  Divisor image_cells, row_cells;    // cells of an image, and of one row of it; the former as many as pixels, if FLAT
  Divisor splits;                    // of the sum over input channels

  __device__ __forceinline__ constexpr int pixels() const { return height * width; }
  __device__ __forceinline__ constexpr int out_pixels() const { return out_height * out_width; }
};
