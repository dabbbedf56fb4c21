// Gradient of the weight (and of the bias) on Hopper's warpgroup multiply (sm_90a) in TF32, both tensors in channels_last.
//
//   M = 32 output channels of a tap a warp, TAP_ROWS x TAP_COLS x CHUNKS of them, N = TILE_COLS input channels, K = pixels
//
// In TF32 the multiplier takes from shared memory only what lies along k, and k are pixels; in channels_last nothing lies
// so. The copy engine brings boxes of both tensors as they lie. Those of the input two warps turn in place, once for all
// taps; grad_output's words a lane reads into registers, 16 bytes at a time, where a tap is an address. Which pixel is which
// k is so chosen that all meet different banks (grad_weight/im2col_nhwc_layout.cuh).
//
// Covers: float32 (TF32), channels_last; what grad_weight/im2col_nhwc.py claims. Of warpgroup 0 one thread asks for boxes and
// two warps turn; the others multiply. Where the images' rows follow one another in both tensors as in one image, the maps and
// the sizes say so. Pixels are split in slices. A cluster adds up the sums of TOGETHER of them; what is left is gradient[slices / TOGETHER][ci][tap][co]
// (grad_weight/pixel_rows_reduce.cu). WITH_BIAS: warps that have words of the first input channels' blocks and of a tap whose offset
// lies in [0, stride) also add them up: bias_partial[slice][offset][2][co], the sum and what rounding left of it. Without it
// grad_output comes rounded to TF32.
#include "common/compensated_sum.cuh"
#include "common/mma.cuh"
#include "common/wgmma.cuh"
#include "common/pipeline.cuh"
#include "common/stages.cuh"
#include "common/tma.cuh"
#include "grad_weight/im2col_nhwc_layout.cuh"
#include "grad_weight/im2col_nhwc_producer.cuh"

/// One step's words of grad_output, as wgmma_from_registers takes them.
using Words = u32[BLOCKS][4];

/// What a warp's rows are: of channels lane / 4 * 4 on, one for each block and half of 8 rows.
struct Unit {
  int i, j, chunk;
  bool exists;

  __device__ __forceinline__ explicit Unit(int warp) {
    exists = warp < UNITS;
    const int unit = exists ? warp : 0;
    chunk = unit % CHUNKS;
    j = unit / CHUNKS % TAP_COLS;
    i = unit / (CHUNKS * TAP_COLS);
  }
};

/// Where a lane's words lie in a stage.
struct WordPlaces {
  u32 at[STEPS][2];

  __device__ __forceinline__ WordPlaces(const Unit& unit, int lane) {
    u32 box = 0, shift = 0;
#pragma unroll
    for (int j = 0; j < TAP_COLS; ++j)
      if (unit.j == j) box = tap_bytes(0, j), shift = shift_of(j);
    box += unit.i * (COLUMN_BOXES * CHUNKS * OUTPUT_BOX_BYTES) + unit.chunk * OUTPUT_BOX_BYTES;
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 row = row_of(pixel_of(step, half, lane % 4)) + shift;
        at[step][half] = box + row * ROW_BYTES + (lane / 4 ^ (row & 7)) * 16;
      }
  }
  __device__ __forceinline__ void load(Words& words, u32 stage, int step) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 four = ptx::load_shared_vector(stage + at[step][half]);
      words[0][half * 2] = four.x;
      words[0][half * 2 + 1] = four.y;
      words[1][half * 2] = four.z;
      words[1][half * 2 + 1] = four.w;
    }
  }
};

/// The bias, from the words that a warp has anyway: a lane's four channels, of the pixels that are its k. Of the taps whose
/// offset lies in [0, stride), which read every pixel once.
struct Bias {
  bool counts;
  int row;  // of the partial sums of a slice
  CompensatedSum<float> sums[4] = {};
  float part[4] = {};

  __device__ __forceinline__ Bias(const Place& place, const Unit& unit) {
    const int down = place.row_offset(unit.i), across = place.col_offset(unit.j);
    const bool exists = unit.exists && place.kh + unit.i < KERNEL_H && place.kw + unit.j < KERNEL_W;
    counts = WITH_BIAS && place.ci == 0 && exists && down >= 0 && down < STRIDE_H && across >= 0 && across < STRIDE_W;
    row = down * STRIDE_W + across;
  }
  /// The words of a step, which come back rounded.
  __device__ __forceinline__ void add(Words& words) {
    if constexpr (!WITH_BIAS) return;
    if (counts) {
#pragma unroll
      for (int q = 0; q < 4; ++q) part[q] += __uint_as_float(words[q / 2][q % 2]) + __uint_as_float(words[q / 2][2 + q % 2]);
    }
#pragma unroll
    for (auto& block : words)
#pragma unroll
      for (u32& word : block) word = ptx::add_half_ulp_of_tf32(word);
  }
  __device__ __forceinline__ void end_stage() {
    if (!WITH_BIAS || !counts) return;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      sums[q].add(part[q]);
      part[q] = 0.f;
    }
  }
  __device__ __forceinline__ void store(const Place& place, const Unit& unit, int lane, float* bias_partial) {
    if (!WITH_BIAS || !counts) return;
    float* const to = bias_partial + (static_cast<long long>(place.slice) * (STRIDE_H * STRIDE_W) + row) * (2 * OUT_CHANNELS) +
                      place.group * CO_GROUP;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      sums[q].add_lane(1);
      sums[q].add_lane(2);
      const int co = place.co + unit.chunk * BOX + lane / 4 * 4 + q;
      if (lane % 4 == 0 && co < CO_GROUP) {
        to[co] = sums[q].sum;
        to[OUT_CHANNELS + co] = sums[q].remainder();
      }
    }
  }
};

/// The multiplies of one warp. While a step is multiplied, the words of the next are read.
__device__ __forceinline__ void multiply_all(Ring ring, float (&sums)[BLOCKS][TILE_COLS / 2], const Unit& unit, Bias& bias, int lane,
                                             int stages) {
  const WordPlaces places(unit, lane);
#pragma unroll
  for (auto& block : sums)
#pragma unroll
    for (float& sum : block) sum = 0.f;
  Words even, odd;
  for (int s = 0; s < stages; ++s) {
    ptx::wait_for_phase(ring.full(), ring.parity);
    ptx::wait_for_phase(ring.turned(), ring.parity);
    const ptx::u64 cols = ptx::swizzled_descriptor(ring.data(), 16, 8 * ROW_BYTES);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      Words& words = step % 2 ? odd : even;
      places.load(words, ring.data(), step);
      bias.add(words);
      ptx::fence_wgmma();
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) ptx::wgmma_from_registers<TILE_COLS>(sums[b], words[b], cols + step * 32 / 16);
      ptx::commit_wgmma();
      // The step before is multiplied: its words may go, and with the first step its stage.
      ptx::wait_wgmma<1>();
      if (step == 0 && s > 0 && lane == 0) ptx::arrive(ring.empty_before());
    }
    bias.end_stage();
    ring.advance();
  }
  ptx::wait_wgmma<0>();
}

/// Half of the columns, of both blocks of a cluster: this one's half.
using HalfSums = float[BLOCKS][TILE_COLS / 4];
__device__ __forceinline__ void add_other_slice(const float (&sums)[BLOCKS][TILE_COLS / 2], HalfSums& half, u32 shared, int thread, int rank) {
  constexpr int QUADS = TILE_COLS / 16;
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
      u32 given[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low = sums[b][q * 4 + i], high = sums[b][(QUADS + q) * 4 + i];
        half[b][q * 4 + i] = rank == 0 ? low : high;
        given[i] = __float_as_uint(rank == 0 ? high : low);
      }
      ptx::store_shared<4>(shared + ((b * QUADS + q) * MULTIPLYING_THREADS + thread) * 16, given);
    }
  ptx::sync_cluster();
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
      const float4 other = ptx::load_cluster_shared(shared + ((b * QUADS + q) * MULTIPLYING_THREADS + thread) * 16, 1 - rank);
      half[b][q * 4] += other.x;
      half[b][q * 4 + 1] += other.y;
      half[b][q * 4 + 2] += other.z;
      half[b][q * 4 + 3] += other.w;
    }
  // What the other block reads stays until it has.
  ptx::sync_cluster();
}

/// COLUMNS input channels from `first` on.
template <int COLUMNS>
__device__ __forceinline__ void store(const float (&sums)[BLOCKS][COLUMNS / 2], const Place& place, int first, const Unit& unit, int lane,
                                      float* gradient) {
  const int kh = place.kh + unit.i, kw = place.kw + unit.j, co = place.co + unit.chunk * BOX + lane / 4 * 4;
  if (!unit.exists || kh >= KERNEL_H || kw >= KERNEL_W || co >= CO_GROUP) return;
  gradient += (static_cast<long long>(place.slice / TOGETHER) * IN_CHANNELS + place.group * CI_GROUP) * (TAPS * CO_GROUP);
  gradient += (kh * KERNEL_W + kw) * CO_GROUP + co;
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (const int ci = first + j * 8 + lane % 4 * 2 + i; ci < CI_GROUP)
        *reinterpret_cast<float4*>(gradient + static_cast<long long>(ci) * (TAPS * CO_GROUP)) =
            make_float4(sums[0][j * 4 + i], sums[0][j * 4 + 2 + i], sums[1][j * 4 + i], sums[1][j * 4 + 2 + i]);
}

extern "C" __global__ void __cluster_dims__(TOGETHER, 1, 1) __launch_bounds__(THREADS, 1)
    grad_weight_im2col_nhwc(const __grid_constant__ TensorMap input, const __grid_constant__ TensorMap grad_output,
                         float* __restrict__ gradient, float* __restrict__ bias_partial, const __grid_constant__ GradWeightTileSizes sizes) {
  extern __shared__ __align__(1024) u32 shared[];
  const Ring ring((ptx::shared_address(shared) + 1023) & ~1023u);
  const Place place(blockIdx.x);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(input);
    ptx::prefetch_tensor_map(grad_output);
    Ring each = ring;
    for (each.stage = 0; each.stage < STAGES; ++each.stage) {
      ptx::init_barrier(each.full(), 1);
      ptx::init_barrier(each.empty(), 4 * WARPGROUPS);
      ptx::init_barrier(each.turned(), TURNING_WARPS);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();
  const int stages = sizes.tiles_of(place.slice);
  ptx::let_next_launch_start();
  if (warp < 4) {
    ptx::shrink_registers<FILL_REGISTERS>();
    if (threadIdx.x == 0) fill(ring, input, grad_output, place, sizes);
    if (warp >= 4 - TURNING_WARPS) turn(ring, warp - (4 - TURNING_WARPS), lane, stages);
  } else {
    ptx::grow_registers<MULTIPLY_REGISTERS>();
    const Unit unit(warp - 4);
    float sums[BLOCKS][TILE_COLS / 2];
    Bias bias(place, unit);
    multiply_all(ring, sums, unit, bias, lane, stages);
    bias.store(place, unit, lane, bias_partial);
    if constexpr (TOGETHER == 1) {
      store<TILE_COLS>(sums, place, place.ci, unit, lane, gradient);
    } else {
      const int rank = static_cast<int>(ptx::cluster_rank());
      HalfSums half;
      // All stages are read, and sums may take their place.
      ptx::sync_named_barrier<1, MULTIPLYING_THREADS>();
      add_other_slice(sums, half, ring.base, threadIdx.x - 128, rank);
      store<TILE_COLS / 2>(half, place, place.ci + rank * (TILE_COLS / 2), unit, lane, gradient);
    }
  }
}
