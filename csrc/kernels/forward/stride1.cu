// Transposed convolution of stride 1, NCHW, on Hopper's wgmma (sm_90a): M = 64 pixels of a row for each warpgroup, N =
// TILE_CHANNELS output channels (STACKED: those of every row of taps), K = input channels.
//
// In TF32 the multiplier reads from shared memory only operands that are contiguous along k, and in NCHW channels are not; in
// 16 bits it reads pixels only from multiples of 16 bytes on. Pixels therefore come from registers, into which a warp reads
// them at any shift. It multiplies what it has read with the weights of every row of taps: the sums of each row of taps belong
// to another row of the output. Blocks are persistent. A work tile is a segment of rows of the output in a column tile of 64
// WARPGROUPS pixels. Each input row of a work tile is loaded once, and the weights of all taps stay in shared memory.
//
// Input row i of a work tile contributes to the output rows i - a, a = 0 .. KERNEL_H - 1, whose sums lie in slot (i - a) %
// KERNEL_H. Then output row i - KERNEL_H + 1 is complete. forward/stride1_weights.cuh has the layout of the weights, with a =
// KERNEL_H - 1 - kh and b = KERNEL_W - 1 - kw. With STACKED, a goes backwards from 0 modulo KERNEL_H, 2 KERNEL_H - 1 times, so
// that the rows of taps are contiguous in the order of the slots, whichever slot is first. A row of the input is
// [PLANES][channel][PITCH pixels]: a plane holds every PLANES-th channel, whose distance in memory is a multiple of 16 bytes.
//
// In 16 bits a word holds two pixels of a channel, but the multiplier needs two channels of a pixel: rows g and g + 8 of a warp
// are therefore pixels 2 g and 2 g + 1.
//
// Covers: float32 (TF32, rounded by the copy engine), float16, bfloat16; dilation 1, one group; rows of the input that are a
// multiple of 16 bytes, or (UNALIGNED_ROWS) no tap beyond the ends of a row; all weights of TILE_CHANNELS channels fit shared
// memory.
#include "common/mma.cuh"
#include "common/epilogue.cuh"
#include "common/wgmma.cuh"
#include "common/pipeline.cuh"
#include "common/tma.cuh"
#include "common/stages.cuh"
#include "common/static_for.cuh"
#include "forward/stride1_weights.cuh"
#include "common/sizes.cuh"

using ptx::u32;

constexpr int TILE_COLS = 64 * WARPGROUPS;
/// The distance from an output row and column to the first input row and column that a tap reads.
constexpr int FIRST_ROW = PADDING_H - (KERNEL_H - 1), FIRST_COL = PADDING_W - (KERNEL_W - 1);

/// Elements of 16 bytes: a box begins at multiples of them.
constexpr int ALIGNMENT = 16 / ITEM;
constexpr int PITCH_BYTES = PITCH * ITEM, PLANE_COPIED = K_CHANNELS / PLANES * PITCH_BYTES, PLANE_BYTES = round_up(PLANE_COPIED, 128);
constexpr int ROW_COPIED = PLANES * PLANE_COPIED, ROW_BYTES = PLANES * PLANE_BYTES;
constexpr int ROWS_AT = WEIGHT_BYTES, BARRIERS = ROWS_AT + STAGES * ROW_BYTES, WEIGHT_BARRIER = BARRIERS + STAGES * 16;
/// The shifts of the tile's channels in float32, then their scales.
constexpr int FACTORS = WEIGHT_BARRIER + 16;
static_assert(SHARED_BYTES == FACTORS + 2 * 4 * TILE_CHANNELS + 1024, "the plan and the kernel must agree");
static_assert(PITCH <= 256 && STAGES >= 2 && (PLANES == 1 || (PLANES == 2 && UNALIGNED_ROWS)));

constexpr int CONSUMER_THREADS = 128 * WARPGROUPS, PRODUCER_THREADS = 32;
/// A coordinate outside every tensor, from which the copy engine loads zeros.
constexpr int OUTSIDE = -(1 << 28);
/// Input channels of a multiply; multiplies of all channels; channels whose pixels a lane reads for half of a multiply.
constexpr int STEP = 32 / ITEM, STEPS = K_CHANNELS / STEP, LANE_CHANNELS = 4 / ITEM;
static_assert(STEPS % 2 == 0);

using Ring = StageRing<STAGES, ROWS_AT, ROW_BYTES, BARRIERS>;

/// A segment of rows of the output in a column tile of an image.
struct WorkTile {
  int image, col, begin, rows;

  __device__ __forceinline__ WorkTile(const Stride1Sizes& sizes, int number) {
    const int segments = sizes.column_tiles.quotient(number);
    col = sizes.column_tiles.remainder(number, segments) * TILE_COLS;
    image = sizes.segments.quotient(segments);
    begin = sizes.segments.remainder(segments, image) * sizes.segment;
    rows = begin + sizes.segment < sizes.out_height ? sizes.segment : sizes.out_height - begin;
  }
};

/// The pixels from the beginning of a row's box of a plane, at a multiple of 16 bytes, to the pixel that the first tap reads.
__device__ __forceinline__ int left_pad(const Stride1Sizes& sizes, int row, int plane) {
  const int first = UNALIGNED_ROWS ? row * (sizes.width & (ALIGNMENT - 1)) + plane * (sizes.pixels() & (ALIGNMENT - 1)) + FIRST_COL : FIRST_COL;
  // This is not negative, even for rows above the image.
  return first & (ALIGNMENT - 1);
}

/// The producer, which is one thread: issues the loads of all input rows of the block's work tiles, and of the weights.
__device__ __forceinline__ void produce(Ring ring, u32 weight_barrier, const TensorMap& input, const u32* packed, const Stride1Sizes& sizes,
                                     int tile, int first, int step) {
  bool weights = false;
  for (int c = first; c < sizes.columns; c += step) {
    const WorkTile work(sizes, c);
    for (int i = 0; i < work.rows + KERNEL_H - 1; ++i) {
      const int row = work.begin + FIRST_ROW + i;
      ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
      ptx::arrive_expect_tx(ring.full(), ROW_COPIED);
#pragma unroll
      for (int plane = 0; plane < PLANES; ++plane) {
        const int col = work.col + FIRST_COL - left_pad(sizes, row, plane);
        if constexpr (UNALIGNED_ROWS) {
          // The rows of another channel lie beside those of this one.
          const bool exists = row >= 0 && row < sizes.height;
          const int pixel = exists ? plane * sizes.pixels() + row * sizes.width + col : OUTSIDE;
          ptx::tma_load(ring.data() + plane * PLANE_BYTES, input, pixel, 0, work.image, ring.full());
        } else {
          ptx::tma_load(ring.data(), input, col, row, 0, work.image, ring.full());
        }
      }
      ring.advance();
      if (weights) continue;
      // The first row is being loaded while the launch that packs the weights ends.
      weights = true;
      ptx::wait_for_previous_launch();
      ptx::arrive_expect_tx(weight_barrier, WEIGHT_BYTES);
#pragma unroll 1
      for (int at = 0; at < WEIGHT_BYTES; at += PART_BYTES)
        ptx::bulk_copy(ring.base + at, packed + (static_cast<long long>(tile) * WEIGHT_BYTES + at) / 4, PART_BYTES, weight_barrier);
    }
  }
}

/// The pixels of a warp for one multiply: operand A of a wgmma.
using Rows = u32[4];
/// The sums of a thread: [slot][sum].
using Sums = float[KERNEL_H][TILE_CHANNELS / 2];

/// The addresses of a lane's pixels of a row, for each of its first channels.
using Addresses = u32[LANE_CHANNELS];

/// Reads the pixels of one multiply.
__device__ __forceinline__ void load_rows(Rows& rows, const Addresses& from, int step) {
  constexpr int STEP_BYTES = STEP / PLANES * PITCH_BYTES, HALF_BYTES = STEP_BYTES / 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int bytes = step * STEP_BYTES + half * HALF_BYTES;
    if constexpr (ITEM == 4) {
      rows[half * 2] = ptx::load_shared(from[0] + bytes);
      rows[half * 2 + 1] = ptx::load_shared(from[0] + bytes + 32);
    } else {
      u32 pairs[LANE_CHANNELS];
#pragma unroll
      for (int c = 0; c < LANE_CHANNELS; ++c) {
        // From an odd pixel on, the two pixels lie in two words.
        const bool odd = from[c] & 2;
        const u32 at = (from[c] & ~3u) + bytes, word = ptx::load_shared(at), next = ptx::load_shared_if(odd, at + 4);
        pairs[c] = __byte_perm(word, next, odd ? 0x5432 : 0x3210);
      }
      rows[half * 2] = ptx::low_halves(pairs[0], pairs[LANE_CHANNELS - 1]);
      rows[half * 2 + 1] = ptx::high_halves(pairs[0], pairs[LANE_CHANNELS - 1]);
    }
  }
}

/// Issues the multiplies of one step with every row of taps. `weights` describes those of column b and of the step's channels.
template <int PHASE>
__device__ __forceinline__ void begin_multiplies(Sums& sums, const Rows& rows, ptx::u64 weights) {
  ptx::fence_wgmma();
  if constexpr (STACKED) {
    constexpr int BEGIN = (KERNEL_H - PHASE) % KERNEL_H;
    ptx::wgmma_from_registers<KERNEL_H * TILE_CHANNELS, PRECISION>(&sums[0][0], rows, weights + BEGIN * CHANNEL_ROWS_BYTES / 16);
  } else {
    static_for<0, KERNEL_H>([&](auto slot) {
      constexpr int A = (PHASE - decltype(slot)::value + KERNEL_H) % KERNEL_H;
      ptx::wgmma_from_registers<TILE_CHANNELS, PRECISION>(sums[decltype(slot)::value], rows, weights + A * CHANNEL_ROWS_BYTES / 16);
    });
  }
  ptx::commit_wgmma();
}

/// Adds the products of one input row.
template <int PHASE>
__device__ __forceinline__ void multiply_row(Sums& sums, Addresses& from, u32 base) {
  Rows even, odd;
#pragma unroll 1
  for (int b = 0; b < KERNEL_W; ++b) {
    constexpr int CHUNKS = K_CHANNELS / CHUNK, CHUNK_STEPS = CHUNK / STEP;
    const ptx::u64 weights = ptx::swizzled_descriptor<CHUNK_BYTES>(base + b * CHUNKS * PART_BYTES, 16, 8 * CHUNK_BYTES);
    const auto weights_at = [&](int i) { return weights + (i / CHUNK_STEPS * PART_BYTES + i % CHUNK_STEPS * 32) / 16; };
    load_rows(even, from, 0);
#pragma unroll
    for (int i = 0; i < STEPS; i += 2) {
      begin_multiplies<PHASE>(sums, even, weights_at(i));
      // Waits for the multiplies before these, which read the registers that are loaded next.
      ptx::wait_wgmma<1>();
      load_rows(odd, from, i + 1);
      begin_multiplies<PHASE>(sums, odd, weights_at(i + 1));
      ptx::wait_wgmma<1>();
      if (i + 2 < STEPS) load_rows(even, from, i + 2);
    }
#pragma unroll
    for (u32& each : from) each += ITEM;
  }
  ptx::wait_wgmma<0>();
}

/// A consumer warp.
struct Consumer {
  Ring ring;
  u32 base;
  int lane, warp, first_channel;
  const Epilogue& epilogue;
  const float* factors;
  Element* output;
  const Stride1Sizes& sizes;

  /// Reads the factors of two neighbouring channels of the tile from shared memory.
  __device__ __forceinline__ void read_factors(Channel (&pair)[2], int channel) const {
    pair[0] = pair[1] = Channel{1, 0};
    if constexpr (HAS_BIAS || NORMALIZES) {
      const float2 shift = *reinterpret_cast<const float2*>(factors + channel);
      pair[0].shift = shift.x, pair[1].shift = shift.y;
    }
    if constexpr (NORMALIZES) {
      const float2 scale = *reinterpret_cast<const float2*>(factors + TILE_CHANNELS + channel);
      pair[0].scale = scale.x, pair[1].scale = scale.y;
    }
  }

  /// Multiplies input row i of a work tile, and stores the output row that it completes.
  template <int PHASE>
  __device__ __forceinline__ void multiply_input_row(Sums& sums, const WorkTile& work, int i) {
    // A lane has this pixel and, in float32, the one 8 further on, in 16 bits the next one.
    const int pixel = warp * 16 + lane / 4 * LANE_CHANNELS;
    Addresses from;
#pragma unroll
    for (int c = 0; c < LANE_CHANNELS; ++c) {
      const int channel = lane % 4 * LANE_CHANNELS + c, plane = channel % PLANES;
      from[c] = ring.data() + plane * PLANE_BYTES + channel / PLANES * PITCH_BYTES + (pixel + left_pad(sizes, work.begin + FIRST_ROW + i, plane)) * ITEM;
    }
    ptx::wait_for_phase(ring.full(), ring.parity);
    multiply_row<PHASE>(sums, from, base);
    __syncwarp();
    if (lane == 0) ptx::arrive(ring.empty());
    ring.advance();
    constexpr int DONE = (PHASE + 1) % KERNEL_H;
    const int row = work.begin + i - (KERNEL_H - 1);
    if (row >= work.begin) store(sums[DONE], work, row, work.col + pixel);
#pragma unroll
    for (float& sum : sums[DONE]) {
      sum = 0.f;
      // If the compiler knew that these are zero, it would keep them elsewhere and separate the multiplies.
      asm volatile("" : "+f"(sum));
    }
  }

  __device__ __forceinline__ void store(const float (&sums)[TILE_CHANNELS / 2], const WorkTile& work, int row, int col) const {
    // Decided once for all stores of a row.
    if (ITEM == 2 && sizes.out_width % 2 == 0) {
      store_row<true>(sums, work, row, col);
    } else {
      store_row<false>(sums, work, row, col);
    }
  }
  /// PAIRS: in 16 bits, two neighbouring pixels by one store, whose address is aligned where rows have an even number of pixels.
  template <bool PAIRS>
  __device__ __forceinline__ void store_row(const float (&sums)[TILE_CHANNELS / 2], const WorkTile& work, int row, int col) const {
    const int pixels = sizes.out_height * sizes.out_width;
    /// The distance from a lane's first pixel to its second.
    constexpr int NEXT = ITEM == 4 ? 8 : 1;
    const int channel = first_channel + lane % 4 * 2;
    const bool has_first = col < sizes.out_width, has_second = col + NEXT < sizes.out_width;
    Element* to = output + (static_cast<long long>(work.image) * OUT_CHANNELS + channel) * pixels + static_cast<long long>(row) * sizes.out_width + col;
#pragma unroll
    for (int j = 0; j < TILE_CHANNELS / 8; ++j) {
      Channel pair[2];
      read_factors(pair, j * 8 + lane % 4 * 2);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int at = j * 8 + r;
        if (OUT_CHANNELS % TILE_CHANNELS != 0 && channel + at >= OUT_CHANNELS) continue;
        const float first = apply_epilogue(sums[j * 4 + r], pair[r], epilogue), second = apply_epilogue(sums[j * 4 + 2 + r], pair[r], epilogue);
        // One multiply of 32 bits with an addition of 64 makes the address.
        Element* pixel = to + static_cast<long long>(pixels) * at;
        if constexpr (PAIRS && ITEM == 2) {
          if (has_first) __stcs(reinterpret_cast<u32*>(pixel), ptx::pack_pair<PRECISION>(first, second));
        } else {
          if (has_first) pixel[0] = store_as<Element>(first);
          if (has_second) pixel[NEXT] = store_as<Element>(second);
        }
      }
    }
  }

  __device__ __forceinline__ void run(u32 weight_barrier, int first, int step) {
    bool waits = true;
    for (int c = first; c < sizes.columns; c += step) {
      const WorkTile work(sizes, c);
      const int rows = work.rows + KERNEL_H - 1;
      if (waits) ptx::wait_for_phase(weight_barrier, 0);
      waits = false;
      Sums sums = {};
#pragma unroll 1
      for (int i = 0; i < rows; i += KERNEL_H)
        static_for<0, KERNEL_H>([&](auto phase) {
          constexpr int PHASE = decltype(phase)::value;
          if (PHASE == 0 || i + PHASE < rows) multiply_input_row<PHASE>(sums, work, i + PHASE);
        });
    }
  }
};

extern "C" __global__ void __launch_bounds__(CONSUMER_THREADS + PRODUCER_THREADS, 1)
    forward_stride1(const __grid_constant__ TensorMap input, const u32* __restrict__ packed, const __grid_constant__ Epilogue epilogue,
                   Element* __restrict__ output, const __grid_constant__ Stride1Sizes sizes) {
  extern __shared__ __align__(1024) u32 shared[];
  const u32 base = ptx::keep_in_register((ptx::shared_address(shared) + 1023) & ~1023u), weight_barrier = base + WEIGHT_BARRIER;
  float* factors = reinterpret_cast<float*>(shared) + (base - ptx::shared_address(shared) + FACTORS) / 4;
  const int tile = blockIdx.x % CHANNEL_TILES, first = blockIdx.x / CHANNEL_TILES, step = gridDim.x / CHANNEL_TILES;
  const Ring ring(base);
  if ((HAS_BIAS || NORMALIZES) && threadIdx.x < TILE_CHANNELS) {
    const int channel = tile * TILE_CHANNELS + threadIdx.x;
    const Channel each = load_channel(epilogue, channel, channel < OUT_CHANNELS);
    factors[threadIdx.x] = each.shift, factors[TILE_CHANNELS + threadIdx.x] = each.scale;
  }
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(input);
    Ring each = ring;
    for (int s = 0; s < STAGES; ++s, each.advance()) {
      ptx::init_barrier(each.full(), 1);
      ptx::init_barrier(each.empty(), CONSUMER_THREADS / 32);
    }
    ptx::init_barrier(weight_barrier, 1);
    ptx::fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x >= CONSUMER_THREADS) {
    if (threadIdx.x == CONSUMER_THREADS) produce(ring, weight_barrier, input, packed, sizes, tile, first, step);
  } else {
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0), lane = threadIdx.x % 32;
    Consumer{ring, base, lane, warp, tile * TILE_CHANNELS, epilogue, factors, output, sizes}.run(weight_barrier, first, step);
  }
}
