// Of grad_weight/im2col_nchw.cu: a lane's A fragments of grad_output, loaded from boxes of it as it lies.
//
// The 16 rows of a warp are FRAGMENT_TAPS neighbouring taps of 16 / FRAGMENT_TAPS channels each: with a stride that is
// a multiple of FRAGMENT_TAPS, and channels that the swizzle keeps apart, all lanes load from different banks. The
// taps that are left over have 16 rows of one tap each; the last rows may belong to no tap.
#pragma once

/// How many bits of a channel's number select banks: those by which FRAGMENT_TAPS x 4 words of 8 / FRAGMENT_TAPS channels
/// lie in different banks (of a swizzle that permutes pieces of 16 bytes by the address's bits 7 to 9). `channel_bit`:
/// which bits those are, then the others.
constexpr int BANK_BITS = FRAGMENT_TAPS == 1 ? 3 : FRAGMENT_TAPS == 2 ? 2 : FRAGMENT_TAPS == 4 ? 1 : 0;
__device__ constexpr int channel_bit(int i) {
  constexpr int FOR_TAP_PAIRS[3][3] = {{0, 1, 2}, {0, 2, 1}, {1, 2, 0}}, FOR_TAP_QUADS[3][3] = {{1, 0, 2}, {0, 1, 2}, {2, 0, 1}};
  constexpr int BLOCK = OUT_BOX_COLS == 8 ? 0 : OUT_BOX_COLS == 16 ? 1 : 2;
  return BANK_BITS == 2 ? FOR_TAP_PAIRS[BLOCK][i] : BANK_BITS == 1 ? FOR_TAP_QUADS[BLOCK][i] : i;
}
__device__ __forceinline__ constexpr int channel_of(int bits) {
  return (bits & 1) << channel_bit(0) | (bits >> 1 & 1) << channel_bit(1) | (bits >> 2 & 1) << channel_bit(2);
}

/// A lane's two rows of 16: a tap and two channels of it. Rows beyond the last tap have a tap that does not exist.
struct FragmentRows {
  int kw, channel[2];

  __device__ __forceinline__ FragmentRows(int row_tile, int g) {
    constexpr int WHOLE = KERNEL_W / FRAGMENT_TAPS, CHANNELS = 16 / FRAGMENT_TAPS, GROUP_TILES = TILE_CO / CHANNELS;
    const int remaining = FRAGMENT_TAPS == 1 ? row_tile : row_tile - WHOLE * GROUP_TILES;
    if (FRAGMENT_TAPS > 1 && (KERNEL_W % FRAGMENT_TAPS == 0 || remaining < 0)) {
      // A tile of 16 rows has 16 / FRAGMENT_TAPS channels, so 8 channels are FRAGMENT_TAPS / 2 tiles.
      constexpr int OCTET_TILES = FRAGMENT_TAPS / 2, CHANNEL_STEP = 8 / FRAGMENT_TAPS;
      const int group_tile = row_tile % GROUP_TILES, first = group_tile / OCTET_TILES * 8;
      kw = row_tile / GROUP_TILES * FRAGMENT_TAPS + g / CHANNEL_STEP;
      const int bits = g % CHANNEL_STEP | group_tile % OCTET_TILES << (BANK_BITS + 1);
      channel[0] = first + channel_of(bits);
      channel[1] = first + channel_of(bits | 1 << BANK_BITS);
    } else {
      kw = (FRAGMENT_TAPS == 1 ? 0 : WHOLE * FRAGMENT_TAPS) + remaining / (TILE_CO / 16);
      channel[0] = remaining % (TILE_CO / 16) * 16 + g;
      channel[1] = channel[0] + 8;
    }
  }
  /// The rows of one of a warp's M_TILES.
  __device__ __forceinline__ static FragmentRows of(int warp, int block, int lane) {
    return FragmentRows((warp / 4 * M_TILES + block) * 4 + warp % 4, lane / 4);
  }
};

/// Whether four pixels of a step are always of one row, so that they are equally far apart for every lane.
constexpr bool QUADS_STAY_IN_ROW = COLS % 4 == 0;

/// One step's A fragments (grad_output), as wgmma_from_registers takes them.
using AFragments = u32[M_TILES][4];

/// The bits by which the swizzle permutes the pieces of 16 bytes of a channel.
__device__ __forceinline__ constexpr u32 swizzle_of(int channel) { return (channel * (OUT_BOX_COLS * 4) >> 7) & (OUT_BOX_COLS / 4 - 1); }

/// Where a lane's A fragments lie.
struct AAddresses {
  u32 col[M_TILES];  // column, in the boxes, of the row's pixel 0; may lie before the first
  u32 channel[M_TILES][2], swizzle[M_TILES][2];
  const u32 out_width;
  // For each pixel of a lane: the bytes of its row and, below 512, its columns.
  u32 pixels[QUADS_STAY_IN_ROW ? 1 : STEPS][2];

  __device__ __forceinline__ AAddresses(int warp, int lane, u32 out_width) : out_width(out_width) {
#pragma unroll
    for (int b = 0; b < M_TILES; ++b) {
      const FragmentRows rows = FragmentRows::of(warp, b, lane);
      const int kw = rows.kw < KERNEL_W ? rows.kw : 0;
      col[b] = LEFT_HALO + kw * DILATION_W - PADDING_W + (QUADS_STAY_IN_ROW ? lane % 4 * STRIDE_W : 0);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        channel[b][half] = INPUT_BYTES + rows.channel[half] * (OUT_BOX_COLS * 4) + (QUADS_STAY_IN_ROW ? (col[b] & 3) * 4 : 0);
        swizzle[b][half] = swizzle_of(rows.channel[half]);
      }
    }
    if constexpr (!QUADS_STAY_IN_ROW) {
#pragma unroll
      for (int i = 0; i < STEPS; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int pixel = i * 8 + half * 4 + lane % 4;
          pixels[i][half] = pixel / COLS * ROW_BYTES + pixel % COLS * STRIDE_W;
        }
    }
  }

  __device__ __forceinline__ void load(AFragments& fragments, u32 stage, int step) const {
#pragma unroll
    for (int quad = 0; quad < 2; ++quad) {
      const int pixel = step * 8 + quad * 4, first = pixel % COLS * STRIDE_W;
      // Before the first column and after the last there are zeros, which the boxes of whole rows do not hold.
      const bool may_be_outside = WHOLE_ROWS && (!QUADS_STAY_IN_ROW || first < PADDING_W ||
                                         first + 3 * STRIDE_W + (KERNEL_W - 1) * DILATION_W - PADDING_W >= MIN_OUT_WIDTH);
      // Kept in a register: otherwise the compiler computes the addresses of all steps ahead and spills them.
      const u32 packed = QUADS_STAY_IN_ROW ? 0 : ptx::keep_in_register(pixels[step][quad]);
      const u32 row = stage + (QUADS_STAY_IN_ROW ? pixel / COLS * ROW_BYTES : packed & ~511u);
#pragma unroll
      for (int b = 0; b < M_TILES; ++b) {
        const u32 x = col[b] + (QUADS_STAY_IN_ROW ? first : packed & 511u);
        const u32 from = row + (x / OUT_BOX_COLS) * OUT_BOX_BYTES + (QUADS_STAY_IN_ROW ? 0 : (x & 3) * 4);
        const bool inside = !may_be_outside || x < out_width;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const u32 at = from + channel[b][half] + ((x / 4 & (OUT_BOX_COLS / 4 - 1)) ^ swizzle[b][half]) * 16;
          const u32 word = ptx::load_shared(inside ? at : stage);
          fragments[b][quad * 2 + half] = inside ? word : 0;
        }
      }
    }
    if constexpr (WITH_BIAS) {
#pragma unroll
      for (int b = 0; b < M_TILES; ++b)
#pragma unroll
        for (u32& word : fragments[b]) word = ptx::add_half_ulp_of_tf32(word);
    }
  }
};

