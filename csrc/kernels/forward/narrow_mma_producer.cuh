// Copies of a tile's input, with its halo, to the shared memory of forward/narrow_mma.cu. Zeros are written for pixels outside
// the image, and for the channels that pad a half.
#pragma once

#include "common/integers.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int ITEM = sizeof(Element);
constexpr int CHANNELS_PER_WORD = 4 / ITEM;
constexpr int HALF_WORDS = HALF_CHANNELS / CHANNELS_PER_WORD;

/// Elements of one copy: neighbours in a row, whose length is a multiple of ROW_MULTIPLE; or channels of a pixel.
constexpr int COPY = power_of_two_dividing(CHANNELS_LAST ? CI_GROUP : ROW_MULTIPLE, 16 / ITEM);
constexpr int COPY_PIXELS = CHANNELS_LAST ? 1 : COPY;
constexpr int LEFT_PAD = (Horizontal::LOWEST % COPY_PIXELS + COPY_PIXELS) % COPY_PIXELS;
constexpr int HALO_H = TILE_H + (V - 1) * V_STEP;
constexpr int HALO_W = round_up(LEFT_PAD + TILE_W + Horizontal::SPAN, COPY_PIXELS);
constexpr int GROUP_WORDS = GROUP_HALVES * HALF_WORDS;
constexpr int WORDS = GROUPS * GROUP_WORDS;
// Pitches with which the lanes that read a fragment use different banks.
constexpr int K_PITCH = aligned_to(HALO_H * HALO_W, 1, 32, IS_16_BIT ? 8 : 4);
constexpr int PIXEL_PITCH = IS_16_BIT ? aligned_to(WORDS, 1, 8, 4) : aligned_to(WORDS, 1, 16, 8);
constexpr int INPUT_WORDS = CHANNELS_LAST ? HALO_H * HALO_W * PIXEL_PITCH : WORDS * K_PITCH;

// Several threads copy a line: a row of the halo with all channels (channels_last), or a word of k of the whole halo (NCHW). A
// thread makes the same copies in each of its lines. PARALLEL_LINES lines are copied at a time.
constexpr int LINE_COPIES = CHANNELS_LAST ? HALO_W * (WORDS * CHANNELS_PER_WORD / COPY) : HALO_H * (HALO_W / COPY);
constexpr int PARALLEL_LINES = LINE_COPIES < THREADS ? THREADS / LINE_COPIES : 1;
constexpr int SLOTS = ceil_div(LINE_COPIES, THREADS);

struct InputLoader {
  const Element* input;
  const Sizes& sizes;
  int place[SLOTS];    // column of the halo (channels_last), or number of the copy in a line; negative: none
  int to[SLOTS];       // bytes from the beginning of the line
  int channel[SLOTS];  // channels_last: negative for padding

  __device__ __forceinline__ InputLoader(const Element* input, const Sizes& sizes) : input(input), sizes(sizes) {
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const int copy = (PARALLEL_LINES > 1 ? threadIdx.x % LINE_COPIES : threadIdx.x) + s * THREADS;
      if constexpr (CHANNELS_LAST) {
        constexpr int COPIES = WORDS * CHANNELS_PER_WORD / COPY;
        const int element = copy % COPIES * COPY;
        const int in_group = element % (GROUP_WORDS * CHANNELS_PER_WORD);
        place[s] = copy / COPIES;
        to[s] = place[s] * (PIXEL_PITCH * 4) + element * ITEM;
        channel[s] = in_group < CI_GROUP ? element / (GROUP_WORDS * CHANNELS_PER_WORD) * CI_GROUP + in_group : -1;
      } else {
        place[s] = copy;
        to[s] = copy * (COPY * 4);
        channel[s] = 0;
      }
      if (copy >= LINE_COPIES || (PARALLEL_LINES > 1 && threadIdx.x >= PARALLEL_LINES * LINE_COPIES)) place[s] = -1;
    }
  }

  /// Copies the halo whose first pixel (behind LEFT_PAD) is (row0, col0) of an image. The copies are asynchronous, except those
  /// of 16 bits in NCHW, where a word joins two channels that are not neighbours, and copies of 2 bytes.
  __device__ __forceinline__ void copy(u32 shared, long long image, int row0, int col0) const {
    const int height = sizes.height, width = sizes.width, pixels = sizes.pixels();
    const Element* const from = input + image * (static_cast<long long>(IN_CHANNELS) * pixels);
    const int first_line = PARALLEL_LINES > 1 ? threadIdx.x / LINE_COPIES : 0;
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      if (place[s] < 0) continue;
      if constexpr (CHANNELS_LAST) {
        const int col = col0 + place[s];
        const bool inside_row = static_cast<unsigned>(col) < width && channel[s] >= 0;
#pragma unroll 4
        for (int h = first_line; h < HALO_H; h += PARALLEL_LINES) {
          const int row = row0 + h;
          const bool inside = inside_row && static_cast<unsigned>(row) < height;
          const Element* const source = from + (inside ? (row * width + col) * IN_CHANNELS + channel[s] : 0);
          copy_elements(shared + h * (HALO_W * PIXEL_PITCH * 4) + to[s], source, inside);
        }
      } else {
        const int row = row0 + place[s] / (HALO_W / COPY), col = col0 + place[s] % (HALO_W / COPY) * COPY;
        const bool inside_image = static_cast<unsigned>(row) < height && static_cast<unsigned>(col) < width;
        const Element* const pixel = from + (inside_image ? row * width + col : 0);
#pragma unroll 4
        for (int line = first_line; line < WORDS; line += PARALLEL_LINES) {
          const int group = GROUPS == 1 ? 0 : line / GROUP_WORDS;
          const int channel = (line - group * GROUP_WORDS) * CHANNELS_PER_WORD;
          const Element* const source = pixel + (group * CI_GROUP + channel) * pixels;
          const u32 target = shared + line * (K_PITCH * 4) + to[s];
          const bool inside = inside_image && channel < CI_GROUP;
          if constexpr (!IS_16_BIT) {
            copy_elements(target, inside ? source : from, inside);
          } else {
            u32 even[COPY_WORDS] = {}, odd[COPY_WORDS] = {};
            if (inside) ptx::load_global<COPY * ITEM>(even, source);
            if (inside && channel + 1 < CI_GROUP) ptx::load_global<COPY * ITEM>(odd, source + pixels);
            store_joined(target, even, odd);
          }
        }
      }
    }
  }

 private:
  static constexpr int COPY_WORDS = COPY * ITEM > 4 ? COPY * ITEM / 4 : 1;

  __device__ __forceinline__ static void copy_elements(u32 to, const Element* from, bool inside) {
    if constexpr (COPY * ITEM >= 4) {
      ptx::copy_async_or_zero<COPY * ITEM>(to, from, inside);
    } else {
      u32 bits[1] = {};
      if (inside) ptx::load_global<2>(bits, from);
      ptx::store_shared_half(to, bits[0]);
    }
  }

  __device__ __forceinline__ static void store_joined(u32 to, const u32 (&even)[COPY_WORDS], const u32 (&odd)[COPY_WORDS]) {
    u32 words[COPY];
#pragma unroll
    for (int i = 0; i < COPY; ++i)
      words[i] = i % 2 ? ptx::high_halves(even[i / 2], odd[i / 2]) : ptx::low_halves(even[i / 2], odd[i / 2]);
    constexpr int VECTOR = COPY < 4 ? COPY : 4;
#pragma unroll
    for (int i = 0; i < COPY; i += VECTOR) ptx::store_shared<VECTOR>(to + i * 4, words + i);
  }
};
