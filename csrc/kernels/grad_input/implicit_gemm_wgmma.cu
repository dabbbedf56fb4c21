// Gradient of the input, strides above 1, on Hopper's warpgroup multiply (sm_90a): the implicit GEMM of
// forward/implicit_gemm_wgmma.cu, with the stride in what it reads (grad_input/implicit_gemm_layout.cuh) instead of in what it writes.
//
//   M = 64 channels of the input a warpgroup: the packed weights (forward/implicit_gemm_pack.cu, OF_GRAD_INPUT)
//   N = cells, each one pixel of grad_input: WARP_ROWS rows of 8, or, where that is 1 or with FLAT, 8 * WARP_COLS in a
//       row, or with NARROW maps 8 of each of WARP_IMAGES images
//   K = taps x channels of the output, by slices of chunks of CHUNK_WORDS words through a ring of STAGES stages
//
// Each phase of grad_output that has taps is a picture of its own in shared memory, so a tap is a start address.
//
// A block stays and works on one tile after another. Its first MULTIPLYING threads multiply and store, M_PARTS times 64
// channels a warpgroup; the FILL_THREADS after them bring the input, and one of those asks for the weights (one run, by
// bulk copy). Barriers in shared memory say which stages are full and which empty, so that the next tile's slices come
// while this one's outputs leave.
//
// Covers: float32 (TF32, or IEEE by three TF32 products), float16, bfloat16; NCHW, and channels_last with 16-byte multiples of channels; any kernel,
// stride, padding, output padding, dilation, groups with at most 16 phases an axis that have taps. Input: 16-byte
// aligned. PARTIAL: as in forward/implicit_gemm_mma.cu.
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

constexpr int MULTIPLYING = THREADS / M_PARTS, MULTIPLYING_WARPS = MULTIPLYING / 32;
static_assert((FRAGMENT_W == 8 || NARROW) && WARPS_M % (4 * M_PARTS) == 0 && WARP_M_TILES == 1);

/// Cells of one multiply, and multiplies for one tap of one image.
constexpr bool ALONG_ROW = FLAT || (WARP_ROWS == 1 && !NARROW);
constexpr int MULTIPLY_CELLS = 8 * (ALONG_ROW ? WARP_COLS : NARROW ? WARP_IMAGES : WARP_ROWS);
constexpr int MULTIPLY_IMAGES = NARROW ? 1 : WARP_IMAGES;
constexpr int MULTIPLIES = ALONG_ROW ? 1 : NARROW ? WARP_ROWS : WARP_COLS;
/// Pixels from 8 cells of a multiply to the next 8.
constexpr int GROUP_PITCH = ALONG_ROW ? 8 : NARROW ? IMAGE_PITCH : ROW_PITCH;

/// Descriptors count in 16 bytes, which is one pixel of a plane, and one channel of a plane of weights.
constexpr int WEIGHT_PLANE = 64;

// ---- shared memory, in bytes from its beginning --------------------------------------------------------------

constexpr int STAGED = STAGES * STAGE_WORDS * 4;
constexpr int BARRIERS = STAGED + MULTIPLYING_WARPS * STAGED_BYTES;
static_assert(SHARED_BYTES == BARRIERS + 2 * STAGES * 8, "the plan and the kernel must agree");

/// Registers: what the hardware gives each thread at first, and what those that multiply have after the others gave
/// some back. In eights.
constexpr int FIRST_REGISTERS = min_of(255, 65536 / (BLOCKS_PER_MULTIPROCESSOR * (MULTIPLYING + FILL_THREADS))) / 8 * 8;
constexpr int MULTIPLY_REGISTERS =
    min_of(240, FIRST_REGISTERS + (FIRST_REGISTERS - FILL_REGISTERS) * FILL_THREADS / MULTIPLYING / 8 * 8);
constexpr bool MOVE_REGISTERS = FILL_REGISTERS < FIRST_REGISTERS;
static_assert(MULTIPLYING % 128 == 0 && FILL_THREADS % 128 == 0, "registers move by whole warpgroups");

#include "common/stage_ring.cuh"

/// What one turn of a block computes: block b takes turns b, b + gridDim.x, and so on.
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

// ---- those that fill -------------------------------------------------------------------------------------------

/// Ask for the weights of one slice of a chunk, by one thread.
template <int SLICE>
__device__ __forceinline__ void ask_for_weights(const Ring& ring, const u32* packed, const Work& work, int chunk) {
  constexpr int RUN = CHUNK_STEPS * slice_taps(SLICE) * TAP_WORDS;
  const long long before = static_cast<long long>(taps_before_slice(SLICE)) * GROUPS * M_BLOCKS * STEPS * TAP_WORDS;
  ptx::arrive_expect_tx(ring.full(), RUN * 4);
  ptx::bulk_copy(ring.weights(), packed + before + ((static_cast<long long>(work.group) * M_BLOCKS + work.m_block) * CHUNKS + chunk) * RUN,
                 RUN * 4, ring.full());
}

__device__ __forceinline__ void fill_stages(u32 shared, const Element* input, const u32* packed, const Sizes& sizes) {
  Ring ring(shared);
  InputFill fill(input, sizes);
  const int end = Work::count(sizes);
  const bool first_thread = threadIdx.x == MULTIPLYING;
  bool waited = false, more = static_cast<int>(blockIdx.x) < end;
  if (more) {
    const Work work(static_cast<int>(blockIdx.x), sizes);
    fill.aim(work.origin, work.group, work.first_chunk);
    static_for<0, FILL_AHEAD>([&](auto slice) {
#pragma unroll
      for (int s = 0; s < SLOTS; ++s) fill.load<decltype(slice)::value>(s);
    });
  }
  for (int index = blockIdx.x; index < end; index += gridDim.x) {
    const Work work(index, sizes);
#pragma unroll 1
    for (int chunk = work.first_chunk; chunk < work.end_chunk; ++chunk)
      static_for<0, SLICES>([&](auto number) {
        constexpr int SLICE = decltype(number)::value, NEXT = (SLICE + FILL_AHEAD) % SLICES;
        ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
        if (first_thread) {
          if (!waited) ptx::wait_for_previous_launch();
          waited = true;
          ask_for_weights<SLICE>(ring, packed, work, chunk);
        }
        // What is loaded next may be of the next chunk, or of other work.
        if constexpr (NEXT == 0) {
          if (chunk + 1 < work.end_chunk) {
            fill.next_chunk();
          } else if (index + static_cast<int>(gridDim.x) < end) {
            const Work next(index + static_cast<int>(gridDim.x), sizes);
            fill.aim(next.origin, next.group, next.first_chunk);
          } else {
            more = false;
          }
        }
        // Each place is stored and at once loaded again.
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
          fill.store<SLICE>(s, ring.input());
          if (more) fill.load<NEXT>(s);
        }
        ptx::fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::arrive(ring.full());
        ring.advance();
      });
  }
}

// ---- those that multiply ---------------------------------------------------------------------------------------

/// What a warpgroup sums up, 64 channels each.
struct AllSums {
  Sums part[M_PARTS];
};

/// The products of tap (KH, KW) and one step of k with all cells of the warpgroup. `weights`, `input`: of the step's
/// rounded numbers.
template <bool ADD, int KH, int KW>
__device__ __forceinline__ void multiply_tap(AllSums& all, ptx::u64 weights, ptx::u64 input) {
#pragma unroll
  for (int m = 0; m < M_PARTS; ++m)
#pragma unroll
    for (int image = 0; image < MULTIPLY_IMAGES; ++image)
#pragma unroll
      for (int i = 0; i < MULTIPLIES; ++i)
        ptx::wgmma<PRECISION, MULTIPLY_CELLS, ADD>(NARROW ? all.part[m].at(0, 0, 0, 0, i) : all.part[m].at(0, 0, image, i, 0),
                                                      weights + rank_in_slice(KH, KW) * (TAP_WORDS / 4) + m * (WARPS_M / M_PARTS) * 32,
                                                      input + tap_pixels(KH, KW) + image * IMAGE_PITCH + i * 8);
}

/// Add one slice of a chunk. `three`: for sums of three products (IEEE); `weights`: the warpgroup's; `input`: at the
/// warpgroup's first cell.
template <int SLICE>
__device__ __forceinline__ void multiply_slice(AllSums& sums, [[maybe_unused]] AllSums& three, ptx::u64 weights, ptx::u64 input) {
#pragma unroll
  for (int step = 0; step < CHUNK_STEPS; ++step)
    static_for<0, TAPS>([&](auto index) {
      constexpr int KH = decltype(index)::value / KERNEL_W, KW = decltype(index)::value % KERNEL_W;
      if constexpr (in_slice(SLICE, KH, KW)) {
        const ptx::u64 a = weights + step * slice_taps(SLICE) * (TAP_WORDS / 4), b = input + step * (STEP_WORDS / 4) * PLANE_PITCH;
        if constexpr (PARTS == 1) {
          multiply_tap<true, KH, KW>(sums, a, b);
        } else {
          // The multiplier truncates its sums; adding them here rounds to nearest, once for the three. Meanwhile the
          // other warpgroup multiplies.
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

__device__ __forceinline__ void multiply_and_store(u32 shared, char* memory, Out* output, const Sizes& sizes) {
  const int warp = threadIdx.x / 32, warp_m = warp % (WARPS_M / M_PARTS), warp_n = warp / (WARPS_M / M_PARTS);
  const int warp_w = warp_n % WARPS_W * (WARP_COLS * FRAGMENT_W);
  const int warp_h = warp_n / WARPS_W % WARPS_H * (WARP_ROWS * FRAGMENT_H);
  const int warp_image = warp_n / (WARPS_W * WARPS_H) * (WARP_IMAGES * FRAGMENT_N);
  const int first_pixel = warp_image * IMAGE_PITCH + warp_h * ROW_PITCH + warp_w + LEAD_CELLS;
  Out* staged = reinterpret_cast<Out*>(memory + STAGED + warp * STAGED_BYTES);
  // This warp's word that the multiplies of a stage are done.
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
    // Unrolled, the compiler would wait between the first multiplies.
#pragma unroll 1
    for (int chunk = work.first_chunk; chunk < work.end_chunk; ++chunk)
      static_for<0, SLICES>([&](auto number) {
        constexpr int SLICE = decltype(number)::value;
        ptx::wait_for_phase(ring.full(), ring.parity);
        ptx::fence_wgmma();
        multiply_slice<SLICE>(sums, three, ptx::matrix_descriptor(ring.weights() + warp_m / 4 * 2048, WEIGHT_PLANE * 16, 128),
                              ptx::matrix_descriptor(ring.input() + first_pixel * 16, PLANE_PITCH * 16, GROUP_PITCH * 16));
        ptx::commit_wgmma();
        ptx::wait_wgmma<1>();
        if (SLICE > 0 || chunk > work.first_chunk) release(ring.empty_before());
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

extern "C" __global__ void __launch_bounds__(MULTIPLYING + FILL_THREADS, BLOCKS_PER_MULTIPROCESSOR)
    grad_input_implicit_gemm_wgmma(const Element* __restrict__ grad_output, const u32* __restrict__ packed, Out* __restrict__ grad_input,
                     const __grid_constant__ Sizes sizes) {
  extern __shared__ __align__(128) u32 memory[];
  const u32 shared = ptx::keep_in_register(ptx::shared_address(memory));
  if (threadIdx.x == 0) {
    Ring ring(shared);
    for (int s = 0; s < STAGES; ++s, ring.advance()) {
      // One arrival expects the weights.
      ptx::init_barrier(ring.full(), 1 + FILL_WARPS);
      ptx::init_barrier(ring.empty(), MULTIPLYING_WARPS);
    }
    ptx::fence_barrier_init();
  }
  if constexpr (NARROW && !INPUT_CHANNELS_LAST) {
    // Cells whose shifted column is outside the map stay zero: nothing writes them.
    const u32 zeros[4] = {0, 0, 0, 0};
    for (int i = threadIdx.x; i < STAGES * STAGE_WORDS / 4; i += MULTIPLYING + FILL_THREADS) ptx::store_shared<4>(shared + i * 16, zeros);
    ptx::fence_proxy_async();
  }
  __syncthreads();

  if (threadIdx.x >= MULTIPLYING) {
    if constexpr (MOVE_REGISTERS) ptx::shrink_registers<FILL_REGISTERS>();
    fill_stages(shared, grad_output, packed, sizes);
  } else {
    if constexpr (MOVE_REGISTERS) ptx::grow_registers<MULTIPLY_REGISTERS>();
    multiply_and_store(shared, reinterpret_cast<char*>(memory), grad_input, sizes);
  }
}
