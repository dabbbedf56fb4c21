// Forward of layers with few output channels (RGB heads) on tensor cores, as a product and a fold. No sum is computed
// twice and no input read twice, where gathering multiplies each pixel once for every output that it reaches.
//
//   product: P[co, kh, kw][pixel] = sum over ci of weight[ci, co, kh, kw] * input[ci][pixel]
//   fold:    output[co][y * STRIDE - PADDING + k * DILATION] += P[co, k][y], for rows and columns alike
//
// Covers: float16, bfloat16, float32 (six products of BFloat16 parts: common/parts.cuh); NCHW with rows, or channels_last with
// channels, of 16-byte multiples; one group; at most 96 products a pixel; any stride, padding, output padding, dilation;
// told at the launch how large the images are; sm_90a (the copy engine, wgmma). forward/col2im.py says for which it pays.
//
// A block walks down strips of an image (`strips` of each), STEP_ROWS rows of COLUMNS pixels at a time. The copy engine
// brings them, STAGES steps ahead (forward/col2im_input.cuh); a warp multiplies 16 pixels by all weights, M = co * taps by ci,
// which stay in shared memory, and puts their products there too (BUFFERS steps of them). A thread owns some outputs of
// a cell for the whole strip: an input row completes a row of cells, and what it brings to the rows below is carried in
// registers. Cell row y has the output rows from y * STRIDE - PADDING on.
#include "common/integers.cuh"
#include "common/mma.cuh"
#include "common/epilogue.cuh"
#include "common/wgmma.cuh"
#include "common/pipeline.cuh"
#include "common/tma.cuh"
#include "common/parts.cuh"
#include "common/layer.cuh"
#include "common/sizes.cuh"
#include "common/tile_index.cuh"
#include "common/static_for.cuh"

using ptx::u32;

constexpr int THREADS = 32 * WARPS;
constexpr int ITEM = sizeof(Element);

// ---- the product: shapes -----------------------------------------------------------------------------------------

constexpr int M = OUT_CHANNELS * TAPS;
/// Columns of the product.
constexpr int N = M <= 16 ? 16 : round_up(M, 8);
constexpr int WARP_PIXELS = 16;
constexpr int COLUMNS = STEP_PANELS * PANEL_PIXELS;
static_assert(WARPS == STEP_ROWS * COLUMNS / WARP_PIXELS && WARPS % 4 == 0 && PANEL_PIXELS % WARP_PIXELS == 0);

#include "forward/col2im_input.cuh"

/// Of the weights: planes of 8 channels, [part][plane][product][channel].
constexpr int PLANE_BYTES = N * 16, PART_BYTES = K / 8 * PLANE_BYTES, WEIGHT_BYTES = PARTS * PART_BYTES;

// ---- the fold: shapes --------------------------------------------------------------------------------------------

/// Input rows (columns) that an output row (column) may need: its cell's, and those before.
constexpr int REACH_H = ceil_div((KERNEL_H - 1) * DILATION_H + 1, STRIDE_H);
constexpr int REACH_W = ceil_div((KERNEL_W - 1) * DILATION_W + 1, STRIDE_W);
constexpr int FIRST_ROW = PADDING_H / STRIDE_H;

/// Neighbouring outputs of a thread, and groups of them in a tile of columns.
constexpr int GROUP_CELLS = ceil_div(4, ITEM * STRIDE_W);
constexpr int GROUP = STRIDE_W * GROUP_CELLS;
constexpr int CELL_SHIFT = PADDING_W / STRIDE_W;
constexpr int LAST_SHIFT = PADDING_W == 0 ? -1 : (PADDING_W - 1) / STRIDE_W;
/// Boxes of NCHW begin at multiples of 16 bytes: so many columns early, the same of each tile of columns, where rows are
/// longer than a buffer.
constexpr int BOX_STEP = CHANNELS_LAST ? GROUP_CELLS : 16 / ITEM;
constexpr int LEAD = ((CELL_SHIFT - (REACH_W - 1)) % BOX_STEP + BOX_STEP) % BOX_STEP;
static_assert(BOX_STEP % GROUP_CELLS == 0);

// Columns of a buffer that no product is written to, and that lie outside rows that are whole in a buffer: zeros.
constexpr int LEFT = REACH_W - 1 > CELL_SHIFT ? round_up(REACH_W - 1 - CELL_SHIFT, 2) : 0;
constexpr int LAST_COLUMN = MOST_GROUPS * GROUP_CELLS + LAST_SHIFT;
constexpr int RIGHT = LAST_COLUMN >= COLUMNS ? LAST_COLUMN - COLUMNS + 1 : 0;
/// Eight pixels of four pairs of products meet different banks.
constexpr int PITCH = round_up(LEFT + COLUMNS + RIGHT - 4, 16) + 4;
constexpr int BUFFER = STEP_ROWS * M * PITCH;

constexpr int WEIGHTS_AT = STAGES * STAGE_BYTES;
constexpr int PRODUCTS_AT = WEIGHTS_AT + WEIGHT_BYTES, PRODUCT_BYTES = BUFFERS * BUFFER * 4;
constexpr int BARRIERS = PRODUCTS_AT + PRODUCT_BYTES;
static_assert(SHARED_BYTES == BARRIERS + STAGES * 8, "the plan and the kernel must agree");

// ---- walking -------------------------------------------------------------------------------------------------------

/// The steps of a block: down a strip of a tile of columns, then the next one.
struct Steps {
  const Col2imSizes& sizes;
  int tile;
  int image, column_tile;
  int begin, end;   // cell rows of the strip
  int first, stop;  // input rows that it needs; all others are zeros
  int row;          // first input row of the step

  __device__ __forceinline__ explicit Steps(const Col2imSizes& sizes) : sizes(sizes), tile(blockIdx.x) { aim(); }
  __device__ __forceinline__ void aim() {
    const int rest = sizes.column_tiles.quotient(tile);
    column_tile = sizes.column_tiles.remainder(tile, rest);
    image = sizes.row_tiles.quotient(rest);
    const int strip = sizes.row_tiles.remainder(rest, image);
    begin = FIRST_ROW + sizes.row_tiles.quotient(strip * sizes.position_rows);
    end = FIRST_ROW + sizes.row_tiles.quotient((strip + 1) * sizes.position_rows);
    row = first = max_of(begin - (REACH_H - 1), 0);
    stop = max_of(min_of(end, sizes.height), first + 1);
  }
  __device__ __forceinline__ bool done() const { return tile >= sizes.tiles; }
  __device__ __forceinline__ void next() {
    row += STEP_ROWS;
    if (row < stop) return;
    tile += gridDim.x;
    aim();
  }
  __device__ __forceinline__ bool begins() const { return row == first; }
  __device__ __forceinline__ bool ends() const { return row + STEP_ROWS >= stop; }
  __device__ __forceinline__ int first_group() const { return column_tile * sizes.tile_groups; }
  /// The input column that is the first of a buffer.
  __device__ __forceinline__ int first_column() const {
    return sizes.whole_rows ? 0 : first_group() * GROUP_CELLS + CELL_SHIFT - (REACH_W - 1) - LEAD;
  }
};

#include "forward/col2im_product.cuh"

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
constexpr int STORE = power_of_two_dividing(RUN, 16 / ITEM);

/// The first `left` outputs of a run.
template <int STORE>
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
        words[k] = IS_16_BIT ? ptx::pack_pair<PRECISION>(sums[i + 2 * k], sums[i + (IS_16_BIT ? 2 * k + 1 : 0)])
                             : __float_as_uint(sums[i + k]);
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

/// Add the products of a row of the input that belong to row PHASE of the cell BACK rows below. `from`: the row's, of
/// the thread's first channel and column.
template <int PHASE, int BACK>
__device__ __forceinline__ void add_products(float (&sums)[RUN], const float* from) {
  constexpr int KH = tap_at<KERNEL_H, DILATION_H>(PHASE + BACK * STRIDE_H);
  if constexpr (KH >= 0) {
    static_for<0, RUN>([&](auto index) {
      constexpr int OF_RUN = decltype(index)::value, I = OF_RUN / THREAD_CHANNELS, CHANNEL = OF_RUN % THREAD_CHANNELS;
      constexpr int CELL = (I + PADDING_W) / STRIDE_W;
      static_for<0, REACH_W>([&](auto back_columns) {
        constexpr int BACK_W = REACH_W - 1 - decltype(back_columns)::value;
        constexpr int KW = tap_at<KERNEL_W, DILATION_W>((I + PADDING_W) % STRIDE_W + BACK_W * STRIDE_W);
        if constexpr (KW >= 0)
          sums[OF_RUN] += from[(CHANNEL * TAPS + KH * KERNEL_W + KW) * PITCH + CELL - BACK_W];
      });
    });
  }
}

constexpr int CHANNEL_RUNS = OUT_CHANNELS / THREAD_CHANNELS;
constexpr int ITEMS = MOST_GROUPS * STRIDE_H * CHANNEL_RUNS, THREAD_ITEMS = ceil_div(ITEMS, THREADS);

/// Some neighbouring outputs of one row of the cell, or of all in channels_last, down a strip.
struct Item {
  int group, channel, phase;    // phase: none where it is no row of the cell
  int from;                     // in a row of a buffer
  float carried[REACH_H][RUN];  // of the rows of cells below, the next one first; the last is nothing

  __device__ __forceinline__ void aim(int item, bool whole_rows) {
    Digits digits{static_cast<unsigned>(item)};
    group = digits.next(MOST_GROUPS), channel = digits.next(CHANNEL_RUNS), phase = digits.rest;
    // A buffer's first column is that of the first group's first cell, less its reach and LEAD; or the image's first.
    const int column = LEFT + group * GROUP_CELLS + (whole_rows ? 0 : REACH_W - 1 - CELL_SHIFT + LEAD);
    from = channel * (TAPS * PITCH) + column;
  }
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int below = 0; below < REACH_H; ++below)
#pragma unroll
      for (int i = 0; i < RUN; ++i) carried[below][i] = 0.f;
  }
  /// A row below the image.
  __device__ __forceinline__ void add_nothing(float (&sums)[RUN]) {
#pragma unroll
    for (int i = 0; i < RUN; ++i) {
      sums[i] = carried[0][i];
#pragma unroll
      for (int below = 1; below < REACH_H; ++below) carried[below - 1][i] = carried[below][i];
    }
  }
  /// One row of the input: `sums` are then whole.
  __device__ __forceinline__ void add_row(float (&sums)[RUN], const float* row) {
#pragma unroll
    for (int i = 0; i < RUN; ++i) sums[i] = carried[0][i];
    static_for<0, STRIDE_H>([&](auto index) {
      constexpr int PHASE = decltype(index)::value;
      if (phase == PHASE) {
        add_products<PHASE, 0>(sums, row + from);
        static_for<1, REACH_H>([&](auto back) {
          constexpr int BACK = decltype(back)::value;
#pragma unroll
          for (int i = 0; i < RUN; ++i) carried[BACK - 1][i] = carried[BACK][i];
          add_products<PHASE, BACK>(carried[BACK - 1], row + from);
        });
      }
    });
  }
};

/// The outputs that this step's rows complete.
__device__ __forceinline__ void fold(Item& item, const float* buffer, const Steps& step, const Epilogue& epilogue,
                                     Element* output) {
  const Col2imSizes& sizes = step.sizes;
  if (item.phase >= STRIDE_H || item.group >= sizes.tile_groups) return;
  if (step.begins()) item.begin();
  const int x = (step.first_group() + item.group) * GROUP;
  const long long channel = static_cast<long long>(step.image) * CHANNEL_RUNS + item.channel;
  Element* const column = output + channel * sizes.out_height * (sizes.out_width * THREAD_CHANNELS) + x * THREAD_CHANNELS;
  const auto store = [&](int cell_row, float(&sums)[RUN]) {
    const int y = cell_row * STRIDE_H - PADDING_H + item.phase;
    if (cell_row < step.begin || cell_row >= step.end || y < 0 || y >= sizes.out_height || x >= sizes.out_width) return;
#pragma unroll
    for (int i = 0; i < RUN; ++i) sums[i] = apply_epilogue(sums[i], load_channel(epilogue, item.channel + i % THREAD_CHANNELS), epilogue);
    Element* const to = column + y * (sizes.out_width * THREAD_CHANNELS);
    const int left = (sizes.out_width - x) * THREAD_CHANNELS;
    if (STORE == 1 || sizes.out_width * THREAD_CHANNELS % STORE == 0) {
      store_run<STORE>(to, sums, left);
    } else {
      store_run<1>(to, sums, left);
    }
  };
  float sums[RUN];
#pragma unroll 1
  for (int row = 0; row < STEP_ROWS; ++row) {
    item.add_row(sums, buffer + row * (M * PITCH));
    store(step.row + row, sums);
  }
  if (!step.ends()) return;
#pragma unroll 1
  for (int cell_row = step.row + STEP_ROWS; cell_row < step.end; ++cell_row) {
    item.add_nothing(sums);
    store(cell_row, sums);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_MULTIPROCESSOR)
    forward_col2im(const __grid_constant__ TensorMap input, const Element* __restrict__ weight,
                 const __grid_constant__ Epilogue epilogue, Element* __restrict__ output, const __grid_constant__ Col2imSizes sizes) {
  extern __shared__ __align__(1024) char memory[];
  const u32 shared = ptx::keep_in_register(ptx::shared_address(memory));
  const int warp = threadIdx.x / 32;
  float* const products = reinterpret_cast<float*>(memory + PRODUCTS_AT);
  const auto full = [&](int stage) { return shared + BARRIERS + stage * 8; };

  Steps asked(sizes), step = asked;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) ptx::init_barrier(full(stage), 1);
    ptx::fence_barrier_init();
    for (int stage = 0; stage < STAGES && !asked.done(); ++stage, asked.next())
      bring(input, asked.image, asked.row, asked.first_column(), shared + stage * STAGE_BYTES, full(stage));
  }
  if (LEFT > 0 || RIGHT > 0) {
    for (int i = threadIdx.x * 16; i < PRODUCT_BYTES; i += THREADS * 16)
      *reinterpret_cast<uint4*>(memory + PRODUCTS_AT + i) = make_uint4(0, 0, 0, 0);
  }
  load_weights(memory + WEIGHTS_AT, weight);
  ptx::fence_proxy_async();
  __syncthreads();

  constexpr int PANEL_UNITS = PANEL_PIXELS / WARP_PIXELS;
  const int panel = warp / PANEL_UNITS, first_pixel = warp % PANEL_UNITS * WARP_PIXELS;
  const int column = panel % STEP_PANELS * PANEL_PIXELS + first_pixel, unit_row = panel / STEP_PANELS;
  const InputPlaces places(first_pixel);
  float* const put_at = products + unit_row * (M * PITCH) + LEFT + column;
  Item items[THREAD_ITEMS];
#pragma unroll
  for (int i = 0; i < THREAD_ITEMS; ++i) items[i].aim(threadIdx.x + i * THREADS, sizes.whole_rows);

  int stage = 0, buffer = 0;
  u32 parity = 0;
#pragma unroll 1
  for (; !step.done(); step.next()) {
    ptx::wait_for_phase(full(stage), parity);
    Sums sums;
    multiply(sums, shared + WEIGHTS_AT, shared + stage * STAGE_BYTES + panel * PANEL_BYTES, places);
    if (BUFFERS == 1) __syncthreads();  // now nobody reads what the step before put
    put_products(sums, put_at + buffer);
    __syncthreads();
    // Now nobody reads this stage, nor what was put before this step.
    if (threadIdx.x == 0 && !asked.done()) {
      bring(input, asked.image, asked.row, asked.first_column(), shared + stage * STAGE_BYTES, full(stage));
      asked.next();
    }
#pragma unroll
    for (int i = 0; i < THREAD_ITEMS; ++i) fold(items[i], products + buffer, step, epilogue, output);
    if (BUFFERS == 2) buffer = BUFFER - buffer;
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
}
