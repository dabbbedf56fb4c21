// A tile of grad_output in shared memory, and how one multiply of the tensor cores gathers from it. Both narrow
// gradients are products whose one operand is this gather:
//
//   patch[pixel (ih, iw), tap (co, kh, kw)] = grad_output[co, ih * STRIDE_H - PADDING_H + kh * DILATION_H, (iw alike)]
//
// A tile serves TILE_H x TILE_W input pixels of an image, and a chunk of CHUNK_CO channels of each of BLOCK_GROUPS
// groups and CHUNK_KH rows of the kernel (all, or one). It lies as float32 [channel][row][column] in either layout:
// rows that no tap touches are left out, and the STRIDE_W columns of an input pixel lie CELL words apart from the
// next pixel's (CELL, ROW_PITCH and PLANE are chosen so that a warp's gather meets different banks). Outside of the
// output lie zeros. LOAD elements travel together: neighbours in a row, or in channels_last channels of a pixel; by
// cp.async (ASYNC: float, sm_80) into one of two buffers, else through registers.
//
// float32 is rounded to TF32 (PRECISION TF32) or multiplied in parts, out of two or three products (IEEE).
#pragma once
#include "common/images.cuh"
#include "common/mma.cuh"
#include "common/raw.cuh"
#include "common/tile_index.cuh"

using ptx::u32;

constexpr int ROW_STEP = CHUNK_KH > 1 ? gcd(STRIDE_H, DILATION_H) : STRIDE_H;  // output rows from one tile row to the next
constexpr int PIXEL_ROWS = STRIDE_H / ROW_STEP;                                // tile rows from a pixel to the one below
constexpr int TAP_ROWS = CHUNK_KH > 1 ? DILATION_H / ROW_STEP : 0;
constexpr int ROWS = (TILE_H - 1) * PIXEL_ROWS + (CHUNK_KH - 1) * TAP_ROWS + 1;
constexpr int LOAD_W = CHANNELS_LAST ? 1 : LOAD, LOAD_C = CHANNELS_LAST ? LOAD : 1;
constexpr int SHIFT = (LOAD_W - PADDING_W % LOAD_W) % LOAD_W;  // columns added on the left, to align it
constexpr int COLUMNS = ceil_div(SHIFT + (TILE_W - 1) * STRIDE_W + (KERNEL_W - 1) * DILATION_W + 1, LOAD_W) * LOAD_W;
constexpr int CHANNELS = BLOCK_GROUPS * CHUNK_CO;
constexpr int GRAD_OUTPUT_TILE = CHANNELS * PLANE;
constexpr int BUFFERS = ASYNC ? 2 : 1;

// Taps of a chunk, of one group: [co][kh][kw]. Chunks follow each other in the same order.
constexpr int CHUNK_TAPS = CHUNK_CO * CHUNK_KH * KERNEL_W;
constexpr int KH_CHUNKS = KERNEL_H / CHUNK_KH;
constexpr int CHUNKS = CO_GROUP / CHUNK_CO * KH_CHUNKS;
static_assert(CO_GROUP % CHUNK_CO == 0 && (CHUNK_KH == 1 || CHUNK_KH == KERNEL_H) && GROUPS % BLOCK_GROUPS == 0);

constexpr int column_place(int column) { return column / STRIDE_W * CELL + column % STRIDE_W; }

// Bytes from a pixel's first place to that of one of its taps.
__device__ __forceinline__ int tap_place(int tap) {
  Digits digits{(unsigned)tap};
  const int kw = digits.next(KERNEL_W), kh = digits.next(CHUNK_KH);
  return 4 * (digits.rest * PLANE + kh * TAP_ROWS * ROW_PITCH + column_place(SHIFT + kw * DILATION_W));
}

constexpr int VECTORS_W = COLUMNS / LOAD_W, VECTORS_C = CHANNELS / LOAD_C;
constexpr int VECTORS = VECTORS_C * ROWS * VECTORS_W;
constexpr int LOADS = ceil_div(VECTORS, THREADS);
static_assert(CHANNELS % LOAD_C == 0 && ROWS * ROW_STEP < 4096 && GRAD_OUTPUT_TILE < 1 << 19);

// A tile's position: image, and which of the tiles below each other.
struct Position {
  long long image;
  int down;
  __device__ __forceinline__ static Position of(const SegmentSizes& sizes, int tile) {
    const int image = sizes.down.quotient(tile);
    return {image, sizes.down.remainder(tile, image)};
  }
  __device__ __forceinline__ void advance(const SegmentSizes& sizes) {
    if (++down == static_cast<int>(sizes.down.value)) down = 0, ++image;
  }
};

// A thread's part in filling tiles that lie below each other: the places of its vectors stay in registers, but where
// these would be too many.
constexpr bool PLACES_KEPT = LOADS <= 12;
// What comes through registers is asked for ahead, but where it would take too many: it then goes to shared memory at once.
constexpr bool AHEAD = !ASYNC && LOADS * LOAD * sizeof(Element) <= 64;
struct GradOutputLoader {
  static constexpr Index NONE = -1;
  struct Place {
    Index from;  // in memory, from the tile's first element; NONE left and right of the output
    int to;      // word of the tile, and in the low 12 bits the output row
  };
  const SegmentSizes& sizes;
  const int first_column;
  Place places[PLACES_KEPT ? LOADS : 1];
  Raw<LOAD> ahead[AHEAD ? LOADS : 1];
  const Element* corner;
  int first_row;

  __device__ __forceinline__ GradOutputLoader(const SegmentSizes& sizes, int column)
      : sizes(sizes), first_column(column - SHIFT) {
    if constexpr (PLACES_KEPT) {
#pragma unroll
      for (int i = 0; i < LOADS; ++i) places[i] = located(i);
    }
  }
  __device__ __forceinline__ Place located(int i) const {
    const unsigned v = threadIdx.x + i * THREADS;
    Digits digits{v};
    int channel = CHANNELS_LAST ? digits.next(VECTORS_C) * LOAD : 0;
    const int column = digits.next(VECTORS_W) * LOAD_W, row = digits.next(ROWS);
    if (!CHANNELS_LAST) channel = digits.rest;
    const int ow = first_column + column;
    const bool inside = (unsigned)ow < (unsigned)sizes.out_width && v < VECTORS;
    return {inside ? at_output(sizes, 0, channel, row * ROW_STEP, ow) : NONE,
            (channel * PLANE + row * ROW_PITCH + column_place(column)) << 12 | row * ROW_STEP};
  }
  __device__ __forceinline__ Place place(int i) const {
    if constexpr (PLACES_KEPT) return places[i];
    return located(i);
  }

  // Begins to bring the tile whose first row is output row `row` (which may be negative) of the `image`.
  __device__ __forceinline__ void fetch(const Element* image, int first_channel, int row, float* tile) {
    corner = image + at_output(sizes, 0, first_channel, row, 0);
    first_row = row;
    if constexpr (ASYNC) {
      const auto copy = [&](int i) {
        const Place at = place(i);
        const bool inside = is_inside(at);
        if (VECTORS % THREADS == 0 || threadIdx.x + i * THREADS < VECTORS)
          ptx::copy_async_or_zero<4 * LOAD>(ptx::shared_address(tile + (at.to >> 12)), inside ? corner + at.from : image,
                                            inside);
      };
      if constexpr (PLACES_KEPT) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) copy(i);
      } else {
#pragma unroll 2
        for (int i = 0; i < LOADS; ++i) copy(i);
      }
    }
    if constexpr (AHEAD) {
#pragma unroll
      for (int i = 0; i < LOADS; ++i) load(ahead[i], place(i));
    }
  }

  // What comes through registers goes to shared memory.
  __device__ __forceinline__ void put(float* tile) const {
    if constexpr (AHEAD) {
#pragma unroll
      for (int i = 0; i < LOADS; ++i)
        if (VECTORS % THREADS == 0 || threadIdx.x + i * THREADS < VECTORS) write(tile + (place(i).to >> 12), ahead[i]);
    } else {
      constexpr int BATCH = LOADS < 8 ? LOADS : 8;
#pragma unroll 1
      for (int first = 0; first < LOADS; first += BATCH) {
        Raw<LOAD> batch[BATCH];
        int to[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
          const Place at = located(first + i);
          load(batch[i], at);
          to[i] = at.to >> 12;
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
          if (threadIdx.x + (first + i) * THREADS < VECTORS) write(tile + to[i], batch[i]);
      }
    }
  }

  __device__ __forceinline__ bool is_inside(Place at) const {
    return at.from != NONE && (unsigned)(first_row + (at.to & 4095)) < (unsigned)sizes.out_height;
  }
  __device__ __forceinline__ void load(Raw<LOAD>& to, Place at) const { to.load(corner + at.from, is_inside(at)); }
  __device__ __forceinline__ static void write(float* to, const Raw<LOAD>& raw) {
    if constexpr (CHANNELS_LAST || LOAD == 1) {
#pragma unroll
      for (int c = 0; c < LOAD; ++c) to[c * PLANE] = raw[c];
    } else {
      constexpr int N = LOAD < 4 ? LOAD : 4;
#pragma unroll
      for (int j = 0; j < LOAD; j += N) {
        PackOf<float, N> values;
#pragma unroll
        for (int k = 0; k < N; ++k) values.elements[k] = raw[j + k];
        *reinterpret_cast<PackOf<float, N>*>(to + j) = values;
      }
    }
  }
};

// A number as the tensor cores take it, which cut off what TF32 has no bits for.
// IEEE: high is rounded to nearest by integer arithmetic, low what is left over: one bit too much, half of the time.
// TF32: a factor a little above one makes of cutting off nearly rounding, for 1.06 times the error of cvt.rna and a
// quarter of its instructions. 16 bits are exact as they are.
struct Rounded {
  u32 high, low;
};
__device__ __forceinline__ Rounded rounded(float value) {
  if constexpr (sizeof(Element) != 4) return {__float_as_uint(value), 0};
  if constexpr (PRECISION == ptx::TF32) return {__float_as_uint(value * (1.0f + 0.3466f / 1024)), 0};
  const u32 high = (__float_as_uint(value) + 0x1000u) & 0xffffe000u;
  return {high, __float_as_uint(value - __uint_as_float(high))};
}

// The weight or input of a multiply: rows g and g + 8 of k = t (x, y) and t + 4 (z, w). With 8 rows or fewer, IEEE's low
// parts take the place of the other 8 rows.
constexpr bool STACKED = PRECISION == ptx::IEEE && CI_GROUP <= 8;
constexpr int HALVES = CI_GROUP <= 8 ? 1 : 2;  // of a multiply's 16 rows that hold channels
struct Factor {
  uint4 high, low;
  __device__ __forceinline__ Factor(float x, float y, float z, float w) {
    const Rounded a = rounded(x), b = rounded(y), c = rounded(z), d = rounded(w);
    high = STACKED ? make_uint4(a.high, a.low, c.high, c.low) : make_uint4(a.high, b.high, c.high, d.high);
    low = make_uint4(a.low, b.low, c.low, d.low);
  }
};

// sum += a * b over 8 k, or for IEEE, whose products are added up outside of the multiplier (which would cut off here
// too), part += a * b or part = a * b, and `add` brings it to the sum.
template <bool FIRST>
__device__ __forceinline__ void multiply(float (&sum)[4], const Factor& a, Rounded b0, Rounded b1) {
  const u32 high[2] = {b0.high, b1.high}, low[2] = {b0.low, b1.low};
  if constexpr (PRECISION != ptx::IEEE) {
    ptx::mma<ptx::TF32>(sum, a.high, high);
  } else {
    // The small products first.
    const uint4& first = STACKED ? a.high : a.low;
    const u32(&factor)[2] = STACKED ? low : high;
    if constexpr (FIRST)
      ptx::mma_first(sum, first, factor);
    else
      ptx::mma<ptx::TF32>(sum, first, factor);
    if constexpr (!STACKED) ptx::mma<ptx::TF32>(sum, a.high, low);
    ptx::mma<ptx::TF32>(sum, a.high, high);
  }
}
__device__ __forceinline__ void add(float (&sum)[4], const float (&part)[4]) {
#pragma unroll
  for (int i = 0; i < (STACKED ? 2 : 4); ++i) sum[i] += STACKED ? part[i] + part[i + 2] : part[i];
}
