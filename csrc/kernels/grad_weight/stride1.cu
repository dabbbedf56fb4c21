// Gradient of the weight at stride 1 with wgmma (sm_90a), k = pixels of a row.
//
//   M = 16 output channels of one column of taps for each warp, N = TILE_TAP_ROWS rows of taps x TILE_CI input channels;
//   K = pixels
//
// Along k wgmma reads shared memory only at multiples of 32 bytes (and in TF32 it reads only operands that are
// contiguous along k). Rows of the input lie so, [128 bytes of pixels][channel][pixel], one after another, so that one
// multiply takes several of them: the rows of taps of one row of grad_output. grad_output comes from registers, which
// load it at any shift, so a column of taps is an address, and every warp has its own. TMA rounds to TF32.
//
// A block walks down tiles of TILE_W columns of an image, sizes.segment rows of grad_output at a time, and loads each
// row of either tensor once. Stage s of the ring holds a row of both; the input of the first TILE_TAP_ROWS - 1 stages
// is stored once more behind the last stage, so that rows of taps are always contiguous.
//
// Covers: float32 (TF32), float16, bfloat16; stride 1, dilation 1, any kernel and groups. NCHW: rows of the input of a
// multiple of 16 bytes; those of grad_output too, or (LINEAR_OUTPUT) no padding of columns, and channels of a group of
// grad_output in whole PLANES. channels_last: float32, channels of a group in fours.
// Split s takes segments s, s + splits and so on of (image, segment, column tile); its sums are
// gradient[split][ci][tap][co], which grad_weight/split_k_reduce_untiled.cu adds up.
#include "common/mma.cuh"
#include "common/wgmma.cuh"
#include "common/pipeline.cuh"
#include "common/tma.cuh"
#include "grad_weight/stride1_layout.cuh"
#include "grad_weight/stride1_producer.cuh"

constexpr int CONSUMER_THREADS = 128 * WARPGROUPS;
constexpr int PRODUCER_REGISTERS = WARPGROUPS == 3 ? 56 : 64, CONSUMER_REGISTERS = WARPGROUPS == 3 ? 152 : 216;
constexpr int STEP = 32 / ITEM, STEPS = TILE_W / STEP;

/// A step's A fragments (grad_output): [m tile][word].
using AFragments = u32[M_TILES][4];

/// Where a lane's A fragments of the first step lie.
struct AAddresses {
  u32 at[M_TILES][4];
  bool odd[M_TILES];  // 16 bits: the halves of a word lie in two words of memory

  /// `offsets`: from where a row's box begins; in channels_last also the third word's.
  __device__ __forceinline__ AAddresses(u32 output, const u32 (&offsets)[M_TILES][2]) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 first = output + offsets[m][CHANNELS_LAST ? half : 0] + (CHANNELS_LAST ? 0 : half * 16);
        at[m][half * 2] = first & ~3u;
        // The channel 8 further on is two pieces of 16 bytes further on, and fragments begin at multiples of 16 channels.
        at[m][half * 2 + 1] = CHANNELS_LAST ? first ^ 32 : (first & ~3u) + 8 / PLANES * OUTPUT_PITCH_BYTES;
      }
      odd[m] = (output + offsets[m][0]) & 2;
    }
  }

  __device__ __forceinline__ void load(AFragments& rows, int step) const {
    constexpr int STEP_BYTES = CHANNELS_LAST ? STEP * OUTPUT_PITCH_BYTES : STEP * ITEM;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) rows[m][i] = ptx::load_shared(at[m][i] + step * STEP_BYTES);
    if constexpr (ITEM == 2) {
#pragma unroll
      for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 next = ptx::load_shared_if(odd[m], at[m][i] + step * STEP_BYTES + 4);
          rows[m][i] = __byte_perm(rows[m][i], next, odd[m] ? 0x5432 : 0x3210);
        }
    }
  }
};

/// Bytes from the beginning of a stage's grad_output to a channel's pixel, both counted from the stage's first.
__device__ __forceinline__ u32 output_offset(int channel, int pixel) {
  if constexpr (!CHANNELS_LAST) return channel % PLANES * OUTPUT_BOX_BYTES + channel / PLANES * OUTPUT_PITCH_BYTES + pixel * ITEM;
  return channel / BOX * OUTPUT_BOX_BYTES + pixel * OUTPUT_PITCH_BYTES + ((channel % BOX / 4 ^ pixel % 8) * 4 + channel % 4) * 4;
}

using Sums = float[M_TILES][N / 2];

__device__ __forceinline__ void begin_multiplies(Sums& sums, const AFragments& rows, ptx::u64 input) {
  ptx::fence_wgmma();
#pragma unroll
  for (int m = 0; m < M_TILES; ++m) ptx::wgmma_from_registers<N, PRECISION>(sums[m], rows[m], input);
  ptx::commit_wgmma();
}

/// Multiplies one row of grad_output.
__device__ __forceinline__ void multiply_row(const GradWeightStride1Sizes& sizes, Sums& sums, const Ring& ring, const u32 (&offsets)[M_TILES][2], int row) {
  const AAddresses addresses(ring.output() + misalignment(sizes, row, threadIdx.x % 32 / 4 % PLANES) * ITEM, offsets);
  const ptx::u64 input = ptx::swizzled_descriptor<BOX_ROW_BYTES>(ring.rows(), 16, 8 * BOX_ROW_BYTES);
  const auto input_at = [&](int i) { return input + (i * STEP / BOX * BOX_PITCH + i * STEP % BOX * ITEM) / 16; };
  AFragments even, odd;
  addresses.load(even, 0);
#pragma unroll
  for (int i = 0; i < STEPS; i += 2) {
    begin_multiplies(sums, even, input_at(i));
    if (i > 0) ptx::wait_wgmma<1>();
    addresses.load(odd, i + 1);
    begin_multiplies(sums, odd, input_at(i + 1));
    ptx::wait_wgmma<1>();
    if (i + 2 < STEPS) addresses.load(even, i + 2);
  }
  ptx::wait_wgmma<0>();
}

/// Stores a split's sums, or adds to those that are stored.
__device__ __forceinline__ void store(const Sums& sums, const Place& place, int warpgroup, int warp, int lane, float* gradient, bool add) {
  gradient += static_cast<long long>(place.split) * IN_CHANNELS * TAPS * CO_GROUP;
#pragma unroll
  for (int m = 0; m < M_TILES; ++m) {
    const int fragment = place.first_fragment + (warpgroup * M_TILES + m) * 4 + warp, kw = fragment % KERNEL_W;
    const int co = fragment / KERNEL_W * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < N / 8; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int col = j * 8 + lane % 4 * 2 + r % 2, ci = place.ci + col % TILE_CI;
        const int kh = place.tap_row + HALO_ROWS - j * 8 / TILE_CI;
        if (fragment >= FRAGMENTS || co + r / 2 * 8 >= CO_GROUP || ci >= CI_GROUP || kh >= KERNEL_H) continue;
        float* to = gradient + (static_cast<long long>(place.group * CI_GROUP + ci) * TAPS + kh * KERNEL_W + kw) * CO_GROUP + co + r / 2 * 8;
        *to = add ? *to + sums[m][j * 4 + r] : sums[m][j * 4 + r];
      }
  }
}

/// The consumer, one warp.
__device__ __forceinline__ void consume(Ring ring, const Place& place, const GradWeightStride1Sizes& sizes, int segments, float* gradient) {
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0), warpgroup = warp / 4;
  u32 offsets[M_TILES][2];
#pragma unroll
  for (int m = 0; m < M_TILES; ++m) {
    const int number = place.first_fragment + (warpgroup * M_TILES + m) * 4 + warp % 4, fragment = number < FRAGMENTS ? number : FRAGMENTS - 1;
    const int channel = fragment / KERNEL_W * 16 - place.first_channel() + lane / 4;
    // In 16 bits a word is two pixels. In channels_last a step's pixels have the order in which the input is transposed.
    const int pixel = fragment % KERNEL_W + lane % 4 * (CHANNELS_LAST ? 2 : 4 / ITEM);
    offsets[m][0] = output_offset(channel, pixel);
    offsets[m][1] = CHANNELS_LAST ? output_offset(channel, pixel + 1) : 0;
  }
  Ring before = ring;  // the stage that is free once this one's row is multiplied
  int number = 0;      // stages that have arrived
  bool add = false;
  for (int c = place.split; c < segments;) {
    Sums sums;
#pragma unroll
    for (auto& m_tile : sums)
#pragma unroll
      for (float& sum : m_tile) sum = 0.f;
    for (int flush = 0; flush < sizes.flush && c < segments; ++flush, c += sizes.splits) {
      const Segment segment(sizes, c);
#pragma unroll 1
      for (int i = 0; i < segment.rows + HALO_ROWS; ++i, ++number) {
        ptx::wait_for_phase(ring.full(), ring.parity);
        if (i >= HALO_ROWS) multiply_row(sizes, sums, ring, offsets, segment.begin + i - HALO_ROWS);
        if (number >= HALO_ROWS) {
          __syncwarp();
          if (lane == 0) ptx::arrive(before.empty());
          before.advance();
        }
        ring.advance();
      }
    }
    if (c >= segments) ptx::let_next_launch_start();
    store(sums, place, warpgroup, warp % 4, lane, gradient, add);
    add = true;
  }
}

extern "C" __global__ void __launch_bounds__(CONSUMER_THREADS + 32 * PRODUCER_WARPS, 1)
    grad_weight_stride1(const __grid_constant__ TensorMap input, const __grid_constant__ TensorMap grad_output,
                       float* __restrict__ gradient, const __grid_constant__ GradWeightStride1Sizes sizes) {
  extern __shared__ __align__(1024) u32 shared[];
  const u32 base = ptx::keep_in_register((ptx::shared_address(shared) + 1023) & ~1023u);
  const Ring ring(base);
  const RawRing raw(base);
  const Place place(blockIdx.x);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(input);
    ptx::prefetch_tensor_map(grad_output);
    ring.init(CHANNELS_LAST ? 1 + TRANSPOSE_WARPS : 1, CONSUMER_THREADS / 32);
    raw.init(1, TRANSPOSE_WARPS);
    ptx::fence_barrier_init();
  }
  __syncthreads();
  const int segments = sizes.batch * static_cast<int>(sizes.segments.value * sizes.column_tiles.value);
  if (threadIdx.x >= CONSUMER_THREADS) {
    ptx::shrink_registers<PRODUCER_REGISTERS>();
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0) - CONSUMER_THREADS / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == CONSUMER_THREADS + TRANSPOSE_WARPS * 32) produce(ring, raw, input, grad_output, place, sizes, segments);
    if constexpr (CHANNELS_LAST)
      if (warp < TRANSPOSE_WARPS) transpose_rows(ring, raw, place, sizes, segments, warp, lane);
  } else {
    ptx::grow_registers<CONSUMER_REGISTERS>();
    consume(ring, place, sizes, segments, gradient);
  }
}
