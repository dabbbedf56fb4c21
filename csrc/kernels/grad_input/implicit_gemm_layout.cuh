// The layout of a block's part of grad_output in shared memory, for the gradient of the input.
//
// The gradient is a convolution: its input is grad_output (height x width of Sizes), its output grad_input (out_height x
// out_width). A position is one pixel of the output. Position o meets tap k in row o * STEP_H - PADDING_H + offset(k) of
// the input, with offset = STEP_H * shift + phase. So the input passes through a space_to_depth as it enters shared
// memory: each phase (of rows and columns) that has taps gets an image of its own. In such an image neighbouring positions
// find neighbouring pixels, and a tap is (image of its phase, shift).
//
// A stage holds one phase of one chunk of k. In channels_last that is one image. In NCHW, where a copy takes a segment of
// neighbouring columns, it is a phase of rows with the images of all its column phases. The sum goes over the chunks, and
// over the phases of each chunk.
//
// Constants of the plan: KERNEL_*, STEP_* (the layer's stride), PADDING_*, DILATION_*; STRIDE_* are 1.
#pragma once

#include "common/tile_shape.cuh"

struct SourceAxis {
  int kernel, step, dilation;

  /// Returns the offset of tap k; packed weights have the taps backwards (forward/implicit_gemm_pack.cu, OF_GRAD_INPUT).
  __device__ constexpr int offset(int k) const { return (kernel - 1 - k) * dilation; }
  __device__ constexpr int phase(int k) const { return offset(k) % step; }
  __device__ constexpr int shift(int k) const { return offset(k) / step; }
  __device__ constexpr int max_shift() const { return shift(0); }
  __device__ constexpr bool used(int p) const {
    for (int k = 0; k < kernel; ++k)
      if (phase(k) == p) return true;
    return false;
  }
  /// Returns how many phases below p have taps.
  __device__ constexpr int rank(int p) const {
    int n = 0;
    for (int i = 0; i < p; ++i) n += used(i);
    return n;
  }
  __device__ constexpr int phases() const { return rank(step); }
  /// Returns the phase of that rank: the inverse of `rank`.
  __device__ constexpr int phase_at(int r) const {
    int p = 0;
    while (!used(p) || rank(p) != r) ++p;
    return p;
  }
  /// Returns how many taps the phase of rank r has.
  __device__ constexpr int taps(int r) const {
    int n = 0;
    for (int k = 0; k < kernel; ++k) n += rank(phase(k)) == r;
    return n;
  }
  /// Returns how many taps before tap k are of its phase.
  __device__ constexpr int tap_rank(int k) const {
    int n = 0;
    for (int i = 0; i < k; ++i) n += phase(i) == phase(k);
    return n;
  }
  /// Returns the greatest shift of a tap of the phase of rank r.
  __device__ constexpr int reach(int r) const {
    int greatest = 0;
    for (int k = 0; k < kernel; ++k)
      if (rank(phase(k)) == r && shift(k) > greatest) greatest = shift(k);
    return greatest;
  }
};
constexpr SourceAxis SOURCE_ROWS{KERNEL_H, STEP_H, DILATION_H}, SOURCE_COLS{KERNEL_W, STEP_W, DILATION_W};
constexpr int MAX_SHIFT_H = SOURCE_ROWS.max_shift(), MAX_SHIFT_W = SOURCE_COLS.max_shift();
static_assert(STRIDE_H == 1 && STRIDE_W == 1 && STACK == 1 && PHASE_ROWS * PHASE_COLS == 1);
static_assert(!FLAT || (MAX_SHIFT_H == 0 && MAX_SHIFT_W == 0 && PADDING_H == 0 && PADDING_W == 0 && TILE_H == 1 && TILE_N == 1));

/// Phases of columns that one stage holds, and phases that are stages of their own.
constexpr int COLUMN_PHASES = INPUT_CHANNELS_LAST ? 1 : SOURCE_COLS.phases();
constexpr int SOURCE_PHASES_H = SOURCE_ROWS.phases(), SOURCE_PHASES_W = INPUT_CHANNELS_LAST ? SOURCE_COLS.phases() : 1;
constexpr int SOURCE_PHASES = SOURCE_PHASES_H * SOURCE_PHASES_W;
static_assert(SOURCE_PHASES_H <= 16 && SOURCE_PHASES_W <= 16, "each has a bit of 32");
static_assert(!PLANES || SOURCE_PHASES <= 28, "each has a bit of 32, above 4 others");

/// Returns how many taps a phase has.
__device__ constexpr int phase_taps(int phase) {
  return SOURCE_ROWS.taps(phase / SOURCE_PHASES_W) * (INPUT_CHANNELS_LAST ? SOURCE_COLS.taps(phase % SOURCE_PHASES_W) : KERNEL_W);
}
/// Returns whether a tap is of the phase.
__device__ constexpr bool in_phase(int phase, int kh, int kw) {
  return SOURCE_ROWS.rank(SOURCE_ROWS.phase(kh)) == phase / SOURCE_PHASES_W &&
         (!INPUT_CHANNELS_LAST || SOURCE_COLS.rank(SOURCE_COLS.phase(kw)) == phase % SOURCE_PHASES_W);
}
/// Returns how many taps of its phase lie before a tap.
__device__ constexpr int rank_in_phase(int kh, int kw) {
  return INPUT_CHANNELS_LAST ? SOURCE_ROWS.tap_rank(kh) * SOURCE_COLS.taps(SOURCE_COLS.rank(SOURCE_COLS.phase(kw))) + SOURCE_COLS.tap_rank(kw)
                             : SOURCE_ROWS.tap_rank(kh) * KERNEL_W + kw;
}

// Returns the number that forward/implicit_gemm_pack.cu gives a phase: it orders the weights by phase groups, which are these
// phases counted from another one.
__device__ constexpr int packed_group(int phase) {
  const int row = ((KERNEL_H - 1) * DILATION_H - SOURCE_ROWS.phase_at(phase / SOURCE_PHASES_W) + STEP_H * KERNEL_H * DILATION_H) % STEP_H;
  const int col = ((KERNEL_W - 1) * DILATION_W - SOURCE_COLS.phase_at(phase % SOURCE_PHASES_W) + STEP_W * KERNEL_W * DILATION_W) % STEP_W;
  return INPUT_CHANNELS_LAST ? row * STEP_W + col : row;
}
/// Returns how many taps lie before those of a phase in the packed weights.
__device__ constexpr int taps_before_phase(int phase) {
  int n = 0;
  for (int i = 0; i < SOURCE_PHASES; ++i)
    if (packed_group(i) < packed_group(phase)) n += phase_taps(i);
  return n;
}
__device__ constexpr int max_phase_taps() {
  int greatest = 0;
  for (int i = 0; i < SOURCE_PHASES; ++i) greatest = phase_taps(i) > greatest ? phase_taps(i) : greatest;
  return greatest;
}

constexpr int ITEM = sizeof(Element);
constexpr bool IS_16_BIT = ITEM == 2;
/// Whether copies go through registers: to transpose or to round what they copy, or because asynchronous copies of 16 bytes
/// to different lines of shared memory come one after another (a third of the speed, measured on an H200).
constexpr bool THROUGH_REGISTERS = PLANES || (!INPUT_CHANNELS_LAST && IS_16_BIT);

/// Elements of one copy: neighbouring channels of a pixel, or (NCHW) neighbouring pixels of a channel, which belong to several
/// phases and so must go through registers. ROW_MULTIPLE divides the columns of grad_output, and with FLAT those that the
/// positions of a row have.
constexpr int COPY = INPUT_CHANNELS_LAST  ? power_of_two_dividing(CI_GROUP, 16 / ITEM)
                     : !THROUGH_REGISTERS ? 1
                                          : power_of_two_dividing(ROW_MULTIPLE, power_of_two_dividing(TILE_W * STEP_W, 4));
constexpr int COPY_PIXELS = INPUT_CHANNELS_LAST ? 1 : COPY;

// ---- what is copied: every row of a phase, and its columns (channels_last) or segments of all columns (NCHW) ------

constexpr int COPIED_H = TILE_H + MAX_SHIFT_H;
/// Segments begin this many columns before the first position's, where a copy of several pixels is aligned.
constexpr int ALIGNMENT_COLUMNS = NARROW || FLAT ? 0 : ((-PADDING_W) % COPY_PIXELS + COPY_PIXELS) % COPY_PIXELS;
/// The first copied column, counted from the first position's.
constexpr int FIRST_COL = NARROW ? PADDING_W : -ALIGNMENT_COLUMNS;
constexpr int COPIED_W = INPUT_CHANNELS_LAST ? TILE_W + MAX_SHIFT_W
                         : NARROW            ? round_up(max_of(1, STEP_W * (TILE_W - 1) + SOURCE_COLS.offset(0) + 1 - PADDING_W), COPY_PIXELS)
                         : FLAT              ? TILE_W * STEP_W
                                  : round_up(ALIGNMENT_COLUMNS + STEP_W * (TILE_W - 1) + SOURCE_COLS.offset(0) + 1, COPY_PIXELS);

// ---- the image of a phase -----------------------------------------------------------------------------------

/// Pixels of a row before the first position's, which the alignment of a segment adds.
constexpr int ALIGNMENT_POSITIONS = ceil_div(ALIGNMENT_COLUMNS, STEP_W);
constexpr int HALO_H = COPIED_H;
constexpr int HALO_W = NARROW || FLAT        ? TILE_W
                       : INPUT_CHANNELS_LAST ? COPIED_W
                                             : ALIGNMENT_POSITIONS + (COPIED_W - 1 - ALIGNMENT_COLUMNS) / STEP_W + 1;

// As in forward/implicit_gemm_layout.cuh: the 8 pixels of a fragment must differ modulo 8.
constexpr int ROW_PITCH = NARROW ? TILE_W : FRAGMENT_H > 1 ? aligned_to(HALO_W, 1, 8, FRAGMENT_W) : HALO_W;
constexpr int SHIFTED_PITCH = HALO_H * TILE_W;
constexpr int IMAGE_PITCH = NARROW           ? (MAX_SHIFT_W + 1) * SHIFTED_PITCH
                            : FRAGMENT_N > 1 ? aligned_to(HALO_H * ROW_PITCH, 1, 8, FRAGMENT_W * FRAGMENT_H % 8)
                                             : HALO_H * ROW_PITCH;

// Words of one chunk of k: [k][column phase][pixel] in NCHW and [pixel][k] in channels_last for mma.sync; for wgmma PLANES of 4
// words, [k / 4][column phase][pixel][4]. The pitches put neighbouring lanes of a copy on different banks.
constexpr int CHUNK_PLANES = CHUNK_WORDS / 4;
constexpr int PLANE_LANES = 8 / min_of(8, CHUNK_PLANES);  // pixels that 8 neighbouring lanes copy
constexpr int COLUMN_PHASE_PITCH =
    COLUMN_PHASES == 1 ? TILE_N * IMAGE_PITCH
    : PLANES      ? aligned_to(TILE_N * IMAGE_PITCH, 1, 8, COPY_PIXELS == 1 ? max_of(1, PLANE_LANES / COLUMN_PHASES) % 8 : 1)
                  : aligned_to(TILE_N * IMAGE_PITCH, 1, 32, 32 / min_of(32, COLUMN_PHASES) % 32);
constexpr int PLANE_PITCH = aligned_to(COLUMN_PHASES * COLUMN_PHASE_PITCH, 1, 8, COPY_PIXELS >= 2 * STEP_W ? 1 : PLANE_LANES % 8);
constexpr int K_PITCH = aligned_to(COLUMN_PHASES * COLUMN_PHASE_PITCH, 8, 32, 8);
constexpr int PIXEL_PITCH = CHUNK_WORDS + 4;
/// With IEEE, the planes of the remainders of rounding to TF32 follow those of the rounded numbers.
constexpr int INPUT_WORDS = PLANES                ? PARTS * CHUNK_WORDS * PLANE_PITCH
                            : INPUT_CHANNELS_LAST ? COLUMN_PHASE_PITCH * PIXEL_PITCH
                                                  : CHUNK_WORDS * K_PITCH;

/// Words between two pixels, and between two words of k.
constexpr int PIXEL_STEP = INPUT_CHANNELS_LAST ? PIXEL_PITCH : 1;
constexpr int K_STEP = INPUT_CHANNELS_LAST ? 1 : K_PITCH;

constexpr int STAGE_WORDS = round_up(INPUT_WORDS, 4) + CHUNK_STEPS * max_phase_taps() * TAP_WORDS;

/// Returns the pixels from a position in a phase's first image to the pixel that tap (kh, kw) meets.
__device__ constexpr int tap_pixels(int kh, int kw) {
  return (INPUT_CHANNELS_LAST ? 0 : SOURCE_COLS.rank(SOURCE_COLS.phase(kw)) * COLUMN_PHASE_PITCH) + SOURCE_ROWS.shift(kh) * ROW_PITCH +
         SOURCE_COLS.shift(kw) * (NARROW ? SHIFTED_PITCH : 1);
}
/// Returns the bytes from the source of a copy, at phase zero of rows (channels_last: and columns), to its pixel of a phase.
template <int PHASE>
__device__ __forceinline__ int phase_offset(const Sizes& sizes) {
  constexpr int ROW = SOURCE_ROWS.phase_at(PHASE / SOURCE_PHASES_W), COL = INPUT_CHANNELS_LAST ? SOURCE_COLS.phase_at(PHASE % SOURCE_PHASES_W) : 0;
  constexpr int PIXEL_BYTES = (INPUT_CHANNELS_LAST ? IN_CHANNELS : 1) * ITEM;
  return sizes.width * (ROW * PIXEL_BYTES) + COL * PIXEL_BYTES;
}

// ---- the source of one copy ---------------------------------------------------------------------------------

/// Where row `h` and column `w` (NCHW: a multiple of COPY_PIXELS) of image `n` of the tile is copied from.
struct Source {
  int image, row, col;  // of the input, at phase zero, counted from the tile's first image; may lie outside
  unsigned phases;      // bit r: row phase r has this pixel; bit 16 + c: column phase c has it
};

template <int RANKS, bool ROWS>
__device__ __forceinline__ unsigned phases_inside(int first, int shift, int size) {
  unsigned bits = 0;
#pragma unroll
  for (int r = 0; r < RANKS; ++r) {
    constexpr SourceAxis AXIS = ROWS ? SOURCE_ROWS : SOURCE_COLS;
    const int at = first + AXIS.phase_at(r);
    // No tap of a phase meets a pixel beyond its own reach.
    const int used = (ROWS ? TILE_H : TILE_W) + AXIS.reach(r);
    bits |= static_cast<unsigned>(at >= 0 && at < size && shift < used) << r;
  }
  return bits;
}

__device__ __forceinline__ Source source_of(const Origin& origin, int n, int h, int w, const Sizes& sizes) {
  Source source;
  bool inside;
  if constexpr (FLAT) {
    const int position = origin.image + (INPUT_CHANNELS_LAST ? w : w / STEP_W), image = sizes.image_positions.quotient(position);
    const int in_image = sizes.image_positions.remainder(position, image), row = sizes.row_positions.quotient(in_image);
    source.image = image - sizes.image_positions.quotient(origin.image);
    source.row = row * STEP_H;
    source.col = sizes.row_positions.remainder(in_image, row) * STEP_W + (INPUT_CHANNELS_LAST ? 0 : w % STEP_W);
    inside = image < sizes.batch && source.col < sizes.width;
    source.phases = 0xffffffffu;
  } else {
    source.image = n;
    source.row = (origin.row + h) * STEP_H - PADDING_H;
    source.col = INPUT_CHANNELS_LAST ? (origin.col + w) * STEP_W - PADDING_W
                : NARROW            ? w
                                    : origin.col * STEP_W - PADDING_W - ALIGNMENT_COLUMNS + w;
    inside = origin.image + n < sizes.batch && (INPUT_CHANNELS_LAST || (source.col >= 0 && source.col < sizes.width));
    source.phases = phases_inside<SOURCE_PHASES_H, true>(source.row, h, sizes.height);
    if constexpr (INPUT_CHANNELS_LAST) {
      source.phases |= phases_inside<SOURCE_PHASES_W, false>(source.col, w, sizes.width) << 16;
    } else {
      source.phases |= 1u << 16;
    }
  }
  if (!inside) source.phases = 0;
  return source;
}
template <int PHASE>
__device__ __forceinline__ bool has_phase(unsigned phases) {
  constexpr unsigned BITS = 1u << PHASE / SOURCE_PHASES_W | 1u << (16 + PHASE % SOURCE_PHASES_W);
  return (phases & BITS) == BITS;
}
/// Returns a word whose bit PHASE says whether that phase has the pixel.
__device__ __forceinline__ unsigned phase_bits(unsigned phases) {
  if constexpr (SOURCE_PHASES_W == 1) {
    return phases >> 16 ? phases & ((1u << SOURCE_PHASES_H) - 1) : 0;
  } else {
    unsigned bits = 0;
#pragma unroll
    for (int r = 0; r < SOURCE_PHASES_H; ++r)
      if (phases >> r & 1) bits |= (phases >> 16 & ((1u << SOURCE_PHASES_W) - 1)) << (r * SOURCE_PHASES_W);
    return bits;
  }
}
/// Returns where a copy is stored, in pixels from the beginning of a plane or row of k: the first column of its row (in
/// channels_last, unless NARROW, the pixel itself).
__device__ __forceinline__ int stored_row(int n, int h, int w) {
  return n * IMAGE_PITCH + h * ROW_PITCH + (INPUT_CHANNELS_LAST && !NARROW ? w : 0);
}

/// Where column `u` of a row is stored, counted from the first position's (FLAT: from the tile's): which position of which
/// column phase. It is not used where no tap meets it.
struct StoredColumn {
  int position, column_phase;
  bool used;
};
__device__ __forceinline__ constexpr StoredColumn stored_column(int u) {
  // With ALIGNMENT_POSITIONS added the number is not negative, so the quotient is its floor.
  const int shifted = u + ALIGNMENT_POSITIONS * STEP_W, phase = shifted % STEP_W;
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
