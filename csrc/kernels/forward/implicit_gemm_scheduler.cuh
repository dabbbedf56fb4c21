// Shared by the kernels on wgmma (forward/implicit_gemm_{wgmma,tma,tma_nchw}.cu): the operands of one multiply, the division
// of shared memory and registers, the tile scheduler, and the loads of packed weights.
#pragma once

static_assert((FRAGMENT_W == 8 || NARROW) && WARPS_M % 4 == 0 && WARP_M_TILES == 1 && BLOCK_CHANNELS % 16 == 0);

/// Positions of one multiply, and multiplies for one tap of one image.
constexpr bool ALONG_ROW = FLAT || (WARP_ROWS == 1 && !NARROW);
constexpr int MULTIPLY_COLS = ALONG_ROW ? min_of(WARP_COLS, 16) : 1;
constexpr int MULTIPLY_POSITIONS = 8 * (ALONG_ROW ? MULTIPLY_COLS : NARROW ? WARP_IMAGES : WARP_ROWS);
constexpr int MULTIPLY_IMAGES = NARROW ? 1 : WARP_IMAGES;
static_assert(NARROW || WARP_COLS % MULTIPLY_COLS == 0);
constexpr int MULTIPLIES = NARROW ? WARP_ROWS : WARP_COLS / MULTIPLY_COLS;
/// Pixels from 8 positions of a multiply to the next 8, unless SHAPED.
constexpr int GROUP_PITCH = ALONG_ROW ? 8 : NARROW ? IMAGE_PITCH : POSITION_INPUT_ROWS * ROW_PITCH;

/// Bytes from one pixel to the next: descriptors count in units of 16 bytes, which is one pixel of a plane.
constexpr int PIXEL_BYTES = TMA_INPUT ? CHUNK_WORDS * 4 : 16;
/// Channels of a plane of weights, each of 16 bytes.
constexpr int WEIGHT_PLANE = 64;
/// Units of a descriptor from one step of a chunk to the next and from one tap to the next, and bytes from one warpgroup's
/// channels to the next. Packed weights are [step][tap][64 channels][plane]; TMA_WEIGHTS are [64 channels][tap][input
/// channel][128 bytes].
constexpr int CHUNK_CHANNELS = CHUNK_WORDS * CHANNELS_PER_WORD;
constexpr int TMA_STEP_WEIGHTS = 16 * 128 / 16;
constexpr int TAP_WEIGHTS = TMA_WEIGHTS ? CHUNK_CHANNELS * 128 / 16 : TAP_WORDS / 4;
constexpr int WARPGROUP_WEIGHTS = TMA_WEIGHTS ? max_taps() * CHUNK_CHANNELS * 128 : 2048;
static_assert(!TMA_WEIGHTS || (IS_16_BIT && STACK == 1));

__device__ __forceinline__ ptx::u64 weights_descriptor(u32 address) {
  if constexpr (TMA_WEIGHTS) {
    return ptx::swizzled_descriptor(address, 16, 1024);
  } else {
    return ptx::matrix_descriptor(address, WEIGHT_PLANE * 16, 128);
  }
}

static_assert(!PIXEL_MAJOR || (TMA_INPUT && FLAT && IS_16_BIT && WARP_COLS * 8 % BOX_ROW_PIXELS == 0 &&
                               MULTIPLIES == 1 && (GROUPS == 1 || CI_GROUP % CHUNK_CHANNELS == 0)));

__device__ __forceinline__ ptx::u64 input_descriptor(u32 address, int group_pitch) {
  if constexpr (PIXEL_MAJOR) {
    return ptx::swizzled_descriptor(address, CHUNK_CHANNELS * BOX_ROW_BYTES, 8 * BOX_ROW_BYTES);
  } else if constexpr (TMA_INPUT) {
    return ptx::swizzled_descriptor<PIXEL_BYTES>(address, 16, group_pitch * PIXEL_BYTES);
  } else {
    return ptx::matrix_descriptor(address, PLANE_PITCH * 16, group_pitch * 16);
  }
}

// ---- shared memory, in bytes from its beginning --------------------------------------------------------------

/// With RESIDENT_WEIGHTS, the weights of all chunks lie behind the stages. They are loaded once for all tiles of a block.
constexpr int RESIDENT_AT = STAGES * STAGE_WORDS * 4;
static_assert(!RESIDENT_WEIGHTS || (GROUPS * M_BLOCKS * PHASE_GROUPS == 1 && !PARTIAL));
constexpr int STAGED_AT = RESIDENT_AT + (RESIDENT_WEIGHTS ? CHUNKS * WEIGHT_WORDS * 4 : 0);
/// Bytes in which each warp collects a subtile of its outputs.
constexpr int SUBTILE_BUFFER = WHOLE_LINES ? LINE_BYTES : STAGED_BYTES;
constexpr int BARRIERS = STAGED_AT + WARPS * SUBTILE_BUFFER;
// TRANSPOSES_INPUT: NCHW chunks as the copy engine writes them, and their barriers.
constexpr int NCHW_BARRIERS = BARRIERS + 2 * STAGES * 8;
constexpr int NCHW_AT = round_up(NCHW_BARRIERS + 2 * NCHW_STAGES * 8, 128);
constexpr int NCHW_BYTES = TILE_N * HALO_H * CHUNK_CHANNELS * HALO_W * ITEM;
// STAGGER: the barrier at which the second warpgroup waits in each tile until the first has multiplied STAGGER taps.
constexpr int STAGGER_BARRIER = NCHW_BARRIERS;
static_assert(SHARED_BYTES == (TRANSPOSES_INPUT        ? NCHW_AT + NCHW_STAGES * NCHW_BYTES
                               : STAGGER > 0 ? STAGGER_BARRIER + 8
                                             : NCHW_BARRIERS), "the plan and the kernel must agree");
/// Taps of all steps of a chunk; and how many taps may be in flight when the multiplies of the next tap begin. Few taps in
/// flight let two warpgroups share the multiplier evenly; where one tap has few multiplies, two taps keep it busy.
constexpr int PRODUCTS = TAPS * CHUNK_STEPS;
constexpr int PENDING = MULTIPLIES * MULTIPLY_IMAGES > 2 ? 1 : 2;
// With more stages than chunks the first warpgroup could be two phases of the barrier ahead.
static_assert(STAGGER == 0 || (TMA_INPUT && WARPS == 8 && !PARTIAL && PHASE_GROUPS == 1 && STAGGER < min_of(CHUNKS, STAGES) * PRODUCTS &&
                               STAGES <= CHUNKS && PENDING <= PRODUCTS));

// ---- registers ---------------------------------------------------------------------------------------------------

/// Registers that the hardware gives each thread at first, a multiple of 8.
constexpr int FIRST_REGISTERS = min_of(255, 65536 / (BLOCKS_PER_MULTIPROCESSOR * (THREADS + PRODUCER_THREADS))) / 8 * 8;
constexpr bool MOVE_REGISTERS = FIRST_REGISTERS < 200;
constexpr int CONSUMER_REGISTERS =
    min_of(240, FIRST_REGISTERS + (FIRST_REGISTERS - PRODUCER_REGISTERS) * PRODUCER_THREADS / THREADS / 8 * 8);

#include "common/stage_ring.cuh"

/// A work tile: what a block computes at a time.
struct WorkTile {
  int split, first_chunk, chunks, phase_group, m_block, group;
  Origin origin;

  /// Work tile `index` of all blocks.
  __device__ __forceinline__ WorkTile(int index, const TileSizes& sizes) : split(0), first_chunk(0), chunks(CHUNKS) {
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
  __device__ __forceinline__ static int count(const TileSizes& sizes) {
    return sizes.tiles * (GROUPS * M_BLOCKS * PHASE_GROUPS) * (PARTIAL ? static_cast<int>(sizes.splits.value) : 1);
  }
};

/// The work tiles of a block. They are neighbours, so that the halo and the lines of output that they share are still in the
/// L2 cache. For the same reason blocks with neighbouring indices have neighbouring work tiles.
struct BlockWork {
  int first, end;

  __device__ __forceinline__ explicit BlockWork(const TileSizes& sizes) {
    const int tiles = WorkTile::count(sizes), tiles_per_block = ceil_div(tiles, gridDim.x);
    first = blockIdx.x * tiles_per_block;
    end = min_of(tiles, first + tiles_per_block);
  }
};

/// Iterates over the chunks of all work tiles of a block.
struct ChunkIterator {
  const TileSizes& sizes;
  int index, end, chunks_left;
  WorkTile work;

  __device__ __forceinline__ explicit ChunkIterator(const TileSizes& sizes) : ChunkIterator(sizes, BlockWork(sizes)) {}
  __device__ __forceinline__ ChunkIterator(const TileSizes& sizes, const BlockWork& block)
      : sizes(sizes), index(block.first), end(block.end), work(block.first, sizes) {
    chunks_left = work.chunks;
  }
  __device__ __forceinline__ bool done() const { return index >= end; }
  /// Goes to the next chunk. Returns whether it is the first one of another work tile.
  __device__ __forceinline__ bool next() {
    if (--chunks_left > 0) return false;
    ++index;
    if (done()) return false;
    work = WorkTile(index, sizes);
    chunks_left = work.chunks;
    return true;
  }
};

/// Issues the loads of the packed weights of one chunk after another.
struct WeightLoader {
  const u32* packed;
  const u32* next;
  u32 bytes;

  __device__ __forceinline__ explicit WeightLoader(const u32* packed) : packed(packed) {}

  __device__ __forceinline__ void set_tile(const WorkTile& work) {
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

