// Forward of layers with few output channels (RGB heads) on tensor cores, as a product and a fold. No sum is computed
// twice and no input read twice, where gathering multiplies each pixel once for every output that it reaches.
//
//   product: P[co, kh, kw][pixel] = sum over ci of weight[ci, co, kh, kw] * input[ci][pixel]
//   fold:    output[co][y * STRIDE - PADDING + k * DILATION] += P[co, k][y], for rows and columns alike
//
// Covers: float16, bfloat16, float32 (six products of BFloat16 parts: parts.cuh); NCHW with rows,
// or channels_last with channels, of 16-byte multiples; one group; any kernel, stride, padding, output padding, dilation; sm_90 (the copy engine). plan_fold.py says for which
// it pays.
//
// A block walks down strips of an image (`strips` of each), STEP_ROWS rows of COLUMNS pixels at a time. The copy engine brings them, STAGES
// steps ahead (fold_input.cuh); the products of the rows that an output row needs stay in shared memory, in a ring. Row y completes the output rows from y * STRIDE - PADDING on,
// STRIDE_H of them: cell row y. The weights, M = co * taps by ci, stay in shared memory too, as they lie in the tensor.
#include "mma.cuh"
#include "pipeline.cuh"
#include "tma.cuh"
#include "parts.cuh"
#include "geometry.cuh"
#include "tile_index.cuh"
#include "repeat.cuh"

using ptx::u32;

__device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
/// Largest power of two up to `most` that divides n.
__device__ constexpr int power_dividing(int n, int most) {
  int v = most;
  while (n % v) v /= 2;
  return v;
}

constexpr int THREADS = 32 * WARPS;
constexpr int ITEM = sizeof(Element);

// ---- the product: shapes -----------------------------------------------------------------------------------------

constexpr int M = OUT_CHANNELS * TAPS, M_TILES = ceil_div(M, 16);
constexpr int WARPS_M = ceil_div(M_TILES, WARP_M_TILES);
constexpr int WARP_COLS = WARP_PIXELS / 8;
constexpr int COLUMNS = STEP_PANELS * PANEL_PIXELS;
static_assert(WARPS == WARPS_M * STEP_ROWS * COLUMNS / WARP_PIXELS && PANEL_PIXELS % WARP_PIXELS == 0);
static_assert(WARP_COLS == 1 || WARP_COLS % 2 == 0);

#include "fold_input.cuh"

/// Bytes of a row of weights: an odd number of 16, so that ldmatrix meets no bank twice.
constexpr int WEIGHT_PITCH = (round_up(M, 16) / 8 | 1) * 16;
constexpr int WEIGHT_BYTES = PARTS * K * WEIGHT_PITCH;

// ---- the fold: shapes --------------------------------------------------------------------------------------------

/// Input rows (columns) that an output row (column) may need: its cell's, and those before.
constexpr int REACH_H = ceil_div((KERNEL_H - 1) * DILATION_H + 1, STRIDE_H);
constexpr int REACH_W = ceil_div((KERNEL_W - 1) * DILATION_W + 1, STRIDE_W);
constexpr int RING = REACH_H - 1 + STEP_ROWS;
constexpr int FIRST_ROW = PADDING_H / STRIDE_H, CELL_ROWS = (OUT_HEIGHT - 1 + PADDING_H) / STRIDE_H + 1 - FIRST_ROW;

/// Neighbouring outputs of a thread, and groups of them in a tile of columns.
constexpr int GROUP_CELLS = ceil_div(4, ITEM * STRIDE_W);
constexpr int GROUP = STRIDE_W * GROUP_CELLS;
constexpr int OUT_GROUPS = ceil_div(OUT_WIDTH, GROUP);
constexpr bool WHOLE_ROWS = WIDTH <= COLUMNS;
constexpr int CELL_SHIFT = PADDING_W / STRIDE_W;
constexpr int LAST_SHIFT = PADDING_W == 0 ? -1 : (PADDING_W - 1) / STRIDE_W;
/// Boxes of NCHW begin at multiples of 16 bytes: so many columns early, the same of each tile of columns.
constexpr int BOX_STEP = CHANNELS_LAST ? GROUP_CELLS : 16 / ITEM;
constexpr int LEAD = WHOLE_ROWS ? 0 : ((CELL_SHIFT - (REACH_W - 1)) % BOX_STEP + BOX_STEP) % BOX_STEP;
constexpr int TILE_GROUPS =
    WHOLE_ROWS ? OUT_GROUPS : (COLUMNS - LEAD - REACH_W + CELL_SHIFT - LAST_SHIFT) / BOX_STEP * BOX_STEP / GROUP_CELLS;
static_assert(BOX_STEP % GROUP_CELLS == 0);
constexpr int COLUMN_TILES = ceil_div(OUT_GROUPS, TILE_GROUPS);
static_assert(TILE_GROUPS > 0);

// Columns of the ring that no product is written to, and that lie outside the image: zeros.
constexpr int LEFT = WHOLE_ROWS && REACH_W - 1 > CELL_SHIFT ? round_up(REACH_W - 1 - CELL_SHIFT, 2) : 0;
constexpr int LAST_COLUMN = TILE_GROUPS * GROUP_CELLS + LAST_SHIFT;
constexpr int RIGHT = WHOLE_ROWS && LAST_COLUMN >= COLUMNS ? LAST_COLUMN - COLUMNS + 1 : 0;
/// 8 rows of a fragment meet different banks.
constexpr int PITCH = round_up(LEFT + COLUMNS + RIGHT - 8, 32) + 8;
constexpr int RING_BYTES = RING * M * PITCH * 4;

constexpr int WEIGHTS_AT = STAGES * STAGE_BYTES;
constexpr int RING_AT = WEIGHTS_AT + WEIGHT_BYTES;
constexpr int BARRIERS = RING_AT + RING_BYTES;
static_assert(SHARED_BYTES == BARRIERS + STAGES * 8, "the plan and the kernel must agree");

// ---- walking -------------------------------------------------------------------------------------------------------

/// The steps of a block: down a strip of a tile of columns, then the next one.
struct Steps {
  int tile, tiles, strips;
  int image, column_tile;
  int begin, end;  // cell rows of the strip
  int row;         // first input row of the step

  __device__ __forceinline__ Steps(int tiles, int strips) : tile(blockIdx.x), tiles(tiles), strips(strips) { aim(); }
  __device__ __forceinline__ void aim() {
    column_tile = tile % COLUMN_TILES;
    const int strip = tile / COLUMN_TILES % strips;
    image = tile / COLUMN_TILES / strips;
    begin = FIRST_ROW + strip * CELL_ROWS / strips;
    end = FIRST_ROW + (strip + 1) * CELL_ROWS / strips;
    row = begin - (REACH_H - 1);
  }
  __device__ __forceinline__ bool done() const { return tile >= tiles; }
  __device__ __forceinline__ void next() {
    row += STEP_ROWS;
    if (row < end) return;
    tile += gridDim.x;
    aim();
  }
  __device__ __forceinline__ int first_group() const { return column_tile * TILE_GROUPS; }
  /// The input column that is the first of the ring.
  __device__ __forceinline__ int first_column() const {
    return WHOLE_ROWS ? 0 : first_group() * GROUP_CELLS + CELL_SHIFT - (REACH_W - 1) - LEAD;
  }
};

// ---- weights -------------------------------------------------------------------------------------------------------

/// All weights, [part][ci][co * taps], by all threads; zeros for channels that the input does not have.
__device__ __forceinline__ void load_weights(char* weights, const Element* from) {
  if (IN_CHANNELS % 16 != 0) {
    for (int i = threadIdx.x * 16; i < WEIGHT_BYTES; i += THREADS * 16)
      *reinterpret_cast<uint4*>(weights + i) = make_uint4(0, 0, 0, 0);
    __syncthreads();
  }
  constexpr int COUNT = IN_CHANNELS * M, VECTOR = 16 / ITEM;
  const auto put = [&](int index, u32 bits, u32 (&halves)[PARTS]) {
    if constexpr (IS_16_BIT) {
      halves[0] = bits;
    } else {
      split(halves, __uint_as_float(bits), 0.f);
    }
    const int ci = index / M, rest = index % M;
    const int m = WEIGHT_CHANNELS_LAST ? rest % OUT_CHANNELS * TAPS + rest / OUT_CHANNELS : rest;
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
      *reinterpret_cast<unsigned short*>(weights + (part * K + ci) * WEIGHT_PITCH + m * 2) =
          static_cast<unsigned short>(halves[part]);
  };
  u32 halves[PARTS];
#pragma unroll 4
  for (int i = threadIdx.x; i < COUNT / VECTOR; i += THREADS) {
    u32 words[4];
    ptx::load_global<16>(words, from + i * VECTOR);
#pragma unroll
    for (int k = 0; k < VECTOR; ++k)
      put(i * VECTOR + k, IS_16_BIT ? words[k / 2] >> k % 2 * 16 & 0xffffu : words[k % 4], halves);
  }
  for (int i = COUNT / VECTOR * VECTOR + threadIdx.x; i < COUNT; i += THREADS) {
    u32 word[1];
    ptx::load_global<ITEM>(word, from + i);
    put(i, word[0], halves);
  }
}

// ---- the product ---------------------------------------------------------------------------------------------------

struct Sums {
  float of[WARP_M_TILES][WARP_COLS][4];
};

/// The products of this warp's pixels. `weights`: this lane's place in the fragment of its first tile of M.
__device__ __forceinline__ void multiply(Sums& sums, u32 weights, u32 panel, const InputPlaces& places) {
#pragma unroll
  for (int tile = 0; tile < WARP_M_TILES; ++tile)
#pragma unroll
    for (int column = 0; column < WARP_COLS; ++column)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums.of[tile][column][i] = 0.f;
#pragma unroll(IS_16_BIT ? 4 : 1)
  for (int step = 0; step < K_STEPS; ++step) {
    u32 b[WARP_COLS][2][PARTS];
    load_input(b, panel, places, step);
#pragma unroll
    for (int tile = 0; tile < WARP_M_TILES; ++tile) {
      uint4 a[PARTS];
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        u32 m[4];
        ptx::load_matrices_transposed(m, weights + (part * K + step * 16) * WEIGHT_PITCH + tile * 32);
        a[part] = make_uint4(m[0], m[1], m[2], m[3]);
      }
#pragma unroll
      for (int column = 0; column < WARP_COLS; ++column) multiply_parts(sums.of[tile][column], a, b[column]);
    }
  }
}

/// A warp's products to row `slot` of the ring, from column `column` on.
__device__ __forceinline__ void put_products(const Sums& sums, float* ring, int slot, int first_tile, int column) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int tile = 0; tile < WARP_M_TILES; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int m = (first_tile + tile) * 16 + half * 8 + g;
      float* const to = ring + (slot * M + m) * PITCH + LEFT + column + 2 * t;
      if (m < M) {
#pragma unroll
        for (int i = 0; i < WARP_COLS; ++i)
          *reinterpret_cast<float2*>(to + i * 8) = make_float2(sums.of[tile][i][2 * half], sums.of[tile][i][2 * half + 1]);
      }
    }
}

// ---- the fold ------------------------------------------------------------------------------------------------------

/// The tap that brings a pixel to the output `distance` after that pixel's first, or -1.
template <int KERNEL, int DILATION>
__device__ constexpr int tap_at(int distance) {
  return distance % DILATION == 0 && distance / DILATION < KERNEL ? distance / DILATION : -1;
}

/// What a thread computes: GROUP neighbours of one channel, or in channels_last of all; they lie in one piece.
constexpr int THREAD_CHANNELS = CHANNELS_LAST ? OUT_CHANNELS : 1;
constexpr int RUN = GROUP * THREAD_CHANNELS;
/// Elements of one store.
constexpr int STORE = power_dividing(OUT_WIDTH * THREAD_CHANNELS, power_dividing(RUN, 16 / ITEM));

/// The first `left` outputs of a run.
__device__ __forceinline__ void store_run(Element* to, const float (&sums)[RUN], int left) {
#pragma unroll
  for (int i = 0; i < RUN; i += STORE) {
    if (i >= left) return;
    if constexpr (STORE == 1) {
      to[i] = store_as<Element>(sums[i]);
    } else {
      constexpr int WORDS = ceil_div(STORE * ITEM, 4);
      u32 words[WORDS];
#pragma unroll
      for (int k = 0; k < WORDS; ++k)
        words[k] = IS_16_BIT ? ptx::pack_pair<PRECISION>(sums[i + 2 * k], sums[i + (IS_16_BIT ? 2 * k + 1 : 0)]) : __float_as_uint(sums[i + k]);
      if constexpr (WORDS == 4) {
        __stcs(reinterpret_cast<uint4*>(to + i), make_uint4(words[0], words[1], words[2], words[3]));
      } else if constexpr (WORDS == 2) {
        __stcs(reinterpret_cast<uint2*>(to + i), make_uint2(words[0], words[1]));
      } else {
        __stcs(reinterpret_cast<u32*>(to + i), words[0]);
      }
    }
  }
}

/// Add the products of a row of the cell. `ring`: at the thread's first channel and column; `slot`: of the cell's row.
template <int PHASE>
__device__ __forceinline__ void add_products(float (&sums)[RUN], const float* ring, int slot) {
  repeat<0, REACH_H>([&](auto back_rows) {
    constexpr int BACK_H = REACH_H - 1 - decltype(back_rows)::value;
    constexpr int KH = tap_at<KERNEL_H, DILATION_H>(PHASE + BACK_H * STRIDE_H);
    if constexpr (KH >= 0) {
      int from_slot = slot - BACK_H;
      from_slot += from_slot < 0 ? RING : from_slot >= RING ? -RING : 0;
      const float* const from = ring + from_slot * (M * PITCH);
      repeat<0, RUN>([&](auto index) {
        constexpr int OF_RUN = decltype(index)::value, I = OF_RUN / THREAD_CHANNELS, CHANNEL = OF_RUN % THREAD_CHANNELS;
        constexpr int CELL = (I + PADDING_W) / STRIDE_W;
        repeat<0, REACH_W>([&](auto back_columns) {
          constexpr int BACK_W = REACH_W - 1 - decltype(back_columns)::value;
          constexpr int KW = tap_at<KERNEL_W, DILATION_W>((I + PADDING_W) % STRIDE_W + BACK_W * STRIDE_W);
          if constexpr (KW >= 0)
            sums[OF_RUN] += from[(CHANNEL * TAPS + KH * KERNEL_W + KW) * PITCH + CELL - BACK_W];
        });
      });
    }
  });
}

/// The outputs that this step's rows complete. `head`: the slot of its first row.
__device__ __forceinline__ void fold(const float* ring, const Steps& step, int head, const Element* bias, Element* output) {
  constexpr int CHANNEL_RUNS = OUT_CHANNELS / THREAD_CHANNELS;
#pragma unroll 1
  for (int item = threadIdx.x; item < TILE_GROUPS * STEP_ROWS * STRIDE_H * CHANNEL_RUNS; item += THREADS) {
    Digits digits{static_cast<unsigned>(item)};
    const int group = digits.next(TILE_GROUPS), co = digits.next(CHANNEL_RUNS), phase = digits.next(STRIDE_H);
    const int row = digits.rest, cell_row = step.row + row, y = cell_row * STRIDE_H - PADDING_H + phase;
    const int x = (step.first_group() + group) * GROUP;
    if (cell_row < step.begin || cell_row >= step.end || y < 0 || y >= OUT_HEIGHT || x >= OUT_WIDTH) continue;
    float sums[RUN];
#pragma unroll
    for (int i = 0; i < RUN; ++i) sums[i] = HAS_BIAS ? load_as(bias[co + i % THREAD_CHANNELS]) : 0.f;
    // The ring's first column is that of the first group's first cell, less its reach and LEAD; or the image's first.
    const int column = group * GROUP_CELLS + (WHOLE_ROWS ? LEFT : REACH_W - 1 - CELL_SHIFT + LEAD);
    repeat<0, STRIDE_H>([&](auto index) {
      constexpr int PHASE = decltype(index)::value;
      if (phase == PHASE) add_products<PHASE>(sums, ring + co * (TAPS * PITCH) + column, head + row);
    });
    const long long channel = static_cast<long long>(step.image) * CHANNEL_RUNS + co;
    Element* const line = output + (channel * OUT_HEIGHT + y) * (OUT_WIDTH * THREAD_CHANNELS);
    store_run(line + x * THREAD_CHANNELS, sums, (OUT_WIDTH - x) * THREAD_CHANNELS);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_MULTIPROCESSOR)
    forward_fold(const __grid_constant__ TensorMap input, const Element* __restrict__ weight,
                 const Element* __restrict__ bias, Element* __restrict__ output, long long batch, long long strips) {
  extern __shared__ __align__(1024) char memory[];
  const u32 shared = ptx::pinned(ptx::shared_address(memory));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tiles = static_cast<int>(batch * strips) * COLUMN_TILES;
  float* const ring = reinterpret_cast<float*>(memory + RING_AT);
  const auto full = [&](int stage) { return shared + BARRIERS + stage * 8; };

  Steps asked(tiles, static_cast<int>(strips)), step = asked;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) ptx::set_up_barrier(full(stage), 1);
    ptx::publish_barriers();
    for (int stage = 0; stage < STAGES && !asked.done(); ++stage, asked.next())
      bring(input, asked.image, asked.row, asked.first_column(), shared + stage * STAGE_BYTES, full(stage));
  }
  if (LEFT > 0 || RIGHT > 0) {
    for (int i = threadIdx.x * 16; i < RING_BYTES; i += THREADS * 16)
      *reinterpret_cast<uint4*>(memory + RING_AT + i) = make_uint4(0, 0, 0, 0);
  }
  load_weights(memory + WEIGHTS_AT, weight);
  __syncthreads();

  const int first_tile = warp % WARPS_M * WARP_M_TILES, unit = warp / WARPS_M;
  constexpr int PANEL_UNITS = PANEL_PIXELS / WARP_PIXELS;
  const int panel = unit / PANEL_UNITS, first_pixel = unit % PANEL_UNITS * WARP_PIXELS;
  const int column = panel % STEP_PANELS * PANEL_PIXELS + first_pixel, unit_row = panel / STEP_PANELS;
  const InputPlaces places(first_pixel);
  // ldmatrix: lane 8m + r names row r of matrix m: channels 0 to 7 of 8 and 8 more of M, then channels 8 to 15.
  const u32 lane_weights = shared + WEIGHTS_AT + (lane / 16 * 8 + lane % 8) * WEIGHT_PITCH + lane / 8 % 2 * 16 + first_tile * 32;

  int stage = 0, head = 0;
  u32 parity = 0;
#pragma unroll 1
  for (; !step.done(); step.next()) {
    ptx::wait_for_phase(full(stage), parity);
    Sums sums;
    multiply(sums, lane_weights, shared + stage * STAGE_BYTES + panel * PANEL_BYTES, places);
    // Now nobody reads this stage, nor what the step before folded.
    __syncthreads();
    if (threadIdx.x == 0 && !asked.done()) {
      bring(input, asked.image, asked.row, asked.first_column(), shared + stage * STAGE_BYTES, full(stage));
      asked.next();
    }
    const int slot = head + unit_row;
    put_products(sums, ring, slot >= RING ? slot - RING : slot, first_tile, column);
    __syncthreads();
    fold(ring, step, head, bias, output);
    head += STEP_ROWS;
    if (head >= RING) head -= RING;
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
}
