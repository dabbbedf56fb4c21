// Forward of layers with few output channels (RGB heads) on tensor cores, as a product and a col2im. No product is computed
// twice and no input is read twice, while kernels that gather the taps of each output also multiply zeros for the taps that a
// phase does not have.
//
//   product: P[co, kh, kw][pixel] = sum over ci of weight[ci, co, kh, kw] * input[ci][pixel]
//   col2im:  output[co][y * STRIDE - PADDING + k * DILATION] += P[co, k][y], for rows and columns alike
//
// Covers: float16, bfloat16, float32 (six products of BFloat16 parts: common/parts.cuh); NCHW with rows, or channels_last with
// channels, of 16-byte multiples; one group; at most 96 products of a pixel; any stride, padding, output padding, dilation;
// images of any size, which is an argument of the launch; sm_90a (the copy engine, wgmma). forward/col2im.py decides where it
// is used.
//
// A position stands for STRIDE_H x STRIDE_W outputs. A block computes row tiles of an image, STEP_ROWS input rows of COLUMNS
// pixels at a time. The copy engine loads them, STAGES steps ahead (forward/col2im_input.cuh). A warp multiplies 16 pixels by
// all weights, a matrix of (co * taps) x ci that stays in shared memory, and writes their products to shared memory, too
// (BUFFERS steps of them). A thread computes some outputs of a position down the whole row tile: an input row completes a row
// of positions, and the thread keeps what the row contributes to the rows below in registers. Position row y has the output
// rows from y * STRIDE - PADDING on.
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

// ---- col2im: shapes ----------------------------------------------------------------------------------------------

/// Input rows (columns) that contribute to an output row (column): that of its position, and those before.
constexpr int REACH_H = ceil_div((KERNEL_H - 1) * DILATION_H + 1, STRIDE_H);
constexpr int REACH_W = ceil_div((KERNEL_W - 1) * DILATION_W + 1, STRIDE_W);
constexpr int FIRST_ROW = PADDING_H / STRIDE_H;

/// Neighbouring outputs of a thread: those of GROUP_POSITIONS positions.
constexpr int GROUP_POSITIONS = ceil_div(4, ITEM * STRIDE_W);
constexpr int GROUP = STRIDE_W * GROUP_POSITIONS;
constexpr int POSITION_SHIFT = PADDING_W / STRIDE_W;
constexpr int LAST_SHIFT = PADDING_W == 0 ? -1 : (PADDING_W - 1) / STRIDE_W;
/// Boxes of NCHW begin at multiples of 16 bytes. A buffer therefore begins LEFT_PAD columns early, in each column tile of rows
/// that are longer than a buffer.
constexpr int BOX_STEP = CHANNELS_LAST ? GROUP_POSITIONS : 16 / ITEM;
constexpr int LEFT_PAD = ((POSITION_SHIFT - (REACH_W - 1)) % BOX_STEP + BOX_STEP) % BOX_STEP;
static_assert(BOX_STEP % GROUP_POSITIONS == 0);

// Columns of a buffer to which no product is written, outside of rows that are shorter than a buffer. They are zeros.
constexpr int LEFT = REACH_W - 1 > POSITION_SHIFT ? round_up(REACH_W - 1 - POSITION_SHIFT, 2) : 0;
constexpr int LAST_COLUMN = MAX_GROUPS * GROUP_POSITIONS + LAST_SHIFT;
constexpr int RIGHT = LAST_COLUMN >= COLUMNS ? LAST_COLUMN - COLUMNS + 1 : 0;
/// With this pitch, eight pixels of four pairs of products lie in different banks.
constexpr int PITCH = round_up(LEFT + COLUMNS + RIGHT - 4, 16) + 4;
constexpr int BUFFER = STEP_ROWS * M * PITCH;

constexpr int WEIGHTS_AT = STAGES * STAGE_BYTES;
constexpr int PRODUCTS_AT = WEIGHTS_AT + WEIGHT_BYTES, PRODUCT_BYTES = BUFFERS * BUFFER * 4;
constexpr int BARRIERS = PRODUCTS_AT + PRODUCT_BYTES;
static_assert(SHARED_BYTES == BARRIERS + STAGES * 8, "the plan and the kernel must agree");

// ---- the tile scheduler --------------------------------------------------------------------------------------------

/// The steps of a block: those of a work tile, which is a row tile of a column tile, then those of its next work tile.
struct Steps {
  const Col2imSizes& sizes;
  int tile;
  int image, column_tile;
  int begin, end;   // position rows of the row tile
  int first, stop;  // input rows that contribute to it; there are no others in the image
  int row;          // first input row of the step

  __device__ __forceinline__ explicit Steps(const Col2imSizes& sizes) : sizes(sizes), tile(blockIdx.x) { set_tile(); }
  __device__ __forceinline__ void set_tile() {
    const int rest = sizes.column_tiles.quotient(tile);
    column_tile = sizes.column_tiles.remainder(tile, rest);
    image = sizes.row_tiles.quotient(rest);
    const int row_tile = sizes.row_tiles.remainder(rest, image);
    begin = FIRST_ROW + sizes.row_tiles.quotient(row_tile * sizes.position_rows);
    end = FIRST_ROW + sizes.row_tiles.quotient((row_tile + 1) * sizes.position_rows);
    row = first = max_of(begin - (REACH_H - 1), 0);
    stop = max_of(min_of(end, sizes.height), first + 1);
  }
  __device__ __forceinline__ bool done() const { return tile >= sizes.tiles; }
  __device__ __forceinline__ void next() {
    row += STEP_ROWS;
    if (row < stop) return;
    tile += gridDim.x;
    set_tile();
  }
  __device__ __forceinline__ bool begins() const { return row == first; }
  __device__ __forceinline__ bool ends() const { return row + STEP_ROWS >= stop; }
  __device__ __forceinline__ int first_group() const { return column_tile * sizes.tile_groups; }
  /// The input column of the first column of a buffer.
  __device__ __forceinline__ int first_column() const {
    return sizes.whole_rows ? 0 : first_group() * GROUP_POSITIONS + POSITION_SHIFT - (REACH_W - 1) - LEFT_PAD;
  }
};

#include "forward/col2im_product.cuh"

// ---- col2im --------------------------------------------------------------------------------------------------------

/// The tap with which a pixel contributes to the output `distance` after that pixel's first output, or -1.
template <int KERNEL, int DILATION>
__device__ constexpr int tap_at(int distance) {
  return distance % DILATION == 0 && distance / DILATION < KERNEL ? distance / DILATION : -1;
}

/// What a thread computes: GROUP neighbours of one channel, or in channels_last of all channels. They are a contiguous segment.
constexpr int THREAD_CHANNELS = CHANNELS_LAST ? OUT_CHANNELS : 1;
constexpr int SEGMENT = GROUP * THREAD_CHANNELS;
/// Elements of one store.
constexpr int STORE = power_of_two_dividing(SEGMENT, 16 / ITEM);

/// Stores the first `left` outputs of a segment.
template <int STORE>
__device__ __forceinline__ void store_segment(Element* to, const float (&sums)[SEGMENT], int left) {
#pragma unroll
  for (int i = 0; i < SEGMENT; i += STORE) {
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

/// Adds the products of an input row that belong to row PHASE of the position BACK rows below. `from` are the products of the
/// row, from the thread's first channel and column on.
template <int PHASE, int BACK>
__device__ __forceinline__ void add_products(float (&sums)[SEGMENT], const float* from) {
  constexpr int KH = tap_at<KERNEL_H, DILATION_H>(PHASE + BACK * STRIDE_H);
  if constexpr (KH >= 0) {
    static_for<0, SEGMENT>([&](auto index) {
      constexpr int IN_SEGMENT = decltype(index)::value, I = IN_SEGMENT / THREAD_CHANNELS, CHANNEL = IN_SEGMENT % THREAD_CHANNELS;
      constexpr int POSITION = (I + PADDING_W) / STRIDE_W;
      static_for<0, REACH_W>([&](auto back_columns) {
        constexpr int BACK_W = REACH_W - 1 - decltype(back_columns)::value;
        constexpr int KW = tap_at<KERNEL_W, DILATION_W>((I + PADDING_W) % STRIDE_W + BACK_W * STRIDE_W);
        if constexpr (KW >= 0)
          sums[IN_SEGMENT] += from[(CHANNEL * TAPS + KH * KERNEL_W + KW) * PITCH + POSITION - BACK_W];
      });
    });
  }
}

constexpr int CHANNEL_SEGMENTS = OUT_CHANNELS / THREAD_CHANNELS;
constexpr int ITEMS = MAX_GROUPS * STRIDE_H * CHANNEL_SEGMENTS, THREAD_ITEMS = ceil_div(ITEMS, THREADS);

/// A segment of neighbouring outputs of one row of a position, down a row tile.
struct Item {
  int group, channel, phase;        // a phase of STRIDE_H or more is none
  int from;                         // offset in a row of a buffer
  float carried[REACH_H][SEGMENT];  // sums of the rows of positions below, the next one first; the last ones are zeros

  __device__ __forceinline__ void set_up(int item, bool whole_rows) {
    Digits digits{static_cast<unsigned>(item)};
    group = digits.next(MAX_GROUPS), channel = digits.next(CHANNEL_SEGMENTS), phase = digits.rest;
    // A buffer's first column is that of the first group's first position, less its reach and LEFT_PAD; or the image's first.
    const int column = LEFT + group * GROUP_POSITIONS + (whole_rows ? 0 : REACH_W - 1 - POSITION_SHIFT + LEFT_PAD);
    from = channel * (TAPS * PITCH) + column;
  }
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int below = 0; below < REACH_H; ++below)
#pragma unroll
      for (int i = 0; i < SEGMENT; ++i) carried[below][i] = 0.f;
  }
  /// Completes the sums of a row of positions below the image, to which no input row of its own contributes.
  __device__ __forceinline__ void skip_row(float (&sums)[SEGMENT]) {
#pragma unroll
    for (int i = 0; i < SEGMENT; ++i) {
      sums[i] = carried[0][i];
#pragma unroll
      for (int below = 1; below < REACH_H; ++below) carried[below - 1][i] = carried[below][i];
    }
  }
  /// Adds one input row, which completes `sums`.
  __device__ __forceinline__ void add_row(float (&sums)[SEGMENT], const float* row) {
#pragma unroll
    for (int i = 0; i < SEGMENT; ++i) sums[i] = carried[0][i];
    static_for<0, STRIDE_H>([&](auto index) {
      constexpr int PHASE = decltype(index)::value;
      if (phase == PHASE) {
        add_products<PHASE, 0>(sums, row + from);
        static_for<1, REACH_H>([&](auto back) {
          constexpr int BACK = decltype(back)::value;
#pragma unroll
          for (int i = 0; i < SEGMENT; ++i) carried[BACK - 1][i] = carried[BACK][i];
          add_products<PHASE, BACK>(carried[BACK - 1], row + from);
        });
      }
    });
  }
};

/// Adds the products of a step, and stores the outputs that its rows complete.
__device__ __forceinline__ void col2im(Item& item, const float* buffer, const Steps& step, const Epilogue& epilogue,
                                     Element* output) {
  const Col2imSizes& sizes = step.sizes;
  if (item.phase >= STRIDE_H || item.group >= sizes.tile_groups) return;
  if (step.begins()) item.begin();
  const int x = (step.first_group() + item.group) * GROUP;
  const long long channel = static_cast<long long>(step.image) * CHANNEL_SEGMENTS + item.channel;
  Element* const column = output + channel * sizes.out_height * (sizes.out_width * THREAD_CHANNELS) + x * THREAD_CHANNELS;
  const auto store = [&](int position_row, float(&sums)[SEGMENT]) {
    const int y = position_row * STRIDE_H - PADDING_H + item.phase;
    if (position_row < step.begin || position_row >= step.end || y < 0 || y >= sizes.out_height || x >= sizes.out_width) return;
#pragma unroll
    for (int i = 0; i < SEGMENT; ++i) sums[i] = apply_epilogue(sums[i], load_channel(epilogue, item.channel + i % THREAD_CHANNELS), epilogue);
    Element* const to = column + y * (sizes.out_width * THREAD_CHANNELS);
    const int left = (sizes.out_width - x) * THREAD_CHANNELS;
    if (STORE == 1 || sizes.out_width * THREAD_CHANNELS % STORE == 0) {
      store_segment<STORE>(to, sums, left);
    } else {
      store_segment<1>(to, sums, left);
    }
  };
  float sums[SEGMENT];
#pragma unroll 1
  for (int row = 0; row < STEP_ROWS; ++row) {
    item.add_row(sums, buffer + row * (M * PITCH));
    store(step.row + row, sums);
  }
  if (!step.ends()) return;
#pragma unroll 1
  for (int position_row = step.row + STEP_ROWS; position_row < step.end; ++position_row) {
    item.skip_row(sums);
    store(position_row, sums);
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

  Steps prefetch(sizes), step = prefetch;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) ptx::init_barrier(full(stage), 1);
    ptx::fence_barrier_init();
    for (int stage = 0; stage < STAGES && !prefetch.done(); ++stage, prefetch.next())
      issue_loads(input, prefetch.image, prefetch.row, prefetch.first_column(), shared + stage * STAGE_BYTES, full(stage));
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
  float* const products_at = products + unit_row * (M * PITCH) + LEFT + column;
  Item items[THREAD_ITEMS];
#pragma unroll
  for (int i = 0; i < THREAD_ITEMS; ++i) items[i].set_up(threadIdx.x + i * THREADS, sizes.whole_rows);

  int stage = 0, buffer = 0;
  u32 parity = 0;
#pragma unroll 1
  for (; !step.done(); step.next()) {
    ptx::wait_for_phase(full(stage), parity);
    Sums sums;
    multiply(sums, shared + WEIGHTS_AT, shared + stage * STAGE_BYTES + panel * PANEL_BYTES, places);
    if (BUFFERS == 1) __syncthreads();  // no thread reads the products of the step before any more
    store_products(sums, products_at + buffer);
    __syncthreads();
    // No thread reads this stage or the products of the step before any more.
    if (threadIdx.x == 0 && !prefetch.done()) {
      issue_loads(input, prefetch.image, prefetch.row, prefetch.first_column(), shared + stage * STAGE_BYTES, full(stage));
      prefetch.next();
    }
#pragma unroll
    for (int i = 0; i < THREAD_ITEMS; ++i) col2im(items[i], products + buffer, step, epilogue, output);
    if (BUFFERS == 2) buffer = BUFFER - buffer;
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
}
