// Copies of one chunk of k of a tile's input into planes of 4 words, [k / 4][pixel][4], for forward_wgmma.cu.
//
// NCHW: a thread loads a few neighbouring pixels of the 4 (16 bits: 8) channels of a plane and stores them
// transposed. channels_last: it copies the 16 bytes of one pixel. float32 is rounded to TF32 on the way, since the
// multiplier would truncate. Pixels outside the image are never written: their places are zeroed once.
#pragma once

/// channels_last of 16 bits needs no work on the way and goes asynchronously; the rest passes through registers.
constexpr bool THROUGH_REGISTERS = !(INPUT_CHANNELS_LAST && IS_16_BIT);
constexpr int PLANE_CHANNELS = 4 * CHANNELS_PER_WORD;
static_assert(!INPUT_CHANNELS_LAST || COPY == PLANE_CHANNELS, "a pixel's channels must come by 16 bytes");

// A place: the COPY_PIXELS neighbouring pixels of one plane; planes are dealt first, to neighbouring lanes.
constexpr int PLACES_PER_ROW = HALO_W / COPY_PIXELS * CHUNK_PLANES;
constexpr int PLACES = TILE_N * HALO_H * PLACES_PER_ROW;
constexpr int SLOTS = ceil_div(PLACES, THREADS);
/// Registers that hold COPY pixels of one channel (NCHW), and all that hold one place.
constexpr int ROW_REGISTERS = ceil_div(COPY_PIXELS * ITEM, 4);
constexpr int PLACE_REGISTERS = INPUT_CHANNELS_LAST ? 4 : PLANE_CHANNELS * ROW_REGISTERS;

struct InputFill {
  const char* chunk;  // first channel of the next chunk of the tile's first image
  int from[SLOTS];    // bytes from there, negative where there is nothing to copy
  u32 to[SLOTS];      // bytes from the beginning of a stage
  int next_channel;   // first channel of the next chunk, in the group
  u32 staged[THROUGH_REGISTERS ? SLOTS : 1][PLACE_REGISTERS];

  __device__ __forceinline__ InputFill(const Element* input, const Origin& origin, int group, int chunk_index,
                                       int batch) {
    const int first_image = FLAT ? origin.image / PIXELS : origin.image;
    chunk = reinterpret_cast<const char*>(input) + static_cast<long long>(first_image) * IN_CHANNELS * PIXELS * ITEM +
            group * CI_GROUP * CHANNEL_BYTES + chunk_index * CHUNK_BYTES;
    next_channel = chunk_index * CHUNK_WORDS * CHANNELS_PER_WORD;
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const int place = threadIdx.x + s * THREADS;
      const int plane = place % CHUNK_PLANES;
      const int w = column(s);
      const int h = place / PLACES_PER_ROW % HALO_H;
      const int n = place / PLACES_PER_ROW / HALO_H;
      int image, pixel;
      bool inside = place < PLACES;
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
      to[s] = (plane * PLANE_PITCH + n * IMAGE_PITCH + h * ROW_PITCH + (NARROW ? 0 : w)) * 16;
    }
  }

  /// Start copying the next chunk to a stage (channels_last, 16 bits).
  __device__ __forceinline__ void copy(u32 stage) {
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      if (from[s] >= 0) {
        const bool real = !RAGGED_K || first_channel(s) < CI_GROUP;
        each_copy(s, 0, [&](int offset) {
          ptx::copy_async_or_zero<16>(stage + to[s] + offset, real ? chunk + from[s] : chunk, real);
        });
      }
    }
    advance();
  }

  /// Start loading the next chunk into registers.
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const char* source = chunk + from[s];
      if constexpr (INPUT_CHANNELS_LAST) {
        load_words<16>(staged[s], source, from[s] >= 0 && (!RAGGED_K || first_channel(s) < CI_GROUP));
      } else {
#pragma unroll
        for (int c = 0; c < PLANE_CHANNELS; ++c)
          load_words<COPY_PIXELS * ITEM>(staged[s] + c * ROW_REGISTERS, source + c * CHANNEL_BYTES,
                                         from[s] >= 0 && (!RAGGED_K || first_channel(s) + c < CI_GROUP));
      }
    }
    advance();
  }

  /// Store the loaded chunk to a stage.
  __device__ __forceinline__ void store(u32 stage) {
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      if (from[s] >= 0) {
#pragma unroll
        for (int p = 0; p < COPY_PIXELS; ++p) {
          u32 words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if constexpr (INPUT_CHANNELS_LAST) {
              words[i] = ptx::round_to_tf32(staged[s][i]);
            } else if constexpr (IS_16_BIT) {
              const u32 even = staged[s][2 * i * ROW_REGISTERS + p / 2];
              const u32 odd = staged[s][(2 * i + 1) * ROW_REGISTERS + p / 2];
              words[i] = p % 2 ? ptx::high_halves(even, odd) : ptx::low_halves(even, odd);
            } else {
              words[i] = ptx::round_to_tf32(staged[s][i * ROW_REGISTERS + p]);
            }
          }
          each_copy(s, p, [&](int offset) { ptx::store_shared<4>(stage + to[s] + offset, words); });
        }
      }
    }
  }

 private:
  __device__ __forceinline__ static int column(int s) {
    return static_cast<int>(threadIdx.x + s * THREADS) / CHUNK_PLANES % (HALO_W / COPY_PIXELS) * COPY_PIXELS;
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
    return next_channel + static_cast<int>(threadIdx.x + s * THREADS) % CHUNK_PLANES * PLANE_CHANNELS;
  }

  __device__ __forceinline__ void advance() {
    chunk += CHUNK_BYTES;
    next_channel += CHUNK_WORDS * CHANNELS_PER_WORD;
  }

  /// The bytes at `from`, or zeros.
  template <int BYTES>
  __device__ __forceinline__ static void load_words(u32* words, const char* from, bool real) {
#pragma unroll
    for (int i = 0; i < (BYTES + 3) / 4; ++i) words[i] = 0;
    if (real) ptx::load_global<BYTES>(words, from);
  }
};
