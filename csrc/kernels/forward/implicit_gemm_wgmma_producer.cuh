// The producers of forward/implicit_gemm_wgmma.cu: PRODUCER_THREADS threads behind the consumers, which copy one chunk of k of
// a tile's NCHW input into planes of 4 words, [k / 4][pixel][4].
//
// A thread loads a few neighbouring pixels of the 4 (16 bits: 8) channels of a plane, and stores them transposed. It rounds
// float32 to TF32, because the multiplier would truncate. It writes zeros for pixels outside the image.
//
// The copies go through registers, although they could be asynchronous: asynchronous copies that scatter over shared memory
// take three times as long as stores (measured on an H200). Two groups of threads load the chunks alternately, so that loads
// are in flight while others are stored. One thread cannot do both: all its loads count on one scoreboard, so that it would
// wait for the last load that it issued.
#pragma once

constexpr int PRODUCER_THREADS = 32 * PRODUCER_WARPS;
constexpr int PRODUCER_GROUPS = 2;
constexpr int GROUP_THREADS = PRODUCER_THREADS / PRODUCER_GROUPS;

constexpr int PLANE_CHANNELS = 4 * CHANNELS_PER_WORD;
static_assert(!INPUT_CHANNELS_LAST && !NARROW);

// A copy is COPY_PIXELS neighbouring pixels of one plane. Neighbouring lanes copy neighbouring planes.
constexpr int COPIES_PER_ROW = HALO_W / COPY_PIXELS * CHUNK_PLANES;
constexpr int COPIES = TILE_N * HALO_H * COPIES_PER_ROW;
constexpr int SLOTS = ceil_div(COPIES, GROUP_THREADS);
/// Registers that hold COPY pixels of one channel, and registers of one copy.
constexpr int ROW_REGISTERS = ceil_div(COPY_PIXELS * ITEM, 4);
constexpr int COPY_REGISTERS = PLANE_CHANNELS * ROW_REGISTERS;
/// A chunk goes through a thread's registers in PASSES passes.
constexpr int PASS_SLOTS = max_of(1, min_of(SLOTS, (STAGING_REGISTERS - (SLOTS <= 10 ? 2 * SLOTS : SLOTS + 8)) / COPY_REGISTERS));
constexpr int PASSES = ceil_div(SLOTS, PASS_SLOTS);

/// Whether a thread keeps the addresses to which it stores. With many slots it computes them again, to save registers.
constexpr bool KEEP_TO = SLOTS <= 10;
constexpr bool SWAP_PIXELS = COPY_PIXELS == 4 && CHUNK_PLANES == 2;

struct InputLoader {
  const char* chunk;            // first channel of the chunk, of the tile's first image
  int chunk_channel;            // the number of that channel in the group
  int from[SLOTS];              // bytes from there; negative outside the image
  u32 to[KEEP_TO ? SLOTS : 1];  // bytes from the beginning of a stage
  int next_channel;             // bytes from one channel to the next
  u32 staged[PASS_SLOTS][COPY_REGISTERS];

  __device__ __forceinline__ InputLoader() {
#pragma unroll
    for (int s = 0; s < (KEEP_TO ? SLOTS : 0); ++s) to[s] = place_offset(thread(), s);
  }

  /// Goes to chunk `chunk_index` of a tile.
  __device__ __forceinline__ void set_tile(const Element* input, const Origin& origin, int group, int chunk_index, const Sizes& sizes) {
    next_channel = channel_bytes(sizes);
    const int first_image = FLAT ? sizes.image_positions.quotient(origin.image) : origin.image;
    chunk = reinterpret_cast<const char*>(input) + static_cast<long long>(first_image) * IN_CHANNELS * sizes.pixels() * ITEM +
            (group * CI_GROUP + chunk_index * CHUNK_INPUT_CHANNELS) * static_cast<long long>(next_channel);
    chunk_channel = chunk_index * CHUNK_WORDS * CHANNELS_PER_WORD;
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const int copy = thread() + s * GROUP_THREADS;
      const int plane = copy % CHUNK_PLANES;
      const int w = column(s);
      const int h = copy / COPIES_PER_ROW % HALO_H;
      const int n = copy / COPIES_PER_ROW / HALO_H;
      int image, pixel;
      bool inside = exists(s);
      if constexpr (FLAT) {
        const int position = origin.image + w, in_batch = sizes.image_positions.quotient(position);
        image = in_batch - first_image;
        pixel = sizes.image_positions.remainder(position, in_batch);
        inside = inside && in_batch < sizes.batch;
      } else {
        const int row = origin.row * POSITION_INPUT_ROWS + MIN_SHIFT_H + h, col = origin.col + MIN_SHIFT_W - LEFT_PAD + w;
        image = n;
        pixel = row * sizes.width + col;
        inside = inside && row >= 0 && row < sizes.height && col >= 0 && col < sizes.width && origin.image + n < sizes.batch;
      }
      const int elements = image * (IN_CHANNELS * sizes.pixels()) + pixel;
      from[s] = inside ? elements * ITEM + plane * PLANE_CHANNELS * next_channel : -1;
    }
  }

  /// Starts to load one pass of the chunk.
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

  /// Stores that pass to a stage.
  template <int PASS>
  __device__ __forceinline__ void store(u32 stage) const {
#pragma unroll
    for (int i = 0; i < PASS_SLOTS; ++i) {
      const int s = PASS * PASS_SLOTS + i;
      if (s < SLOTS && exists(s)) {
        const u32(&loaded)[COPY_REGISTERS] = staged[i];
        u32 pixels[COPY_PIXELS][4];
#pragma unroll
        for (int p = 0; p < COPY_PIXELS; ++p)
#pragma unroll
          for (int word = 0; word < 4; ++word) {
            if constexpr (IS_16_BIT) {
              const u32 even = loaded[2 * word * ROW_REGISTERS + p / 2], odd = loaded[(2 * word + 1) * ROW_REGISTERS + p / 2];
              pixels[p][word] = p % 2 ? ptx::high_halves(even, odd) : ptx::low_halves(even, odd);
            } else {
              pixels[p][word] = ptx::round_to_tf32(loaded[word * ROW_REGISTERS + p]);
            }
          }
        const u32 target = stage + (KEEP_TO ? to[s] : place_offset(static_cast<int>(ptx::keep_in_register(thread())), s));
        if constexpr (SWAP_PIXELS) {
          // 8 lanes store 4 copies of each of 2 planes. Half of the lanes store each two pixels in the other order, so that
          // there are no bank conflicts.
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
    const int copy = thread + s * GROUP_THREADS;
    const int w = copy / CHUNK_PLANES % (HALO_W / COPY_PIXELS) * COPY_PIXELS;
    return (copy % CHUNK_PLANES * PLANE_PITCH + copy / COPIES_PER_ROW / HALO_H * IMAGE_PITCH +
            copy / COPIES_PER_ROW % HALO_H * ROW_PITCH + w) * 16;
  }
  __device__ __forceinline__ static int thread() { return (threadIdx.x - THREADS) % GROUP_THREADS; }
  __device__ __forceinline__ static bool exists(int s) {
    return (s + 1) * GROUP_THREADS <= COPIES || thread() + s * GROUP_THREADS < COPIES;
  }
  __device__ __forceinline__ static int column(int s) {
    return (thread() + s * GROUP_THREADS) / CHUNK_PLANES % (HALO_W / COPY_PIXELS) * COPY_PIXELS;
  }

  /// The first channel of a copy, in the channel group.
  __device__ __forceinline__ int first_channel(int s) const {
    return chunk_channel + (thread() + s * GROUP_THREADS) % CHUNK_PLANES * PLANE_CHANNELS;
  }

  /// Loads the bytes at `from`, or zeros where `real` is false.
  template <int BYTES>
  __device__ __forceinline__ static void load_words(u32* words, const char* from, bool real) {
#pragma unroll
    for (int i = 0; i < (BYTES + 3) / 4; ++i) words[i] = 0;
    if (real) ptx::load_global<BYTES>(words, from);
  }
};
