// Gradient of the weight with mma.sync where a group has few channels on one side: RGB heads, narrow groups, depthwise
// layers, large kernels. Storage float, Half or BFloat16; NCHW and channels_last; either layout of the gradient.
//
//   grad_weight[ci, tap] = sum over n, ih, iw of input[n, ci, ih, iw] * im2col[(ih, iw), tap]
//   (im2col: see gradients/grad_output_tile.cuh)
//
// An implicit GEMM with m = input channels (of BLOCK_GROUPS groups; of one group WARPS_M * M_TILES * 16), n = the taps
// of one chunk, k = pixels. A block walks down sizes.segment_tiles tiles of TILE_H x TILE_W pixels and keeps its sums
// in registers. At the end it stores them in the gradient's own memory order: as they are, or, where sizes.split, as
// float32 to partial[split], where a split is what one column of tiles and one walk add up. Every sum has a fixed
// order.
// Warps, fastest first: WARPS_K over the pixels, WARPS_N over the taps, WARPS_M over the channels, BLOCK_GROUPS. A
// warp computes M_TILES * 16 channels and N_TILES * 8 taps, and takes units of 16 pixels of a row, two steps of k
// each. The input goes from memory to registers (grad_weight/narrow_mma_input.cuh), in NCHW INPUT_VECTOR neighbouring
// pixels at once.
//
// WITH_BIAS: also the sum of grad_output over batch and pixels, from the tiles in shared memory. A tile adds up the
// output pixels from its own first to the next tile's first; the plan makes sure that it holds them. A split has two
// rows of `bias_result`: its sum, and what rounding left of it.
#include "common/compensated_sum.cuh"
#include "grad_weight/narrow_mma_input.cuh"

constexpr int WARP_M = 16 * M_TILES;
constexpr int M_BLOCKS = ceil_div(CI_GROUP, BLOCK_M);
constexpr int UNITS_ACROSS = TILE_W / 16, UNITS = UNITS_ACROSS * TILE_H / WARPS_K;  // of a row, of a warp
// A warp's units: WARP_ACROSS of them side by side, WARPS_K apart, then WARP_DOWN rows further down.
constexpr int WARP_ACROSS = UNITS_ACROSS > WARPS_K ? UNITS_ACROSS / WARPS_K : 1;
constexpr int WARP_DOWN = WARPS_K > UNITS_ACROSS ? WARPS_K / UNITS_ACROSS : 1;
static_assert(UNITS % DEPTH == 0 && (DEPTH & (DEPTH - 1)) == 0);
constexpr int UNROLL = UNITS * M_TILES * N_TILES * (PRECISION == ptx::IEEE ? 2 : 1) <= 64 ? UNITS / DEPTH : 1;
static_assert(TILE_W % 16 == 0 && UNITS * WARPS_K == UNITS_ACROSS * TILE_H);
static_assert(THREADS == 32 * WARPS_K * WARPS_N * WARPS_M * BLOCK_GROUPS && WARPS_N * N_TILES * 8 >= CHUNK_TAPS);
static_assert(BLOCK_GROUPS == 1 || BLOCK_M >= CI_GROUP);
static_assert((WARPS_K & (WARPS_K - 1)) == 0 && (UNITS_ACROSS & (UNITS_ACROSS - 1)) == 0);

// Whether a tile is tested for the input's edges once; otherwise each unit is. In 16 bits that was no faster in NCHW and 4 to 7 %
// slower in channels_last.
constexpr bool BY_TILE = sizeof(Element) == 4;
// Without branches, unrolled units have more loads in flight than there are registers (48 bytes of a kernel spilled).
constexpr int TILE_UNROLL = BY_TILE ? 1 : UNROLL;

using BiasSum = CompensatedSum<float, (sizeof(Element) > 2)>;

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    grad_weight_narrow_mma(const Element* __restrict__ input, const Element* __restrict__ grad_output,
                       void* __restrict__ result, void* __restrict__ bias_result, const __grid_constant__ SegmentSizes sizes) {
  extern __shared__ float4 shared[];
  float* const tiles = reinterpret_cast<float*>(shared);

  Digits block{blockIdx.x};
  const int m0 = block.next(M_BLOCKS) * BLOCK_M;
  const int chunk = block.next(CHUNKS);
  const int group0 = block.next(GROUPS / BLOCK_GROUPS) * BLOCK_GROUPS;
  const int tile_w = sizes.across.digit(block.rest), iw0 = tile_w * TILE_W;
  const int tiles_down = static_cast<int>(sizes.down.value), tiles_across = static_cast<int>(sizes.across.value);
  const int first = static_cast<int>(block.rest) * sizes.segment_tiles, left = sizes.batch * tiles_down - first;
  const int steps = sizes.segment_tiles < left ? sizes.segment_tiles : left;
  const long long split = (long long)block.rest * tiles_across + tile_w;
  const int co0 = chunk / KH_CHUNKS * CHUNK_CO, kh0 = chunk % KH_CHUNKS;
  const Position start = Position::of(sizes, first);

  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  Digits warp{threadIdx.x / 32};
  const int warp_k = warp.next(WARPS_K), warp_n = warp.next(WARPS_N), warp_m = warp.next(WARPS_M), group = warp.rest;

  GradOutputLoader loader(sizes, iw0 * STRIDE_W - PADDING_W);
  Position next_tile = start;
  const auto fetch_tile = [&](float* tile) {
    loader.fetch(grad_output + next_tile.image * output_elements(sizes),
                 group0 * CO_GROUP + co0, next_tile.down * (TILE_H * STRIDE_H) - PADDING_H + kh0 * DILATION_H, tile);
    next_tile.advance(sizes);
  };

  const int first_ci = m0 + warp_m * WARP_M;  // of the warp, in its group
  const int lane_ci = first_ci + LANE_CHANNELS * g;
  const int row0 = warp_k / UNITS_ACROSS, column0 = warp_k % UNITS_ACROSS * 16;  // of the warp's first unit
  // Elements of the input from a row to the next, and from a channel to the next.
  const Index row_stride = PIXEL_STEP * sizes.width, channel_step = CHANNELS_LAST ? 1 : (Index)sizes.height * sizes.width;
  InputUnit ahead[DEPTH];
  Position next_unit = start;
  const auto corner_of = [&](const Position& at) {
    return input + at.image * input_elements(sizes) +
           at_input(sizes, 0, (group0 + group) * CI_GROUP + lane_ci, at.down * TILE_H + row0, iw0 + column0 + INPUT_VECTOR * t);
  };
  const Element* corner = corner_of(start);  // the lane's first element of the tile
  // Rows down and columns across from the warp's first unit to unit first + slot. They are divided one by one: NVRTC 13.0
  // was seen to compute wrong quotients of the sum of a loop's index and a constant.
  const auto rows_down = [](int first, int slot) { return (first / WARP_ACROSS + slot / WARP_ACROSS) * WARP_DOWN; };
  const auto columns_across = [](int first, int slot) {
    return (first % WARP_ACROSS + slot % WARP_ACROSS) * (16 * WARPS_K);
  };
  const auto fetch_unit = [&](int first, int slot) {
    const int down = rows_down(first, slot), across = columns_across(first, slot);
    ahead[slot].fetch(corner + (down * row_stride + across * PIXEL_STEP), channel_step,
                      next_unit.down * TILE_H + row0 + down < sizes.height,
                      sizes.width - (iw0 + column0 + across + INPUT_VECTOR * t), CI_GROUP - lane_ci);
  };

  // The same where all columns of the tile are inside.
  const auto fetch_inside = [&](int first, int slot, bool row_inside) {
    const int down = rows_down(first, slot), across = columns_across(first, slot);
    ahead[slot].fetch(corner + (down * row_stride + across * PIXEL_STEP), channel_step, row_inside, 16, CI_GROUP - lane_ci);
  };

  if (steps > 0) {
    fetch_tile(tiles);
#pragma unroll
    for (int slot = 0; slot < DEPTH; ++slot) fetch_unit(0, slot);
  }
  if (ASYNC) ptx::commit_copies();

  const int n0 = warp_n * (8 * N_TILES);
  int taps[N_TILES];
#pragma unroll
  for (int n = 0; n < N_TILES; ++n) taps[n] = n0 + 8 * n + g < CHUNK_TAPS ? tap_offset(n0 + 8 * n + g) : 0;
  const int lane_place = group * CHUNK_CO * PLANE + row0 * PIXEL_ROWS * ROW_PITCH + (column0 + INPUT_VECTOR * t) * PIXEL_PITCH;

  constexpr int OWN_ROWS = TILE_H * PIXEL_ROWS < ROWS ? TILE_H * PIXEL_ROWS : ROWS;
  const bool sums_bias = WITH_BIAS && m0 == 0 && kh0 == 0;
  const int own_columns = tile_w == tiles_across - 1 ? COLUMNS : SHIFT + TILE_W * STRIDE_W;
  BiasSum bias[WITH_BIAS ? CHANNELS : 1] = {};

  float sum[M_TILES][N_TILES][4] = {};
  int buffer = 0, ih0 = start.down * TILE_H;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    if constexpr (ASYNC) {
      if (step + 1 < steps) fetch_tile(tiles + (buffer ^ 1) * GRAD_OUTPUT_TILE_WORDS);
      ptx::commit_copies();
      ptx::wait_copies<1>();
      __syncthreads();
    } else {
      loader.put(tiles);
      __syncthreads();
      if (step + 1 < steps) fetch_tile(nullptr);
    }
    const float* const whole_tile = tiles + (ASYNC ? buffer * GRAD_OUTPUT_TILE_WORDS : 0);
    const u32 lane_address = ptx::shared_address(whole_tile + lane_place);
    buffer ^= 1;
    if (sums_bias) {
      const int rows = ih0 + TILE_H >= sizes.height ? ROWS : OWN_ROWS;
#pragma unroll
      for (int c = 0; c < (WITH_BIAS ? CHANNELS : 0); ++c)
        for (int row = threadIdx.x / 32; row < rows; row += THREADS / 32)
          for (int column = SHIFT + lane; column < own_columns; column += 32)
            bias[c].add(whole_tile[c * PLANE + row * ROW_PITCH + column_offset(column)]);
    }

    // In a tile that lies inside the input, no branch keeps a unit's loads from being issued before the multiplies of the unit
    // before it.
    if (BY_TILE && iw0 + TILE_W <= sizes.width && ih0 + TILE_H <= sizes.height) {
      constexpr bool INSIDE = true;
#include "grad_weight/narrow_mma_units.cuh"
    } else {
      constexpr bool INSIDE = false;
#include "grad_weight/narrow_mma_units.cuh"
    }
    ih0 = ih0 + TILE_H < tiles_down * TILE_H ? ih0 + TILE_H : 0;
    __syncthreads();
  }

  ptx::let_next_launch_start();
  // The warps that share the pixels add up their sums, the upper half to the lower, until one is left.
  constexpr int SUMS = M_TILES * N_TILES * 4;
#pragma unroll
  for (int half = WARPS_K / 2; half > 0; half /= 2) {
    const int others = threadIdx.x / 32 / WARPS_K;
    float* const place = tiles + (others * (WARPS_K / 2) + warp_k % half) * (SUMS * 32) + lane;
    if (ASYNC) ptx::wait_copies<0>();
    __syncthreads();
    if (warp_k >= half && warp_k < 2 * half) {
#pragma unroll
      for (int i = 0; i < SUMS; ++i) place[i * 32] = (&sum[0][0][0])[i];
    }
    __syncthreads();
    if (warp_k < half) {
#pragma unroll
      for (int i = 0; i < SUMS; ++i) (&sum[0][0][0])[i] += place[i * 32];
    }
  }
  if (sums_bias) {
    constexpr int WARPS = THREADS / 32;
    const auto of_warps = reinterpret_cast<BiasSum*>(tiles);  // [channel][warp]
    if (ASYNC) ptx::wait_copies<0>();
    __syncthreads();
#pragma unroll
    for (int c = 0; c < (WITH_BIAS ? CHANNELS : 0); ++c) {
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) bias[c].add_lane(mask);
      if (lane == 0) of_warps[c * WARPS + threadIdx.x / 32] = bias[c];
    }
    __syncthreads();
    for (int c = threadIdx.x; c < CHANNELS; c += THREADS) {
      BiasSum total{};
      for (int i = 0; i < WARPS; ++i) total.add(of_warps[c * WARPS + i]);
      const int channel = group0 * CO_GROUP + co0 + c;
      if (sizes.split) {
        const auto partial = static_cast<float*>(bias_result);
        partial[2 * split * OUT_CHANNELS + channel] = total.sum;
        partial[(2 * split + 1) * OUT_CHANNELS + channel] = total.remainder();
      } else {
        static_cast<Element*>(bias_result)[channel] = store_as<Element>(total.value());
      }
    }
  }
  if (warp_k > 0) return;

  const long long first_result = split * ((long long)IN_CHANNELS * CO_GROUP * TAPS);
#pragma unroll
  for (int m = 0; m < M_TILES; ++m)
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      const int ci = first_ci + (NEIGHBOURS ? 2 * M_TILES * g + 2 * m + half : 16 * m + 8 * half + g);
      if (ci >= CI_GROUP) continue;
#pragma unroll
      for (int n = 0; n < N_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          Digits digits{(unsigned)(n0 + 8 * n + 2 * t + i)};
          const int kw = digits.next(KERNEL_W), kh = digits.next(CHUNK_KH), co = digits.rest;
          if (co >= CHUNK_CO) continue;
          const long long at = first_result + at_weight((group0 + group) * CI_GROUP + ci, co0 + co, kh0 + kh, kw);
          if (sizes.split)
            static_cast<float*>(result)[at] = sum[m][n][2 * half + i];
          else
            static_cast<Element*>(result)[at] = store_as<Element>(sum[m][n][2 * half + i]);
        }
    }
}
