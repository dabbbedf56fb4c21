// Gradients of a depthwise layer (one channel in, one out a group), whichever of them are wanted, from one pass over
// grad_output and input. Storage float, Half or BFloat16, products and sums float32; NCHW and channels_last.
//
//   grad_input[n, c, ih, iw]   = sum over kh, kw of weight[c, kh, kw] * grad_output[n, c, oh, ow]
//   grad_weight[c, kh, kw]     = sum over n, ih, iw of input[n, c, ih, iw] * grad_output[n, c, oh, ow]
//   grad_bias[c]               = sum over n, oh, ow of grad_output[n, c, oh, ow]
//   oh = ih * STRIDE_H - PADDING_H + kh * DILATION_H, ow alike
//
// A walk: sizes.tile_rows rows of the input, of one image, OWN_W columns and one channel, top to bottom. A thread
// keeps the weights and their gradient's sums in registers, and the last LAGS rows of the input and of its gradient: the
// rows of grad_output in step q reach the input rows q, q - 1, ... q - LAGS + 1. It has the next step's rows under way.
// PHASES threads share a walk's rows of grad_output where one could not keep all taps: thread `phase` takes PHASE_ROWS of
// the STRIDE_H rows of a step, and what they add to grad_input meets in shared memory after the walk. In NCHW, where all
// lanes read the same, the weights then lie there too: registers are better spent on more warps.
//
// Threads, fastest first: LANES channels (1 in NCHW), WALKERS (walks side by side, then one below the other), PHASES. A
// block takes `repeat` walks a walker, and leaves its sums of grad_weight (and grad_bias): as they are, or where
// sizes.split as float32 to partial[slice]. Every sum has a fixed order.
#include "gradients/depthwise_rows.cuh"
#include "common/mma.cuh"

using ptx::u32;

constexpr int LAGS = (KERNEL_H - 1) * DILATION_H / STRIDE_H + 1;
constexpr int CHANNEL_BLOCKS = ceil_div(IN_CHANNELS, LANES);
static_assert(THREADS == LANES * WALKERS * PHASES && IN_CHANNELS == GROUPS && OUT_CHANNELS == GROUPS);
static_assert(PHASES == 1 || (DILATION_H == 1 && PHASES * PHASE_ROWS == STRIDE_H));
static_assert(CHANNELS_LAST || (WALKERS % 32 == 0 && LANES == 1));

constexpr int TAP_ROWS = PHASE_ROWS * LAGS;
constexpr int WEIGHT_SUMS = WANTS_WEIGHT ? TAP_ROWS * KERNEL_W : 0, BIAS = WEIGHT_SUMS;
constexpr int SUMS = WEIGHT_SUMS + (WITH_BIAS ? 1 : 0);

// Row of the kernel that joins row `r` of a step of thread `phase` with the input `lag` rows up; KERNEL_H where none does.
__device__ __forceinline__ int tap_row(int phase, int r, int lag) {
  const int distance = (PHASES == 1 ? 0 : phase * PHASE_ROWS) + r + STRIDE_H * lag;
  if (PHASES > 1 && KERNEL_H % STRIDE_H == 0) return distance;
  return distance % DILATION_H == 0 && distance / DILATION_H < KERNEL_H ? distance / DILATION_H : KERNEL_H;
}

constexpr bool GATHERS = WANTS_INPUT && PHASES > 1, WEIGHTS_SHARED = GATHERS && !CHANNELS_LAST;
// The weights of a row of taps. In every step anew: volatile, or they would be kept.
__device__ __forceinline__ void read_weights(float (&to)[KERNEL_W], u32 address) {
  constexpr int N = KERNEL_W % 4 == 0 ? 4 : 1;
#pragma unroll
  for (int i = 0; i < KERNEL_W; i += N) {
    if constexpr (N == 4)
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(to[i]), "=f"(to[i + 1]), "=f"(to[i + 2]), "=f"(to[i + 3])
                   : "r"(address + 4 * i));
    else
      asm volatile("ld.shared.f32 %0, [%1];" : "=f"(to[i]) : "r"(address + 4 * i));
  }
}

// What a walk has of one row of grad_input.
__device__ __forceinline__ void store_own(Element* to, const float (&own)[OWN_W]) {
  constexpr int N = InputRow::N;
#pragma unroll
  for (int i = 0; i < OWN_W / N; ++i) Raw<N>::store(to + i * InputRow::APART, own + i * N);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    gradients_depthwise(const Element* __restrict__ grad_output, const Element* __restrict__ input,
                       const Element* __restrict__ weight, Element* __restrict__ grad_input,
                       void* __restrict__ grad_weight, void* __restrict__ grad_bias,
                       const __grid_constant__ SegmentSizes sizes) {
  extern __shared__ float shared[];

  Digits thread{threadIdx.x};
  const int lane = thread.next(LANES), walker = thread.next(WALKERS), phase = PHASES == 1 ? 0 : thread.rest;
  Digits block{blockIdx.x};
  const int channel = block.next(CHANNEL_BLOCKS) * LANES + lane;
  const unsigned slice = block.rest;
  const bool exists = channel < IN_CHANNELS;

  // Where PHASES > 1: what each of them adds to grad_input.
  float* const gathered = shared;
  const auto at_gathered = [&](int of_phase, int row, int i) {
    return ((of_phase * sizes.tile_rows + row) * OWN_W + i) * (LANES * WALKERS) + walker * LANES + lane;
  };
  float* const weights = shared + (GATHERS ? PHASES * sizes.tile_rows * OWN_W * LANES * WALKERS : 0);
  float factors[WEIGHTS_SHARED ? 1 : TAP_ROWS][KERNEL_W];
  const auto weight_or_zero = [&](int of_phase, int i, int kw) {
    const int kh = tap_row(of_phase, i / LAGS, i % LAGS);
    return exists && kh < KERNEL_H ? load_as(weight[(channel * KERNEL_H + kh) * KERNEL_W + kw]) : 0.0f;
  };
  if constexpr (WEIGHTS_SHARED) {
    for (unsigned e = threadIdx.x; e < PHASES * TAP_ROWS * KERNEL_W; e += THREADS) {
      Digits digits{e};
      const int kw = digits.next(KERNEL_W), i = digits.next(TAP_ROWS);
      weights[e] = weight_or_zero(digits.rest, i, kw);
    }
    __syncthreads();
  } else if constexpr (WANTS_INPUT) {
#pragma unroll
    for (int i = 0; i < TAP_ROWS; ++i)
#pragma unroll
      for (int kw = 0; kw < KERNEL_W; ++kw) factors[i][kw] = weight_or_zero(phase, i, kw);
  }
  const u32 own_weights = ptx::shared_address(weights) + 4 * (phase * TAP_ROWS * KERNEL_W);

  float sums[SUMS ? SUMS : 1] = {};
#pragma unroll 1
  for (int turn = 0; turn < sizes.segment_tiles; ++turn) {
    unsigned walk = (slice * sizes.segment_tiles + turn) * WALKERS + walker;
    const int iw0 = sizes.across.digit(walk) * OWN_W, ih0 = sizes.down.digit(walk) * sizes.tile_rows;
    const long long image_index = walk;
    const int rows = sizes.height - ih0 < sizes.tile_rows ? sizes.height - ih0 : sizes.tile_rows;
    const int steps = exists && image_index < sizes.batch ? rows + LAGS - 1 : 0;
    const int first_column = iw0 * STRIDE_W - PADDING_W;
    const Element* const image = grad_output + image_index * output_elements(sizes);
    const auto is_row = [&](int oh) { return (unsigned)oh < (unsigned)sizes.out_height; };
    const Index first_input = at_input(sizes, 0, channel, ih0, iw0);
    const long long input_image = image_index * input_elements(sizes);
    const Element* const from = input + (input_image + first_input);
    Element* const to = grad_input + (input_image + first_input);
    const Index row_stride = CHANNELS_LAST ? (Index)sizes.width * IN_CHANNELS : sizes.width;

    GradOutputRow coming[PHASE_ROWS];
    InputRow coming_input;
    const auto ask = [&](int step) {
      const int oh = (ih0 + step) * STRIDE_H - PADDING_H + phase * PHASE_ROWS;
#pragma unroll
      for (int r = 0; r < PHASE_ROWS; ++r)
        bring(coming[r], image + at_output(sizes, 0, channel, oh + r, first_column),
              [&](int column) { return is_row(oh + r) && (unsigned)(first_column + column) < (unsigned)sizes.out_width; });
      if (WANTS_WEIGHT) coming_input.load(from + step * row_stride, step < rows);
    };
    if (steps > 0) ask(0);

    float own[LAGS][OWN_W] = {}, x[LAGS][OWN_W] = {};
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      GradOutputRow arrived[PHASE_ROWS];
#pragma unroll
      for (int r = 0; r < PHASE_ROWS; ++r) arrived[r] = coming[r];
      if (WANTS_WEIGHT) coming_input.read(x[0]);
      if (step + 1 < steps) ask(step + 1);

#pragma unroll
      for (int r = 0; r < PHASE_ROWS; ++r) {
        float dy[COLUMNS];
        arrived[r].read(dy);
        if constexpr (WITH_BIAS) {
          // Each element once: the first columns of every walk, all of the last.
          const bool last_rows = ih0 + sizes.tile_rows >= sizes.height, last_columns = iw0 + OWN_W >= sizes.width;
          float sum = 0.0f;
#pragma unroll
          for (int column = 0; column < COLUMNS; ++column)
            if (column < OWN_W * STRIDE_W || last_columns) sum += dy[column];
          if (step < rows || last_rows) sums[BIAS] += sum;
        }
#pragma unroll
        for (int lag = 0; lag < LAGS; ++lag) {
          if (tap_row(phase, r, lag) >= KERNEL_H) continue;
          const int i = r * LAGS + lag;
          float row_factors[KERNEL_W];
          if constexpr (WEIGHTS_SHARED) read_weights(row_factors, own_weights + 4 * i * KERNEL_W);
          // Rows that are not the walk's are somebody else's: grad_output may hold an infinity there.
          const bool ours = WANTS_WEIGHT && (unsigned)(step - lag) < (unsigned)rows;
#pragma unroll
          for (int kw = 0; kw < KERNEL_W; ++kw)
#pragma unroll
            for (int c = 0; c < OWN_W; ++c) {
              const float value = dy[c * STRIDE_W + kw * DILATION_W];
              const float factor = WEIGHTS_SHARED ? row_factors[kw] : factors[WEIGHTS_SHARED ? 0 : i][kw];
              if (WANTS_INPUT) own[lag][c] += factor * value;
              if (ours) sums[WANTS_WEIGHT ? i * KERNEL_W + kw : 0] += x[lag][c] * value;
            }
        }
      }

      const int done = step - (LAGS - 1);
      if (WANTS_INPUT && done >= 0) {
        if constexpr (PHASES == 1) {
          store_own(to + done * row_stride, own[LAGS - 1]);
        } else {
#pragma unroll
          for (int i = 0; i < OWN_W; ++i) gathered[at_gathered(phase, done, i)] = own[LAGS - 1][i];
        }
      }
#pragma unroll
      for (int lag = LAGS - 1; lag >= 0; --lag)
#pragma unroll
        for (int i = 0; i < OWN_W; ++i) {
          own[lag][i] = lag > 0 ? own[lag > 0 ? lag - 1 : 0][i] : 0.0f;
          x[lag][i] = lag > 0 ? x[lag > 0 ? lag - 1 : 0][i] : 0.0f;
        }
    }
    if constexpr (WANTS_INPUT && PHASES > 1) {
      __syncthreads();
      if (steps > 0)
        for (int row = phase; row < rows; row += PHASES) {
          float total[OWN_W] = {};
#pragma unroll
          for (int other = 0; other < PHASES; ++other)
#pragma unroll
            for (int i = 0; i < OWN_W; ++i) total[i] += gathered[at_gathered(other, row, i)];
          store_own(to + row * row_stride, total);
        }
      __syncthreads();
    }
  }
  if (SUMS == 0) return;
  ptx::let_next_launch_start();

  // Each sum of a block: [sum][phase][part][lane], a part being what a warp (NCHW) or a walker (channels_last) has.
  constexpr int PARTS = CHANNELS_LAST ? WALKERS : WALKERS / 32;
  constexpr int ACROSS = PARTS * LANES * PHASES;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < SUMS; ++i) {
    float sum = sums[i];
    if constexpr (!CHANNELS_LAST) {
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
      if (walker % 32 == 0) shared[i * ACROSS + phase * PARTS + walker / 32] = sum;
    } else {
      shared[i * ACROSS + threadIdx.x] = sum;
    }
  }
  __syncthreads();
  const auto added = [&](int sum, int of_phase, int of_lane) {
    float total = 0.0f;
#pragma unroll 4
    for (int part = 0; part < PARTS; ++part) total += shared[sum * ACROSS + (of_phase * PARTS + part) * LANES + of_lane];
    return total;
  };
  const auto leave = [&](void* to, long long at, float sum) {
    if (sizes.split)
      static_cast<float*>(to)[at] = sum;
    else
      static_cast<Element*>(to)[at] = store_as<Element>(sum);
  };
  const int channel0 = channel - lane;
  for (unsigned e = threadIdx.x; e < PHASES * WEIGHT_SUMS * LANES; e += THREADS) {
    Digits digits{e};
    const int of_lane = digits.next(LANES), kw = digits.next(KERNEL_W);
    const int lag = digits.next(LAGS), r = digits.next(PHASE_ROWS), of_phase = digits.rest;
    const int kh = tap_row(of_phase, r, lag), c = channel0 + of_lane;
    if (kh >= KERNEL_H || c >= IN_CHANNELS) continue;
    leave(grad_weight, (long long)slice * (IN_CHANNELS * TAPS) + (c * KERNEL_H + kh) * KERNEL_W + kw,
          added((r * LAGS + lag) * KERNEL_W + kw, of_phase, of_lane));
  }
  if constexpr (WITH_BIAS) {
    for (int of_lane = threadIdx.x; of_lane < LANES; of_lane += THREADS) {
      float total = 0.0f;
      for (int of_phase = 0; of_phase < PHASES; ++of_phase) total += added(BIAS, of_phase, of_lane);
      const int c = channel0 + of_lane;
      if (c < OUT_CHANNELS) leave(grad_bias, (long long)slice * OUT_CHANNELS + c, total);
    }
  }
}
