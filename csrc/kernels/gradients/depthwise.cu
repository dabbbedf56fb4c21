// Gradients of a depthwise layer (one channel in, one out a group), whichever of them are wanted, from one pass over
// grad_output and input. Storage float, Half or BFloat16, products and sums float32; NCHW and channels_last.
//
//   grad_input[n, c, ih, iw]   = sum over kh, kw of weight[c, kh, kw] * grad_output[n, c, oh, ow]
//   grad_weight[c, kh, kw]     = sum over n, ih, iw of input[n, c, ih, iw] * grad_output[n, c, oh, ow]
//   grad_bias[c]               = sum over n, oh, ow of grad_output[n, c, oh, ow]
//   oh = ih * STRIDE_H - PADDING_H + kh * DILATION_H, ow alike
//
// A thread computes tiles of sizes.tile_rows rows and TILE_W columns of the input, of one image and one channel, row by row
// from the top. It keeps the weights and the sums of their gradient in registers, and also the last LAGS rows of the input and
// of its gradient: the rows of grad_output in step q reach the input rows q, q - 1, ... q - LAGS + 1. The rows of the next
// step are prefetched. PHASES threads share a tile's rows of grad_output if one thread cannot keep all taps: thread `phase`
// takes PHASE_ROWS of the STRIDE_H rows of a step, and their partial sums of grad_input are added up in shared memory after
// the tile. In NCHW, where all lanes read the same weights, these are then in shared memory too, which leaves registers for
// more warps.
//
// Threads, fastest first: LANES channels (1 in NCHW), TILES tiles (side by side, then one below the other), PHASES. Each
// thread computes `repeat` tiles one after another. A block stores its sums of grad_weight (and grad_bias): as the gradient,
// or with sizes.split as float32 to partial[split]. Every sum has a fixed order.
#include "gradients/depthwise_rows.cuh"
#include "common/mma.cuh"

using ptx::u32;

constexpr int LAGS = (KERNEL_H - 1) * DILATION_H / STRIDE_H + 1;
constexpr int CHANNEL_BLOCKS = ceil_div(IN_CHANNELS, LANES);
static_assert(THREADS == LANES * TILES * PHASES && IN_CHANNELS == GROUPS && OUT_CHANNELS == GROUPS);
static_assert(PHASES == 1 || (DILATION_H == 1 && PHASES * PHASE_ROWS == STRIDE_H));
static_assert(CHANNELS_LAST || (TILES % 32 == 0 && LANES == 1));

constexpr int TAP_ROWS = PHASE_ROWS * LAGS;
constexpr int WEIGHT_SUMS = WANTS_WEIGHT ? TAP_ROWS * KERNEL_W : 0, BIAS = WEIGHT_SUMS;
constexpr int SUMS = WEIGHT_SUMS + (WITH_BIAS ? 1 : 0);

// Returns the row of the kernel that connects row `r` of a step of thread `phase` with the input `lag` rows above it, or
// KERNEL_H if none does.
__device__ __forceinline__ int tap_row(int phase, int r, int lag) {
  const int distance = (PHASES == 1 ? 0 : phase * PHASE_ROWS) + r + STRIDE_H * lag;
  if (PHASES > 1 && KERNEL_H % STRIDE_H == 0) return distance;
  return distance % DILATION_H == 0 && distance / DILATION_H < KERNEL_H ? distance / DILATION_H : KERNEL_H;
}

constexpr bool SHARES_INPUT = WANTS_INPUT && PHASES > 1, WEIGHTS_SHARED = SHARES_INPUT && !CHANNELS_LAST;
// Reads the weights of a row of taps from shared memory. The asm is volatile so that each step reads them anew; otherwise the
// compiler keeps them in registers.
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

// Stores a tile's columns of one row of grad_input.
__device__ __forceinline__ void store_row(Element* to, const float (&input_sums)[TILE_W]) {
  constexpr int N = InputRow::N;
#pragma unroll
  for (int i = 0; i < TILE_W / N; ++i) Raw<N>::store(to + i * InputRow::PITCH, input_sums + i * N);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    gradients_depthwise(const Element* __restrict__ grad_output, const Element* __restrict__ input,
                       const Element* __restrict__ weight, Element* __restrict__ grad_input,
                       void* __restrict__ grad_weight, void* __restrict__ grad_bias,
                       const __grid_constant__ SegmentSizes sizes) {
  extern __shared__ float shared[];

  Digits thread{threadIdx.x};
  const int lane = thread.next(LANES), block_tile = thread.next(TILES), phase = PHASES == 1 ? 0 : thread.rest;
  Digits block{blockIdx.x};
  const int channel = block.next(CHANNEL_BLOCKS) * LANES + lane;
  const unsigned split = block.rest;
  const bool exists = channel < IN_CHANNELS;

  // With PHASES > 1: the partial sums of grad_input of each phase.
  float* const partial_input = shared;
  const auto partial_index = [&](int of_phase, int row, int i) {
    return ((of_phase * sizes.tile_rows + row) * TILE_W + i) * (LANES * TILES) + block_tile * LANES + lane;
  };
  float* const weights = shared + (SHARES_INPUT ? PHASES * sizes.tile_rows * TILE_W * LANES * TILES : 0);
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
  const u32 phase_weights = ptx::shared_address(weights) + 4 * (phase * TAP_ROWS * KERNEL_W);

  float sums[SUMS ? SUMS : 1] = {};
#pragma unroll 1
  for (int iteration = 0; iteration < sizes.segment_tiles; ++iteration) {
    unsigned tile = (split * sizes.segment_tiles + iteration) * TILES + block_tile;
    const int iw0 = sizes.across.digit(tile) * TILE_W, ih0 = sizes.down.digit(tile) * sizes.tile_rows;
    const long long image_index = tile;
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

    GradOutputRow next_rows[PHASE_ROWS];
    InputRow next_input;
    const auto prefetch = [&](int step) {
      const int oh = (ih0 + step) * STRIDE_H - PADDING_H + phase * PHASE_ROWS;
#pragma unroll
      for (int r = 0; r < PHASE_ROWS; ++r)
        prefetch_row(next_rows[r], image + at_output(sizes, 0, channel, oh + r, first_column),
              [&](int column) { return is_row(oh + r) && (unsigned)(first_column + column) < (unsigned)sizes.out_width; });
      if (WANTS_WEIGHT) next_input.prefetch(from + step * row_stride, step < rows);
    };
    if (steps > 0) prefetch(0);

    float input_sums[LAGS][TILE_W] = {}, x[LAGS][TILE_W] = {};
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      GradOutputRow current_rows[PHASE_ROWS];
#pragma unroll
      for (int r = 0; r < PHASE_ROWS; ++r) current_rows[r] = next_rows[r];
      if (WANTS_WEIGHT) next_input.read(x[0]);
      if (step + 1 < steps) prefetch(step + 1);

#pragma unroll
      for (int r = 0; r < PHASE_ROWS; ++r) {
        float dy[COLUMNS];
        current_rows[r].read(dy);
        if constexpr (WITH_BIAS) {
          // Counts each element once: the first columns of every tile, all columns of the last.
          const bool last_rows = ih0 + sizes.tile_rows >= sizes.height, last_columns = iw0 + TILE_W >= sizes.width;
          float sum = 0.0f;
#pragma unroll
          for (int column = 0; column < COLUMNS; ++column)
            if (column < TILE_W * STRIDE_W || last_columns) sum += dy[column];
          if (step < rows || last_rows) sums[BIAS] += sum;
        }
#pragma unroll
        for (int lag = 0; lag < LAGS; ++lag) {
          if (tap_row(phase, r, lag) >= KERNEL_H) continue;
          const int i = r * LAGS + lag;
          float row_factors[KERNEL_W];
          if constexpr (WEIGHTS_SHARED) read_weights(row_factors, phase_weights + 4 * i * KERNEL_W);
          // Rows outside of this tile belong to another one, and grad_output may be infinite there.
          const bool of_this_tile = WANTS_WEIGHT && (unsigned)(step - lag) < (unsigned)rows;
#pragma unroll
          for (int kw = 0; kw < KERNEL_W; ++kw)
#pragma unroll
            for (int c = 0; c < TILE_W; ++c) {
              const float value = dy[c * STRIDE_W + kw * DILATION_W];
              const float factor = WEIGHTS_SHARED ? row_factors[kw] : factors[WEIGHTS_SHARED ? 0 : i][kw];
              if (WANTS_INPUT) input_sums[lag][c] += factor * value;
              if (of_this_tile) sums[WANTS_WEIGHT ? i * KERNEL_W + kw : 0] += x[lag][c] * value;
            }
        }
      }

      const int done = step - (LAGS - 1);
      if (WANTS_INPUT && done >= 0) {
        if constexpr (PHASES == 1) {
          store_row(to + done * row_stride, input_sums[LAGS - 1]);
        } else {
#pragma unroll
          for (int i = 0; i < TILE_W; ++i) partial_input[partial_index(phase, done, i)] = input_sums[LAGS - 1][i];
        }
      }
#pragma unroll
      for (int lag = LAGS - 1; lag >= 0; --lag)
#pragma unroll
        for (int i = 0; i < TILE_W; ++i) {
          input_sums[lag][i] = lag > 0 ? input_sums[lag > 0 ? lag - 1 : 0][i] : 0.0f;
          x[lag][i] = lag > 0 ? x[lag > 0 ? lag - 1 : 0][i] : 0.0f;
        }
    }
    if constexpr (WANTS_INPUT && PHASES > 1) {
      __syncthreads();
      if (steps > 0)
        for (int row = phase; row < rows; row += PHASES) {
          float total[TILE_W] = {};
#pragma unroll
          for (int other = 0; other < PHASES; ++other)
#pragma unroll
            for (int i = 0; i < TILE_W; ++i) total[i] += partial_input[partial_index(other, row, i)];
          store_row(to + row * row_stride, total);
        }
      __syncthreads();
    }
  }
  if (SUMS == 0) return;
  ptx::let_next_launch_start();

  // The sums of a block are [sum][phase][part][lane]; a part is the sum of a warp (NCHW) or of a thread (channels_last).
  constexpr int PARTS = CHANNELS_LAST ? TILES : TILES / 32;
  constexpr int ACROSS = PARTS * LANES * PHASES;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < SUMS; ++i) {
    float sum = sums[i];
    if constexpr (!CHANNELS_LAST) {
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
      if (block_tile % 32 == 0) shared[i * ACROSS + phase * PARTS + block_tile / 32] = sum;
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
  const auto store_sum = [&](void* to, long long at, float sum) {
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
    store_sum(grad_weight, (long long)split * (IN_CHANNELS * TAPS) + (c * KERNEL_H + kh) * KERNEL_W + kw,
          added((r * LAGS + lag) * KERNEL_W + kw, of_phase, of_lane));
  }
  if constexpr (WITH_BIAS) {
    for (int of_lane = threadIdx.x; of_lane < LANES; of_lane += THREADS) {
      float total = 0.0f;
      for (int of_phase = 0; of_phase < PHASES; ++of_phase) total += added(BIAS, of_phase, of_lane);
      const int c = channel0 + of_lane;
      if (c < OUT_CHANNELS) store_sum(grad_bias, (long long)split * OUT_CHANNELS + c, total);
    }
  }
}
