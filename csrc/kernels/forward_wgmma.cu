// Transposed convolution, forward, on Hopper's warpgroup multiply (sm_90a): the implicit GEMM of forward_tile.cu
// with both operands read from shared memory by the tensor cores.
//
//   M = 64 output channels a warpgroup, or fewer of several rows (STACK): the packed weights (pack_weights.cu)
//   N = WARP_ROWS rows of 8 cells, or of one row (and with FLAT) 8 * WARP_COLS cells, or with NARROW maps 8 cells of
//       each of WARP_IMAGES images; one multiply for each column of 8 cells (NARROW: each 8 cells), image and tap
//   K = input channels, by chunks of CHUNK_WORDS words through a ring of STAGES stages
//
// Without swizzle, 8 cells of one plane (forward_planes_fill.cuh) are 128 bytes in one piece wherever they begin, so
// a tap's shift of the input is only another start address.
//
// A block works on one tile after another. Its first THREADS threads multiply and store, the FILL_THREADS after them
// bring the input, and some of those ask for the weights (one run, by bulk copy); barriers in shared memory say which
// stages are full and which empty, so that the next tile's chunks come while this one's outputs leave.
//
// Covers: float32 (TF32), float16, bfloat16; NCHW, and channels_last with 16-byte multiples of channels; any kernel,
// stride, padding, output padding, dilation, groups; any map (those 5 to 7 cells wide waste some).
// Input: 16-byte aligned. SPLITS > 1: as in forward_tile.cu.
#include "mma.cuh"
#include "wgmma.cuh"
#include "pipeline.cuh"
#include "forward_tile_taps.cuh"
#include "forward_tile_layout.cuh"
#include "forward_tile_copy.cuh"
#include "forward_planes_fill.cuh"
#include "forward_tile_store.cuh"
#include "forward_warp_store.cuh"
#include "repeat.cuh"

static_assert((FRAGMENT_W == 8 || NARROW) && WARPS_M % 4 == 0 && WARP_M_TILES == 1 && BLOCK_CHANNELS % 16 == 0);

/// Cells of one multiply, and multiplies for one tap of one image.
constexpr bool ALONG_ROW = FLAT || (WARP_ROWS == 1 && !NARROW);
constexpr int MULTIPLY_COLS = ALONG_ROW ? least(WARP_COLS, 16) : 1;
constexpr int MULTIPLY_CELLS = 8 * (ALONG_ROW ? MULTIPLY_COLS : NARROW ? WARP_IMAGES : WARP_ROWS);
constexpr int MULTIPLY_IMAGES = NARROW ? 1 : WARP_IMAGES;
constexpr int MULTIPLIES = NARROW ? WARP_ROWS : WARP_COLS / MULTIPLY_COLS;
/// Pixels from 8 cells of a multiply to the next 8.
constexpr int GROUP_PITCH = ALONG_ROW ? 8 : NARROW ? IMAGE_PITCH : CELL_INPUT_ROWS * ROW_PITCH;

/// Descriptors count in 16 bytes, which is one pixel of a plane, and one channel of a plane of weights.
constexpr int WEIGHT_PLANE = 64;

// ---- shared memory, in bytes from its beginning --------------------------------------------------------------

constexpr int STAGED = STAGES * STAGE_WORDS * 4;
constexpr int BARRIERS = STAGED + WARPS * STAGED_BYTES;
static_assert(SHARED_BYTES == BARRIERS + 2 * STAGES * 8, "the plan and the kernel must agree");

// ---- registers ---------------------------------------------------------------------------------------------------

/// What the hardware gives each thread at first, in eights.
constexpr int FIRST_REGISTERS = least(255, 65536 / (BLOCKS_PER_MULTIPROCESSOR * (THREADS + FILL_THREADS))) / 8 * 8;
constexpr bool MOVE_REGISTERS = FIRST_REGISTERS < 200;
constexpr int MULTIPLY_REGISTERS =
    least(240, FIRST_REGISTERS + (FIRST_REGISTERS - FILL_REGISTERS) * FILL_THREADS / THREADS / 8 * 8);

#include "stage_ring.cuh"

/// What one turn of a block computes.
struct Work {
  int split, phase_group, m_block, group;
  Origin origin;

  /// Piece `index` of all blocks' work.
  __device__ __forceinline__ explicit Work(int index) {
    split = index % SPLITS;
    index /= SPLITS;
    phase_group = index % PHASE_GROUPS;
    index /= PHASE_GROUPS;
    m_block = index % M_BLOCKS;
    index /= M_BLOCKS;
    group = index % GROUPS;
    origin = tile_origin(index / GROUPS);
  }
  __device__ __forceinline__ static int count(int batch) {
    const int tiles = FLAT ? ceil_div(batch * PIXELS, TILE_W) : ceil_div(batch, TILE_N) * TILES_H * TILES_W;
    return tiles * GROUPS * M_BLOCKS * PHASE_GROUPS * SPLITS;
  }
  __device__ __forceinline__ int first_chunk() const { return split * CHUNKS / SPLITS; }
  __device__ __forceinline__ int chunks() const { return (split + 1) * CHUNKS / SPLITS - first_chunk(); }
};

/// A block's turns: neighbouring pieces, so that the halo and the lines of output that they share are still in the L2
/// cache. Blocks that come one after another keep the whole grid at about the same place for the same reason.
struct Turns {
  int first, end;

  __device__ __forceinline__ explicit Turns(int batch) {
    const int pieces = Work::count(batch), most = ceil_div(pieces, gridDim.x);
    first = blockIdx.x * most;
    end = least(pieces, first + most);
  }
};

/// Walks over the chunks of all turns of a block.
struct Walk {
  int index, end, chunks_left;
  Work work;

  __device__ __forceinline__ explicit Walk(const Turns& turns) : index(turns.first), end(turns.end), work(turns.first) {
    chunks_left = work.chunks();
  }
  __device__ __forceinline__ bool done() const { return index >= end; }
  /// To the next chunk; true where it is the first one of other work.
  __device__ __forceinline__ bool next() {
    if (--chunks_left > 0) return false;
    ++index;
    if (done()) return false;
    work = Work(index);
    chunks_left = work.chunks();
    return true;
  }
};

// ---- those that fill -------------------------------------------------------------------------------------------

/// Asks for the weights of one chunk after another.
struct WeightFill {
  const u32* packed;
  const u32* next;
  u32 bytes;

  __device__ __forceinline__ void aim(const Work& work) {
    int before = 0, taps = group_taps(0);
    repeat<1, PHASE_GROUPS>([&](auto index) {
      constexpr int GROUP = decltype(index)::value;
      if (work.phase_group == GROUP) before = taps_before(GROUP), taps = group_taps(GROUP);
    });
    bytes = CHUNK_STEPS * taps * TAP_WORDS * 4;
    next = packed + static_cast<long long>(before) * GROUPS * M_BLOCKS * STEPS * TAP_WORDS +
           ((static_cast<long long>(work.group) * M_BLOCKS + work.m_block) * CHUNKS + work.first_chunk()) * (bytes / 4);
  }
  __device__ __forceinline__ void advance() { next += bytes / 4; }
  __device__ __forceinline__ void copy(const Ring& ring) const {
    ptx::arrive_expecting(ring.full(), bytes);
    if (bytes > 0) ptx::copy_bulk(ring.weights(), next, bytes, ring.full());
  }
};

/// A thread of one of the FILL_GROUPS groups, which take the chunks in turn.
struct Filler {
  Ring ring;
  Walk walk;
  InputFill fill;
  WeightFill weights;
  const Element* input;
  int batch;

  __device__ __forceinline__ Filler(u32 shared, const Element* input, const u32* packed, int batch)
      : ring(shared), walk(Turns(batch)), weights{packed, packed, 0}, input(input), batch(batch) {
    aim();
  }
  __device__ __forceinline__ void aim() {
    fill.aim(input, walk.work.origin, walk.work.group, walk.work.first_chunk(), batch);
    weights.aim(walk.work);
  }
  /// To the chunk after this one.
  __device__ __forceinline__ void advance() {
    if (walk.done()) return;
    ring.advance();
    fill.advance();
    weights.advance();
    if (walk.next()) aim();
  }

  __device__ __forceinline__ void run() {
    const int thread = threadIdx.x - THREADS;
    for (int i = 0; i < thread / GROUP_THREADS; ++i) advance();
    // The first chunks of input are asked for before the launch that packs the weights is over.
    if (!walk.done()) fill.load<0>();
    ptx::wait_for_previous_launch();
    while (!walk.done()) {
      ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
      if (thread % GROUP_THREADS == 0) weights.copy(ring);
      repeat<0, PASSES>([&](auto pass) {
        constexpr int PASS = decltype(pass)::value;
        if (PASS > 0) fill.load<PASS>();
        fill.store<PASS>(ring.input());
      });
      ptx::publish_to_multiplies();
      __syncwarp();
      if (thread % 32 == 0) ptx::arrive(ring.full());
      for (int i = 0; i < FILL_GROUPS; ++i) advance();
      if (!walk.done()) fill.load<0>();
    }
  }
};

// ---- those that multiply ---------------------------------------------------------------------------------------

/// Add one chunk. `weights`: the warpgroup's; `input`: at the warpgroup's first cell, all shifts least.
template <int GROUP_ROW, int GROUP_COL>
__device__ __forceinline__ void multiply_chunk(Sums& sums, ptx::u64 weights, ptx::u64 input) {
  constexpr int STEP_WEIGHTS = group_taps(GROUP_ROW * GROUP_COLS + GROUP_COL) * TAP_WORDS / 4;
#pragma unroll
  for (int step = 0; step < CHUNK_STEPS; ++step)
    repeat<0, TAPS>([&](auto index) {
      constexpr int KH = decltype(index)::value / KERNEL_W, KW = decltype(index)::value % KERNEL_W;
      if constexpr (ROWS_AXIS.group(KH) == GROUP_ROW && COLS_AXIS.group(KW) == GROUP_COL) {
        constexpr int RANK = ROWS_AXIS.rank(KH) * COLS_AXIS.count(GROUP_COL) + COLS_AXIS.rank(KW);
        constexpr int PHASE = ROWS_AXIS.phase(KH) % PHASE_ROWS * PHASE_COLS + COLS_AXIS.phase(KW) % PHASE_COLS;
        constexpr int SHIFT = (ROWS_AXIS.shift(KH) - MIN_SHIFT_H) * ROW_PITCH +
                              (COLS_AXIS.shift(KW) - MIN_SHIFT_W) * (NARROW ? SHIFTED_PITCH : 1);
#pragma unroll
        for (int image = 0; image < MULTIPLY_IMAGES; ++image)
#pragma unroll
          for (int i = 0; i < MULTIPLIES; ++i)
            ptx::multiply<PRECISION, MULTIPLY_CELLS>(
                NARROW ? sums.at(PHASE, 0, 0, 0, i) : sums.at(PHASE, 0, image, i * MULTIPLY_COLS, 0), weights + step * STEP_WEIGHTS + RANK * (TAP_WORDS / 4),
                input + step * (STEP_WORDS / 4) * PLANE_PITCH + SHIFT + image * IMAGE_PITCH + i * (8 * MULTIPLY_COLS));
      }
    });
}

/// This warp's word that the multiplies of a stage are done.
__device__ __forceinline__ void release(u32 empty) {
  if (threadIdx.x % 32 == 0) ptx::arrive(empty);
}

template <int GROUP_ROW, int GROUP_COL>
__device__ __forceinline__ void add_chunks(Sums& sums, Ring& ring, int chunks, int weights_from, int input_from) {
  // Unrolled, the compiler would wait between the first multiplies.
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    ptx::wait_for_phase(ring.full(), ring.parity);
    ptx::fence_sums();
    multiply_chunk<GROUP_ROW, GROUP_COL>(
        sums, ptx::matrix_descriptor(ring.weights() + weights_from, WEIGHT_PLANE * 16, 128),
        ptx::matrix_descriptor(ring.input() + input_from, PLANE_PITCH * 16, GROUP_PITCH * 16));
    ptx::commit_multiplies();
    ptx::wait_multiplies<1>();
    if (chunk > 0) release(ring.empty_before());
    ring.advance();
  }
  ptx::wait_multiplies<0>();
  release(ring.empty_before());
}

__device__ __forceinline__ void multiply_and_store(u32 shared, char* memory, const Element* bias, Out* output, int batch) {
  const int warp = threadIdx.x / 32, warp_m = warp % WARPS_M, warp_n = warp / WARPS_M;
  const int warp_w = warp_n % WARPS_W * (WARP_COLS * FRAGMENT_W);
  const int warp_h = warp_n / WARPS_W % WARPS_H * (WARP_ROWS * FRAGMENT_H);
  const int warp_image = warp_n / (WARPS_W * WARPS_H) * (WARP_IMAGES * FRAGMENT_N);
  const int first_pixel = warp_image * IMAGE_PITCH + warp_h * CELL_INPUT_ROWS * ROW_PITCH + warp_w + LEAD;
  Out* staged = reinterpret_cast<Out*>(memory + STAGED + warp * STAGED_BYTES);

  Ring ring(shared);
  const Turns turns(batch);
  for (int index = turns.first; index < turns.end; ++index) {
    const Work work(index);
    Sums sums;
    sums.clear();
    if constexpr (ROWS_AXIS.uniform() && COLS_AXIS.uniform()) {
      add_chunks<0, 0>(sums, ring, work.chunks(), warp_m / 4 * 2048, first_pixel * 16);
    } else {
      repeat<0, PHASE_GROUPS>([&](auto index) {
        constexpr int GROUP = decltype(index)::value;
        if (work.phase_group == GROUP)
          add_chunks<GROUP / GROUP_COLS, GROUP % GROUP_COLS>(sums, ring, work.chunks(), warp_m / 4 * 2048, first_pixel * 16);
      });
    }
    Out* to = output;
    if constexpr (SPLITS > 1) to += static_cast<long long>(work.split) * batch * OUT_CHANNELS * OUT_PIXELS;
    store_warp(sums, to, bias, staged, work.origin, work.group, work.m_block * BLOCK_CHANNELS, warp_m * 16, warp_image,
               warp_h, warp_w, work.phase_group / GROUP_COLS * PHASE_ROWS, work.phase_group % GROUP_COLS * PHASE_COLS, batch);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS + FILL_THREADS, BLOCKS_PER_MULTIPROCESSOR)
    forward_wgmma(const Element* __restrict__ input, const u32* __restrict__ packed, const Element* __restrict__ bias,
                  Out* __restrict__ output, long long batch) {
  extern __shared__ __align__(128) u32 memory[];
  const u32 shared = ptx::pinned(ptx::shared_address(memory));
  if (threadIdx.x == 0) {
    Ring ring(shared);
    for (int s = 0; s < STAGES; ++s, ring.advance()) {
      // One arrival expects the weights.
      ptx::set_up_barrier(ring.full(), 1 + FILL_WARPS / FILL_GROUPS);
      ptx::set_up_barrier(ring.empty(), WARPS);
    }
    ptx::publish_barriers();
  }
  if constexpr (NARROW) {
    // Cells whose shifted column is outside the map stay zero: nothing writes them.
    const u32 zeros[4] = {0, 0, 0, 0};
    for (int i = threadIdx.x; i < STAGES * STAGE_WORDS / 4; i += THREADS + FILL_THREADS) ptx::store_shared<4>(shared + i * 16, zeros);
    ptx::publish_to_multiplies();
  }
  __syncthreads();

  if (threadIdx.x >= THREADS) {
    if constexpr (MOVE_REGISTERS) ptx::shrink_registers<FILL_REGISTERS>();
    Filler(shared, input, packed, static_cast<int>(batch)).run();
  } else {
    if constexpr (MOVE_REGISTERS) ptx::grow_registers<MULTIPLY_REGISTERS>();
    multiply_and_store(shared, reinterpret_cast<char*>(memory), bias, output, static_cast<int>(batch));
  }
}
