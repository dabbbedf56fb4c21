// Copies the phases of grad_output into planes of their images, [k / 4][column phase][pixel][4], for
// grad_input/implicit_gemm_wgmma.cu. The PRODUCER_THREADS threads that follow the consumers do it.
//
// NCHW: a thread loads a few neighbouring pixels of the 4 (16 bits: 8) channels of a plane and stores them transposed,
// each in the image of its column phase. channels_last: it copies the 16 bytes of one pixel. float32 is rounded to TF32 on
// the way, because the tensor cores would truncate it; with IEEE, the remainder goes to planes of its own. Pixels outside
// the image become zeros. PHASES_AHEAD phases are on their way in registers.
#pragma once

constexpr int PRODUCER_THREADS = 32 * PRODUCER_WARPS;
constexpr int PLANE_CHANNELS = 4 * CHANNELS_PER_WORD;
static_assert(!INPUT_CHANNELS_LAST || COPY == PLANE_CHANNELS, "a pixel's channels must come by 16 bytes");

// One copy is COPY_PIXELS neighbouring pixels of one plane; neighbouring lanes copy different planes.
constexpr int COPIES_OF_A_ROW = COPIED_W / COPY_PIXELS * CHUNK_PLANES;
constexpr int COPIES_OF_A_PHASE = TILE_N * COPIED_H * COPIES_OF_A_ROW;
constexpr int SLOTS = ceil_div(COPIES_OF_A_PHASE, PRODUCER_THREADS);
/// Registers that hold COPY pixels of one channel (NCHW), and those that hold one copy.
constexpr int ROW_REGISTERS = ceil_div(COPY_PIXELS * ITEM, 4);
constexpr int COPY_REGISTERS = INPUT_CHANNELS_LAST ? 4 : PLANE_CHANNELS * ROW_REGISTERS;
static_assert(SOURCE_PHASES % PHASES_AHEAD == 0);

// A pointer and a word of bits are kept for each copy of a thread, so that a copy takes few instructions.
struct InputLoader {
  const char* input;
  const Sizes& sizes;
  int next_channel;           // bytes from one channel to the next
  int left;                   // channels of the group from the current chunk to the last
  const char* source[SLOTS];  // where the copy reads in that chunk
  unsigned bits[SLOTS];       // 16: the next phase to be loaded has this pixel; 32: the one after it, and so on
  u32 to[SLOTS];              // bytes from the beginning of a stage
  u32 staged[PHASES_AHEAD][SLOTS][COPY_REGISTERS];

  __device__ __forceinline__ InputLoader(const Element* input, const Sizes& sizes)
      : input(reinterpret_cast<const char*>(input)), sizes(sizes), next_channel(channel_bytes(sizes)) {
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) to[s] = (plane(s) * PLANE_PITCH + stored_row(image(s), row(s), column(s))) * 16;
  }

  /// Goes to a chunk of another work tile.
  __device__ __forceinline__ void start_at(const Origin& origin, int group, int chunk_index) {
    const int first_image = FLAT ? sizes.image_positions.quotient(origin.image) : origin.image;
    const char* chunk = input + static_cast<long long>(first_image) * IN_CHANNELS * sizes.pixels() * ITEM +
                        (group * CI_GROUP + chunk_index * CHUNK_INPUT_CHANNELS) * static_cast<long long>(next_channel);
    left = CI_GROUP - chunk_index * CHUNK_WORDS * CHANNELS_PER_WORD;
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const Source source_pixel = source_of(origin, image(s), row(s), column(s), sizes);
      const int pixel = source_pixel.row * sizes.width + source_pixel.col;
      const int elements = source_pixel.image * (IN_CHANNELS * sizes.pixels()) + (INPUT_CHANNELS_LAST ? pixel * IN_CHANNELS : pixel);
      source[s] = chunk + elements * ITEM + plane(s) * PLANE_CHANNELS * next_channel;
      const bool wanted = exists(s) && (INPUT_CHANNELS_LAST || COPY_PIXELS > 1 || stored_column(FIRST_COL + column(s)).used);
      bits[s] = wanted ? phase_bits(source_pixel.phases) << 4 : 0;
    }
    drop_ragged();
  }
  __device__ __forceinline__ void next_chunk() {
    left -= CHUNK_WORDS * CHANNELS_PER_WORD;
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) source[s] += static_cast<long long>(CHUNK_INPUT_CHANNELS) * next_channel;
    drop_ragged();
  }
  /// Goes on after a phase was loaded.
  __device__ __forceinline__ void next_phase(int s, bool last) {
    bits[s] = __funnelshift_r(bits[s], bits[s], last ? 33 - SOURCE_PHASES : 1);
  }

  /// Starts the load of slot `s` of a phase.
  template <int PHASE>
  __device__ __forceinline__ void load(int s) {
    u32(&words)[COPY_REGISTERS] = staged[PHASE % PHASES_AHEAD][s];
    const bool inside = (bits[s] & 16u) != 0;
    // Pinned: otherwise the compiler computes the address of every load anew.
    const char* from = ptx::keep_in_register(source[s] + phase_offset<PHASE>(sizes));
    const u32 next = ptx::keep_in_register(static_cast<u32>(next_channel));
    if constexpr (INPUT_CHANNELS_LAST) {
      load_words<16>(words, from, inside);
    } else {
#pragma unroll
      for (int c = 0; c < PLANE_CHANNELS; ++c)
        load_words<COPY_PIXELS * ITEM>(words + c * ROW_REGISTERS, from + static_cast<unsigned long long>(c) * next,
                                       inside && (!RAGGED_K || plane(s) * PLANE_CHANNELS + c < left));
    }
    next_phase(s, PHASE == SOURCE_PHASES - 1);
  }

  /// Stores slot `s` of a phase that was loaded to a stage.
  template <int PHASE>
  __device__ __forceinline__ void store(int s, u32 stage) const {
    const u32(&loaded)[COPY_REGISTERS] = staged[PHASE % PHASES_AHEAD][s];
    if (!exists(s)) return;
#pragma unroll
    for (int p = 0; p < COPY_PIXELS; ++p) {
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (INPUT_CHANNELS_LAST) {
          words[i] = loaded[i];
        } else if constexpr (IS_16_BIT) {
          const u32 even = loaded[2 * i * ROW_REGISTERS + p / 2], odd = loaded[(2 * i + 1) * ROW_REGISTERS + p / 2];
          words[i] = p % 2 ? ptx::high_halves(even, odd) : ptx::low_halves(even, odd);
        } else {
          words[i] = loaded[i * ROW_REGISTERS + p];
        }
      }
      each_copy(s, p, [&](int offset) {
        if constexpr (IS_16_BIT) {
          ptx::store_shared<4>(stage + offset, words);
        } else {
          store_rounded(stage + offset, words);
        }
      });
    }
  }

 private:
  /// Clears the bits of planes of which the group has no channels: they are not loaded.
  __device__ __forceinline__ void drop_ragged() {
    if constexpr (RAGGED_K) {
#pragma unroll
      for (int s = 0; s < SLOTS; ++s)
        if (plane(s) * PLANE_CHANNELS >= left) bits[s] = 0;
    }
  }
  /// Stores four words of a pixel as TF32, and with IEEE the remainders.
  __device__ __forceinline__ static void store_rounded(u32 to, const u32 (&exact)[4]) {
    u32 high[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) high[i] = ptx::round_to_tf32(exact[i]);
    ptx::store_shared<4>(to, high);
    if constexpr (PARTS == 2) {
      u32 low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) low[i] = ptx::low_part(__uint_as_float(exact[i]), high[i]);
      ptx::store_shared<4>(to + CHUNK_WORDS * PLANE_PITCH * 4, low);
    }
  }

  __device__ __forceinline__ static int index(int s) { return static_cast<int>(threadIdx.x) - THREADS / M_PARTS + s * PRODUCER_THREADS; }
  __device__ __forceinline__ static bool exists(int s) { return (s + 1) * PRODUCER_THREADS <= COPIES_OF_A_PHASE || index(s) < COPIES_OF_A_PHASE; }
  __device__ __forceinline__ static int plane(int s) { return index(s) % CHUNK_PLANES; }
  __device__ __forceinline__ static int column(int s) {
    return index(s) / CHUNK_PLANES % (COPIED_W / COPY_PIXELS) * COPY_PIXELS;
  }
  __device__ __forceinline__ static int row(int s) { return index(s) / COPIES_OF_A_ROW % COPIED_H; }
  __device__ __forceinline__ static int image(int s) { return index(s) / COPIES_OF_A_ROW / COPIED_H; }

  /// Calls put(bytes from the stage) for each copy of pixel `p` of slot `s` in shared memory: one, or with NARROW one for each
  /// shift.
  template <class Put>
  __device__ __forceinline__ void each_copy(int s, int p, const Put& put) const {
    const int first = to[s];
    if constexpr (INPUT_CHANNELS_LAST) {
      put_position(first, NARROW ? column(s) : 0, 0, put);
    } else if constexpr (COPY_PIXELS % STEP_W == 0) {
      // Every segment begins at the same phase, so the differences between its pixels are constants.
      const StoredColumn at = stored_column(FIRST_COL + p);
      const int steps = column(s) / STEP_W;
      if (at.used) put_position(first + (NARROW ? 0 : steps * 16), at.position + (NARROW ? steps : 0), at.column_phase, put);
    } else {
      const StoredColumn at = stored_column(FIRST_COL + column(s) + p);
      if (at.used) put_position(first, at.position, at.column_phase, put);
    }
  }

  template <class Put>
  __device__ __forceinline__ static void put_position(int first, int position, int column_phase, const Put& put) {
    if constexpr (NARROW) {
#pragma unroll
      for (int shift = 0; shift <= MAX_SHIFT_W; ++shift)
        if (position >= shift && position - shift < TILE_W)
          put(first + (column_phase * COLUMN_PHASE_PITCH + shift * SHIFTED_PITCH + position - shift) * 16);
    } else {
      put(first + (column_phase * COLUMN_PHASE_PITCH + position) * 16);
    }
  }

  /// Loads the bytes at `from`, or zeros.
  template <int BYTES>
  __device__ __forceinline__ static void load_words(u32* words, const char* from, bool real) {
#pragma unroll
    for (int i = 0; i < (BYTES + 3) / 4; ++i) words[i] = 0;
    if (real) ptx::load_global<BYTES>(words, from);
  }
};
