// One warp's sums to output, with no other warp: epilogue applied, in runs that fill sectors of 32 bytes.
//
// channels_last: straight from the registers; eight lanes hold 16 neighbouring channels of a pixel. NCHW: by way of
// shared memory of the warp's own, a part of its cells and channels at a time, so that whole pieces of rows leave together.
//
// BY_ROWS (NCHW): a part is whole rows of cells, and what leaves at once fills whole sectors of memory, wherever rows begin.
#pragma once

// ---- what one part is: PART_COLS fragments of PART_LINES lines of PART_CHANNELS channels (8 or 16); a line is a row of
// fragments of one image

constexpr int OUT_PER_WORD = 4 / sizeof(Out);
__device__ constexpr int power_below(int n) { return n < 2 ? 1 : 2 * power_below(n / 2); }
constexpr int PART_FRAGMENTS = power_below(PART_BYTES / (PART_CHANNELS * 8 * PHASES * static_cast<int>(sizeof(Out))));
constexpr int LINES = WARP_IMAGES * WARP_ROWS;
constexpr int PART_COLS = WARP_COLS <= PART_FRAGMENTS ? WARP_COLS : power_of_two_dividing(WARP_COLS, PART_FRAGMENTS);
constexpr int PART_LINES = power_of_two_dividing(LINES, power_below(PART_FRAGMENTS / PART_COLS));

/// Outputs of one row of a part, and rows of it.
constexpr int PART_ROW = PART_COLS * FRAGMENT_W * PHASE_COLS;
constexpr int PART_ROWS = PART_LINES * FRAGMENT_H * PHASE_ROWS;
constexpr int PART_PIXELS = PART_ROW * PART_ROWS;

// Pitch of a channel [channel][pixel], in Out, for the banks that the lanes of a warp write: 8 channels (g) of 4
// neighbouring runs (t).
constexpr int LANE_RUN_WORDS = min_of(4, 2 * PHASE_COLS / OUT_PER_WORD);
constexpr int CHANNEL_PITCH = aligned_to(ceil_div(PART_PIXELS, OUT_PER_WORD), 4, 32, 4 * LANE_RUN_WORDS % 32) * OUT_PER_WORD;
constexpr int STAGED_BYTES = OUTPUT_CHANNELS_LAST ? 0 : PART_CHANNELS * CHANNEL_PITCH * static_cast<int>(sizeof(Out));

/// COUNT neighbouring Out values to an address aligned to them all, at most 16 bytes.
template <int COUNT>
__device__ __forceinline__ void put_vector(Out* to, const float* v) {
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

/// What the sums of one warp belong to.
struct WarpPlace {
  Origin origin;                 // of the block's tile
  int image, row, col;           // first cell of the warp in the tile
  int stack_row;                 // row of the stacked cell (STACK) that the warp's channels are of
  int phase_row, phase_col;      // first phase of the block
  int out_channel;               // first channel of the warp, of all
  int channels_left;             // channels of the group from there on
  const Sizes& sizes;
};

/// First output of a cell that is in the tile at (image, row, col) from the warp's first, and whether it exists.
struct OutCell {
  long long pixel;  // counted over all images
  int rows, cols;   // of output from there to the edge; none where the cell does not exist
};

__device__ __forceinline__ OutCell out_cell(const WarpPlace& at, int image, int row, int col) {
  const Position cell = position_at(at.origin, at.image + image, at.row + row, at.col + col, at.sizes);
  const int out_row = cell.row * CELL_ROWS + at.stack_row + at.phase_row, out_col = cell.col * STRIDE_W + at.phase_col;
  return {static_cast<long long>(cell.image) * at.sizes.out_pixels() + static_cast<long long>(out_row) * at.sizes.out_width + out_col,
          cell.image < at.sizes.batch ? at.sizes.out_height - out_row : 0, at.sizes.out_width - out_col};
}

/// Cells that stand in a row are outputs that do.
constexpr bool DENSE = FLAT && CELL_ROWS == 1 && STRIDE_W == 1;
/// Of those, neighbouring outputs of a store at most, where images are only known to be multiples of so many.
constexpr int STORE_DENSE = min_of(4, STORE_MOST);

__device__ __forceinline__ void store_channels_last(const Sums& sums, Out* output, const Epilogue& epilogue, const Channel (&channels_of)[2],
                                                    const WarpPlace& at) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  constexpr int VECTOR = PAIRED_ROWS ? power_of_two_dividing(CO_GROUP, 2) : 1;
  constexpr int NEXT_ROW = PAIRED_ROWS ? 1 : 8;
  const int channel = channel_of_row(0, g), channels = at.channels_left - channel;
  output += at.out_channel + channel;
  // Cell 2t of the warp's first fragment; all others lie at distances that are constants, unless cells stand in a row.
  const int first_row = 2 * t / FRAGMENT_W, first_col = 2 * t % FRAGMENT_W;
  const OutCell first = out_cell(at, 0, first_row, first_col);
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
          int rows = first.rows, cols = first.cols, cell_rows = 0, cell_cols = 0;
          bool inside = image < images;
          if constexpr (DENSE) {
            cell_cols = col * FRAGMENT_W + e;
            inside = cell_cols < outputs_left;
          } else if constexpr (FLAT) {
            const OutCell cell = out_cell(at, 0, 0, col * FRAGMENT_W + first_col + e);
            to = output + cell.pixel * OUT_CHANNELS;
            inside = cell.rows > 0;
          } else {
            cell_rows = row * FRAGMENT_H * CELL_ROWS;
            cell_cols = (col * FRAGMENT_W + e) * STRIDE_W;
          }
#pragma unroll
          for (int a = 0; a < PHASE_ROWS; ++a)
#pragma unroll
            for (int b = 0; b < PHASE_COLS; ++b) {
              const float(&sum)[4] = sums.at(a * PHASE_COLS + b, 0, image, col, row);
              const float run[2] = {stored(sum[e], channels_of[0], epilogue), stored(sum[2 + e], channels_of[1], epilogue)};
              const long long distance =
                  image * image_elements + static_cast<long long>(cell_rows + a) * row_elements + (cell_cols + b) * OUT_CHANNELS;
              if (inside && (FLAT || (cell_rows + a < rows && cell_cols + b < cols))) {
#pragma unroll
                for (int i = 0; i < 2; i += VECTOR)
                  if (i * NEXT_ROW < channels) put_vector<VECTOR>(to + distance + i * NEXT_ROW, run + i);
              }
            }
        }
}

/// Outputs of one store: neighbouring pixels of a row of one channel, so many at most; and so many whatever the width is.
constexpr int STORE_ROW = PHASE_COLS == STRIDE_W ? power_of_two_dividing(PART_ROW, STORE_MOST)
                                                 : power_of_two_dividing(STRIDE_W, power_of_two_dividing(PHASE_COLS, STORE_MOST));
constexpr int STORE_ANY = power_of_two_dividing(OUT_ROW_MULTIPLE, STORE_ROW);

__device__ constexpr bool is_power(int n) { return (n & (n - 1)) == 0; }
/// Where the i-th store of a part reads and writes: channel, line, row within the line's cells, column.
template <int STORE>
struct StorePlace {
  static constexpr int CHANNEL_STORES = PART_PIXELS / STORE;
  static constexpr int STORES = PART_CHANNELS * CHANNEL_STORES;
  /// With powers of two throughout, the place of store lane + pass * 32 is the sum of two places, of which one is a
  /// constant.
  static constexpr bool ADD = is_power(PHASE_ROWS) && is_power(PART_ROW) && STORES % 32 == 0;

  int from, channel, line, row, col;

  __device__ constexpr explicit StorePlace(int i) : from(0), channel(i / CHANNEL_STORES), line(0), row(0), col(0) {
    const int part_row = i % CHANNEL_STORES / (PART_ROW / STORE), x = i % (PART_ROW / STORE) * STORE;
    from = channel * CHANNEL_PITCH + part_row * PART_ROW + x;
    line = part_row / (FRAGMENT_H * PHASE_ROWS);
    row = part_row / PHASE_ROWS % FRAGMENT_H * CELL_ROWS + part_row % PHASE_ROWS;
    col = x / PHASE_COLS * STRIDE_W + x % PHASE_COLS;
  }
};

/// Long rows of any length and alignment, one after another: a warp's stores begin where sectors of memory do.
template <int STORE>
constexpr bool ROW_BY_ROW = BY_ROWS && !FLAT && FRAGMENT_W == 8 && PHASE_COLS == STRIDE_W && (STORE == 1 || !StorePlace<STORE>::ADD);
constexpr int SECTOR = 32 / static_cast<int>(sizeof(Out));

/// `to`: of the part's first output of its first channel; `rows`, `cols`: of output from there to the edge.
template <int STORE>
__device__ __forceinline__ void store_rows(const Out* staged, Out* to, int channels, int images, int rows, int cols, const Sizes& sizes) {
  constexpr int ROW_PASSES = ceil_div(PART_ROW + SECTOR - STORE, 32 * STORE);
  const int lane = threadIdx.x % 32;
  cols = min_of(PART_ROW, cols);
#pragma unroll 1
  for (int channel = 0; channel < min_of(PART_CHANNELS, channels); ++channel, to += sizes.out_pixels(), staged += CHANNEL_PITCH)
#pragma unroll
    for (int row = 0; row < PART_ROWS; ++row) {
      const int line = row / PHASE_ROWS, out_row = line % WARP_ROWS * CELL_ROWS + row % PHASE_ROWS, image = line / WARP_ROWS;
      if (out_row >= rows || image >= images) continue;
      Out* start = to + image * static_cast<long long>(OUT_CHANNELS) * sizes.out_pixels() + static_cast<long long>(out_row) * sizes.out_width;
      const int early = static_cast<int>(reinterpret_cast<unsigned long long>(start) / sizeof(Out) % SECTOR);
#pragma unroll
      for (int pass = 0; pass < ROW_PASSES; ++pass) {
        const int x = (pass * 32 + lane) * STORE - early;
        if (x >= 0 && x < cols) copy_vector<STORE>(start + x, staged + row * PART_ROW + x);
      }
    }
}

/// A part is whole rows of cells of maps that follow each other: of each channel as many outputs in one run. The plan sees
/// to it that rows have an even number of cells, and a warp a multiple of it.
constexpr bool WHOLE_ROWS = BY_ROWS && FLAT && PART_COLS == WARP_COLS && PHASE_ROWS == CELL_ROWS && PHASE_COLS == STRIDE_W;

/// Where in a part's channel the outputs of a cell begin, of its phase row `a`.
__device__ __forceinline__ int in_whole_rows(int cell, int a, const Sizes& sizes) {
  const int row = sizes.row_positions.quotient(cell);
  return (row * PHASE_ROWS + a) * sizes.out_width + sizes.row_positions.remainder(cell, row) * PHASE_COLS;
}

/// `to`: of image 0's first output of the part's first channel; `cell_row`: the first one, of all images' rows.
__device__ __forceinline__ void store_whole_rows(const Out* staged, Out* to, int channels, int cell_row, const Sizes& sizes) {
  constexpr int RUN = power_of_two_dividing(2 * PHASE_ROWS * PHASE_COLS, STORE_MOST), RUNS = PART_PIXELS / RUN;
  const int lane = threadIdx.x % 32, rows = sizes.batch * sizes.positions_h - cell_row;
#pragma unroll
  for (int pass = 0; pass < ceil_div(PART_CHANNELS * RUNS, 32); ++pass) {
    const int i = pass * 32 + lane, channel = i / RUNS, output = i % RUNS * RUN;
    // PHASE_ROWS rows of outputs to a row of cells: as many outputs as the cells have.
    const int row = sizes.row_positions.quotient(output / (PHASE_ROWS * PHASE_COLS));
    const int image = sizes.image_positions.quotient((cell_row + row) * sizes.positions_w);
    const long long place = (image * static_cast<long long>(OUT_CHANNELS) + channel) * sizes.out_pixels() +
                            (cell_row - image * sizes.positions_h) * (PHASE_ROWS * sizes.out_width) + output;
    if (channel < min_of(PART_CHANNELS, channels) && row < rows) copy_vector<RUN>(to + place, staged + channel * CHANNEL_PITCH + output);
  }
}

template <int STORE>
__device__ __forceinline__ void store_nchw(const Sums& sums, Out* output, const Epilogue& epilogue, const Channel (&channels)[2], const WarpPlace& at,
                                           Out* staged) {
  using Place = StorePlace<STORE>;
  constexpr bool PLACES_ADD = Place::ADD;
  constexpr int STORES = Place::STORES;
  const Sizes& sizes = at.sizes;
  const long long out_pixels = sizes.out_pixels();
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const OutCell first = out_cell(at, 0, 0, 0);
  const int images = sizes.batch - at.origin.image - at.image;
  const long long image_distance = OUT_CHANNELS * out_pixels;
  output += at.out_channel * out_pixels;
  Out* base = output + (at.origin.image + at.image) * image_distance + (first.pixel - (at.origin.image + at.image) * out_pixels);
#pragma unroll
  for (int part = 0; part < LINES / PART_LINES * (WARP_COLS / PART_COLS) * (16 / PART_CHANNELS); ++part) {
    const int first_half = part % (16 / PART_CHANNELS), part_of_half = part / (16 / PART_CHANNELS);
    const int part_line = part_of_half / (WARP_COLS / PART_COLS) * PART_LINES, part_col = part_of_half % (WARP_COLS / PART_COLS) * PART_COLS;
    // The part before this one, which may be the last tile's, has been read.
    __syncwarp();
#pragma unroll
    for (int line = 0; line < PART_LINES; ++line)
#pragma unroll
      for (int col = 0; col < PART_COLS; ++col)
#pragma unroll
        for (int a = 0; a < PHASE_ROWS; ++a) {
          const int pixel = WHOLE_ROWS ? in_whole_rows(col * 8 + 2 * t, a, sizes)
                                       : ((line * FRAGMENT_H + 2 * t / FRAGMENT_W) * PHASE_ROWS + a) * PART_ROW +
                                             (col * FRAGMENT_W + 2 * t % FRAGMENT_W) * PHASE_COLS;
          constexpr int RUN = 2 * PHASE_COLS;
          constexpr int VECTOR = power_of_two_dividing(RUN, STORE_MOST);
#pragma unroll
          for (int half = first_half; half < first_half + PART_CHANNELS / 8; ++half) {
            float run[RUN];
#pragma unroll
            for (int r = 0; r < RUN; ++r)
              run[r] = stored(sums.at(a * PHASE_COLS + r % PHASE_COLS, 0, (part_line + line) / WARP_ROWS, part_col + col,
                                      (part_line + line) % WARP_ROWS)[half * 2 + r / PHASE_COLS],
                              channels[half], epilogue);
#pragma unroll
            for (int r = 0; r < RUN; r += VECTOR)
              put_vector<VECTOR>(staged + (g + (half - first_half) * 8) * CHANNEL_PITCH + pixel + r, run + r);
          }
        }
    __syncwarp();
    if constexpr (ROW_BY_ROW<STORE>) {
      static_assert(WARP_ROWS % PART_LINES == 0 || PART_LINES % WARP_ROWS == 0);
      const int image = part_line / WARP_ROWS, out_row = part_line % WARP_ROWS * CELL_ROWS, out_col = part_col * FRAGMENT_W * STRIDE_W;
      store_rows<STORE>(staged, base + image * image_distance + first_half * PART_CHANNELS * out_pixels + static_cast<long long>(out_row) * sizes.out_width + out_col,
                        at.channels_left - first_half * PART_CHANNELS, images - image, first.rows - out_row, first.cols - out_col, sizes);
      continue;
    }
    if constexpr (WHOLE_ROWS) {
      store_whole_rows(staged, output + first_half * PART_CHANNELS * out_pixels, at.channels_left - first_half * PART_CHANNELS,
                       sizes.row_positions.quotient(at.origin.image + at.col), sizes);
      continue;
    }
    const Place mine(lane);
#pragma unroll
    for (int pass = 0; pass < ceil_div(STORES, 32); ++pass) {
      const Place place(pass * 32 + (PLACES_ADD ? 0 : lane));
      const int channel = first_half * PART_CHANNELS + place.channel + (PLACES_ADD ? mine.channel : 0);
      const int from = place.from + (PLACES_ADD ? mine.from : 0);
      const int out_col = part_col * FRAGMENT_W * STRIDE_W + place.col + (PLACES_ADD ? mine.col : 0);
      const int cell_row = place.row + (PLACES_ADD ? mine.row : 0);
      bool inside = channel < at.channels_left && (STORES % 32 == 0 || pass * 32 + lane < STORES);
      Out* to;
      if constexpr (DENSE) {
        const int cell = at.origin.image + at.col + out_col, image = sizes.image_positions.quotient(cell);
        to = output + image * image_distance + channel * out_pixels + sizes.image_positions.remainder(cell, image);
        inside = inside && image < sizes.batch;
      } else if constexpr (FLAT) {
        const Position cell = position_at(at.origin, 0, 0, at.col + out_col / STRIDE_W, sizes);
        to = output + cell.image * image_distance + channel * out_pixels +
             static_cast<long long>(cell.row * CELL_ROWS + at.stack_row + at.phase_row + cell_row) * sizes.out_width +
             cell.col * STRIDE_W + at.phase_col + out_col % STRIDE_W;
        inside = inside && cell.inside;
      } else {
        // Sums of a constant and of what only the lane decides.
        const int line = part_line + place.line, lane_line = PLACES_ADD ? mine.line : 0;
        const int image = PLACES_ADD ? line / WARP_ROWS + lane_line / WARP_ROWS : (line + lane_line) / WARP_ROWS;
        const int out_row = (PLACES_ADD ? line % WARP_ROWS + lane_line % WARP_ROWS : (line + lane_line) % WARP_ROWS) * FRAGMENT_H * CELL_ROWS + cell_row;
        to = base + image * image_distance + channel * out_pixels + static_cast<long long>(out_row) * sizes.out_width + out_col;
        inside = inside && image < images && out_row < first.rows && out_col < first.cols;
      }
      if (inside) copy_vector<STORE>(to, staged + from);
    }
  }
}

/// `channel`: first of the warp in the block's rows of a multiply; `staged`: shared memory of the warp's own.
__device__ __forceinline__ void store_warp(const Sums& sums, Out* output, const Epilogue& epilogue, Out* staged, const Origin& origin,
                                           int group, int first_channel, int warp_row, int image, int row, int col,
                                           int phase_row, int phase_col, const Sizes& sizes) {
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
  } else if constexpr (DENSE) {
    constexpr int SOME = min_of(STORE_ROW, STORE_DENSE);
    if (STORE_ROW > SOME && sizes.out_pixels() % STORE_ROW == 0) {
      store_nchw<STORE_ROW>(sums, output, epilogue, channels, at, staged);
    } else if (SOME > STORE_ANY && sizes.out_pixels() % SOME == 0) {
      store_nchw<SOME>(sums, output, epilogue, channels, at, staged);
    } else {
      store_nchw<STORE_ANY>(sums, output, epilogue, channels, at, staged);
    }
  } else if (STORE_ROW > STORE_ANY && sizes.out_width % STORE_ROW == 0) {
    store_nchw<STORE_ROW>(sums, output, epilogue, channels, at, staged);
  } else {
    store_nchw<STORE_ANY>(sums, output, epilogue, channels, at, staged);
  }
}
