// Gradient of the input, strides above 1, from channels_last tensors that TMA loads (sm_90a): an implicit GEMM.
//
//   M = positions, each one pixel of grad_input: WARPGROUPS times M_TILES multiplies of 64 positions, 8 groups of 8
//   N = BLOCK_CHANNELS channels of the input
//   K = taps x channels of the output, by chunks of 128 bytes of channels
//
// A stage of the input holds one phase of a chunk: the pixels of grad_output that lie STEP_H and STEP_W apart, as one box of
// the tile's images with the rows and columns that the taps of the phase reach. In this box neighbouring positions find
// neighbouring pixels, a row of 128 bytes each, so a tap is a start address. With NARROW a tile has 4 columns, whole rows of
// a map are neighbours, and each column of taps counts as a phase of its own. A stage of the weights holds one tap of a
// chunk. One producer thread issues the copies of each of the two rings, and the consumers multiply and store. Of two CONSUMERS
// (ping-pong, of WARPGROUPS warpgroups each) each computes every other tile, and one multiplies while the other stores.
//
// The shape of a tile, `shape`, is an argument (kernels/grad_input/implicit_gemm_tma_shape.py): any whose box has at most
// INPUT_BYTES. DENSE: a tile is TILE_POSITIONS positions in a row, wherever they begin, of a map whose rows and images have
// REACH_W columns and REACH_H rows more than grad_input: these are no positions, but their pixels are those of taps. TMA loads
// such a row of pixels in im2col mode.
//
// Covers: float32 as TF32 (TMA rounds), float16, bfloat16; grad_output and weight in channels_last with channels of a group in
// 16-byte multiples, grad_input so too or in NCHW; any kernel, padding, dilation, groups; strides up to 8. PARTIAL: grad_input
// is float32 [sizes.splits, ...], and each split has its share of the chunks. PHASE_MAJOR: the sum goes over all chunks of a
// phase, then over the next phase; otherwise over all phases of a chunk. PHASE_DIMENSION (widths of whole strides, one group): the
// tensor map has a dimension for the phases of columns.
#include "common/static_for.cuh"
#include "grad_input/tma_gemm.cuh"


// ---- phases and taps -------------------------------------------------------------------------------------------

constexpr int TAPS = KERNEL_H * KERNEL_W;
constexpr int REACH_H = (KERNEL_H - 1) * DILATION_H / STEP_H;
constexpr int REACH_W = NARROW ? 0 : (KERNEL_W - 1) * DILATION_W / STEP_W;

/// Each phase's first pixel, counted from the tile's first position, and its taps: which of the kernel they are, and at which
/// row and column of the box they meet the first position. The taps of phase s are first[s] to first[s + 1].
struct PhaseTable {
  int phases, row[TAPS], col[TAPS], first[TAPS + 1], tap[TAPS], box_row[TAPS], box_col[TAPS];
};

__device__ constexpr PhaseTable make_table() {
  PhaseTable t{};
  int taps = 0;
  for (int row = 0; row < STEP_H; ++row)
    for (int col = 0; col < (NARROW ? KERNEL_W : STEP_W); ++col) {
      const int before = taps;
      for (int kh = 0; kh < KERNEL_H; ++kh)
        for (int kw = 0; kw < KERNEL_W; ++kw)
          if (kh * DILATION_H % STEP_H == row && (NARROW ? kw : kw * DILATION_W % STEP_W) == col) {
            t.tap[taps] = kh * KERNEL_W + kw;
            t.box_row[taps] = kh * DILATION_H / STEP_H;
            t.box_col[taps++] = NARROW ? 0 : kw * DILATION_W / STEP_W;
          }
      if (taps == before) continue;
      t.row[t.phases] = row;
      t.col[t.phases] = NARROW ? col * DILATION_W : col;
      t.first[t.phases++] = before;
    }
  t.first[t.phases] = taps;
  return t;
}
__constant__ PhaseTable PHASE_TABLE = make_table();
constexpr int PHASES = make_table().phases;

// ---- shared memory, in bytes from its beginning ------------------------------------------------------------------

constexpr int CHUNK = ROW / static_cast<int>(sizeof(Element)), CHUNKS = ceil_div(K_GROUP, CHUNK);
constexpr int INPUT_PITCH = round_up(INPUT_BYTES, 1024);
static_assert(WEIGHT_BYTES % 1024 == 0);
static_assert(!DENSE || !(NARROW || PHASE_DIMENSION) && (GROUPS == 1 || K_GROUP % CHUNK == 0));
constexpr int WARPGROUP_POSITIONS = 64 * M_TILES, TILE_POSITIONS = WARPGROUPS * WARPGROUP_POSITIONS;
/// Shared memory in which a warp transposes 16 positions of a multiply before it stores them.
constexpr int STAGED_BYTES = 16 * ROW;
constexpr int WEIGHTS = INPUT_STAGES * INPUT_PITCH;
constexpr int STAGED = WEIGHTS + WEIGHT_STAGES * WEIGHT_BYTES;
constexpr int INPUT_BARRIERS = STAGED + 4 * CONSUMERS * WARPGROUPS * STAGED_BYTES;
constexpr int WEIGHT_BARRIERS = INPUT_BARRIERS + 2 * INPUT_STAGES * 8;
constexpr int TURN_BARRIERS = WEIGHT_BARRIERS + 2 * WEIGHT_STAGES * 8;
static_assert(SHARED_BYTES == 1024 + TURN_BARRIERS + CONSUMERS * 8, "the plan and the kernel must agree");

constexpr int CONSUMER_WARPS = 4 * WARPGROUPS, CONSUMER_THREADS = 32 * CONSUMER_WARPS * CONSUMERS, PRODUCER_THREADS = 64;
static_assert(CONSUMERS == 1 || !PARTIAL);

using InputRing = StageRing<INPUT_STAGES, 0, INPUT_PITCH, INPUT_BARRIERS>;
using WeightRing = StageRing<WEIGHT_STAGES, WEIGHTS, WEIGHT_BYTES, WEIGHT_BARRIERS>;

/// One work tile of a persistent block. `image`, `row`, `col`: its first position, whose number in the map is `position`
/// (DENSE).
struct Work {
  int split, block, group, image, row, col, position;
  int first_chunk, end_chunk;

  __device__ __forceinline__ Work(int index, const Sizes& sizes, const BoxTileShape& shape) : split(0), image(0), position(0), first_chunk(0), end_chunk(CHUNKS) {
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
      position = tile * TILE_POSITIONS;
      image = sizes.image_positions.quotient(position);
      const int in_image = sizes.image_positions.remainder(position, image);
      row = sizes.row_positions.quotient(in_image);
      col = sizes.row_positions.remainder(in_image, row);
    } else {
      image = sizes.image_tiles.quotient(tile);
      const int lines = sizes.image_tiles.remainder(tile, image);
      image *= shape.images;
      row = sizes.row_tiles.quotient(lines);
      col = sizes.row_tiles.remainder(lines, row) << shape.col_bits;
      row *= shape.rows;
    }
  }
};

#include "common/ping_pong.cuh"
#include "grad_input/implicit_gemm_tma_store.cuh"

// ---- the producers -----------------------------------------------------------------------------------------------

__device__ __forceinline__ void produce_input(u32 shared, const TensorMap& map, const Sizes& sizes, const BoxTileShape& shape) {
  InputRing ring(shared);
  for_each_work_tile(work_tiles(sizes), [&](int index) {
    const Work work(index, sizes, shape);
    for (int outer = PHASE_MAJOR ? 0 : work.first_chunk; outer < (PHASE_MAJOR ? PHASES : work.end_chunk); ++outer)
#pragma unroll 1
      for (int inner = PHASE_MAJOR ? work.first_chunk : 0; inner < (PHASE_MAJOR ? work.end_chunk : PHASES); ++inner) {
        const int chunk = PHASE_MAJOR ? inner : outer, phase = PHASE_MAJOR ? outer : inner;
        const int row = work.row * STEP_H - PADDING_H + PHASE_TABLE.row[phase];
        const int col = work.col * STEP_W - PADDING_W + PHASE_TABLE.col[phase];
        ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
        ptx::arrive_expect_tx(ring.full(), shape.box_bytes);
        if constexpr (DENSE) {
          ptx::tma_load_im2col(ring.data(), map, work.group * K_GROUP + chunk * CHUNK, work.col * STEP_W - PADDING_W, work.row * STEP_H - PADDING_H,
                               work.image, PHASE_TABLE.col[phase], PHASE_TABLE.row[phase], ring.full());
        } else if constexpr (PHASE_DIMENSION) {
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

__device__ __forceinline__ void produce_weights(u32 shared, const TensorMap& map, const Sizes& sizes, const BoxTileShape& shape) {
  WeightRing ring(shared);
  for_each_work_tile(work_tiles(sizes), [&](int index) {
    const Work work(index, sizes, shape);
    // Phase by phase, or all of them at once: taps are in the order of their phases.
    constexpr int OUTER = PHASE_MAJOR ? PHASES : 1;
#pragma unroll 1
    for (int outer_phase = 0; outer_phase < OUTER; ++outer_phase)
      for (int chunk = work.first_chunk; chunk < work.end_chunk; ++chunk)
#pragma unroll 1
        for (int i = PHASE_MAJOR ? PHASE_TABLE.first[outer_phase] : 0; i < (PHASE_MAJOR ? PHASE_TABLE.first[outer_phase + 1] : TAPS); ++i) {
          const int tap = PHASE_TABLE.tap[i];
          ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
          ptx::arrive_expect_tx(ring.full(), WEIGHT_BYTES);
          ptx::tma_load(ring.data(), map, chunk * CHUNK, tap, work.block * BLOCK_CHANNELS, work.group, ring.full());
          ring.advance();
        }
  });
}

// ---- the consumers -------------------------------------------------------------------------------------------

__device__ __forceinline__ void consume(u32 shared, Out* output, const Sizes& sizes, const BoxTileShape& shape) {
  const int warpgroup_pixel = threadIdx.x / 128 % WARPGROUPS * shape.warpgroup_pixels;
  const u32 staged = shared + STAGED + threadIdx.x / 32 * STAGED_BYTES;

  InputRing input(shared);
  WeightRing weights(shared);
  const int consumer = threadIdx.x / (32 * CONSUMER_WARPS);
  const auto skip_work = [&] {
    input.skip<CHUNKS * PHASES>();
    weights.skip<CHUNKS * TAPS>();
  };
  if (CONSUMERS > 1 && consumer > 0) skip_work();
  ConsumerOrder<CONSUMERS> order(shared + TURN_BARRIERS, consumer);
  const auto compute = [&](int index) {
    const Work work(index, sizes, shape);
    Accumulators accumulators;
    accumulators.clear();
    bool first = true;
    // At least one round, and the compiler must not know how many: otherwise it splits the loop and waits after every multiply.
    u32 rounds = ptx::keep_in_register(PHASE_MAJOR ? PHASES : work.end_chunk - work.first_chunk);
    order.wait();
#pragma unroll 1
    do {
#pragma unroll 1
      for (int stage = 0; stage < (PHASE_MAJOR ? work.end_chunk - work.first_chunk : PHASES); ++stage) {
        const int phase = PHASE_MAJOR ? PHASES - static_cast<int>(rounds) : stage;
        ptx::wait_for_phase(input.full(), input.parity);
        const int begin = PHASE_TABLE.first[phase], end = PHASE_TABLE.first[phase + 1];
#pragma unroll 1
        for (int i = begin; i < end; ++i) {
          const int pixel = warpgroup_pixel + PHASE_TABLE.box_row[i] * shape.box_cols + PHASE_TABLE.box_col[i];
          const u64 a = ptx::swizzled_descriptor(input.data() + pixel * ROW, 16, shape.group_pixels * ROW);
          const u64 b = ptx::swizzled_descriptor(weights.data(), 16, 8 * ROW);
          ptx::wait_for_phase(weights.full(), weights.parity);
          ptx::fence_wgmma();
          // A step of k is 32 bytes; descriptors count in 16.
#pragma unroll
          for (int step = 0; step < 4; ++step)
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
              ptx::wgmma<PRECISION, BLOCK_CHANNELS>(accumulators.of[m], a + m * (shape.multiply_pixels * ROW / 16) + step * 2, b + step * 2);
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
    accumulators.wait();
    release(weights.empty_before());
    release(input.empty_before());
    if constexpr (CONSUMERS > 1) skip_work();

    Out* to = output;
    if constexpr (PARTIAL) to += split_offset(work.split, sizes);
    if constexpr (OUTPUT_CHANNELS_LAST) {
      store_channels_last(accumulators, to, staged, work, sizes, shape);
    } else {
      store_nchw(accumulators, to, work, sizes, shape);
    }
  };
  for_each_work_tile(work_tiles(sizes), compute, consumer, CONSUMERS);
}

extern "C" __global__ void __launch_bounds__(CONSUMER_THREADS + PRODUCER_THREADS, 1)
    grad_input_implicit_gemm_tma(const __grid_constant__ TensorMap grad_output, const __grid_constant__ TensorMap weight,
                     Out* __restrict__ grad_input, const __grid_constant__ Sizes sizes, const __grid_constant__ BoxTileShape shape) {
  extern __shared__ __align__(1024) u32 memory[];
  const u32 shared = ptx::keep_in_register((ptx::shared_address(memory) + 1023) & ~1023u);
  if (threadIdx.x == 0) {
    set_up_ring<INPUT_STAGES>(InputRing(shared), CONSUMER_WARPS);
    set_up_ring<WEIGHT_STAGES>(WeightRing(shared), CONSUMER_WARPS);
    ConsumerOrder<CONSUMERS>::init_barriers(shared + TURN_BARRIERS, CONSUMER_WARPS);
    ptx::fence_barrier_init();
  }
  __syncthreads();

  if (threadIdx.x >= CONSUMER_THREADS) {
    ptx::wait_for_previous_launch();
    if (threadIdx.x == CONSUMER_THREADS) produce_input(shared, grad_output, sizes, shape);
    if (threadIdx.x == CONSUMER_THREADS + 32) produce_weights(shared, weight, sizes, shape);
  } else {
    consume(shared, grad_input, sizes, shape);
  }
}
