// Gradient of the weight (and of the bias) on Hopper (sm_90a), in 16 bits, both tensors in channels_last: the product of
// grad_weight_wgmma.cu, with both operands brought by the copy engine (TMA) as they lie in memory.
//
//   M = 64 input channels a warpgroup, N = WARP_N output channels, WARP_TAPS taps; K = 16 pixels a multiply
//
// Both operands lie across k, rows of 64 channels (grad_weight_boxes.cuh); a tap's shift of grad_output is only another
// start address. What of a box lies outside its tensor is zero. A box may hold channels of the next group: they make
// rows and columns of the product that nobody stores.
//
// The first THREADS threads multiply and store. Of the warp after them one thread asks for the boxes, through a ring of
// STAGES stages, and BIAS_THREADS more add up the bias from the stages as they pass.
//
// Covers: float16, bfloat16; channels in multiples of 8; strides up to 8; any kernel, padding, output padding, dilation,
// groups; tiles whose runs of 8 pixels lie in one piece. Flushes and slices as in grad_weight_mma.cu.
#include "mma.cuh"
#include "wgmma.cuh"
#include "pipeline.cuh"
#include "tma.cuh"
#include "grad_weight_layout.cuh"
#include "grad_weight_store.cuh"
#include "grad_weight_boxes.cuh"
#include "stage_ring.cuh"

static_assert(IS_16_BIT && CHANNELS_LAST && WARP_M == 16 && WARPS_M % 4 == 0 && WARPS_K == 1 && WARP_N % 32 == 0);
static_assert(WARPS_N == 1 || WARP_N % BOX_CHANNELS == 0);

constexpr int ASKING_THREADS = 32;
/// The bias: a thread adds up some pixels of 8 channels, for all taps of the block that count.
constexpr int BIAS_SHARERS = BIAS_THREADS / (BLOCK_N / 8);
static_assert(!WITH_BIAS || (BIAS_SHARERS > 0 && BIAS_THREADS % (BLOCK_N / 8) == 0));
constexpr int BIAS_SUMS = BARRIERS + 2 * STAGES * 8;
static_assert(SHARED_BYTES == BOX_ALIGNMENT + BIAS_SUMS + BIAS_THREADS * 32, "the plan and the kernel must agree");
static_assert(THROUGH_WORKSPACE || !STAGES_GRADIENT || STAGED_BYTES <= BARRIERS);

/// The tiles of a slice, one after the other.
struct Tiles {
  long long first;
  int count;

  __device__ __forceinline__ Tiles(const Place& place, long long batch) {
    const long long tiles = (batch + TILE_N - 1) / TILE_N * TILES_H * TILES_W;
    first = place.slice * tiles / SLICES;
    count = static_cast<int>((place.slice + 1) * tiles / SLICES - first);
  }
};

/// A box for this block, or, where the blocks of the cluster share it, one of every CLUSTER boxes for all of them.
template <bool SHARED>
__device__ __forceinline__ void ask_for_box(int number, u32 rank, u32 to, const TensorMap& map, int channel, int col, int row, int image,
                                            u32 barrier) {
  if constexpr (!SHARED) {
    ptx::copy_box(to, map, channel, col, row, image, barrier);
  } else if (number % CLUSTER == rank) {
    ptx::copy_box_to_blocks(to, map, channel, col, row, image, barrier, (1 << CLUSTER) - 1);
  }
}

/// Word that a stage has been read, to all that fill it.
__device__ __forceinline__ void release(u32 empty) {
  if constexpr (CLUSTER == 1) {
    ptx::arrive(empty);
  } else {
#pragma unroll
    for (int rank = 0; rank < CLUSTER; ++rank) ptx::arrive_at_block(empty, rank);
  }
}

/// One thread.
__device__ __forceinline__ void ask_for_boxes(Ring ring, const Place& place, const Tiles& tiles, const TensorMap& input,
                                              const TensorMap& grad_output) {
  const int input_channel = place.group * CI_GROUP + place.m0, output_channel = place.group * CO_GROUP + place.n0;
  const int base_row = TapsH::base(place.tap_block_h), base_col = TapsW::base(place.tap_block_w);
  const u32 rank = CLUSTER > 1 ? ptx::rank_in_cluster() : 0;
  ptx::prefetch_map(input);
  ptx::prefetch_map(grad_output);
#pragma unroll 1
  for (int index = 0; index < tiles.count; ++index, ring.advance()) {
    const long long tile = tiles.first + index;
    const int image = static_cast<int>(tile / (TILES_H * TILES_W)) * TILE_N;
    const int row = static_cast<int>(tile / TILES_W % TILES_H) * TILE_H, col = static_cast<int>(tile % TILES_W) * TILE_W;
    ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
    ptx::arrive_expecting(ring.full(), COPIED);
#pragma unroll
    for (int m = 0; m < INPUT_BLOCKS; ++m)
      ask_for_box<SHARES_INPUT>(m, rank, ring.input() + m * INPUT_BYTES, input, input_channel + m * BOX_CHANNELS, col, row, image,
                                ring.full());
#pragma unroll
    for (int box = 0; box < Boxes::COUNT; ++box) {
      const int n = box % Boxes::CHANNEL_BLOCKS, phase = box / Boxes::CHANNEL_BLOCKS;
      ask_for_box<SHARES_OUTPUT>(box, rank, ring.weights() + box * Boxes::BYTES, grad_output, output_channel + n * BOX_CHANNELS,
                                 col * STRIDE_W + base_col + Boxes::phase_col(phase % Boxes::PHASE_COLS),
                                 row * STRIDE_H + base_row + TapsH::residue(phase / Boxes::PHASE_COLS), image, ring.full());
    }
  }
}

/// BIAS_THREADS threads.
__device__ __forceinline__ void add_bias(Ring ring, const Place& place, const Tiles& tiles, char* shared, float* bias_partial) {
  const int thread = threadIdx.x - THREADS - ASKING_THREADS;
  const int sharer = thread / (BLOCK_N / 8), octet = thread % (BLOCK_N / 8);
  float sum[8] = {};
#pragma unroll 1
  for (int index = 0; index < tiles.count; ++index, ring.advance()) {
    ptx::wait_for_phase(ring.full(), ring.parity);
    const u32 block = ring.weights() + octet / 8 * Boxes::BYTES;
#pragma unroll 1
    for (int number = 0; number < BLOCK_TAPS; ++number) {
      if (!Tap::of(place, number).reads_once) continue;
      const u32 from = block + Boxes::tap_offset(number / TAP_COLS, number % TAP_COLS);
#pragma unroll 4
      for (int pixel = sharer; pixel < TILE_PIXELS; pixel += BIAS_SHARERS) {
        const u32 at = from + Boxes::position(pixel) * ROW_BYTES;
        const uint4 v = ptx::load_shared_vector(at + ((octet % 8 * 16) ^ (at / ROW_BYTES % 8 * 16)));
        const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[2 * i] += load_as(Element{static_cast<unsigned short>(words[i])});
          sum[2 * i + 1] += load_as(Element{static_cast<unsigned short>(words[i] >> 16)});
        }
      }
    }
    __syncwarp();
    if (thread % 32 == 0) release(ring.empty());
  }
  float* all = reinterpret_cast<float*>(shared + BIAS_SUMS);
#pragma unroll
  for (int c = 0; c < 8; ++c) all[thread * 8 + c] = sum[c];
  ptx::meet<2, BIAS_THREADS>();
  const int row = place.slice * BIAS_ROWS + place.tap_block_w * TapsH::BLOCKS + place.tap_block_h;
  for (int c = thread; c < BLOCK_N && place.n0 + c < CO_GROUP; c += BIAS_THREADS) {
    float total = 0.f;
    for (int i = 0; i < BIAS_SHARERS; ++i) total += all[i * BLOCK_N + c];
    bias_partial[row * OUT_CHANNELS + place.group * CO_GROUP + place.n0 + c] = total;
  }
}

/// Add 16 pixels for a warpgroup's taps from FIRST on. `b`: without a distance between blocks.
template <int FIRST>
__device__ __forceinline__ void multiply_taps(float (&sums)[FRAGMENTS][4], ptx::u64 a, ptx::u64 b, const int (&tap_offset)[WARP_TAPS]) {
  if constexpr (FIRST < WARP_TAPS) {
    constexpr int TAPS_JOINED = joined_taps(FIRST);
    constexpr ptx::u64 DISTANCE = static_cast<ptx::u64>(block_distance(FIRST, TAPS_JOINED) / 16) << 16;
    ptx::multiply<PRECISION, TAPS_JOINED * WARP_N, true, true>(sums[FIRST * N_FRAGMENTS], a, b + tap_offset[FIRST] + DISTANCE);
    multiply_taps<FIRST + TAPS_JOINED>(sums, a, b, tap_offset);
  }
}

/// THREADS threads.
__device__ __forceinline__ void multiply_and_store(Ring ring, const Place& place, const Tiles& tiles, char* shared, float4* partial,
                                                   Element* gradient) {
  const int lane = threadIdx.x % 32;
  // The same for all threads of a warpgroup, which the compiler should know.
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
  const int warp = threadIdx.x / 32;
  const WarpPlace at(warpgroup * 4);
  int tap_offset[WARP_TAPS];
#pragma unroll
  for (int i = 0; i < WARP_TAPS; ++i) tap_offset[i] = ::tap_offset(at.t * WARP_TAPS + i) / 16;
  const u32 input_first = at.m / 4 * INPUT_BYTES, output_first = at.n * (WARP_N / BOX_CHANNELS) * Boxes::BYTES;

  int index = 0;
  do {
    const int first = index, end = FLUSH && index + FLUSH < tiles.count ? index + FLUSH : tiles.count;
    float sums[FRAGMENTS][4];
#pragma unroll
    for (auto& fragment : sums)
#pragma unroll
      for (float& sum : fragment) sum = 0.f;
#pragma unroll 1
    for (; index < end; ++index) {
      ptx::wait_for_phase(ring.full(), ring.parity);
      ptx::fence_sums();
      const ptx::u64 a = ptx::swizzled_descriptor(ring.input() + input_first, INPUT_BYTES, 8 * ROW_BYTES);
      const ptx::u64 b = ptx::swizzled_descriptor(ring.weights() + output_first, 0, OUT_GROUP * ROW_BYTES);
      // Rolled, the compiler would wait between the multiplies of several flushes.
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
        multiply_taps<0>(sums, a + step * (STEP * ROW_BYTES / 16), b + Boxes::position(step * STEP) * (ROW_BYTES / 16), tap_offset);
      ptx::commit_multiplies();
      ptx::wait_multiplies<1>();
      if (index > first && lane == 0) release(ring.empty_before());
      ring.advance();
    }
    ptx::wait_multiplies<0>();
    if (lane == 0) release(ring.empty_before());
    if (end == tiles.count) ptx::let_next_launch_start();
    if constexpr (THROUGH_WORKSPACE) {
      store_partial(sums, place, warp, lane, place.slice, partial, first > 0);
    } else {
      // Everything has been multiplied and added: the stages are free.
      __syncthreads();
      store_gradient(sums, place, warp, lane, reinterpret_cast<float*>(shared), gradient);
    }
  } while (index < tiles.count);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS + ASKING_THREADS + BIAS_THREADS, 1)
    grad_weight_boxes(const __grid_constant__ TensorMap input, const __grid_constant__ TensorMap grad_output,
                      Element* __restrict__ gradient, float4* __restrict__ partial, float* __restrict__ bias_partial, long long batch) {
  extern __shared__ __align__(1024) char memory[];
  char* const shared = memory + (BOX_ALIGNMENT - ptx::shared_address(memory) % BOX_ALIGNMENT) % BOX_ALIGNMENT;
  Ring ring(ptx::pinned(ptx::shared_address(shared)));
  const Place place = Place::of(place_number(blockIdx.x));
  const Tiles tiles(place, batch);
  const bool adds_bias = WITH_BIAS && place.m0 == 0;
  if (threadIdx.x == 0) {
    // Blocks of the cluster that add up the bias.
    const int adders = !WITH_BIAS ? 0 : SHARES_OUTPUT ? place.m0 / BLOCK_M < CLUSTER : place.m0 == 0 ? CLUSTER : 0;
    Ring each = ring;
    for (int s = 0; s < STAGES; ++s, each.advance()) {
      ptx::set_up_barrier(each.full(), 1);
      ptx::set_up_barrier(each.empty(), (CLUSTER * THREADS + adders * BIAS_THREADS) / 32);
    }
    ptx::publish_barriers();
  }
  if constexpr (CLUSTER > 1) {
    ptx::meet_cluster();
  } else {
    __syncthreads();
  }

  if (threadIdx.x < THREADS) {
    multiply_and_store(ring, place, tiles, shared, partial, gradient);
  } else {
    if (threadIdx.x == THREADS) ask_for_boxes(ring, place, tiles, input, grad_output);
    if constexpr (WITH_BIAS)
      if (adds_bias && threadIdx.x >= THREADS + ASKING_THREADS) add_bias(ring, place, tiles, shared, bias_partial);
    __syncwarp();
    if constexpr (!THROUGH_WORKSPACE) __syncthreads();
  }
  // A block stays as long as others of its cluster may write to it.
  if constexpr (CLUSTER > 1) ptx::meet_cluster();
}
