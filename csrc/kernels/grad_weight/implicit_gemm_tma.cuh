// How one tile of TILE_PIXELS pixels lies in a stage of grad_weight/implicit_gemm_tma.cu: rows of 128 bytes, 64 channels of one
// pixel, as TMA writes them.
//
//   input        [64 channels][pixel]
//   grad_output  [phase row][phase column][64 channels][image][row][column]: one box for each phase, with the pixels
//                that the tile's pixels read for tap 0 and those to which the other taps reach. BOX_PER_TAP_COL: one
//                box for each phase row and tap column, so that no tap shifts a box's columns and rows of fewer than 8
//                pixels are contiguous.
//
// The launch gives the images, rows and columns of a tile (GradWeightTmaSizes). Both groups of 8 pixels of a multiply are
// contiguous in a box, and as far apart as those of any other.
#pragma once

constexpr int ROW_BYTES = 128, BOX_CHANNELS = 64;
/// A box must begin where the swizzle pattern does.
constexpr int BOX_ALIGNMENT = 1024;

constexpr int STEP = 16, STEPS = TILE_PIXELS / STEP;
static_assert(TILE_PIXELS % STEP == 0 && STEPS * static_cast<int>(sizeof(int)) <= static_cast<int>(sizeof(GradWeightTmaSizes::steps)));

constexpr int INPUT_BLOCKS = BLOCK_M / BOX_CHANNELS, INPUT_BYTES = TILE_PIXELS * ROW_BYTES;
static_assert(INPUT_BYTES % BOX_ALIGNMENT == 0);

/// The boxes of grad_output in a stage: CHANNEL_BLOCKS of each phase.
constexpr int PHASE_ROWS = TapsH::PHASES, PHASE_COLS = BOX_PER_TAP_COL ? TAP_COLS : TapsW::PHASES;
constexpr int CHANNEL_BLOCKS = ceil_div(BLOCK_N, BOX_CHANNELS), OUTPUT_BOXES = PHASE_ROWS * PHASE_COLS * CHANNEL_BLOCKS;
/// Columns of grad_output from the block's first tap to the first of the phase.
__device__ constexpr int phase_col(int phase) { return BOX_PER_TAP_COL ? phase * TapsW::PITCH : TapsW::residue(phase); }

/// From one place in the boxes of grad_output to another: boxes, and rows and columns of pixels.
struct BoxOffset {
  int boxes, rows, cols;

  __device__ constexpr BoxOffset operator-(const BoxOffset& other) const { return {boxes - other.boxes, rows - other.rows, cols - other.cols}; }
  __device__ constexpr bool operator==(const BoxOffset& other) const { return boxes == other.boxes && rows == other.rows && cols == other.cols; }
  /// Whether it leads forward, whatever the shape of a tile: a box has more rows and columns than lie between two taps.
  __device__ constexpr bool is_forward() const { return boxes != 0 ? boxes > 0 : rows != 0 ? rows > 0 : cols > 0; }
  __device__ __forceinline__ int bytes(const GradWeightTmaSizes& sizes) const {
    return boxes * sizes.box_bytes + (rows * sizes.box_cols + cols) * ROW_BYTES;
  }
};
/// From the first box to what a tap of the block reads for the first pixel. Numbers beyond BLOCK_TAPS repeat the last tap.
__device__ constexpr BoxOffset tap_offset(int number) {
  const int tap = number < BLOCK_TAPS ? number : BLOCK_TAPS - 1, i = tap / TAP_COLS, j = tap % TAP_COLS;
  const int phase = TapsH::phase(i) * PHASE_COLS + (BOX_PER_TAP_COL ? j : TapsW::phase(j));
  return {phase * CHANNEL_BLOCKS, TapsH::shift(i), BOX_PER_TAP_COL ? 0 : TapsW::shift(j)};
}

/// One multiply may take several taps, if all their blocks of 64 channels are equally far apart.
constexpr int WARP_BLOCKS = ceil_div(WARP_N, BOX_CHANNELS);
/// The `block`-th block of 64 channels of a warpgroup's taps from its `first` on.
__device__ constexpr BoxOffset block_offset(int warpgroup_tap, int first, int block) {
  BoxOffset offset = tap_offset(warpgroup_tap * WARP_TAPS + first + block / WARP_BLOCKS);
  offset.boxes += block % WARP_BLOCKS;
  return offset;
}
/// From one of the blocks of channels of a multiply to the next.
__device__ constexpr BoxOffset block_distance(int first, int taps) {
  return taps * WARP_BLOCKS > 1 ? block_offset(0, first, 1) - block_offset(0, first, 0) : BoxOffset{1, 0, 0};
}
__device__ constexpr bool may_join(int first, int taps) {
  const BoxOffset distance = block_distance(first, taps);
  for (int t = 0; t < WARPS_T; ++t)
    for (int block = 1; block < taps * WARP_BLOCKS; ++block)
      if (!(block_offset(t, first, block) - block_offset(t, first, block - 1) == distance)) return false;
  return distance.is_forward();
}
/// How many taps the multiply takes that begins with a warpgroup's `first`.
__device__ constexpr int joined_taps(int first) {
  for (int taps = 4; taps > 1; taps /= 2)
    if (first + taps <= WARP_TAPS && taps * WARP_N <= 256 && WARP_N % BOX_CHANNELS == 0 && may_join(first, taps)) return taps;
  return 1;
}

/// Shared memory from a multiple of BOX_ALIGNMENT on: the barriers, then the stages.
constexpr int FIXED_BYTES = BOX_ALIGNMENT;
static_assert(2 * MAX_STAGES * 8 <= FIXED_BYTES);
struct Ring : LaunchRing<MAX_STAGES> {
  __device__ __forceinline__ Ring(u32 shared, const GradWeightTmaSizes& sizes)
      : LaunchRing(shared, shared + FIXED_BYTES, sizes.stages, INPUT_BLOCKS * INPUT_BYTES + OUTPUT_BOXES * sizes.box_bytes) {}
  __device__ __forceinline__ u32 input() const { return data(); }
  __device__ __forceinline__ u32 grad_output() const { return data() + INPUT_BLOCKS * INPUT_BYTES; }
};
