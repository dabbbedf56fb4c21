// Loads of one chunk of k of a tile's input by the copy engine, for forward/implicit_gemm_tma.cu: boxes of rows of CHUNK_WORDS
// words, [pixel][k] with a swizzle as long as a row. The copy engine writes zeros for what lies outside the image or behind
// the last channel of a group.
//
// The dimensions of the tensor map of the input, innermost first: channel of the group, column, row, image, group; with FLAT
// channel, pixel, group; with PIXEL_MAJOR pixel, channel, image; of dense tiles channel of all groups, column, row, image.
#pragma once

/// Pixels of a box of a FLAT input; a dimension of a box has at most 256 elements.
constexpr int FLAT_BOX = TILE_W / ceil_div(TILE_W, 256);
static_assert(TILE_W % FLAT_BOX == 0);
constexpr int BOX_PIXELS = NARROW ? SHIFTS * TILE_N * HALO_H * TILE_W : HALO_PIXELS;

/// Pixels of a chunk.
__device__ __forceinline__ int loaded_pixels(const TileSizes& sizes) {
  return SHAPED ? shape_of(sizes).box_pixels : BOX_PIXELS;
}

struct TmaInputLoader {
  int channel, col, row, image, group;
  bool dense;

  __device__ __forceinline__ void set_tile(const Origin& origin, int group, int chunk_index, const TileSizes& sizes) {
    channel = chunk_index * CHUNK_WORDS * CHANNELS_PER_WORD;
    col = origin.col + MIN_SHIFT_W;
    row = origin.row * POSITION_INPUT_ROWS + MIN_SHIFT_H;
    image = origin.image;
    this->group = group;
    dense = is_dense(sizes);
    if (dense) {
      channel += group * CI_GROUP;
      const Position first = position_at(origin, 0, 0, 0, sizes);
      image = first.image;
      row = first.row + MIN_SHIFT_H;
      col = first.col + MIN_SHIFT_W;
    }
    if constexpr (PIXEL_MAJOR) {
      channel += group * CI_GROUP;
      image = sizes.image_positions.quotient(origin.image);
      col = sizes.image_positions.remainder(origin.image, image);
    }
  }
  __device__ __forceinline__ void advance() { channel += CHUNK_WORDS * CHANNELS_PER_WORD; }

  __device__ __forceinline__ void copy(u32 to, const TensorMap& input, u32 barrier) const {
    constexpr u32 PIXEL = CHUNK_WORDS * 4;
    if constexpr (PIXEL_MAJOR) {
#pragma unroll
      for (int first = 0; first < TILE_W; first += BOX_ROW_PIXELS)
        ptx::tma_load(to + first * PIXEL, input, col + first, channel, image, barrier);
    } else if constexpr (FLAT) {
#pragma unroll
      for (int first = 0; first < TILE_W; first += FLAT_BOX)
        ptx::tma_load(to + first * PIXEL, input, channel, image + first, group, barrier);
    } else if (SHAPED && dense) {
      ptx::tma_load_im2col(to, input, channel, col, row, image, 0, 0, barrier);
    } else {
#pragma unroll
      for (int shift = 0; shift < (NARROW ? SHIFTS : 1); ++shift)
        ptx::tma_load(to + shift * SHIFTED_PITCH * PIXEL, input, channel, col + shift, row, image, group, barrier);
    }
  }
};
