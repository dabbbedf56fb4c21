// Transposed convolution, forward, on Hopper's warpgroup multiply (sm_90a): the implicit GEMM of forward_tile.cu
// with both operands read from shared memory by the tensor cores, nearly twice as fast as mma.sync.
//
//   M = 64 output channels a warpgroup, or fewer of several rows (STACK): the packed weights (pack_weights.cu)
//   N = WARP_ROWS rows of 8 cells, or of one row (and with FLAT) 8 * WARP_COLS cells, or with NARROW maps 8 cells of
//       each of WARP_IMAGES images; one multiply for each column of 8 cells (NARROW: each 8 cells), image and tap
//   K = input channels, by chunks of CHUNK_WORDS words through a ring of STAGES stages
//
// Without swizzle, 8 cells of one plane (forward_planes_fill.cuh) are 128 bytes in one piece wherever they begin, so
// a tap's shift of the input is only another start address. Multiplies run asynchronously: meanwhile the same
// threads fill the stage after the next. A block works on one tile after another, and asks for the next one's first
// chunk before it stores this one's outputs.
//
// Covers: float32 (TF32), float16, bfloat16; NCHW, and channels_last with 16-byte multiples of channels; any kernel,
// stride, padding, output padding, dilation, groups; any map (those 5 to 7 cells wide waste some).
// Input: 16-byte aligned. SPLITS > 1: as in forward_tile.cu.
#include "mma.cuh"
#include "wgmma.cuh"
#include "forward_tile_taps.cuh"
#include "forward_tile_layout.cuh"
#include "forward_tile_copy.cuh"
#include "forward_planes_fill.cuh"
#include "forward_tile_store.cuh"
#include "forward_staged_store.cuh"
#include "repeat.cuh"

static_assert((FRAGMENT_W == 8 || NARROW) && WARPS_M % 4 == 0 && WARP_M_TILES == 1);
static_assert(SHARED_BYTES == most(STAGES * STAGE_WORDS * 4, STAGED_BYTES), "the plan and the kernel must agree");

/// Cells of one multiply, and multiplies for one tap of one image.
constexpr bool ALONG_ROW = FLAT || (WARP_ROWS == 1 && !NARROW);
constexpr int MULTIPLY_CELLS = 8 * (ALONG_ROW ? WARP_COLS : NARROW ? WARP_IMAGES : WARP_ROWS);
constexpr int MULTIPLY_IMAGES = NARROW ? 1 : WARP_IMAGES;
constexpr int MULTIPLIES = ALONG_ROW ? 1 : NARROW ? WARP_ROWS : WARP_COLS;
/// Pixels from 8 cells of a multiply to the next 8.
constexpr int GROUP_PITCH = ALONG_ROW ? 8 : NARROW ? IMAGE_PITCH : CELL_INPUT_ROWS * ROW_PITCH;

constexpr bool UNIFORM = ROWS_AXIS.uniform() && COLS_AXIS.uniform();

/// Descriptors count in 16 bytes, which is one pixel of a plane, and one channel of a plane of weights.
constexpr int WEIGHT_PLANE = 64;

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
                NARROW ? sums.at(PHASE, 0, 0, 0, i) : sums.at(PHASE, 0, image, i, 0), weights + step * STEP_WEIGHTS + RANK * (TAP_WORDS / 4),
                input + step * (STEP_WORDS / 4) * PLANE_PITCH + SHIFT + image * IMAGE_PITCH + i * 8);
      }
    });
}

/// What one turn of a block computes.
struct Work {
  int split, phase_group, m_block, group;
  Origin origin;

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

/// Every gridDim.x-th piece of work from blockIdx.x on; all of one phase group, unless the groups are uniform.
template <int GROUP_ROW, int GROUP_COL>
__device__ __forceinline__ void forward_group(const Element* input, const u32* packed, const Element* bias, Out* output,
                                              int batch) {
  constexpr int CHUNK_WEIGHTS = CHUNK_STEPS * group_taps(GROUP_ROW * GROUP_COLS + GROUP_COL) * TAP_WORDS;
  extern __shared__ __align__(128) u32 shared[];
  const u32 stages = ptx::pinned(ptx::shared_address(shared));
  const auto input_stage = [&](int chunk) { return stages + chunk % STAGES * STAGE_WORDS * 4; };
  const auto weight_stage = [&](int chunk) { return input_stage(chunk) + round_up(INPUT_WORDS, 4) * 4; };

  const int warp = threadIdx.x / 32, warp_m = warp % WARPS_M, warp_n = warp / WARPS_M;
  const int warp_w = warp_n % WARPS_W * (WARP_COLS * FRAGMENT_W);
  const int warp_h = warp_n / WARPS_W % WARPS_H * (WARP_ROWS * FRAGMENT_H);
  const int warp_image = warp_n / (WARPS_W * WARPS_H) * (WARP_IMAGES * FRAGMENT_N);
  const int first_pixel = warp_image * IMAGE_PITCH + warp_h * CELL_INPUT_ROWS * ROW_PITCH + warp_w + LEAD;

  const int end = Work::count(batch);
  int index = blockIdx.x;
  Work work(index);
  InputFill fill(input, work.origin, work.group, work.first_chunk(), batch);
  if constexpr (THROUGH_REGISTERS) fill.load();
  ptx::wait_for_previous_launch();

  while (true) {
    const int chunks = work.chunks();
    const long long before = PHASE_GROUPS == 1 ? 0
                                               : static_cast<long long>(taps_before(work.phase_group)) * GROUPS *
                                                     M_BLOCKS * STEPS * TAP_WORDS;
    const u32* weights = packed + before +
                         ((static_cast<long long>(work.group) * M_BLOCKS + work.m_block) * CHUNKS + work.first_chunk()) *
                             CHUNK_WEIGHTS;

    // Pixels outside the image stay zero in every stage: no chunk writes them.
    if constexpr (!FLAT) {
#pragma unroll
      for (int s = 0; s < STAGES; ++s) zero_shared<round_up(INPUT_WORDS, 4)>(input_stage(s));
    }
    if constexpr (!FLAT && !THROUGH_REGISTERS) __syncthreads();
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
      if constexpr (!THROUGH_REGISTERS) {
        if (s < chunks) fill.copy(input_stage(s));
      }
      if (s < chunks) copy_weights<CHUNK_WEIGHTS>(weight_stage(s), weights + static_cast<long long>(s) * CHUNK_WEIGHTS);
      ptx::commit_copies();
    }
    weights += (STAGES - 1LL) * CHUNK_WEIGHTS;
    if constexpr (THROUGH_REGISTERS) {
      if constexpr (!FLAT) __syncthreads();
      fill.store(input_stage(0));
      if (chunks > 1) fill.load();
    }

    Sums sums;
    sums.clear();
    for (int chunk = 0; chunk < chunks; ++chunk) {
      ptx::wait_copies<STAGES - 2>();
      ptx::publish_to_multiplies();
      // The stage that is filled next was read by the multiplies of the chunk before this one.
      ptx::wait_multiplies<0>();
      __syncthreads();
      ptx::fence_sums();
      multiply_chunk<GROUP_ROW, GROUP_COL>(
          sums, ptx::matrix_descriptor(weight_stage(chunk) + warp_m / 4 * 2048, WEIGHT_PLANE * 16, 128),
          ptx::matrix_descriptor(input_stage(chunk) + first_pixel * 16, PLANE_PITCH * 16, GROUP_PITCH * 16));
      ptx::commit_multiplies();

      const int next = chunk + STAGES - 1;
      if constexpr (THROUGH_REGISTERS) {
        if (chunk + 1 < chunks) fill.store(input_stage(chunk + 1));
        if (chunk + 2 < chunks) fill.load();
      } else {
        if (next < chunks) fill.copy(input_stage(next));
      }
      if (next < chunks) copy_weights<CHUNK_WEIGHTS>(weight_stage(next), weights);
      weights += CHUNK_WEIGHTS;
      ptx::commit_copies();
    }
    ptx::wait_multiplies<0>();
    ptx::wait_copies<0>();
    __syncthreads();

    Out* staged = reinterpret_cast<Out*>(shared);
    const int first_channel = work.m_block * BLOCK_CHANNELS;
    stage_sums(sums, staged, bias + work.group * CO_GROUP, first_channel, warp_m * 16, warp_image, warp_h, warp_w);
    const Work done = work;
    index += gridDim.x;
    if (index < end) {
      // The next piece's first chunk is on its way while this one's outputs leave.
      work = Work(index);
      fill = InputFill(input, work.origin, work.group, work.first_chunk(), batch);
      if constexpr (THROUGH_REGISTERS) fill.load();
    }
    __syncthreads();
    Out* to = output;
    if constexpr (SPLITS > 1) to += static_cast<long long>(done.split) * batch * OUT_CHANNELS * OUT_HEIGHT * OUT_WIDTH;
    store_staged(staged, to, done.origin, done.group, first_channel, done.phase_group / GROUP_COLS * PHASE_ROWS,
                 done.phase_group % GROUP_COLS * PHASE_COLS, batch);
    if (index >= end) return;
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_MULTIPROCESSOR)
    forward_wgmma(const Element* __restrict__ input, const u32* __restrict__ packed, const Element* __restrict__ bias,
                  Out* __restrict__ output, long long batch) {
  const int images = static_cast<int>(batch);
  if constexpr (UNIFORM) {
    forward_group<0, 0>(input, packed, bias, output, images);
  } else {
    const int phase_group = blockIdx.x / SPLITS % PHASE_GROUPS;
    repeat<0, PHASE_GROUPS>([&](auto index) {
      constexpr int GROUP = decltype(index)::value;
      if (phase_group == GROUP)
        forward_group<GROUP / GROUP_COLS, GROUP % GROUP_COLS>(input, packed, bias, output, images);
    });
  }
}
