// Transposed convolution, forward, on tensor cores: an implicit GEMM over a tile of the output and the part of the input
// that it reads, with its halo.
//
//   M = output channels: the packed weights (forward/implicit_gemm_pack.cu), one 16-byte load for each fragment
//   N = positions of STRIDE_H x STRIDE_W outputs: a fragment is 8 neighbours in the input tile, at any shift
//   K = input channels, in chunks of CHUNK_WORDS words, through a ring of STAGES stages in shared memory
//
// A block keeps the sums of PHASE_ROWS x PHASE_COLS phases of its positions (of all phases up to stride 2). It therefore
// reads the input once for all taps, and stores whole rows of outputs. For each horizontal shift it loads the fragments of
// all rows of the halo once, and multiplies them with every tap of that shift.
//
// Covers: float32 (TF32, or IEEE by three TF32 products), float16, bfloat16; NCHW and channels_last; any kernel, stride,
// padding, output padding, dilation, groups; sm_80 and later. forward/implicit_gemm.py decides where it is used.
// The input is 16-byte aligned. PARTIAL: `output` is a workspace of float32 [sizes.splits, output], which
// forward/implicit_gemm_split_k.cu adds up.
#include "common/mma.cuh"
#include "forward/implicit_gemm_taps.cuh"
#include "forward/implicit_gemm_layout.cuh"
#include "forward/implicit_gemm_copy.cuh"
#include "forward/implicit_gemm_mma_producer.cuh"
#include "forward/implicit_gemm_store.cuh"
#include "common/tile_fragment.cuh"
#include "common/static_for.cuh"

static_assert(SHARED_BYTES == STAGES * STAGE_WORDS * 4, "the plan and the kernel must agree");

/// Rows of the halo that the positions of one warp and image read.
constexpr int REACH = FRAGMENT_H * (WARP_ROWS - 1) + MAX_SHIFT_H - MIN_SHIFT_H + 1;

/// Whether row `reach` of them is multiplied by a tap of this phase group.
__device__ constexpr bool row_used(int group_row, int reach) {
  for (int k = 0; k < KERNEL_H; ++k)
    for (int r = 0; r < WARP_ROWS; ++r)
      if (ROWS_AXIS.group(k) == group_row && r * FRAGMENT_H + ROWS_AXIS.shift(k) - MIN_SHIFT_H == reach) return true;
  return false;
}
/// Whether a tap of this phase group has this horizontal shift.
__device__ constexpr bool shift_used(int group_col, int shift) {
  for (int k = 0; k < KERNEL_W; ++k)
    if (COLS_AXIS.group(k) == group_col && COLS_AXIS.shift(k) == shift) return true;
  return false;
}

/// Adds the products of one step of 8 words of k. `weights` is the address of this lane's first word of the step's fragments;
/// `input` is this lane's address in the fragment of the warp's first position with the smallest shifts.
template <int GROUP_ROW, int GROUP_COL>
__device__ __forceinline__ void multiply_step(Sums& sums, u32 weights, u32 input) {
  static_for<MIN_SHIFT_W, MAX_SHIFT_W + 1>([&](auto shift) {
    constexpr int SHIFT = decltype(shift)::value;
    if constexpr (shift_used(GROUP_COL, SHIFT)) {
      u32 b[WARP_IMAGES][REACH][WARP_COLS][2];
      [[maybe_unused]] u32 b_low[WARP_IMAGES][PARTS == 2 ? REACH : 1][WARP_COLS][2];
#pragma unroll
      for (int image = 0; image < WARP_IMAGES; ++image)
        static_for<0, REACH>([&](auto reach) {
          constexpr int ROW = decltype(reach)::value;
          if constexpr (row_used(GROUP_ROW, ROW)) {
#pragma unroll
            for (int col = 0; col < WARP_COLS; ++col) {
              u32(&fragment)[2] = b[image][ROW][col];
              const int pixel = image * FRAGMENT_N * IMAGE_PITCH + ROW * ROW_PITCH + col * FRAGMENT_W + SHIFT - MIN_SHIFT_W;
              load_fragment(fragment, input + pixel * PIXEL_STEP * 4);
              split_fragment(fragment, b_low[image][PARTS == 2 ? ROW : 0][col]);
            }
          }
        });
      static_for<0, TAPS>([&](auto index) {
        constexpr int KH = decltype(index)::value / KERNEL_W, KW = decltype(index)::value % KERNEL_W;
        if constexpr (ROWS_AXIS.group(KH) == GROUP_ROW && COLS_AXIS.group(KW) == GROUP_COL &&
                      COLS_AXIS.shift(KW) == SHIFT) {
          constexpr int RANK = ROWS_AXIS.rank(KH) * COLS_AXIS.count(GROUP_COL) + COLS_AXIS.rank(KW);
          constexpr int PHASE = ROWS_AXIS.phase(KH) % PHASE_ROWS * PHASE_COLS + COLS_AXIS.phase(KW) % PHASE_COLS;
          constexpr int FIRST_ROW = ROWS_AXIS.shift(KH) - MIN_SHIFT_H;
#pragma unroll
          for (int i = 0; i < WARP_M_TILES; ++i) {
            const u32 address = weights + (RANK * TAP_WORDS + i * FRAGMENT_WORDS) * 4;
            const uint4 a = ptx::load_shared_vector(address);
            [[maybe_unused]] uint4 a_low;
            if constexpr (PARTS == 2) a_low = ptx::load_shared_vector(address + BLOCK_M_TILES * FRAGMENT_WORDS * 4);
#pragma unroll
            for (int image = 0; image < WARP_IMAGES; ++image)
#pragma unroll
              for (int row = 0; row < WARP_ROWS; ++row)
#pragma unroll
                for (int col = 0; col < WARP_COLS; ++col) {
                  float(&sum)[4] = sums.at(PHASE, i, image, col, row);
                  const int reach = FIRST_ROW + row * FRAGMENT_H;
                  if constexpr (PARTS == 2) {
                    // The multiplier truncates its sums. Adding the three here rounds to nearest, once.
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
  });
}

/// Computes one tile of one phase group and split.
template <int GROUP_ROW, int GROUP_COL>
__device__ __forceinline__ void forward_group(const Element* input, const u32* packed, const Epilogue& epilogue, Out* output,
                                              const Sizes& sizes, int block, int split, int group_row, int group_col) {
  constexpr int CHUNK_WEIGHTS = CHUNK_STEPS * group_taps(GROUP_ROW * GROUP_COLS + GROUP_COL) * TAP_WORDS;
  extern __shared__ __align__(16) u32 shared[];
  const u32 stages = ptx::keep_in_register(ptx::shared_address(shared));
  const auto input_stage = [&](int chunk) { return stages + chunk % STAGES * STAGE_WORDS * 4; };
  const auto weight_stage = [&](int chunk) { return input_stage(chunk) + round_up(INPUT_WORDS, 4) * 4; };

  const int m_block = block % M_BLOCKS;
  block /= M_BLOCKS;
  const int group = block % GROUPS;
  block /= GROUPS;
  const Origin origin = tile_origin(block, sizes);
  const int first_chunk = PARTIAL ? sizes.splits.quotient(split * CHUNKS) : 0;
  const int end_chunk = PARTIAL ? sizes.splits.quotient((split + 1) * CHUNKS) : CHUNKS;
  const int chunks = end_chunk - first_chunk;

  InputLoader loader(input, origin, group, first_chunk, sizes);
  const int phase_group = group_row * GROUP_COLS + group_col;
  const long long before = PHASE_GROUPS == 1 ? 0 : static_cast<long long>(taps_before(phase_group)) * GROUPS * M_BLOCKS * STEPS * TAP_WORDS;
  const u32* weights = packed + before + ((static_cast<long long>(group) * M_BLOCKS + m_block) * CHUNKS + first_chunk) * CHUNK_WEIGHTS;

  if constexpr (!FLAT) {
#pragma unroll
    for (int s = 0; s < STAGES; ++s) zero_shared<round_up(INPUT_WORDS, 4)>(input_stage(s));
    __syncthreads();
  }

  if constexpr (THROUGH_REGISTERS) {
    loader.load();
    loader.store(input_stage(0));
    if (chunks > 1) loader.load();
  } else {
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s)
      if (s < chunks) loader.copy(input_stage(s));
  }
  ptx::wait_for_previous_launch();
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    if (s < chunks) copy_weights<CHUNK_WEIGHTS>(weight_stage(s), weights + static_cast<long long>(s) * CHUNK_WEIGHTS);
    ptx::commit_copies();
  }
  weights += (STAGES - 1LL) * CHUNK_WEIGHTS;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_m = warp % WARPS_M, warp_n = warp / WARPS_M;
  const int warp_w = warp_n % WARPS_W * (WARP_COLS * FRAGMENT_W);
  const int warp_h = warp_n / WARPS_W % WARPS_H * (WARP_ROWS * FRAGMENT_H);
  const int warp_image = warp_n / (WARPS_W * WARPS_H) * (WARP_IMAGES * FRAGMENT_N);
  // A lane reads words t and t + 4 of pixel g of a fragment (NCHW), or gives the address of 4 words of a pixel for ldmatrix
  // (channels_last).
  const int g = INPUT_CHANNELS_LAST ? lane % 8 : lane / 4;
  const int word = INPUT_CHANNELS_LAST ? lane / 8 % 2 * 4 : lane % 4;
  const int lane_pixel = g / (FRAGMENT_W * FRAGMENT_H) * IMAGE_PITCH + g / FRAGMENT_W % FRAGMENT_H * ROW_PITCH + g % FRAGMENT_W;
  const u32 input_offset =
      ((warp_image * IMAGE_PITCH + warp_h * ROW_PITCH + warp_w + LEFT_PAD + lane_pixel) * PIXEL_STEP + word * K_STEP) * 4;
  const u32 weight_offset = (warp_m * WARP_M_TILES * FRAGMENT_WORDS + lane * 4) * 4;

  Sums sums;
  sums.clear();

  for (int chunk = 0; chunk < chunks; ++chunk) {
    ptx::wait_copies<STAGES - 2>();
    __syncthreads();
    const int next = chunk + STAGES - 1;
    if constexpr (THROUGH_REGISTERS) {
      if (chunk + 1 < chunks) loader.store(input_stage(chunk + 1));
      if (chunk + 2 < chunks) loader.load();
    } else {
      if (next < chunks) loader.copy(input_stage(next));
    }
    if (next < chunks) copy_weights<CHUNK_WEIGHTS>(weight_stage(next), weights);
    weights += CHUNK_WEIGHTS;
    ptx::commit_copies();
#pragma unroll 1
    for (int step = 0; step < CHUNK_STEPS; ++step)
      multiply_step<GROUP_ROW, GROUP_COL>(
          sums, weight_stage(chunk) + weight_offset + step * (CHUNK_WEIGHTS / CHUNK_STEPS) * 4,
          input_stage(chunk) + input_offset + step * STEP_WORDS * K_STEP * 4);
  }

  if constexpr (PARTIAL) output += static_cast<long long>(split) * sizes.batch * OUT_CHANNELS * sizes.out_pixels();
  store_sums(sums, output, epilogue, origin, group, m_block * BLOCK_CHANNELS + warp_m * WARP_M_TILES * 16, warp_image, warp_h,
             warp_w, group_row * PHASE_ROWS, group_col * PHASE_COLS, sizes);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_MULTIPROCESSOR)
    forward_implicit_gemm_mma(const Element* __restrict__ input, const u32* __restrict__ packed, const __grid_constant__ Epilogue epilogue,
                 Out* __restrict__ output, const __grid_constant__ Sizes sizes) {
  const int piece = static_cast<int>(blockIdx.x), block = PARTIAL ? sizes.splits.quotient(piece) : piece;
  const int split = PARTIAL ? sizes.splits.remainder(piece, block) : 0;
  const int phase_group = block % PHASE_GROUPS, rest = block / PHASE_GROUPS;
  const int group_row = phase_group / GROUP_COLS, group_col = phase_group % GROUP_COLS;
  if constexpr (ROWS_AXIS.uniform() && COLS_AXIS.uniform()) {
    forward_group<0, 0>(input, packed, epilogue, output, sizes, rest, split, group_row, group_col);
  } else {
    static_for<0, PHASE_GROUPS>([&](auto index) {
      constexpr int GROUP = decltype(index)::value;
      if (phase_group == GROUP)
        forward_group<GROUP / GROUP_COLS, GROUP % GROUP_COLS>(input, packed, epilogue, output, sizes, rest, split,
                                                              GROUP / GROUP_COLS, GROUP % GROUP_COLS);
    });
  }
}
