// A tile of grad_output in shared memory, from which the narrow kernels of both gradients read their im2col operand:
//
//   im2col[pixel (ih, iw), tap (co, kh, kw)] = grad_output[co, ih * STRIDE_H - PADDING_H + kh * DILATION_H, (iw alike)]
//
// A tile serves TILE_H x TILE_W input pixels of an image, and a chunk of CHUNK_CO channels of each of BLOCK_GROUPS groups
// and of CHUNK_KH rows of the kernel (all, or one). In either layout it is float32 [channel][row][column]. Rows that no tap
// reads are left out, and the STRIDE_W columns of an input pixel lie PIXEL_PITCH words apart from the next pixel's
// (PIXEL_PITCH, ROW_PITCH and PLANE are chosen so that the lanes of a warp read different banks). Elements outside of the
// output are zeros. A load has LOAD elements: neighbours in a row, or in channels_last channels of a pixel. Loads go by
// cp.async (ASYNC: float, sm_80) to one of two buffers, or through registers.
//
// float32 is rounded to TF32 (PRECISION TF32) or multiplied in parts, by two or three products (IEEE).
#pragma once
#include "common/images.cuh"
#include "common/mma.cuh"
#include "common/raw.cuh"
#include "common/tile_index.cuh"

using ptx::u32;

constexpr int ROW_STEP = CHUNK_KH > 1 ? gcd(STRIDE_H, DILATION_H) : STRIDE_H;  // output rows between two rows of the tile
constexpr int PIXEL_ROWS = STRIDE_H / ROW_STEP;                                // rows of the tile between two pixels of a column
constexpr int TAP_ROWS = CHUNK_KH > 1 ? DILATION_H / ROW_STEP : 0;
constexpr int ROWS = (TILE_H - 1) * PIXEL_ROWS + (CHUNK_KH - 1) * TAP_ROWS + 1;
constexpr int LOAD_W = CHANNELS_LAST ? 1 : LOAD, LOAD_C = CHANNELS_LAST ? LOAD : 1;
constexpr int SHIFT = (LOAD_W - PADDING_W % LOAD_W) % LOAD_W;  // columns added on the left, for alignment
constexpr int COLUMNS = ceil_div(SHIFT + (TILE_W - 1) * STRIDE_W + (KERNEL_W - 1) * DILATION_W + 1, LOAD_W) * LOAD_W;
constexpr int CHANNELS = BLOCK_GROUPS * CHUNK_CO;
constexpr int GRAD_OUTPUT_TILE_WORDS = CHANNELS * PLANE;
constexpr int BUFFERS = ASYNC ? 2 : 1;

// The taps of a chunk, of one group, are [co][kh][kw]. The chunks are in the same order.
constexpr int CHUNK_TAPS = CHUNK_CO * CHUNK_KH * KERNEL_W;
constexpr int KH_CHUNKS = KERNEL_H / CHUNK_KH;
constexpr int CHUNKS = CO_GROUP / CHUNK_CO * KH_CHUNKS;
static_assert(CO_GROUP % CHUNK_CO == 0 && (CHUNK_KH == 1 || CHUNK_KH == KERNEL_H) && GROUPS % BLOCK_GROUPS == 0);

constexpr int column_offset(int column) { return column / STRIDE_W * PIXEL_PITCH + column % STRIDE_W; }

// Returns the bytes from a pixel's first element to that of one of its taps.
__device__ __forceinline__ int tap_offset(int tap) {
  Digits digits{(unsigned)tap};
  const int kw = digits.next(KERNEL_W), kh = digits.next(CHUNK_KH);
  return 4 * (digits.rest * PLANE + kh * TAP_ROWS * ROW_PITCH + column_offset(SHIFT + kw * DILATION_W));
}

constexpr int VECTORS_W = COLUMNS / LOAD_W, VECTORS_C = CHANNELS / LOAD_C;
constexpr int VECTORS = VECTORS_C * ROWS * VECTORS_W;
constexpr int LOADS = ceil_div(VECTORS, THREADS);
static_assert(CHANNELS % LOAD_C == 0 && ROWS * ROW_STEP < 4096 && GRAD_OUTPUT_TILE_WORDS < 1 << 19);

// Where a tile lies: its image, and its number among the tiles below each other in an image.
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

// The sources of a thread's loads stay in registers for all tiles below each other, if they are few enough.
constexpr bool SOURCES_IN_REGISTERS = LOADS <= 12;
// Loads through registers are issued one tile ahead, if few enough registers hold them; otherwise they go to shared memory at
// once.
constexpr bool PREFETCHES = !ASYNC && LOADS * LOAD * sizeof(Element) <= 64;
struct GradOutputLoader {
  static constexpr Index NONE = -1;
  struct Source {
    Index from;  // in memory, from the tile's first element; NONE left and right of the output
    int to;      // word of the tile; the low 12 bits hold the output row
  };
  const SegmentSizes& sizes;
  const int first_column;
  Source sources[SOURCES_IN_REGISTERS ? LOADS : 1];
  Raw<LOAD> prefetched[PREFETCHES ? LOADS : 1];
  const Element* corner;
  int first_row;

  __device__ __forceinline__ GradOutputLoader(const SegmentSizes& sizes, int column)
      : sizes(sizes), first_column(column - SHIFT) {
    if constexpr (SOURCES_IN_REGISTERS) {
#pragma unroll
      for (int i = 0; i < LOADS; ++i) sources[i] = computed_source(i);
    }
  }
  __device__ __forceinline__ Source computed_source(int i) const {
    const unsigned v = threadIdx.x + i * THREADS;
    Digits digits{v};
    int channel = CHANNELS_LAST ? digits.next(VECTORS_C) * LOAD : 0;
    const int column = digits.next(VECTORS_W) * LOAD_W, row = digits.next(ROWS);
    if (!CHANNELS_LAST) channel = digits.rest;
    const int ow = first_column + column;
    const bool inside = (unsigned)ow < (unsigned)sizes.out_width && v < VECTORS;
    return {inside ? at_output(sizes, 0, channel, row * ROW_STEP, ow) : NONE,
            (channel * PLANE + row * ROW_PITCH + column_offset(column)) << 12 | row * ROW_STEP};
  }
  __device__ __forceinline__ Source source_at(int i) const {
    if constexpr (SOURCES_IN_REGISTERS) return sources[i];
    return computed_source(i);
  }

  // Starts loading the tile whose first row is output row `row` (which may be negative) of the `image`.
  __device__ __forceinline__ void fetch(const Element* image, int first_channel, int row, float* tile) {
    corner = image + at_output(sizes, 0, first_channel, row, 0);
    first_row = row;
    if constexpr (ASYNC) {
      const auto copy = [&](int i) {
        const Source at = source_at(i);
        const bool inside = is_inside(at);
        if (VECTORS % THREADS == 0 || threadIdx.x + i * THREADS < VECTORS)
          ptx::copy_async_or_zero<4 * LOAD>(ptx::shared_address(tile + (at.to >> 12)), inside ? corner + at.from : image,
                                            inside);
      };
      if constexpr (SOURCES_IN_REGISTERS) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) copy(i);
      } else {
#pragma unroll 2
        for (int i = 0; i < LOADS; ++i) copy(i);
      }
    }
    if constexpr (PREFETCHES) {
#pragma unroll
      for (int i = 0; i < LOADS; ++i) load(prefetched[i], source_at(i));
    }
  }

  // Stores what was loaded through registers to shared memory.
  __device__ __forceinline__ void put(float* tile) const {
    if constexpr (PREFETCHES) {
#pragma unroll
      for (int i = 0; i < LOADS; ++i)
        if (VECTORS % THREADS == 0 || threadIdx.x + i * THREADS < VECTORS) write(tile + (source_at(i).to >> 12), prefetched[i]);
    } else {
      constexpr int BATCH = LOADS < 8 ? LOADS : 8;
#pragma unroll 1
      for (int first = 0; first < LOADS; first += BATCH) {
        Raw<LOAD> batch[BATCH];
        int to[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
          const Source at = computed_source(first + i);
          load(batch[i], at);
          to[i] = at.to >> 12;
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
          if (threadIdx.x + (first + i) * THREADS < VECTORS) write(tile + to[i], batch[i]);
      }
    }
  }

  __device__ __forceinline__ bool is_inside(Source at) const {
    return at.from != NONE && (unsigned)(first_row + (at.to & 4095)) < (unsigned)sizes.out_height;
  }
  __device__ __forceinline__ void load(Raw<LOAD>& to, Source at) const { to.load(corner + at.from, is_inside(at)); }
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

// A number as the tensor cores take it: they truncate the bits that TF32 does not have.
// IEEE: high is rounded to nearest by integer arithmetic, and low is the remainder, which has one bit too many half of the
// time. TF32: a factor a little above one order truncation nearly into rounding, with 1.06 times the error of cvt.rna and a
// quarter of its instructions. 16-bit numbers are exact.
struct Rounded {
  u32 high, low;
};
__device__ __forceinline__ Rounded rounded(float value) {
  if constexpr (sizeof(Element) != 4) return {__float_as_uint(value), 0};
  if constexpr (PRECISION == ptx::TF32) return {__float_as_uint(value * (1.0f + 0.3466f / 1024)), 0};
  const u32 high = (__float_as_uint(value) + 0x1000u) & 0xffffe000u;
  return {high, __float_as_uint(value - __uint_as_float(high))};
}

// The weight or input operand of a multiply: rows g and g + 8 of k = t (x, y) and t + 4 (z, w). With 8 rows or fewer, IEEE's
// low parts are the other 8 rows.
constexpr bool STACKED = PRECISION == ptx::IEEE && CI_GROUP <= 8;
constexpr int HALVES = CI_GROUP <= 8 ? 1 : 2;  // halves of a multiply's 16 rows that hold channels
struct Factor {
  uint4 high, low;
  __device__ __forceinline__ Factor(float x, float y, float z, float w) {
    const Rounded a = rounded(x), b = rounded(y), c = rounded(z), d = rounded(w);
    high = STACKED ? make_uint4(a.high, a.low, c.high, c.low) : make_uint4(a.high, b.high, c.high, d.high);
    low = make_uint4(a.low, b.low, c.low, d.low);
  }
};

// sum += a * b over 8 k. For IEEE: part += a * b or (FIRST) part = a * b, which `add` adds to the sum, because the tensor cores
// would truncate that sum.
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
