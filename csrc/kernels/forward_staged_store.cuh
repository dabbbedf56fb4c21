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
          const int out_row = ((n + image) * TILE_H + h + row) * PHASE_ROWS + a;
          const int out_col = (w + col * 8 + 2 * t) * PHASE_COLS;
          const int pixel = out_row * STAGED_ROW + out_col;
          if constexpr (OUTPUT_CHANNELS_LAST) {
#pragma unroll
            for (int e = 0; e < 2; ++e)
#pragma unroll
              for (int b = 0; b < PHASE_COLS; ++b) {
                const float(&sum)[4] = sums.at[a * PHASE_COLS + b][0][image][col][row];
                const float run[2] = {sum[e] + biases[0], sum[2 + e] + biases[1]};
                stage_vector<2>(staged + (pixel + e * PHASE_COLS + b) * STAGED_PIXEL_PITCH + warp_channel + 2 * g, run);
              }
          } else {
            constexpr int RUN = 2 * PHASE_COLS;
            constexpr int VECTOR = power_dividing(RUN, STORE_MOST);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              float run[RUN];
#pragma unroll
              for (int r = 0; r < RUN; ++r)
                run[r] = sums.at[a * PHASE_COLS + r % PHASE_COLS][0][image][col][row][half * 2 + r / PHASE_COLS] + biases[half];
#pragma unroll
              for (int r = 0; r < RUN; r += VECTOR)
                stage_vector<VECTOR>(staged + (warp_channel + g + half * 8) * CHANNEL_PITCH + pixel + r, run + r);
            }
          }
        }
}

/// The whole tile, by all threads of the block.
__device__ __forceinline__ void store_staged(const Out* staged, Out* output, const Origin& origin, int group,
                                             int first_channel, int phase_row, int phase_col, int batch) {
  // Outputs of one store: neighbouring channels of a pixel, or neighbouring pixels of a row of one channel.
  constexpr int ROW_VECTOR = PHASE_COLS == STRIDE_W ? power_dividing(STAGED_ROW, STORE_MOST)
                                                    : power_dividing(STRIDE_W, power_dividing(PHASE_COLS, STORE_MOST));
  constexpr int VECTOR = OUTPUT_CHANNELS_LAST ? power_dividing(CO_GROUP, power_dividing(BLOCK_CHANNELS, STORE_MOST)) : power_dividing(OUT_WIDTH, ROW_VECTOR);
  constexpr unsigned VECTORS = BLOCK_M * STAGED_PIXELS / VECTOR;
  constexpr long long PIXELS_OUT = static_cast<long long>(OUT_HEIGHT) * OUT_WIDTH;
  // The tile's first output; what a pass adds to it is mostly constant, and unrolling lets the compiler see that.
  const int first_row = origin.row * CELL_ROWS + phase_row, first_col = origin.col * STRIDE_W + phase_col;
  const int first_out_channel = group * CO_GROUP + first_channel;
  const long long first_pixel = static_cast<long long>(first_row) * OUT_WIDTH + first_col;
  output += FLAT                   ? first_out_channel * (OUTPUT_CHANNELS_LAST ? 1 : PIXELS_OUT)
            : OUTPUT_CHANNELS_LAST ? (origin.image * PIXELS_OUT + first_pixel) * OUT_CHANNELS + first_out_channel
                                   : (static_cast<long long>(origin.image) * OUT_CHANNELS + first_out_channel) * PIXELS_OUT + first_pixel;
  const unsigned thread = threadIdx.x;
  __builtin_assume(thread < THREADS);
#pragma unroll(FLAT ? 4 : 32)
  for (unsigned pass = 0; pass < (VECTORS + THREADS - 1) / THREADS; ++pass) {
    const unsigned i = pass * THREADS + thread;
    if (VECTORS % THREADS != 0 && i >= VECTORS) break;
    unsigned channel, x, row;
    if constexpr (OUTPUT_CHANNELS_LAST) {
      channel = i % (BLOCK_M / VECTOR) * VECTOR;
      x = i / (BLOCK_M / VECTOR) % STAGED_ROW;
      row = i / (BLOCK_M / VECTOR * STAGED_ROW);
    } else {
      x = i % (STAGED_ROW / VECTOR) * VECTOR;
      row = i / (STAGED_ROW / VECTOR) % STAGED_ROWS;
      channel = i / (STAGED_ROW / VECTOR * STAGED_ROWS);
    }
    // Where in the tile the cell lies, and the output in the cell.
    int image = row / (TILE_H * PHASE_ROWS);
    int out_row = row / PHASE_ROWS % TILE_H * CELL_ROWS + (STACK > 1 ? channel / BLOCK_CHANNELS : row % PHASE_ROWS);
    int out_col = x / PHASE_COLS * STRIDE_W + x % PHASE_COLS;
    bool inside = first_channel + static_cast<int>(channel % BLOCK_CHANNELS) < CO_GROUP;
    if constexpr (FLAT) {
      const Cell cell = cell_at(origin, 0, 0, x / PHASE_COLS, batch);
      image = cell.image;
      out_row += cell.row * CELL_ROWS + phase_row;
      out_col = cell.col * STRIDE_W + phase_col + x % PHASE_COLS;
      inside = inside && cell.inside;
    } else {
      inside = inside && origin.image + image < batch && first_row + out_row < OUT_HEIGHT && first_col + out_col < OUT_WIDTH;
    }
    if (!inside) continue;
    const long long pixel = static_cast<long long>(out_row) * OUT_WIDTH + out_col;
    const int out_channel = channel % BLOCK_CHANNELS;
    Out* to = output + (OUTPUT_CHANNELS_LAST ? (image * PIXELS_OUT + pixel) * OUT_CHANNELS + out_channel
                                             : (static_cast<long long>(image) * OUT_CHANNELS + out_channel) * PIXELS_OUT + pixel);
    const Out* from = staged + (OUTPUT_CHANNELS_LAST ? (row * STAGED_ROW + x) * STAGED_PIXEL_PITCH + channel
                                                     : channel * CHANNEL_PITCH + row * STAGED_ROW + x);
    constexpr int BYTES = VECTOR * static_cast<int>(sizeof(Out));
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
}
