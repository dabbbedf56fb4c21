// Forward of narrow problems on tensor cores (mma.sync): few output channels (RGB heads), narrow groups, strides
// larger than the kernel, cells of many pixels. Phases and channels are stacked into the rows of one product
// (cells.cuh), so that a tile of 16 is filled where no single phase could.
//
// Covers: float16, bfloat16, float32 (IEEE: six products of BFloat16 parts); NCHW and channels_last; any kernel,
// stride, padding, output padding, dilation, groups; sm_80 and up. plan_cells.py says for which it pays.
//
// A tile is TILE_H x TILE_W cells of one image, all groups and channels. A block computes one pass of every
// `walks`-th tile; it brings a tile's input with its halo to shared memory as words (a channel, or two of 16 bits),
// [word][pixel] in NCHW and [pixel][word] in channels_last. A unit of a warp is one tile of M times UNIT_ROWS
// rows of UNIT_COLS x 8 cells; for one pair of halves it loads the input of all its vertical taps once. The sums go
// to shared memory as elements, and leave in whole lines, with the bias in the pixels that no tap reaches (written
// there once). RESIDENT: the pass's weights stay in shared memory, else they are read from the caches.
#include "mma.cuh"
#include "cells.cuh"

using ptx::u32;

__device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
/// Largest power of two up to `most` that divides n.
__device__ constexpr int power_dividing(int n, int most) {
  int v = most;
  while (n % v) v /= 2;
  return v;
}
/// Smallest n >= from with n % modulus == rest.
__device__ constexpr int aligned_to(int from, int modulus, int rest) {
  return from + ((rest - from) % modulus + modulus) % modulus;
}

constexpr int THREADS = 32 * WARPS;
constexpr int ITEM = sizeof(Element);
constexpr int CHANNELS_PER_WORD = 4 / ITEM;
constexpr int HALF_WORDS = HALF_CHANNELS / CHANNELS_PER_WORD;
constexpr int PIXELS = HEIGHT * WIDTH;
constexpr int OUT_PIXELS = OUT_HEIGHT * OUT_WIDTH;
constexpr int TILES_H = ceil_div(CELLS_H, TILE_H), TILES_W = ceil_div(CELLS_W, TILE_W);

// ---- the input tile -------------------------------------------------------------------------------------------

/// Elements of one copy: neighbours in a row, or channels of a pixel.
constexpr int COPY = power_dividing(CHANNELS_LAST ? CI_GROUP : WIDTH, 16 / ITEM);
constexpr int COPY_PIXELS = CHANNELS_LAST ? 1 : COPY;
constexpr int LEAD = (Horizontal::LOWEST % COPY_PIXELS + COPY_PIXELS) % COPY_PIXELS;
constexpr int HALO_H = TILE_H + (V - 1) * V_STEP;
constexpr int HALO_W = round_up(LEAD + TILE_W + Horizontal::SPAN, COPY_PIXELS);
constexpr int GROUP_WORDS = GROUP_HALVES * HALF_WORDS;
constexpr int WORDS = GROUPS * GROUP_WORDS;
// Pitches at which the lanes that read a fragment meet different banks.
constexpr int K_PITCH = aligned_to(HALO_H * HALO_W, 32, IS_16_BIT ? 8 : 4);
constexpr int PIXEL_PITCH = IS_16_BIT ? aligned_to(WORDS, 8, 4) : aligned_to(WORDS, 16, 8);
constexpr int INPUT_WORDS = CHANNELS_LAST ? HALO_H * HALO_W * PIXEL_PITCH : WORDS * K_PITCH;
constexpr int WEIGHT_WORDS = RESIDENT ? GROUPS * M_TILES * TILE_FRAGMENTS * FRAGMENT_WORDS : 0;

// Lines are brought by several threads each: a halo row of all channels (channels_last), or a word of k of the whole
// halo (NCHW). A thread has the same places in all lines.
constexpr int LINE_COPIES = CHANNELS_LAST ? HALO_W * (WORDS * CHANNELS_PER_WORD / COPY) : HALO_H * (HALO_W / COPY);
constexpr int INPUT_LINES = CHANNELS_LAST ? HALO_H : WORDS;
constexpr int SHARERS = LINE_COPIES < THREADS ? THREADS / LINE_COPIES : 1;
constexpr int SLOTS = ceil_div(LINE_COPIES, THREADS);

struct InputFill {
  const Element* input;
  int place[SLOTS];  // (row and) column of the halo
  int to[SLOTS];     // words from the line's first; of 16-bit elements copied one by one, elements
  int channel[SLOTS];

  __device__ __forceinline__ explicit InputFill(const Element* input) : input(input) {
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const int copy = (SHARERS > 1 ? threadIdx.x % LINE_COPIES : threadIdx.x) + s * THREADS;
      if constexpr (CHANNELS_LAST) {
        constexpr int COPIES = WORDS * CHANNELS_PER_WORD / COPY;
        const int element = copy % COPIES * COPY;
        const int in_group = element % (GROUP_WORDS * CHANNELS_PER_WORD);
        place[s] = copy / COPIES;
        to[s] = place[s] * (PIXEL_PITCH * 4) + element * ITEM;
        channel[s] = in_group < CI_GROUP ? element / (GROUP_WORDS * CHANNELS_PER_WORD) * CI_GROUP + in_group : -1;
      } else {
        place[s] = copy;
        to[s] = copy * (COPY * 4);
        channel[s] = 0;
      }
      if (copy >= LINE_COPIES || (SHARERS > 1 && threadIdx.x >= SHARERS * LINE_COPIES)) place[s] = -1;
    }
  }

  /// Bring the halo whose first pixel (after LEAD) is (row0, col0) of an image.
  __device__ __forceinline__ void copy(u32 shared, long long image, int row0, int col0) const {
    const Element* const from = input + image * (static_cast<long long>(IN_CHANNELS) * PIXELS);
    const int first_line = SHARERS > 1 ? threadIdx.x / LINE_COPIES : 0;
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      if (place[s] < 0) continue;
      if constexpr (CHANNELS_LAST) {
        const int col = col0 + place[s];
        const bool inside_row = static_cast<unsigned>(col) < WIDTH && channel[s] >= 0;
#pragma unroll 2
        for (int h = first_line; h < HALO_H; h += SHARERS) {
          const int row = row0 + h;
          const bool inside = inside_row && static_cast<unsigned>(row) < HEIGHT;
          const Element* const source = from + (inside ? (row * WIDTH + col) * IN_CHANNELS + channel[s] : 0);
          const u32 target = shared + h * (HALO_W * PIXEL_PITCH * 4) + to[s];
          if constexpr (COPY * ITEM >= 4) {
            ptx::copy_async_or_zero<COPY * ITEM>(target, source, inside);
          } else {
            ptx::store_shared_half(target, inside ? load_bits(source) : 0);
          }
        }
      } else {
        const int row = row0 + place[s] / (HALO_W / COPY), col = col0 + place[s] % (HALO_W / COPY) * COPY;
        const bool inside_image = static_cast<unsigned>(row) < HEIGHT && static_cast<unsigned>(col) < WIDTH;
        const Element* const pixel = from + (inside_image ? row * WIDTH + col : 0);
#pragma unroll 4
        for (int line = first_line; line < WORDS; line += SHARERS) {
          const int group = GROUPS == 1 ? 0 : line / GROUP_WORDS;
          const int channel = (line - group * GROUP_WORDS) * CHANNELS_PER_WORD;
          const Element* const source = pixel + (group * CI_GROUP + channel) * PIXELS;
          const u32 target = shared + line * (K_PITCH * 4) + to[s];
          const bool inside = inside_image && channel < CI_GROUP;
          if constexpr (IS_16_BIT) {
            constexpr int REGISTERS = COPY > 1 ? COPY / 2 : 1;
            u32 even[REGISTERS] = {}, odd[REGISTERS] = {}, words[COPY];
            if (inside) ptx::load_global<COPY * ITEM>(even, source);
            if (inside && channel + 1 < CI_GROUP) ptx::load_global<COPY * ITEM>(odd, source + PIXELS);
#pragma unroll
            for (int i = 0; i < COPY; ++i)
              words[i] = i % 2 ? ptx::high_halves(even[i / 2], odd[i / 2]) : ptx::low_halves(even[i / 2], odd[i / 2]);
            constexpr int VECTOR = COPY < 4 ? COPY : 4;
#pragma unroll
            for (int i = 0; i < COPY; i += VECTOR) ptx::store_shared<VECTOR>(target + i * 4, words + i);
          } else {
            ptx::copy_async_or_zero<COPY * ITEM>(target, inside ? source : from, inside);
          }
        }
      }
    }
  }

 private:
  __device__ __forceinline__ static u32 load_bits(const Element* from) {
    u32 bits[1];
    ptx::load_global<2>(bits, from);
    return bits[0];
  }
};

// ---- the output tile ------------------------------------------------------------------------------------------

// Lines, which lie in one piece in memory: the tile's pixels of an output row, of one channel (NCHW) or of all.
constexpr int STAGE_ROWS = TILE_H * PASS_ROWS;
constexpr int LINES = CHANNELS_LAST ? STAGE_ROWS : OUT_CHANNELS * STAGE_ROWS;
constexpr int CELL = STRIDE_W * (CHANNELS_LAST ? OUT_CHANNELS : 1);
constexpr int LINE = TILE_W * CELL, OUT_LINE = OUT_WIDTH * (CHANNELS_LAST ? OUT_CHANNELS : 1);
// Four lanes write cells two apart; where those would meet the same banks, 16 bytes separate the cells.
constexpr int CELL_PAD = CHANNELS_LAST && CELL * ITEM % 64 == 0 ? 16 / ITEM : 0;
constexpr int CELL_PITCH = CELL + CELL_PAD;
constexpr int LINE_PITCH = aligned_to(TILE_W * CELL_PITCH * ITEM / 4, CHANNELS_LAST ? 4 : 32, CHANNELS_LAST ? 0 : 4) * 4 / ITEM;
constexpr int STAGE_BYTES = LINES * LINE_PITCH * ITEM;
/// Elements of one store.
constexpr int STORE = power_dividing(OUT_LINE, power_dividing(CELL_PAD ? CELL : LINE, 16 / ITEM));
constexpr int STORES = LINE / STORE;
__device__ constexpr int lanes_of_line() {
  int lanes = 1;
  while (lanes < STORES && lanes < (LINES < WARPS ? THREADS : 32)) lanes *= 2;
  return lanes;
}
constexpr int LANES = lanes_of_line();

/// Whether places m and m + 1 of M, m even, are neighbours in a line, the first at an even place.
constexpr bool NEIGHBOURS = CHANNELS_LAST ? !COLUMNS_FASTEST && (CO_GROUP % 2 == 0 || (GROUPS == 1 && ALL_COLUMNS && CELL % 2 == 0))
                                          : COLUMNS_FASTEST && ALL_COLUMNS && STRIDE_W % 2 == 0;

/// Where an output lies in the staged tile; for the cell (h, w) of the tile, h * ROW_STEP + w * CELL_STEP further.
__device__ __forceinline__ int staged_at(int row, int column, int channel) {
  return CHANNELS_LAST ? row * LINE_PITCH + column * OUT_CHANNELS + channel
                       : (channel * STAGE_ROWS + row) * LINE_PITCH + column;
}
constexpr int ROW_STEP = PASS_ROWS * LINE_PITCH;
constexpr int CELL_STEP = CHANNELS_LAST ? CELL_PITCH : STRIDE_W;

__device__ __forceinline__ Element element_of(float x) {
  if constexpr (IS_16_BIT) {
    return Element{static_cast<unsigned short>(ptx::pack_pair<PRECISION>(x, 0.f))};
  } else {
    return store_as<Element>(x);
  }
}

/// The bias, everywhere: no tap overwrites it in pixels without any.
__device__ __forceinline__ void stage_bias(Element* staged, const Element* bias) {
  for (int i = threadIdx.x; i < LINES * LINE_PITCH; i += THREADS) {
    const int channel = CHANNELS_LAST ? i % LINE_PITCH % CELL_PITCH % OUT_CHANNELS : i / (STAGE_ROWS * LINE_PITCH);
    staged[i] = HAS_BIAS ? bias[channel] : element_of(0.f);
  }
}

template <int COUNT>
__device__ __forceinline__ void store_vector(Element* to, const Element* from) {
  constexpr int BYTES = COUNT * ITEM;
  if constexpr (BYTES == 16) {
    __stcs(reinterpret_cast<uint4*>(to), *reinterpret_cast<const uint4*>(from));
  } else if constexpr (BYTES == 8) {
    __stcs(reinterpret_cast<uint2*>(to), *reinterpret_cast<const uint2*>(from));
  } else if constexpr (BYTES == 4) {
    __stcs(reinterpret_cast<u32*>(to), *reinterpret_cast<const u32*>(from));
  } else {
    *to = *from;
  }
}

/// The staged tile whose first cell is (cell_h, cell_w), by all threads.
__device__ __forceinline__ void store_tile(const Element* staged, Element* output, long long image, int cell_h, int cell_w, int pass) {
  output += image * (static_cast<long long>(OUT_CHANNELS) * OUT_PIXELS) + cell_w * CELL;
  const int left = OUT_LINE - cell_w * CELL, length = left < LINE ? left : LINE;
  for (int line = threadIdx.x / LANES; line < LINES; line += THREADS / LANES) {
    const int row = line % STAGE_ROWS, channel = line / STAGE_ROWS;
    const int oh = (cell_h + row / PASS_ROWS) * STRIDE_H + pass + row % PASS_ROWS;
    if (oh >= OUT_HEIGHT) continue;
    Element* const to = output + (channel * OUT_HEIGHT + oh) * OUT_LINE;
    const Element* const from = staged + line * LINE_PITCH;
#pragma unroll 4
    for (int i = threadIdx.x % LANES * STORE; i < length; i += LANES * STORE)
      store_vector<STORE>(to + i, from + (CELL_PAD ? i + i / CELL * CELL_PAD : i));
  }
}

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

/// sum += a * b, of all parts.
__device__ __forceinline__ void multiply_parts(float (&sum)[4], const uint4 (&a)[PARTS], const u32 (&b)[2][PARTS]) {
  const auto multiply = [&](float(&to)[4], int i, int j) {
    const u32 fragment[2] = {b[0][j], b[1][j]};
    ptx::mma<IS_16_BIT ? PRECISION : ptx::BF16>(to, a[i], fragment);
  };
  if constexpr (PARTS == 1) {
    multiply(sum, 0, 0);
  } else {
    // The smallest products first; those left out are below float32's roundoff. The multiplier truncates its sums;
    // adding them here rounds to nearest, once for the six.
    float part[4] = {0.f, 0.f, 0.f, 0.f};
    multiply(part, 0, 2);
    multiply(part, 2, 0);
    multiply(part, 1, 1);
    multiply(part, 0, 1);
    multiply(part, 1, 0);
    multiply(part, 0, 0);
#pragma unroll
    for (int r = 0; r < 4; ++r) sum[r] += part[r];
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
#pragma unroll(IS_16_BIT ? 2 : 1)
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
__device__ __forceinline__ void stage_sums(const Sums& sums, Element* staged, const Element* bias, int group, int tile, int h, int w) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  int at[2];
  float offset[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int m = m_of_row(tile, g + e * 8);
    const Place place = place_of(m, USED_COLUMNS);
    const int channel = group * CO_GROUP + place.channel;
    at[e] = m < M ? staged_at(place.row, place.column, channel) + h * ROW_STEP + (w + 2 * t) * CELL_STEP : -1;
    offset[e] = HAS_BIAS && m < M ? load_as(bias[channel]) : 0.f;
  }
#pragma unroll
  for (int row = 0; row < UNIT_ROWS; ++row)
#pragma unroll
    for (int col = 0; col < UNIT_COLS; ++col)
#pragma unroll
      for (int cell = 0; cell < 2; ++cell) {
        const float low = sums.of[row][col][cell] + offset[0], high = sums.of[row][col][2 + cell] + offset[1];
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

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_MULTIPROCESSOR)
    forward_cells(const Element* __restrict__ input, const u32* __restrict__ packed, const Element* __restrict__ bias,
                  Element* __restrict__ output, long long batch, long long walks) {
  extern __shared__ __align__(16) u32 shared[];
  const u32 input_tile = ptx::pinned(ptx::shared_address(shared));
  u32* const weight_tile = shared + INPUT_WORDS;
  Element* const staged = reinterpret_cast<Element*>(shared + INPUT_WORDS + WEIGHT_WORDS);

  // Passes of a tile side by side, so that neighbouring output rows are written at about the same time; shifted from
  // walk to walk, so that no multiprocessor gets the quick ones only.
  const unsigned walk = blockIdx.x / PASSES;
  const int pass = (blockIdx.x + walk) % PASSES;
  const bool taps = has_taps(pass);
  const int row_shift = first_row(pass);
  const long long tiles = batch * (TILES_H * TILES_W);
  long long tile = walk;

  const InputFill fill(input);
  const auto bring = [&](long long tile) {
    const int in_image = static_cast<int>(tile % (TILES_H * TILES_W));
    fill.copy(input_tile, tile / (TILES_H * TILES_W), in_image / TILES_W * TILE_H + row_shift,
              in_image % TILES_W * TILE_W + Horizontal::LOWEST - LEAD);
  };
  const long long pass_words = static_cast<long long>(PASS_FRAGMENTS) * FRAGMENT_WORDS;
  const u32* const pass_weights = packed + pass * pass_words;
  if (taps && tile < tiles) bring(tile);
  if (!taps || !ALL_COLUMNS) stage_bias(staged, bias);
  ptx::wait_for_previous_launch();
  if (RESIDENT && taps) {
    for (int i = threadIdx.x; i < WEIGHT_WORDS / 4; i += THREADS)
      ptx::copy_async<16>(ptx::shared_address(weight_tile) + i * 16, pass_weights + i * 4);
  }
  ptx::commit_copies();
  ptx::wait_copies<0>();
  __syncthreads();

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Of a half, a lane reads two channels (t) of pixel g, or names all of a pixel (ldmatrix).
  constexpr bool NAMES = IS_16_BIT && CHANNELS_LAST;
  const int lane_pixel = NAMES ? lane % 8 + (UNIT_COLS > 1 ? lane / 16 * 8 : 0) : lane / 4;
  const int lane_word = NAMES ? 0 : lane % 4 * (HALF_WORDS / 4);
  const u32 lane_at = input_tile + ((LEAD + lane_pixel) * PIXEL_STEP + lane_word * (CHANNELS_LAST ? 1 : K_PITCH)) * 4;
  const uint4* const lane_weights = reinterpret_cast<const uint4*>(RESIDENT ? weight_tile : pass_weights) + lane;

#pragma unroll 1
  for (; tile < tiles; tile += walks) {
    if (taps) {
#pragma unroll 1
      for (int unit = warp; unit < UNITS; unit += WARPS) {
        const int w = unit % UNITS_W * (8 * UNIT_COLS), h = unit / UNITS_W % UNITS_H * UNIT_ROWS;
        const int all_tile = unit / (UNITS_W * UNITS_H), m_tile = all_tile % M_TILES, group = all_tile / M_TILES;
        const u32 at = lane_at + (h * HALO_W + w + SHIFTS.first[m_tile]) * SHIFT_BYTES + group * GROUP_HALVES * HALF_BYTES;
        Sums sums;
        multiply(sums, lane_weights + all_tile * TILE_FRAGMENTS * 32, at, SHIFTS.count[m_tile] * GROUP_HALVES);
        stage_sums(sums, staged, bias, group, m_tile, h, w);
      }
    }
    __syncthreads();
    if (taps && tile + walks < tiles) bring(tile + walks);
    ptx::commit_copies();
    const int in_image = static_cast<int>(tile % (TILES_H * TILES_W));
    store_tile(staged, output, tile / (TILES_H * TILES_W), in_image / TILES_W * TILE_H, in_image % TILES_W * TILE_W, pass);
    ptx::wait_copies<0>();
    __syncthreads();
  }
}
