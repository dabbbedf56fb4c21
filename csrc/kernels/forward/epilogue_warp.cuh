// Stores the sums of one warp, without other warps: applies the epilogue, and stores segments that fill sectors of 32 bytes.
// channels_last: directly from registers; eight lanes hold 16 neighbouring channels of a pixel.
#pragma once

#include "forward/epilogue_nchw.cuh"
#include "forward/epilogue_place.cuh"

/// The first outputs of the positions of a SHAPED tile that a warp or warpgroup has, WARP_ROWS rows of 8. Of a dense tile each
/// lane computes those of a few pairs of neighbours, and gets the others' from other lanes: divisions in every unrolled store
/// would be most of the code. The plan ensures that the outputs of dense tiles have fewer than 2^31 pixels.
struct ShapedPlaces {
  static constexpr int PAIRS = ceil_div(WARP_ROWS * 4, 32);
  int pixel[PAIRS][2], edges[PAIRS][2];
  OutputPosition first;
  bool dense;
  int next_row;

  __device__ __forceinline__ explicit ShapedPlaces(const WarpPlace& at)
      : first(output_position(at, 0, 0, 0)), dense(is_dense(at.sizes)), next_row(POSITION_ROWS * at.sizes.out_width) {
    if (!dense) return;
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const OutputPosition position = output_position(at, 0, 0, (pair * 32 + threadIdx.x % 32) * 2 + e);
        pixel[pair][e] = static_cast<int>(position.pixel);
        edges[pair][e] = max_of(0, min_of(PHASE_ROWS, position.rows)) * 16 + max_of(0, min_of(PHASE_COLS, position.cols));
      }
  }

  /// The first output of position `2 * pair + e` of row `row`, with at least as many rows and columns to the edge as there are
  /// phases, unless it has fewer.
  __device__ __forceinline__ OutputPosition at(int row, int pair, int e) const {
    const int col = (2 * pair + e) * STRIDE_W;
    if (!dense) return {first.pixel + static_cast<long long>(row) * next_row + col, first.rows - row * POSITION_ROWS, first.cols - col};
    const int source = row * 4 + pair;
    int found = __shfl_sync(~0u, pixel[0][e], source), edge = __shfl_sync(~0u, edges[0][e], source);
    if constexpr (PAIRS > 1) {
      const int other = __shfl_sync(~0u, pixel[PAIRS - 1][e], source), other_edge = __shfl_sync(~0u, edges[PAIRS - 1][e], source);
      if (row >= 8) found = other, edge = other_edge;
    }
    return {found, edge / 16, edge % 16};
  }
};
static_assert(!SHAPED || (WARP_ROWS <= 16 && PHASE_ROWS < 16 && PHASE_COLS < 16));

__device__ __forceinline__ void store_channels_last(const Sums& sums, Out* output, const Epilogue& epilogue, const Channel (&channels_of)[2],
                                                    const WarpPlace& at) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  constexpr int VECTOR = PAIRED_ROWS ? power_of_two_dividing(CO_GROUP, 2) : 1;
  constexpr int NEXT_ROW = PAIRED_ROWS ? 1 : 8;
  const int channel = channel_of_row(0, g), channels = at.channels_left - channel;
  output += at.out_channel + channel;
  // Position 2t of the warp's first fragment. The distances to all others are constants, except with FLAT and SHAPED.
  const int first_row = 2 * t / FRAGMENT_W, first_col = 2 * t % FRAGMENT_W;
  const OutputPosition first = output_position(at, 0, first_row, first_col);
  const ShapedPlaces places(at);
  const int images = at.sizes.batch - at.origin.image - at.image;
  [[maybe_unused]] const int outputs_left = at.sizes.batch * at.sizes.out_pixels() - (at.origin.image + at.col + first_col);
  const int row_elements = at.sizes.out_width * OUT_CHANNELS;
  const long long image_elements = static_cast<long long>(at.sizes.out_height) * row_elements;
  Out* base = output + first.pixel * OUT_CHANNELS;
#pragma unroll
  for (int image = 0; image < WARP_IMAGES; ++image)
#pragma unroll
    for (int row = 0; row < WARP_ROWS; ++row)
#pragma unroll
      for (int col = 0; col < WARP_COLS; ++col)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          Out* to = base;
          int rows = first.rows, cols = first.cols, output_rows = 0, output_cols = 0;
          bool inside = image < images;
          if constexpr (CONTIGUOUS) {
            output_cols = col * FRAGMENT_W + e;
            inside = output_cols < outputs_left;
          } else if constexpr (FLAT || SHAPED) {
            const OutputPosition position = FLAT ? output_position(at, 0, 0, col * FRAGMENT_W + first_col + e) : places.at(row, t, e);
            to = output + position.pixel * OUT_CHANNELS;
            rows = position.rows, cols = position.cols;
            inside = rows > 0;
          } else {
            output_rows = row * FRAGMENT_H * POSITION_ROWS;
            output_cols = (col * FRAGMENT_W + e) * STRIDE_W;
          }
#pragma unroll
          for (int a = 0; a < PHASE_ROWS; ++a)
#pragma unroll
            for (int b = 0; b < PHASE_COLS; ++b) {
              const float(&sum)[4] = sums.at(a * PHASE_COLS + b, 0, image, col, row);
              const float segment[2] = {stored(sum[e], channels_of[0], epilogue), stored(sum[2 + e], channels_of[1], epilogue)};
              const long long distance =
                  image * image_elements + static_cast<long long>(output_rows + a) * row_elements + (output_cols + b) * OUT_CHANNELS;
              if (inside && (FLAT || (output_rows + a < rows && output_cols + b < cols))) {
#pragma unroll
                for (int i = 0; i < 2; i += VECTOR)
                  if (i * NEXT_ROW < channels) write_vector<VECTOR>(to + distance + i * NEXT_ROW, segment + i);
              }
            }
        }
}

/// Stores the sums of a warp. `warp_row` is the warp's first row of the block's multiply; `staged` is shared memory of the
/// warp's own.
__device__ __forceinline__ void store_warp(const Sums& sums, Out* output, const Epilogue& epilogue, Out* staged, const Origin& origin,
                                           int group, int first_channel, int warp_row, int image, int row, int col,
                                           int phase_row, int phase_col, const TileSizes& sizes) {
  const int g = threadIdx.x % 32 / 4;
  first_channel += warp_row % BLOCK_CHANNELS;
  const WarpPlace at{origin, image, row, col, STACK > 1 ? warp_row / BLOCK_CHANNELS : 0, phase_row, phase_col,
                     group * CO_GROUP + first_channel, CO_GROUP - first_channel, sizes};
  Channel channels[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int channel = channel_of_row(0, g + half * 8);
    channels[half] = load_channel(epilogue, at.out_channel + channel, !PARTIAL && channel < at.channels_left);
  }
  if constexpr (OUTPUT_CHANNELS_LAST) {
    store_channels_last(sums, output, epilogue, channels, at);
  } else {
    store_nchw(sums, output, epilogue, channels, at, staged);
  }
}
