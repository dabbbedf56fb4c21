// The input of forward/col2im.cu: panels of PANEL_PIXELS pixels and all channels, which the copy engine loads, and the
// fragments of them that a multiply reads.
//
// In NCHW a panel is [channel][pixel], with CHANNELS_LAST [chunk of channels][pixel][channel]: lines of LINE_BYTES, whose
// 16-byte pieces the swizzle permutes. Channels and pixels that the tensor does not have are zeros.
#pragma once

constexpr int K_STEPS = ceil_div(IN_CHANNELS, 16), K = K_STEPS * 16;

__device__ constexpr int power_above(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}
constexpr int LINE_BYTES = CHANNELS_LAST ? (K * ITEM > 64 ? 128 : power_above(K * ITEM)) : PANEL_PIXELS * ITEM;
static_assert(LINE_BYTES == 128 || LINE_BYTES == 64 || LINE_BYTES == 32);
/// Boxes of a panel.
constexpr int PANEL_BOXES = CHANNELS_LAST ? ceil_div(K * ITEM, LINE_BYTES) : 1;
constexpr int BOX_BYTES = (CHANNELS_LAST ? PANEL_PIXELS : K) * LINE_BYTES;
constexpr int PANEL_BYTES = PANEL_BOXES * BOX_BYTES;
constexpr int STAGE_BYTES = PANEL_BYTES * STEP_PANELS * STEP_ROWS;

/// Issues the loads of one step: STEP_ROWS rows of STEP_PANELS panels. Called by one thread.
__device__ __forceinline__ void issue_loads(const TensorMap& map, int image, int row, int column, u32 stage, u32 full) {
  ptx::arrive_expect_tx(full, STAGE_BYTES);
#pragma unroll
  for (int i = 0; i < STEP_ROWS; ++i)
#pragma unroll
    for (int panel = 0; panel < STEP_PANELS; ++panel)
#pragma unroll
      for (int box = 0; box < PANEL_BOXES; ++box) {
        const u32 to = stage + (i * STEP_PANELS + panel) * PANEL_BYTES + box * BOX_BYTES;
        const int first = column + panel * PANEL_PIXELS;
        if constexpr (CHANNELS_LAST) {
          ptx::tma_load(to, map, box * (LINE_BYTES / ITEM), first, row + i, image, full);
        } else {
          ptx::tma_load(to, map, first, row + i, 0, image, full);
        }
      }
}

/// The number with which the swizzle combines the index of a line's 16-byte pieces, by exclusive or.
__device__ __forceinline__ int swizzle(int line) {
  return LINE_BYTES == 128 ? line % 8 : LINE_BYTES == 64 ? line / 2 % 4 : line / 4 % 2;
}

/// The offsets in bytes of the 16 pixels of a lane's warp in a panel, for the first 16 channels.
struct InputPlaces {
  // 16 bits: for ldmatrix. float32: of pixels g and g + 8, in NCHW of channels 2t and 2t + 1.
  u32 at[IS_16_BIT ? 1 : 2][IS_16_BIT || CHANNELS_LAST ? 1 : 2];

  __device__ __forceinline__ explicit InputPlaces(int first_pixel) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if constexpr (IS_16_BIT) {
      // Lane 8m + r gives the address of line r of matrix m: the first 8 channels of both halves of the pixels, then the
      // last 8.
      const int pixel = first_pixel + lane / 8 % 2 * 8, half = lane / 16;
      const int line = CHANNELS_LAST ? pixel + lane % 8 : half * 8 + lane % 8, piece = CHANNELS_LAST ? half : pixel / 8;
      at[0][0] = line * LINE_BYTES + (piece ^ swizzle(line)) * 16;
    } else {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const int pixel = first_pixel + column * 8 + g;
        if constexpr (CHANNELS_LAST) {
          at[column][0] = pixel * LINE_BYTES + ((t / 2) ^ swizzle(pixel)) * 16 + t % 2 * 8;
        } else {
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            const int line = 2 * t + odd;
            at[column][odd] = line * LINE_BYTES + ((pixel / 4) ^ swizzle(line)) * 16 + pixel % 4 * 4;
          }
        }
      }
    }
  }
};

/// The offset `bytes` of channels behind the offset `at`.
__device__ __forceinline__ u32 further(u32 at, int bytes) {
  return CHANNELS_LAST ? (at ^ bytes % LINE_BYTES) + bytes / LINE_BYTES * BOX_BYTES : at + bytes / ITEM * LINE_BYTES;
}

/// Loads operand A of 16 channels, for each part, in the order of wgmma_from_registers (common/wgmma.cuh).
__device__ __forceinline__ void load_input(u32 (&a)[PARTS][4], u32 panel, const InputPlaces& places, int step) {
  if constexpr (IS_16_BIT) {
    const u32 from = panel + further(places.at[0][0], step * 16 * ITEM);
    if constexpr (CHANNELS_LAST) {
      ptx::load_matrices(a[0], from);
    } else {
      ptx::load_matrices_transposed(a[0], from);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto& at = places.at[i % 2];
      const int bytes = (step * 16 + i / 2 * 8) * ITEM;
      u32 words[PARTS];
      if constexpr (CHANNELS_LAST) {
        const float2 pair = ptx::load_shared_pair(panel + further(at[0], bytes));
        split(words, pair.x, pair.y);
      } else {
        split(words, __uint_as_float(ptx::load_shared(panel + further(at[0], bytes))),
              __uint_as_float(ptx::load_shared(panel + further(at[1], bytes))));
      }
#pragma unroll
      for (int part = 0; part < PARTS; ++part) a[part][i] = words[part];
    }
  }
}
