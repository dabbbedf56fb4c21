// Copies of one tile of pixels into a window (grad_weight/implicit_gemm_windows.cuh): asynchronous (cp.async) where the
// bytes are copied as they are, through registers where 16-bit channels that are not neighbours in memory are
// interleaved. Everything outside of the image, the batch or the group is zero.
#pragma once

/// Rows and columns of a tensor.
struct Extent {
  int height, width;
  __device__ __forceinline__ int pixels() const { return height * width; }
};

/// The part of a tensor that one tile reads.
struct Source {
  const char* image;  // the first image's first channel of the block
  Extent extent;
  int row, col;       // of position 0: may be negative
  int images;         // from the first to the last of the tile or the batch
  int channels;       // from the first to the last of the group
};

/// `row`, `col`: what the block's first tap reads for pixel 0.
template <class Win>
__device__ __forceinline__ Source tile_source(const Element* tensor, const Extent& extent, int tile, int group, int first_channel,
                                              int row, int col, const GradWeightTileSizes& sizes) {
  const auto place = TilePlace<TILE_N, TILE_H, TILE_W>::of(tile, sizes);
  const int channel = group * Win::GROUP + first_channel;
  Source s;
  s.extent = extent;
  s.image = reinterpret_cast<const char*>(tensor) +
            (static_cast<long long>(place.image) * (Win::TENSOR_CHANNELS * extent.pixels()) +
             static_cast<long long>(channel) * (CHANNELS_LAST ? 1 : extent.pixels())) * ITEM;
  s.row = place.row * Win::SH + row;
  s.col = place.col * Win::SW + col;
  const int left = sizes.batch - place.image;
  s.images = left < TILE_N ? left : TILE_N;
  s.channels = Win::GROUP - first_channel;
  return s;
}

/// Copies tiles of one operand into a window.
template <class Win>
struct WindowLoader {
  using Rows = typename Win::Rows;
  using Cols = typename Win::Cols;
  static constexpr int COPY = Win::COPY;
  static constexpr int COPY_BYTES = COPY * ITEM;
  static constexpr bool THROUGH_REGISTERS = IS_16_BIT && (!CHANNELS_LAST || COPY == 1);
  /// Neighbouring lanes copy to distant places in shared memory: without the L1 each copy would be a request of its own
  /// (measured: half as fast).
  static constexpr bool SCATTERS = IS_16_BIT;
  static constexpr int PIXEL_ITEMS = CHANNELS_LAST ? Win::TENSOR_CHANNELS : 1;

  /// Elements from one channel to the next.
  __device__ __forceinline__ static int channel_items(const Extent& extent) { return CHANNELS_LAST ? 1 : extent.pixels(); }

  /// Columns of memory that a row of the window spans, with those before it for alignment.
  static constexpr int SPAN_COLS =
      Win::SW == 1 ? Win::COLS : Win::COLS * Win::SW + Win::MAX_MISALIGNMENT;
  static constexpr bool CONTIGUOUS = !CHANNELS_LAST && COPY > 1;  // a piece is neighbouring columns of all phases
  static constexpr int PIECES_PER_ROW = CONTIGUOUS ? ceil_div(SPAN_COLS, COPY) : Cols::PHASES * Win::COLS;
  /// Pieces of one channel (NCHW), or positions (channels_last). A piece is what one copy moves.
  static constexpr int PIECES = TILE_N * Rows::PHASES * Win::ROWS * PIECES_PER_ROW;

  /// Where a piece goes, and its image, row and column packed so that one comparison tells whether it lies inside the
  /// tensor.
  struct Piece {
    unsigned from;  // elements from the window's first row and column
    u32 place;      // image << 23 | row << 12 | column, in pixels of the tensor from there
    int position;   // of its first column; of phase 0 where a piece has columns of all phases
    int column;     // CONTIGUOUS: columns from the first tap's, may be negative
  };
  static constexpr u32 GUARDS = 1u << 31 | 1u << 22 | 1u << 11;

  /// `misalignment`: columns from the beginning of the window to the first tap's (CONTIGUOUS).
  __device__ __forceinline__ static Piece piece(unsigned index, int misalignment, const Extent& extent) {
    const unsigned in_row = index % PIECES_PER_ROW;
    const unsigned row = index / PIECES_PER_ROW % Win::ROWS;
    const unsigned row_phase = index / (PIECES_PER_ROW * Win::ROWS) % Rows::PHASES;
    const unsigned n = index / (PIECES_PER_ROW * Win::ROWS * Rows::PHASES);
    const unsigned h = row * Win::SH + Rows::residue(row_phase);
    unsigned w;
    Piece p;
    p.position = n * Win::IMAGE_PITCH + (row_phase * Win::ROWS + row) * Win::ROW_PITCH;
    p.column = 0;
    if constexpr (CONTIGUOUS) {
      w = in_row * COPY;
      p.column = static_cast<int>(w) - misalignment;
      if constexpr (Win::SW == 1) p.position += w;
    } else {
      // Neighbouring lanes read neighbours in memory: columns in NCHW, channels in channels_last.
      const unsigned phase = CHANNELS_LAST ? in_row / Win::COLS : in_row % Cols::PHASES;
      const unsigned col = CHANNELS_LAST ? in_row % Win::COLS : in_row / Cols::PHASES;
      w = col * Win::SW + Cols::residue(phase);
      p.position += phase * Win::COLS + col;
    }
    p.from = n * (Win::TENSOR_CHANNELS * extent.pixels()) + (h * extent.width + w) * PIXEL_ITEMS;
    p.place = n << 23 | h << 12 | w;
    return p;
  }

  /// The pieces of a tile that lie inside the tensor: those between two corners.
  struct Inside {
    const char* origin;  // the window's first row and column of the block's first channel; may lie outside
    u32 low, high;
    int channels;

    __device__ __forceinline__ Inside(const Source& source, int misalignment) {
      const int row = source.row, col = CONTIGUOUS ? source.col - misalignment : source.col;
      origin = source.image + static_cast<long long>(row * source.extent.width + col) * (PIXEL_ITEMS * ITEM);
      channels = source.channels;
      const int first_h = row < 0 ? -row : 0, first_w = col < 0 ? -col : 0;
      const int rows_left = source.extent.height - 1 - row, cols_left = source.extent.width - 1 - col;
      const int last_h = rows_left < 1023 ? rows_left : 1023, last_w = cols_left < 2047 ? cols_left : 2047;
      low = first_h << 12 | first_w;
      high = (source.images - 1) << 23 | last_h << 12 | last_w;
      if (first_h > last_h || first_w > last_w) low = ~GUARDS, high = 0;
    }
    __device__ __forceinline__ bool operator()(u32 place) const {
      return (((place | GUARDS) - low) & ((high | GUARDS) - place) & GUARDS) == GUARDS;
    }
  };

  // Pieces do not depend on the tile: where a thread needs many of them, they are computed once and kept in a table.
  static constexpr bool TABLE = CHANNELS_LAST || THROUGH_REGISTERS;
  static constexpr int TABLE_BYTES = TABLE ? PIECES * 16 : 0;

  __device__ __forceinline__ static void make_table(u32 table, int misalignment, const Extent& extent) {
    if constexpr (TABLE)
      for (unsigned index = threadIdx.x; index < PIECES; index += THREADS) {
        const Piece p = piece(index, misalignment, extent);
        const u32 words[4] = {p.from, p.place, static_cast<u32>(p.position), static_cast<u32>(p.column)};
        ptx::store_shared<4>(table + index * 16, words);
      }
  }

  // ---- asynchronous ------------------------------------------------------------------------------------------

  __device__ __forceinline__ static void copy(u32 window, u32 table, const Source& source, int misalignment) {
    const Inside inside(source, misalignment);
    if constexpr (CHANNELS_LAST) {
      constexpr unsigned UNITS_PER_POSITION = Win::CHANNELS / COPY;
      static_assert(THREADS % UNITS_PER_POSITION == 0 && PIECES == Win::POSITIONS);
      const unsigned first = threadIdx.x / UNITS_PER_POSITION, channel = threadIdx.x % UNITS_PER_POSITION * COPY;
      const char* const origin = inside.origin + channel * ITEM;
      const bool channel_exists = static_cast<int>(channel) < inside.channels;
      const u32 to = window + (IS_16_BIT ? channel / 8 * Win::OCTET_BYTES + channel % 8 * 2 : channel * Win::CHANNEL_STRIDE * 4);
#pragma unroll 4
      for (unsigned position = first; position < PIECES; position += THREADS / UNITS_PER_POSITION) {
        u32 entry[2];
        ptx::load_shared_bytes<8>(entry, table + position * 16);
        ptx::copy_async_or_zero<COPY_BYTES, SCATTERS>(to + Win::position_bytes(position),
                                            origin + static_cast<unsigned long long>(entry[0]) * ITEM, channel_exists && inside(entry[1]));
      }
    } else {
      constexpr int THREADS_PER_PIECE = PIECES >= THREADS ? 1 : THREADS / PIECES < Win::CHANNELS ? THREADS / PIECES : Win::CHANNELS;
      const unsigned first = THREADS_PER_PIECE == 1 ? threadIdx.x : threadIdx.x % PIECES;
      const int rank = THREADS_PER_PIECE == 1 ? 0 : threadIdx.x / PIECES;
      if (rank >= THREADS_PER_PIECE) return;
      const int next_channel = channel_items(source.extent);
      for (unsigned index = first; index < PIECES; index += THREADS_PER_PIECE == 1 ? THREADS : PIECES) {
        const Piece p = piece(index, misalignment, source.extent);
        const bool in_bounds = inside(p.place);
        const char* from = inside.origin + (static_cast<long long>(p.from) + static_cast<long long>(rank) * next_channel) * ITEM;
        const u32 to = window + Win::position_bytes(p.position) + rank * Win::CHANNEL_STRIDE * 4;
        const int left = inside.channels - rank;
#pragma unroll 8
        for (int i = 0; i < ceil_div(Win::CHANNELS, THREADS_PER_PIECE); ++i) {
          if (Win::CHANNELS % THREADS_PER_PIECE && rank + i * THREADS_PER_PIECE >= Win::CHANNELS) break;
          ptx::copy_async_or_zero<COPY_BYTES, SCATTERS>(to + i * THREADS_PER_PIECE * Win::CHANNEL_STRIDE * 4, from,
                                              in_bounds && (Win::GROUP % Win::CHANNELS == 0 || i * THREADS_PER_PIECE < left));
          from += static_cast<long long>(next_channel) * (THREADS_PER_PIECE * ITEM);
        }
      }
    }
  }

  // ---- through registers: a slot is 8 channels of COPY columns (channels_last: of one pixel) --------------------

  static constexpr int OCTETS = Win::CHANNELS / 8;
  static constexpr int SLOTS = THROUGH_REGISTERS ? ceil_div(PIECES * OCTETS, THREADS) : 1;
  static constexpr int ROW_REGISTERS = ceil_div(COPY, 2);
  u32 staged[SLOTS][THROUGH_REGISTERS ? 8 : 1][ROW_REGISTERS];

  /// Neighbouring lanes load neighbouring pieces of few channels, and store to different banks.
  static constexpr unsigned LANE_OCTETS = CHANNELS_LAST || COPY > OCTETS ? OCTETS : COPY;
  __device__ __forceinline__ static unsigned octet_of(unsigned unit) {
    return unit % LANE_OCTETS + unit / (LANE_OCTETS * PIECES) * LANE_OCTETS;
  }
  __device__ __forceinline__ static unsigned piece_of(unsigned unit) { return unit / LANE_OCTETS % PIECES; }

  __device__ __forceinline__ void load(u32 table, const Source& source, int misalignment) {
    const Inside inside(source, misalignment);
    // Kept in a register, and 32 bits: otherwise the compiler computes the address of every load from the tile's origin again.
    const u32 next_channel = ptx::keep_in_register(static_cast<u32>(channel_items(source.extent)) * ITEM);
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const unsigned unit = threadIdx.x + s * THREADS;
      const u32 channel = octet_of(unit) * 8;
      u32 entry[2] = {0, 0};
      bool in_bounds = unit < PIECES * OCTETS;
      if (in_bounds) ptx::load_shared_bytes<8>(entry, table + piece_of(unit) * 16);
      in_bounds = in_bounds && inside(entry[1]);
      const int left = in_bounds ? inside.channels - static_cast<int>(channel) : 0;
      const char* from = ptx::keep_in_register(inside.origin + static_cast<unsigned long long>(entry[0]) * ITEM +
                                     static_cast<unsigned long long>(channel) * next_channel);
#pragma unroll
      for (u32 c = 0; c < 8; ++c) {
#pragma unroll
        for (int i = 0; i < ROW_REGISTERS; ++i) staged[s][c][i] = 0;
        if (Win::GROUP % Win::CHANNELS == 0 ? in_bounds : static_cast<int>(c) < left)
          ptx::load_global<COPY_BYTES>(staged[s][c], from + static_cast<unsigned long long>(c) * next_channel);
      }
    }
  }

  __device__ __forceinline__ void store(u32 window, u32 table) const {
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const unsigned unit = threadIdx.x + s * THREADS;
      if (unit >= PIECES * OCTETS) continue;
      u32 entry[2];
      ptx::load_shared_bytes<8>(entry, table + piece_of(unit) * 16 + 8);
      const int first_position = static_cast<int>(entry[0]), first_column = static_cast<int>(entry[1]);
      const u32 plane = window + octet_of(unit) * Win::OCTET_BYTES;
#pragma unroll
      for (int e = 0; e < COPY; ++e) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 even = staged[s][2 * i][e / 2], odd = staged[s][2 * i + 1][e / 2];
          words[i] = e % 2 ? ptx::high_halves(even, odd) : ptx::low_halves(even, odd);
        }
        int position = first_position + e;
        bool in_window = true;
        if constexpr (CONTIGUOUS && Win::SW > 1) {
          const unsigned column = first_column + e;  // a negative column becomes too large
          const unsigned col = column / Win::SW;
          const int phase = Cols::phase_of_residue(column % Win::SW);
          in_window = col < Win::COLS && phase >= 0;
          position = first_position + phase * Win::COLS + col;
        }
        if (in_window) ptx::store_shared<4>(plane + position * 16, words);
      }
    }
  }
};

static_assert(SHARED_BYTES == STAGES * STAGE_BYTES + WindowLoader<InputWindow>::TABLE_BYTES + WindowLoader<OutputWindow>::TABLE_BYTES,
              "the plan and the kernel must agree");

/// Loads both operands of a block, tile by tile of its split, into a ring of STAGES stages. `copy` issues the
/// asynchronous copies; `load` begins what goes through registers, and `store` writes it to shared memory. Tiles beyond
/// the last do nothing.
struct Producer {
  const Element *input, *grad_output;
  const Place& place;
  const GradWeightTileSizes& sizes;
  int first_tile, count;
  u32 stages;
  WindowLoader<InputWindow> input_loader;
  WindowLoader<OutputWindow> output_loader;

  __device__ __forceinline__ Producer(const Element* input_, const Element* grad_output_, const Place& place_, const GradWeightTileSizes& sizes_,
                                  u32 stages_)
      : input(input_), grad_output(grad_output_), place(place_), sizes(sizes_), stages(stages_) {
    first_tile = sizes.first_tile(place.split);
    count = sizes.tiles_of(place.split);
    WindowLoader<InputWindow>::make_table(input_table(), 0, input_extent());
    WindowLoader<OutputWindow>::make_table(output_table(), misalignment(), output_extent());
    __syncthreads();
  }

  __device__ __forceinline__ u32 input_stage(int index) const { return stages + index % STAGES * STAGE_BYTES; }
  __device__ __forceinline__ u32 output_stage(int index) const { return input_stage(index) + InputWindow::BYTES; }

  __device__ __forceinline__ void load(int index) {
    if (index >= count) return;
    if constexpr (WindowLoader<InputWindow>::THROUGH_REGISTERS) input_loader.load(input_table(), input_source(index), 0);
    if constexpr (WindowLoader<OutputWindow>::THROUGH_REGISTERS) output_loader.load(output_table(), output_source(index), misalignment());
  }
  __device__ __forceinline__ void store(int index) const {
    if (index >= count) return;
    if constexpr (WindowLoader<InputWindow>::THROUGH_REGISTERS) input_loader.store(input_stage(index), input_table());
    if constexpr (WindowLoader<OutputWindow>::THROUGH_REGISTERS) output_loader.store(output_stage(index), output_table());
  }
  __device__ __forceinline__ void copy(int index) const {
    if (index < count) {
      if constexpr (!WindowLoader<InputWindow>::THROUGH_REGISTERS)
        WindowLoader<InputWindow>::copy(input_stage(index), input_table(), input_source(index), 0);
      if constexpr (!WindowLoader<OutputWindow>::THROUGH_REGISTERS)
        WindowLoader<OutputWindow>::copy(output_stage(index), output_table(), output_source(index), misalignment());
    }
    ptx::commit_copies();
  }

 private:
  __device__ __forceinline__ u32 input_table() const { return stages + STAGES * STAGE_BYTES; }
  __device__ __forceinline__ u32 output_table() const { return input_table() + WindowLoader<InputWindow>::TABLE_BYTES; }
  __device__ __forceinline__ int misalignment() const { return TapsW::misalignment(place.tap_block_w, OUTPUT_COPY); }
  __device__ __forceinline__ Extent input_extent() const { return {sizes.height, sizes.width}; }
  __device__ __forceinline__ Extent output_extent() const { return {sizes.out_height, sizes.out_width}; }
  __device__ __forceinline__ Source input_source(int index) const {
    return tile_source<InputWindow>(input, input_extent(), first_tile + index, place.group, place.m0, 0, 0, sizes);
  }
  __device__ __forceinline__ Source output_source(int index) const {
    return tile_source<OutputWindow>(grad_output, output_extent(), first_tile + index, place.group, place.n0,
                                     TapsH::base(place.tap_block_h), TapsW::base(place.tap_block_w), sizes);
  }
};
