// The tile of positions of a block: its warps and fragments, and which tile a block computes.
//
// A tile is TILE_N x TILE_H x TILE_W positions (forward/implicit_gemm_taps.cuh). A warp multiplies WARP_IMAGES x WARP_ROWS x
// WARP_COLS fragments of 8 positions, FRAGMENT_N x FRAGMENT_H x FRAGMENT_W (8 in a row where the map is wide enough). With
// FLAT (no tap is shifted) all positions of all images form one row, so that only the last tile is not full.
//
// SHAPED (forward/implicit_gemm_tma.cu): the shape of a tile is an argument, TileShape; TILE_N x TILE_H x TILE_W is that of one
// warpgroup beside the other in images. Dense positions are counted by places (Sizes.image_positions, row_positions), some of
// which are none.
#pragma once

#include "common/integers.cuh"
#include "common/sizes.cuh"

constexpr int WARPS = WARPS_M * WARPS_N;
constexpr int THREADS = 32 * WARPS;

constexpr int FRAGMENT_W = min_of(8, TILE_W);
constexpr int FRAGMENT_H = min_of(8 / FRAGMENT_W, TILE_H);
constexpr int FRAGMENT_N = 8 / (FRAGMENT_W * FRAGMENT_H);
constexpr int WARPS_W = TILE_W / (FRAGMENT_W * WARP_COLS);
constexpr int WARPS_H = TILE_H / (FRAGMENT_H * WARP_ROWS);
constexpr int WARPS_IMAGES = TILE_N / (FRAGMENT_N * WARP_IMAGES);
static_assert(WARPS_W * WARPS_H * WARPS_IMAGES == WARPS_N);
static_assert(WARPS_W * FRAGMENT_W * WARP_COLS == TILE_W);
static_assert(WARPS_H * FRAGMENT_H * WARP_ROWS == TILE_H);
static_assert(WARPS_IMAGES * FRAGMENT_N * WARP_IMAGES == TILE_N);

// wgmma reads 8 positions as 8 neighbouring pixels. Where the map is narrower, whole rows are neighbours: the tile is as
// wide as the map, and shared memory holds a copy of it for each shift by columns, cropped to the width of the map.
constexpr bool NARROW = PLANES && FRAGMENT_W < 8;

// The plan ensures that no map of a NARROW kernel has more than TILE_W columns of positions.
static_assert(!NARROW || (FRAGMENT_N == 1 && POSITION_INPUT_ROWS == 1 && WARP_COLS == 1));

// ---- which tile a block computes ----------------------------------------------------------------------------

constexpr bool SHAPED = SHAPED_PIXELS > 0;
static_assert(!SHAPED || (!FLAT && WARP_IMAGES == 1 && WARP_COLS == 1 && TILE_W == 8 && TILE_H == WARP_ROWS));

using TileSizes = Select<SHAPED, ShapedSizes, Sizes>::type;

__device__ __forceinline__ const TileShape& shape_of(const ShapedSizes& sizes) { return sizes.shape; }
/// Without SHAPED there is none: the constants are the shape.
__device__ __forceinline__ TileShape shape_of(const Sizes&) { return {}; }

/// Whether the positions of a tile are a row, wherever they begin.
__device__ __forceinline__ bool is_dense(const TileSizes& sizes) { return SHAPED && shape_of(sizes).dense; }

struct Origin {
  int image;     // first image of the tile; with FLAT and dense tiles, first position, counted through all images
  int row, col;  // first position
};

/// Returns the origin of a tile of one block of channels of one group; columns are counted fastest.
__device__ __forceinline__ Origin tile_origin(int tile, const TileSizes& sizes) {
  if constexpr (FLAT) {
    return {tile * TILE_W, 0, 0};
  } else {
    int tile_images = TILE_N, tile_rows = TILE_H, tile_cols = TILE_W;
    if constexpr (SHAPED) {
      if (is_dense(sizes)) return {tile * (TILE_N * TILE_H * TILE_W), 0, 0};
      tile_images = shape_of(sizes).images, tile_rows = shape_of(sizes).rows, tile_cols = shape_of(sizes).cols;
    }
    const int images = sizes.image_tiles.quotient(tile), in_image = sizes.image_tiles.remainder(tile, images);
    const int row = sizes.row_tiles.quotient(in_image);
    return {images * tile_images, row * tile_rows, sizes.row_tiles.remainder(in_image, row) * tile_cols};
  }
}

/// A position of the tile: its image, row and column, and whether it exists.
struct Position {
  int image, row, col;
  bool inside;
};

/// Position number `index` of all images.
__device__ __forceinline__ Position position_in_row(int index, const TileSizes& sizes) {
  const int image = sizes.image_positions.quotient(index), in_image = sizes.image_positions.remainder(index, image);
  const int row = sizes.row_positions.quotient(in_image), col = sizes.row_positions.remainder(in_image, row);
  return {image, row, col, image < sizes.batch && (FLAT || (row < sizes.positions_h && col < sizes.positions_w))};
}

__device__ __forceinline__ Position position_at(const Origin& origin, int n, int h, int w, const TileSizes& sizes) {
  if constexpr (FLAT) {
    return position_in_row(origin.image + w, sizes);
  } else {
    // A row of 8 dense positions is followed by the next.
    if (is_dense(sizes)) return position_in_row(origin.image + h * 8 + w, sizes);
    const Position position{origin.image + n, origin.row + h, origin.col + w, true};
    const bool inside = position.image < sizes.batch && position.row < sizes.positions_h && position.col < sizes.positions_w;
    return {position.image, position.row, position.col, inside};
  }
}
