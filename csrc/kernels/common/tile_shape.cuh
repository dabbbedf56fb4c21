// The tile of positions of a block: its warps and fragments, and which tile a block computes.
//
// A tile is TILE_N x TILE_H x TILE_W positions (forward/implicit_gemm_taps.cuh). A warp multiplies WARP_IMAGES x WARP_ROWS x
// WARP_COLS fragments of 8 positions, FRAGMENT_N x FRAGMENT_H x FRAGMENT_W (8 in a row where the map is wide enough). With
// FLAT (no tap is shifted) all positions of all images form one row, so that only the last tile is not full.
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

struct Origin {
  int image;     // first image of the tile; with FLAT, first position, counted through all images
  int row, col;  // first position
};

/// Returns the origin of a tile of one block of channels of one group; columns are counted fastest.
__device__ __forceinline__ Origin tile_origin(int tile, const Sizes& sizes) {
  if constexpr (FLAT) {
    return {tile * TILE_W, 0, 0};
  } else {
    const int images = sizes.image_tiles.quotient(tile), in_image = sizes.image_tiles.remainder(tile, images);
    const int row = sizes.row_tiles.quotient(in_image);
    return {images * TILE_N, row * TILE_H, sizes.row_tiles.remainder(in_image, row) * TILE_W};
  }
}

/// A position of the tile: its image, row and column, and whether it exists.
struct Position {
  int image, row, col;
  bool inside;
};

__device__ __forceinline__ Position position_at(const Origin& origin, int n, int h, int w, const Sizes& sizes) {
  if constexpr (FLAT) {
    const int index = origin.image + w, image = sizes.image_positions.quotient(index);
    const int pixel = sizes.image_positions.remainder(index, image), row = sizes.row_positions.quotient(pixel);
    return {image, row, sizes.row_positions.remainder(pixel, row), image < sizes.batch};
  } else {
    const Position position{origin.image + n, origin.row + h, origin.col + w, true};
    const bool inside = position.image < sizes.batch && position.row < sizes.positions_h && position.col < sizes.positions_w;
    return {position.image, position.row, position.col, inside};
  }
}
