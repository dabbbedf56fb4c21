// Gradient of the input, strides above 1, on tensor cores (mma.sync): the implicit GEMM of forward/implicit_gemm_mma.cu. The
// stride is in what it reads (grad_input/implicit_gemm_layout.cuh) instead of in what it writes.
//
//   M = channels of the input: the packed weights (forward/implicit_gemm_pack.cu, OF_GRAD_INPUT), one 16-byte load a fragment
//   N = positions, each one pixel of grad_input: 8 neighbours of a phase's image make a fragment, at any shift
//   K = taps x channels of the output, by the phases of chunks of CHUNK_WORDS words through a ring of STAGES stages
//
// For one column of taps, the fragments of all rows of a phase's image are loaded once and serve every tap that meets them.
//
// Covers: float32 (TF32, or IEEE by three TF32 products), float16, bfloat16; NCHW and channels_last; any kernel, stride,
// padding, output padding, dilation and groups with at most 16 phases of an axis that have taps; sm_80 and up.
// grad_input/implicit_gemm.py says where it is used. The input is aligned to 16 bytes. PARTIAL: as in
// forward/implicit_gemm_mma.cu.
#include "common/mma.cuh"
#include "forward/implicit_gemm_taps.cuh"
#include "grad_input/implicit_gemm_layout.cuh"
#include "forward/implicit_gemm_copy.cuh"
#include "grad_input/implicit_gemm_mma_producer.cuh"
#include "forward/implicit_gemm_store.cuh"
#include "common/tile_fragment.cuh"
#include "common/static_for.cuh"

static_assert(SHARED_BYTES == STAGES * STAGE_WORDS * 4, "the plan and the kernel must agree");

/// Rows of a phase's images that the positions of one warp reach in an image of the batch.
template <int PHASE>
constexpr int REACH = FRAGMENT_H * (WARP_ROWS - 1) + SOURCE_ROWS.reach(PHASE / SOURCE_PHASES_W) + 1;

/// Returns whether a tap multiplies row `reach` of them.
__device__ constexpr bool row_used(int phase, int reach) {
  for (int k = 0; k < KERNEL_H; ++k)
    for (int r = 0; r < WARP_ROWS; ++r)
      if (SOURCE_ROWS.rank(SOURCE_ROWS.phase(k)) == phase / SOURCE_PHASES_W && r * FRAGMENT_H + SOURCE_ROWS.shift(k) == reach) return true;
  return false;
}
/// Returns whether the phase has taps of column kw.
__device__ constexpr bool column_used(int phase, int kw) {
  for (int k = 0; k < KERNEL_H; ++k)
    if (in_phase(phase, k, kw)) return true;
  return false;
}

/// Adds one step of 8 words of k for the taps of column KW. `weights`: this lane's first word of the step's fragments.
/// `input`: this lane's address in the fragment at the warp's first position, in the phase's first image.
template <int PHASE, int KW>
__device__ __forceinline__ void multiply_column(Sums& sums, u32 weights, u32 input) {
  constexpr int FIRST =
      (INPUT_CHANNELS_LAST ? 0 : SOURCE_COLS.rank(SOURCE_COLS.phase(KW)) * COLUMN_PHASE_PITCH) + SOURCE_COLS.shift(KW);
  u32 b[WARP_IMAGES][REACH<PHASE>][WARP_COLS][2];
  [[maybe_unused]] u32 b_low[WARP_IMAGES][PARTS == 2 ? REACH<PHASE> : 1][WARP_COLS][2];
#pragma unroll
  for (int image = 0; image < WARP_IMAGES; ++image)
    static_for<0, REACH<PHASE>>([&](auto reach) {
      constexpr int ROW = decltype(reach)::value;
      if constexpr (row_used(PHASE, ROW)) {
#pragma unroll
        for (int col = 0; col < WARP_COLS; ++col) {
          u32(&fragment)[2] = b[image][ROW][col];
          constexpr int AT = FIRST + ROW * ROW_PITCH;
          load_fragment(fragment, input + (image * FRAGMENT_N * IMAGE_PITCH + AT + col * FRAGMENT_W) * PIXEL_STEP * 4);
          split_fragment(fragment, b_low[image][PARTS == 2 ? ROW : 0][col]);
        }
      }
    });
  static_for<0, KERNEL_H>([&](auto index) {
    constexpr int KH = decltype(index)::value;
    if constexpr (in_phase(PHASE, KH, KW)) {
#pragma unroll
      for (int i = 0; i < WARP_M_TILES; ++i) {
        const u32 address = weights + (rank_in_phase(KH, KW) * TAP_WORDS + i * FRAGMENT_WORDS) * 4;
        const uint4 a = ptx::load_shared_vector(address);
        [[maybe_unused]] uint4 a_low;
        if constexpr (PARTS == 2) a_low = ptx::load_shared_vector(address + BLOCK_M_TILES * FRAGMENT_WORDS * 4);
#pragma unroll
        for (int image = 0; image < WARP_IMAGES; ++image)
#pragma unroll
          for (int row = 0; row < WARP_ROWS; ++row)
#pragma unroll
            for (int col = 0; col < WARP_COLS; ++col) {
              float(&sum)[4] = sums.at(0, i, image, col, row);
              const int reach = SOURCE_ROWS.shift(KH) + row * FRAGMENT_H;
              if constexpr (PARTS == 2) {
                // The tensor cores truncate their sums; adding them here rounds to nearest, once for the three products.
                float part[4] = {0.f, 0.f, 0.f, 0.f};
                ptx::mma<PRECISION>(part, a, b_low[image][reach][col]);
                ptx::mma<PRECISION>(part, a_low, b[image][reach][col]);
                ptx::mma<PRECISION>(part, a, b[image][reach][col]);
#pragma unroll
                for (int r = 0; r < 4; ++r) sum[r] += part[r];
              } else {
                ptx::mma<PRECISION>(sum, a, b[image][reach][col]);
              }
            }
      }
    }
  });
}

/// Adds one step of k for all taps of the phase.
template <int PHASE>
__device__ __forceinline__ void multiply_step(Sums& sums, u32 weights, u32 input) {
  static_for<0, KERNEL_W>([&](auto column) {
    constexpr int KW = decltype(column)::value;
    if constexpr (column_used(PHASE, KW)) multiply_column<PHASE, KW>(sums, weights, input);
  });
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_MULTIPROCESSOR)
    grad_input_implicit_gemm_mma(const Element* __restrict__ grad_output, const u32* __restrict__ packed, Out* __restrict__ grad_input,
                    const __grid_constant__ Sizes sizes) {
  extern __shared__ __align__(16) u32 shared[];
  const u32 stages = ptx::keep_in_register(ptx::shared_address(shared));
  const auto input_stage = [&](int at) { return stages + at % STAGES * STAGE_WORDS * 4; };
  const auto weight_stage = [&](int at) { return input_stage(at) + round_up(INPUT_WORDS, 4) * 4; };

  const int piece = static_cast<int>(blockIdx.x);
  int block = PARTIAL ? sizes.splits.quotient(piece) : piece;
  const int split = PARTIAL ? sizes.splits.remainder(piece, block) : 0;
  const int m_block = block % M_BLOCKS;
  block /= M_BLOCKS;
  const int group = block % GROUPS;
  const Origin origin = tile_origin(block / GROUPS, sizes);
  const int first_chunk = PARTIAL ? sizes.splits.quotient(split * CHUNKS) : 0;
  const int end_chunk = PARTIAL ? sizes.splits.quotient((split + 1) * CHUNKS) : CHUNKS;

  InputLoader loader(grad_output, origin, group, sizes);
  // Phase AHEAD of those from the beginning of `chunk` on is copied to the stage of step `at` of the ring.
  const auto copy_input = [&](auto ahead, int chunk, int at) {
    constexpr int AHEAD = decltype(ahead)::value;
    if (chunk + AHEAD / SOURCE_PHASES < end_chunk) loader.copy<AHEAD % SOURCE_PHASES>(input_stage(at), chunk + AHEAD / SOURCE_PHASES);
  };
  const auto prefetch_input = [&](auto ahead, int chunk) {
    constexpr int AHEAD = decltype(ahead)::value;
    if (chunk + AHEAD / SOURCE_PHASES < end_chunk) loader.load<AHEAD % SOURCE_PHASES>(chunk + AHEAD / SOURCE_PHASES);
  };
  const auto load_weights = [&](auto ahead, int chunk, int at) {
    constexpr int AHEAD = decltype(ahead)::value, PHASE = AHEAD % SOURCE_PHASES, PHASE_WEIGHTS = CHUNK_STEPS * phase_taps(PHASE) * TAP_WORDS;
    chunk += AHEAD / SOURCE_PHASES;
    if (chunk < end_chunk)
      copy_weights<PHASE_WEIGHTS, true>(
          weight_stage(at), packed + static_cast<long long>(taps_before_phase(PHASE)) * GROUPS * M_BLOCKS * STEPS * TAP_WORDS +
                                ((static_cast<long long>(group) * M_BLOCKS + m_block) * CHUNKS + chunk) * PHASE_WEIGHTS);
  };

  if constexpr (THROUGH_REGISTERS) {
    loader.load<0>(first_chunk);
    loader.store(input_stage(0));
    prefetch_input(IndexConstant<1>{}, first_chunk);
  } else {
    static_for<0, STAGES - 1>([&](auto s) { copy_input(s, first_chunk, decltype(s)::value); });
  }
  ptx::wait_for_previous_launch();
  static_for<0, STAGES - 1>([&](auto s) {
    load_weights(s, first_chunk, decltype(s)::value);
    ptx::commit_copies();
  });

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_m = warp % WARPS_M, warp_n = warp / WARPS_M;
  const int warp_w = warp_n % WARPS_W * (WARP_COLS * FRAGMENT_W);
  const int warp_h = warp_n / WARPS_W % WARPS_H * (WARP_ROWS * FRAGMENT_H);
  const int warp_image = warp_n / (WARPS_W * WARPS_H) * (WARP_IMAGES * FRAGMENT_N);
  // A lane reads words t and t + 4 of pixel g of a fragment (NCHW), or gives ldmatrix the address of 4 words of a pixel
  // (channels_last).
  const int g = INPUT_CHANNELS_LAST ? lane % 8 : lane / 4;
  const int word = INPUT_CHANNELS_LAST ? lane / 8 % 2 * 4 : lane % 4;
  const int lane_pixel = g / (FRAGMENT_W * FRAGMENT_H) * IMAGE_PITCH + g / FRAGMENT_W % FRAGMENT_H * ROW_PITCH + g % FRAGMENT_W;
  const u32 input_offset =
      ((warp_image * IMAGE_PITCH + warp_h * ROW_PITCH + warp_w + ALIGNMENT_POSITIONS + lane_pixel) * PIXEL_STEP + word * K_STEP) * 4;
  const u32 weight_offset = (warp_m * WARP_M_TILES * FRAGMENT_WORDS + lane * 4) * 4;

  Sums sums;
  sums.clear();

  int at = 0;
#pragma unroll 1
  for (int chunk = first_chunk; chunk < end_chunk; ++chunk)
    static_for<0, SOURCE_PHASES>([&](auto number) {
      constexpr int PHASE = decltype(number)::value;
      ptx::wait_copies<STAGES - 2>();
      __syncthreads();
      if constexpr (THROUGH_REGISTERS) {
        if (chunk + (PHASE + 1) / SOURCE_PHASES < end_chunk) loader.store(input_stage(at + 1));
        prefetch_input(IndexConstant<PHASE + 2>{}, chunk);
      } else {
        copy_input(IndexConstant<PHASE + STAGES - 1>{}, chunk, at + STAGES - 1);
      }
      load_weights(IndexConstant<PHASE + STAGES - 1>{}, chunk, at + STAGES - 1);
      ptx::commit_copies();
#pragma unroll 1
      for (int step = 0; step < CHUNK_STEPS; ++step)
        multiply_step<PHASE>(sums, weight_stage(at) + weight_offset + step * (phase_taps(PHASE) * TAP_WORDS) * 4,
                             input_stage(at) + input_offset + step * STEP_WORDS * K_STEP * 4);
      ++at;
    });

  if constexpr (PARTIAL) grad_input += static_cast<long long>(split) * sizes.batch * OUT_CHANNELS * sizes.out_pixels();
  store_sums(sums, grad_input, nullptr, origin, group, m_block * BLOCK_CHANNELS + warp_m * WARP_M_TILES * 16, warp_image,
             warp_h, warp_w, 0, 0, sizes);
}
