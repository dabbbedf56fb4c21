// Gradient of the input, strides above 1, with wgmma (sm_90a): the implicit GEMM of forward/implicit_gemm_wgmma.cu. The stride
// is in what it reads (grad_input/implicit_gemm_layout.cuh) instead of in what it writes.
//
//   M = 64 channels of the input for each warpgroup: the packed weights (forward/implicit_gemm_pack.cu, OF_GRAD_INPUT)
//   N = positions, each one pixel of grad_input: WARP_ROWS rows of 8, or, where that is 1 or with FLAT, 8 * WARP_COLS in a
//       row, or with NARROW maps 8 of each of WARP_IMAGES images
//   K = taps x channels of the output, by the phases of chunks of CHUNK_WORDS words through a ring of STAGES stages
//
// Each phase of grad_output that has taps is an image of its own in shared memory, so a tap is a start address.
//
// Blocks are persistent: each computes one tile after another. Its first CONSUMER_THREADS threads multiply and store, M_PARTS
// times 64 channels for each warpgroup. The PRODUCER_THREADS after them load the input, and one of those issues the copies of
// the weights (bulk copies of one segment each). Barriers in shared memory say which stages are full and which are empty, so
// that producers load the next tile while consumers store this one.
//
// Covers: float32 (TF32, or IEEE by three TF32 products), float16, bfloat16; NCHW, and channels_last with channels of 16-byte
// multiples; any kernel, stride, padding, output padding, dilation and groups with at most 16 phases of an axis that have
// taps. The input is aligned to 16 bytes. PARTIAL: as in forward/implicit_gemm_mma.cu.
#include "common/mma.cuh"
#include "common/wgmma.cuh"
#include "common/pipeline.cuh"
#include "forward/implicit_gemm_taps.cuh"
#include "grad_input/implicit_gemm_layout.cuh"
#include "forward/implicit_gemm_copy.cuh"
#include "grad_input/implicit_gemm_wgmma_producer.cuh"
#include "forward/implicit_gemm_store.cuh"
#include "forward/epilogue_warp.cuh"
#include "common/static_for.cuh"

constexpr int CONSUMER_THREADS = THREADS / M_PARTS, CONSUMER_WARPS = CONSUMER_THREADS / 32;
static_assert((FRAGMENT_W == 8 || NARROW) && WARPS_M % (4 * M_PARTS) == 0 && WARP_M_TILES == 1);

/// Positions of one multiply, and multiplies for one tap of one image.
constexpr bool ALONG_ROW = FLAT || (WARP_ROWS == 1 && !NARROW);
constexpr int MULTIPLY_POSITIONS = 8 * (ALONG_ROW ? WARP_COLS : NARROW ? WARP_IMAGES : WARP_ROWS);
constexpr int MULTIPLY_IMAGES = NARROW ? 1 : WARP_IMAGES;
constexpr int MULTIPLIES = ALONG_ROW ? 1 : NARROW ? WARP_ROWS : WARP_COLS;
/// Pixels from 8 positions of a multiply to the next 8.
constexpr int GROUP_PITCH = ALONG_ROW ? 8 : NARROW ? IMAGE_PITCH : ROW_PITCH;

/// Descriptors count in 16 bytes: one pixel of a plane of the input, or one channel of a plane of weights.
constexpr int WEIGHT_PLANE = 64;

// ---- shared memory, in bytes from its beginning --------------------------------------------------------------

constexpr int STAGED = STAGES * STAGE_WORDS * 4;
constexpr int BARRIERS = STAGED + CONSUMER_WARPS * STAGED_BYTES;
static_assert(SHARED_BYTES == BARRIERS + 2 * STAGES * 8, "the plan and the kernel must agree");

/// Registers of a thread, in multiples of eight: what the hardware gives each at first, and what a consumer has after the
/// producers gave some back.
constexpr int FIRST_REGISTERS = min_of(255, 65536 / (BLOCKS_PER_MULTIPROCESSOR * (CONSUMER_THREADS + PRODUCER_THREADS))) / 8 * 8;
constexpr int CONSUMER_REGISTERS =
    min_of(240, FIRST_REGISTERS + (FIRST_REGISTERS - PRODUCER_REGISTERS) * PRODUCER_THREADS / CONSUMER_THREADS / 8 * 8);
constexpr bool MOVE_REGISTERS = PRODUCER_REGISTERS < FIRST_REGISTERS;
static_assert(CONSUMER_THREADS % 128 == 0 && PRODUCER_THREADS % 128 == 0, "registers move by whole warpgroups");

#include "common/stage_ring.cuh"

/// One work tile: block b computes work tiles b, b + gridDim.x, and so on.
struct Work {
  int split, first_chunk, end_chunk, m_block, group;
  Origin origin;

  __device__ __forceinline__ Work(int index, const Sizes& sizes) : split(0), first_chunk(0), end_chunk(CHUNKS) {
    if constexpr (PARTIAL) {
      const int whole = sizes.splits.quotient(index);
      split = sizes.splits.remainder(index, whole);
      first_chunk = sizes.splits.quotient(split * CHUNKS);
      end_chunk = sizes.splits.quotient((split + 1) * CHUNKS);
      index = whole;
    }
    m_block = index % M_BLOCKS;
    index /= M_BLOCKS;
    group = index % GROUPS;
    origin = tile_origin(index / GROUPS, sizes);
  }
  __device__ __forceinline__ static int count(const Sizes& sizes) {
    return sizes.tiles * (GROUPS * M_BLOCKS) * (PARTIAL ? static_cast<int>(sizes.splits.value) : 1);
  }
};

// ---- the producers ----------------------------------------------------------------------------------------------

/// Issues the copy of the weights of one phase of a chunk. One thread calls it.
template <int PHASE>
__device__ __forceinline__ void load_weights(const Ring& ring, const u32* packed, const Work& work, int chunk) {
  constexpr int PHASE_WEIGHTS = CHUNK_STEPS * phase_taps(PHASE) * TAP_WORDS;
  const long long before = static_cast<long long>(taps_before_phase(PHASE)) * GROUPS * M_BLOCKS * STEPS * TAP_WORDS;
  ptx::arrive_expect_tx(ring.full(), PHASE_WEIGHTS * 4);
  ptx::bulk_copy(ring.weights(), packed + before + ((static_cast<long long>(work.group) * M_BLOCKS + work.m_block) * CHUNKS + chunk) * PHASE_WEIGHTS,
                 PHASE_WEIGHTS * 4, ring.full());
}

__device__ __forceinline__ void produce(u32 shared, const Element* input, const u32* packed, const Sizes& sizes) {
  Ring ring(shared);
  InputLoader loader(input, sizes);
  const int end = Work::count(sizes);
  const bool first_thread = threadIdx.x == CONSUMER_THREADS;
  bool waited = false, more = static_cast<int>(blockIdx.x) < end;
  if (more) {
    const Work work(static_cast<int>(blockIdx.x), sizes);
    loader.start_at(work.origin, work.group, work.first_chunk);
    static_for<0, PHASES_AHEAD>([&](auto phase) {
#pragma unroll
      for (int s = 0; s < SLOTS; ++s) loader.load<decltype(phase)::value>(s);
    });
  }
  for (int index = blockIdx.x; index < end; index += gridDim.x) {
    const Work work(index, sizes);
#pragma unroll 1
    for (int chunk = work.first_chunk; chunk < work.end_chunk; ++chunk)
      static_for<0, SOURCE_PHASES>([&](auto number) {
        constexpr int PHASE = decltype(number)::value, NEXT = (PHASE + PHASES_AHEAD) % SOURCE_PHASES;
        ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
        if (first_thread) {
          if (!waited) ptx::wait_for_previous_launch();
          waited = true;
          load_weights<PHASE>(ring, packed, work, chunk);
        }
        // What is loaded next may be of the next chunk, or of the next work tile.
        if constexpr (NEXT == 0) {
          if (chunk + 1 < work.end_chunk) {
            loader.next_chunk();
          } else if (index + static_cast<int>(gridDim.x) < end) {
            const Work next(index + static_cast<int>(gridDim.x), sizes);
            loader.start_at(next.origin, next.group, next.first_chunk);
          } else {
            more = false;
          }
        }
        // The registers of each slot are stored and at once loaded again.
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
          loader.store<PHASE>(s, ring.input());
          if (more) loader.load<NEXT>(s);
        }
        ptx::fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::arrive(ring.full());
        ring.advance();
      });
  }
}

// ---- the consumers -----------------------------------------------------------------------------------------

/// The accumulators of a warpgroup, 64 channels in each part.
struct AllSums {
  Sums part[M_PARTS];
};

/// Multiplies tap (KH, KW) and one step of k with all positions of the warpgroup. `weights`, `input`: descriptors of the
/// step's rounded numbers.
template <bool ADD, int KH, int KW>
__device__ __forceinline__ void multiply_tap(AllSums& all, ptx::u64 weights, ptx::u64 input) {
#pragma unroll
  for (int m = 0; m < M_PARTS; ++m)
#pragma unroll
    for (int image = 0; image < MULTIPLY_IMAGES; ++image)
#pragma unroll
      for (int i = 0; i < MULTIPLIES; ++i)
        ptx::wgmma<PRECISION, MULTIPLY_POSITIONS, ADD>(NARROW ? all.part[m].at(0, 0, 0, 0, i) : all.part[m].at(0, 0, image, i, 0),
                                                      weights + rank_in_phase(KH, KW) * (TAP_WORDS / 4) + m * (WARPS_M / M_PARTS) * 32,
                                                      input + tap_pixels(KH, KW) + image * IMAGE_PITCH + i * 8);
}

/// Adds one phase of a chunk. `three`: accumulators for the sums of three products (IEEE). `weights`: descriptor of the
/// warpgroup's weights. `input`: descriptor at the warpgroup's first position.
template <int PHASE>
__device__ __forceinline__ void multiply_phase(AllSums& sums, [[maybe_unused]] AllSums& three, ptx::u64 weights, ptx::u64 input) {
#pragma unroll
  for (int step = 0; step < CHUNK_STEPS; ++step)
    static_for<0, TAPS>([&](auto index) {
      constexpr int KH = decltype(index)::value / KERNEL_W, KW = decltype(index)::value % KERNEL_W;
      if constexpr (in_phase(PHASE, KH, KW)) {
        const ptx::u64 a = weights + step * phase_taps(PHASE) * (TAP_WORDS / 4), b = input + step * (STEP_WORDS / 4) * PLANE_PITCH;
        if constexpr (PARTS == 1) {
          multiply_tap<true, KH, KW>(sums, a, b);
        } else {
          // The tensor cores truncate their sums; adding them here rounds to nearest, once for the three products. Meanwhile
          // the other warpgroup multiplies.
          ptx::fence_wgmma();
          multiply_tap<false, KH, KW>(three, a, b + CHUNK_PLANES * PLANE_PITCH);
          multiply_tap<true, KH, KW>(three, a + BLOCK_M_TILES * (FRAGMENT_WORDS / 4), b);
          multiply_tap<true, KH, KW>(three, a, b);
          ptx::commit_wgmma();
          ptx::wait_wgmma<0>();
#pragma unroll
          for (int m = 0; m < M_PARTS; ++m) sums.part[m].add(three.part[m]);
        }
      }
    });
}

__device__ __forceinline__ void consume(u32 shared, char* memory, Out* output, const Sizes& sizes) {
  const int warp = threadIdx.x / 32, warp_m = warp % (WARPS_M / M_PARTS), warp_n = warp / (WARPS_M / M_PARTS);
  const int warp_w = warp_n % WARPS_W * (WARP_COLS * FRAGMENT_W);
  const int warp_h = warp_n / WARPS_W % WARPS_H * (WARP_ROWS * FRAGMENT_H);
  const int warp_image = warp_n / (WARPS_W * WARPS_H) * (WARP_IMAGES * FRAGMENT_N);
  const int first_pixel = warp_image * IMAGE_PITCH + warp_h * ROW_PITCH + warp_w + ALIGNMENT_POSITIONS;
  Out* staged = reinterpret_cast<Out*>(memory + STAGED + warp * STAGED_BYTES);
  // Signals that this warp's multiplies of a stage are done.
  const auto release = [](u32 barrier) {
    if (threadIdx.x % 32 == 0) ptx::arrive(barrier);
  };

  Ring ring(shared);
  const int end = Work::count(sizes);
  for (int index = blockIdx.x; index < end; index += gridDim.x) {
    const Work work(index, sizes);
    AllSums sums, three;
#pragma unroll
    for (int m = 0; m < M_PARTS; ++m) {
      sums.part[m].clear();
      if constexpr (PARTS == 2) three.part[m].clear();
    }
    // If this were unrolled, the compiler would wait between the first multiplies.
#pragma unroll 1
    for (int chunk = work.first_chunk; chunk < work.end_chunk; ++chunk)
      static_for<0, SOURCE_PHASES>([&](auto number) {
        constexpr int PHASE = decltype(number)::value;
        ptx::wait_for_phase(ring.full(), ring.parity);
        ptx::fence_wgmma();
        multiply_phase<PHASE>(sums, three, ptx::matrix_descriptor(ring.weights() + warp_m / 4 * 2048, WEIGHT_PLANE * 16, 128),
                              ptx::matrix_descriptor(ring.input() + first_pixel * 16, PLANE_PITCH * 16, GROUP_PITCH * 16));
        ptx::commit_wgmma();
        ptx::wait_wgmma<1>();
        if (PHASE > 0 || chunk > work.first_chunk) release(ring.empty_before());
        ring.advance();
      });
    ptx::wait_wgmma<0>();
    release(ring.empty_before());

    Out* to = output;
    if constexpr (PARTIAL) to += static_cast<long long>(work.split) * sizes.batch * OUT_CHANNELS * sizes.out_pixels();
#pragma unroll
    for (int m = 0; m < M_PARTS; ++m) {
      if (m > 0) __syncwarp();
      store_warp(sums.part[m], to, nullptr, staged, work.origin, work.group, work.m_block * BLOCK_CHANNELS,
                 (warp_m + m * (WARPS_M / M_PARTS)) * 16, warp_image, warp_h, warp_w, 0, 0, sizes);
    }
  }
}

extern "C" __global__ void __launch_bounds__(CONSUMER_THREADS + PRODUCER_THREADS, BLOCKS_PER_MULTIPROCESSOR)
    grad_input_implicit_gemm_wgmma(const Element* __restrict__ grad_output, const u32* __restrict__ packed, Out* __restrict__ grad_input,
                     const __grid_constant__ Sizes sizes) {
  extern __shared__ __align__(128) u32 memory[];
  const u32 shared = ptx::keep_in_register(ptx::shared_address(memory));
  if (threadIdx.x == 0) {
    Ring ring(shared);
    for (int s = 0; s < STAGES; ++s, ring.advance()) {
      // One arrival more expects the weights.
      ptx::init_barrier(ring.full(), 1 + PRODUCER_WARPS);
      ptx::init_barrier(ring.empty(), CONSUMER_WARPS);
    }
    ptx::fence_barrier_init();
  }
  if constexpr (NARROW && !INPUT_CHANNELS_LAST) {
    // Positions whose shifted column is outside the map stay zero: no thread writes them.
    const u32 zeros[4] = {0, 0, 0, 0};
    for (int i = threadIdx.x; i < STAGES * STAGE_WORDS / 4; i += CONSUMER_THREADS + PRODUCER_THREADS) ptx::store_shared<4>(shared + i * 16, zeros);
    ptx::fence_proxy_async();
  }
  __syncthreads();

  if (threadIdx.x >= CONSUMER_THREADS) {
    if constexpr (MOVE_REGISTERS) ptx::shrink_registers<PRODUCER_REGISTERS>();
    produce(shared, grad_output, packed, sizes);
  } else {
    if constexpr (MOVE_REGISTERS) ptx::grow_registers<CONSUMER_REGISTERS>();
    consume(shared, reinterpret_cast<char*>(memory), grad_input, sizes);
  }
}
