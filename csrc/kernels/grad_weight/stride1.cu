// Gradient of the weight at stride 1 on Hopper's warpgroup multiply (sm_90a), k = pixels of a row.
//
//   M = 16 output channels of one column of taps a warp, N = TILE_TAP_ROWS rows of taps x TILE_CI input channels; K = pixels
//
// What lies along k the multiplier takes from shared memory only at multiples of 32 bytes (and TF32 only along k). Rows of
// the input lie so, [128 bytes of pixels][channel][pixel], one after another, so that one multiply takes several of them,
// which are the rows of taps of one row of grad_output. grad_output comes from registers, which read it at any shift, so a
// column of taps is an address, and every warp has its own. TF32 is rounded by the copy engine.
//
// A block goes down strips of STRIP pixels, sizes.segment rows of grad_output at a time: each row of either tensor is brought
// once a strip. Slot s of the ring holds a row of both; the first TILE_TAP_ROWS - 1 slots' input lies once more behind the
// last, so that rows of taps always follow one another.
//
// Covers: float32 (TF32), float16, bfloat16; stride 1, dilation 1, any kernel and groups. NCHW: rows of the input of a
// multiple of 16 bytes; of grad_output too, or (LINES) no padding of columns, and grad_output's channels of a group in
// PLANES planes. channels_last: float32, channels of a group in fours.
// Slice s takes columns s, s + slices, ... of (image, segment, strip); its sums are gradient[slice][ci][tap][co], which
// grad_weight/pixel_rows_reduce.cu adds up.
#include "common/mma.cuh"
#include "common/wgmma.cuh"
#include "common/pipeline.cuh"
#include "common/tma.cuh"
#include "grad_weight/stride1_layout.cuh"
#include "grad_weight/stride1_producer.cuh"

constexpr int MULTIPLY_THREADS = 128 * WARPGROUPS;
constexpr int FILL_REGISTERS = WARPGROUPS == 3 ? 56 : 64, MULTIPLY_REGISTERS = WARPGROUPS == 3 ? 152 : 216;
constexpr int STEP = 32 / ITEM, STEPS = STRIP / STEP;

/// A step of a warp's rows of grad_output: [unit][word].
using Rows = u32[UNITS][4];

/// Where a lane finds its words of the first step.
struct Words {
  u32 at[UNITS][4];
  bool odd[UNITS];  // of 16 bits: whether a word's halves lie in two

  /// `offsets`: from where a row's box begins; in channels_last also the third word's.
  __device__ __forceinline__ Words(u32 output, const u32 (&offsets)[UNITS][2]) {
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 first = output + offsets[u][CHANNELS_LAST ? half : 0] + (CHANNELS_LAST ? 0 : half * 16);
        at[u][half * 2] = first & ~3u;
        // Eight channels further on are two pieces of 16 bytes, and channels begin at multiples of 16.
        at[u][half * 2 + 1] = CHANNELS_LAST ? first ^ 32 : (first & ~3u) + 8 / PLANES * OUTPUT_PITCH_BYTES;
      }
      odd[u] = (output + offsets[u][0]) & 2;
    }
  }

  __device__ __forceinline__ void load(Rows& rows, int step) const {
    constexpr int STEP_BYTES = CHANNELS_LAST ? STEP * OUTPUT_PITCH_BYTES : STEP * ITEM;
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
#pragma unroll
      for (int i = 0; i < 4; ++i) rows[u][i] = ptx::load_shared(at[u][i] + step * STEP_BYTES);
    if constexpr (ITEM == 2) {
#pragma unroll
      for (int u = 0; u < UNITS; ++u)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 next = ptx::load_shared_if(odd[u], at[u][i] + step * STEP_BYTES + 4);
          rows[u][i] = __byte_perm(rows[u][i], next, odd[u] ? 0x5432 : 0x3210);
        }
    }
  }
};

/// Bytes from where a slot of grad_output begins to a channel's pixel, counted from the first of either.
__device__ __forceinline__ u32 output_offset(int channel, int pixel) {
  if constexpr (!CHANNELS_LAST) return channel % PLANES * OUTPUT_BOX_BYTES + channel / PLANES * OUTPUT_PITCH_BYTES + pixel * ITEM;
  return channel / BOX * OUTPUT_BOX_BYTES + pixel * OUTPUT_PITCH_BYTES + ((channel % BOX / 4 ^ pixel % 8) * 4 + channel % 4) * 4;
}

using Sums = float[UNITS][N / 2];

__device__ __forceinline__ void begin_multiplies(Sums& sums, const Rows& rows, ptx::u64 input) {
  ptx::fence_wgmma();
#pragma unroll
  for (int u = 0; u < UNITS; ++u) ptx::wgmma_from_registers<N, PRECISION>(sums[u], rows[u], input);
  ptx::commit_wgmma();
}

/// The multiplies of one row of grad_output.
__device__ __forceinline__ void multiply_row(const GradWeightStride1Sizes& sizes, Sums& sums, const Ring& ring, const u32 (&offsets)[UNITS][2], int row) {
  const Words words(ring.output() + lead(sizes, row, threadIdx.x % 32 / 4 % PLANES) * ITEM, offsets);
  const ptx::u64 input = ptx::swizzled_descriptor<BOX_ROW_BYTES>(ring.rows(), 16, 8 * BOX_ROW_BYTES);
  const auto input_at = [&](int i) { return input + (i * STEP / BOX * BOX_PITCH + i * STEP % BOX * ITEM) / 16; };
  Rows even, odd;
  words.load(even, 0);
#pragma unroll
  for (int i = 0; i < STEPS; i += 2) {
    begin_multiplies(sums, even, input_at(i));
    if (i > 0) ptx::wait_wgmma<1>();
    words.load(odd, i + 1);
    begin_multiplies(sums, odd, input_at(i + 1));
    ptx::wait_wgmma<1>();
    if (i + 2 < STEPS) words.load(even, i + 2);
  }
  ptx::wait_wgmma<0>();
}

/// Set a slice's sums, or add to them.
__device__ __forceinline__ void store(const Sums& sums, const Place& place, int warpgroup, int warp, int lane, float* gradient, bool add) {
  gradient += static_cast<long long>(place.slice) * IN_CHANNELS * TAPS * CO_GROUP;
#pragma unroll
  for (int u = 0; u < UNITS; ++u) {
    const int granule = place.first_granule + (warpgroup * UNITS + u) * 4 + warp, kw = granule % KERNEL_W;
    const int co = granule / KERNEL_W * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < N / 8; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int col = j * 8 + lane % 4 * 2 + r % 2, ci = place.ci + col % TILE_CI;
        const int kh = place.tap_row + LAG - j * 8 / TILE_CI;
        if (granule >= GRANULES || co + r / 2 * 8 >= CO_GROUP || ci >= CI_GROUP || kh >= KERNEL_H) continue;
        float* to = gradient + (static_cast<long long>(place.group * CI_GROUP + ci) * TAPS + kh * KERNEL_W + kw) * CO_GROUP + co + r / 2 * 8;
        *to = add ? *to + sums[u][j * 4 + r] : sums[u][j * 4 + r];
      }
  }
}

/// A warp that multiplies.
__device__ __forceinline__ void multiply_and_store(Ring ring, const Place& place, const GradWeightStride1Sizes& sizes, int columns, float* gradient) {
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0), warpgroup = warp / 4;
  u32 offsets[UNITS][2];
#pragma unroll
  for (int u = 0; u < UNITS; ++u) {
    const int number = place.first_granule + (warpgroup * UNITS + u) * 4 + warp % 4, granule = number < GRANULES ? number : GRANULES - 1;
    const int channel = granule / KERNEL_W * 16 - place.first_channel() + lane / 4;
    // A word is two pixels of 16 bits. In channels_last a step's pixels come in the order in which the input is turned.
    const int pixel = granule % KERNEL_W + lane % 4 * (CHANNELS_LAST ? 2 : 4 / ITEM);
    offsets[u][0] = output_offset(channel, pixel);
    offsets[u][1] = CHANNELS_LAST ? output_offset(channel, pixel + 1) : 0;
  }
  Ring before = ring;  // the slot that is free when this one's row is multiplied
  int number = 0;      // of slots that came
  bool add = false;
  for (int c = place.slice; c < columns;) {
    Sums sums;
#pragma unroll
    for (auto& unit : sums)
#pragma unroll
      for (float& sum : unit) sum = 0.f;
    for (int flush = 0; flush < sizes.flush && c < columns; ++flush, c += sizes.splits) {
      const Column column(sizes, c);
#pragma unroll 1
      for (int i = 0; i < column.rows + LAG; ++i, ++number) {
        ptx::wait_for_phase(ring.full(), ring.parity);
        if (i >= LAG) multiply_row(sizes, sums, ring, offsets, column.begin + i - LAG);
        if (number >= LAG) {
          __syncwarp();
          if (lane == 0) ptx::arrive(before.empty());
          before.advance();
        }
        ring.advance();
      }
    }
    if (c >= columns) ptx::let_next_launch_start();
    store(sums, place, warpgroup, warp % 4, lane, gradient, add);
    add = true;
  }
}

extern "C" __global__ void __launch_bounds__(MULTIPLY_THREADS + 32 * FILL_WARPS, 1)
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
    Ring each = ring;
    for (int s = 0; s < SLOTS; ++s, each.advance()) {
      ptx::init_barrier(each.full(), CHANNELS_LAST ? 1 + TURN_WARPS : 1);
      ptx::init_barrier(each.empty(), MULTIPLY_THREADS / 32);
    }
    RawRing each_raw = raw;
    for (int s = 0; s < RAW_SLOTS; ++s, each_raw.advance()) {
      ptx::init_barrier(each_raw.full(), 1);
      ptx::init_barrier(each_raw.empty(), TURN_WARPS);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();
  const int columns = sizes.batch * static_cast<int>(sizes.segments.value * sizes.column_tiles.value);
  if (threadIdx.x >= MULTIPLY_THREADS) {
    ptx::shrink_registers<FILL_REGISTERS>();
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0) - MULTIPLY_THREADS / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == MULTIPLY_THREADS + TURN_WARPS * 32) ask(ring, raw, input, grad_output, place, sizes, columns);
    if constexpr (CHANNELS_LAST)
      if (warp < TURN_WARPS) turn_rows(ring, raw, place, sizes, columns, warp, lane);
  } else {
    ptx::grow_registers<MULTIPLY_REGISTERS>();
    multiply_and_store(ring, place, sizes, columns, gradient);
  }
}
