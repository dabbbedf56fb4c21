// Copies of one chunk of k of a tile's NCHW input into planes of 4 words, [k / 4][pixel][4], for forward/implicit_gemm_wgmma.cu; by the
// FILL_THREADS threads that follow those that multiply.
//
// A thread loads a few neighbouring pixels of the 4 (16 bits: 8) channels of a plane and stores them transposed.
// float32 is rounded to TF32 on the way, since the multiplier would truncate. Pixels outside the image are written as
// zeros.
//
// Through registers, although copies could be asynchronous: pieces that scatter over shared memory are copied three
// times as slowly as they are stored (measured). To keep loads under way while others are stored, the threads work in
// FILL_GROUPS groups that take the chunks in turn. (One thread cannot: all its loads count on one scoreboard, so that it
// would wait for the last one asked for.)
#pragma once

constexpr int FILL_THREADS = 32 * FILL_WARPS;
constexpr int FILL_GROUPS = 2;
constexpr int GROUP_THREADS = FILL_THREADS / FILL_GROUPS;

constexpr int PLANE_CHANNELS = 4 * CHANNELS_PER_WORD;
static_assert(!INPUT_CHANNELS_LAST && !NARROW);

// A place: the COPY_PIXELS neighbouring pixels of one plane; planes are dealt first, to neighbouring lanes.
constexpr int PLACES_PER_ROW = HALO_W / COPY_PIXELS * CHUNK_PLANES;
constexpr int PLACES = TILE_N * HALO_H * PLACES_PER_ROW;
constexpr int SLOTS = ceil_div(PLACES, GROUP_THREADS);
/// Registers that hold COPY pixels of one channel, and all that hold one place.
constexpr int ROW_REGISTERS = ceil_div(COPY_PIXELS * ITEM, 4);
constexpr int PLACE_REGISTERS = PLANE_CHANNELS * ROW_REGISTERS;
/// A chunk goes through a thread's registers in PASSES.
constexpr int PASS_SLOTS = max_of(1, min_of(SLOTS, (FILL_BUDGET - (SLOTS <= 10 ? 2 * SLOTS : SLOTS + 8)) / PLACE_REGISTERS));
constexpr int PASSES = ceil_div(SLOTS, PASS_SLOTS);

/// Many slots: where they go is computed anew, which takes fewer registers.
constexpr bool KEEP_TO = SLOTS <= 10;
constexpr bool SWAP_PIXELS = COPY_PIXELS == 4 && CHUNK_PLANES == 2;

struct InputFill {
  const char* chunk;  // first channel of the chunk, of the tile's first image
  int chunk_channel;   // the same, counted in the channel group
  int from[SLOTS];    // bytes from there, negative outside the image
  u32 to[KEEP_TO ? SLOTS : 1];  // bytes from the beginning of a stage
  int next_channel;   // bytes from one channel to the next
  u32 staged[PASS_SLOTS][PLACE_REGISTERS];

  __device__ __forceinline__ InputFill() {
#pragma unroll
    for (int s = 0; s < (KEEP_TO ? SLOTS : 0); ++s) to[s] = place_offset(thread(), s);
  }

  /// The chunk is the `chunk_index`-th of this tile.
  __device__ __forceinline__ void aim(const Element* input, const Origin& origin, int group, int chunk_index, const Sizes& sizes) {
    next_channel = channel_bytes(sizes);
    const int first_image = FLAT ? sizes.image_positions.quotient(origin.image) : origin.image;
    chunk = reinterpret_cast<const char*>(input) + static_cast<long long>(first_image) * IN_CHANNELS * sizes.pixels() * ITEM +
            (group * CI_GROUP + chunk_index * CHUNK_INPUT_CHANNELS) * static_cast<long long>(next_channel);
    chunk_channel = chunk_index * CHUNK_WORDS * CHANNELS_PER_WORD;
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const int place = thread() + s * GROUP_THREADS;
      const int plane = place % CHUNK_PLANES;
      const int w = column(s);
      const int h = place / PLACES_PER_ROW % HALO_H;
      const int n = place / PLACES_PER_ROW / HALO_H;
      int image, pixel;
      bool inside = exists(s);
      if constexpr (FLAT) {
        const int cell = origin.image + w, in_batch = sizes.image_positions.quotient(cell);
        image = in_batch - first_image;
        pixel = sizes.image_positions.remainder(cell, in_batch);
        inside = inside && in_batch < sizes.batch;
      } else {
        const int row = origin.row * CELL_INPUT_ROWS + MIN_SHIFT_H + h, col = origin.col + MIN_SHIFT_W - LEAD + w;
        image = n;
        pixel = row * sizes.width + col;
        inside = inside && row >= 0 && row < sizes.height && col >= 0 && col < sizes.width && origin.image + n < sizes.batch;
      }
      const int elements = image * (IN_CHANNELS * sizes.pixels()) + pixel;
      from[s] = inside ? elements * ITEM + plane * PLANE_CHANNELS * next_channel : -1;
    }
  }

  /// Start loading one pass of the chunk.
  template <int PASS>
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int i = 0; i < PASS_SLOTS; ++i) {
      const int s = PASS * PASS_SLOTS + i;
      if (s >= SLOTS) continue;
      const char* source = chunk + from[s];
#pragma unroll
      for (int c = 0; c < PLANE_CHANNELS; ++c)
        load_words<COPY_PIXELS * ITEM>(staged[i] + c * ROW_REGISTERS, source + c * next_channel,
                                       from[s] >= 0 && (!RAGGED_K || first_channel(s) + c < CI_GROUP));
    }
  }

  /// Store that pass to a stage.
  template <int PASS>
  __device__ __forceinline__ void store(u32 stage) const {
#pragma unroll
    for (int i = 0; i < PASS_SLOTS; ++i) {
      const int s = PASS * PASS_SLOTS + i;
      if (s < SLOTS && exists(s)) {
        const u32(&place)[PLACE_REGISTERS] = staged[i];
        u32 pixels[COPY_PIXELS][4];
#pragma unroll
        for (int p = 0; p < COPY_PIXELS; ++p)
#pragma unroll
          for (int word = 0; word < 4; ++word) {
            if constexpr (IS_16_BIT) {
              const u32 even = place[2 * word * ROW_REGISTERS + p / 2], odd = place[(2 * word + 1) * ROW_REGISTERS + p / 2];
              pixels[p][word] = p % 2 ? ptx::high_halves(even, odd) : ptx::low_halves(even, odd);
            } else {
              pixels[p][word] = ptx::round_to_tf32(place[word * ROW_REGISTERS + p]);
            }
          }
        const u32 target = stage + (KEEP_TO ? to[s] : place_offset(static_cast<int>(ptx::keep_in_register(thread())), s));
        if constexpr (SWAP_PIXELS) {
          // Of 8 lanes, 2 planes of 4 places, the later ones store each two pixels in the other order: no bank twice.
          const bool swap = column(s) / (2 * COPY_PIXELS) % 2;
#pragma unroll
          for (int p = 0; p < COPY_PIXELS; p += 2) {
            u32 first[4], second[4];
#pragma unroll
            for (int word = 0; word < 4; ++word) {
              first[word] = swap ? pixels[p + 1][word] : pixels[p][word];
              second[word] = swap ? pixels[p][word] : pixels[p + 1][word];
            }
            ptx::store_shared<4>(target + (p + swap) * 16, first);
            ptx::store_shared<4>(target + (p + 1 - swap) * 16, second);
          }
        } else {
#pragma unroll
          for (int p = 0; p < COPY_PIXELS; ++p) ptx::store_shared<4>(target + p * 16, pixels[p]);
        }
      }
    }
  }

  __device__ __forceinline__ void advance() {
    chunk += static_cast<long long>(CHUNK_INPUT_CHANNELS) * next_channel;
    chunk_channel += CHUNK_WORDS * CHANNELS_PER_WORD;
  }

 private:
  __device__ __forceinline__ static u32 place_offset(int thread, int s) {
    const int place = thread + s * GROUP_THREADS;
    const int w = place / CHUNK_PLANES % (HALO_W / COPY_PIXELS) * COPY_PIXELS;
    return (place % CHUNK_PLANES * PLANE_PITCH + place / PLACES_PER_ROW / HALO_H * IMAGE_PITCH +
            place / PLACES_PER_ROW % HALO_H * ROW_PITCH + w) * 16;
  }
  __device__ __forceinline__ static int thread() { return (threadIdx.x - THREADS) % GROUP_THREADS; }
  __device__ __forceinline__ static bool exists(int s) {
    return (s + 1) * GROUP_THREADS <= PLACES || thread() + s * GROUP_THREADS < PLACES;
  }
  __device__ __forceinline__ static int column(int s) {
    return (thread() + s * GROUP_THREADS) / CHUNK_PLANES % (HALO_W / COPY_PIXELS) * COPY_PIXELS;
  }

  /// First channel of a place, in the channel group.
  __device__ __forceinline__ int first_channel(int s) const {
    return chunk_channel + (thread() + s * GROUP_THREADS) % CHUNK_PLANES * PLANE_CHANNELS;
  }

  /// The bytes at `from`, or zeros.
  template <int BYTES>
  __device__ __forceinline__ static void load_words(u32* words, const char* from, bool real) {
#pragma unroll
    for (int i = 0; i < (BYTES + 3) / 4; ++i) words[i] = 0;
    if (real) ptx::load_global<BYTES>(words, from);
  }
};
