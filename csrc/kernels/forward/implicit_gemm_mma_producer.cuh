// Copies of one chunk of k to shared memory, for forward/implicit_gemm_mma.cu: the tile's input with its halo.
//
// Each thread keeps the offsets of its few copies and adds a constant for each chunk. Pixels outside the image are never
// copied: shared memory is zeroed once, before the first chunk.
#pragma once

/// In NCHW of 16 bits, a word of k joins two channels that are not neighbours in memory, so the copy goes through registers.
constexpr bool THROUGH_REGISTERS = IS_16_BIT && !INPUT_CHANNELS_LAST;

constexpr int COPIED_ROWS = HALO_H, COPIED_COLS = HALO_W;
#include "common/tile_copies.cuh"

struct InputLoader {
  const char* chunk;  // first channel of the next chunk of the tile's first image
  int from[SLOTS];    // bytes from there; negative where nothing is copied
  u32 to[SLOTS];      // bytes from the beginning of a stage
  int first_k;        // first word of k of this thread within a chunk (NCHW)
  int next_word;      // words of k before the next chunk
  int next_channel;   // bytes from one channel to the next
  u32 staged[THROUGH_REGISTERS ? SLOTS * K_PER_SLOT * 2 * SLOT_WORDS : 1];

  __device__ __forceinline__ InputLoader(const Element* input, const Origin& origin, int group, int chunk_index,
                                       const Sizes& sizes) {
    next_channel = channel_bytes(sizes);
    const int first_image = FLAT ? sizes.image_positions.quotient(origin.image) : origin.image;
    chunk = reinterpret_cast<const char*>(input) + static_cast<long long>(first_image) * IN_CHANNELS * sizes.pixels() * ITEM +
            (group * CI_GROUP + chunk_index * CHUNK_INPUT_CHANNELS) * static_cast<long long>(next_channel);
    next_word = chunk_index * CHUNK_WORDS;
    first_k = SLOT_THREADS > 1 ? threadIdx.x / (THREADS / SLOT_THREADS) : 0;
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const int place = threadIdx.x % (THREADS / SLOT_THREADS) + s * (THREADS / SLOT_THREADS);
      const int copy = place % COPIES_PER_PIXEL;
      const int w = place / COPIES_PER_PIXEL % (HALO_W / COPY_PIXELS) * COPY_PIXELS;
      const int h = place / COPIES_PER_ROW % HALO_H;
      const int n = place / COPIES_PER_ROW / HALO_H;
      int image, pixel;
      bool inside = place < COPIES;
      if constexpr (FLAT) {
        const int position = origin.image + w, in_batch = sizes.image_positions.quotient(position);
        image = in_batch - first_image;
        pixel = sizes.image_positions.remainder(position, in_batch);
        inside = inside && in_batch < sizes.batch;
      } else {
        const int row = origin.row + MIN_SHIFT_H + h, col = origin.col + MIN_SHIFT_W - LEFT_PAD + w;
        image = n;
        pixel = row * sizes.width + col;
        inside = inside && row >= 0 && row < sizes.height && col >= 0 && col < sizes.width && origin.image + n < sizes.batch;
      }
      const int elements = image * (IN_CHANNELS * sizes.pixels()) +
                           (INPUT_CHANNELS_LAST ? pixel * IN_CHANNELS + copy * COPY : pixel);
      from[s] = inside ? elements * ITEM : -1;
      to[s] = ((n * IMAGE_PITCH + h * ROW_PITCH + w) * PIXEL_STEP + first_k * K_STEP + copy * (COPY * ITEM / 4)) * 4;
    }
    chunk += first_k * CHANNELS_PER_WORD * next_channel;
  }

  /// Starts to copy the next chunk to a stage.
  __device__ __forceinline__ void copy(u32 stage) {
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      if (from[s] >= 0) {
        const char* source = chunk + from[s];
        if constexpr (INPUT_CHANNELS_LAST) {
          constexpr int BYTES = COPY * ITEM;
          if constexpr (RAGGED_K) {
            const int place = threadIdx.x + s * THREADS;
            const bool real = next_word + place % COPIES_PER_PIXEL * (BYTES / 4) < CI_WORDS;
            ptx::copy_async_or_zero<BYTES>(stage + to[s], real ? source : chunk, real);
          } else {
            ptx::copy_async<BYTES>(stage + to[s], source);
          }
        } else {
#pragma unroll
          for (int k = 0; k < K_PER_SLOT; ++k) {
            const char* row = source + k * SLOT_THREADS * next_channel;
            const u32 target = stage + to[s] + k * SLOT_THREADS * K_PITCH * 4;
            if constexpr (RAGGED_K) {
              const bool real = next_word + first_k + k * SLOT_THREADS < CI_WORDS;
              ptx::copy_async_or_zero<COPY * 4>(target, real ? row : source, real);
            } else {
              ptx::copy_async<COPY * 4>(target, row);
            }
          }
        }
      }
    }
    advance();
  }

  /// Starts to load the next chunk into registers (NCHW of 16 bits).
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
#pragma unroll
      for (int k = 0; k < K_PER_SLOT; ++k) {
        u32* to_words = staged + (s * K_PER_SLOT + k) * 2 * SLOT_WORDS;
        const int channel = (next_word + first_k + k * SLOT_THREADS) * 2;
        const char* row = chunk + from[s] + k * SLOT_THREADS * 2 * next_channel;
        load_halves(to_words, row, from[s] >= 0 && (!RAGGED_K || channel < CI_GROUP));
        load_halves(to_words + SLOT_WORDS, row + next_channel,
                    from[s] >= 0 && (!RAGGED_K || channel + 1 < CI_GROUP));
      }
    }
    advance();
  }

  /// Stores the loaded chunk to a stage, two channels in a word.
  __device__ __forceinline__ void store(u32 stage) {
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      if (from[s] >= 0) {
#pragma unroll
        for (int k = 0; k < K_PER_SLOT; ++k) {
          const u32* halves = staged + (s * K_PER_SLOT + k) * 2 * SLOT_WORDS;
          u32 words[COPY];
#pragma unroll
          for (int i = 0; i < COPY; ++i) {
            const u32 even = halves[i / 2], odd = halves[SLOT_WORDS + i / 2];
            words[i] = i % 2 ? ptx::high_halves(even, odd) : ptx::low_halves(even, odd);
          }
          constexpr int VECTOR = COPY < 4 ? COPY : 4;
#pragma unroll
          for (int i = 0; i < COPY; i += VECTOR)
            ptx::store_shared<VECTOR>(stage + to[s] + (k * SLOT_THREADS * K_PITCH + i) * 4, words + i);
        }
      }
    }
  }

 private:
  __device__ __forceinline__ void advance() {
    chunk += static_cast<long long>(CHUNK_INPUT_CHANNELS) * next_channel;
    next_word += CHUNK_WORDS;
  }

  /// Loads COPY elements of 16 bits, or zeros where `real` is false.
  __device__ __forceinline__ static void load_halves(u32* words, const char* from, bool real) {
    if constexpr (COPY == 8) {
      const uint4 v = real ? __ldg(reinterpret_cast<const uint4*>(from)) : uint4{};
      words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else if constexpr (COPY == 4) {
      const uint2 v = real ? __ldg(reinterpret_cast<const uint2*>(from)) : uint2{};
      words[0] = v.x, words[1] = v.y;
    } else if constexpr (COPY == 2) {
      words[0] = real ? __ldg(reinterpret_cast<const u32*>(from)) : 0;
    } else {
      words[0] = real ? __ldg(reinterpret_cast<const unsigned short*>(from)) : 0;
    }
  }
};
