// Forward of narrow problems on tensor cores (mma.sync): few output channels (RGB heads), narrow groups, strides
// larger than the kernel, cells of many pixels. Phases and channels are stacked into the rows of one product
// (forward/narrow_mma_layout.cuh), so that a tile of 16 is filled where no single phase could.
//
// Covers: float16, bfloat16, float32 (IEEE: six products of BFloat16 parts); NCHW and channels_last; any kernel,
// stride, padding, output padding, dilation, groups, told at the launch how large the images are; sm_80 and up.
// forward/narrow_mma.py says for which it pays.
//
// A tile is TILE_H x TILE_W cells of one image, all groups and channels. A block computes one pass of every
// `walks`-th tile; it brings a tile's input with its halo to shared memory as words (a channel, or two of 16 bits),
// [word][pixel] in NCHW and [pixel][word] in channels_last. A unit of a warp is one tile of M times UNIT_ROWS
// rows of UNIT_COLS x 8 cells; for one pair of halves it loads the input of all its vertical taps once. The sums go
// to shared memory as elements, and leave in whole lines, with the epilogue of 0 in the pixels that no tap reaches (written
// there once), or with DIRECT from the registers. RESIDENT: the pass's weights stay in shared memory, else they are
// read from the caches.
#include "common/mma.cuh"
#include "forward/narrow_mma_layout.cuh"
#include "common/sizes.cuh"

using ptx::u32;

#include "forward/narrow_mma_producer.cuh"
#include "forward/narrow_mma_store.cuh"

constexpr int WEIGHT_WORDS = RESIDENT ? GROUPS * M_TILES * TILE_FRAGMENTS * FRAGMENT_WORDS : 0;

// ---- the product ----------------------------------------------------------------------------------------------

constexpr int UNITS_H = TILE_H / UNIT_ROWS, UNITS_W = TILE_W / (8 * UNIT_COLS);
constexpr int UNITS = GROUPS * M_TILES * UNITS_H * UNITS_W;
static_assert(TILE_H % UNIT_ROWS == 0 && TILE_W % (8 * UNIT_COLS) == 0 && (UNIT_COLS == 1 || UNIT_COLS % 2 == 0));
constexpr int WINDOW = UNIT_ROWS + (V - 1) * V_STEP;  // input rows of a unit
constexpr int PIXEL_STEP = CHANNELS_LAST ? PIXEL_PITCH : 1;
constexpr int SHIFT_BYTES = PIXEL_STEP * 4;
constexpr int HALF_BYTES = HALF_WORDS * (CHANNELS_LAST ? 1 : K_PITCH) * 4;
static_assert(SHARED_BYTES == (INPUT_WORDS + WEIGHT_WORDS) * 4 + STAGE_BYTES, "the plan and the kernel must agree");

struct Sums {
  float of[UNIT_ROWS][UNIT_COLS][4];
};
using Window = u32[WINDOW][UNIT_COLS][2][PARTS];

/// Whether window row `i` is multiplied by any tap.
__device__ constexpr bool row_used(int i) {
  for (int v = 0; v < V; ++v)
    if (i - v * V_STEP >= 0 && i - v * V_STEP < UNIT_ROWS) return true;
  return false;
}

/// Two channels of a pixel, in float32.
__device__ __forceinline__ void load_parts(u32 (&b)[PARTS], u32 at) {
  if constexpr (CHANNELS_LAST) {
    const float2 pair = ptx::load_shared_pair(at);
    split(b, pair.x, pair.y);
  } else {
    split(b, __uint_as_float(ptx::load_shared(at)), __uint_as_float(ptx::load_shared(at + K_PITCH * 4)));
  }
}

/// One pair of halves of a unit's input. `first`, `second`: this lane's places in the unit's first fragment of each.
/// Without a second half its words are zeros.
__device__ __forceinline__ void load_window(Window& b, u32 first, u32 second, bool has_second) {
  // ldmatrix: lane 8m + r names a pixel of matrix m, half m % 2 of fragment m / 2, a neighbouring column's.
  const u32 named = threadIdx.x / 8 % 2 ? second : first;
#pragma unroll
  for (int i = 0; i < WINDOW; ++i) {
    if (!row_used(i)) continue;
#pragma unroll
    for (int col = 0; col < UNIT_COLS; ++col) {
      const u32 pixel = (i * HALO_W + col * 8) * (PIXEL_STEP * 4);
      if constexpr (!IS_16_BIT) {
        load_parts(b[i][col][0], first + pixel);
        load_parts(b[i][col][1], second + pixel);
      } else if constexpr (!CHANNELS_LAST) {
        b[i][col][0][0] = ptx::load_shared(first + pixel);
        b[i][col][1][0] = ptx::load_shared(second + pixel);
      } else if constexpr (UNIT_COLS == 1) {
        u32 m[2];
        ptx::load_matrices(m, named + pixel);
        b[i][0][0][0] = m[0], b[i][0][1][0] = m[1];
      } else if (col % 2 == 0) {
        u32 m[4];
        ptx::load_matrices(m, named + pixel);
        b[i][col][0][0] = m[0], b[i][col][1][0] = m[1], b[i][col + 1][0][0] = m[2], b[i][col + 1][1][0] = m[3];
      }
    }
#pragma unroll
    for (int col = 0; col < UNIT_COLS; ++col)
#pragma unroll
      for (int part = 0; part < PARTS; ++part)
        if (GROUP_HALVES % 2 == 1 && !has_second) b[i][col][1][part] = 0;
  }
}

/// The sums of one unit. `weights`: this lane's first 16 bytes of the tile of M; `at`: its place in the unit's first
/// fragment of the first half.
__device__ __forceinline__ void multiply(Sums& sums, const uint4* weights, u32 at, int halves) {
#pragma unroll
  for (int row = 0; row < UNIT_ROWS; ++row)
#pragma unroll
    for (int col = 0; col < UNIT_COLS; ++col)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums.of[row][col][i] = 0.f;

  int in_group = 0;
  const auto next_half = [&] {
    const u32 here = at;
    at += HALF_BYTES;
    if (++in_group == GROUP_HALVES) {
      in_group = 0;
      at += SHIFT_BYTES - GROUP_HALVES * HALF_BYTES;
    }
    return here;
  };
  if (EQUAL_SHIFTS) halves = tile_shifts().most * GROUP_HALVES;  // a constant: loads of weights go ahead
#pragma unroll(!IS_16_BIT ? 1 : EQUAL_SHIFTS && PAIRS <= 4 ? PAIRS : 2)
  for (int half = 0; half < halves; half += 2) {
    const bool has_second = half + 1 < halves;
    const u32 first = next_half(), second = has_second ? next_half() : first;
    Window b;
    load_window(b, first, second, has_second);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      uint4 a[PARTS];
#pragma unroll
      for (int part = 0; part < PARTS; ++part) a[part] = weights[(v * PARTS + part) * 32];
#pragma unroll
      for (int row = 0; row < UNIT_ROWS; ++row)
#pragma unroll
        for (int col = 0; col < UNIT_COLS; ++col)
          multiply_parts(sums.of[row][col], a, b[row + (V - 1 - v) * V_STEP][col]);
    }
    weights += V * PARTS * 32;
  }
}

/// A unit's sums to the staged tile. Its first cell is (h, w) of the tile.
__device__ __forceinline__ void stage_sums(const Sums& sums, Element* staged, const Epilogue& epilogue, int group, int m_tile,
                                           int h, int w) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  int at[2];
  Channel channels[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int m = m_of_row(m_tile, g + e * 8);
    const Place place = place_of(m, USED_COLUMNS);
    const int channel = group * CO_GROUP + place.channel;
    at[e] = m < M ? staged_at(place.row, place.column, channel) + h * ROW_STEP + (w + 2 * t) * CELL_STEP : -1;
    channels[e] = load_channel(epilogue, channel, m < M);
  }
#pragma unroll
  for (int row = 0; row < UNIT_ROWS; ++row)
#pragma unroll
    for (int col = 0; col < UNIT_COLS; ++col)
#pragma unroll
      for (int cell = 0; cell < 2; ++cell) {
        const float low = apply_epilogue(sums.of[row][col][cell], channels[0], epilogue);
        const float high = apply_epilogue(sums.of[row][col][2 + cell], channels[1], epilogue);
        const int step = row * ROW_STEP + (col * 8 + cell) * CELL_STEP;
        if constexpr (NEIGHBOURS) {
          if (at[0] < 0) continue;
          if constexpr (IS_16_BIT) {
            *reinterpret_cast<u32*>(staged + at[0] + step) = ptx::pack_pair<PRECISION>(low, high);
          } else {
            *reinterpret_cast<float2*>(staged + at[0] + step) = make_float2(low, high);
          }
        } else {
          if (at[0] >= 0) staged[at[0] + step] = element_of(low);
          if (at[1] >= 0) staged[at[1] + step] = element_of(high);
        }
      }
}

/// The same to where they stay. `tile`: the block's.
__device__ __forceinline__ void store_sums(const Sums& sums, Element* output, const Epilogue& epilogue, const Sizes& sizes,
                                           const OutputTile& tile, int m_tile, int h, int w) {
  const int m = m_of_row(m_tile, threadIdx.x % 32 / 4), first = w + threadIdx.x % 4 * 2;
  const DirectStore store(output, epilogue, sizes, tile, m);
  const int rows = m < M ? sizes.positions_h - tile.cell_h : 0, columns = sizes.positions_w - tile.cell_w;
#pragma unroll
  for (int row = 0; row < UNIT_ROWS; ++row)
#pragma unroll
    for (int col = 0; col < UNIT_COLS; ++col)
#pragma unroll
      for (int cell = 0; cell < 2; ++cell) {
        const int cell_h = h + row, cell_w = first + col * 8 + cell;
        if (cell_h < rows && cell_w < columns && (cell_h + tile.cell_h) * STRIDE_H + tile.pass < sizes.out_height)
          store.put(cell_h, cell_w, sums.of[row][col][cell], sums.of[row][col][2 + cell]);
      }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_MULTIPROCESSOR)
    forward_narrow_mma(const Element* __restrict__ input, const u32* __restrict__ packed, const __grid_constant__ Epilogue epilogue,
                  Element* __restrict__ output, const __grid_constant__ Sizes sizes, long long walks) {
  extern __shared__ __align__(16) u32 shared[];
  const u32 input_tile = ptx::keep_in_register(ptx::shared_address(shared));
  u32* const weight_tile = shared + INPUT_WORDS;
  Element* const staged = reinterpret_cast<Element*>(weight_tile + WEIGHT_WORDS);

  // Passes of a tile side by side, so that neighbouring output rows are written at about the same time; shifted from
  // walk to walk, so that no multiprocessor gets the quick ones only.
  const int walk = blockIdx.x / PASSES;
  const int pass = (blockIdx.x + walk) % PASSES;
  const bool taps = has_taps(pass);
  const int row_shift = first_row(pass);
  const int tiles = sizes.tiles, step = static_cast<int>(walks);
  int tile = walk;

  const auto tile_at = [&](int tile) {
    const int image = sizes.image_tiles.quotient(tile), in_image = sizes.image_tiles.remainder(tile, image);
    const int row = sizes.row_tiles.quotient(in_image);
    return OutputTile{image, row * TILE_H, sizes.row_tiles.remainder(in_image, row) * TILE_W, pass};
  };
  const InputFill fill(input, sizes);
  const auto bring = [&](int tile) {
    const OutputTile at = tile_at(tile);
    fill.copy(input_tile, at.image, at.cell_h + row_shift, at.cell_w + Horizontal::LOWEST - LEAD);
  };
  const long long pass_words = static_cast<long long>(PASS_FRAGMENTS) * FRAGMENT_WORDS;
  const u32* const pass_weights = packed + pass * pass_words;
  if (taps && tile < tiles) bring(tile);
  if (!DIRECT && (!taps || !ALL_COLUMNS)) stage_nothing(staged, epilogue);
  ptx::wait_for_previous_launch();
  if (RESIDENT && taps) {
    for (int i = threadIdx.x; i < WEIGHT_WORDS / 4; i += THREADS)
      ptx::copy_async<16>(ptx::shared_address(weight_tile) + i * 16, pass_weights + i * 4);
  }
  ptx::commit_copies();

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Of a half, a lane reads two channels (t) of pixel g, or names all of a pixel (ldmatrix).
  constexpr bool NAMES = IS_16_BIT && CHANNELS_LAST;
  const int lane_pixel = NAMES ? lane % 8 + (UNIT_COLS > 1 ? lane / 16 * 8 : 0) : lane / 4;
  const int lane_word = NAMES ? 0 : lane % 4 * (HALF_WORDS / 4);
  const u32 lane_at = input_tile + ((LEAD + lane_pixel) * PIXEL_STEP + lane_word * (CHANNELS_LAST ? 1 : K_PITCH)) * 4;
  const uint4* const lane_weights = reinterpret_cast<const uint4*>(RESIDENT ? weight_tile : pass_weights) + lane;

#pragma unroll 1
  for (; tile < tiles; tile += step) {
    const OutputTile at = tile_at(tile);
    // Then the input is there for all threads, and the tile before is stored.
    ptx::wait_copies<0>();
    __syncthreads();
    if (taps) {
#pragma unroll 1
      for (int unit = warp; unit < UNITS; unit += WARPS) {
        const int w = unit % UNITS_W * (8 * UNIT_COLS), h = unit / UNITS_W % UNITS_H * UNIT_ROWS;
        const int all_tile = unit / (UNITS_W * UNITS_H), m_tile = all_tile % M_TILES, group = all_tile / M_TILES;
        const u32 from = lane_at + (h * HALO_W + w + SHIFTS.first[m_tile]) * SHIFT_BYTES + group * GROUP_HALVES * HALF_BYTES;
        Sums sums;
        multiply(sums, lane_weights + all_tile * TILE_FRAGMENTS * 32, from, SHIFTS.count[m_tile] * GROUP_HALVES);
        if constexpr (DIRECT) {
          store_sums(sums, output, epilogue, sizes, at, m_tile, h, w);
        } else {
          stage_sums(sums, staged, epilogue, group, m_tile, h, w);
        }
      }
    }
    __syncthreads();
    if (taps && tile + step < tiles) bring(tile + step);
    ptx::commit_copies();
    if (!DIRECT) store_tile(staged, output, sizes, at);
  }
}
