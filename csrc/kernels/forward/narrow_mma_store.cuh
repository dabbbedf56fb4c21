// Stores the outputs of a tile of forward/narrow_mma.cu: collects them in shared memory as elements and stores whole lines; or
// with DIRECT stores them from registers, where a tile of M is contiguous in memory.
#pragma once

#include "common/epilogue.cuh"

constexpr int MAX_STORE = 16 / ITEM;  // elements of the widest store

// A line is contiguous in memory: the tile's pixels of an output row, of one channel (NCHW) or of all channels.
constexpr int STAGE_ROWS = TILE_H * PASS_ROWS;
constexpr int CHANNEL_LINES = CHANNELS_LAST ? 1 : OUT_CHANNELS;
constexpr int LINES = CHANNEL_LINES * STAGE_ROWS;
constexpr int POSITION = STRIDE_W * (CHANNELS_LAST ? OUT_CHANNELS : 1);
constexpr int LINE = TILE_W * POSITION;
/// Elements of an output row, of one channel or of all channels; a multiple of OUT_LINE_MULTIPLE.
__device__ __forceinline__ int out_line(const Sizes& sizes) { return sizes.out_width * (CHANNELS_LAST ? OUT_CHANNELS : 1); }
constexpr int OUT_LINE_MULTIPLE = OUT_ROW_MULTIPLE * (CHANNELS_LAST ? OUT_CHANNELS : 1);
// Four lanes write positions at a distance of two. Where these lie in the same banks, 16 bytes of padding separate positions.
constexpr int POSITION_PAD = CHANNELS_LAST && POSITION * ITEM % 64 == 0 ? MAX_STORE : 0;
constexpr int POSITION_PITCH = POSITION + POSITION_PAD;

/// Elements of one store.
constexpr int STORE = power_of_two_dividing(OUT_LINE_MULTIPLE, power_of_two_dividing(POSITION_PAD ? POSITION : LINE, MAX_STORE));
constexpr int STORES = LINE / STORE;

// The pitches of a line and of a channel; eight lanes write neighbouring channels to different banks.
constexpr int LINE_PITCH = round_up(TILE_W * POSITION_PITCH * ITEM, 16) / ITEM;
constexpr int CHANNEL_PITCH =
    CHANNELS_LAST ? STAGE_ROWS * LINE_PITCH : aligned_to(STAGE_ROWS * LINE_PITCH * ITEM / 4, 1, 32, 4) * 4 / ITEM;
constexpr int STAGE_BYTES = DIRECT ? 0 : CHANNEL_LINES * CHANNEL_PITCH * ITEM;

__device__ constexpr int lanes_of_line() {
  int lanes = 1;
  while (lanes < STORES && lanes < (LINES < WARPS ? THREADS : 32)) lanes *= 2;
  return lanes;
}
constexpr int LANES = lanes_of_line();

/// The offset of an output of the first position in the staged tile; those of position (h, w) lie h * ROW_STEP + w *
/// POSITION_STEP further.
__device__ __forceinline__ int staged_at(int row, int column, int channel) {
  return CHANNELS_LAST ? row * LINE_PITCH + column * OUT_CHANNELS + channel
                       : channel * CHANNEL_PITCH + row * LINE_PITCH + column;
}
constexpr int ROW_STEP = PASS_ROWS * LINE_PITCH;
constexpr int POSITION_STEP = CHANNELS_LAST ? POSITION_PITCH : STRIDE_W;
static_assert(!NEIGHBOURS || POSITION_PITCH % 2 == 0);

/// The tile that a block computes: its image, its first position, and the pass, which is a row of positions.
struct OutputTile {
  int image;
  int position_h, position_w, pass;

  /// The output row of row `row` of the staged tile.
  __device__ __forceinline__ int out_row(int row) const {
    return (position_h + row / PASS_ROWS) * STRIDE_H + pass + row % PASS_ROWS;
  }
  /// The offset of a line in its image.
  __device__ __forceinline__ int line_begin(const Sizes& sizes, int channel, int out_row) const {
    return (channel * sizes.out_height + out_row) * out_line(sizes) + position_w * POSITION;
  }
};

__device__ __forceinline__ Element element_of(float x) {
  if constexpr (IS_16_BIT) {
    return Element{static_cast<unsigned short>(ptx::pack_pair<PRECISION>(x, 0.f))};
  } else {
    return store_as<Element>(x);
  }
}

static_assert(!DIRECT || (NEIGHBOURS && !STACKED && GROUPS == 1 && ALL_COLUMNS));
static_assert(!DIRECT || CHANNELS_LAST || STRIDE_W % 16 == 0);

/// Stores from registers (DIRECT), where output rows are whole positions: a lane's neighbours m and m + 1 of M, in a position
/// and in those after it.
struct DirectStore {
  Element* output;        // the pass's row of the tile's first position
  int at, position_row;  // offset in a position; elements from a row of positions to the next
  Channel channels[2];
  const Epilogue& epilogue;

  __device__ __forceinline__ DirectStore(Element* output, const Epilogue& epilogue, const Sizes& sizes, const OutputTile& tile, int m)
      : output(output + tile.image * (static_cast<long long>(OUT_CHANNELS) * sizes.out_pixels())),
        position_row(STRIDE_H * out_line(sizes)), epilogue(epilogue) {
    const Place place = place_of(m, USED_COLUMNS), next = place_of(m + 1, USED_COLUMNS);
    this->output += static_cast<long long>(tile.position_h * STRIDE_H + tile.pass) * out_line(sizes) + tile.position_w * POSITION;
    at = CHANNELS_LAST ? m : place.channel * sizes.out_pixels() + place.column;
    channels[0] = load_channel(epilogue, place.channel, m < M), channels[1] = load_channel(epilogue, next.channel, m < M);
  }
  __device__ __forceinline__ void put(int position_h, int position_w, float low, float high) const {
    Element* const to = output + (at + position_h * position_row + position_w * POSITION);
    low = apply_epilogue(low, channels[0], epilogue), high = apply_epilogue(high, channels[1], epilogue);
    if constexpr (IS_16_BIT) {
      __stcs(reinterpret_cast<u32*>(to), ptx::pack_pair<PRECISION>(low, high));
    } else {
      __stcs(reinterpret_cast<float2*>(to), make_float2(low, high));
    }
  }
};

template <int COUNT>
struct alignas(COUNT * sizeof(Element)) Segment {
  Element of[COUNT];
};

/// Writes the epilogue of 0 to the whole staged tile. It remains in the pixels without taps, which no sum overwrites.
__device__ __forceinline__ void stage_zero_sums(Element* staged, const Epilogue& epilogue) {
  constexpr bool OF_CHANNEL = HAS_BIAS || NORMALIZES;
  constexpr int COUNT = !OF_CHANNEL || !CHANNELS_LAST ? MAX_STORE : power_of_two_dividing(OUT_CHANNELS, MAX_STORE);
  for (int i = threadIdx.x * COUNT; i < CHANNEL_LINES * CHANNEL_PITCH; i += THREADS * COUNT) {
    const int channel = CHANNELS_LAST ? i % LINE_PITCH % POSITION_PITCH % OUT_CHANNELS : i / CHANNEL_PITCH;
    Segment<COUNT> segment;
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      const int each = OF_CHANNEL && CHANNELS_LAST ? channel + k : channel;
      segment.of[k] = element_of(apply_epilogue(0.f, load_channel(epilogue, each), epilogue));
    }
    *reinterpret_cast<Segment<COUNT>*>(staged + i) = segment;
  }
}

template <int COUNT>
__device__ __forceinline__ void store_segment(Element* to, const Element* from) {
  constexpr int BYTES = COUNT * ITEM;
  if constexpr (BYTES == 16) {
    __stcs(reinterpret_cast<uint4*>(to), *reinterpret_cast<const uint4*>(from));
  } else if constexpr (BYTES == 8) {
    __stcs(reinterpret_cast<uint2*>(to), *reinterpret_cast<const uint2*>(from));
  } else if constexpr (BYTES == 4) {
    __stcs(reinterpret_cast<u32*>(to), *reinterpret_cast<const u32*>(from));
  } else {
    *to = *from;
  }
}

/// Stores the staged tile, with all threads.
__device__ __forceinline__ void store_tile(const Element* staged, Element* output, const Sizes& sizes, const OutputTile& tile) {
  output += tile.image * (static_cast<long long>(OUT_CHANNELS) * sizes.out_pixels());
  const int left = out_line(sizes) - tile.position_w * POSITION, length = left < LINE ? left : LINE;
  const int lane = threadIdx.x % LANES;
#pragma unroll 2
  for (int line = threadIdx.x / LANES; line < LINES; line += THREADS / LANES) {
    const int row = line % STAGE_ROWS, channel = line / STAGE_ROWS;
    const int out_row = tile.out_row(row);
    if (out_row >= sizes.out_height) continue;
    Element* const to = output + tile.line_begin(sizes, channel, out_row);
    const Element* const from = staged + channel * CHANNEL_PITCH + row * LINE_PITCH;
#pragma unroll(ceil_div(STORES, LANES) <= 16 ? ceil_div(STORES, LANES) : 4)
    for (int pass = 0; pass < ceil_div(STORES, LANES); ++pass) {
      const int i = (lane + pass * LANES) * STORE;
      if (i < length) store_segment<STORE>(to + i, from + (POSITION_PAD ? i + i / POSITION * POSITION_PAD : i));
    }
  }
}
