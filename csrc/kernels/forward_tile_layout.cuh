// The shape of a block's tile and where it lies in shared memory. Constants only.
//
// A tile is TILE_N x TILE_H x TILE_W cells (forward_tile_taps.cuh); a warp multiplies WARP_IMAGES x WARP_ROWS x WARP_COLS fragments of
// 8 cells each, a fragment being FRAGMENT_N x FRAGMENT_H x FRAGMENT_W cells (8 in a row where the map is wide
// enough). With FLAT (no tap is shifted) all cells of all images form one row, so no tile is ragged but the last.
#pragma once

__device__ constexpr int least(int a, int b) { return a < b ? a : b; }
__device__ constexpr int most(int a, int b) { return a > b ? a : b; }
__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
/// Largest power of two up to `most` that divides n.
__device__ constexpr int power_dividing(int n, int most) {
  int v = most;
  while (n % v) v /= 2;
  return v;
}
/// Smallest n >= from, a multiple of `of`, with n % modulus == rest.
__device__ constexpr int aligned_to(int from, int of, int modulus, int rest) {
  int n = round_up(from, of);
  while (n % modulus != rest) n += of;
  return n;
}

constexpr int WARPS = WARPS_M * WARPS_N;
constexpr int THREADS = 32 * WARPS;

constexpr int FRAGMENT_W = least(8, TILE_W);
constexpr int FRAGMENT_H = least(8 / FRAGMENT_W, TILE_H);
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

constexpr int CELLS_H = ceil_div(OUT_HEIGHT, CELL_ROWS), CELLS_W = ceil_div(OUT_WIDTH, STRIDE_W);
constexpr int PIXELS = HEIGHT * WIDTH;
static_assert(!NARROW || (FRAGMENT_N == 1 && CELLS_W <= TILE_W && CELL_INPUT_ROWS == 1 && WARP_COLS == 1));
static_assert(!FLAT || (CELLS_H == HEIGHT && CELLS_W == WIDTH && CELL_INPUT_ROWS == 1 && TILE_H == 1 && TILE_N == 1 &&
                        CELLS_H * CELL_ROWS == OUT_HEIGHT && CELLS_W * STRIDE_W == OUT_WIDTH));
constexpr int TILES_H = ceil_div(CELLS_H, TILE_H), TILES_W = ceil_div(CELLS_W, TILE_W);

// ---- the input halo -----------------------------------------------------------------------------------------

constexpr int ITEM = sizeof(Element);
constexpr bool IS_16_BIT = ITEM == 2;
constexpr int MIN_SHIFT_H = FLAT ? 0 : ROWS_AXIS.min_shift(), MAX_SHIFT_H = FLAT ? 0 : ROWS_AXIS.max_shift();
constexpr int MIN_SHIFT_W = FLAT ? 0 : COLS_AXIS.min_shift(), MAX_SHIFT_W = FLAT ? 0 : COLS_AXIS.max_shift();

/// Elements of one copy: neighbouring pixels of a channel (NCHW) or neighbouring channels of a pixel.
constexpr int COPY_MOST = PLANES && !INPUT_CHANNELS_LAST ? 4 : 16 / ITEM;
constexpr int COPY = INPUT_CHANNELS_LAST ? power_dividing(CI_GROUP, COPY_MOST)
                     : FLAT              ? power_dividing(PIXELS, power_dividing(TILE_W, COPY_MOST))
                                         : power_dividing(WIDTH, power_dividing(TILE_W, COPY_MOST));
constexpr int COPY_PIXELS = INPUT_CHANNELS_LAST ? 1 : COPY;

// A row of the halo begins this many pixels early, where a copy of several pixels may begin.
constexpr int LEAD = NARROW ? 0 : ((MIN_SHIFT_W % COPY_PIXELS) + COPY_PIXELS) % COPY_PIXELS;
constexpr int HALO_H = (TILE_H - 1) * CELL_INPUT_ROWS + 1 + MAX_SHIFT_H - MIN_SHIFT_H;
constexpr int HALO_W = NARROW ? WIDTH : round_up(LEAD + TILE_W + MAX_SHIFT_W - MIN_SHIFT_W, COPY_PIXELS);

// The 8 pixels of a fragment must differ modulo 8: then no fragment load meets a bank twice.
constexpr int ROW_PITCH = NARROW ? TILE_W : FRAGMENT_H > 1 ? aligned_to(HALO_W, COPY_PIXELS, 8, FRAGMENT_W) : HALO_W;
constexpr int SHIFTED_PITCH = HALO_H * TILE_W;
constexpr int IMAGE_PITCH = NARROW ? (MAX_SHIFT_W - MIN_SHIFT_W + 1) * SHIFTED_PITCH
                            : FRAGMENT_N > 1
                                ? aligned_to(HALO_H * ROW_PITCH, COPY_PIXELS, 8, FRAGMENT_W * FRAGMENT_H % 8)
                                : HALO_H * ROW_PITCH;
constexpr int HALO_PIXELS = TILE_N * IMAGE_PITCH;

// Words of one chunk of k. For mma.sync: [k][pixel] in NCHW, [pixel][k] in channels_last. For wgmma, PLANES of
// 4 words: [k / 4][pixel][4], pitched so that neighbouring lanes, which fill neighbouring planes, differ in banks.
constexpr int K_PITCH = aligned_to(HALO_PIXELS, 8, 32, 8);
constexpr int PIXEL_PITCH = CHUNK_WORDS + 4;
constexpr int CHUNK_PLANES = CHUNK_WORDS / 4;
constexpr int PLANE_PITCH = aligned_to(HALO_PIXELS, 1, 8, INPUT_CHANNELS_LAST ? 8 / CHUNK_PLANES : CHUNK_PLANES > 2 ? 1 : 2);
constexpr int INPUT_WORDS = PLANES                ? CHUNK_WORDS * PLANE_PITCH
                            : INPUT_CHANNELS_LAST ? HALO_PIXELS * PIXEL_PITCH
                                                  : CHUNK_WORDS * K_PITCH;

/// Words between two pixels, and between two words of k.
constexpr int PIXEL_STEP = INPUT_CHANNELS_LAST ? PIXEL_PITCH : 1;
constexpr int K_STEP = INPUT_CHANNELS_LAST ? 1 : K_PITCH;

__device__ constexpr int most_taps() {
  int most = 0;
  for (int g = 0; g < PHASE_GROUPS; ++g) most = group_taps(g) > most ? group_taps(g) : most;
  return most;
}
constexpr int WEIGHT_WORDS = CHUNK_STEPS * most_taps() * TAP_WORDS;
constexpr int STAGE_WORDS = round_up(INPUT_WORDS, 4) + WEIGHT_WORDS;

// ---- which tile a block computes ----------------------------------------------------------------------------

struct Origin {
  int image;     // first image of the tile; with FLAT, first cell of all images' cells
  int row, col;  // first cell
};

/// Counts the tiles of one block of channels of one group, columns fastest.
__device__ __forceinline__ Origin tile_origin(int tile) {
  if constexpr (FLAT) {
    return {tile * TILE_W, 0, 0};
  } else {
    return {tile / (TILES_W * TILES_H) * TILE_N, tile / TILES_W % TILES_H * TILE_H, tile % TILES_W * TILE_W};
  }
}

/// A cell of the tile: where its first output pixel lies, and whether it exists.
struct Cell {
  int image, row, col;
  bool inside;
};

__device__ __forceinline__ Cell cell_at(const Origin& origin, int n, int h, int w, int batch) {
  if constexpr (FLAT) {
    const unsigned cell = origin.image + w;
    const unsigned image = cell / PIXELS, pixel = cell % PIXELS;
    return {static_cast<int>(image), static_cast<int>(pixel / WIDTH), static_cast<int>(pixel % WIDTH),
            static_cast<int>(image) < batch};
  } else {
    const Cell cell{origin.image + n, origin.row + h, origin.col + w, true};
    return {cell.image, cell.row, cell.col, cell.image < batch && cell.row < CELLS_H && cell.col < CELLS_W};
  }
}
