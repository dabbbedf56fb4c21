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

/// One step's A fragments (grad_output), as wgmma_from_registers takes them.
using AFragments = u32[M_TILES][4];

/// The bits by which the swizzle permutes the pieces of 16 bytes of a channel.
__device__ __forceinline__ constexpr u32 swizzle_of(int channel) { return (channel * (OUT_BOX_COLS * 4) >> 7) & (OUT_BOX_COLS / 4 - 1); }

/// The table's entry of a pixel and a tap: the bytes from the beginning of grad_output's boxes to the first channel of what
/// they read, with the piece of 16 bytes where it would lie without swizzle. OUTSIDE: it is zero, and no box holds it.
constexpr u32 OUTSIDE = 0xffffffff;

__device__ __forceinline__ u32 pixel_entry(int step, int i, int kw, const Im2colNchwSizes& sizes) {
  const int run_steps = static_cast<int>(sizes.run_steps.value), image = step / run_steps;
  const int pixel = step % run_steps * STEP_PIXELS + i, row = pixel / sizes.cols, col = pixel % sizes.cols;
  const int x = sizes.left_halo + col * STRIDE_W + kw * DILATION_W - PADDING_W;
  // Boxes of whole rows do not hold the zeros before the first column; behind the last one, the next stage's may lie.
  const int end = sizes.cols < sizes.width ? sizes.out_boxes * OUT_BOX_COLS : sizes.out_width;
  if (row >= sizes.rows || col >= sizes.width || x < 0 || x >= end) return OUTSIDE;
  return x / OUT_BOX_COLS * out_box_bytes(sizes) + (image * sizes.rows + row) * ROW_BYTES + x % OUT_BOX_COLS * 4;
}

/// The table's entry of a step: its pixels of the input, from the beginning of a stage, as descriptors count.
__device__ __forceinline__ u32 step_entry(int step, const Im2colNchwSizes& sizes) {
  const int run_steps = static_cast<int>(sizes.run_steps.value), image = step / run_steps, run_step = step % run_steps;
  return ((image * sizes.run_boxes + run_step / BOX_STEPS) * BOX_BYTES + run_step % BOX_STEPS * (STEP_PIXELS * 4)) / 16;
}

/// Writes the tables, by all threads of the block.
__device__ __forceinline__ void write_tables(u32 shared, const Im2colNchwSizes& sizes) {
  constexpr int STEP_ENTRIES = STEP_PIXELS * KERNEL_W;
  for (int entry = threadIdx.x; entry < (sizes.steps + 1) * STEP_ENTRIES; entry += THREADS) {
    const int step = entry / STEP_ENTRIES % sizes.steps, in_step = entry % STEP_ENTRIES;
    const u32 of_pixel = pixel_entry(step, in_step / KERNEL_W, in_step % KERNEL_W, sizes), of_step = step_entry(step, sizes);
    ptx::store_shared<1>(shared + PIXEL_TABLE + entry * 4, &of_pixel);
    if (in_step == 0) ptx::store_shared<1>(shared + STEP_TABLE + entry / STEP_ENTRIES * 4, &of_step);
  }
}

/// Counts the pixels that exist from the first one of a stage on, within the rows or the row of which it is a part.
struct ExistingPixels {
  int left;
  const int all, in_stage;

  __device__ __forceinline__ ExistingPixels(const StagePlace& first, const Im2colNchwSizes& sizes)
      : all(sizes.cols < sizes.width ? sizes.width : sizes.height * sizes.cols), in_stage(sizes.rows * sizes.cols) {
    left = all - (sizes.cols < sizes.width ? first.across : first.down) * in_stage;
  }
  __device__ __forceinline__ void advance() {
    left -= in_stage;
    if (left <= 0) left = all;
  }
};

/// A lane's entries of one step.
struct Entries {
  u32 pixel[M_TILES][2], step;
};

/// Where a lane's A fragments lie. All of it stays in registers: the compiler would compute it again for each step.
struct AAddresses {
  u32 steps, pixels[M_TILES];  // the first entries
  u32 channel[M_TILES][2], swizzle[M_TILES][2];

  __device__ __forceinline__ AAddresses(u32 shared, int warp, int lane, const Im2colNchwSizes& sizes) : steps(ptx::keep_in_register(shared + STEP_TABLE)) {
#pragma unroll
    for (int b = 0; b < M_TILES; ++b) {
      const FragmentRows rows = FragmentRows::of(warp, b, lane);
      pixels[b] = ptx::keep_in_register(shared + PIXEL_TABLE + (lane % 4 * KERNEL_W + (rows.kw < KERNEL_W ? rows.kw : 0)) * 4);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        channel[b][half] = ptx::keep_in_register(input_bytes(sizes) + rows.channel[half] * (OUT_BOX_COLS * 4));
        swizzle[b][half] = ptx::keep_in_register(swizzle_of(rows.channel[half]) * 16);
      }
    }
  }

  __device__ __forceinline__ Entries entries(int step) const {
    Entries found;
    found.step = ptx::load_shared(steps + step * 4);
#pragma unroll
    for (int b = 0; b < M_TILES; ++b)
#pragma unroll
      for (int quad = 0; quad < 2; ++quad)
        found.pixel[b][quad] = ptx::load_shared(pixels[b] + step * TABLE_STEP_BYTES + quad * (4 * KERNEL_W * 4));
    return found;
  }

  /// Loads the fragments of a step. `existing`: how many pixels exist from this lane's first one on.
  __device__ __forceinline__ void load(AFragments& fragments, u32 stage, const Entries& entries, int existing) const {
#pragma unroll
    for (int quad = 0; quad < 2; ++quad)
#pragma unroll
      for (int b = 0; b < M_TILES; ++b) {
        const u32 entry = entries.pixel[b][quad];
        const bool inside = quad * 4 < existing && entry != OUTSIDE;
#pragma unroll
        for (int half = 0; half < 2; ++half)
          fragments[b][quad * 2 + half] = ptx::load_shared_if(inside, (entry ^ swizzle[b][half]) + channel[b][half] + stage);
      }
    if constexpr (WITH_BIAS) {
#pragma unroll
      for (int b = 0; b < M_TILES; ++b)
#pragma unroll
        for (u32& word : fragments[b]) word = ptx::add_half_ulp_of_tf32(word);
    }
  }
};
