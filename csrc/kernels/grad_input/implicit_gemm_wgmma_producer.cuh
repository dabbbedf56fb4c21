// Copies of slices of grad_output into pictures of planes, [k / 4][picture][pixel][4], for grad_input/implicit_gemm_wgmma.cu, by the
// FILL_THREADS threads that follow those that multiply.
//
// NCHW: a thread loads a few neighbouring pixels of the 4 (16 bits: 8) channels of a plane and stores them transposed,
// each in the picture of its column. channels_last: it copies the 16 bytes of one pixel. float32 is rounded to TF32 on
// the way, since the multiplier would truncate; with IEEE, what that leaves over goes to planes of its own. Pixels
// outside the image are written as zeros. Of FILL_AHEAD slices everything is on its way in registers.
#pragma once

constexpr int FILL_THREADS = 32 * FILL_WARPS;
constexpr int PLANE_CHANNELS = 4 * CHANNELS_PER_WORD;
static_assert(!INPUT_CHANNELS_LAST || COPY == PLANE_CHANNELS, "a pixel's channels must come by 16 bytes");

// A place: the COPY_PIXELS neighbouring pixels of one plane; planes are dealt first, to neighbouring lanes.
constexpr int PLACES_PER_ROW = COPIED_W / COPY_PIXELS * CHUNK_PLANES;
constexpr int PLACES = TILE_N * COPIED_H * PLACES_PER_ROW;
constexpr int SLOTS = ceil_div(PLACES, FILL_THREADS);
/// Registers that hold COPY pixels of one channel (NCHW), and all that hold one place.
constexpr int ROW_REGISTERS = ceil_div(COPY_PIXELS * ITEM, 4);
constexpr int PLACE_REGISTERS = INPUT_CHANNELS_LAST ? 4 : PLANE_CHANNELS * ROW_REGISTERS;
static_assert(SLICES % FILL_AHEAD == 0);

// For each place a pointer and a word of bits are carried along, so that a copy is a handful of instructions.
struct InputFill {
  const char* input;
  const Sizes& sizes;
  int next_channel;           // bytes from one channel to the next
  int left;                   // channels of the group from the chunk that is loaded on
  const char* source[SLOTS];  // the place in that chunk
  unsigned bits[SLOTS];       // 16: the next slice to be loaded has the place; 32: the one after it, and so on
  u32 to[SLOTS];              // bytes from the beginning of a stage
  u32 staged[FILL_AHEAD][SLOTS][PLACE_REGISTERS];

  __device__ __forceinline__ InputFill(const Element* input, const Sizes& sizes)
      : input(reinterpret_cast<const char*>(input)), sizes(sizes), next_channel(channel_bytes(sizes)) {
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) to[s] = (plane(s) * PLANE_PITCH + stored_row(image(s), row(s), column(s))) * 16;
  }

  /// To the first chunk of other work.
  __device__ __forceinline__ void aim(const Origin& origin, int group, int chunk_index) {
    const int first_image = FLAT ? sizes.image_positions.quotient(origin.image) : origin.image;
    const char* chunk = input + static_cast<long long>(first_image) * IN_CHANNELS * sizes.pixels() * ITEM +
                        (group * CI_GROUP + chunk_index * CHUNK_INPUT_CHANNELS) * static_cast<long long>(next_channel);
    left = CI_GROUP - chunk_index * CHUNK_WORDS * CHANNELS_PER_WORD;
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const Place place = place_of(origin, image(s), row(s), column(s), sizes);
      const int pixel = place.row * sizes.width + place.col;
      const int elements = place.image * (IN_CHANNELS * sizes.pixels()) + (INPUT_CHANNELS_LAST ? pixel * IN_CHANNELS : pixel);
      source[s] = chunk + elements * ITEM + plane(s) * PLANE_CHANNELS * next_channel;
      const bool wanted = exists(s) && (INPUT_CHANNELS_LAST || COPY_PIXELS > 1 || column_at(FIRST_COL + column(s)).used);
      bits[s] = wanted ? slice_bits(place.slices) << 4 : 0;
    }
    drop_ragged();
  }
  __device__ __forceinline__ void next_chunk() {
    left -= CHUNK_WORDS * CHANNELS_PER_WORD;
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) source[s] += static_cast<long long>(CHUNK_INPUT_CHANNELS) * next_channel;
    drop_ragged();
  }
  /// After a slice was loaded.
  __device__ __forceinline__ void next_slice(int s, bool last) {
    bits[s] = __funnelshift_r(bits[s], bits[s], last ? 33 - SLICES : 1);
  }

  /// Start loading a place of a slice.
  template <int SLICE>
  __device__ __forceinline__ void load(int s) {
    u32(&words)[PLACE_REGISTERS] = staged[SLICE % FILL_AHEAD][s];
    const bool inside = (bits[s] & 16u) != 0;
    // Pinned: else the compiler finds the address of every load anew.
    const char* from = ptx::keep_in_register(source[s] + slice_distance<SLICE>(sizes));
    const u32 next = ptx::keep_in_register(static_cast<u32>(next_channel));
    if constexpr (INPUT_CHANNELS_LAST) {
      load_words<16>(words, from, inside);
    } else {
#pragma unroll
      for (int c = 0; c < PLANE_CHANNELS; ++c)
        load_words<COPY_PIXELS * ITEM>(words + c * ROW_REGISTERS, from + static_cast<unsigned long long>(c) * next,
                                       inside && (!RAGGED_K || plane(s) * PLANE_CHANNELS + c < left));
    }
    next_slice(s, SLICE == SLICES - 1);
  }

  /// Store the place of a slice that was loaded to a stage.
  template <int SLICE>
  __device__ __forceinline__ void store(int s, u32 stage) const {
    const u32(&loaded)[PLACE_REGISTERS] = staged[SLICE % FILL_AHEAD][s];
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
          put_rounded(stage + offset, words);
        }
      });
    }
  }

 private:
  /// Planes of which the group has no channels are not loaded.
  __device__ __forceinline__ void drop_ragged() {
    if constexpr (RAGGED_K) {
#pragma unroll
      for (int s = 0; s < SLOTS; ++s)
        if (plane(s) * PLANE_CHANNELS >= left) bits[s] = 0;
    }
  }
  /// Four words of a pixel as TF32, and with IEEE what is left over.
  __device__ __forceinline__ static void put_rounded(u32 to, const u32 (&exact)[4]) {
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

  __device__ __forceinline__ static int index(int s) { return static_cast<int>(threadIdx.x) - THREADS / M_PARTS + s * FILL_THREADS; }
  __device__ __forceinline__ static bool exists(int s) { return (s + 1) * FILL_THREADS <= PLACES || index(s) < PLACES; }
  __device__ __forceinline__ static int plane(int s) { return index(s) % CHUNK_PLANES; }
  __device__ __forceinline__ static int column(int s) {
    return index(s) / CHUNK_PLANES % (COPIED_W / COPY_PIXELS) * COPY_PIXELS;
  }
  __device__ __forceinline__ static int row(int s) { return index(s) / PLACES_PER_ROW % COPIED_H; }
  __device__ __forceinline__ static int image(int s) { return index(s) / PLACES_PER_ROW / COPIED_H; }

  /// put(bytes from the stage) for each place that pixel `p` of slot `s` goes to: one, or with NARROW one for each shift.
  template <class Put>
  __device__ __forceinline__ void each_copy(int s, int p, const Put& put) const {
    const int first = to[s];
    if constexpr (INPUT_CHANNELS_LAST) {
      put_cell(first, NARROW ? column(s) : 0, 0, put);
    } else if constexpr (COPY_PIXELS % STEP_W == 0) {
      // Every run begins at the same phase: what differs between its pixels is constant.
      const Column at = column_at(FIRST_COL + p);
      if (at.used) put_cell(first + (NARROW ? 0 : column(s) / STEP_W * 16), at.cell + (NARROW ? column(s) / STEP_W : 0), at.picture, put);
    } else {
      const Column at = column_at(FIRST_COL + column(s) + p);
      if (at.used) put_cell(first, at.cell, at.picture, put);
    }
  }

  template <class Put>
  __device__ __forceinline__ static void put_cell(int first, int cell, int picture, const Put& put) {
    if constexpr (NARROW) {
#pragma unroll
      for (int shift = 0; shift <= MAX_SHIFT_W; ++shift)
        if (cell >= shift && cell - shift < TILE_W)
          put(first + (picture * PICTURE_PITCH + shift * SHIFTED_PITCH + cell - shift) * 16);
    } else {
      put(first + (picture * PICTURE_PITCH + cell) * 16);
    }
  }

  /// The bytes at `from`, or zeros.
  template <int BYTES>
  __device__ __forceinline__ static void load_words(u32* words, const char* from, bool real) {
#pragma unroll
    for (int i = 0; i < (BYTES + 3) / 4; ++i) words[i] = 0;
    if (real) ptx::load_global<BYTES>(words, from);
  }
};
