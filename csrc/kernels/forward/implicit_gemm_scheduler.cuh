// What the kernels on Hopper's warpgroup multiply share (forward/implicit_gemm_wgmma.cu, forward/implicit_gemm_tma.cu): what one multiply takes,
// how shared memory and registers are dealt out, which tiles a block works on, how it asks for packed weights.
#pragma once

static_assert((FRAGMENT_W == 8 || NARROW) && WARPS_M % 4 == 0 && WARP_M_TILES == 1 && BLOCK_CHANNELS % 16 == 0);

/// Cells of one multiply, and multiplies for one tap of one image.
constexpr bool ALONG_ROW = FLAT || (WARP_ROWS == 1 && !NARROW);
constexpr int MULTIPLY_COLS = ALONG_ROW ? min_of(WARP_COLS, 16) : 1;
constexpr int MULTIPLY_CELLS = 8 * (ALONG_ROW ? MULTIPLY_COLS : NARROW ? WARP_IMAGES : WARP_ROWS);
constexpr int MULTIPLY_IMAGES = NARROW ? 1 : WARP_IMAGES;
static_assert(NARROW || WARP_COLS % MULTIPLY_COLS == 0);
constexpr int MULTIPLIES = NARROW ? WARP_ROWS : WARP_COLS / MULTIPLY_COLS;
/// Pixels from 8 cells of a multiply to the next 8.
constexpr int GROUP_PITCH = ALONG_ROW ? 8 : NARROW ? IMAGE_PITCH : CELL_INPUT_ROWS * ROW_PITCH;

/// From one pixel to the next: descriptors count in 16 bytes, which is one pixel of a plane.
constexpr int PIXEL_BYTES = BOXES ? CHUNK_WORDS * 4 : 16;
/// Channels of a plane of weights, each of 16 bytes.
constexpr int WEIGHT_PLANE = 64;
/// Descriptors' units from one step of a chunk to the next, from one tap, and bytes from one warpgroup's channels.
/// Packed: [step][tap][64 channels][plane]. As boxes of the weight brought them: [64 channels][tap][input channel][128 bytes].
constexpr int CHUNK_CHANNELS = CHUNK_WORDS * CHANNELS_PER_WORD;
constexpr int BOXED_STEP_WEIGHTS = 16 * 128 / 16;
constexpr int TAP_WEIGHTS = WEIGHT_BOXES ? CHUNK_CHANNELS * 128 / 16 : TAP_WORDS / 4;
constexpr int WARPGROUP_WEIGHTS = WEIGHT_BOXES ? most_taps() * CHUNK_CHANNELS * 128 : 2048;
static_assert(!WEIGHT_BOXES || (IS_16_BIT && STACK == 1));

__device__ __forceinline__ ptx::u64 weights_descriptor(u32 address) {
  if constexpr (WEIGHT_BOXES) {
    return ptx::swizzled_descriptor(address, 16, 1024);
  } else {
    return ptx::matrix_descriptor(address, WEIGHT_PLANE * 16, 128);
  }
}

static_assert(!PIXEL_BOXES || (BOXES && FLAT && IS_16_BIT && WARP_COLS * 8 % BOX_ROW_PIXELS == 0 &&
                               MULTIPLIES == 1 && (GROUPS == 1 || CI_GROUP % CHUNK_CHANNELS == 0)));

__device__ __forceinline__ ptx::u64 input_descriptor(u32 address) {
  if constexpr (PIXEL_BOXES) {
    return ptx::swizzled_descriptor(address, CHUNK_CHANNELS * BOX_ROW_BYTES, 8 * BOX_ROW_BYTES);
  } else if constexpr (BOXES) {
    return ptx::swizzled_descriptor<PIXEL_BYTES>(address, 16, GROUP_PITCH * PIXEL_BYTES);
  } else {
    return ptx::matrix_descriptor(address, PLANE_PITCH * 16, GROUP_PITCH * 16);
  }
}

// ---- shared memory, in bytes from its beginning --------------------------------------------------------------

/// With WEIGHTS_STAY, those of all chunks, after the stages: they come once for all tiles of a block.
constexpr int STAYING = STAGES * STAGE_WORDS * 4;
static_assert(!WEIGHTS_STAY || (GROUPS * M_BLOCKS * PHASE_GROUPS == 1 && !PARTIAL));
constexpr int STAGED = STAYING + (WEIGHTS_STAY ? CHUNKS * WEIGHT_WORDS * 4 : 0);
/// What each warp has for a part of its outputs.
constexpr int PART_BUFFER = WHOLE_LINES ? LINE_BYTES : STAGED_BYTES;
constexpr int BARRIERS = STAGED + WARPS * PART_BUFFER;
// TURNED: chunks as they came, and their barriers.
constexpr int RAW_BARRIERS = BARRIERS + 2 * STAGES * 8;
constexpr int RAW_AT = round_up(RAW_BARRIERS + 2 * RAW_STAGES * 8, 128);
constexpr int RAW_BYTES = TILE_N * HALO_H * CHUNK_CHANNELS * HALO_W * ITEM;
// STAGGER: of each tile the first warpgroup says here that it has come so far.
constexpr int STAGGER_BARRIER = RAW_BARRIERS;
static_assert(SHARED_BYTES == (TURNED        ? RAW_AT + RAW_STAGES * RAW_BYTES
                               : STAGGER > 0 ? STAGGER_BARRIER + 8
                                             : RAW_BARRIERS), "the plan and the kernel must agree");
/// Taps of all steps of a chunk, and of how many multiplies may be under way when the next one's begin: few, so that two
/// warpgroups share the multiplier evenly, where one tap's keep it busy.
constexpr int PRODUCTS = TAPS * CHUNK_STEPS;
constexpr int PENDING = MULTIPLIES * MULTIPLY_IMAGES > 2 ? 1 : 2;
// With as many stages as this the first warpgroup could be two of its words ahead.
static_assert(STAGGER == 0 || (BOXES && WARPS == 8 && !PARTIAL && PHASE_GROUPS == 1 && STAGGER < min_of(CHUNKS, STAGES) * PRODUCTS &&
                               STAGES <= CHUNKS && PENDING <= PRODUCTS));

// ---- registers ---------------------------------------------------------------------------------------------------

/// What the hardware gives each thread at first, in eights.
constexpr int FIRST_REGISTERS = min_of(255, 65536 / (BLOCKS_PER_MULTIPROCESSOR * (THREADS + FILL_THREADS))) / 8 * 8;
constexpr bool MOVE_REGISTERS = FIRST_REGISTERS < 200;
constexpr int MULTIPLY_REGISTERS =
    min_of(240, FIRST_REGISTERS + (FIRST_REGISTERS - FILL_REGISTERS) * FILL_THREADS / THREADS / 8 * 8);

#include "common/stage_ring.cuh"

/// What one turn of a block computes.
struct Work {
  int split, first_chunk, chunks, phase_group, m_block, group;
  Origin origin;

  /// Piece `index` of all blocks' work.
  __device__ __forceinline__ Work(int index, const Sizes& sizes) : split(0), first_chunk(0), chunks(CHUNKS) {
    if constexpr (PARTIAL) {
      const int whole = sizes.splits.quotient(index);
      split = sizes.splits.remainder(index, whole);
      first_chunk = sizes.splits.quotient(split * CHUNKS);
      chunks = sizes.splits.quotient((split + 1) * CHUNKS) - first_chunk;
      index = whole;
    }
    phase_group = index % PHASE_GROUPS;
    index /= PHASE_GROUPS;
    m_block = index % M_BLOCKS;
    index /= M_BLOCKS;
    group = index % GROUPS;
    origin = tile_origin(index / GROUPS, sizes);
  }
  __device__ __forceinline__ static int count(const Sizes& sizes) {
    return sizes.tiles * (GROUPS * M_BLOCKS * PHASE_GROUPS) * (PARTIAL ? static_cast<int>(sizes.splits.value) : 1);
  }
};

/// A block's turns: neighbouring pieces, so that the halo and the lines of output that they share are still in the L2
/// cache. Blocks that come one after another keep the whole grid at about the same place for the same reason.
struct Turns {
  int first, end;

  __device__ __forceinline__ explicit Turns(const Sizes& sizes) {
    const int pieces = Work::count(sizes), most = ceil_div(pieces, gridDim.x);
    first = blockIdx.x * most;
    end = min_of(pieces, first + most);
  }
};

/// Walks over the chunks of all turns of a block.
struct Walk {
  const Sizes& sizes;
  int index, end, chunks_left;
  Work work;

  __device__ __forceinline__ explicit Walk(const Sizes& sizes) : Walk(sizes, Turns(sizes)) {}
  __device__ __forceinline__ Walk(const Sizes& sizes, const Turns& turns)
      : sizes(sizes), index(turns.first), end(turns.end), work(turns.first, sizes) {
    chunks_left = work.chunks;
  }
  __device__ __forceinline__ bool done() const { return index >= end; }
  /// To the next chunk; true where it is the first one of other work.
  __device__ __forceinline__ bool next() {
    if (--chunks_left > 0) return false;
    ++index;
    if (done()) return false;
    work = Work(index, sizes);
    chunks_left = work.chunks;
    return true;
  }
};

/// Asks for the weights of one chunk after another.
struct WeightFill {
  const u32* packed;
  const u32* next;
  u32 bytes;

  __device__ __forceinline__ explicit WeightFill(const u32* packed) : packed(packed) {}

  __device__ __forceinline__ void aim(const Work& work) {
    int before = 0, taps = group_taps(0);
    static_for<1, PHASE_GROUPS>([&](auto index) {
      constexpr int GROUP = decltype(index)::value;
      if (work.phase_group == GROUP) before = taps_before(GROUP), taps = group_taps(GROUP);
    });
    bytes = CHUNK_STEPS * taps * TAP_WORDS * 4;
    next = packed + static_cast<long long>(before) * GROUPS * M_BLOCKS * STEPS * TAP_WORDS +
           ((static_cast<long long>(work.group) * M_BLOCKS + work.m_block) * CHUNKS + work.first_chunk) * (bytes / 4);
  }
  __device__ __forceinline__ void advance() { next += bytes / 4; }
  __device__ __forceinline__ void copy(u32 to, u32 barrier) const {
    if (bytes > 0) ptx::bulk_copy(to, next, bytes, barrier);
  }
};

