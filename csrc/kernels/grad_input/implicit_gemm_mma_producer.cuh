// Copies of slices of grad_output into pictures in shared memory, for grad_input/implicit_gemm_mma.cu. As forward/implicit_gemm_mma_producer.cuh, but
// for where pixels go. Pixels outside the image are written as zeros.
#pragma once

constexpr int COPIED_ROWS = COPIED_H, COPIED_COLS = COPIED_W;
#include "common/tile_copies.cuh"

struct InputFill {
  const char* input;       // the group's first channel of the tile's first image
  const Sizes& sizes;
  int next_channel;        // bytes from one channel to the next
  int from[SLOTS];         // bytes from there
  unsigned slices[SLOTS];  // Place::slices
  u32 to[SLOTS];           // bytes from the beginning of a stage
  int first_k;             // first word of k of this thread within a chunk (NCHW)
  u32 staged[THROUGH_REGISTERS ? SLOTS * K_PER_SLOT * 2 * SLOT_WORDS : 1];

  __device__ __forceinline__ InputFill(const Element* grad_output, const Origin& origin, int group, const Sizes& sizes)
      : sizes(sizes), next_channel(channel_bytes(sizes)) {
    const int first_image = FLAT ? sizes.image_positions.quotient(origin.image) : origin.image;
    input = reinterpret_cast<const char*>(grad_output) + static_cast<long long>(first_image) * IN_CHANNELS * sizes.pixels() * ITEM +
            group * CI_GROUP * static_cast<long long>(next_channel);
    first_k = SLOT_THREADS > 1 ? threadIdx.x / (THREADS / SLOT_THREADS) : 0;
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const int i = index(s), copy = i % COPIES_PER_PIXEL, n = i / COPIES_PER_ROW / COPIED_H, h = i / COPIES_PER_ROW % COPIED_H;
      const Place place = place_of(origin, n, h, column(s), sizes);
      const int pixel = place.row * sizes.width + place.col;
      from[s] = (place.image * (IN_CHANNELS * sizes.pixels()) + (INPUT_CHANNELS_LAST ? pixel * IN_CHANNELS + copy * COPY : pixel)) * ITEM;
      slices[s] = place.slices;
      Column at{0, 0, true};
      if constexpr (!INPUT_CHANNELS_LAST && COPY_PIXELS == 1) at = column_at(FIRST_COL + column(s));
      to[s] = i < COPIES && at.used
                  ? ((stored_row(n, h, column(s)) + at.picture * PICTURE_PITCH + at.cell) * PIXEL_STEP + first_k * K_STEP + copy * (COPY * ITEM / 4)) * 4
                  : NOWHERE;
    }
  }

  /// Start copying a slice of a chunk to a stage.
  template <int SLICE>
  __device__ __forceinline__ void copy(u32 stage, int chunk) {
    const char* first = slice_of<SLICE>(chunk);
    const int words_left = CI_WORDS - chunk * CHUNK_WORDS - first_k;
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      if (to[s] != NOWHERE) {
        const bool inside = has_slice<SLICE>(slices[s]);
        if constexpr (INPUT_CHANNELS_LAST) {
          constexpr int BYTES = COPY * ITEM;
          const bool real = inside && (!RAGGED_K || index(s) % COPIES_PER_PIXEL * (BYTES / 4) < words_left);
          ptx::copy_async_or_zero<BYTES>(stage + to[s], real ? first + from[s] : input, real);
        } else {
          // Pinned: else the compiler finds the address of every copy anew.
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

  /// Start loading a slice of a chunk into registers (16-bit NCHW).
  template <int SLICE>
  __device__ __forceinline__ void load(int chunk) {
    const char* first = slice_of<SLICE>(chunk);
    const int left = CI_GROUP - (chunk * CHUNK_WORDS + first_k) * 2;
    const u32 next = ptx::keep_in_register(static_cast<u32>(next_channel));
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const bool inside = to[s] != NOWHERE && has_slice<SLICE>(slices[s]);
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

  /// Store what was loaded to a stage, two channels to a word.
  __device__ __forceinline__ void store(u32 stage) {
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      if (to[s] != NOWHERE) {
#pragma unroll
        for (int i = 0; i < COPY_PIXELS; ++i) {
          int pixels = 0;
          if constexpr (COPY_PIXELS > 1) {
            const Column at = column_at(FIRST_COL + column(s) + i);
            if (!at.used) continue;
            pixels = at.picture * PICTURE_PITCH + at.cell;
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
  /// The thread's first channel of a chunk, at a slice's phase.
  template <int SLICE>
  __device__ __forceinline__ const char* slice_of(int chunk) const {
    return input + (chunk * CHUNK_INPUT_CHANNELS + first_k * CHANNELS_PER_WORD) * static_cast<long long>(next_channel) +
           slice_distance<SLICE>(sizes);
  }

  static constexpr u32 NOWHERE = 0xffffffffu;

  /// The place of slot `s`.
  __device__ __forceinline__ static int index(int s) {
    return threadIdx.x % (THREADS / SLOT_THREADS) + s * (THREADS / SLOT_THREADS);
  }
  __device__ __forceinline__ static int column(int s) {
    return index(s) / COPIES_PER_PIXEL % (COPIED_W / COPY_PIXELS) * COPY_PIXELS;
  }

  /// COPY 16-bit elements, or zeros.
  __device__ __forceinline__ static void load_halves(u32* words, const char* from, bool real) {
#pragma unroll
    for (int i = 0; i < SLOT_WORDS; ++i) words[i] = 0;
    if (real) ptx::load_global<COPY * 2>(words, from);
  }
};
