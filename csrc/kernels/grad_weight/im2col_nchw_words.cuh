// Of grad_weight/im2col_nchw.cu: a lane's words of grad_output, from boxes of it as it lies.
//
// A warp's 16 rows are TAPS_TOGETHER neighbouring taps of 16 / TAPS_TOGETHER channels each: with a stride that is a multiple
// of TAPS_TOGETHER, and channels that the swizzle keeps apart, all lanes read from different banks. Taps that are left over
// are alone in their rows, and rows may be.
#pragma once

/// Bits of a channel's number: those by which TAPS_TOGETHER x 4 words of 8 / TAPS_TOGETHER channels lie in different banks
/// (of a swizzle that permutes pieces of 16 bytes by the address's bits 7 to 9), then the others.
constexpr int BANK_BITS = TAPS_TOGETHER == 1 ? 3 : TAPS_TOGETHER == 2 ? 2 : TAPS_TOGETHER == 4 ? 1 : 0;
__device__ constexpr int channel_bit(int i) {
  constexpr int OF_PAIRS[3][3] = {{0, 1, 2}, {0, 2, 1}, {1, 2, 0}}, OF_QUADS[3][3] = {{1, 0, 2}, {0, 1, 2}, {2, 0, 1}};
  constexpr int BLOCK = OUT_BLOCK == 8 ? 0 : OUT_BLOCK == 16 ? 1 : 2;
  return BANK_BITS == 2 ? OF_PAIRS[BLOCK][i] : BANK_BITS == 1 ? OF_QUADS[BLOCK][i] : i;
}
__device__ __forceinline__ constexpr int channel_of(int bits) {
  return (bits & 1) << channel_bit(0) | (bits >> 1 & 1) << channel_bit(1) | (bits >> 2 & 1) << channel_bit(2);
}

/// A lane's two rows of 16: a tap and two channels of it. Rows that are too many have taps that do not exist.
struct Rows {
  int kw, channel[2];

  __device__ __forceinline__ Rows(int sixteen, int g) {
    constexpr int WHOLE = KERNEL_W / TAPS_TOGETHER, CHANNELS = 16 / TAPS_TOGETHER, TOGETHER = CHUNK / CHANNELS;
    const int alone = TAPS_TOGETHER == 1 ? sixteen : sixteen - WHOLE * TOGETHER;
    if (TAPS_TOGETHER > 1 && (KERNEL_W % TAPS_TOGETHER == 0 || alone < 0)) {
      // Eight channels have half as many sixteens as taps are together.
      constexpr int SIXTEENS = TAPS_TOGETHER / 2, APART = 8 / TAPS_TOGETHER;
      const int unit = sixteen % TOGETHER, first = unit / SIXTEENS * 8;
      kw = sixteen / TOGETHER * TAPS_TOGETHER + g / APART;
      const int bits = g % APART | unit % SIXTEENS << (BANK_BITS + 1);
      channel[0] = first + channel_of(bits);
      channel[1] = first + channel_of(bits | 1 << BANK_BITS);
    } else {
      kw = (TAPS_TOGETHER == 1 ? 0 : WHOLE * TAPS_TOGETHER) + alone / (CHUNK / 16);
      channel[0] = alone % (CHUNK / 16) * 16 + g;
      channel[1] = channel[0] + 8;
    }
  }
  /// Of one of a warp's blocks of rows.
  __device__ __forceinline__ static Rows of(int warp, int block, int lane) {
    return Rows((warp / 4 * BLOCKS + block) * 4 + warp % 4, lane / 4);
  }
};

/// Whether a step's pixels lie apart in the same way for every lane.
constexpr bool EVEN_QUADS = COLS % 4 == 0;

/// One step's words of grad_output, as wgmma_from_registers takes them.
using Words = u32[BLOCKS][4];

/// What the swizzle flips in the number of a channel's 16 bytes.
__device__ __forceinline__ constexpr u32 flips(int channel) { return (channel * (OUT_BLOCK * 4) >> 7) & (OUT_BLOCK / 4 - 1); }

/// Where a lane's words lie.
struct WordPlaces {
  u32 col[BLOCKS];  // column in the boxes of pixel 0 of the row; may lie before the first
  u32 channel[BLOCKS][2], flip[BLOCKS][2];
  const u32 out_width;
  // Of each pixel that a lane takes: its row's bytes and, below 512, its columns.
  u32 pixels[EVEN_QUADS ? 1 : STEPS][2];

  __device__ __forceinline__ WordPlaces(int warp, int lane, u32 out_width) : out_width(out_width) {
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      const Rows rows = Rows::of(warp, b, lane);
      const int kw = rows.kw < KERNEL_W ? rows.kw : 0;
      col[b] = LEFT + kw * DILATION_W - PADDING_W + (EVEN_QUADS ? lane % 4 * STRIDE_W : 0);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        channel[b][half] = INPUT_BYTES + rows.channel[half] * (OUT_BLOCK * 4) + (EVEN_QUADS ? (col[b] & 3) * 4 : 0);
        flip[b][half] = flips(rows.channel[half]);
      }
    }
    if constexpr (!EVEN_QUADS) {
#pragma unroll
      for (int i = 0; i < STEPS; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int pixel = i * 8 + half * 4 + lane % 4;
          pixels[i][half] = pixel / COLS * ROW_BYTES + pixel % COLS * STRIDE_W;
        }
    }
  }

  __device__ __forceinline__ void load(Words& words, u32 stage, int step) const {
#pragma unroll
    for (int quad = 0; quad < 2; ++quad) {
      const int pixel = step * 8 + quad * 4, first = pixel % COLS * STRIDE_W;
      // Before the first column and after the last there are zeros, which no box holds.
      const bool leaves = WHOLE_ROWS && (!EVEN_QUADS || first < PADDING_W ||
                                         first + 3 * STRIDE_W + (KERNEL_W - 1) * DILATION_W - PADDING_W >= LEAST_OUT_WIDTH);
      // Pinned, or the compiler keeps what it makes of them for all steps, in memory.
      const u32 packed = EVEN_QUADS ? 0 : ptx::keep_in_register(pixels[step][quad]);
      const u32 row = stage + (EVEN_QUADS ? pixel / COLS * ROW_BYTES : packed & ~511u);
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
        const u32 x = col[b] + (EVEN_QUADS ? first : packed & 511u);
        const u32 from = row + (x / OUT_BLOCK) * BLOCK_BYTES + (EVEN_QUADS ? 0 : (x & 3) * 4);
        const bool inside = !leaves || x < out_width;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const u32 at = from + channel[b][half] + ((x / 4 & (OUT_BLOCK / 4 - 1)) ^ flip[b][half]) * 16;
          const u32 word = ptx::load_shared(inside ? at : stage);
          words[b][quad * 2 + half] = inside ? word : 0;
        }
      }
    }
    if constexpr (WITH_BIAS) {
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
        for (u32& word : words[b]) word = ptx::add_half_ulp_of_tf32(word);
    }
  }
};

