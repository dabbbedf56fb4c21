// Sums to output by way of shared memory, so that whole runs of a row (NCHW) or of channels (channels_last) leave
// together: short runs written straight from the fragments cost up to half of a forward pass.
#pragma once

/// Outputs of one row of the tile that this block computes, and rows of all images of the tile.
constexpr int STAGED_ROW = TILE_W * PHASE_COLS;
constexpr int STAGED_ROWS = TILE_N * TILE_H * PHASE_ROWS;
constexpr int STAGED_PIXELS = STAGED_ROWS * STAGED_ROW;

// Pitches, in Out: of a channel [channel][pixel] in NCHW, of a pixel [pixel][channel] in channels_last. Chosen for
// the banks that the lanes of a warp write: 8 channels (g) of 4 neighbouring runs (t), or 8 runs of 4 pixels.
constexpr int OUT_PER_WORD = 4 / sizeof(Out);
constexpr int LANE_RUN_WORDS = least(4, 2 * PHASE_COLS / OUT_PER_WORD);
constexpr int CHANNEL_PITCH = aligned_to(STAGED_PIXELS / OUT_PER_WORD, 4, 32, 4 * LANE_RUN_WORDS % 32) * OUT_PER_WORD;
constexpr int STAGED_PIXEL_PITCH = aligned_to(BLOCK_M / OUT_PER_WORD, 4, 16, 4) * OUT_PER_WORD;
constexpr int STAGED_BYTES =
    (OUTPUT_CHANNELS_LAST ? STAGED_PIXELS * STAGED_PIXEL_PITCH : BLOCK_M * CHANNEL_PITCH) * static_cast<int>(sizeof(Out));

/// COUNT neighbouring Out values to an address aligned to them all, at most 16 bytes.
template <int COUNT>
__device__ __forceinline__ void stage_vector(Out* to, const float* v) {
  if constexpr (OUT_16_BIT && COUNT == 1) {
    *to = store_as<Out>(v[0]);
  } else {
    u32 words[COUNT / OUT_PER_WORD];
#pragma unroll
    for (int i = 0; i < COUNT / OUT_PER_WORD; ++i)
      words[i] = OUT_16_BIT ? ptx::pack_pair<PRECISION>(v[2 * i], v[(2 * i + 1) % COUNT]) : __float_as_uint(v[i]);
    if constexpr (COUNT / OUT_PER_WORD == 4) {
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    } else if constexpr (COUNT / OUT_PER_WORD == 2) {
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    } else {
      *reinterpret_cast<u32*>(to) = words[0];
    }
  }
}

/// One warp's sums. `bias`: of the group; `first_channel`: of the block, in the group; `warp_channel`: of the warp,
/// in the block; `n, h, w`: its first cell in the tile.
__device__ __forceinline__ void stage_sums(const Sums& sums, Out* staged, const Element* bias, int first_channel,
                                           int warp_channel, int n, int h, int w) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float biases[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int channel = first_channel + (warp_channel + channel_of_row(0, g + half * 8)) % BLOCK_CHANNELS;
    biases[half] = HAS_BIAS && SPLITS == 1 && channel < CO_GROUP ? load_as(bias[channel]) : 0.f;
  }
#pragma unroll
  for (int image = 0; image < WARP_IMAGES; ++image)
#pragma unroll
    for (int row = 0; row < WARP_ROWS; ++row)
#pragma unroll
      for (int col = 0; col < WARP_COLS; ++col)
#pragma unroll
        for (int a = 0; a < PHASE_ROWS; ++a) {
          const int cell_row = h + row * FRAGMENT_H + 2 * t / FRAGMENT_W, cell_col = w + col * FRAGMENT_W + 2 * t % FRAGMENT_W;
          const int out_row = ((n + image) * TILE_H + cell_row) * PHASE_ROWS + a, out_col = cell_col * PHASE_COLS;
          const int pixel = out_row * STAGED_ROW + out_col;
          if constexpr (OUTPUT_CHANNELS_LAST) {
#pragma unroll
            for (int e = 0; e < 2; ++e)
#pragma unroll
              for (int b = 0; b < PHASE_COLS; ++b) {
                const float(&sum)[4] = sums.at(a * PHASE_COLS + b, 0, image, col, row);
                const float run[2] = {HAS_BIAS ? sum[e] + biases[0] : sum[e], HAS_BIAS ? sum[2 + e] + biases[1] : sum[2 + e]};
                stage_vector<2>(staged + (pixel + e * PHASE_COLS + b) * STAGED_PIXEL_PITCH + warp_channel + 2 * g, run);
              }
          } else {
            constexpr int RUN = 2 * PHASE_COLS;
            constexpr int VECTOR = power_dividing(RUN, STORE_MOST);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              float run[RUN];
#pragma unroll
              for (int r = 0; r < RUN; ++r) {
                const float sum = sums.at(a * PHASE_COLS + r % PHASE_COLS, 0, image, col, row)[half * 2 + r / PHASE_COLS];
                run[r] = HAS_BIAS ? sum + biases[half] : sum;
              }
#pragma unroll
              for (int r = 0; r < RUN; r += VECTOR)
                stage_vector<VECTOR>(staged + (warp_channel + g + half * 8) * CHANNEL_PITCH + pixel + r, run + r);
            }
          }
        }
}

/// Outputs of one store: neighbouring channels of a pixel, or neighbouring pixels of a row of one channel.
constexpr int STORE_ROW = PHASE_COLS == STRIDE_W ? power_dividing(STAGED_ROW, STORE_MOST)
                                                 : power_dividing(STRIDE_W, power_dividing(PHASE_COLS, STORE_MOST));
constexpr int STORE = OUTPUT_CHANNELS_LAST ? power_dividing(CO_GROUP, power_dividing(BLOCK_CHANNELS, STORE_MOST))
                                           : power_dividing(OUT_WIDTH, STORE_ROW);
constexpr int STORES = BLOCK_M * STAGED_PIXELS / STORE;
constexpr long long OUT_PIXELS = static_cast<long long>(OUT_HEIGHT) * OUT_WIDTH;

/// Where the i-th store of the tile reads and writes, relative to the tile's first output.
struct StorePlace {
  int from, image, row, col, channel;
  long long to;

  __device__ constexpr explicit StorePlace(int i) : from(0), image(0), row(0), col(0), channel(0), to(0) {
    constexpr int PIXEL_STORES = OUTPUT_CHANNELS_LAST ? BLOCK_M / STORE : 1;
    constexpr int ROW_STORES = OUTPUT_CHANNELS_LAST ? PIXEL_STORES * STAGED_ROW : STAGED_ROW / STORE;
    const int line = i / ROW_STORES;
    const int staged_row = OUTPUT_CHANNELS_LAST ? line : line % STAGED_ROWS;
    const int m = OUTPUT_CHANNELS_LAST ? i % PIXEL_STORES * STORE : line / STAGED_ROWS;
    const int x = OUTPUT_CHANNELS_LAST ? i / PIXEL_STORES % STAGED_ROW : i % ROW_STORES * STORE;
    from = OUTPUT_CHANNELS_LAST ? (staged_row * STAGED_ROW + x) * STAGED_PIXEL_PITCH + m
                                : m * CHANNEL_PITCH + staged_row * STAGED_ROW + x;
    image = staged_row / (TILE_H * PHASE_ROWS);
    row = staged_row / PHASE_ROWS % TILE_H * CELL_ROWS + (STACK > 1 ? m / BLOCK_CHANNELS : staged_row % PHASE_ROWS);
    col = x / PHASE_COLS * STRIDE_W + x % PHASE_COLS;
    channel = m % BLOCK_CHANNELS;
    const long long pixel = static_cast<long long>(row) * OUT_WIDTH + col;
    to = OUTPUT_CHANNELS_LAST ? (image * OUT_PIXELS + pixel) * OUT_CHANNELS + channel
                              : (static_cast<long long>(image) * OUT_CHANNELS + channel) * OUT_PIXELS + pixel;
  }
};

__device__ constexpr bool is_power(int n) { return (n & (n - 1)) == 0; }
/// With powers of two throughout, the place of store thread + pass * THREADS is the sum of two places, of which one
/// is a constant.
constexpr bool PLACES_ADD = is_power(PHASE_ROWS) && is_power(PHASE_COLS) && STORES % THREADS == 0 && is_power(THREADS);

template <int COUNT>
__device__ __forceinline__ void copy_vector(Out* to, const Out* from) {
  constexpr int BYTES = COUNT * static_cast<int>(sizeof(Out));
  if constexpr (BYTES == 16) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
  } else if constexpr (BYTES == 8) {
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from);
  } else if constexpr (BYTES == 4) {
    *reinterpret_cast<u32*>(to) = *reinterpret_cast<const u32*>(from);
  } else {
    *to = *from;
  }
}

/// With FLAT, a cell's place follows from divisions; in NCHW a thread meets the same column every FLAT_PERIOD stores.
constexpr int FLAT_PERIOD = OUTPUT_CHANNELS_LAST ? 1 << 30 : STAGED_ROW / STORE;
__device__ __forceinline__ long long flat_offset(const Cell& cell, const StorePlace& place, int phase_row, int phase_col) {
  const long long pixel = (static_cast<long long>(cell.row) * CELL_ROWS + phase_row + place.row) * OUT_WIDTH +
                          cell.col * STRIDE_W + phase_col + place.col % STRIDE_W;
  return OUTPUT_CHANNELS_LAST
             ? (cell.image * OUT_PIXELS + pixel) * OUT_CHANNELS + place.channel
             : (static_cast<long long>(cell.image) * OUT_CHANNELS + place.channel) * OUT_PIXELS + pixel;
}

/// The whole tile, by all threads of the block.
__device__ __forceinline__ void store_staged(const Out* staged, Out* output, const Origin& origin, int group,
                                             int first_channel, int phase_row, int phase_col, int batch) {
  constexpr int PASSES = ceil_div(STORES, THREADS);
  const int out_channel = group * CO_GROUP + first_channel, channels_left = CO_GROUP - first_channel;
  if constexpr (FLAT && PLACES_ADD && THREADS % FLAT_PERIOD == 0) {
    // All stores of a thread lie in the same cell.
    const StorePlace mine(threadIdx.x);
    const Cell cell = cell_at(origin, 0, 0, mine.col / STRIDE_W, batch);
    output += out_channel * OUT_PIXELS + flat_offset(cell, mine, phase_row, phase_col);
    const int channels = cell.inside ? channels_left - mine.channel : 0;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      const StorePlace place(pass * THREADS);
      if (place.channel < channels) copy_vector<STORE>(output + place.to, staged + mine.from + place.from);
    }
  } else if constexpr (FLAT) {
    output += out_channel * (OUTPUT_CHANNELS_LAST ? 1 : OUT_PIXELS);
    // Rows of a cell innermost: they share the search for its place.
    constexpr int ROW_PASSES = OUTPUT_CHANNELS_LAST && STORES / STAGED_ROWS % THREADS == 0 ? STAGED_ROWS : 1;
#pragma unroll 2
    for (int pass = 0; pass < PASSES / ROW_PASSES; ++pass) {
      const int i = pass * THREADS + threadIdx.x;
      const StorePlace place(i);
      const Cell cell = cell_at(origin, 0, 0, place.col / STRIDE_W, batch);
      Out* to = output + flat_offset(cell, place, phase_row, phase_col);
#pragma unroll
      for (int row = 0; row < ROW_PASSES; ++row)
        if ((STORES % THREADS == 0 || i < STORES) && cell.inside && place.channel < channels_left)
          copy_vector<STORE>(to + row * (OUT_WIDTH * OUT_CHANNELS), staged + place.from + row * (STAGED_ROW * STAGED_PIXEL_PITCH));
    }
  } else {
    const int first_row = origin.row * CELL_ROWS + phase_row, first_col = origin.col * STRIDE_W + phase_col;
    const long long first_pixel = static_cast<long long>(first_row) * OUT_WIDTH + first_col;
    output += OUTPUT_CHANNELS_LAST ? (origin.image * OUT_PIXELS + first_pixel) * OUT_CHANNELS + out_channel
                                   : (static_cast<long long>(origin.image) * OUT_CHANNELS + out_channel) * OUT_PIXELS + first_pixel;
    const int images_left = batch - origin.image, rows_left = OUT_HEIGHT - first_row, cols_left = OUT_WIDTH - first_col;
    const StorePlace mine(threadIdx.x);
#pragma unroll(PLACES_ADD ? PASSES : 4)
    for (int pass = 0; pass < PASSES; ++pass) {
      const int i = pass * THREADS + (PLACES_ADD ? 0 : threadIdx.x);
      const StorePlace place(i);
      const bool inside = place.image < images_left - (PLACES_ADD ? mine.image : 0) &&
                          place.row < rows_left - (PLACES_ADD ? mine.row : 0) &&
                          place.col < cols_left - (PLACES_ADD ? mine.col : 0) &&
                          place.channel < channels_left - (PLACES_ADD ? mine.channel : 0);
      if (inside && (PLACES_ADD || STORES % THREADS == 0 || i < STORES))
        copy_vector<STORE>(output + place.to + (PLACES_ADD ? mine.to : 0), staged + place.from + (PLACES_ADD ? mine.from : 0));
    }
  }
}
