// Stores the sums of one warp, without other warps: applies the epilogue, and stores segments that fill sectors of 32 bytes.
//
// channels_last: directly from registers; eight lanes hold 16 neighbouring channels of a pixel. NCHW: through shared memory of
// the warp's own, a subtile of its positions and channels at a time, so that segments of rows are stored at once.
//
// BY_ROWS (NCHW): a subtile is whole rows of positions, and each store fills whole sectors of memory, wherever rows begin.
#pragma once

// ---- a subtile: SUBTILE_COLS fragments of SUBTILE_LINES lines of SUBTILE_CHANNELS channels (8 or 16); a line is a row of
// fragments of one image

constexpr int OUT_PER_WORD = 4 / sizeof(Out);
__device__ constexpr int power_below(int n) { return n < 2 ? 1 : 2 * power_below(n / 2); }
constexpr int SUBTILE_FRAGMENTS = power_below(SUBTILE_BYTES / (SUBTILE_CHANNELS * 8 * PHASES * static_cast<int>(sizeof(Out))));
constexpr int LINES = WARP_IMAGES * WARP_ROWS;
constexpr int SUBTILE_COLS = WARP_COLS <= SUBTILE_FRAGMENTS ? WARP_COLS : power_of_two_dividing(WARP_COLS, SUBTILE_FRAGMENTS);
constexpr int SUBTILE_LINES = power_of_two_dividing(LINES, power_below(SUBTILE_FRAGMENTS / SUBTILE_COLS));

/// Outputs of one row of a subtile, and its rows.
constexpr int SUBTILE_ROW = SUBTILE_COLS * FRAGMENT_W * PHASE_COLS;
constexpr int SUBTILE_ROWS = SUBTILE_LINES * FRAGMENT_H * PHASE_ROWS;
constexpr int SUBTILE_PIXELS = SUBTILE_ROW * SUBTILE_ROWS;

// The pitch of a channel of [channel][pixel], in elements, with which the lanes of a warp write to different banks: 8 channels
// (g) of 4 neighbouring segments (t).
constexpr int LANE_SEGMENT_WORDS = min_of(4, 2 * PHASE_COLS / OUT_PER_WORD);
constexpr int CHANNEL_PITCH = aligned_to(ceil_div(SUBTILE_PIXELS, OUT_PER_WORD), 4, 32, 4 * LANE_SEGMENT_WORDS % 32) * OUT_PER_WORD;
constexpr int STAGED_BYTES = OUTPUT_CHANNELS_LAST ? 0 : SUBTILE_CHANNELS * CHANNEL_PITCH * static_cast<int>(sizeof(Out));

/// Writes COUNT neighbouring outputs to an address that is aligned to them all, at most 16 bytes.
template <int COUNT>
__device__ __forceinline__ void write_vector(Out* to, const float* v) {
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

/// Copies COUNT neighbouring outputs between addresses that are aligned to them all, at most 16 bytes.
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

/// The outputs to which the sums of one warp belong.
struct WarpPlace {
  Origin origin;                 // of the block's tile
  int image, row, col;           // first position of the warp in the tile
  int stack_row;                 // with STACK, the row of a position to which the warp's channels belong
  int phase_row, phase_col;      // first phase of the block
  int out_channel;               // first channel of the warp, of all channels
  int channels_left;             // channels of the group from there on
  const TileSizes& sizes;
};

/// The first output of a position, and whether it exists.
struct OutputPosition {
  long long pixel;  // counted over all images
  int rows, cols;   // rows and columns of the output from there to the edge; none where the position does not exist
};

/// The position at distance (image, row, col) from the warp's first.
__device__ __forceinline__ OutputPosition output_position(const WarpPlace& at, int image, int row, int col) {
  const Position position = position_at(at.origin, at.image + image, at.row + row, at.col + col, at.sizes);
  const int out_row = position.row * POSITION_ROWS + at.stack_row + at.phase_row, out_col = position.col * STRIDE_W + at.phase_col;
  return {static_cast<long long>(position.image) * at.sizes.out_pixels() + static_cast<long long>(out_row) * at.sizes.out_width + out_col,
          position.image < at.sizes.batch ? at.sizes.out_height - out_row : 0, at.sizes.out_width - out_col};
}

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

/// Whether the outputs of neighbouring positions of a FLAT map are neighbours, too.
constexpr bool CONTIGUOUS = FLAT && POSITION_ROWS == 1 && STRIDE_W == 1;
/// The most outputs of a store with CONTIGUOUS where the pixels of an image are only known to be a multiple of this number.
constexpr int STORE_CONTIGUOUS = min_of(4, MAX_STORE);

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

/// The most outputs of one store, which are neighbouring pixels of a row of one channel; and the outputs of one store that are
/// right for every width.
constexpr int STORE_ROW = PHASE_COLS == STRIDE_W ? power_of_two_dividing(SUBTILE_ROW, MAX_STORE)
                                                 : power_of_two_dividing(STRIDE_W, power_of_two_dividing(PHASE_COLS, MAX_STORE));
constexpr int STORE_ANY = power_of_two_dividing(OUT_ROW_MULTIPLE, STORE_ROW);

__device__ constexpr bool is_power(int n) { return (n & (n - 1)) == 0; }
/// Where store i of a subtile reads and writes: channel, line, row within the positions of the line, column.
template <int STORE>
struct StorePlace {
  static constexpr int CHANNEL_STORES = SUBTILE_PIXELS / STORE;
  static constexpr int STORES = SUBTILE_CHANNELS * CHANNEL_STORES;
  /// If all numbers are powers of two, the place of store lane + pass * 32 is the sum of two places, one of which is a
  /// constant.
  static constexpr bool ADD = is_power(PHASE_ROWS) && is_power(SUBTILE_ROW) && STORES % 32 == 0;

  int from, channel, line, row, col;

  __device__ constexpr explicit StorePlace(int i) : from(0), channel(i / CHANNEL_STORES), line(0), row(0), col(0) {
    const int subtile_row = i % CHANNEL_STORES / (SUBTILE_ROW / STORE), x = i % (SUBTILE_ROW / STORE) * STORE;
    from = channel * CHANNEL_PITCH + subtile_row * SUBTILE_ROW + x;
    line = subtile_row / (FRAGMENT_H * PHASE_ROWS);
    row = subtile_row / PHASE_ROWS % FRAGMENT_H * POSITION_ROWS + subtile_row % PHASE_ROWS;
    col = x / PHASE_COLS * STRIDE_W + x % PHASE_COLS;
  }
};

/// Whether the warp stores long rows of any length and alignment one after another. Its stores then begin where sectors of
/// memory begin.
template <int STORE>
constexpr bool ROW_BY_ROW = BY_ROWS && !FLAT && FRAGMENT_W == 8 && PHASE_COLS == STRIDE_W && (STORE == 1 || !StorePlace<STORE>::ADD);
constexpr int SECTOR = 32 / static_cast<int>(sizeof(Out));

/// Stores a subtile row by row. `to` is the first output of the first channel; `rows` and `cols` are those of the output from
/// there to the edge.
template <int STORE>
__device__ __forceinline__ void store_rows(const Out* staged, Out* to, int channels, int images, int rows, int cols, const TileSizes& sizes) {
  constexpr int ROW_PASSES = ceil_div(SUBTILE_ROW + SECTOR - STORE, 32 * STORE);
  const int lane = threadIdx.x % 32;
  cols = min_of(SUBTILE_ROW, cols);
#pragma unroll 1
  for (int channel = 0; channel < min_of(SUBTILE_CHANNELS, channels); ++channel, to += sizes.out_pixels(), staged += CHANNEL_PITCH)
#pragma unroll
    for (int row = 0; row < SUBTILE_ROWS; ++row) {
      const int line = row / PHASE_ROWS, out_row = line % WARP_ROWS * POSITION_ROWS + row % PHASE_ROWS, image = line / WARP_ROWS;
      if (out_row >= rows || image >= images) continue;
      Out* start = to + image * static_cast<long long>(OUT_CHANNELS) * sizes.out_pixels() + static_cast<long long>(out_row) * sizes.out_width;
      const int early = static_cast<int>(reinterpret_cast<unsigned long long>(start) / sizeof(Out) % SECTOR);
#pragma unroll
      for (int pass = 0; pass < ROW_PASSES; ++pass) {
        const int x = (pass * 32 + lane) * STORE - early;
        if (x >= 0 && x < cols) copy_vector<STORE>(start + x, staged + row * SUBTILE_ROW + x);
      }
    }
}

/// Whether a subtile is whole rows of positions of consecutive maps, so that its outputs of each channel are contiguous. The
/// plan ensures that rows have an even number of positions, and that a warp has whole rows.
constexpr bool WHOLE_ROWS = BY_ROWS && FLAT && SUBTILE_COLS == WARP_COLS && PHASE_ROWS == POSITION_ROWS && PHASE_COLS == STRIDE_W;

/// The offset, in a subtile's channel, of the outputs of a position's phase row `a`.
__device__ __forceinline__ int in_whole_rows(int position, int a, const TileSizes& sizes) {
  const int row = sizes.row_positions.quotient(position);
  return (row * PHASE_ROWS + a) * sizes.out_width + sizes.row_positions.remainder(position, row) * PHASE_COLS;
}

/// Stores a subtile of whole rows. `to` is the first output of image 0 of the first channel; `first_row` is the first row of
/// positions, counted over all images.
__device__ __forceinline__ void store_whole_rows(const Out* staged, Out* to, int channels, int first_row, const TileSizes& sizes) {
  constexpr int SEGMENT = power_of_two_dividing(2 * PHASE_ROWS * PHASE_COLS, MAX_STORE), SEGMENTS = SUBTILE_PIXELS / SEGMENT;
  const int lane = threadIdx.x % 32, rows = sizes.batch * sizes.positions_h - first_row;
#pragma unroll
  for (int pass = 0; pass < ceil_div(SUBTILE_CHANNELS * SEGMENTS, 32); ++pass) {
    const int i = pass * 32 + lane, channel = i / SEGMENTS, output = i % SEGMENTS * SEGMENT;
    // A row of positions has PHASE_ROWS rows of outputs.
    const int row = sizes.row_positions.quotient(output / (PHASE_ROWS * PHASE_COLS));
    const int image = sizes.image_positions.quotient((first_row + row) * sizes.positions_w);
    const long long place = (image * static_cast<long long>(OUT_CHANNELS) + channel) * sizes.out_pixels() +
                            (first_row - image * sizes.positions_h) * (PHASE_ROWS * sizes.out_width) + output;
    if (channel < min_of(SUBTILE_CHANNELS, channels) && row < rows) copy_vector<SEGMENT>(to + place, staged + channel * CHANNEL_PITCH + output);
  }
}

template <int STORE>
__device__ __forceinline__ void store_nchw(const Sums& sums, Out* output, const Epilogue& epilogue, const Channel (&channels)[2], const WarpPlace& at,
                                           Out* staged) {
  using Place = StorePlace<STORE>;
  constexpr bool PLACES_ADD = Place::ADD;
  constexpr int STORES = Place::STORES;
  const TileSizes& sizes = at.sizes;
  const long long out_pixels = sizes.out_pixels();
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const OutputPosition first = output_position(at, 0, 0, 0);
  const int images = sizes.batch - at.origin.image - at.image;
  const long long image_distance = OUT_CHANNELS * out_pixels;
  output += at.out_channel * out_pixels;
  Out* base = output + (at.origin.image + at.image) * image_distance + (first.pixel - (at.origin.image + at.image) * out_pixels);
#pragma unroll
  for (int subtile = 0; subtile < LINES / SUBTILE_LINES * (WARP_COLS / SUBTILE_COLS) * (16 / SUBTILE_CHANNELS); ++subtile) {
    const int first_half = subtile % (16 / SUBTILE_CHANNELS), subtile_of_half = subtile / (16 / SUBTILE_CHANNELS);
    const int subtile_line = subtile_of_half / (WARP_COLS / SUBTILE_COLS) * SUBTILE_LINES, subtile_col = subtile_of_half % (WARP_COLS / SUBTILE_COLS) * SUBTILE_COLS;
    // The subtile before this one, which may belong to the last tile, has been read.
    __syncwarp();
#pragma unroll
    for (int line = 0; line < SUBTILE_LINES; ++line)
#pragma unroll
      for (int col = 0; col < SUBTILE_COLS; ++col)
#pragma unroll
        for (int a = 0; a < PHASE_ROWS; ++a) {
          const int pixel = WHOLE_ROWS ? in_whole_rows(col * 8 + 2 * t, a, sizes)
                                       : ((line * FRAGMENT_H + 2 * t / FRAGMENT_W) * PHASE_ROWS + a) * SUBTILE_ROW +
                                             (col * FRAGMENT_W + 2 * t % FRAGMENT_W) * PHASE_COLS;
          constexpr int SEGMENT = 2 * PHASE_COLS;
          constexpr int VECTOR = power_of_two_dividing(SEGMENT, MAX_STORE);
#pragma unroll
          for (int half = first_half; half < first_half + SUBTILE_CHANNELS / 8; ++half) {
            float segment[SEGMENT];
#pragma unroll
            for (int r = 0; r < SEGMENT; ++r)
              segment[r] = stored(sums.at(a * PHASE_COLS + r % PHASE_COLS, 0, (subtile_line + line) / WARP_ROWS, subtile_col + col,
                                      (subtile_line + line) % WARP_ROWS)[half * 2 + r / PHASE_COLS],
                              channels[half], epilogue);
#pragma unroll
            for (int r = 0; r < SEGMENT; r += VECTOR)
              write_vector<VECTOR>(staged + (g + (half - first_half) * 8) * CHANNEL_PITCH + pixel + r, segment + r);
          }
        }
    __syncwarp();
    if constexpr (ROW_BY_ROW<STORE>) {
      static_assert(WARP_ROWS % SUBTILE_LINES == 0 || SUBTILE_LINES % WARP_ROWS == 0);
      const int image = subtile_line / WARP_ROWS, out_row = subtile_line % WARP_ROWS * POSITION_ROWS, out_col = subtile_col * FRAGMENT_W * STRIDE_W;
      store_rows<STORE>(staged, base + image * image_distance + first_half * SUBTILE_CHANNELS * out_pixels + static_cast<long long>(out_row) * sizes.out_width + out_col,
                        at.channels_left - first_half * SUBTILE_CHANNELS, images - image, first.rows - out_row, first.cols - out_col, sizes);
      continue;
    }
    if constexpr (WHOLE_ROWS) {
      store_whole_rows(staged, output + first_half * SUBTILE_CHANNELS * out_pixels, at.channels_left - first_half * SUBTILE_CHANNELS,
                       sizes.row_positions.quotient(at.origin.image + at.col), sizes);
      continue;
    }
    const Place mine(lane);
#pragma unroll
    for (int pass = 0; pass < ceil_div(STORES, 32); ++pass) {
      const Place place(pass * 32 + (PLACES_ADD ? 0 : lane));
      const int channel = first_half * SUBTILE_CHANNELS + place.channel + (PLACES_ADD ? mine.channel : 0);
      const int from = place.from + (PLACES_ADD ? mine.from : 0);
      const int out_col = subtile_col * FRAGMENT_W * STRIDE_W + place.col + (PLACES_ADD ? mine.col : 0);
      const int output_row = place.row + (PLACES_ADD ? mine.row : 0);
      bool inside = channel < at.channels_left && (STORES % 32 == 0 || pass * 32 + lane < STORES);
      Out* to;
      if constexpr (CONTIGUOUS) {
        const int position = at.origin.image + at.col + out_col, image = sizes.image_positions.quotient(position);
        to = output + image * image_distance + channel * out_pixels + sizes.image_positions.remainder(position, image);
        inside = inside && image < sizes.batch;
      } else if constexpr (FLAT) {
        const Position position = position_at(at.origin, 0, 0, at.col + out_col / STRIDE_W, sizes);
        to = output + position.image * image_distance + channel * out_pixels +
             static_cast<long long>(position.row * POSITION_ROWS + at.stack_row + at.phase_row + output_row) * sizes.out_width +
             position.col * STRIDE_W + at.phase_col + out_col % STRIDE_W;
        inside = inside && position.inside;
      } else {
        // Each is the sum of a constant and of a number that depends only on the lane.
        const int line = subtile_line + place.line, lane_line = PLACES_ADD ? mine.line : 0;
        const int image = PLACES_ADD ? line / WARP_ROWS + lane_line / WARP_ROWS : (line + lane_line) / WARP_ROWS;
        const int out_row = (PLACES_ADD ? line % WARP_ROWS + lane_line % WARP_ROWS : (line + lane_line) % WARP_ROWS) * FRAGMENT_H * POSITION_ROWS + output_row;
        to = base + image * image_distance + channel * out_pixels + static_cast<long long>(out_row) * sizes.out_width + out_col;
        inside = inside && image < images && out_row < first.rows && out_col < first.cols;
      }
      if (inside) copy_vector<STORE>(to, staged + from);
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
  } else if constexpr (CONTIGUOUS) {
    constexpr int STORE_SOME = min_of(STORE_ROW, STORE_CONTIGUOUS);
    if (STORE_ROW > STORE_SOME && sizes.out_pixels() % STORE_ROW == 0) {
      store_nchw<STORE_ROW>(sums, output, epilogue, channels, at, staged);
    } else if (STORE_SOME > STORE_ANY && sizes.out_pixels() % STORE_SOME == 0) {
      store_nchw<STORE_SOME>(sums, output, epilogue, channels, at, staged);
    } else {
      store_nchw<STORE_ANY>(sums, output, epilogue, channels, at, staged);
    }
  } else if (STORE_ROW > STORE_ANY && sizes.out_width % STORE_ROW == 0) {
    store_nchw<STORE_ROW>(sums, output, epilogue, channels, at, staged);
  } else {
    store_nchw<STORE_ANY>(sums, output, epilogue, channels, at, staged);
  }
}
