// Where a block's part of grad_output lies in shared memory for the gradient of the input. Constants only.
//
// In the names of the convolution that the gradient is: its input is grad_output (height x width of Sizes), its output
// grad_input (out_height x out_width), and a cell is one pixel of the output. Cell o meets tap k in row
// o * STEP_H - PADDING_H + offset(k) of the input, offset = STEP_H * shift + phase. So the input is split by phase as
// it enters shared memory, into one picture for each phase (row and column) that has taps: there, cells that are
// neighbours find neighbouring pixels, and a tap is (picture of its phase, shift).
//
// A stage holds one slice of one chunk of k: in channels_last one picture, in NCHW, where a run of columns is copied at
// once, the pictures of all columns of one row phase. The sum runs over chunks, and over slices within a chunk.
//
// Constants, from the plan: KERNEL_*, STEP_* (the layer's stride), PADDING_*, DILATION_*; STRIDE_* are 1.
#pragma once

#include "common/tile_shape.cuh"

struct SourceAxis {
  int kernel, step, dilation;

  /// Packed weights have the taps backwards (forward/implicit_gemm_pack.cu, OF_GRAD_INPUT).
  __device__ constexpr int offset(int k) const { return (kernel - 1 - k) * dilation; }
  __device__ constexpr int phase(int k) const { return offset(k) % step; }
  __device__ constexpr int shift(int k) const { return offset(k) / step; }
  __device__ constexpr int most_shift() const { return shift(0); }
  __device__ constexpr bool used(int p) const {
    for (int k = 0; k < kernel; ++k)
      if (phase(k) == p) return true;
    return false;
  }
  /// Phases with taps below p; those of all.
  __device__ constexpr int rank(int p) const {
    int n = 0;
    for (int i = 0; i < p; ++i) n += used(i);
    return n;
  }
  __device__ constexpr int phases() const { return rank(step); }
  /// The inverse of rank.
  __device__ constexpr int phase_at(int r) const {
    int p = 0;
    while (!used(p) || rank(p) != r) ++p;
    return p;
  }
  /// Of a picture: its taps, the place of tap k among them, the greatest shift.
  __device__ constexpr int taps(int r) const {
    int n = 0;
    for (int k = 0; k < kernel; ++k) n += rank(phase(k)) == r;
    return n;
  }
  __device__ constexpr int tap_rank(int k) const {
    int n = 0;
    for (int i = 0; i < k; ++i) n += phase(i) == phase(k);
    return n;
  }
  __device__ constexpr int reach(int r) const {
    int most = 0;
    for (int k = 0; k < kernel; ++k)
      if (rank(phase(k)) == r && shift(k) > most) most = shift(k);
    return most;
  }
};
constexpr SourceAxis SOURCE_ROWS{KERNEL_H, STEP_H, DILATION_H}, SOURCE_COLS{KERNEL_W, STEP_W, DILATION_W};
constexpr int MAX_SHIFT_H = SOURCE_ROWS.most_shift(), MAX_SHIFT_W = SOURCE_COLS.most_shift();
static_assert(STRIDE_H == 1 && STRIDE_W == 1 && STACK == 1 && PHASE_ROWS * PHASE_COLS == 1);
static_assert(!FLAT || (MAX_SHIFT_H == 0 && MAX_SHIFT_W == 0 && PADDING_H == 0 && PADDING_W == 0 && TILE_H == 1 && TILE_N == 1));

constexpr int PICTURES = INPUT_CHANNELS_LAST ? 1 : SOURCE_COLS.phases();  // of a slice
constexpr int SLICES_H = SOURCE_ROWS.phases(), SLICES_W = INPUT_CHANNELS_LAST ? SOURCE_COLS.phases() : 1;
constexpr int SLICES = SLICES_H * SLICES_W;
static_assert(SLICES_H <= 16 && SLICES_W <= 16, "one bit for each, in 32");
static_assert(!PLANES || SLICES <= 28, "one bit for each, above 4 others, in 32");

/// Taps of a slice, the place of a tap among them, and whether a tap is of it.
__device__ constexpr int slice_taps(int slice) {
  return SOURCE_ROWS.taps(slice / SLICES_W) * (INPUT_CHANNELS_LAST ? SOURCE_COLS.taps(slice % SLICES_W) : KERNEL_W);
}
__device__ constexpr bool in_slice(int slice, int kh, int kw) {
  return SOURCE_ROWS.rank(SOURCE_ROWS.phase(kh)) == slice / SLICES_W &&
         (!INPUT_CHANNELS_LAST || SOURCE_COLS.rank(SOURCE_COLS.phase(kw)) == slice % SLICES_W);
}
__device__ constexpr int rank_in_slice(int kh, int kw) {
  return INPUT_CHANNELS_LAST ? SOURCE_ROWS.tap_rank(kh) * SOURCE_COLS.taps(SOURCE_COLS.rank(SOURCE_COLS.phase(kw))) + SOURCE_COLS.tap_rank(kw)
                             : SOURCE_ROWS.tap_rank(kh) * KERNEL_W + kw;
}

// Packed weights are ordered by forward/implicit_gemm_pack.cu's phase groups, which are these phases counted from another one.
__device__ constexpr int packed_group(int slice) {
  const int row = ((KERNEL_H - 1) * DILATION_H - SOURCE_ROWS.phase_at(slice / SLICES_W) + STEP_H * KERNEL_H * DILATION_H) % STEP_H;
  const int col = ((KERNEL_W - 1) * DILATION_W - SOURCE_COLS.phase_at(slice % SLICES_W) + STEP_W * KERNEL_W * DILATION_W) % STEP_W;
  return INPUT_CHANNELS_LAST ? row * STEP_W + col : row;
}
/// Taps of all slices whose weights lie before a slice's.
__device__ constexpr int taps_before_slice(int slice) {
  int n = 0;
  for (int i = 0; i < SLICES; ++i)
    if (packed_group(i) < packed_group(slice)) n += slice_taps(i);
  return n;
}
__device__ constexpr int most_slice_taps() {
  int most = 0;
  for (int i = 0; i < SLICES; ++i) most = slice_taps(i) > most ? slice_taps(i) : most;
  return most;
}

constexpr int ITEM = sizeof(Element);
constexpr bool IS_16_BIT = ITEM == 2;
/// What is copied through registers: to transpose it, to round it, or because asynchronous copies of 16 bytes to different
/// lines of shared memory come one after another (a third of the speed, measured on an H200).
constexpr bool THROUGH_REGISTERS = PLANES || (!INPUT_CHANNELS_LAST && IS_16_BIT);

/// Elements of one copy: neighbouring channels of a pixel, or (NCHW) neighbouring pixels of a channel, which part into
/// several pictures and so must go through registers. ROW_MULTIPLE divides the columns of grad_output, and with FLAT those
/// that the cells of a row have.
constexpr int COPY = INPUT_CHANNELS_LAST  ? power_of_two_dividing(CI_GROUP, 16 / ITEM)
                     : !THROUGH_REGISTERS ? 1
                                          : power_of_two_dividing(ROW_MULTIPLE, power_of_two_dividing(TILE_W * STEP_W, 4));
constexpr int COPY_PIXELS = INPUT_CHANNELS_LAST ? 1 : COPY;

// ---- what is copied: every row of a slice, and its columns (channels_last) or runs of all columns (NCHW) -----------

constexpr int COPIED_H = TILE_H + MAX_SHIFT_H;
/// Runs begin this many columns before the first cell's, where a copy of several pixels may begin.
constexpr int LEAD = NARROW || FLAT ? 0 : ((-PADDING_W) % COPY_PIXELS + COPY_PIXELS) % COPY_PIXELS;
/// What the first copied column is counted as, from the first cell's on.
constexpr int FIRST_COL = NARROW ? PADDING_W : -LEAD;
constexpr int COPIED_W = INPUT_CHANNELS_LAST ? TILE_W + MAX_SHIFT_W
                         : NARROW            ? round_up(max_of(1, STEP_W * (TILE_W - 1) + SOURCE_COLS.offset(0) + 1 - PADDING_W), COPY_PIXELS)
                         : FLAT              ? TILE_W * STEP_W
                                  : round_up(LEAD + STEP_W * (TILE_W - 1) + SOURCE_COLS.offset(0) + 1, COPY_PIXELS);

// ---- a picture ----------------------------------------------------------------------------------------------

/// Pixels of a row before the first cell's: what a run brings along.
constexpr int LEAD_CELLS = ceil_div(LEAD, STEP_W);
constexpr int HALO_H = COPIED_H;
constexpr int HALO_W = NARROW || FLAT        ? TILE_W
                       : INPUT_CHANNELS_LAST ? COPIED_W
                                             : LEAD_CELLS + (COPIED_W - 1 - LEAD) / STEP_W + 1;

// As in forward/implicit_gemm_layout.cuh: the 8 pixels of a fragment must differ modulo 8.
constexpr int ROW_PITCH = NARROW ? TILE_W : FRAGMENT_H > 1 ? aligned_to(HALO_W, 1, 8, FRAGMENT_W) : HALO_W;
constexpr int SHIFTED_PITCH = HALO_H * TILE_W;
constexpr int IMAGE_PITCH = NARROW           ? (MAX_SHIFT_W + 1) * SHIFTED_PITCH
                            : FRAGMENT_N > 1 ? aligned_to(HALO_H * ROW_PITCH, 1, 8, FRAGMENT_W * FRAGMENT_H % 8)
                                             : HALO_H * ROW_PITCH;

// Words of one chunk of k: [k][picture][pixel] in NCHW and [picture][pixel][k] in channels_last for mma.sync; for wgmma
// PLANES of 4 words, [k / 4][picture][pixel][4]. Pitched so that neighbouring lanes of a copy differ in banks.
constexpr int CHUNK_PLANES = CHUNK_WORDS / 4;
constexpr int PLANE_LANES = 8 / min_of(8, CHUNK_PLANES);  // pixels that 8 neighbouring lanes copy
constexpr int PICTURE_PITCH =
    PICTURES == 1 ? TILE_N * IMAGE_PITCH
    : PLANES      ? aligned_to(TILE_N * IMAGE_PITCH, 1, 8, COPY_PIXELS == 1 ? max_of(1, PLANE_LANES / PICTURES) % 8 : 1)
                  : aligned_to(TILE_N * IMAGE_PITCH, 1, 32, 32 / min_of(32, PICTURES) % 32);
constexpr int PLANE_PITCH = aligned_to(PICTURES * PICTURE_PITCH, 1, 8, COPY_PIXELS >= 2 * STEP_W ? 1 : PLANE_LANES % 8);
constexpr int K_PITCH = aligned_to(PICTURES * PICTURE_PITCH, 8, 32, 8);
constexpr int PIXEL_PITCH = CHUNK_WORDS + 4;
/// With IEEE, the planes of what rounding to TF32 left over follow those of the rounded numbers.
constexpr int INPUT_WORDS = PLANES                ? PARTS * CHUNK_WORDS * PLANE_PITCH
                            : INPUT_CHANNELS_LAST ? PICTURE_PITCH * PIXEL_PITCH
                                                  : CHUNK_WORDS * K_PITCH;

/// Words between two pixels, and between two words of k.
constexpr int PIXEL_STEP = INPUT_CHANNELS_LAST ? PIXEL_PITCH : 1;
constexpr int K_STEP = INPUT_CHANNELS_LAST ? 1 : K_PITCH;

constexpr int STAGE_WORDS = round_up(INPUT_WORDS, 4) + CHUNK_STEPS * most_slice_taps() * TAP_WORDS;

/// Pixels from a cell's place in a slice's first picture to what tap (kh, kw) meets there.
__device__ constexpr int tap_pixels(int kh, int kw) {
  return (INPUT_CHANNELS_LAST ? 0 : SOURCE_COLS.rank(SOURCE_COLS.phase(kw)) * PICTURE_PITCH) + SOURCE_ROWS.shift(kh) * ROW_PITCH +
         SOURCE_COLS.shift(kw) * (NARROW ? SHIFTED_PITCH : 1);
}
/// Bytes from a place of the copies, at phase zero of rows (channels_last: and columns), to its pixel of a slice.
template <int SLICE>
__device__ __forceinline__ int slice_distance(const Sizes& sizes) {
  constexpr int ROW = SOURCE_ROWS.phase_at(SLICE / SLICES_W), COL = INPUT_CHANNELS_LAST ? SOURCE_COLS.phase_at(SLICE % SLICES_W) : 0;
  constexpr int PIXEL_BYTES = (INPUT_CHANNELS_LAST ? IN_CHANNELS : 1) * ITEM;
  return sizes.width * (ROW * PIXEL_BYTES) + COL * PIXEL_BYTES;
}

// ---- one place of the copies --------------------------------------------------------------------------------

/// Row `h` and column `w` (NCHW: a multiple of COPY_PIXELS) of what is copied of image `n` of the tile.
struct Place {
  int image, row, col;  // of the input, at phase zero, counted from the tile's first image; may lie outside
  unsigned slices;      // bit r: a slice of row phase r has the place; bit 16 + c: one of column phase c
};

template <int RANKS, bool ROWS>
__device__ __forceinline__ unsigned slices_inside(int first, int shift, int size) {
  unsigned bits = 0;
#pragma unroll
  for (int r = 0; r < RANKS; ++r) {
    constexpr SourceAxis AXIS = ROWS ? SOURCE_ROWS : SOURCE_COLS;
    const int at = first + AXIS.phase_at(r);
    // Beyond a picture's own reach no tap meets what lies there.
    const int used = (ROWS ? TILE_H : TILE_W) + AXIS.reach(r);
    bits |= static_cast<unsigned>(at >= 0 && at < size && shift < used) << r;
  }
  return bits;
}

__device__ __forceinline__ Place place_of(const Origin& origin, int n, int h, int w, const Sizes& sizes) {
  Place place;
  bool inside;
  if constexpr (FLAT) {
    const int cell = origin.image + (INPUT_CHANNELS_LAST ? w : w / STEP_W), image = sizes.image_positions.quotient(cell);
    const int in_image = sizes.image_positions.remainder(cell, image), row = sizes.row_positions.quotient(in_image);
    place.image = image - sizes.image_positions.quotient(origin.image);
    place.row = row * STEP_H;
    place.col = sizes.row_positions.remainder(in_image, row) * STEP_W + (INPUT_CHANNELS_LAST ? 0 : w % STEP_W);
    inside = image < sizes.batch && place.col < sizes.width;
    place.slices = 0xffffffffu;
  } else {
    place.image = n;
    place.row = (origin.row + h) * STEP_H - PADDING_H;
    place.col = INPUT_CHANNELS_LAST ? (origin.col + w) * STEP_W - PADDING_W
                : NARROW            ? w
                                    : origin.col * STEP_W - PADDING_W - LEAD + w;
    inside = origin.image + n < sizes.batch && (INPUT_CHANNELS_LAST || (place.col >= 0 && place.col < sizes.width));
    place.slices = slices_inside<SLICES_H, true>(place.row, h, sizes.height);
    if constexpr (INPUT_CHANNELS_LAST) {
      place.slices |= slices_inside<SLICES_W, false>(place.col, w, sizes.width) << 16;
    } else {
      place.slices |= 1u << 16;
    }
  }
  if (!inside) place.slices = 0;
  return place;
}
template <int SLICE>
__device__ __forceinline__ bool has_slice(unsigned slices) {
  constexpr unsigned BITS = 1u << SLICE / SLICES_W | 1u << (16 + SLICE % SLICES_W);
  return (slices & BITS) == BITS;
}
/// Bit SLICE: the slice has the place.
__device__ __forceinline__ unsigned slice_bits(unsigned slices) {
  if constexpr (SLICES_W == 1) {
    return slices >> 16 ? slices & ((1u << SLICES_H) - 1) : 0;
  } else {
    unsigned bits = 0;
#pragma unroll
    for (int r = 0; r < SLICES_H; ++r)
      if (slices >> r & 1) bits |= (slices >> 16 & ((1u << SLICES_W) - 1)) << (r * SLICES_W);
    return bits;
  }
}
/// Where the place is stored, in pixels from the beginning of a plane or row of k: its row, in the first column (but
/// channels_last, unless NARROW: the very pixel).
__device__ __forceinline__ int stored_row(int n, int h, int w) {
  return n * IMAGE_PITCH + h * ROW_PITCH + (INPUT_CHANNELS_LAST && !NARROW ? w : 0);
}

/// Where column `u` (counted from the first cell's, or FLAT from the tile's) of a row lies: cell and picture; not used
/// where no tap meets it.
struct Column {
  int cell, picture;
  bool used;
};
__device__ __forceinline__ constexpr Column column_at(int u) {
  // Not below zero: with LEAD_CELLS added, a quotient is a floor.
  const int shifted = u + LEAD_CELLS * STEP_W, phase = shifted % STEP_W;
  constexpr bool ALL = SOURCE_COLS.phases() == STEP_W;
  int rank = phase;
  bool used = true;
  if (!ALL) {
    rank = 0;
    used = false;
    for (int p = 0; p < STEP_W; ++p) {
      rank += p < phase && SOURCE_COLS.used(p);
      used = used || (p == phase && SOURCE_COLS.used(p));
    }
  }
  return {shifted / STEP_W, rank, used};
}
