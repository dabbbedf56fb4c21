// Gradient of the input, strides above 1, from channels_last by boxes of the copy engine (sm_90a): an implicit GEMM.
//
//   M = cells, each one pixel of grad_input: WARPGROUPS times M_TILES multiplies of 64 cells, 8 groups of 8
//   N = BLOCK_CHANNELS channels of the input
//   K = taps x channels of the output, by chunks of 128 bytes of channels
//
// A stage of the input holds one slice of a chunk: one phase of grad_output (pixels STEP_H and STEP_W apart), one box of
// TILE_N images with the rows and columns that the taps of the phase reach. There, cells that are neighbours find
// neighbouring pixels, a row of 128 bytes each, so a tap is a start address. Where a map is narrower than 8 cells (TILE_W
// below 8), whole rows of it are neighbours, and each shift by columns is a slice of its own. A stage of the weights holds
// one tap of a chunk. The two rings turn independently: one thread asks for each, and the others multiply and store; with two
// TEAMS of WARPGROUPS each has every other tile, and one multiplies while the other stores.
//
// The constants of the tile (kernels/grad_input/implicit_gemm_tma_tile.py): 8 cells of a multiply and the next 8 lie GROUP_PIXELS apart in the
// input's stage and GROUP_PLACES in the tile, a multiply and the next MULTIPLY_PIXELS and MULTIPLY_PLACES. FLAT (kernel
// within the stride, no padding): rows of all images are rows of one. DENSE besides: a tile is so many cells in a row,
// wherever they begin; `box_bytes` of whole rows of the map hold them, INPUT_BYTES at most.
//
// Covers: float32 as TF32 (the copy engine rounds), float16, bfloat16; grad_output and weight in channels_last with 16-byte
// multiples of channels of a group, grad_input so too or in NCHW; any kernel, padding, dilation, groups; strides to 8.
// PARTIAL: grad_input is float32 [sizes.splits, ...], each with its share of the chunks. SLICES_FIRST: all chunks of a slice,
// then the next slice; else all slices of a chunk. PHASED (whole strides of columns, one group): the map has the phases
// of columns as a dimension of its own.
#include "common/integers.cuh"
#include "common/mma.cuh"
#include "common/wgmma.cuh"
#include "common/pipeline.cuh"
#include "common/tma.cuh"
#include "common/static_for.cuh"
#include "common/stages.cuh"
#include "common/sizes.cuh"

using ptx::u32;
using ptx::u64;

// ---- slices and taps -------------------------------------------------------------------------------------------

constexpr int TAPS = KERNEL_H * KERNEL_W;
constexpr bool NARROW = TILE_W < 8;
constexpr int REACH_H = (KERNEL_H - 1) * DILATION_H / STEP_H;
constexpr int REACH_W = NARROW ? 0 : (KERNEL_W - 1) * DILATION_W / STEP_W;
/// Of a box; with DENSE no tap is shifted, so nothing depends on them.
constexpr int BOX_H = TILE_H + REACH_H, BOX_W = TILE_W + REACH_W;
static_assert(!DENSE || (FLAT && REACH_H == 0 && REACH_W == 0));

/// A slice's first pixel, counted from the tile's first cell, and its taps: which of the kernel, and at which pixel of
/// the box they meet the first cell. Taps of slice s: first[s] to first[s + 1].
struct Table {
  int slices, row[TAPS], col[TAPS], first[TAPS + 1], tap[TAPS], pixel[TAPS];
};

__device__ constexpr Table make_table() {
  Table t{};
  int taps = 0;
  for (int row = 0; row < STEP_H; ++row)
    for (int col = 0; col < (NARROW ? KERNEL_W : STEP_W); ++col) {
      const int before = taps;
      for (int kh = 0; kh < KERNEL_H; ++kh)
        for (int kw = 0; kw < KERNEL_W; ++kw)
          if (kh * DILATION_H % STEP_H == row && (NARROW ? kw : kw * DILATION_W % STEP_W) == col) {
            t.tap[taps] = kh * KERNEL_W + kw;
            t.pixel[taps++] = kh * DILATION_H / STEP_H * BOX_W + (NARROW ? 0 : kw * DILATION_W / STEP_W);
          }
      if (taps == before) continue;
      t.row[t.slices] = row;
      t.col[t.slices] = NARROW ? col * DILATION_W : col;
      t.first[t.slices++] = before;
    }
  t.first[t.slices] = taps;
  return t;
}
__constant__ Table TABLE = make_table();
constexpr int SLICES = make_table().slices;

// ---- shared memory, in bytes from its beginning ------------------------------------------------------------------

constexpr int ROW = 128, CHUNK = ROW / static_cast<int>(sizeof(Element));
constexpr int K_GROUP = IN_CHANNELS / GROUPS, CHANNELS_GROUP = OUT_CHANNELS / GROUPS;
constexpr int CHUNKS = ceil_div(K_GROUP, CHUNK), M_BLOCKS = ceil_div(CHANNELS_GROUP, BLOCK_CHANNELS);
constexpr int INPUT_PITCH = round_up(INPUT_BYTES, 1024);
static_assert(DENSE || INPUT_BYTES == TILE_N * BOX_H * BOX_W * ROW, "the plan and the kernel must agree");
constexpr int WEIGHT_BYTES = BLOCK_CHANNELS * ROW;
static_assert(WEIGHT_BYTES % 1024 == 0);
constexpr int WARPGROUP_CELLS = 64 * M_TILES, TILE_CELLS = WARPGROUPS * WARPGROUP_CELLS;
/// Of a warp: 16 cells of a multiply on their way out.
constexpr int STAGED_BYTES = 16 * ROW;
constexpr int WEIGHTS = INPUT_STAGES * INPUT_PITCH;
constexpr int STAGED = WEIGHTS + WEIGHT_STAGES * WEIGHT_BYTES;
constexpr int INPUT_BARRIERS = STAGED + 4 * TEAMS * WARPGROUPS * STAGED_BYTES;
constexpr int WEIGHT_BARRIERS = INPUT_BARRIERS + 2 * INPUT_STAGES * 8;
constexpr int TURN_BARRIERS = WEIGHT_BARRIERS + 2 * WEIGHT_STAGES * 8;
static_assert(SHARED_BYTES == 1024 + TURN_BARRIERS + TEAMS * 8, "the plan and the kernel must agree");

constexpr int TEAM_WARPS = 4 * WARPGROUPS, MULTIPLYING = 32 * TEAM_WARPS * TEAMS, ASKING = 64;
static_assert(TEAMS == 1 || !PARTIAL);

using InputRing = StageRing<INPUT_STAGES, 0, INPUT_PITCH, INPUT_BARRIERS>;
using WeightRing = StageRing<WEIGHT_STAGES, WEIGHTS, WEIGHT_BYTES, WEIGHT_BARRIERS>;

/// What one turn of a block computes. `image`, `row`, `col`: its first cell.
struct Work {
  int split, block, group, image, row, col;
  int first_chunk, end_chunk;

  __device__ __forceinline__ Work(int index, const Sizes& sizes) : split(0), image(0), first_chunk(0), end_chunk(CHUNKS) {
    if constexpr (PARTIAL) {
      const int whole = sizes.splits.quotient(index);
      split = sizes.splits.remainder(index, whole);
      first_chunk = sizes.splits.quotient(split * CHUNKS);
      end_chunk = sizes.splits.quotient((split + 1) * CHUNKS);
      index = whole;
    }
    block = index % M_BLOCKS;
    index /= M_BLOCKS;
    group = index % GROUPS;
    const int tile = index / GROUPS;
    if constexpr (DENSE) {
      row = sizes.row_positions.quotient(tile * TILE_CELLS);
      col = sizes.row_positions.remainder(tile * TILE_CELLS, row);
    } else {
      int lines = tile;
      if constexpr (!FLAT) {
        image = sizes.image_tiles.quotient(tile);
        lines = sizes.image_tiles.remainder(tile, image);
        image *= TILE_N;
      }
      row = sizes.row_tiles.quotient(lines);
      col = sizes.row_tiles.remainder(lines, row) * TILE_W;
      row *= TILE_H;
    }
  }
  __device__ __forceinline__ static int count(const Sizes& sizes) {
    return sizes.tiles * (GROUPS * M_BLOCKS) * (PARTIAL ? static_cast<int>(sizes.splits.value) : 1);
  }
};

#include "common/ping_pong.cuh"
#include "grad_input/implicit_gemm_tma_store.cuh"

// ---- those that ask ----------------------------------------------------------------------------------------------

__device__ __forceinline__ void ask_for_input(u32 shared, const TensorMap& map, const Sizes& sizes, int box_bytes) {
  InputRing ring(shared);
  for_each_work_tile(Work::count(sizes), [&](int index) {
    const Work work(index, sizes);
    for (int outer = SLICES_FIRST ? 0 : work.first_chunk; outer < (SLICES_FIRST ? SLICES : work.end_chunk); ++outer)
#pragma unroll 1
      for (int inner = SLICES_FIRST ? work.first_chunk : 0; inner < (SLICES_FIRST ? work.end_chunk : SLICES); ++inner) {
        const int chunk = SLICES_FIRST ? inner : outer, slice = SLICES_FIRST ? outer : inner;
        const int row = work.row * STEP_H - PADDING_H + TABLE.row[slice], col = (DENSE ? 0 : work.col) * STEP_W - PADDING_W + TABLE.col[slice];
        ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
        ptx::arrive_expect_tx(ring.full(), DENSE ? box_bytes : INPUT_BYTES);
        if constexpr (PHASED) {
          const int whole = (col + PADDING_W * STEP_W) / STEP_W - PADDING_W;
          ptx::tma_load(ring.data(), map, chunk * CHUNK, col - whole * STEP_W, whole, row, work.image, ring.full());
        } else if constexpr (GROUPS == 1) {
          ptx::tma_load(ring.data(), map, chunk * CHUNK, col, row, work.image, ring.full());
        } else {
          ptx::tma_load(ring.data(), map, chunk * CHUNK, work.group, col, row, work.image, ring.full());
        }
        ring.advance();
      }
  });
}

__device__ __forceinline__ void ask_for_weights(u32 shared, const TensorMap& map, const Sizes& sizes) {
  WeightRing ring(shared);
  for_each_work_tile(Work::count(sizes), [&](int index) {
    const Work work(index, sizes);
    // Slice by slice, or all of them at once: taps are in the order of their slices.
    constexpr int PARTS = SLICES_FIRST ? SLICES : 1;
#pragma unroll 1
    for (int part = 0; part < PARTS; ++part)
      for (int chunk = work.first_chunk; chunk < work.end_chunk; ++chunk)
#pragma unroll 1
        for (int i = SLICES_FIRST ? TABLE.first[part] : 0; i < (SLICES_FIRST ? TABLE.first[part + 1] : TAPS); ++i) {
          const int tap = TABLE.tap[i];
          ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
          ptx::arrive_expect_tx(ring.full(), WEIGHT_BYTES);
          ptx::tma_load(ring.data(), map, chunk * CHUNK, tap, work.block * BLOCK_CHANNELS, work.group, ring.full());
          ring.advance();
        }
  });
}

// ---- those that multiply -----------------------------------------------------------------------------------------

/// This warp's word that its multiplies of a stage are done.
__device__ __forceinline__ void release(u32 barrier, bool wanted = true) {
  if (wanted && threadIdx.x % 32 == 0) ptx::arrive(barrier);
}

__device__ __forceinline__ void multiply_and_store(u32 shared, Out* output, const Sizes& sizes) {
  const int warpgroup = threadIdx.x / 128 % WARPGROUPS;
  const int warpgroup_pixel =
      DENSE ? warpgroup * WARPGROUP_CELLS
            : (warpgroup / WARPGROUPS_H * (TILE_N * WARPGROUPS_H / WARPGROUPS) * BOX_H + warpgroup % WARPGROUPS_H * (TILE_H / WARPGROUPS_H)) * BOX_W;
  const u32 staged = shared + STAGED + threadIdx.x / 32 * STAGED_BYTES;

  InputRing input(shared);
  WeightRing weights(shared);
  const int team = threadIdx.x / (32 * TEAM_WARPS);
  const auto skip_work = [&] {
    input.skip<CHUNKS * SLICES>();
    weights.skip<CHUNKS * TAPS>();
  };
  if (TEAMS > 1 && team > 0) skip_work();
  ConsumerOrder<TEAMS> order(shared + TURN_BARRIERS, team);
  const auto compute = [&](int index) {
    const Work work(index, sizes);
    const int first_pixel = warpgroup_pixel + (DENSE ? work.col : 0);
    Sums sums;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int i = 0; i < BLOCK_CHANNELS / 2; ++i) sums.of[m][i] = 0.f;
    bool first = true;
    // One round at least, and nobody knows how many: else the compiler parts the loop, and waits after every multiply.
    u32 rounds = ptx::keep_in_register(SLICES_FIRST ? SLICES : work.end_chunk - work.first_chunk);
    order.wait();
#pragma unroll 1
    do {
#pragma unroll 1
      for (int stage = 0; stage < (SLICES_FIRST ? work.end_chunk - work.first_chunk : SLICES); ++stage) {
        const int slice = SLICES_FIRST ? SLICES - static_cast<int>(rounds) : stage;
        ptx::wait_for_phase(input.full(), input.parity);
        const int begin = TABLE.first[slice], end = TABLE.first[slice + 1];
#pragma unroll 1
        for (int i = begin; i < end; ++i) {
          const u64 a = ptx::swizzled_descriptor(input.data() + (first_pixel + TABLE.pixel[i]) * ROW, 16, GROUP_PIXELS * ROW);
          const u64 b = ptx::swizzled_descriptor(weights.data(), 16, 8 * ROW);
          ptx::wait_for_phase(weights.full(), weights.parity);
          ptx::fence_wgmma();
          // Steps of k of 32 bytes; descriptors count in 16.
#pragma unroll
          for (int step = 0; step < 4; ++step)
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
              ptx::wgmma<PRECISION, BLOCK_CHANNELS>(sums.of[m], a + m * (MULTIPLY_PIXELS * ROW / 16) + step * 2, b + step * 2);
          ptx::commit_wgmma();
          ptx::wait_wgmma<1>();
          release(weights.empty_before(), !first);
          release(input.empty_before(), !first && i == begin);
          first = false;
          weights.advance();
        }
        input.advance();
      }
    } while (--rounds > 0);
    order.signal_next();
    ptx::wait_wgmma<0>();
    // Else the compiler reads them as bits before.
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int i = 0; i < BLOCK_CHANNELS / 2; ++i) asm volatile("" : "+f"(sums.of[m][i]));
    release(weights.empty_before());
    release(input.empty_before());
    if constexpr (TEAMS > 1) skip_work();

    Out* to = output;
    if constexpr (PARTIAL) to += static_cast<long long>(work.split) * sizes.batch * OUT_CHANNELS * sizes.out_pixels();
    if constexpr (OUTPUT_CHANNELS_LAST) {
      store_channels_last(sums, to, staged, work, sizes);
    } else {
      store_nchw(sums, to, work, sizes);
    }
  };
  for_each_work_tile(Work::count(sizes), compute, team, TEAMS);
}

extern "C" __global__ void __launch_bounds__(MULTIPLYING + ASKING, 1)
    grad_input_implicit_gemm_tma(const __grid_constant__ TensorMap grad_output, const __grid_constant__ TensorMap weight,
                     Out* __restrict__ grad_input, const __grid_constant__ Sizes sizes, long long box_bytes) {
  extern __shared__ __align__(1024) u32 memory[];
  const u32 shared = ptx::keep_in_register((ptx::shared_address(memory) + 1023) & ~1023u);
  if (threadIdx.x == 0) {
    InputRing input(shared);
    for (int s = 0; s < INPUT_STAGES; ++s, input.advance()) {
      ptx::init_barrier(input.full(), 1);
      ptx::init_barrier(input.empty(), TEAM_WARPS);
    }
    WeightRing weights(shared);
    for (int s = 0; s < WEIGHT_STAGES; ++s, weights.advance()) {
      ptx::init_barrier(weights.full(), 1);
      ptx::init_barrier(weights.empty(), TEAM_WARPS);
    }
    ConsumerOrder<TEAMS>::init_barriers(shared + TURN_BARRIERS, TEAM_WARPS);
    ptx::fence_barrier_init();
  }
  __syncthreads();

  if (threadIdx.x >= MULTIPLYING) {
    ptx::wait_for_previous_launch();
    if (threadIdx.x == MULTIPLYING) ask_for_input(shared, grad_output, sizes, static_cast<int>(box_bytes));
    if (threadIdx.x == MULTIPLYING + 32) ask_for_weights(shared, weight, sizes);
  } else {
    multiply_and_store(shared, grad_input, sizes);
  }
}
