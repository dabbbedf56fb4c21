// The sizes of a call's tensors, which a kernel gets as an argument at its launch (kernels/common/sizes.py writes the same
// words; those of BoxTileShape: kernels/grad_input/implicit_gemm_tma_shape.py), and division by them.
#pragma once

/// Division of whole numbers below 2^31 by a number that is known at the launch: with 2^shift the power of two at or above
/// `value` and magic = ceil(2^(31 + shift) / value), n / value is 2 n * magic / 2^(32 + shift), rounded down (Granlund and
/// Montgomery, Division by Invariant Integers using Multiplication, 1994).
struct Divisor {
  unsigned value, magic, shift;

  __device__ __forceinline__ int quotient(int n) const {
    return static_cast<int>(__umulhi(static_cast<unsigned>(n) << 1, magic) >> shift);
  }
  /// The remainder of n, whose quotient is known.
  __device__ __forceinline__ int remainder(int n, int quotient) const { return n - quotient * static_cast<int>(value); }
  __device__ __forceinline__ int remainder(int n) const { return remainder(n, quotient(n)); }
  /// The last digit of a number that is read digit by digit (common/tile_index.cuh).
  __device__ __forceinline__ int digit(unsigned& rest) const {
    const int all = static_cast<int>(rest), others = quotient(all);
    rest = static_cast<unsigned>(others);
    return remainder(all, others);
  }
};

/// For kernels that find their pixels one by one (common/images.cuh).
struct ImageSizes {
  int batch, height, width, out_height, out_width;
  Divisor rows, columns;  // of the input; in forward/general.cu of the positions of a phase
};

/// For kernels whose blocks compute a segment of tiles: tiles of the input's pixels that lie below each other
/// (gradients/grad_output_tile.cuh, gradients/depthwise.cu).
struct SegmentSizes {
  int batch, height, width, out_height, out_width;
  int tile_rows;
  int segment_tiles;     // tiles of a segment
  int split;             // whether partial sums go to the workspace
  Divisor down, across;  // tiles below each other in an image, and side by side
};

/// For kernels whose tiles are consecutive pixels of an image (gradients/narrow_joint_im2col.cuh).
struct PatchSizes {
  int batch, height, width, out_height, out_width;
  int pixels;               // of an image of the input
  int all_tiles;            // of all images
  Divisor tiles, columns;   // tiles of an image; pixels of a row of the input
};

/// For gradients/large_kernel.cu, whose steps are 16 pixels of a row of the input.
struct LargeKernelSizes {
  int batch, height, width, out_height, out_width;
  int splits;            // of the steps of all images
  Divisor rows, across;  // rows of the input, steps of a row
};

/// For common/pad_images.cu: images, and their copy.
struct PadImagesSizes {
  int batch, height, width;
  int pixels, pitch;          // pixels of a channel of the copy, and floats from one channel to the next
  int segment;                // pixels that a warp copies
  Divisor segments, columns;  // segments of a channel, columns of the copy
};

/// For grad_weight/im2col_nchw.cu: a stage is `images` x `rows` x `cols` pixels of the input.
struct Im2colNchwSizes {
  int batch, height, width, out_width;
  int images, rows, cols;
  int pitch;                  // pixels from a row of the input to the next
  int down, across;           // stages of the same images, below each other and side by side
  int splits;                 // of all stages
  int in_weight_order;        // whether the sums of the only split are the gradient
  int run_boxes, out_boxes;   // boxes of the input for each image, and boxes of grad_output side by side
  int left_halo;              // columns of grad_output before the first pixel's
  int steps;                  // of 8 pixels
  int stages;                 // of the ring
  Divisor run_steps;          // steps of each image
};

/// For grad_weight/stride1.cu, whose tiles are `segment` rows of grad_output in a column tile of an image.
struct GradWeightStride1Sizes {
  int batch, out_height, out_width;
  int segment;
  int flush;                       // tiles whose sums are added up before they are stored
  int splits;                      // of the tiles of all images
  Divisor column_tiles, segments;  // of an image
};

/// For kernels that add up the gradient of the weight over tiles of the input's pixels (grad_weight/implicit_gemm_layout.cuh).
struct GradWeightTileSizes {
  int batch, height, width, out_height, out_width;
  int splits;                      // of all tiles
  int split_tiles, longer_splits;  // tiles of a split; the first `longer_splits` splits have one more
  int flush;                       // tiles after which sums go to the workspace
  int through_workspace;           // whether any go there
  Divisor image_tiles, row_tiles;  // tiles of TILE_N images, and of one row of them

  __device__ __forceinline__ constexpr int first_tile(int split) const {
    return split * split_tiles + (split < longer_splits ? split : longer_splits);
  }
  __device__ __forceinline__ constexpr int tiles_of(int split) const { return split_tiles + (split < longer_splits); }
};

/// The first image, row and column of the input of a tile of pixels.
struct PixelPlace {
  int image, row, col;
};

/// The same where the launch gives the shape of a tile.
struct GradWeightShapedSizes {
  GradWeightTileSizes tiles;
  int images, rows, cols;  // of a tile

  __device__ __forceinline__ PixelPlace first_pixel(int tile) const {
    const int before = tiles.image_tiles.quotient(tile), in_image = tiles.image_tiles.remainder(tile, before);
    const int row = tiles.row_tiles.quotient(in_image);
    return {before * images, row * rows, tiles.row_tiles.remainder(in_image, row) * cols};
  }
};

/// For grad_weight/im2col_nhwc.cu, whose tiles of pixels are its stages, with powers of two of images, rows and columns.
struct Im2colNhwcSizes : GradWeightShapedSizes {
  int col_bits;  // the columns are 1 << col_bits
  int stages;    // of the ring
};

/// For grad_weight/implicit_gemm_tma.cu.
struct GradWeightTmaSizes : GradWeightShapedSizes {
  int box_cols;      // columns of a box of grad_output
  int box_bytes;     // from a box of grad_output to the next
  int group_pixels;  // pixels of a box from 8 pixels of a multiply to the next 8
  int copied_bytes;  // of all boxes of a stage
  int stages;        // of the ring
  int steps[16];     // of each multiply: where its pixels begin in a box, in units of 16 bytes
};

/// The same where the shape of a tile is compiled in.
template <int TILE_N, int TILE_H, int TILE_W>
struct TilePlace {
  int image, row, col;

  __device__ __forceinline__ static TilePlace of(int tile, const GradWeightTileSizes& sizes) {
    const int images = sizes.image_tiles.quotient(tile), in_image = sizes.image_tiles.remainder(tile, images);
    const int row = sizes.row_tiles.quotient(in_image);
    return {images * TILE_N, row * TILE_H, sizes.row_tiles.remainder(in_image, row) * TILE_W};
  }
};

/// For kernels that divide the map into tiles of positions (common/tile_shape.cuh, grad_input/implicit_gemm_tma.cu,
/// grad_input/im2col.cu, forward/narrow_mma.cu).
struct Sizes {
  int batch, height, width, out_height, out_width;
  int positions_h, positions_w;
  int tiles;                                // of all images, for one block of channels
  Divisor image_tiles, row_tiles;           // tiles of TILE_N images, and of one row of them
  Divisor image_positions, row_positions;   // positions of an image, and of one row of it; the former as many as pixels, if FLAT
  Divisor splits;                           // of the sum over input channels

  __device__ __forceinline__ constexpr int pixels() const { return height * width; }
  __device__ __forceinline__ constexpr int out_pixels() const { return out_height * out_width; }
};

/// The shape of a tile of positions of forward/implicit_gemm_tma.cu, and of the box of pixels that it reads. A warpgroup has
/// rows of 8 positions, one below the other. `dense`: all positions of the tile are a row, wherever they begin, and a row of 8
/// is followed by the next.
struct TileShape {
  int images, rows, cols;                                       // of a tile
  int dense;
  int warpgroup_images, warpgroup_rows, warpgroup_cols;         // from a warpgroup to the next, in the tile
  int warpgroup_pixels;                                         // the same in the box
  int group_pixels, row_pixels;                                 // from 8 positions to the next 8, and from a row of pixels to the next
  int box_pixels;
};
struct ShapedSizes : Sizes {
  TileShape shape;
};

/// The shape of a tile of positions of grad_input/implicit_gemm_tma.cu, and of the box of pixels that it reads. Rows of
/// positions are powers of two long, and so is the number of them that a warpgroup has in an image.
struct BoxTileShape {
  int images, rows, col_bits;                   // of a tile
  int warpgroup_row_bits;                       // rows of an image that a warpgroup has
  int warpgroup_images, warpgroup_rows;         // from a warpgroup to the next, in the tile
  int warpgroup_pixels;                         // the same in the box
  int group_positions, multiply_positions;      // from 8 positions to the next, and from a multiply to the next, in the tile
  int group_pixels, multiply_pixels;            // the same in the box
  int box_cols, box_bytes;
};

/// The tile of grad_input/im2col.cu beside `Sizes`: the positions, and the stages of shared memory.
struct Im2colTileShape {
  int images, rows;
  int row_pitch, channel_pitch;       // elements from a row of a box to the next, and from a channel of it
  int alignment_columns, wide;        // columns of a box before the first that a tap reaches; whether they are COLUMN_BLOCKs
  int paired;                         // whether a thread has neighbouring positions
  int input_bytes, input_pitch;       // that a stage of the input is loaded with, and from one to the next
  int input_stages, weight_stages;
  Divisor cols, image_positions;      // columns of a row, positions of an image
};

/// For forward/narrow_ffma.cu, whose blocks compute a segment of tiles of positions, which lie below each other.
struct NarrowFfmaSizes {
  int batch, height, width, out_height, out_width;
  int all_tiles;                   // below each other, over all images
  int segment_tiles;               // tiles of a segment
  Divisor down, across, segments;  // tiles below each other in an image, and side by side; segments of all images
};

/// For forward/stride1.cu, whose tiles are `segment` rows of the output in a column tile of an image.
struct Stride1Sizes {
  int height, width, out_height, out_width;
  int segment;
  int columns;  // tiles of all images
  Divisor column_tiles, segments;

  __device__ __forceinline__ constexpr int pixels() const { return height * width; }
};

/// For forward/col2im.cu, whose blocks compute row tiles of images.
struct Col2imSizes {
  int height, out_height, out_width;
  int tiles;          // row tiles, of column tiles, of all images
  int position_rows;  // that have outputs
  int tile_groups;    // groups of neighbouring outputs in a column tile
  int whole_rows;     // whether a column tile is a whole row
  Divisor column_tiles, row_tiles;
};
