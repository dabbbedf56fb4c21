// Copies the phases of grad_output into their images in shared memory, for grad_input/implicit_gemm_mma.cu. It does so as
// forward/implicit_gemm_mma_producer.cuh does, but for where pixels are stored. Pixels outside the image become zeros.
#pragma once

constexpr int COPIED_ROWS = COPIED_H, COPIED_COLS = COPIED_W;
#include "common/tile_copies.cuh"

struct InputLoader {
  const char* input;       // the group's first channel of the tile's first image
  const Sizes& sizes;
  int next_channel;        // bytes from one channel to the next
  int from[SLOTS];         // bytes from there
  unsigned phases[SLOTS];  // Source::phases
  u32 to[SLOTS];           // bytes from the beginning of a stage
  int first_k;             // first word of k of this thread within a chunk (NCHW)
  u32 staged[THROUGH_REGISTERS ? SLOTS * K_PER_SLOT * 2 * SLOT_WORDS : 1];

  __device__ __forceinline__ InputLoader(const Element* grad_output, const Origin& origin, int group, const Sizes& sizes)
      : sizes(sizes), next_channel(channel_bytes(sizes)) {
    const int first_image = FLAT ? sizes.image_positions.quotient(origin.image) : origin.image;
    input = reinterpret_cast<const char*>(grad_output) + static_cast<long long>(first_image) * IN_CHANNELS * sizes.pixels() * ITEM +
            group * CI_GROUP * static_cast<long long>(next_channel);
    first_k = SLOT_THREADS > 1 ? threadIdx.x / (THREADS / SLOT_THREADS) : 0;
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const int i = index(s), copy = i % COPIES_PER_PIXEL, n = i / COPIES_PER_ROW / COPIED_H, h = i / COPIES_PER_ROW % COPIED_H;
      const Source source = source_of(origin, n, h, column(s), sizes);
      const int pixel = source.row * sizes.width + source.col;
      from[s] = (source.image * (IN_CHANNELS * sizes.pixels()) + (INPUT_CHANNELS_LAST ? pixel * IN_CHANNELS + copy * COPY : pixel)) * ITEM;
      phases[s] = source.phases;
      StoredColumn at{0, 0, true};
      if constexpr (!INPUT_CHANNELS_LAST && COPY_PIXELS == 1) at = stored_column(FIRST_COL + column(s));
      to[s] = i < COPIES && at.used
                  ? ((stored_row(n, h, column(s)) + at.column_phase * COLUMN_PHASE_PITCH + at.position) * PIXEL_STEP +
                     first_k * K_STEP + copy * (COPY * ITEM / 4)) * 4
                  : NOT_STORED;
    }
  }

  /// Starts copying a phase of a chunk to a stage.
  template <int PHASE>
  __device__ __forceinline__ void copy(u32 stage, int chunk) {
    const char* first = phase_of<PHASE>(chunk);
    const int words_left = CI_WORDS - chunk * CHUNK_WORDS - first_k;
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      if (to[s] != NOT_STORED) {
        const bool inside = has_phase<PHASE>(phases[s]);
        if constexpr (INPUT_CHANNELS_LAST) {
          constexpr int BYTES = COPY * ITEM;
          const bool real = inside && (!RAGGED_K || index(s) % COPIES_PER_PIXEL * (BYTES / 4) < words_left);
          ptx::copy_async_or_zero<BYTES>(stage + to[s], real ? first + from[s] : input, real);
        } else {
          // Pinned: otherwise the compiler computes the address of every copy anew.
          const char* source = ptx::keep_in_register(inside ? first + from[s] : input);
          const u32 next = inside ? static_cast<u32>(next_channel) : 0;
#pragma unroll
          for (int k = 0; k < K_PER_SLOT; ++k) {
            const bool real = inside && (!RAGGED_K || k * SLOT_THREADS < words_left);
            const char* word = source + static_cast<unsigned long long>(k * SLOT_THREADS) * next;
            ptx::copy_async_or_zero<COPY * 4>(stage + to[s] + k * SLOT_THREADS * K_PITCH * 4, RAGGED_K && !real ? input : word, real);
          }
        }
      }
    }
  }

  /// Starts loading a phase of a chunk into registers (16-bit NCHW).
  template <int PHASE>
  __device__ __forceinline__ void load(int chunk) {
    const char* first = phase_of<PHASE>(chunk);
    const int left = CI_GROUP - (chunk * CHUNK_WORDS + first_k) * 2;
    const u32 next = ptx::keep_in_register(static_cast<u32>(next_channel));
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const bool inside = to[s] != NOT_STORED && has_phase<PHASE>(phases[s]);
      const char* row = ptx::keep_in_register(first + from[s]);
#pragma unroll
      for (int k = 0; k < K_PER_SLOT; ++k) {
        u32* to_words = staged + (s * K_PER_SLOT + k) * 2 * SLOT_WORDS;
        const int channel = k * SLOT_THREADS * 2;
        const unsigned long long distance = channel;
        load_halves(to_words, row + distance * next, inside && (!RAGGED_K || channel < left));
        load_halves(to_words + SLOT_WORDS, row + (distance + 1) * next, inside && (!RAGGED_K || channel + 1 < left));
      }
    }
  }

  /// Stores what was loaded to a stage, two channels in a word.
  __device__ __forceinline__ void store(u32 stage) {
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      if (to[s] != NOT_STORED) {
#pragma unroll
        for (int i = 0; i < COPY_PIXELS; ++i) {
          int pixels = 0;
          if constexpr (COPY_PIXELS > 1) {
            const StoredColumn at = stored_column(FIRST_COL + column(s) + i);
            if (!at.used) continue;
            pixels = at.column_phase * COLUMN_PHASE_PITCH + at.position;
          }
#pragma unroll
          for (int k = 0; k < K_PER_SLOT; ++k) {
            const u32* halves = staged + (s * K_PER_SLOT + k) * 2 * SLOT_WORDS;
            const u32 even = halves[i / 2], odd = halves[SLOT_WORDS + i / 2];
            const u32 word = i % 2 ? ptx::high_halves(even, odd) : ptx::low_halves(even, odd);
            ptx::store_shared<1>(stage + to[s] + (pixels + k * SLOT_THREADS * K_PITCH) * 4, &word);
          }
        }
      }
    }
  }

 private:
  /// Returns the thread's first channel of a chunk, at a phase.
  template <int PHASE>
  __device__ __forceinline__ const char* phase_of(int chunk) const {
    return input + (chunk * CHUNK_INPUT_CHANNELS + first_k * CHANNELS_PER_WORD) * static_cast<long long>(next_channel) +
           phase_offset<PHASE>(sizes);
  }

  static constexpr u32 NOT_STORED = 0xffffffffu;

  /// Returns the number of the copy that slot `s` of this thread makes.
  __device__ __forceinline__ static int index(int s) {
    return threadIdx.x % (THREADS / SLOT_THREADS) + s * (THREADS / SLOT_THREADS);
  }
  __device__ __forceinline__ static int column(int s) {
    return index(s) / COPIES_PER_PIXEL % (COPIED_W / COPY_PIXELS) * COPY_PIXELS;
  }

  /// Loads COPY 16-bit elements, or zeros.
  __device__ __forceinline__ static void load_halves(u32* words, const char* from, bool real) {
#pragma unroll
    for (int i = 0; i < SLOT_WORDS; ++i) words[i] = 0;
    if (real) ptx::load_global<COPY * 2>(words, from);
  }
};
