// Forward of narrow problems in float32 arithmetic (FFMA): few output channels (RGB heads), depthwise and narrow
// groups, phases with few or no taps (dilation, stride larger than the kernel). Any geometry is right; the plan
// takes those that memory bounds. Storage float, Half or BFloat16; NCHW and channels_last; weights in either
// layout, as they lie.
//
//   output[n, co, oh, ow] = bias[co] + sum over ci in the group of co, and kh, kw, with
//       oh + PADDING_H - kh * DILATION_H = STRIDE_H * ih, 0 <= ih < HEIGHT (and the same horizontally)
//       of input[n, ci, ih, iw] * weight[ci, co, kh, kw]
//
// The output is cut into cells of STRIDE_H x STRIDE_W pixels: pixel (phase_h, phase_w) of cell (i, j) reads the
// inputs (i + a, j + b), where (a, b) depends on the phase and the tap alone. A block owns a rectangle of cells of
// BLOCK_IMAGES images and BLOCK_CHANNELS output channels (of one group, or of BLOCK_GROUPS whole groups); it brings
// CHUNK input channels at a time, with their halo and their weights, to shared memory as float32.
// A thread owns THREAD_ROWS x THREAD_COLUMNS cells, THREAD_CHANNELS channels, and of each cell
//   PHASES_H = STRIDE_H: all rows; 1: one row, the same in the whole block;
//   PHASES_W = STRIDE_W: all columns; 1: one column, consecutive threads having consecutive columns.
// Its columns of cells lie side by side where ADJACENT, else LANES_W apart. Threads of a block, fastest first:
//   LANES_C channel slices, STRIDE_W / PHASES_W columns of a cell, LANES_W cells, SLICES_C more channel slices,
//   LANES_H rows of threads, BLOCK_IMAGES images.
#include "narrow.cuh"

constexpr int THREADS = LANES_C * (STRIDE_W / PHASES_W) * LANES_W * SLICES_C * LANES_H * BLOCK_IMAGES;
constexpr int BLOCK_CHANNELS = LANES_C * SLICES_C * THREAD_CHANNELS;
constexpr int BLOCK_CO = BLOCK_CHANNELS / BLOCK_GROUPS;  // of them, in one group
constexpr int TILES_CO = ceil_div(CO_GROUP, BLOCK_CO);
constexpr int TILES_GROUP = ceil_div(GROUPS, BLOCK_GROUPS);
constexpr int TILES_H = ceil_div(CELLS_H, LANES_H * THREAD_ROWS);
constexpr int TILES_W = ceil_div(CELLS_W, LANES_W * THREAD_COLUMNS);
constexpr int CHUNKS = ceil_div(CI_GROUP, CHUNK);
static_assert(BLOCK_GROUPS == 1 || (CHUNKS == 1 && BLOCK_CO == CO_GROUP), "whole groups only");

// The input tile in shared memory lies as the tensor does. In channels_last its pixels are an odd number of words
// apart: threads that read the same channel of neighbouring pixels then meet different banks.
constexpr int INPUT_H = LANES_H * THREAD_ROWS + (ALL_H ? Vertical::SPAN : (Vertical::COUNT - 1) * Vertical::REACH);
constexpr int INPUT_W = LANES_W * THREAD_COLUMNS + Horizontal::SPAN;
constexpr int INPUT_C = BLOCK_GROUPS * CHUNK;
constexpr int PIXEL = CHANNELS_LAST ? INPUT_C | 1 : 1;
constexpr int ROW = INPUT_W * PIXEL;
constexpr int CHANNEL = CHANNELS_LAST ? 1 : INPUT_H * ROW;
constexpr int IMAGE = CHANNELS_LAST ? INPUT_H * ROW : INPUT_C * CHANNEL;
constexpr int INPUT_TILE = BLOCK_IMAGES * INPUT_C * INPUT_H * INPUT_W;
constexpr int INPUT_LOADS = ceil_div(INPUT_TILE, THREADS);
constexpr int BATCH = INPUT_LOADS < 8 ? INPUT_LOADS : 8;  // loads in flight at a time

// The weight tile: [ci][vertical tap][horizontal tap][channel slice], a slice rounded up to whole vectors. Where
// threads side by side read different taps, these are an odd number of vectors apart (banks again).
constexpr int VECTOR = THREAD_CHANNELS > 2 ? 4 : THREAD_CHANNELS;
constexpr int SLICE = ceil_div(THREAD_CHANNELS, VECTOR) * VECTOR;
constexpr int SLICES = LANES_C * SLICES_C;
constexpr int TAP = SLICES * SLICE + (!ALL_W && SLICES * SLICE / VECTOR % 2 == 0 ? VECTOR : 0);
constexpr int WEIGHT_ROWS = ALL_H ? KERNEL_H : Vertical::COUNT;
constexpr int WEIGHT_TILE = INPUT_C * BLOCK_CO * WEIGHT_ROWS * KERNEL_W;

struct InputElement {
  int image, channel, row, column;
};
__device__ __forceinline__ InputElement input_element(int e) {
  if (CHANNELS_LAST)
    return {e / (INPUT_C * INPUT_W * INPUT_H), e % INPUT_C, e / (INPUT_C * INPUT_W) % INPUT_H, e / INPUT_C % INPUT_W};
  return {e / (INPUT_W * INPUT_H * INPUT_C), e / (INPUT_W * INPUT_H) % INPUT_C, e / INPUT_W % INPUT_H, e % INPUT_W};
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    forward_narrow(const Element* __restrict__ input, const Element* __restrict__ weight,
                   const Element* __restrict__ bias, Element* __restrict__ output, long long batch) {
  __shared__ alignas(16) float tile_x[BLOCK_IMAGES * IMAGE];
  __shared__ alignas(16) float tile_w[CHUNK * WEIGHT_ROWS * KERNEL_W * TAP];

  // What the block owns. Blocks that read the same input run side by side; in channels_last, so do groups.
  unsigned block = blockIdx.x;
  const auto next = [&block](int count) {
    const int index = (int)(block % (unsigned)count);
    block /= (unsigned)count;
    return index;
  };
  const int block_phase_h = ALL_H ? 0 : next(STRIDE_H);
  const int co0 = next(TILES_CO) * BLOCK_CO;
  int tile_group = CHANNELS_LAST ? next(TILES_GROUP) : 0;
  const int cell_w0 = next(TILES_W) * (LANES_W * THREAD_COLUMNS);
  const int cell_h0 = next(TILES_H) * (LANES_H * THREAD_ROWS);
  if (!CHANNELS_LAST) tile_group = next(TILES_GROUP);
  const int group0 = tile_group * BLOCK_GROUPS;
  const long long n0 = (long long)block * BLOCK_IMAGES;
  const Phase block_taps_h = Vertical::phase(block_phase_h);

  // What the thread owns.
  int thread = threadIdx.x;
  const auto part = [&thread](int count) {
    const int index = thread % count;
    thread /= count;
    return index;
  };
  const int lane_c = part(LANES_C);
  const int thread_phase_w = part(STRIDE_W / PHASES_W);
  const int lane_w = part(LANES_W);
  const int slice = part(SLICES_C) * LANES_C + lane_c;
  const int lane_h = part(LANES_H);
  const int image = thread;
  const int group_local = BLOCK_GROUPS == 1 ? 0 : slice * THREAD_CHANNELS / CO_GROUP;
  const Phase thread_taps_w = Horizontal::phase(thread_phase_w);
  constexpr int LANE_STEP = ADJACENT ? THREAD_COLUMNS : 1, COLUMN_STEP = ADJACENT ? 1 : LANES_W;

  float sum[PHASES_H][THREAD_ROWS][THREAD_COLUMNS][PHASES_W][THREAD_CHANNELS] = {};

  if (ALL_H || block_taps_h.count > 0) {
    const int row0 = cell_h0 + (ALL_H ? Vertical::LOWEST : block_taps_h.origin - (Vertical::COUNT - 1) * Vertical::REACH);
    const int column0 = cell_w0 + Horizontal::LOWEST;
    const int channel0 = group0 * CI_GROUP;
    const Element* const images = input + n0 * ((long long)IN_CHANNELS * HEIGHT * WIDTH);

    // Element e of the input tile, counted as the tensor lies, when its channels start at `chunk`.
    const auto place = [&](int e, int chunk) -> Index {
      const InputElement at = input_element(e);
      const int ih = row0 + at.row, iw = column0 + at.column, ci = chunk * CHUNK + at.channel;
      const bool inside = e < INPUT_TILE && (unsigned)ih < (unsigned)HEIGHT && (unsigned)iw < (unsigned)WIDTH &&
                          n0 + at.image < batch && channel0 + ci < IN_CHANNELS &&
                          (CI_GROUP % CHUNK == 0 || ci < CI_GROUP);
      return inside ? activation<IN_CHANNELS, HEIGHT, WIDTH>(at.image, channel0 + ci, ih, iw) : -1;
    };
    const auto keep = [&](int e, Element value) {
      const int to = CHANNELS_LAST ? e / INPUT_C * PIXEL + e % INPUT_C : e;
      if (e < INPUT_TILE) tile_x[to] = load_as(value);
    };
    const auto bring_input = [&](int chunk) {
#pragma unroll 1
      for (int e0 = threadIdx.x; e0 < INPUT_TILE; e0 += THREADS * BATCH) {
        Element values[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
          const Index from = place(e0 + i * THREADS, chunk);
          values[i] = from >= 0 ? images[from] : Element{};
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) keep(e0 + i * THREADS, values[i]);
      }
    };
    // With PREFETCH, the next chunk's elements wait in registers while this one is computed.
    Element ahead[PREFETCH ? INPUT_LOADS : 1];
    const auto fetch_ahead = [&](int chunk) {
#pragma unroll
      for (int i = 0; i < INPUT_LOADS; ++i) {
        const Index from = place(threadIdx.x + i * THREADS, chunk);
        ahead[i] = from >= 0 ? images[from] : Element{};
      }
    };
    const auto bring_weight = [&](int chunk) {
#pragma unroll 4
      for (int e = threadIdx.x; e < WEIGHT_TILE; e += THREADS) {
        int rest = e;
        const auto digit = [&rest](int count) {
          const int index = rest % count;
          rest /= count;
          return index;
        };
        int co = WEIGHT_CHANNELS_LAST ? digit(BLOCK_CO) : 0;
        const int kw = digit(KERNEL_W), row = digit(WEIGHT_ROWS);
        if (!WEIGHT_CHANNELS_LAST) co = digit(BLOCK_CO);
        const int channel = rest, ci = channel % CHUNK, to_channel = channel / CHUNK * CO_GROUP + co;
        const int kh = ALL_H ? row : block_taps_h.first + row * Vertical::STEP;
        const int from = channel0 + chunk * CHUNK + channel;
        float value = 0;
        if (kh < KERNEL_H && co0 + co < CO_GROUP && from < IN_CHANNELS && chunk * CHUNK + ci < CI_GROUP)
          value = load_as(weight[at_weight(from, co0 + co, kh, kw)]);
        tile_w[((ci * WEIGHT_ROWS + row) * KERNEL_W + kw) * TAP + to_channel / THREAD_CHANNELS * SLICE +
               to_channel % THREAD_CHANNELS] = value;
      }
    };

    const int origin_w = ALL_W ? 0 : thread_taps_w.origin - Horizontal::LOWEST;
    const float* const thread_x = tile_x + image * IMAGE + group_local * CI_GROUP * CHANNEL +
                                  lane_h * THREAD_ROWS * ROW + (lane_w * LANE_STEP + origin_w) * PIXEL;
    const float* const thread_w = tile_w + slice * SLICE + (ALL_W ? 0 : thread_taps_w.first * TAP);

    if constexpr (PREFETCH) fetch_ahead(0);
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      if (chunk > 0) __syncthreads();
      bring_weight(chunk);
      if constexpr (PREFETCH) {
#pragma unroll
        for (int i = 0; i < INPUT_LOADS; ++i) keep(threadIdx.x + i * THREADS, ahead[i]);
      } else {
        bring_input(chunk);
      }
      __syncthreads();
      if constexpr (PREFETCH)
        if (chunk + 1 < CHUNKS) fetch_ahead(chunk + 1);

#pragma unroll UNROLL
      for (int ci = 0; ci < CHUNK; ++ci) {
        const float* const x = thread_x + ci * CHANNEL;
        const float* const w = thread_w + ci * (WEIGHT_ROWS * KERNEL_W * TAP);
#pragma unroll
        for (int phase_w = 0; phase_w < PHASES_W; ++phase_w) {
#pragma unroll
          for (int tap_w = 0; tap_w < Horizontal::COUNT; ++tap_w) {
            const Phase taps_w = ALL_W ? Horizontal::phase(phase_w) : thread_taps_w;
            if (!(Horizontal::FULL && !ALL_W) && tap_w >= taps_w.count) continue;
            // Relative to thread_x and thread_w, which hold what only the thread knows.
            const int shift = (ALL_W ? taps_w.origin - Horizontal::LOWEST : 0) - tap_w * Horizontal::REACH;
            const int kw = (ALL_W ? taps_w.first : 0) + tap_w * Horizontal::STEP;
#pragma unroll
            for (int column = 0; column < THREAD_COLUMNS; ++column) {
              const float* const from = x + (column * COLUMN_STEP + shift) * PIXEL;
#pragma unroll
              for (int phase_h = 0; phase_h < PHASES_H; ++phase_h) {
#pragma unroll
                for (int tap_h = 0; tap_h < Vertical::COUNT; ++tap_h) {
                  const Phase taps_h = ALL_H ? Vertical::phase(phase_h) : block_taps_h;
                  if (!(Vertical::FULL && !ALL_H) && tap_h >= taps_h.count) continue;
                  const int down = ALL_H ? taps_h.origin - Vertical::LOWEST - tap_h * Vertical::REACH
                                         : (Vertical::COUNT - 1 - tap_h) * Vertical::REACH;
                  const int weight_row = ALL_H ? taps_h.first + tap_h * Vertical::STEP : tap_h;
                  float factor[SLICE];
#pragma unroll
                  for (int c = 0; c < SLICE; c += VECTOR)
                    read_vector<VECTOR>(factor + c, w + (weight_row * KERNEL_W + kw) * TAP + c);
#pragma unroll
                  for (int row = 0; row < THREAD_ROWS; ++row) {
                    const float value = from[(row + down) * ROW];
#pragma unroll
                    for (int c = 0; c < THREAD_CHANNELS; ++c)
                      sum[phase_h][row][column][phase_w][c] += value * factor[c];
                  }
                }
              }
            }
          }
        }
      }
    }
  }

  // Out it goes: in runs of elements that lie side by side in memory.
  const int co = co0 + slice * THREAD_CHANNELS - group_local * CO_GROUP;  // within the group
  const int group = group0 + group_local;
  if (n0 + image >= batch || group >= GROUPS || co >= CO_GROUP) return;
  float offset[THREAD_CHANNELS];
#pragma unroll
  for (int c = 0; c < THREAD_CHANNELS; ++c)
    offset[c] = HAS_BIAS && co + c < CO_GROUP ? load_as(bias[group * CO_GROUP + co + c]) : 0.0f;

  Element* const image_output = output + (n0 + image) * ((long long)OUT_CHANNELS * OUT_HEIGHT * OUT_WIDTH);
#pragma unroll
  for (int row = 0; row < THREAD_ROWS; ++row) {
#pragma unroll
    for (int phase_h = 0; phase_h < PHASES_H; ++phase_h) {
      const int oh = (cell_h0 + lane_h * THREAD_ROWS + row) * STRIDE_H + block_phase_h + phase_h;
      if (oh >= OUT_HEIGHT) continue;
#pragma unroll
      for (int first = 0; first < THREAD_COLUMNS * PHASES_W; first += RUN_COLUMNS) {
        const int cell = cell_w0 + lane_w * LANE_STEP + first / PHASES_W * COLUMN_STEP;
        const int ow = cell * STRIDE_W + thread_phase_w + first % PHASES_W;
#pragma unroll
        for (int c0 = 0; c0 < THREAD_CHANNELS; c0 += RUN_CHANNELS) {
          float run[RUN_COLUMNS * RUN_CHANNELS];
#pragma unroll
          for (int i = 0; i < RUN_COLUMNS; ++i) {
            const int column = (first + i) / PHASES_W, phase_w = (first + i) % PHASES_W;
#pragma unroll
            for (int c = 0; c < RUN_CHANNELS; ++c)
              run[i * RUN_CHANNELS + c] = sum[phase_h][row][column][phase_w][c0 + c] + offset[c0 + c];
          }
          Element* const to = image_output + activation<OUT_CHANNELS, OUT_HEIGHT, OUT_WIDTH>(
                                                 0, group * CO_GROUP + co + c0, oh, ow);
          store_run(to, run, OUT_WIDTH - ow, CO_GROUP - co - c0);
        }
      }
    }
  }
}
