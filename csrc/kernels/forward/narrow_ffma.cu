// Forward of narrow problems in float32 arithmetic (FFMA): few output channels (RGB heads), depthwise and narrow groups, phases
// with few or no taps (dilation, stride larger than the kernel). It computes any geometry; the plan uses it for those that
// memory bounds. Elements are float, Half or BFloat16; NCHW and channels_last; weights in either layout, which are not packed.
//
//   output[n, co, oh, ow] = the epilogue of the sum over ci in the group of co, and kh, kw, with
//       oh + PADDING_H - kh * DILATION_H = STRIDE_H * ih, 0 <= ih < HEIGHT (and the same horizontally)
//       of input[n, ci, ih, iw] * weight[ci, co, kh, kw]
//
// A position stands for STRIDE_H x STRIDE_W outputs: output (phase_h, phase_w) of position (i, j) reads the inputs (i + a,
// j + b), where (a, b) depends only on the phase and the tap. A tile is a rectangle of positions of BLOCK_IMAGES images and
// BLOCK_CHANNELS output channels (of one group, or of BLOCK_GROUPS whole groups). A block computes a segment of tiles that lie
// below each other and share their weights. It loads CHUNK input channels at a time, with their halo, to shared memory as
// float32, and the next ones while it computes: by cp.async (ASYNC: float, sm_80), else through registers. A load has LOAD
// elements: neighbours in a row, whose length LOAD divides, or in channels_last channels of a pixel.
// A thread computes THREAD_ROWS x THREAD_COLUMNS positions, THREAD_CHANNELS channels, and of each position
//   PHASES_H = STRIDE_H: all rows; 1: one row, the same in the whole block;
//   PHASES_W = STRIDE_W: all columns; 1: one column, where consecutive threads have consecutive columns.
// Its columns of positions are neighbours with ADJACENT, else at a distance of LANES_W. Threads of a block, fastest first:
//   LANES_C channel slices, STRIDE_W / PHASES_W columns of a position, LANES_W positions, SLICES_C more channel slices,
//   LANES_H rows of threads, BLOCK_IMAGES images.
#include "common/epilogue.cuh"
#include "forward/narrow_ffma_access.cuh"
#include "common/sizes.cuh"

constexpr int THREADS = LANES_C * (STRIDE_W / PHASES_W) * LANES_W * SLICES_C * LANES_H * BLOCK_IMAGES;
constexpr int BLOCK_CHANNELS = LANES_C * SLICES_C * THREAD_CHANNELS;
constexpr int BLOCK_CO = BLOCK_CHANNELS / BLOCK_GROUPS;  // of them, in one group
constexpr int TILES_CO = ceil_div(CO_GROUP, BLOCK_CO);
constexpr int TILES_GROUP = ceil_div(GROUPS, BLOCK_GROUPS);
constexpr int CHUNKS = ceil_div(CI_GROUP, CHUNK);
static_assert(BLOCK_GROUPS == 1 || (CHUNKS == 1 && BLOCK_CO == CO_GROUP), "whole groups only");

// The input tile in shared memory has the layout of the tensor. In channels_last, where neighbouring threads read neighbouring
// pixels, the distance of two pixels is an odd number of READ words, so that they lie in different banks. A thread reads READ
// channels at a time.
constexpr int INPUT_H = LANES_H * THREAD_ROWS + (ALL_H ? Vertical::SPAN : (Vertical::COUNT - 1) * Vertical::REACH);
constexpr int INPUT_C = BLOCK_GROUPS * CHUNK;
constexpr int LOAD_W = CHANNELS_LAST ? 1 : LOAD, LOAD_C = CHANNELS_LAST ? LOAD : 1;
constexpr int SHIFT = (Horizontal::LOWEST % LOAD_W + LOAD_W) % LOAD_W;  // columns added on the left, to align it
constexpr int INPUT_W = ceil_div(SHIFT + LANES_W * THREAD_COLUMNS + Horizontal::SPAN, LOAD_W) * LOAD_W;
constexpr int READ = CHANNELS_LAST && BLOCK_GROUPS == 1 ? (LOAD < 4 ? LOAD : 4) : 1;
constexpr int PIXEL = !CHANNELS_LAST ? 1 : BLOCK_GROUPS > 1 ? INPUT_C : READ * (INPUT_C / READ | 1);
constexpr int ROW = INPUT_W * PIXEL;
constexpr int CHANNEL = CHANNELS_LAST ? 1 : INPUT_H * ROW;
constexpr int IMAGE = CHANNELS_LAST ? INPUT_H * ROW : INPUT_C * CHANNEL;
constexpr int VECTORS_W = INPUT_W / LOAD_W, VECTORS_C = INPUT_C / LOAD_C;
constexpr int VECTORS = BLOCK_IMAGES * VECTORS_C * INPUT_H * VECTORS_W;
constexpr int LOADS = ceil_div(VECTORS, THREADS);
constexpr int INPUT_TILE = ceil_div(BLOCK_IMAGES * IMAGE, 4) * 4;
constexpr int INPUT_BUFFERS = ASYNC ? 2 : 1;
static_assert(INPUT_C % LOAD_C == 0 && CHUNK % READ == 0);
static_assert(LOAD == 1 || (CHANNELS_LAST ? CI_GROUP * BLOCK_GROUPS % LOAD == 0 && IN_CHANNELS % LOAD == 0
                                          : LANES_W * THREAD_COLUMNS % LOAD == 0));

// The weight tile: [ci][vertical tap][horizontal tap][channel slice], where a slice is rounded up to whole vectors. Where
// neighbouring threads read different taps, the distance of two taps is an odd number of vectors, for the banks, too.
constexpr int VECTOR = THREAD_CHANNELS > 2 ? 4 : THREAD_CHANNELS;
constexpr int SLICE = ceil_div(THREAD_CHANNELS, VECTOR) * VECTOR;
constexpr int SLICES = LANES_C * SLICES_C;
constexpr int TAP = SLICES * SLICE + (!ALL_W && SLICES * SLICE / VECTOR % 2 == 0 ? VECTOR : 0);
constexpr int WEIGHT_ROWS = ALL_H ? KERNEL_H : Vertical::COUNT;
constexpr int WEIGHT_CI = WEIGHT_ROWS * KERNEL_W * TAP;  // of one input channel
// With RESIDENT all weights stay in shared memory; else the weights of each chunk are loaded with it.
constexpr int WEIGHT_CHANNELS = RESIDENT ? CHUNKS * CHUNK : CHUNK;
constexpr int WEIGHT_TILE = WEIGHT_CHANNELS * WEIGHT_CI;

constexpr int SUMS = PHASES_H * THREAD_ROWS * THREAD_COLUMNS * PHASES_W * THREAD_CHANNELS;
constexpr int WINDOW = THREAD_ROWS + INPUT_H - LANES_H * THREAD_ROWS;  // input rows of a thread

struct InputVector {
  int image, channel, row, column;
};
__device__ __forceinline__ InputVector input_vector(unsigned v) {
  Digits digits{v};
  if (CHANNELS_LAST) {
    const int channel = digits.next(VECTORS_C) * LOAD, column = digits.next(INPUT_W), row = digits.next(INPUT_H);
    return {(int)digits.rest, channel, row, column};
  }
  const int column = digits.next(VECTORS_W) * LOAD, row = digits.next(INPUT_H), channel = digits.next(INPUT_C);
  return {(int)digits.rest, channel, row, column};
}

// The offset of element [n, c, h, w] of images of C channels and height x width pixels.
template <int C>
__device__ __forceinline__ Index activation(Index n, int c, int h, int w, int height, int width) {
  return CHANNELS_LAST ? ((n * height + h) * width + w) * C + c : ((n * C + c) * height + h) * width + w;
}

// The offset of vector v of the tile in shared memory.
__device__ __forceinline__ int shared_place(unsigned v) {
  return CHANNELS_LAST ? v / VECTORS_C * PIXEL + v % VECTORS_C * LOAD : v * LOAD;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    forward_narrow_ffma(const Element* __restrict__ input, const Element* __restrict__ weight,
                   const __grid_constant__ Epilogue epilogue, Element* __restrict__ output,
                   const __grid_constant__ NarrowFfmaSizes sizes) {
  extern __shared__ float4 shared[];
  float* const tiles_x = reinterpret_cast<float*>(shared);
  float* const tiles_w = tiles_x + INPUT_BUFFERS * INPUT_TILE;

  // The block's tiles. Blocks that read the same input are neighbours. The rows of a position vary slowest: those with few taps
  // or none take little time, and would leave half of the multiprocessors idle if they alternated with the others.
  Digits block{blockIdx.x};
  const int co0 = block.next(TILES_CO) * BLOCK_CO;
  const int group0 = block.next(TILES_GROUP) * BLOCK_GROUPS;
  const int down_rest = sizes.across.quotient(block.rest);
  const int position_w0 = sizes.across.remainder(block.rest, down_rest) * (LANES_W * THREAD_COLUMNS);
  const int block_phase_h = sizes.segments.quotient(down_rest);
  const int tile0 = sizes.segments.remainder(down_rest, block_phase_h) * sizes.segment_tiles;
  const int tiles = sizes.segment_tiles < sizes.all_tiles - tile0 ? sizes.segment_tiles : sizes.all_tiles - tile0;
  const int batch = sizes.batch, height = sizes.height, width = sizes.width;
  const Phase block_taps_h = Vertical::phase(block_phase_h);

  // The thread's outputs.
  Digits thread{threadIdx.x};
  const int lane_c = thread.next(LANES_C);
  const int thread_phase_w = thread.next(STRIDE_W / PHASES_W);
  const int lane_w = thread.next(LANES_W);
  const int slice = thread.next(SLICES_C) * LANES_C + lane_c;
  const int lane_h = thread.next(LANES_H);
  const int image = thread.rest;
  const int group_local = BLOCK_GROUPS == 1 ? 0 : slice * THREAD_CHANNELS / CO_GROUP;
  const Phase thread_taps_w = Horizontal::phase(thread_phase_w);
  constexpr int LANE_STEP = ADJACENT ? THREAD_COLUMNS : 1, COLUMN_STEP = ADJACENT ? 1 : LANES_W;

  const int channel0 = group0 * CI_GROUP;
  const int column0 = position_w0 + Horizontal::LOWEST - SHIFT;
  const int row_shift = ALL_H ? Vertical::LOWEST : block_taps_h.origin - (Vertical::COUNT - 1) * Vertical::REACH;

  // The input vectors that this thread loads: their offsets from the tile's first element; none for vectors to the left or
  // right of the image.
  constexpr Index NONE = -1;
  Index places[LOADS];
  int rows[LOADS];
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const int v = threadIdx.x + i * THREADS;
    const InputVector at = input_vector(v);
    const int iw = column0 + at.column;
    const bool inside = v < VECTORS && (unsigned)iw < (unsigned)width && channel0 + at.channel < IN_CHANNELS;
    places[i] = inside ? activation<IN_CHANNELS>(at.image, at.channel, at.row, at.column, height, width) : NONE;
    rows[i] = at.row;
  }
  Pack<LOAD> prefetched[ASYNC ? 1 : LOADS];

  // Starts to load a chunk of a tile, to `buffer` (ASYNC) or to `prefetched`.
  const auto fetch_input = [&](int tile, int chunk, float* buffer) {
    const int images = sizes.down.quotient(tile), n = images * BLOCK_IMAGES;
    const int row0 = sizes.down.remainder(tile, images) * (LANES_H * THREAD_ROWS) + row_shift;
    const int ci0 = chunk * CHUNK;
    const Element* const corner = input + n * ((long long)IN_CHANNELS * height * width) +
                                  activation<IN_CHANNELS>(0, channel0 + ci0, row0, column0, height, width);
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int v = threadIdx.x + i * THREADS;
      bool inside = places[i] != NONE && (unsigned)(row0 + rows[i]) < (unsigned)height;
      if (BLOCK_IMAGES > 1) inside = inside && n + input_vector(v).image < batch;
      if (CI_GROUP % CHUNK != 0) inside = inside && ci0 + input_vector(v).channel < CI_GROUP;
      if constexpr (ASYNC) {
        if (VECTORS % THREADS == 0 || v < VECTORS)
          copy_async<LOAD>(buffer + shared_place(v), inside ? corner + places[i] : input, inside);
      } else {
        prefetched[i] = inside ? *reinterpret_cast<const Pack<LOAD>*>(corner + places[i]) : Pack<LOAD>{};
      }
    }
  };
  const auto fetch_weight = [&](int ci0, float* buffer) {
#pragma unroll 4
    for (unsigned e = threadIdx.x; e < WEIGHT_CHANNELS * BLOCK_GROUPS * BLOCK_CO * WEIGHT_ROWS * KERNEL_W; e += THREADS) {
      Digits digits{e};
      int co = WEIGHT_CHANNELS_LAST ? digits.next(BLOCK_CO) : 0;
      const int kw = digits.next(KERNEL_W), row = digits.next(WEIGHT_ROWS);
      if (!WEIGHT_CHANNELS_LAST) co = digits.next(BLOCK_CO);
      const int from = channel0 + ci0 + digits.rest, ci = digits.next(WEIGHT_CHANNELS);
      const unsigned in_block = digits.rest * CO_GROUP + co;
      const int kh = ALL_H ? row : block_taps_h.first + row * Vertical::STEP;
      const bool inside = kh < KERNEL_H && co0 + co < CO_GROUP && from < IN_CHANNELS && ci0 + ci < CI_GROUP;
      float* const to = buffer + ci * WEIGHT_CI + (row * KERNEL_W + kw) * TAP +
                        in_block / THREAD_CHANNELS * SLICE + in_block % THREAD_CHANNELS;
      const Element* const place = weight + (inside ? at_weight(from, co0 + co, kh, kw) : 0);
      if constexpr (ASYNC)
        copy_async<1>(to, place, inside);
      else
        *to = inside ? load_as(*place) : 0.0f;
    }
  };

  const int co = co0 + slice * THREAD_CHANNELS - group_local * CO_GROUP;  // within the group
  const int group = group0 + group_local;
  Channel channels[THREAD_CHANNELS];
#pragma unroll
  for (int c = 0; c < THREAD_CHANNELS; ++c)
    channels[c] = load_channel(epilogue, group * CO_GROUP + co + c, group < GROUPS && co + c < CO_GROUP);

  const int origin_w = SHIFT + (ALL_W ? 0 : thread_taps_w.origin - Horizontal::LOWEST);
  const int thread_x = image * IMAGE + group_local * CI_GROUP * CHANNEL + lane_h * THREAD_ROWS * ROW +
                       (lane_w * LANE_STEP + origin_w) * PIXEL;
  const int thread_w = slice * SLICE + (ALL_W ? 0 : thread_taps_w.first * TAP);
  const bool reads = ALL_H || block_taps_h.count > 0;

  if (reads && tiles > 0) {
    if (RESIDENT) fetch_weight(0, tiles_w);
    if (ASYNC && !RESIDENT) fetch_weight(0, tiles_w);
    fetch_input(tile0, 0, tiles_x);
    if (ASYNC) async_commit();
  }
  int buffer = 0;
#pragma unroll 1
  for (int tile = tile0; tile < tile0 + tiles; ++tile) {
    float sum[PHASES_H][THREAD_ROWS][THREAD_COLUMNS][PHASES_W][THREAD_CHANNELS] = {};
#pragma unroll 1
    for (int chunk = 0; reads && chunk < CHUNKS; ++chunk) {
      const bool last_chunk = chunk + 1 == CHUNKS;
      const bool more = !last_chunk || tile + 1 < tile0 + tiles;
      const int next_tile = last_chunk ? tile + 1 : tile;
      const int next_chunk = last_chunk ? 0 : chunk + 1;
      if constexpr (ASYNC) {
        if (more) {
          fetch_input(next_tile, next_chunk, tiles_x + (buffer ^ 1) * INPUT_TILE);
          if (!RESIDENT) fetch_weight(next_chunk * CHUNK, tiles_w + (buffer ^ 1) * WEIGHT_TILE);
        }
        async_commit();
        async_wait_all_but_last();
        __syncthreads();
      } else {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
          const int v = threadIdx.x + i * THREADS;
          if (VECTORS % THREADS == 0 || v < VECTORS) {
            constexpr int N = LOAD < 4 ? LOAD : 4;
#pragma unroll
            for (int j = 0; j < LOAD; j += N) {
              float values[N];
#pragma unroll
              for (int k = 0; k < N; ++k) values[k] = load_as(prefetched[i].elements[j + k]);
              write_vector<N>(tiles_x + shared_place(v) + j, values);
            }
          }
        }
        if (!RESIDENT) fetch_weight(chunk * CHUNK, tiles_w);
        __syncthreads();
        if (more) fetch_input(next_tile, next_chunk, nullptr);
      }
      const float* const chunk_x = tiles_x + (ASYNC ? buffer * INPUT_TILE : 0) + thread_x;
      const float* const chunk_w =
          tiles_w + (RESIDENT ? chunk * CHUNK * WEIGHT_CI : ASYNC ? buffer * WEIGHT_TILE : 0) + thread_w;
      buffer ^= 1;

      // Long sums are added up in two levels, from partial sums of PARTIAL channels: their rounding errors are as small as
      // PyTorch's.
      float part[PHASES_H][THREAD_ROWS][THREAD_COLUMNS][PHASES_W][THREAD_CHANNELS] = {};
      auto& into = PARTIAL ? part : sum;
#pragma unroll 1
      for (int ci = 0; ci < CHUNK; ci += READ) {
        const float* const x = chunk_x + ci * CHANNEL;
        const float* const w = chunk_w + ci * WEIGHT_CI;
#pragma unroll
        for (int phase_w = 0; phase_w < PHASES_W; ++phase_w) {
#pragma unroll
          for (int tap_w = 0; tap_w < Horizontal::COUNT; ++tap_w) {
            const Phase taps_w = ALL_W ? Horizontal::phase(phase_w) : thread_taps_w;
            if (!(Horizontal::FULL && !ALL_W) && tap_w >= taps_w.count) continue;
            // These are relative to thread_x and thread_w, which depend on the thread.
            const int shift = (ALL_W ? taps_w.origin - Horizontal::LOWEST : 0) - tap_w * Horizontal::REACH;
            const int kw = (ALL_W ? taps_w.first : 0) + tap_w * Horizontal::STEP;
#pragma unroll
            for (int column = 0; column < THREAD_COLUMNS; ++column) {
              float window[WINDOW][READ];
#pragma unroll
              for (int row = 0; row < WINDOW; ++row)
                read_vector<READ>(window[row], x + row * ROW + (column * COLUMN_STEP + shift) * PIXEL);
#pragma unroll
              for (int phase_h = 0; phase_h < PHASES_H; ++phase_h) {
#pragma unroll
                for (int tap_h = 0; tap_h < Vertical::COUNT; ++tap_h) {
                  const Phase taps_h = ALL_H ? Vertical::phase(phase_h) : block_taps_h;
                  if (!(Vertical::FULL && !ALL_H) && tap_h >= taps_h.count) continue;
                  const int down = ALL_H ? taps_h.origin - Vertical::LOWEST - tap_h * Vertical::REACH
                                         : (Vertical::COUNT - 1 - tap_h) * Vertical::REACH;
                  const int weight_row = ALL_H ? taps_h.first + tap_h * Vertical::STEP : tap_h;
#pragma unroll
                  for (int i = 0; i < READ; ++i) {
                    float factor[SLICE];
#pragma unroll
                    for (int c = 0; c < SLICE; c += VECTOR)
                      read_vector<VECTOR>(factor + c, w + i * WEIGHT_CI + (weight_row * KERNEL_W + kw) * TAP + c);
#pragma unroll
                    for (int row = 0; row < THREAD_ROWS; ++row) {
#pragma unroll
                      for (int c = 0; c < THREAD_CHANNELS; ++c)
                        into[phase_h][row][column][phase_w][c] += window[row + down][i] * factor[c];
                    }
                  }
                }
              }
            }
          }
        }
        if (PARTIAL && ((ci + READ) % PARTIAL == 0 || ci + READ >= CHUNK)) {
#pragma unroll
          for (int i = 0; i < SUMS; ++i) {
            (&sum[0][0][0][0][0])[i] += (&part[0][0][0][0][0])[i];
            (&part[0][0][0][0][0])[i] = 0;
          }
        }
      }
      __syncthreads();
    }

    // Stores segments of outputs that are neighbours in memory.
    const int out_height = sizes.out_height, out_width = sizes.out_width;
    const int images = sizes.down.quotient(tile), n = images * BLOCK_IMAGES + image;
    const int position_h0 = sizes.down.remainder(tile, images) * (LANES_H * THREAD_ROWS) + lane_h * THREAD_ROWS;
    if (n >= batch || group >= GROUPS || co >= CO_GROUP) continue;
    Element* const image_output = output + n * ((long long)OUT_CHANNELS * out_height * out_width);
#pragma unroll
    for (int row = 0; row < THREAD_ROWS; ++row) {
#pragma unroll
      for (int phase_h = 0; phase_h < PHASES_H; ++phase_h) {
        const int oh = (position_h0 + row) * STRIDE_H + block_phase_h + phase_h;
        if (oh >= out_height) continue;
#pragma unroll
        for (int first = 0; first < THREAD_COLUMNS * PHASES_W; first += SEGMENT_COLUMNS) {
          const int position = position_w0 + lane_w * LANE_STEP + first / PHASES_W * COLUMN_STEP;
          const int ow = position * STRIDE_W + thread_phase_w + first % PHASES_W;
          Element* const to = image_output +
                              activation<OUT_CHANNELS>(0, group * CO_GROUP + co, oh, ow, out_height, out_width);
#pragma unroll
          for (int c0 = 0; c0 < THREAD_CHANNELS; c0 += SEGMENT_CHANNELS) {
            float segment[SEGMENT];
#pragma unroll
            for (int i = 0; i < SEGMENT; ++i) {
              const int column = (first + i / SEGMENT_CHANNELS) / PHASES_W, phase_w = (first + i / SEGMENT_CHANNELS) % PHASES_W;
              const int c = c0 + i % SEGMENT_CHANNELS;
              segment[i] = apply_epilogue(sum[phase_h][row][column][phase_w][c], channels[c], epilogue);
            }
            store_segment(to + c0 * (CHANNELS_LAST ? 1 : (Index)out_height * out_width), segment, out_width - ow,
                      CO_GROUP - co - c0);
          }
        }
      }
    }
  }
}
