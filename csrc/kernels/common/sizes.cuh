// The sizes of a call's tensors, which a kernel is told at its launch (kernels/common/sizes.py writes the same words), and division by
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
  /// The last digit of a number that is read digit by digit (common/tile_index.cuh).
  __device__ __forceinline__ int digit(unsigned& rest) const {
    const int all = static_cast<int>(rest), others = quotient(all);
    rest = static_cast<unsigned>(others);
    return remainder(all, others);
  }
};

/// Of the kernels that find their pixels one by one (common/images.cuh).
struct ImageSizes {
  int batch, height, width, out_height, out_width;
  Divisor rows, columns;  // of the input; forward/general.cu: of the cells
};

/// Of the kernels whose blocks walk down tiles of the input's pixels (gradients/grad_output_tile.cuh, gradients/depthwise.cu).
struct WalkSizes {
  int batch, height, width, out_height, out_width;
  int tile_rows;
  int repeat;            // tiles of a walk
  int split;             // whether sums go to the workspace
  Divisor down, across;  // tiles below each other in an image, and side by side
};

/// Of the kernels that take pixels of an image as they follow each other (gradients/narrow_joint_im2col.cuh).
struct RunSizes {
  int batch, height, width, out_height, out_width;
  int pixels;               // of an image of the input
  int all_tiles;            // of all images
  Divisor tiles, columns;   // tiles of an image; pixels of a row of the input
};

/// Of gradients/large_kernel.cu, whose steps are 16 pixels of a row of the input.
struct StepSizes {
  int batch, height, width, out_height, out_width;
  int splits;            // of the steps of all images
  Divisor rows, across;  // rows of the input, steps of a row
};

/// Of common/space_to_depth.cu: a tensor of images, and the lines of cells that become of it.
struct PartSizes {
  int batch, source_height, source_width;
  int pixel_rows;            // of the input that taps reach cells from
  int cells, pitch;          // of a line, and floats from one to the next
  int segment;               // cells that a warp makes
  Divisor segments, columns; // segments of a line, cells of a row
};

/// Of grad_weight/pixel_rows.cu, whose pixels lie in lines.
struct LineSizes {
  int batch, width;
  int pixels;  // of an image
  int slices;  // that the stages of all images are cut into
};

/// Of grad_weight/im2col_nchw.cu, whose stages are images, rows and columns of the input.
struct StageSizes {
  int batch, out_width;
  int line;             // pixels from a row of the input to the next
  int down, across;     // stages of IMAGES images, below each other and side by side
  int slices;           // that all stages are cut into
  int in_weight_order;  // whether the one slice's sums are the gradient
};

/// Of grad_weight/stride1.cu, whose columns are `segment` rows of grad_output in a strip of an image.
struct GradWeightStripSizes {
  int batch, out_height, out_width;
  int segment;
  int flush;                 // columns whose sums are added up before they leave
  int slices;                // that the columns of all images are cut into
  Divisor strips, segments;  // of an image
};

/// Of the kernels that sum up the weight's gradient over tiles of the input's pixels (grad_weight/implicit_gemm_layout.cuh).
struct PixelSizes {
  int batch, height, width, out_height, out_width;
  int slices;                      // that the tiles are cut into
  int slice_tiles, longer_slices;  // tiles of a slice; so many slices, the first, have one more
  int flush;                       // tiles after which sums go to the workspace
  int through_workspace;           // whether any go there
  Divisor image_tiles, row_tiles;  // tiles of TILE_N images, and of one row of them

  __device__ __forceinline__ constexpr int first_tile(int slice) const {
    return slice * slice_tiles + (slice < longer_slices ? slice : longer_slices);
  }
  __device__ __forceinline__ constexpr int tiles_of(int slice) const { return slice_tiles + (slice < longer_slices); }
};

/// Where a tile of pixels lies: its first image, row and column of the input.
template <int TILE_N, int TILE_H, int TILE_W>
struct TilePlace {
  int image, row, col;

  __device__ __forceinline__ static TilePlace of(int tile, const PixelSizes& sizes) {
    const int images = sizes.image_tiles.quotient(tile), in_image = sizes.image_tiles.remainder(tile, images);
    const int row = sizes.row_tiles.quotient(in_image);
    return {images * TILE_N, row * TILE_H, sizes.row_tiles.remainder(in_image, row) * TILE_W};
  }
};

/// Of the kernels that cut the map into tiles of cells (common/tile_shape.cuh, grad_input/implicit_gemm_tma.cu, grad_input/im2col.cu,
/// forward/narrow_mma.cu).
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

/// Of forward/narrow_ffma.cu, whose blocks walk down tiles of cells.
struct CellWalkSizes {
  int batch, height, width, out_height, out_width;
  int all_tiles;                // below each other, over all images
  int repeat;                   // tiles of a walk
  Divisor down, across, walks;  // tiles below each other in an image, and side by side; walks of all images
};

/// Of forward/stride1.cu, which goes down strips of images, `segment` rows of the output at a time.
struct StripSizes {
  int height, width, out_height, out_width;
  int segment;
  int columns;  // segments of strips, of all images
  Divisor strips, segments;

  __device__ __forceinline__ constexpr int pixels() const { return height * width; }
};

/// Of forward/col2im.cu, which goes down strips of images.
struct FoldSizes {
  int height, out_height, out_width;
  int tiles;        // strips, of tiles of columns, of all images
  int cell_rows;    // that have outputs
  int tile_groups;  // of neighbouring outputs in a tile of columns
  int whole_rows;   // whether a tile of columns is a whole row
  Divisor column_tiles, strips;
};
