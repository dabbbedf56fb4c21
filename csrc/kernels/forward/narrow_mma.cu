// Forward of narrow problems on tensor cores (mma.sync): few output channels (RGB heads), narrow groups, strides larger than
// the kernel, large strides. Phases and channels are stacked into the rows of one product (forward/narrow_mma_layout.cuh), so
// that they fill tiles of 16 rows, which the channels of a single phase would not.
//
// Covers: float16, bfloat16, float32 (IEEE: six products of BFloat16 parts); NCHW and channels_last; any kernel, stride,
// padding, output padding, dilation, groups; images of any size, which is an argument of the launch; sm_80 and later.
// forward/narrow_mma.py decides where it is used.
//
// A tile is TILE_H x TILE_W positions of one image, with all groups and channels. A position stands for STRIDE_H x STRIDE_W
// outputs. A block computes one pass of every `tile_stride`-th tile. It loads a tile's input with its halo to shared memory as
// 32-bit words (a channel, or two of 16 bits), [word][pixel] in NCHW and [pixel][word] in channels_last. A unit of a warp is
// one tile of M times UNIT_ROWS rows of UNIT_COLS x 8 positions; for each pair of halves of K a warp loads the input of all
// vertical taps once. The sums go to shared memory as elements and are stored in whole lines, with the epilogue of 0 in the
// pixels that no tap contributes to (written there once); with DIRECT they are stored from registers. RESIDENT: the weights of
// the pass stay in shared memory; elsewhere they are read through the caches.
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

/// Loads two channels of a pixel, in float32, and splits them into parts.
__device__ __forceinline__ void load_parts(u32 (&b)[PARTS], u32 at) {
  if constexpr (CHANNELS_LAST) {
    const float2 pair = ptx::load_shared_pair(at);
    split(b, pair.x, pair.y);
  } else {
    split(b, __uint_as_float(ptx::load_shared(at)), __uint_as_float(ptx::load_shared(at + K_PITCH * 4)));
  }
}

/// Loads one pair of halves of a unit's input. `first` and `second` are this lane's addresses in the unit's first fragment of
/// each half. If there is no second half, its words are zeros.
__device__ __forceinline__ void load_window(Window& b, u32 first, u32 second, bool has_second) {
  // ldmatrix: lane 8m + r gives the address of a pixel of matrix m, which is half m % 2 of fragment m / 2; the fragments are
  // neighbouring columns.
  const u32 matrix_at = threadIdx.x / 8 % 2 ? second : first;
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
        ptx::load_matrices(m, matrix_at + pixel);
        b[i][0][0][0] = m[0], b[i][0][1][0] = m[1];
      } else if (col % 2 == 0) {
        u32 m[4];
        ptx::load_matrices(m, matrix_at + pixel);
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

/// Computes the sums of one unit. `weights` are this lane's first 16 bytes of the tile of M; `at` is its address in the unit's
/// first fragment of the first half.
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
  if (EQUAL_SHIFTS) halves = tile_shifts().max_count * GROUP_HALVES;  // a constant, so that weights are loaded early
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

/// Writes a unit's sums to the staged tile. Its first position is (h, w) of the tile.
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
    at[e] = m < M ? staged_at(place.row, place.column, channel) + h * ROW_STEP + (w + 2 * t) * POSITION_STEP : -1;
    channels[e] = load_channel(epilogue, channel, m < M);
  }
#pragma unroll
  for (int row = 0; row < UNIT_ROWS; ++row)
#pragma unroll
    for (int col = 0; col < UNIT_COLS; ++col)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float low = apply_epilogue(sums.of[row][col][e], channels[0], epilogue);
        const float high = apply_epilogue(sums.of[row][col][2 + e], channels[1], epilogue);
        const int step = row * ROW_STEP + (col * 8 + e) * POSITION_STEP;
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

/// Stores a unit's sums to the output. `tile` is the block's tile.
__device__ __forceinline__ void store_sums(const Sums& sums, Element* output, const Epilogue& epilogue, const Sizes& sizes,
                                           const OutputTile& tile, int m_tile, int h, int w) {
  const int m = m_of_row(m_tile, threadIdx.x % 32 / 4), first = w + threadIdx.x % 4 * 2;
  const DirectStore store(output, epilogue, sizes, tile, m);
  const int rows = m < M ? sizes.positions_h - tile.position_h : 0, columns = sizes.positions_w - tile.position_w;
#pragma unroll
  for (int row = 0; row < UNIT_ROWS; ++row)
#pragma unroll
    for (int col = 0; col < UNIT_COLS; ++col)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int position_h = h + row, position_w = first + col * 8 + e;
        if (position_h < rows && position_w < columns && (position_h + tile.position_h) * STRIDE_H + tile.pass < sizes.out_height)
          store.put(position_h, position_w, sums.of[row][col][e], sums.of[row][col][2 + e]);
      }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_MULTIPROCESSOR)
    forward_narrow_mma(const Element* __restrict__ input, const u32* __restrict__ packed, const __grid_constant__ Epilogue epilogue,
                  Element* __restrict__ output, const __grid_constant__ Sizes sizes, long long tile_stride) {
  extern __shared__ __align__(16) u32 shared[];
  const u32 input_tile = ptx::keep_in_register(ptx::shared_address(shared));
  u32* const weight_tile = shared + INPUT_WORDS;
  Element* const staged = reinterpret_cast<Element*>(weight_tile + WEIGHT_WORDS);

  // Neighbouring blocks compute the passes of a tile, so that neighbouring output rows are written at about the same time. The
  // order of the passes is shifted from tile to tile, so that no multiprocessor gets only passes with few taps.
  const int first_tile = blockIdx.x / PASSES;
  const int pass = (blockIdx.x + first_tile) % PASSES;
  const bool taps = has_taps(pass);
  const int row_shift = first_row(pass);
  const int tiles = sizes.tiles, step = static_cast<int>(tile_stride);
  int tile = first_tile;

  const auto tile_at = [&](int tile) {
    const int image = sizes.image_tiles.quotient(tile), in_image = sizes.image_tiles.remainder(tile, image);
    const int row = sizes.row_tiles.quotient(in_image);
    return OutputTile{image, row * TILE_H, sizes.row_tiles.remainder(in_image, row) * TILE_W, pass};
  };
  const InputLoader loader(input, sizes);
  const auto load_input = [&](int tile) {
    const OutputTile at = tile_at(tile);
    loader.copy(input_tile, at.image, at.position_h + row_shift, at.position_w + Horizontal::LOWEST - LEFT_PAD);
  };
  const long long pass_words = static_cast<long long>(PASS_FRAGMENTS) * FRAGMENT_WORDS;
  const u32* const pass_weights = packed + pass * pass_words;
  if (taps && tile < tiles) load_input(tile);
  if (!DIRECT && (!taps || !ALL_COLUMNS)) stage_zero_sums(staged, epilogue);
  ptx::wait_for_previous_launch();
  if (RESIDENT && taps) {
    for (int i = threadIdx.x; i < WEIGHT_WORDS / 4; i += THREADS)
      ptx::copy_async<16>(ptx::shared_address(weight_tile) + i * 16, pass_weights + i * 4);
  }
  ptx::commit_copies();

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // A lane reads two channels (t) of pixel g of a half, or gives the address of all channels of a pixel for ldmatrix.
  constexpr bool BY_LDMATRIX = IS_16_BIT && CHANNELS_LAST;
  const int lane_pixel = BY_LDMATRIX ? lane % 8 + (UNIT_COLS > 1 ? lane / 16 * 8 : 0) : lane / 4;
  const int lane_word = BY_LDMATRIX ? 0 : lane % 4 * (HALF_WORDS / 4);
  const u32 lane_at = input_tile + ((LEFT_PAD + lane_pixel) * PIXEL_STEP + lane_word * (CHANNELS_LAST ? 1 : K_PITCH)) * 4;
  const uint4* const lane_weights = reinterpret_cast<const uint4*>(RESIDENT ? weight_tile : pass_weights) + lane;

#pragma unroll 1
  for (; tile < tiles; tile += step) {
    const OutputTile at = tile_at(tile);
    // All threads wait until the input is loaded and the tile before is stored.
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
    if (taps && tile + step < tiles) load_input(tile + step);
    ptx::commit_copies();
    if (!DIRECT) store_tile(staged, output, sizes, at);
  }
}
