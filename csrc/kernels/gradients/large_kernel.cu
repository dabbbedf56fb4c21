// Gradients of the input and the weight in one pass, where the kernel is large (FCN heads): one group; no dilation; rows of
// the kernel, strides, padding and rows of the output in 16-byte multiples; few input channels; float32 (three products of
// TF32 parts), Half, BFloat16; NCHW, or channels_last with the weight in channels_last too; sm_80 and up.
//
//   grad_input[ci][pixel] = sum over taps of weight[ci, tap] * im2col[pixel, tap]
//   grad_weight[ci, tap] = sum over pixels of input[ci][pixel] * im2col[pixel, tap]
//   im2col[pixel (ih, iw), tap (co, kh, kw)] = grad_output[co, ih * STRIDE_H - PADDING_H + kh, (iw alike)]
//
// Taps are in the order of the weight's memory. In channels_last a row of the kernel is one segment of columns and channels,
// both in memory and in im2col, as if there were one channel and OUT_CHANNELS times the columns.
// A warp computes WARP_TAPS taps, a block those of its WARPS warps, for all steps of its split; a step is 16 pixels of a row
// of the input. A warp loads the im2col rows of 16 pixels one step ahead, stores them in shared memory of its own, and
// multiplies them twice: by its weights, which stay in shared memory as fragments, and by the input. The first products have
// all pixels and some taps: the block's warps add them up, and each block stores its sums as float32, which
// common/split_k_reduce.cu adds up. The second products have some taps and all pixels of the split: the block stores them at
// the end, as the gradient if there is one split, otherwise as float32 sums of each split. Every sum has a fixed order.
#include "common/images.cuh"
#include "common/mma.cuh"
#include "common/static_for.cuh"
#include "common/split_tf32.cuh"
#include "common/tile_index.cuh"

using ptx::u32;

constexpr int ITEM = sizeof(Element);
constexpr bool IS_IEEE = PRECISION == ptx::IEEE;
constexpr int PARTS = IS_IEEE ? 2 : 1;
constexpr int THREADS = 32 * WARPS;
constexpr int VECTOR = 16 / ITEM;  // taps of one 16-byte load
constexpr int M_TILES = ceil_div(IN_CHANNELS, 16);
constexpr int STEP_TAPS = 32 / ITEM, K_STEPS = WARP_TAPS / STEP_TAPS, N_TILES = WARP_TAPS / 8;
constexpr int ALL_TAPS = OUT_CHANNELS * TAPS;
constexpr int TAP_BLOCKS = ceil_div(ALL_TAPS, WARPS * WARP_TAPS);  // blocks that share the taps
constexpr int COLUMN_ELEMENTS = CHANNELS_LAST ? OUT_CHANNELS : 1, PLANES = CHANNELS_LAST ? 1 : OUT_CHANNELS;
constexpr int ROW_TAPS = KERNEL_W * COLUMN_ELEMENTS, ROW_STRIDE = STRIDE_W * COLUMN_ELEMENTS, ROW_PADDING = PADDING_W * COLUMN_ELEMENTS;
static_assert(ROW_TAPS % VECTOR == 0 && ROW_STRIDE % VECTOR == 0 && ROW_PADDING % VECTOR == 0);  // as rows of grad_output are
static_assert(GROUPS == 1 && CHANNELS_LAST == WEIGHT_CHANNELS_LAST && DILATION_H == 1 && DILATION_W == 1);
// Returns whether pixels are loaded and stored in pairs.
__device__ __forceinline__ bool in_pairs(const LargeKernelSizes& sizes) { return !CHANNELS_LAST && sizes.width % 2 == 0; }

// The im2col rows of a warp. The pitch of a pixel is an odd number of 16 bytes, so that reads use all banks.
constexpr int PITCH = WARP_TAPS * ITEM + 16, IM2COL_PART = 16 * PITCH, IM2COL_BYTES = PARTS * IM2COL_PART;
constexpr int VECTORS = 16 * WARP_TAPS / VECTOR / 32;  // loads of a lane
constexpr int ROW_VECTORS = WARP_TAPS / VECTOR;
static_assert(32 % ROW_VECTORS == 0);
// A warp's products for the gradient of the input are [number of the sum][lane].
constexpr int INPUT_SUMS = M_TILES * 2 * 4;
// A warp's weights are [step][m tile][part][lane]: the four words of a lane's fragment.
constexpr int WEIGHT_BYTES = K_STEPS * M_TILES * PARTS * 512;
constexpr int WEIGHTS_AT = WARPS * IM2COL_BYTES, SUMS_AT = WEIGHTS_AT + WARPS * WEIGHT_BYTES;
constexpr int SUMS_BYTES = WARPS * INPUT_SUMS * 128;
static_assert(SHARED_BYTES == SUMS_AT + 2 * SUMS_BYTES, "the plan and the kernel must agree");

// 16 pixels of a row of the input.
struct Step {
  long long image;
  int row, column;
  __device__ __forceinline__ Step(const LargeKernelSizes& sizes, int index) {
    unsigned rest = index;
    column = sizes.across.digit(rest) * 16, row = sizes.rows.digit(rest), image = rest;
  }
};

// The input of a step as fragments: rows g and g + 8 of each m tile, of pixels 2t, 2t + 1 and 2t + 8, 2t + 9.
struct Input {
  u32 words[M_TILES][2][2][ITEM / 2];
  __device__ __forceinline__ void fetch(const LargeKernelSizes& sizes, const Element* input, const Step& step, int g, int t) {
    const bool pairs = in_pairs(sizes);
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int eight = 0; eight < 2; ++eight) {
          const int ci = m * 16 + half * 8 + g, iw = step.column + eight * 8 + 2 * t;
          u32(&to)[ITEM / 2] = words[m][half][eight];
          const Element* const from = input + step.image * input_elements(sizes) + at_input(sizes, 0, ci, step.row, iw);
#pragma unroll
          for (int i = 0; i < ITEM / 2; ++i) to[i] = 0;
          if (pairs) {
            if (ci < IN_CHANNELS && iw < sizes.width) ptx::load_global<2 * ITEM>(to, from);
          } else {
            u32 one[2] = {0, 0};
#pragma unroll
            for (int i = 0; i < 2; ++i)
              if (ci < IN_CHANNELS && iw + i < sizes.width)
                ptx::load_global<ITEM>(one + i, from + (CHANNELS_LAST ? i * IN_CHANNELS : i));
            if constexpr (IS_IEEE) {
              to[0] = one[0], to[ITEM / 2 - 1] = one[1];
            } else {
              to[0] = one[0] | one[1] << 16;
            }
          }
        }
  }
};

// The im2col rows of a warp, on their way from memory to shared memory.
struct Im2colRows {
  u32 words[VECTORS][4];
  __device__ __forceinline__ void fetch(const LargeKernelSizes& sizes, const Element* grad_output, const Step& step, int first_tap, int lane) {
    const int out_row = sizes.out_width * COLUMN_ELEMENTS;
    const int tap = first_tap + lane % ROW_VECTORS * VECTOR;
    Digits digits{static_cast<unsigned>(tap)};
    const int kw = digits.next(ROW_TAPS), kh = digits.next(KERNEL_H), plane = digits.rest;
    const int oh = step.row * STRIDE_H - PADDING_H + kh;
    const Element* const from = grad_output + step.image * output_elements(sizes) + ((Index)plane * sizes.out_height + oh) * out_row;
    const bool row_inside = static_cast<unsigned>(oh) < static_cast<unsigned>(sizes.out_height) && tap < ALL_TAPS;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int iw = step.column + i * (32 / ROW_VECTORS) + lane / ROW_VECTORS;
      const int ow = iw * ROW_STRIDE - ROW_PADDING + kw;
#pragma unroll
      for (int w = 0; w < 4; ++w) words[i][w] = 0;
      if (row_inside && iw < sizes.width && static_cast<unsigned>(ow) < static_cast<unsigned>(out_row)) ptx::load_global<16>(words[i], from + ow);
    }
  }
  __device__ __forceinline__ void store(u32 to, int lane) const {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const u32 at = to + (i * (32 / ROW_VECTORS) + lane / ROW_VECTORS) * PITCH + lane % ROW_VECTORS * 16;
      if constexpr (IS_IEEE) {
        u32 parts[2][4];
#pragma unroll
        for (int w = 0; w < 4; ++w) split(parts[0][w], parts[1][w], __uint_as_float(words[i][w]));
        ptx::store_shared<4>(at, parts[0]);
        ptx::store_shared<4>(at + IM2COL_PART, parts[1]);
      } else {
        ptx::store_shared<4>(at, words[i]);
      }
    }
  }
};

template <class Out>
__device__ __forceinline__ void store_pair(Out* to, float first, float second) {
  *reinterpret_cast<PackOf<Out, 2>*>(to) = PackOf<Out, 2>{{store_as<Out>(first), store_as<Out>(second)}};
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gradients_large_kernel(const Element* __restrict__ input, const Element* __restrict__ grad_output,
                    const Element* __restrict__ weight, float* __restrict__ input_partial, void* __restrict__ result,
                    const __grid_constant__ LargeKernelSizes sizes) {
  extern __shared__ float4 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  Digits block{blockIdx.x};
  const int tap_block = block.next(TAP_BLOCKS), split_index = block.rest;
  const int first_tap = (tap_block * WARPS + warp) * WARP_TAPS;
  const long long all_steps = (long long)sizes.batch * sizes.height * sizes.across.value;
  const int first_step = static_cast<int>(split_index * all_steps / sizes.splits);
  const int end_step = static_cast<int>((split_index + 1) * all_steps / sizes.splits);
  const u32 im2col = ptx::keep_in_register(ptx::shared_address(shared) + warp * IM2COL_BYTES);
  float* const sums = reinterpret_cast<float*>(reinterpret_cast<char*>(shared) + SUMS_AT);

  Im2colRows next_im2col;
  Input next_input;
  if (first_step < end_step) {
    next_im2col.fetch(sizes, grad_output, Step(sizes, first_step), first_tap, lane);
    next_input.fetch(sizes, input, Step(sizes, first_step), g, t);
  }
  // The words of rows g and g + 8 of k = t, then of k = t + 4. A lane reads only what it wrote itself.
  const u32 weights = ptx::keep_in_register(ptx::shared_address(shared) + WEIGHTS_AT + warp * WEIGHT_BYTES + lane * 16);
#pragma unroll 2
  for (int k = 0; k < K_STEPS; ++k)
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      u32 words[4][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int ci = m * 16 + i % 2 * 8 + g, tap = first_tap + k * STEP_TAPS + (i / 2 * 4 + t) * (4 / ITEM);
        words[i][0] = 0;
        if (ci < IN_CHANNELS && tap < ALL_TAPS) ptx::load_global<4>(words[i], weight + (Index)ci * ALL_TAPS + tap);
        if constexpr (IS_IEEE) split(words[i][0], words[i][1], __uint_as_float(words[i][0]));
      }
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const u32 fragment[4] = {words[0][part], words[1][part], words[2][part], words[3][part]};
        ptx::store_shared<4>(weights + ((k * M_TILES + m) * PARTS + part) * 512, fragment);
      }
    }

  // For ldmatrix lane 8m + r gives the address of row r of matrix m: 8 pixels and two vectors of k, then 8 more pixels;
  // transposed, 16 pixels and then the second vector.
  const u32 rows = ptx::keep_in_register(im2col + (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 16);
  const u32 columns = ptx::keep_in_register(IS_IEEE ? im2col + 2 * t * PITCH + g * 4 : im2col + lane % 16 * PITCH + lane / 16 * 16);

  float sum[M_TILES][N_TILES][4] = {};
  int buffer = 0;
#pragma unroll 1
  for (int index = first_step; index < end_step; ++index) {
    __syncwarp();
    next_im2col.store(im2col, lane);
    const Input step_input = next_input;
    if (index + 1 < end_step) {
      next_im2col.fetch(sizes, grad_output, Step(sizes, index + 1), first_tap, lane);
      next_input.fetch(sizes, input, Step(sizes, index + 1), g, t);
    }
    __syncwarp();

    if constexpr (IS_IEEE) {
      // Two steps of 8 pixels: k = t is pixel 2t, k = t + 4 is pixel 2t + 1.
      uint4 x[M_TILES][2][PARTS];
#pragma unroll
      for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int eight = 0; eight < 2; ++eight) {
          u32 parts[4][2];
#pragma unroll
          for (int i = 0; i < 4; ++i)
            split(parts[i][0], parts[i][1], __uint_as_float(step_input.words[m][i % 2][eight][i / 2 % (ITEM / 2)]));
#pragma unroll
          for (int part = 0; part < PARTS; ++part)
            x[m][eight][part] = make_uint4(parts[0][part], parts[1][part], parts[2][part], parts[3][part]);
        }
      constexpr int N_TILES_AT_ONCE = 2;
      static_assert(N_TILES % N_TILES_AT_ONCE == 0);
#pragma unroll
      for (int n0 = 0; n0 < N_TILES; n0 += N_TILES_AT_ONCE) {
        u32 taps[N_TILES_AT_ONCE][2][PARTS][2];
#pragma unroll
        for (int n = 0; n < N_TILES_AT_ONCE; ++n)
#pragma unroll
          for (int q = 0; q < 4; ++q)
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
              taps[n][q / 2][part][q % 2] =
                  ptx::load_shared(columns + part * IM2COL_PART + (q / 2 * 8 + q % 2) * PITCH + (n0 + n) * 32);
        float part_sum[N_TILES_AT_ONCE][M_TILES][4];
        static_for<0, 6>([&](auto round) {
          constexpr int EIGHT = decltype(round)::value / 3, ROUND = decltype(round)::value % 3;
#pragma unroll
          for (int n = 0; n < N_TILES_AT_ONCE; ++n)
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
              multiply_part<ROUND, ROUND == 0 && EIGHT == 0>(part_sum[n][m], x[m][EIGHT], taps[n][EIGHT][0],
                                                             taps[n][EIGHT][PARTS - 1]);
        });
#pragma unroll
        for (int n = 0; n < N_TILES_AT_ONCE; ++n)
#pragma unroll
          for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[m][n0 + n][i] += part_sum[n][m][i];
      }
    } else {
#pragma unroll
      for (int n = 0; n < N_TILES; n += 2) {
        u32 taps[4];
        ptx::load_matrices_transposed(taps, columns + n * 16);
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
          for (int m = 0; m < M_TILES; ++m) {
            const uint4 x =
                make_uint4(step_input.words[m][0][0][0], step_input.words[m][1][0][0], step_input.words[m][0][1][0], step_input.words[m][1][1][0]);
            const u32 b[2] = {taps[2 * j], taps[2 * j + 1]};
            ptx::mma<PRECISION>(sum[m][n + j], x, b);
          }
      }
    }

    float products[M_TILES][2][4] = {};
#pragma unroll(IS_IEEE ? 1 : K_STEPS)
    for (int k = 0; k < K_STEPS; ++k) {
      u32 taps[PARTS][4];
#pragma unroll
      for (int part = 0; part < PARTS; ++part) ptx::load_matrices(taps[part], rows + part * IM2COL_PART + k * 32);
      uint4 w[M_TILES][PARTS];
#pragma unroll
      for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
          w[m][part] = ptx::load_shared_vector(weights + ((k * M_TILES + m) * PARTS + part) * 512);
      if constexpr (IS_IEEE) {
        float part_sum[M_TILES][2][4];
        static_for<0, 3>([&](auto round) {
          constexpr int ROUND = decltype(round)::value;
#pragma unroll
          for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int n = 0; n < 2; ++n) {
              const u32 high[2] = {taps[0][2 * n], taps[0][2 * n + 1]};
              const u32 low[2] = {taps[PARTS - 1][2 * n], taps[PARTS - 1][2 * n + 1]};
              multiply_part<ROUND, ROUND == 0>(part_sum[m][n], w[m], high, low);
            }
        });
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
          for (int i = 0; i < 8; ++i) products[m][i / 4][i % 4] += part_sum[m][i / 4][i % 4];
      } else {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const u32 b[2] = {taps[0][2 * n], taps[0][2 * n + 1]};
            ptx::mma<PRECISION>(products[m][n], w[m][0], b);
          }
      }
    }
    float* const own_sums = sums + (buffer * WARPS + warp) * (INPUT_SUMS * 32) + lane;
#pragma unroll
    for (int i = 0; i < INPUT_SUMS; ++i) own_sums[i * 32] = (&products[0][0][0])[i];

    __syncthreads();
    // Each thread adds up two neighbouring pixels: sums 2i and 2i + 1 of a lane.
    const Step step(sizes, index);
    const bool pairs = in_pairs(sizes);
#pragma unroll 1
    for (int pair = threadIdx.x; pair < INPUT_SUMS / 2 * 32; pair += THREADS) {
      const int i = pair / 32, of_lane = pair % 32;
      const float* const from = sums + buffer * WARPS * (INPUT_SUMS * 32) + 2 * i * 32 + of_lane;
      float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        total.x += from[w * (INPUT_SUMS * 32)];
        total.y += from[w * (INPUT_SUMS * 32) + 32];
      }
      const int ci = i / 4 * 16 + i % 2 * 8 + of_lane / 4, iw = step.column + i / 2 % 2 * 8 + of_lane % 4 * 2;
      if (ci < IN_CHANNELS && iw < sizes.width) {
        float* const to = input_partial + ((long long)tap_block * sizes.batch + step.image) * input_elements(sizes);
        if (pairs) {
          *reinterpret_cast<float2*>(to + at_input(sizes, 0, ci, step.row, iw)) = total;
        } else {
          to[at_input(sizes, 0, ci, step.row, iw)] = total.x;
          if (iw + 1 < sizes.width) to[at_input(sizes, 0, ci, step.row, iw + 1)] = total.y;
        }
      }
    }
    buffer ^= 1;
  }

  ptx::let_next_launch_start();
  const long long first_result = (long long)split_index * ((long long)IN_CHANNELS * ALL_TAPS);
#pragma unroll
  for (int m = 0; m < M_TILES; ++m)
#pragma unroll
    for (int n = 0; n < N_TILES; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int ci = m * 16 + half * 8 + g, tap = first_tap + n * 8 + 2 * t;
        if (ci >= IN_CHANNELS || tap >= ALL_TAPS) continue;
        const long long at = first_result + (Index)ci * ALL_TAPS + tap;
        if (sizes.splits > 1)
          store_pair(static_cast<float*>(result) + at, sum[m][n][2 * half], sum[m][n][2 * half + 1]);
        else
          store_pair(static_cast<Element*>(result) + at, sum[m][n][2 * half], sum[m][n][2 * half + 1]);
      }
}
