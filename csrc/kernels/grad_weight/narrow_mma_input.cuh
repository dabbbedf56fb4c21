// The input of grad_weight/narrow_mma.cu on its way from memory to the tensor cores: a warp takes units of 16 pixels
// of a row. Of each m tile a lane holds rows g and g + 8 and four pixels q: its k = t (q even) or t + 4 (q odd) in
// step q / 2. Units are prefetched DEPTH ahead, and kept as they were loaded until they are used.
#pragma once
#include "gradients/grad_output_tile.cuh"

constexpr int BLOCK_M = WARPS_M * M_TILES * 16;  // input channels of a block, of one group
/// In channels_last, where there are more than 8 channels, rows g and g + 8 of every m tile of a lane are neighbouring
/// channels, loaded at once.
constexpr bool NEIGHBOURS = CHANNELS_LAST && BLOCK_GROUPS == 1 && HALVES == 2;
constexpr int LANE_CHANNELS = NEIGHBOURS ? 2 * M_TILES : 1;
constexpr bool RAGGED_M = CI_GROUP % BLOCK_M != 0;
constexpr Index PIXEL_STEP = CHANNELS_LAST ? IN_CHANNELS : 1;  // elements of the input from a pixel to the next

/// The pixel of a unit that lane t has for q.
__device__ __forceinline__ constexpr int pixel_of(int q, int t) {
  return q / INPUT_VECTOR * (4 * INPUT_VECTOR) + INPUT_VECTOR * t + q % INPUT_VECTOR;
}

constexpr int input_load() {
  if (!NEIGHBOURS) return CHANNELS_LAST ? 1 : INPUT_VECTOR;
  if (IN_CHANNELS % LANE_CHANNELS != 0 || CI_GROUP % LANE_CHANNELS != 0) return 1;
  return gcd(LANE_CHANNELS, 16 / sizeof(Element));  // a lane's channels may be six
}
constexpr int INPUT_LOAD = input_load();  // elements of one load: pixels, or channels where NEIGHBOURS
constexpr int LOAD_BYTES = INPUT_LOAD * sizeof(Element), LOAD_WORDS = ceil_div(LOAD_BYTES, 4);

struct InputUnit {
  static constexpr int COUNT = M_TILES * HALVES * 4 / INPUT_LOAD;
  u32 words[COUNT][LOAD_WORDS];

  // `from`: the lane's first pixel and channel; `channel_step`: elements to the next channel. Loads zeros where the row, column
  // or channel does not exist.
  __device__ __forceinline__ void fetch(const Element* from, Index channel_step, bool row_inside, int columns, int channels) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int first = i * INPUT_LOAD;
      const int q = NEIGHBOURS ? first / LANE_CHANNELS : first % 4;
      const int channel = NEIGHBOURS ? first % LANE_CHANNELS : first / 4 / HALVES * 16 + first / 4 % HALVES * 8;
#pragma unroll
      for (int w = 0; w < LOAD_WORDS; ++w) words[i][w] = 0;
      if (row_inside && pixel_of(q, 0) < columns && (!RAGGED_M || channel < channels))
        ptx::load_global<LOAD_BYTES>(words[i], from + (pixel_of(q, 0) * PIXEL_STEP + channel * channel_step));
    }
  }
  __device__ __forceinline__ float value(int m, int half, int q) const {
    if (half >= HALVES) return 0.0f;
    const int at = NEIGHBOURS ? q * LANE_CHANNELS + 2 * m + half : (m * HALVES + half) * 4 + q;
    const int i = at % INPUT_LOAD;
    if constexpr (sizeof(Element) == 4) {
      return __uint_as_float(words[at / INPUT_LOAD][i]);
    } else {
      const u32 pair = words[at / INPUT_LOAD][i / 2];
      return load_as(Element{(unsigned short)(i % 2 ? pair >> 16 : pair)});
    }
  }
};
