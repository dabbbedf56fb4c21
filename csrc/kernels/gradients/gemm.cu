// All gradients of a layer whose input is one pixel (a latent vector becomes a first map), sm_90a. Such a transposed
// convolution is a matrix product, x[n][ci] times weight[ci][j], where j counts output channels and taps in the order that
// both the weight and the output have.
//
//   grad_input[n][ci] = sum over j of grad_output[n][j] weight[ci][j],  grad_weight[ci][j] = sum over n of x[n][ci] grad_output[n][j]
//
// A block takes 64 j and 128 input channels. It computes all of grad_weight for them, and their part of grad_input's sum, which
// a cluster of CLUSTER blocks of neighbouring j adds up in distributed shared memory. So grad_output and the weight are read
// once (for 128 input channels), and few partial sums are left: partial[j / (64 CLUSTER)][n][ci]. WITH_BIAS: the blocks of
// the first channels add up grad_output over n to columns[tap][2][co] (the sum, and its rounding error).
// common/split_k_reduce.cu adds up the partial sums of both.
//
// Covers: float32 (TF32), float16, bfloat16; rows of j in multiples of 16 bytes, input channels in multiples of 4; one group;
// outputs whose positions are the taps. TMA loads grad_output and the weight; cp.async loads the input, whose rows need not
// begin at multiples of 16 bytes. Elements outside a tensor are zeros. A block computes 128 images at a time.
#include "common/compensated_sum.cuh"
#include "common/integers.cuh"
#include "common/mma.cuh"
#include "common/pipeline.cuh"
#include "common/tma.cuh"
#include "gradients/tf32_fragments.cuh"

using ptx::u32;

constexpr int THREADS = 256, IMAGES = 128, CHANNELS = 128, COLUMNS = 64;
constexpr int ITEM = static_cast<int>(sizeof(Element));
constexpr bool IS_16_BIT = ITEM == 2;
using ColumnSum = CompensatedSum<float, !IS_16_BIT>;
/// Boxes of TMA have 128 rows of 128 bytes.
constexpr int BOX_COLUMNS = 128 / ITEM, BOX_BYTES = 128 * 128;
constexpr int COLUMN_BOXES = COLUMNS / BOX_COLUMNS, CHANNEL_BOXES = CHANNELS / BOX_COLUMNS;
constexpr int OUTPUT_AT = 0, WEIGHT_AT = COLUMN_BOXES * BOX_BYTES, INPUT_AT = WEIGHT_AT + COLUMN_BOXES * BOX_BYTES;
constexpr int BARRIER_AT = INPUT_AT + CHANNEL_BOXES * BOX_BYTES, SUMS_AT = BARRIER_AT + 1024;
/// Floats between rows of the sums of grad_input, chosen so that a warp's stores use all banks.
constexpr int SUMS_PITCH = CHANNELS + 8;
static_assert(SHARED_BYTES == 1024 + SUMS_AT + (WITH_INPUT ? IMAGES * SUMS_PITCH * 4 : 0), "the plan and the kernel must agree");
static_assert(IMAGES == 128 && CHANNELS == 128, "a box has 128 rows");
/// Bytes of one load of the input.
constexpr int VECTOR = gcd(IN_CHANNELS * ITEM, 16), ROW_VECTORS = CHANNELS * ITEM / VECTOR;
constexpr int COLUMN_BLOCKS = (ALL_COLUMNS + COLUMNS - 1) / COLUMNS;
static_assert(COLUMN_BLOCKS % CLUSTER == 0);

__device__ __forceinline__ u32 rounded(u32 word) { return ROUNDS ? ptx::round_to_nearest_tf32(word) : word; }

/// Returns the address of 16 bytes of a row of a box (128-byte swizzle).
__device__ __forceinline__ u32 address_of(u32 box, int row, int vector) { return box + row * 128 + (vector ^ (row & 7)) * 16; }

/// Issues the loads of 128 images of 128 channels of the input, in the layout of boxes, not rounded.
__device__ __forceinline__ void load_input(u32 shared, const Element* __restrict__ input, int image, int images, int first_channel) {
#pragma unroll 4
  for (int e = threadIdx.x; e < IMAGES * ROW_VECTORS; e += THREADS) {
    const int row = e / ROW_VECTORS, byte = e % ROW_VECTORS * VECTOR;
    const bool inside = row < images && first_channel * ITEM + byte < IN_CHANNELS * ITEM;
    const Element* const from = input + (inside ? static_cast<long long>(image + row) * IN_CHANNELS + first_channel + byte / ITEM : 0);
    ptx::copy_async_or_zero<VECTOR>(address_of(shared + INPUT_AT + byte / 128 * BOX_BYTES, row, byte % 128 / 16) + byte % 16, from, inside);
  }
  ptx::commit_copies();
}

/// Computes 128 images x 128 channels of grad_input from 64 columns. Eight warps: 4 along images, 2 along channels.
__device__ __forceinline__ void multiply_input(u32 shared, int warp, int lane) {
  constexpr int M_TILES = 2, N_TILES = 8;
  const int first_row = warp % 4 * 32, first_column = warp / 4 * 64;
  float sums[M_TILES][N_TILES][4] = {};
  // Code that runs once is fetched from memory, so loops are not unrolled.
#pragma unroll 1
  for (int step = 0; step < COLUMN_BOXES * 4; ++step) {
    const u32 box = step / 4 * BOX_BYTES;
    uint4 a[M_TILES];
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) {
      u32 m[4];
      ptx::load_matrices(m, address_of(shared + OUTPUT_AT + box, first_row + i * 16 + lane % 16, step % 4 * 2 + lane / 16));
      a[i] = make_uint4(rounded(m[0]), rounded(m[1]), rounded(m[2]), rounded(m[3]));
    }
#pragma unroll
    for (int j = 0; j < N_TILES; j += 2) {
      u32 m[4];
      const int row = first_column + j * 8 + lane / 16 * 8 + lane % 8;
      ptx::load_matrices(m, address_of(shared + WEIGHT_AT + box, row, step % 4 * 2 + lane / 8 % 2));
#pragma unroll
      for (int i = 0; i < M_TILES; ++i) {
        ptx::mma<PRECISION>(sums[i][j], a[i], {m[0], m[1]});
        ptx::mma<PRECISION>(sums[i][j + 1], a[i], {m[2], m[3]});
      }
    }
  }
#pragma unroll
  for (int i = 0; i < M_TILES; ++i)
#pragma unroll
    for (int j = 0; j < N_TILES; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + i * 16 + lane / 4 + half * 8, column = first_column + j * 8 + lane % 4 * 2;
        const u32 pair[2] = {__float_as_uint(sums[i][j][half * 2]), __float_as_uint(sums[i][j][half * 2 + 1])};
        ptx::store_shared<2>(shared + SUMS_AT + (row * SUMS_PITCH + column) * 4, pair);
      }
}

/// Stores the cluster's sums of this block's share of the images. A block has read the sums of the others when it arrives at
/// the cluster's barrier again.
__device__ __forceinline__ void store_input(u32 shared, int first_image, int images, int first_channel, float* __restrict__ partial) {
  constexpr int SHARE = IMAGES / CLUSTER, ROW_FLOAT4S = CHANNELS / 4;
  const int rank = static_cast<int>(CLUSTER == 1 ? 0 : ptx::cluster_rank());
  const int first_row = rank * SHARE;
  constexpr int THREAD_FLOAT4S = SHARE * ROW_FLOAT4S / THREADS;
  float4 sums[THREAD_FLOAT4S] = {};
#pragma unroll
  for (int e = 0; e < THREAD_FLOAT4S; ++e) {
    const int at = e * THREADS + static_cast<int>(threadIdx.x), row = first_row + at / ROW_FLOAT4S, channel = at % ROW_FLOAT4S * 4;
#pragma unroll
    for (int block = 0; block < CLUSTER; ++block) {
      const float4 part = ptx::load_cluster_shared(shared + SUMS_AT + (row * SUMS_PITCH + channel) * 4, block);
      sums[e].x += part.x, sums[e].y += part.y, sums[e].z += part.z, sums[e].w += part.w;
    }
  }
  // Before the stores, because an arrival waits for the stores before it.
  ptx::arrive_at_cluster();
#pragma unroll
  for (int e = 0; e < THREAD_FLOAT4S; ++e) {
    const int at = e * THREADS + static_cast<int>(threadIdx.x), row = first_row + at / ROW_FLOAT4S, channel = at % ROW_FLOAT4S * 4;
    if (row < images && first_channel + channel < IN_CHANNELS)
      *reinterpret_cast<float4*>(partial + static_cast<long long>(first_image + row) * IN_CHANNELS + first_channel + channel) = sums[e];
  }
}

/// The accumulators of grad_weight: 128 channels x 64 columns from 128 images. Eight warps: 4 along channels, 2 along columns.
struct WeightSums {
  static constexpr int N_TILES = 4;
  float sums[2][N_TILES][4] = {};

  __device__ __forceinline__ void multiply(u32 shared, int warp, int lane) {
    const int first_row = warp % 4 * 32, first_column = warp / 4 * 32;
    const u32 input = shared + INPUT_AT + first_row / BOX_COLUMNS * BOX_BYTES, output = shared + OUTPUT_AT + first_column / BOX_COLUMNS * BOX_BYTES;
    if constexpr (IS_16_BIT) {
#pragma unroll 2
      for (int step = 0; step < IMAGES / 16; ++step) {
        u32 a[2][4], b[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          ptx::load_matrices_transposed(a[i], address_of(input, step * 16 + lane / 16 * 8 + lane % 8,
                                                         first_row % BOX_COLUMNS / 8 + i * 2 + lane / 8 % 2));
          ptx::load_matrices_transposed(b[i], address_of(output, step * 16 + lane % 16, first_column % BOX_COLUMNS / 8 + i * 2 + lane / 16));
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int j = 0; j < N_TILES; ++j)
            ptx::mma<PRECISION>(sums[i][j], make_uint4(a[i][0], a[i][1], a[i][2], a[i][3]), {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]});
      }
    } else {
#pragma unroll 2
      for (int step = 0; step < IMAGES / 8; ++step) {
        RowFragments<1, BOX_BYTES> rows;
        ColumnFragments<1, BOX_BYTES> columns;
        rows.load(input, step, lane);
        for (uint4& row : rows.of[0])
          row = make_uint4(ptx::round_to_nearest_tf32(row.x), ptx::round_to_nearest_tf32(row.y), ptx::round_to_nearest_tf32(row.z),
                           ptx::round_to_nearest_tf32(row.w));
        columns.load(output, step, lane);
        multiply_fragments(sums, rows, columns);
      }
    }
  }

  __device__ __forceinline__ void store(int first_channel, int first, int warp, int lane, Element* __restrict__ gradient) {
    const int first_row = first_channel + warp % 4 * 32, first_column = first + warp / 4 * 32;
    if constexpr (IS_16_BIT) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < N_TILES; ++j)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int row = first_row + i * 16 + lane / 4 + half * 8, column = first_column + j * 8 + lane % 4 * 2;
            if (row < IN_CHANNELS && column < ALL_COLUMNS)
              *reinterpret_cast<u32*>(gradient + static_cast<long long>(row) * ALL_COLUMNS + column) =
                  ptx::pack_pair<PRECISION>(sums[i][j][half * 2], sums[i][j][half * 2 + 1]);
          }
    } else {
      each_four_sums<1, 1>(sums, lane, [&](int, int row, int column, const float4& four) {
        if (first_row + row < IN_CHANNELS && first_column + column < ALL_COLUMNS)
          *reinterpret_cast<float4*>(gradient + static_cast<long long>(first_row + row) * ALL_COLUMNS + first_column + column) = four;
      });
    }
  }
};

/// Adds a quarter of the images to this thread's sum of a column, for grad_bias.
__device__ __forceinline__ void add_column(u32 shared, ColumnSum& sum) {
  const int column = threadIdx.x % COLUMNS, first = threadIdx.x / COLUMNS * (IMAGES / 4);
  const u32 box = shared + OUTPUT_AT + column / BOX_COLUMNS * BOX_BYTES;
  const int byte = column % BOX_COLUMNS * ITEM;
#pragma unroll 4
  for (int i = 0; i < IMAGES / 4; ++i) {
    u32 word[1];
    ptx::load_shared_bytes<ITEM>(word, address_of(box, first + i, byte / 16) + byte % 16);
    if constexpr (PRECISION == ptx::FP16) {
      Half value;
      value.bits = static_cast<unsigned short>(word[0]);
      sum.add(load_as(value));
    } else {
      sum.add(__uint_as_float(IS_16_BIT ? word[0] << 16 : word[0]));
    }
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    gradients_gemm(const __grid_constant__ TensorMap grad_output, const __grid_constant__ TensorMap weight,
                    const Element* __restrict__ input, Element* __restrict__ gradient, float* __restrict__ partial,
                    float* __restrict__ columns, long long batch) {
  extern __shared__ __align__(1024) char memory[];
  __shared__ ColumnSum thread_sums[WITH_BIAS ? 4 : 1][COLUMNS];
  const u32 shared = ptx::keep_in_register((ptx::shared_address(memory) + 1023) & ~1023u);
  const u32 barrier = shared + BARRIER_AT;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = static_cast<int>(blockIdx.x) % COLUMN_BLOCKS * COLUMNS, first_channel = static_cast<int>(blockIdx.x) / COLUMN_BLOCKS * CHANNELS;
  partial += static_cast<long long>(blockIdx.x % COLUMN_BLOCKS / CLUSTER) * batch * IN_CHANNELS;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(grad_output);
    if (WITH_INPUT) ptx::prefetch_tensor_map(weight);
    ptx::init_barrier(barrier, 1);
    ptx::fence_barrier_init();
  }
  __syncthreads();
  ptx::let_next_launch_start();
  WeightSums of_weight;
  ColumnSum column_sum{};
  const bool adds_columns = WITH_BIAS && first_channel == 0;
  u32 parity = 0;
#pragma unroll 1
  for (int image = 0; image < static_cast<int>(batch); image += IMAGES, parity ^= 1) {
    if (threadIdx.x == 0) {
      // The weight is loaded once and stays.
      const bool loads_weight = WITH_INPUT && image == 0;
      ptx::arrive_expect_tx(barrier, (loads_weight ? 2 : 1) * COLUMN_BOXES * BOX_BYTES);
#pragma unroll
      for (int b = 0; b < COLUMN_BOXES; ++b) {
        ptx::tma_load(shared + OUTPUT_AT + b * BOX_BYTES, grad_output, first + b * BOX_COLUMNS, image, barrier);
        if (loads_weight)
          ptx::tma_load(shared + WEIGHT_AT + b * BOX_BYTES, weight, first + b * BOX_COLUMNS, first_channel, barrier);
      }
    }
    if (WITH_WEIGHT) load_input(shared, input, image, static_cast<int>(batch) - image, first_channel);
    ptx::wait_for_phase(barrier, parity);
    if (WITH_INPUT) {
      multiply_input(shared, warp, lane);
      ptx::arrive_at_cluster();
    }
    if (adds_columns) add_column(shared, column_sum);
    if (WITH_WEIGHT) {
      ptx::wait_copies<0>();
      __syncthreads();
      of_weight.multiply(shared, warp, lane);
    }
    if (WITH_INPUT) {
      ptx::wait_for_cluster();
      const int images = static_cast<int>(batch) - image;
      store_input(shared, image, images, first_channel, partial);
    }
    if (WITH_WEIGHT && image + IMAGES >= static_cast<int>(batch)) of_weight.store(first_channel, first, warp, lane, gradient);
    // No block writes its sums again, or ends, before the others have read them.
    if (WITH_INPUT) ptx::wait_for_cluster();
    __syncthreads();
  }
  if (!WITH_BIAS || !adds_columns) return;
  thread_sums[threadIdx.x / COLUMNS][threadIdx.x % COLUMNS] = column_sum;
  __syncthreads();
  const int column = first + static_cast<int>(threadIdx.x);
  if (threadIdx.x < COLUMNS && column < ALL_COLUMNS) {
    const int tap = CHANNELS_LAST ? column / OUT_CHANNELS : column % TAPS, co = CHANNELS_LAST ? column % OUT_CHANNELS : column / TAPS;
#pragma unroll
    for (int quarter = 1; quarter < 4; ++quarter) column_sum.add(thread_sums[quarter][threadIdx.x]);
    columns[2 * tap * OUT_CHANNELS + co] = column_sum.sum;
    columns[(2 * tap + 1) * OUT_CHANNELS + co] = column_sum.remainder();
  }
}
