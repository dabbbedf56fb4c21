// Copies of one chunk of k of a tile's input into planes of 4 words, [k / 4][pixel][4], for forward_wgmma.cu; by the
// FILL_THREADS threads that follow those that multiply.
//
// NCHW: a thread copies a few neighbouring pixels of the 4 (16 bits: 8) channels of a plane, and transposes them.
// channels_last: it copies the 16 bytes of one pixel. float32 is rounded to TF32, since the multiplier would truncate.
// Pixels outside the image are written as zeros.
//
// Copies are asynchronous, to where the values will stay: a few pixels are as many bytes before they are transposed as
// after. Once they have come, each thread turns what it copied itself, so that no thread waits for another. Single
// 16-bit numbers, and pixels that go to several places (NARROW), pass through registers instead.
#pragma once

constexpr int FILL_WARPS = 4;
constexpr int FILL_THREADS = 32 * FILL_WARPS;

/// channels_last of 16 bits needs no work but the copy.
constexpr bool FILL_COPIES = INPUT_CHANNELS_LAST && IS_16_BIT;
constexpr bool THROUGH_REGISTERS = !FILL_COPIES && (NARROW || COPY * ITEM < 4);
constexpr int PLANE_CHANNELS = 4 * CHANNELS_PER_WORD;
static_assert(!INPUT_CHANNELS_LAST || COPY == PLANE_CHANNELS, "a pixel's channels must come by 16 bytes");

// A place: the COPY_PIXELS neighbouring pixels of one plane; planes are dealt first, to neighbouring lanes.
constexpr int PLACES_PER_ROW = HALO_W / COPY_PIXELS * CHUNK_PLANES;
constexpr int PLACES = TILE_N * HALO_H * PLACES_PER_ROW;
constexpr int SLOTS = ceil_div(PLACES, FILL_THREADS);
/// Registers that hold COPY pixels of one channel (NCHW), and all that hold one place.
constexpr int ROW_REGISTERS = ceil_div(COPY_PIXELS * ITEM, 4);
constexpr int PLACE_REGISTERS = INPUT_CHANNELS_LAST ? 4 : PLANE_CHANNELS * ROW_REGISTERS;
/// Copies of one place, and bytes of each.
constexpr int PIECES = INPUT_CHANNELS_LAST ? 1 : PLANE_CHANNELS;
constexpr int PIECE_BYTES = INPUT_CHANNELS_LAST ? 16 : COPY * ITEM;
/// Chunks that are asked for before the first of them must have come.
constexpr int FILL_AHEAD = FILL_COPIES ? 0 : THROUGH_REGISTERS ? (STAGES > 2 && SLOTS * (2 * PLACE_REGISTERS + 2) <= FILL_BUDGET ? 2 : 1)
                                                             : most(1, STAGES - 1 - STAGES / 4);

struct InputFill {
  const char* chunk;  // first channel of the next chunk of the tile's first image
  int next_channel;   // the same, counted in the group
  int from[SLOTS];    // bytes from there, negative outside the image
  u32 to[SLOTS];      // bytes from the beginning of a stage
  u32 staged[most(1, FILL_AHEAD)][THROUGH_REGISTERS ? SLOTS : 1][PLACE_REGISTERS];

  __device__ __forceinline__ InputFill() {
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const int place = thread() + s * FILL_THREADS;
      to[s] = (place % CHUNK_PLANES * PLANE_PITCH + place / PLACES_PER_ROW / HALO_H * IMAGE_PITCH +
               place / PLACES_PER_ROW % HALO_H * ROW_PITCH + (NARROW ? 0 : column(s))) * 16;
    }
  }

  /// The next chunk is the `chunk_index`-th of this tile.
  __device__ __forceinline__ void aim(const Element* input, const Origin& origin, int group, int chunk_index, int batch) {
    const int first_image = FLAT ? origin.image / PIXELS : origin.image;
    chunk = reinterpret_cast<const char*>(input) + static_cast<long long>(first_image) * IN_CHANNELS * PIXELS * ITEM +
            group * CI_GROUP * CHANNEL_BYTES + chunk_index * CHUNK_BYTES;
    next_channel = chunk_index * CHUNK_WORDS * CHANNELS_PER_WORD;
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const int place = thread() + s * FILL_THREADS;
      const int plane = place % CHUNK_PLANES;
      const int w = column(s);
      const int h = place / PLACES_PER_ROW % HALO_H;
      const int n = place / PLACES_PER_ROW / HALO_H;
      int image, pixel;
      bool inside = exists(s);
      if constexpr (FLAT) {
        const unsigned cell = origin.image + w;
        image = static_cast<int>(cell / PIXELS) - first_image;
        pixel = static_cast<int>(cell % PIXELS);
        inside = inside && first_image + image < batch;
      } else {
        const int row = origin.row * CELL_INPUT_ROWS + MIN_SHIFT_H + h, col = NARROW ? w : origin.col + MIN_SHIFT_W - LEAD + w;
        image = n;
        pixel = row * WIDTH + col;
        inside = inside && row >= 0 && row < HEIGHT && col >= 0 && col < WIDTH && origin.image + n < batch;
      }
      const int elements = image * (IN_CHANNELS * PIXELS) + (INPUT_CHANNELS_LAST ? pixel * IN_CHANNELS : pixel);
      from[s] = inside ? elements * ITEM + plane * PLANE_CHANNELS * static_cast<int>(CHANNEL_BYTES) : -1;
    }
  }

  /// Ask for the next chunk, which will be in `stage`; on its way it may be in the registers `PART`.
  template <int PART>
  __device__ __forceinline__ void ask(u32 stage) {
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      if (!exists(s)) continue;
#pragma unroll
      for (int c = 0; c < PIECES; ++c) {
        const bool real = from[s] >= 0 && (!RAGGED_K || first_channel(s) + c < CI_GROUP);
        const char* source = real ? chunk + from[s] + c * CHANNEL_BYTES : chunk;
        if constexpr (THROUGH_REGISTERS) {
          load_words<PIECE_BYTES>(staged[PART][s] + c * ROW_REGISTERS, source, real);
        } else if constexpr (NARROW) {
          each_copy(s, 0, [&](int offset) { ptx::copy_async_or_zero<16>(stage + to[s] + offset, source, real); });
        } else {
          ptx::copy_async_or_zero<PIECE_BYTES>(stage + to[s] + c * PIECE_BYTES, source, real);
        }
      }
    }
    chunk += CHUNK_BYTES;
    next_channel += CHUNK_WORDS * CHANNELS_PER_WORD;
  }

  /// Put a chunk that has come into the order that is multiplied from.
  template <int PART>
  __device__ __forceinline__ void turn(u32 stage) {
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      if (!exists(s)) continue;
      u32(&place)[PLACE_REGISTERS] = staged[PART][THROUGH_REGISTERS ? s : 0];
      if constexpr (!THROUGH_REGISTERS) {
#pragma unroll
        for (int p = 0; p < COPY_PIXELS; ++p) {
          const uint4 four = ptx::load_shared_vector(stage + to[s] + p * 16);
          place[4 * p] = four.x, place[4 * p + 1] = four.y, place[4 * p + 2] = four.z, place[4 * p + 3] = four.w;
        }
      }
#pragma unroll
      for (int p = 0; p < COPY_PIXELS; ++p) {
        u32 words[4];
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          if constexpr (INPUT_CHANNELS_LAST) {
            words[word] = ptx::round_to_tf32(place[word]);
          } else if constexpr (IS_16_BIT) {
            const u32 even = place[2 * word * ROW_REGISTERS + p / 2], odd = place[(2 * word + 1) * ROW_REGISTERS + p / 2];
            words[word] = p % 2 ? ptx::high_halves(even, odd) : ptx::low_halves(even, odd);
          } else {
            words[word] = ptx::round_to_tf32(place[word * ROW_REGISTERS + p]);
          }
        }
        each_copy(s, p, [&](int offset) { ptx::store_shared<4>(stage + to[s] + offset, words); });
      }
    }
  }

 private:
  __device__ __forceinline__ static int thread() { return threadIdx.x - THREADS; }
  __device__ __forceinline__ static bool exists(int s) {
    return (s + 1) * FILL_THREADS <= PLACES || thread() + s * FILL_THREADS < PLACES;
  }
  __device__ __forceinline__ static int column(int s) {
    return (thread() + s * FILL_THREADS) / CHUNK_PLANES % (HALO_W / COPY_PIXELS) * COPY_PIXELS;
  }

  /// put(bytes from to[s]) for each place that pixel `p` of slot `s` goes to: one, or with NARROW one for each shift.
  template <class Put>
  __device__ __forceinline__ void each_copy(int s, int p, const Put& put) const {
    if constexpr (NARROW) {
#pragma unroll
      for (int shift = MIN_SHIFT_W; shift <= MAX_SHIFT_W; ++shift) {
        const int cell = column(s) + p - shift;
        if (cell >= 0 && cell < TILE_W) put(((shift - MIN_SHIFT_W) * SHIFTED_PITCH + cell) * 16);
      }
    } else {
      put(p * 16);
    }
  }

  /// First channel of a place of the next chunk, in the group.
  __device__ __forceinline__ int first_channel(int s) const {
    return next_channel + (thread() + s * FILL_THREADS) % CHUNK_PLANES * PLANE_CHANNELS;
  }

  /// The bytes at `from`, or zeros.
  template <int BYTES>
  __device__ __forceinline__ static void load_words(u32* words, const char* from, bool real) {
#pragma unroll
    for (int i = 0; i < (BYTES + 3) / 4; ++i) words[i] = 0;
    if (real) ptx::load_global<BYTES>(words, from);
  }
};
