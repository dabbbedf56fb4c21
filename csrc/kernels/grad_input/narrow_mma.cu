// Gradient of the input on the tensor cores where a group has few channels on a side: RGB heads, narrow groups, depthwise,
// large kernels. Storage float, Half or BFloat16; NCHW and channels_last; weights in either layout.
//
//   grad_input[n, ci, ih, iw] = sum over the taps (co, kh, kw) of the group of ci
//       of weight[ci, tap] * im2col[(ih, iw), tap]                                (im2col: see gradients/grad_output_tile.cuh)
//
// A matrix product with m = input channels (of BLOCK_GROUPS groups; of one group WARPS_M * M_TILES * 16), n = the pixels of
// a tile, k = taps. A block keeps its weights in shared memory and computes `repeat` tiles of TILE_H x TILE_W pixels below
// each other, a chunk of the taps at a time. If SPLITS > 1, each split takes CHUNKS_HERE chunks and writes float32 sums.
// Warps, fastest first: WARPS_P over the pixels, WARPS_M over the channels, BLOCK_GROUPS. A warp computes M_TILES * 16
// channels and N_TILES * 8 pixels, in units of 8 * STORE pixels of a row, so that a lane stores 2 * STORE neighbours.
// WEIGHTS_IN_REGISTERS: the weights stay in registers for all tiles.
#include "gradients/grad_output_tile.cuh"

constexpr int WARP_M = 16 * M_TILES, BLOCK_M = WARPS_M * WARP_M;
constexpr int M_BLOCKS = ceil_div(CI_GROUP, BLOCK_M);
constexpr int UNIT = 8 * STORE;
constexpr int UNITS = N_TILES / STORE;       // of a warp
constexpr int UNITS_ACROSS = TILE_W / UNIT;  // of a row of the tile
static_assert(TILE_W % UNIT == 0 && N_TILES % STORE == 0 && UNITS * WARPS_P == UNITS_ACROSS * TILE_H);
static_assert(UNITS % UNITS_ACROSS == 0 || UNITS_ACROSS % UNITS == 0);
static_assert(THREADS == 32 * WARPS_P * WARPS_M * BLOCK_GROUPS && (BLOCK_GROUPS == 1 || BLOCK_M >= CI_GROUP));

constexpr int K_STEPS = ceil_div(CHUNK_TAPS, 8);
constexpr bool STAGED = CHANNELS_LAST && BLOCK_GROUPS > 1;
// Rows of a block's weights: in channels_last also those beyond the channels.
constexpr int WEIGHT_ROWS = (CHANNELS_LAST && !STAGED && HALVES == 2) || BLOCK_M < CI_GROUP ? BLOCK_M : CI_GROUP;
constexpr int UNROLL = WEIGHTS_IN_REGISTERS || K_STEPS <= 4 ? K_STEPS : 4;
// Four taps that follow each other are neighbours in the tile, so their offsets are constants plus the lane's. Otherwise a table
// has the offsets; also for a loop that is not unrolled to its end, where NVRTC 13.0 was seen to compute wrong offsets.
constexpr bool CONSECUTIVE_TAPS = UNROLL == K_STEPS && KERNEL_W % 4 == 0 && DILATION_W == 1 &&
                               (PIXEL_PITCH == STRIDE_W || (STRIDE_W % 4 == 0 && SHIFT % 4 == 0));
constexpr int WEIGHT_PITCH = 8 * K_STEPS + 4;
constexpr int WEIGHTS = CHUNKS_HERE * BLOCK_GROUPS * WEIGHT_ROWS * WEIGHT_PITCH;
static_assert(!WEIGHTS_IN_REGISTERS || (CHUNKS_HERE == 1 && BLOCK_M == WEIGHT_ROWS));
using Out = Select<(SPLITS > 1), float, Element>::type;

// In channels_last a lane's channels of a pixel are neighbours if one aligned store takes them all. Otherwise the lanes that
// share a pixel store neighbouring channels together: each store of a lane alone would touch a sector of its own.
static_assert(HALVES == 2 || M_TILES == 1);
constexpr int LANE_CHANNELS = HALVES * M_TILES, LANE_CHANNELS_BYTES = LANE_CHANNELS * sizeof(Out);
constexpr bool ADJACENT_CHANNELS = CHANNELS_LAST && !STAGED && HALVES == 2 && 16 % LANE_CHANNELS_BYTES == 0 &&
                                IN_CHANNELS % LANE_CHANNELS == 0 && CI_GROUP % LANE_CHANNELS == 0;
__device__ __forceinline__ int channel_of_row(int row) {
  if (!ADJACENT_CHANNELS) return row;
  const int in_warp = row % WARP_M;
  return row - in_warp + in_warp % 8 * (2 * M_TILES) + in_warp / 8;
}
constexpr int STAGE_CHANNELS = BLOCK_GROUPS * CI_GROUP, STAGE_PITCH = STAGE_CHANNELS | 1;
constexpr int store_channels() {
  int width = 1;
  while (2 * width * sizeof(Element) <= 16 && STAGE_CHANNELS % (2 * width) == 0 && IN_CHANNELS % (2 * width) == 0) width *= 2;
  return width;
}

// Stores the first `inside` of N neighbours.
template <int N, bool ALIGNED>
__device__ __forceinline__ void store(Out* to, const float (&values)[N], int inside) {
  constexpr int WIDTH_ = !ALIGNED ? 1 : gcd(N, 16 / sizeof(Out));  // N may be six
#pragma unroll
  for (int i = 0; i < N; i += WIDTH_) {
    if (i >= inside) continue;
    PackOf<Out, WIDTH_> pack;
#pragma unroll
    for (int j = 0; j < WIDTH_; ++j) pack.elements[j] = store_as<Out>(values[i + j]);
    *reinterpret_cast<PackOf<Out, WIDTH_>*>(to + i) = pack;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    grad_input_narrow_mma(const Element* __restrict__ grad_output, const Element* __restrict__ weight,
                      Out* __restrict__ grad_input, const __grid_constant__ SegmentSizes sizes) {
  extern __shared__ float4 shared[];
  float* const tiles = reinterpret_cast<float*>(shared);
  float* const weights = tiles + BUFFERS * GRAD_OUTPUT_TILE_WORDS;
  int* const tap_offsets = reinterpret_cast<int*>(weights + WEIGHTS);
  float* const stage = weights + WEIGHTS + 8 * K_STEPS;

  Digits block{blockIdx.x};
  const int m0 = block.next(M_BLOCKS) * BLOCK_M;
  const int group0 = block.next(GROUPS / BLOCK_GROUPS) * BLOCK_GROUPS;
  const int iw0 = sizes.across.digit(block.rest) * TILE_W;
  const int split = block.next(SPLITS), chunk0 = split * CHUNKS_HERE;
  const int chunks = CHUNKS - chunk0 < CHUNKS_HERE ? CHUNKS - chunk0 : CHUNKS_HERE;
  const int first = static_cast<int>(block.rest) * sizes.segment_tiles;
  const int left = sizes.batch * static_cast<int>(sizes.down.value) - first;
  const int steps = (sizes.segment_tiles < left ? sizes.segment_tiles : left) * chunks;
  Position at = Position::of(sizes, first);

  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  Digits warp{threadIdx.x / 32};
  const int unit0 = warp.next(WARPS_P) * UNITS, warp_m = warp.next(WARPS_M), group = warp.rest;
  const int row0 = unit0 / UNITS_ACROSS, column0 = unit0 % UNITS_ACROSS * UNIT;

  GradOutputLoader loader(sizes, iw0 * STRIDE_W - PADDING_W);
  Position next = at;
  int next_chunk = 0;
  const auto fetch_next = [&](float* tile) {
    const int chunk = chunk0 + next_chunk;
    const int first_row = next.down * (TILE_H * STRIDE_H) - PADDING_H + chunk % KH_CHUNKS * DILATION_H;
    loader.fetch(grad_output + next.image * output_elements(sizes),
                 group0 * CO_GROUP + chunk / KH_CHUNKS * CHUNK_CO, first_row, tile);
    if (++next_chunk == chunks) next_chunk = 0, next.advance(sizes);
  };
#pragma unroll 8
  for (unsigned e = threadIdx.x; e < CHUNKS_HERE * BLOCK_GROUPS * WEIGHT_ROWS * 8 * K_STEPS; e += THREADS) {
    Digits digits{e};
    const int tap = digits.next(8 * K_STEPS);
    float* const to = weights + digits.rest * WEIGHT_PITCH + tap;
    const int ci = m0 + channel_of_row(digits.next(WEIGHT_ROWS)), in_group = digits.next(BLOCK_GROUPS);
    const int chunk = chunk0 + digits.rest;
    Digits tap_digits{(unsigned)tap};
    const int kw = tap_digits.next(KERNEL_W), kh = tap_digits.next(CHUNK_KH) + chunk % KH_CHUNKS;
    const int co = tap_digits.rest + chunk / KH_CHUNKS * CHUNK_CO;
    const bool inside = ci < CI_GROUP && tap < CHUNK_TAPS && chunk < CHUNKS;
    const Element* const from = weight + (inside ? at_weight((group0 + in_group) * CI_GROUP + ci, co, kh, kw) : 0);
    if constexpr (ASYNC)
      ptx::copy_async_or_zero<4>(ptx::shared_address(to), from, inside);
    else
      *to = inside ? load_as(*from) : 0.0f;
  }
  if (steps > 0) fetch_next(tiles);
  if (ASYNC) ptx::commit_copies();
  // Returns weight [row, tap] of m tile m in step k of a chunk; rows beyond the channels are zero.
  const auto factor = [&](int chunk, int k, int m) {
    const float* const from =
        weights + ((chunk * BLOCK_GROUPS + group) * WEIGHT_ROWS + warp_m * WARP_M + 16 * m + g) * WEIGHT_PITCH + 8 * k + t;
    const int row = warp_m * WARP_M + 16 * m + g;
    const bool upper = BLOCK_M == WEIGHT_ROWS || row < WEIGHT_ROWS;
    const bool lower = BLOCK_M == WEIGHT_ROWS || (WEIGHT_ROWS > 8 && row + 8 < WEIGHT_ROWS);
    return Factor(upper ? from[0] : 0.0f, lower ? from[8 * WEIGHT_PITCH] : 0.0f, upper ? from[4] : 0.0f,
                  lower ? from[8 * WEIGHT_PITCH + 4] : 0.0f);
  };

  for (int tap = threadIdx.x; tap < CHUNK_TAPS; tap += THREADS) tap_offsets[tap] = tap_offset(tap);
  const int pixel = STORE == 2 ? 4 * (g / 2) + g % 2 : g;
  const int pixel_offset = group * CHUNK_CO * PLANE + row0 * PIXEL_ROWS * ROW_PITCH + (column0 + pixel) * PIXEL_PITCH;

  float weight_fragments[WEIGHTS_IN_REGISTERS ? K_STEPS : 1][M_TILES][4];
  if constexpr (WEIGHTS_IN_REGISTERS) {
    if (ASYNC) ptx::wait_copies<0>();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k)
#pragma unroll
      for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          weight_fragments[k][m][i] = weights[(group * WEIGHT_ROWS + warp_m * WARP_M + 16 * m + g + i % 2 * 8) * WEIGHT_PITCH +
                                              8 * k + t + i / 2 * 4];
  }

  float sum[M_TILES][N_TILES][4] = {};
  int chunk = 0, buffer = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    if constexpr (ASYNC) {
      if (step + 1 < steps) fetch_next(tiles + (buffer ^ 1) * GRAD_OUTPUT_TILE_WORDS);
      ptx::commit_copies();
      ptx::wait_copies<1>();
      __syncthreads();
    } else {
      loader.put(tiles);
      __syncthreads();
      if (step + 1 < steps) fetch_next(nullptr);
    }
    const u32 pixel_address = ptx::shared_address(tiles + (ASYNC ? buffer * GRAD_OUTPUT_TILE_WORDS : 0) + pixel_offset);
    buffer ^= 1;

#pragma unroll UNROLL
    for (int k = 0; k < K_STEPS; ++k) {
      // Pinned: each load then has a constant offset from these addresses.
      u32 im2col[2];
      bool exists[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int tap = 8 * k + 4 * i + t;
        exists[i] = 8 * k + 4 * i + 4 <= CHUNK_TAPS || (!CONSECUTIVE_TAPS && tap < CHUNK_TAPS);
        const int offset = CONSECUTIVE_TAPS ? tap_offset(8 * k + 4 * i) + 4 * t : exists[i] ? tap_offsets[tap] : 0;
        im2col[i] = ptx::keep_in_register(pixel_address + offset);
      }
      Rounded columns[N_TILES][2];
#pragma unroll
      for (int n = 0; n < N_TILES; ++n) {
        const int u = n / STORE;
        const int offset = u / UNITS_ACROSS * PIXEL_ROWS * ROW_PITCH + (u % UNITS_ACROSS * UNIT + n % STORE * 2) * PIXEL_PITCH;
#pragma unroll
        for (int i = 0; i < 2; ++i)
          columns[n][i] = rounded(exists[i] ? __uint_as_float(ptx::load_shared(im2col[i] + 4 * offset)) : 0.0f);
      }
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
        const float(&own)[4] = weight_fragments[WEIGHTS_IN_REGISTERS ? k : 0][m];
        const Factor a = WEIGHTS_IN_REGISTERS ? Factor(own[0], own[1], own[2], own[3]) : factor(chunk, k, m);
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
          if constexpr (PRECISION == ptx::IEEE) {
            float part[4];
            multiply<true>(part, a, columns[n][0], columns[n][1]);
            add(sum[m][n], part);
          } else {
            multiply<false>(sum[m][n], a, columns[n][0], columns[n][1]);
          }
        }
      }
    }
    __syncthreads();
    if (++chunk < chunks) continue;
    chunk = 0;

    const int ih0 = at.down * TILE_H;
    Out* const image = grad_input + ((long long)split * sizes.batch + at.image) * input_elements(sizes);
    at.advance(sizes);
    if constexpr (STAGED) {
#pragma unroll
      for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
          for (int i = 0; i < 2 * HALVES; ++i) {
            const int ci = warp_m * WARP_M + 16 * m + i / 2 * 8 + g, u = n / STORE;
            const int row = row0 + u / UNITS_ACROSS;
            const int column = column0 + u % UNITS_ACROSS * UNIT + 2 * STORE * t + n % STORE * 2 + i % 2;
            if (ci < CI_GROUP) stage[(row * TILE_W + column) * STAGE_PITCH + group * CI_GROUP + ci] = sum[m][n][i];
          }
      __syncthreads();
      constexpr int N = store_channels();
#pragma unroll 4
      for (unsigned v = threadIdx.x; v < TILE_H * TILE_W * (STAGE_CHANNELS / N); v += THREADS) {
        Digits digits{v};
        const int c = digits.next(STAGE_CHANNELS / N) * N;
        const float* const from = stage + digits.rest * STAGE_PITCH + c;
        const int iw = iw0 + digits.next(TILE_W), ih = ih0 + digits.rest;
        if (ih >= sizes.height || iw >= sizes.width) continue;
        float values[N];
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] = from[i];
        store<N, true>(image + at_input(sizes, 0, group0 * CI_GROUP + c, ih, iw), values, N);
      }
    } else if constexpr (CHANNELS_LAST) {
      constexpr int N = ADJACENT_CHANNELS ? LANE_CHANNELS : 1;
#pragma unroll
      for (int n = 0; n < N_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int u = n / STORE, ih = ih0 + row0 + u / UNITS_ACROSS;
          const int iw = iw0 + column0 + u % UNITS_ACROSS * UNIT + 2 * STORE * t + n % STORE * 2 + i;
          if (ih >= sizes.height || iw >= sizes.width) continue;
#pragma unroll
          for (int first = 0; first < LANE_CHANNELS; first += N) {
            const int ci = m0 + warp_m * WARP_M + (ADJACENT_CHANNELS ? N * g : 8 * first + g);
            float values[N];
#pragma unroll
            for (int c = 0; c < N; ++c) values[c] = sum[(first + c) / HALVES][n][(first + c) % HALVES * 2 + i];
            store<N, ADJACENT_CHANNELS>(image + at_input(sizes, 0, group0 * CI_GROUP + ci, ih, iw), values, CI_GROUP - ci);
          }
        }
    } else {
      constexpr int N = 2 * STORE;
#pragma unroll
      for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
          const int ci = m0 + warp_m * WARP_M + 16 * m + 8 * half + g;
          if (ci >= CI_GROUP) continue;
#pragma unroll
          for (int u = 0; u < UNITS; ++u) {
            const int ih = ih0 + row0 + u / UNITS_ACROSS, iw = iw0 + column0 + u % UNITS_ACROSS * UNIT + N * t;
            if (ih >= sizes.height) continue;
            float values[N];
#pragma unroll
            for (int i = 0; i < N; ++i) values[i] = sum[m][u * STORE + i / 2][half * 2 + i % 2];
            Out* const to = image + at_input(sizes, 0, (group0 + group) * CI_GROUP + ci, ih, iw);
            if (sizes.width % N == 0)
              store<N, true>(to, values, sizes.width - iw);
            else
              store<N, false>(to, values, sizes.width - iw);
          }
        }
    }
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int n = 0; n < N_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[m][n][i] = 0.0f;
  }
  if (SPLITS > 1) ptx::let_next_launch_start();
}
