// Gradient of the weight (and of the bias) with wgmma (sm_90a) in TF32, both tensors in channels_last: an implicit
// GEMM whose im2col happens on the way from shared memory to registers.
//
//   M = 32 output channels of a tap for each warp, TAP_ROWS x TAP_COLS x CO_BOXES of them, N = TILE_CI input channels;
//   K = pixels
//
// In TF32 wgmma reads from shared memory only operands that are contiguous along k, and k are pixels; in channels_last
// neither operand is. TMA loads boxes of both tensors as they lie. Two warps transpose the input's boxes in place,
// once for all taps; each lane loads its A fragments of grad_output, 16 bytes at a time, where a tap is an address.
// The order of the pixels along k is chosen so that no load has bank conflicts (grad_weight/im2col_nhwc_layout.cuh).
// The launch gives the images, rows and columns of a stage. Pixels beyond the edge of an image are zeros of both operands:
// TMA fills those of the input, and the fragments of grad_output, which may go on there, are not loaded.
//
// Covers: float32 (TF32), channels_last; what grad_weight/im2col_nhwc.py supports. One thread of warpgroup 0 is the
// producer and two of its warps transpose; the other warpgroups are the consumers. Where the rows of all images follow
// one another in both tensors as those of one image do, the maps and sizes describe one image. The pixels are cut into
// splits. A cluster adds up the sums of CLUSTER splits; what is left is gradient[splits / CLUSTER][ci][tap][co]
// (grad_weight/split_k_reduce_untiled.cu).
// WITH_BIAS: the warps that have A fragments of a tap whose offset lies in [0, stride) also add them up, in some of the
// stages: bias_partial[split][tile of input channels][offset][2][co], the sum and what rounding left of it. Without it
// TMA rounds grad_output to TF32.
#include "common/compensated_sum.cuh"
#include "common/mma.cuh"
#include "common/wgmma.cuh"
#include "common/pipeline.cuh"
#include "common/tma.cuh"
#include "grad_weight/im2col_nhwc_layout.cuh"
#include "grad_weight/im2col_nhwc_producer.cuh"

/// The rows of a warp: channels lane / 4 * 4 and the next three, one for each m tile and half of 8 rows.
struct WarpTile {
  int i, j, co_box;
  bool exists;

  __device__ __forceinline__ explicit WarpTile(int warp) {
    exists = warp < WARP_TILES;
    const int warp_tile = exists ? warp : 0;
    co_box = warp_tile % CO_BOXES;
    j = warp_tile / CO_BOXES % TAP_COLS;
    i = warp_tile / (CO_BOXES * TAP_COLS);
  }
};

/// Where a lane's A fragments lie in a stage.
struct AAddresses {
  u32 at[STEPS][2];

  __device__ __forceinline__ AAddresses(const WarpTile& warp_tile, int lane, const Im2colNhwcSizes& sizes) {
    int boxes = 0, shift = 0;
#pragma unroll
    for (int j = 0; j < TAP_COLS; ++j)
      if (warp_tile.j == j) boxes = tap_boxes(0, j), shift = shift_of(j);
    boxes += warp_tile.i * (COLUMN_BOXES * CO_BOXES) + warp_tile.co_box;
    const int first = INPUT_BYTES + boxes * output_box_bytes(sizes);
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int pixel = pixel_of(step, half, lane % 4);
        const int box_row = (pixel >> sizes.col_bits) * pitch(sizes) + (pixel & (sizes.cols - 1)) + shift;
        at[step][half] = first + box_row * ROW_BYTES + (lane / 4 ^ (box_row & 7)) * 16;
      }
  }
  __device__ __forceinline__ void load(AFragments& fragments, u32 stage, int step) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) set(fragments, half, ptx::load_shared_vector(stage + at[step][half]));
  }
  /// The same where only so many rows and columns of a stage exist.
  __device__ __forceinline__ void load_existing(AFragments& fragments, u32 stage, int step, int lane, int rows, int cols,
                                                const Im2colNhwcSizes& sizes) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int pixel = pixel_of(step, half, lane % 4);
      const bool exists = (pixel >> sizes.col_bits & (sizes.rows - 1)) < rows && (pixel & (sizes.cols - 1)) < cols;
      // What is loaded may be infinite, so it is replaced, not multiplied.
      uint4 four = ptx::load_shared_vector(stage + at[step][half]);
      if (!exists) four = make_uint4(0, 0, 0, 0);
      set(fragments, half, four);
    }
  }

 private:
  __device__ __forceinline__ static void set(AFragments& fragments, int half, const uint4& four) {
    fragments[0][half * 2] = four.x;
    fragments[0][half * 2 + 1] = four.y;
    fragments[1][half * 2] = four.z;
    fragments[1][half * 2 + 1] = four.w;
  }
};

/// How many rows and columns exist from the first pixel of a consumer's stage on, stage after stage.
struct ExistingPixels {
  int rows, cols;
  bool all;

  __device__ __forceinline__ ExistingPixels(int first_stage, const Im2colNhwcSizes& sizes) {
    const PixelPlace at = sizes.first_pixel(first_stage);
    rows = sizes.tiles.height - at.row;
    cols = sizes.tiles.width - at.col;
    compare(sizes);
  }
  __device__ __forceinline__ void advance(const Im2colNhwcSizes& sizes) {
    cols -= sizes.cols;
    if (cols <= 0) {
      cols = sizes.tiles.width;
      rows -= sizes.rows;
      if (rows <= 0) rows = sizes.tiles.height;
    }
    compare(sizes);
  }

 private:
  __device__ __forceinline__ void compare(const Im2colNhwcSizes& sizes) { all = rows >= sizes.rows && cols >= sizes.cols; }
};

/// The bias, from the A fragments that a warp loads anyway: a lane's four channels of the pixels that are its k, for the
/// taps whose offset lies in [0, stride), which read every pixel once. The blocks of different input channels, which load
/// the same of grad_output, take turns.
struct Bias {
  bool adds;
  int row;    // in the partial sums
  int turns;  // stages until the next one that this block adds up
  CompensatedSum<float> sums[4] = {};
  float part[4] = {};

  __device__ __forceinline__ Bias(const Place& place, const WarpTile& warp_tile) {
    const int row_offset = place.row_offset(warp_tile.i), col_offset = place.col_offset(warp_tile.j);
    const bool exists = warp_tile.exists && place.kh + warp_tile.i < KERNEL_H && place.kw + warp_tile.j < KERNEL_W;
    adds = WITH_BIAS && exists && row_offset >= 0 && row_offset < STRIDE_H && col_offset >= 0 && col_offset < STRIDE_W;
    turns = place.ci / TILE_CI;
    row = ((place.split * CI_TILES + turns) * STRIDE_H + row_offset) * STRIDE_W + col_offset;
  }
  /// Adds a step's fragments, and rounds them.
  __device__ __forceinline__ void add(AFragments& fragments) {
    if constexpr (!WITH_BIAS) return;
    if (adds && turns == 0) {
#pragma unroll
      for (int q = 0; q < 4; ++q) part[q] += __uint_as_float(fragments[q / 2][q % 2]) + __uint_as_float(fragments[q / 2][2 + q % 2]);
    }
#pragma unroll
    for (auto& block : fragments)
#pragma unroll
      for (u32& word : block) word = ptx::add_half_ulp_of_tf32(word);
  }
  __device__ __forceinline__ void end_stage() {
    if (!WITH_BIAS || !adds) return;
    if (turns > 0) {
      --turns;
      return;
    }
    turns = CI_TILES - 1;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      sums[q].add(part[q]);
      part[q] = 0.f;
    }
  }
  __device__ __forceinline__ void store(const Place& place, const WarpTile& warp_tile, int lane, float* bias_partial) {
    if (!WITH_BIAS || !adds) return;
    float* const to = bias_partial + static_cast<long long>(row) * (2 * OUT_CHANNELS) + place.group * CO_GROUP;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      sums[q].add_lane(1);
      sums[q].add_lane(2);
      const int co = place.co + warp_tile.co_box * BOX_CHANNELS + lane / 4 * 4 + q;
      if (lane % 4 == 0 && co < CO_GROUP) {
        to[co] = sums[q].sum;
        to[OUT_CHANNELS + co] = sums[q].remainder();
      }
    }
  }
};

/// The consumer: one warp's multiplies. While a step is multiplied, the next step's fragments are loaded.
/// wait_for_stage(ring) returns when the stage is full; load(fragments, stage address, step) loads A; end_stage() follows a
/// stage's last step.
template <class Wait, class Load, class EndStage>
__device__ __forceinline__ void multiply_stages(Ring ring, float (&sums)[M_TILES][TILE_CI / 2], int lane, int stages, const Wait& wait_for_stage,
                                                const Load& load, const EndStage& end_stage) {
#pragma unroll
  for (auto& m_tile : sums)
#pragma unroll
    for (float& sum : m_tile) sum = 0.f;
  AFragments even, odd;
  for (int s = 0; s < stages; ++s) {
    wait_for_stage(ring);
    const ptx::u64 b = ptx::swizzled_descriptor<ROW_BYTES>(ring.data(), 16, 8 * ROW_BYTES);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      AFragments& a = step % 2 ? odd : even;
      load(a, ring.data(), step);
      ptx::fence_wgmma();
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) ptx::wgmma_from_registers<TILE_CI>(sums[m], a[m], b + step * (32 / 16));
      ptx::commit_wgmma();
      // The step before is multiplied, so its registers are free; after the first step also the stage before is.
      ptx::wait_wgmma<1>();
      if (step == 0 && s > 0 && lane == 0) ptx::arrive(ring.empty_before());
    }
    end_stage();
    ring.advance();
  }
  ptx::wait_wgmma<0>();
}

/// A block of a cluster keeps the sums, over both splits, of half of the columns.
using HalfOfSums = float[M_TILES][TILE_CI / 4];
__device__ __forceinline__ void add_other_split(const float (&sums)[M_TILES][TILE_CI / 2], HalfOfSums& half, u32 shared, int thread, int rank) {
  constexpr int QUADS = TILE_CI / 16;
#pragma unroll
  for (int b = 0; b < M_TILES; ++b)
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
      u32 sent[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low = sums[b][q * 4 + i], high = sums[b][(QUADS + q) * 4 + i];
        half[b][q * 4 + i] = rank == 0 ? low : high;
        sent[i] = __float_as_uint(rank == 0 ? high : low);
      }
      ptx::store_shared<4>(shared + ((b * QUADS + q) * CONSUMER_THREADS + thread) * 16, sent);
    }
  ptx::sync_cluster();
#pragma unroll
  for (int b = 0; b < M_TILES; ++b)
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
      const float4 other = ptx::load_cluster_shared(shared + ((b * QUADS + q) * CONSUMER_THREADS + thread) * 16, 1 - rank);
      half[b][q * 4] += other.x;
      half[b][q * 4 + 1] += other.y;
      half[b][q * 4 + 2] += other.z;
      half[b][q * 4 + 3] += other.w;
    }
  // A block must not end while the other one reads its memory.
  ptx::sync_cluster();
}

/// Stores COLUMNS input channels from `first` on.
template <int COLUMNS>
__device__ __forceinline__ void store(const float (&sums)[M_TILES][COLUMNS / 2], const Place& place, int first, const WarpTile& warp_tile, int lane,
                                      float* gradient) {
  const int kh = place.kh + warp_tile.i, kw = place.kw + warp_tile.j, co = place.co + warp_tile.co_box * BOX_CHANNELS + lane / 4 * 4;
  if (!warp_tile.exists || kh >= KERNEL_H || kw >= KERNEL_W || co >= CO_GROUP) return;
  gradient += (static_cast<long long>(place.split / CLUSTER) * IN_CHANNELS + place.group * CI_GROUP) * (TAPS * CO_GROUP);
  gradient += (kh * KERNEL_W + kw) * CO_GROUP + co;
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (const int ci = first + j * 8 + lane % 4 * 2 + i; ci < CI_GROUP)
        *reinterpret_cast<float4*>(gradient + static_cast<long long>(ci) * (TAPS * CO_GROUP)) =
            make_float4(sums[0][j * 4 + i], sums[0][j * 4 + 2 + i], sums[1][j * 4 + i], sums[1][j * 4 + 2 + i]);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    grad_weight_im2col_nhwc(const __grid_constant__ TensorMap input, const __grid_constant__ TensorMap grad_output,
                            float* __restrict__ gradient, float* __restrict__ bias_partial, const __grid_constant__ Im2colNhwcSizes sizes) {
  extern __shared__ __align__(1024) u32 shared[];
  const Ring ring((ptx::shared_address(shared) + 1023) & ~1023u, sizes);
  const Place place(blockIdx.x);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(input);
    ptx::prefetch_tensor_map(grad_output);
    ring.init(1, 4 * WARPGROUPS);
    for (Ring each = ring; each.stage < each.stages; ++each.stage) ptx::init_barrier(each.transposed(), TRANSPOSE_WARPS);
    ptx::fence_barrier_init();
  }
  __syncthreads();
  const int stages = sizes.tiles.tiles_of(place.split);
  ptx::let_next_launch_start();
  if (warp < 4) {
    ptx::shrink_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) produce(ring, input, grad_output, place, sizes);
    if (warp >= 4 - TRANSPOSE_WARPS) transpose(ring, warp - (4 - TRANSPOSE_WARPS), lane, stages);
  } else {
    ptx::grow_registers<CONSUMER_REGISTERS>();
    const WarpTile warp_tile(warp - 4);
    float sums[M_TILES][TILE_CI / 2];
    Bias bias(place, warp_tile);
    const AAddresses addresses(warp_tile, lane, sizes);
    ExistingPixels existing(sizes.tiles.first_tile(place.split), sizes);
    multiply_stages(
        ring, sums, lane, stages,
        [&](const Ring& full) {
          ptx::wait_for_phase(full.full(), full.parity);
          ptx::wait_for_phase(full.transposed(), full.parity);
        },
        [&](AFragments& fragments, u32 stage, int step) {
          if (existing.all) {
            addresses.load(fragments, stage, step);
          } else {
            addresses.load_existing(fragments, stage, step, lane, existing.rows, existing.cols, sizes);
          }
          bias.add(fragments);
        },
        [&] {
          bias.end_stage();
          existing.advance(sizes);
        });
    bias.store(place, warp_tile, lane, bias_partial);
    if constexpr (CLUSTER == 1) {
      store<TILE_CI>(sums, place, place.ci, warp_tile, lane, gradient);
    } else {
      const int rank = static_cast<int>(ptx::cluster_rank());
      HalfOfSums half;
      // All stages are read, so the sums may take their memory.
      ptx::sync_named_barrier<1, CONSUMER_THREADS>();
      add_other_split(sums, half, ring.stages_begin, threadIdx.x - 128, rank);
      store<TILE_CI / 2>(half, place, place.ci + rank * (TILE_CI / 2), warp_tile, lane, gradient);
    }
  }
}
