// A block's tile of cells: its warps and fragments, how many tiles there are, which one a block computes.
//
// A tile is TILE_N x TILE_H x TILE_W cells (forward/implicit_gemm_taps.cuh); a warp multiplies WARP_IMAGES x WARP_ROWS x WARP_COLS fragments of
// 8 cells each, a fragment being FRAGMENT_N x FRAGMENT_H x FRAGMENT_W cells (8 in a row where the map is wide
// enough). With FLAT (no tap is shifted) all cells of all images form one row, so no tile is ragged but the last.
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

// A multiply of wgmma reads 8 cells as 8 neighbouring pixels. Where the map is narrower, whole rows are neighbours:
// the tile is as wide as the map, and shared memory holds a copy of it for each shift by columns, cut to its width.
constexpr bool NARROW = PLANES && FRAGMENT_W < 8;

// The plan sees to it that no map of a NARROW kernel has more than TILE_W columns of cells.
static_assert(!NARROW || (FRAGMENT_N == 1 && POSITION_INPUT_ROWS == 1 && WARP_COLS == 1));

// ---- which tile a block computes ----------------------------------------------------------------------------

struct Origin {
  int image;     // first image of the tile; with FLAT, first cell of all images' cells
  int row, col;  // first cell
};

/// Counts the tiles of one block of channels of one group, columns fastest.
__device__ __forceinline__ Origin tile_origin(int tile, const Sizes& sizes) {
  if constexpr (FLAT) {
    return {tile * TILE_W, 0, 0};
  } else {
    const int images = sizes.image_tiles.quotient(tile), in_image = sizes.image_tiles.remainder(tile, images);
    const int row = sizes.row_tiles.quotient(in_image);
    return {images * TILE_N, row * TILE_H, sizes.row_tiles.remainder(in_image, row) * TILE_W};
  }
}

/// A cell of the tile: where its first output pixel lies, and whether it exists.
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
    return {position.image, position.row, position.col, position.image < sizes.batch && position.row < sizes.positions_h && position.col < sizes.positions_w};
  }
}
