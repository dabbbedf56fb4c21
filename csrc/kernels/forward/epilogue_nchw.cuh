// Stores the sums of one warp in NCHW, through shared memory of the warp's own: a subtile of its positions and channels at a
// time, so that segments of rows are stored at once.
//
// BY_ROWS: a subtile is whole rows of positions, and each store fills whole sectors of memory, wherever rows begin.
#pragma once

#include "forward/epilogue_place.cuh"

// ---- a subtile: SUBTILE_COLS fragments of SUBTILE_LINES lines of SUBTILE_CHANNELS channels (8 or 16); a line is a row of
// fragments of one image

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

/// The most outputs of a store with CONTIGUOUS where the pixels of an image are only known to be a multiple of this number.
constexpr int STORE_CONTIGUOUS = min_of(4, MAX_STORE);

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

/// A subtile of the sums of a warp: its first line and column of fragments, and which SUBTILE_CHANNELS of 16 channels it has.
struct Subtile {
  int line, col, channels;

  __device__ constexpr explicit Subtile(int index)
      : line(index / (16 / SUBTILE_CHANNELS) / (WARP_COLS / SUBTILE_COLS) * SUBTILE_LINES),
        col(index / (16 / SUBTILE_CHANNELS) % (WARP_COLS / SUBTILE_COLS) * SUBTILE_COLS),
        channels(index % (16 / SUBTILE_CHANNELS) * SUBTILE_CHANNELS) {}
};
constexpr int SUBTILES = LINES / SUBTILE_LINES * (WARP_COLS / SUBTILE_COLS) * (16 / SUBTILE_CHANNELS);

/// Writes a subtile to shared memory, [channel][row][column].
__device__ __forceinline__ void stage_subtile(const Sums& sums, const Epilogue& epilogue, const Channel (&channels)[2], const Subtile& subtile,
                                              Out* staged, const TileSizes& sizes) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
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
        for (int half = 0; half < SUBTILE_CHANNELS / 8; ++half) {
          const int of_sums = subtile.channels / 8 + half;
          float segment[SEGMENT];
#pragma unroll
          for (int r = 0; r < SEGMENT; ++r)
            segment[r] = stored(sums.at(a * PHASE_COLS + r % PHASE_COLS, 0, (subtile.line + line) / WARP_ROWS, subtile.col + col,
                                        (subtile.line + line) % WARP_ROWS)[of_sums * 2 + r / PHASE_COLS],
                                channels[of_sums], epilogue);
#pragma unroll
          for (int r = 0; r < SEGMENT; r += VECTOR) write_vector<VECTOR>(staged + (g + half * 8) * CHANNEL_PITCH + pixel + r, segment + r);
        }
      }
}

/// Where a warp stores its subtiles. `output`: image 0 of its first channel; `base`: the first output of `first`, its first
/// position.
struct SubtileStores {
  const WarpPlace& at;
  const Out* staged;
  Out *output, *base;
  OutputPosition first;
  int images;

  __device__ __forceinline__ SubtileStores(const WarpPlace& at, const Out* staged, Out* output) : at(at), staged(staged), first(output_position(at, 0, 0, 0)) {
    const long long out_pixels = at.sizes.out_pixels();
    const int image = at.origin.image + at.image;
    images = at.sizes.batch - image;
    this->output = output + at.out_channel * out_pixels;
    base = this->output + image * (OUT_CHANNELS * out_pixels) + (first.pixel - image * out_pixels);
  }

  /// Stores a subtile, STORE neighbouring outputs at once.
  template <int STORE>
  __device__ __forceinline__ void store(const Subtile& subtile) const {
    using Place = StorePlace<STORE>;
    constexpr bool PLACES_ADD = Place::ADD;
    constexpr int STORES = Place::STORES;
    const TileSizes& sizes = at.sizes;
    const int lane = threadIdx.x % 32, channels_left = at.channels_left - subtile.channels;
    const long long out_pixels = sizes.out_pixels(), image_distance = OUT_CHANNELS * out_pixels, channels_from = subtile.channels * out_pixels;
    if constexpr (ROW_BY_ROW<STORE>) {
      static_assert(WARP_ROWS % SUBTILE_LINES == 0 || SUBTILE_LINES % WARP_ROWS == 0);
      const int image = subtile.line / WARP_ROWS, out_row = subtile.line % WARP_ROWS * POSITION_ROWS, out_col = subtile.col * FRAGMENT_W * STRIDE_W;
      store_rows<STORE>(staged, base + image * image_distance + channels_from + static_cast<long long>(out_row) * sizes.out_width + out_col,
                        channels_left, images - image, first.rows - out_row, first.cols - out_col, sizes);
      return;
    }
    if constexpr (WHOLE_ROWS) {
      store_whole_rows(staged, output + channels_from, channels_left, sizes.row_positions.quotient(at.origin.image + at.col), sizes);
      return;
    }
    if constexpr (SHAPED && STORE == STORE_ANY) {
      store_positions<STORE>(subtile);
      return;
    }
    const Place mine(lane);
#pragma unroll
    for (int pass = 0; pass < ceil_div(STORES, 32); ++pass) {
      const Place place(pass * 32 + (PLACES_ADD ? 0 : lane));
      const int channel = place.channel + (PLACES_ADD ? mine.channel : 0);
      const int from = place.from + (PLACES_ADD ? mine.from : 0);
      const int out_col = subtile.col * FRAGMENT_W * STRIDE_W + place.col + (PLACES_ADD ? mine.col : 0);
      const int output_row = place.row + (PLACES_ADD ? mine.row : 0);
      bool inside = channel < channels_left && (STORES % 32 == 0 || pass * 32 + lane < STORES);
      const long long of_channel = channels_from + channel * out_pixels;
      Out* to;
      if constexpr (CONTIGUOUS) {
        const int position = at.origin.image + at.col + out_col, image = sizes.image_positions.quotient(position);
        to = output + image * image_distance + of_channel + sizes.image_positions.remainder(position, image);
        inside = inside && image < sizes.batch;
      } else if constexpr (FLAT) {
        const Position position = position_at(at.origin, 0, 0, at.col + out_col / STRIDE_W, sizes);
        to = output + position.image * image_distance + of_channel +
             static_cast<long long>(position.row * POSITION_ROWS + at.stack_row + at.phase_row + output_row) * sizes.out_width +
             position.col * STRIDE_W + at.phase_col + out_col % STRIDE_W;
        inside = inside && position.inside;
      } else {
        // Each is the sum of a constant and of a number that depends only on the lane.
        const int line = subtile.line + place.line, lane_line = PLACES_ADD ? mine.line : 0;
        const int image = PLACES_ADD ? line / WARP_ROWS + lane_line / WARP_ROWS : (line + lane_line) / WARP_ROWS;
        const int out_row = (PLACES_ADD ? line % WARP_ROWS + lane_line % WARP_ROWS : (line + lane_line) % WARP_ROWS) * FRAGMENT_H * POSITION_ROWS + output_row;
        to = base + image * image_distance + of_channel + static_cast<long long>(out_row) * sizes.out_width + out_col;
        inside = inside && image < images && out_row < first.rows && out_col < first.cols;
      }
      if (inside) copy_vector<STORE>(to, staged + from);
    }
  }

  /// Stores a subtile of a SHAPED tile, whose positions may be dense. A lane divides once for all channels; a store has outputs
  /// of one position.
  template <int STORE>
  __device__ __forceinline__ void store_positions(const Subtile& subtile) const {
    static_assert(PHASE_COLS % STORE == 0);
    using Place = StorePlace<STORE>;
    const TileSizes& sizes = at.sizes;
    const long long out_pixels = sizes.out_pixels();
#pragma unroll
    for (int first_store = 0; first_store < Place::CHANNEL_STORES; first_store += 32) {
      const int i = first_store + threadIdx.x % 32;
      const Place place(i);
      const Position position = position_at(at.origin, at.image, at.row + subtile.line + place.line, at.col + place.col / STRIDE_W, sizes);
      const int row = position.row * POSITION_ROWS + at.phase_row + place.row, col = position.col * STRIDE_W + at.phase_col + place.col % STRIDE_W;
      const bool inside = position.inside && row < sizes.out_height && col < sizes.out_width && i < Place::CHANNEL_STORES;
      const int channels = inside ? min_of(SUBTILE_CHANNELS, at.channels_left - subtile.channels) : 0;
      Out* to = output + (position.image * static_cast<long long>(OUT_CHANNELS) + subtile.channels) * out_pixels + static_cast<long long>(row) * sizes.out_width + col;
#pragma unroll
      for (int channel = 0; channel < SUBTILE_CHANNELS; ++channel, to += out_pixels)
        if (channel < channels) copy_vector<STORE>(to, staged + place.from + channel * CHANNEL_PITCH);
    }
  }
};

__device__ __forceinline__ void store_nchw(const Sums& sums, Out* output, const Epilogue& epilogue, const Channel (&channels)[2], const WarpPlace& at,
                                           Out* staged) {
  const TileSizes& sizes = at.sizes;
  const SubtileStores stores(at, staged, output);
  constexpr int STORE_SOME = CONTIGUOUS ? min_of(STORE_ROW, STORE_CONTIGUOUS) : STORE_ANY;
  const int contiguous = CONTIGUOUS ? sizes.out_pixels() : sizes.out_width;
  const bool in_rows = STORE_ROW > STORE_SOME && contiguous % STORE_ROW == 0 && !is_dense(sizes);
  const bool in_some = STORE_SOME > STORE_ANY && contiguous % STORE_SOME == 0;
#pragma unroll
  for (int i = 0; i < SUBTILES; ++i) {
    const Subtile subtile(i);
    // The subtile before this one, which may belong to the last tile, has been read.
    __syncwarp();
    stage_subtile(sums, epilogue, channels, subtile, staged, sizes);
    __syncwarp();
    if (in_rows) {
      stores.store<STORE_ROW>(subtile);
    } else if (in_some) {
      stores.store<STORE_SOME>(subtile);
    } else {
      stores.store<STORE_ANY>(subtile);
    }
  }
}
