// Gradient of the input from NCHW as it lies, strides above 1 (sm_90a): an implicit GEMM whose unfolded operand exists in
// registers alone.
//
//   M = cells, each one pixel of grad_input: WARPGROUPS times M_TILES multiplies of 64 cells
//   N = BLOCK_CHANNELS channels of the input
//   K = channels of the output x taps, as the weight lies: no packing
//
// The copy engine brings both operands, in two rings. A stage of the input is a box of grad_output, [image][channel][row]
// [column], all that the taps of the tile's cells reach in STAGE_CHANNELS channels. A stage of the weights is 128 bytes of k
// of BLOCK_CHANNELS rows, swizzled. A step of k is 8 words (32 bits: one tap in float32, two in 16
// bits, loaded at once or, where they do not lie together in one word of the box, as HALVES). Each thread loads its words of
// the left operand from the box, one address per cell and an offset per word of k, so any kernel, stride and padding is
// but another table of offsets; the multiplier reads the weights.
//
// Cells of a tile are numbered through TILE_N images of TILE_H x TILE_W, those past the last are none. PAIRED: rows g and
// g + 8 of a multiply are neighbouring cells, which are stored together.
//
// The loop is over rounds of stages, as many as are whole stages of the weights, too: what is left of the last one is zeros.
//
// Covers: float32 as TF32 (the copy engine rounds), float16, bfloat16; rows of grad_output and of the weight are 16-byte
// multiples; any kernel, stride, padding, dilation; several groups of whole rounds alone. FOLD_W: columns are two dimensions
// of the map, so many and the rest, since a box has 256 of them at most. PARTIAL: grad_input is float32 [sizes.splits, ...],
// each with its share of the rounds.
#include "common/integers.cuh"
#include "common/mma.cuh"
#include "common/wgmma.cuh"
#include "common/pipeline.cuh"
#include "common/tma.cuh"
#include "common/stages.cuh"
#include "common/sizes.cuh"

using ptx::u32;
using ptx::u64;

// ---- the unfolded operand ----------------------------------------------------------------------------------------

constexpr int ITEM = static_cast<int>(sizeof(Element)), WORD = 4 / ITEM, TAPS = KERNEL_H * KERNEL_W;
constexpr int STEP_WORDS = 8, STEPS = STAGE_CHANNELS * TAPS / (STEP_WORDS * WORD);
static_assert(STAGE_CHANNELS * TAPS % (STEP_WORDS * WORD) == 0);

constexpr int IMAGE_PITCH = STAGE_CHANNELS * BOX_H * BOX_W;

/// Elements from a cell's first to the k-th of a stage.
__device__ constexpr int place_of(int k) {
  const int tap = k % TAPS;
  return (k / TAPS * BOX_H + tap / KERNEL_W * DILATION_H) * BOX_W + tap % KERNEL_W * DILATION_W;
}
/// Loads of a word: of 16 bits in HALVES two.
constexpr int LOADS = HALVES ? 2 : 1;
static_assert(!HALVES || WORD == 2);
/// Whether any four words of k, that four lanes load, lie to one another as the first four do.
__device__ constexpr bool is_regular() {
  for (int k = 0; k < STEPS * STEP_WORDS * WORD; ++k) {
    const int four = k / (4 * WORD) * (4 * WORD);
    if (place_of(k) != place_of(four) + place_of(k - four)) return false;
    if (k % WORD == 1 && place_of(k) - place_of(k - 1) != place_of(1)) return false;
  }
  return true;
}
constexpr bool REGULAR = is_regular();

// ---- shared memory, in bytes from its beginning ------------------------------------------------------------------

constexpr int ROW = 128, BOX_WORDS = ROW / 4, BOX_STEPS = BOX_WORDS / STEP_WORDS;
constexpr int K_GROUP = IN_CHANNELS / GROUPS, CHANNELS_GROUP = OUT_CHANNELS / GROUPS;
/// Stages of a round, and rounds.
constexpr int ROUND = STEPS % BOX_STEPS == 0 ? 1 : STEPS % 2 == 0 ? 2 : 4, ROUND_BOXES = ROUND * STEPS / BOX_STEPS;
constexpr int ROUNDS = ceil_div(K_GROUP, STAGE_CHANNELS * ROUND), M_BLOCKS = ceil_div(CHANNELS_GROUP, BLOCK_CHANNELS);
constexpr int INPUT_BYTES = TILE_N * IMAGE_PITCH * ITEM, INPUT_PITCH = round_up(INPUT_BYTES, 128);
constexpr int WEIGHT_BYTES = BLOCK_CHANNELS * ROW;
constexpr int INPUTS = WEIGHT_STAGES * WEIGHT_BYTES;
constexpr int INPUT_BARRIERS = INPUTS + INPUT_STAGES * INPUT_PITCH, WEIGHT_BARRIERS = INPUT_BARRIERS + 2 * INPUT_STAGES * 8;
static_assert(BOX_STEPS == 4 && (GROUPS == 1 || K_GROUP % (STAGE_CHANNELS * ROUND) == 0));
static_assert(SHARED_BYTES == 1024 + WEIGHT_BARRIERS + 2 * WEIGHT_STAGES * 8, "the plan and the kernel must agree");

/// Two of those that ask have work; registers move by whole warpgroups.
constexpr int MULTIPLYING = 128 * WARPGROUPS, ASKING = 128;
constexpr int ASKING_REGISTERS = 24, MULTIPLY_REGISTERS = WARPGROUPS == 3 ? 160 : 240;
constexpr int TILE_CELLS = TILE_N * TILE_H * TILE_W;

using InputRing = StageRing<INPUT_STAGES, INPUTS, INPUT_PITCH, INPUT_BARRIERS>;
using WeightRing = StageRing<WEIGHT_STAGES, 0, WEIGHT_BYTES, WEIGHT_BARRIERS>;

/// What one turn of a block computes. `image`, `row`, `col`: its first cell.
struct Work {
  int split, block, group, image, row, col;
  int first_round, rounds;

  __device__ __forceinline__ Work(int index, const Sizes& sizes) : split(0), first_round(0), rounds(ROUNDS) {
    if constexpr (PARTIAL) {
      const int whole = sizes.splits.quotient(index);
      split = sizes.splits.remainder(index, whole);
      first_round = sizes.splits.quotient(split * ROUNDS);
      rounds = sizes.splits.quotient((split + 1) * ROUNDS) - first_round;
      index = whole;
    }
    block = index % M_BLOCKS;
    index /= M_BLOCKS;
    group = index % GROUPS;
    const int tile = index / GROUPS, images = sizes.image_tiles.quotient(tile);
    const int in_image = sizes.image_tiles.remainder(tile, images), rows = sizes.row_tiles.quotient(in_image);
    image = images * TILE_N;
    row = rows * TILE_H;
    col = sizes.row_tiles.remainder(in_image, rows) * TILE_W;
  }
  __device__ __forceinline__ static int count(const Sizes& sizes) {
    return sizes.tiles * (GROUPS * M_BLOCKS) * (PARTIAL ? static_cast<int>(sizes.splits.value) : 1);
  }
};

#include "common/ping_pong.cuh"

// ---- those that ask ----------------------------------------------------------------------------------------------

__device__ __forceinline__ void ask_for_input(u32 shared, const TensorMap& map, const Sizes& sizes) {
  InputRing ring(shared);
  for_each_work_tile(Work::count(sizes), [&](int index) {
    const Work work(index, sizes);
    const int row = work.row * STEP_H - PADDING_H, col = work.col * STEP_W - PADDING_W - LEAD;
    int channel = work.group * K_GROUP + work.first_round * ROUND * STAGE_CHANNELS;
#pragma unroll 1
    for (int stage = work.rounds * ROUND; stage > 0; --stage, channel += STAGE_CHANNELS) {
      ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
      ptx::arrive_expect_tx(ring.full(), INPUT_BYTES);
      if constexpr (FOLD_W > 1) {
        ptx::tma_load(ring.data(), map, 0, col / FOLD_W, row, channel, work.image, ring.full());
      } else {
        ptx::tma_load(ring.data(), map, col, row, channel, work.image, ring.full());
      }
      ring.advance();
    }
  });
}

__device__ __forceinline__ void ask_for_weights(u32 shared, const TensorMap& map, const Sizes& sizes) {
  WeightRing ring(shared);
  for_each_work_tile(Work::count(sizes), [&](int index) {
    const Work work(index, sizes);
    int k = work.first_round * ROUND_BOXES * BOX_WORDS * WORD;
#pragma unroll 1
    for (int box = work.rounds * ROUND_BOXES; box > 0; --box, k += BOX_WORDS * WORD) {
      ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
      ptx::arrive_expect_tx(ring.full(), WEIGHT_BYTES);
      ptx::tma_load(ring.data(), map, k, work.block * BLOCK_CHANNELS, work.group, ring.full());
      ring.advance();
    }
  });
}

// ---- those that multiply -----------------------------------------------------------------------------------------

/// This warp's word that it is done with a stage.
__device__ __forceinline__ void release(u32 barrier, bool wanted = true) {
  if (wanted && threadIdx.x % 32 == 0) ptx::arrive(barrier);
}

/// The number in the tile of the cell that is row g + 8 * half of this thread's warp in multiply `m`.
__device__ __forceinline__ int cell_of(int m, int half) {
  const int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4;
  return threadIdx.x / 128 * (64 * M_TILES) + m * 64 + warp * 16 + (PAIRED ? 2 * g + half : g + 8 * half);
}

/// Where this thread finds its words of a stage, in bytes.
struct Places {
  u32 cell[M_TILES][2];
  u32 word[REGULAR ? 1 : 2 * STEPS][LOADS];

  __device__ __forceinline__ Places() {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int cell = cell_of(m, half), col = cell % TILE_W, row = cell / TILE_W % TILE_H, image = cell / (TILE_W * TILE_H);
        const int place = cell < TILE_CELLS ? image * IMAGE_PITCH + row * STEP_H * BOX_W + col * STEP_W : 0;
        this->cell[m][half] = (LEAD + place + (REGULAR ? place_of(WORD * t) : 0)) * ITEM;
      }
#pragma unroll
    for (int i = 0; i < (REGULAR ? 0 : 2 * STEPS); ++i)
#pragma unroll
      for (int load = 0; load < LOADS; ++load) word[i][load] = place_of((4 * i + t) * WORD + load) * ITEM;
  }

  /// The words of one step: words t of both rows, then words t + 4.
  template <int STEP>
  __device__ __forceinline__ void load(u32 (&words)[M_TILES][4], u32 stage) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      u32 from[LOADS];
#pragma unroll
      for (int load = 0; load < LOADS; ++load) {
        const int four = STEP * 2 + i;
        // Pinned: else the compiler keeps the sum of every cell and every word in a register.
        from[load] = REGULAR ? stage + (place_of(4 * four * WORD) + load * place_of(1)) * ITEM : ptx::keep_in_register(stage + word[REGULAR ? 0 : four][load]);
      }
#pragma unroll
      for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          u32 loaded[LOADS];
#pragma unroll
          for (int load = 0; load < LOADS; ++load) ptx::load_shared_bytes<HALVES ? 2 : 4>(loaded + load, from[load] + cell[m][half]);
          words[m][2 * i + half] = HALVES ? __byte_perm(loaded[0], loaded[LOADS - 1], 0x5410) : loaded[0];
        }
    }
  }
};

/// sums.of[m][c / 2 + 2 * half + i] of lane 4g + t: cell_of(m, half), channel c + 2t + i.
struct Sums {
  float of[M_TILES][BLOCK_CHANNELS / 2];
};

/// TOGETHER: rows of grad_input have an even number of columns, so pairs of cells are neighbours there.
template <bool TOGETHER>
__device__ __forceinline__ void store(const Sums& sums, Out* output, const Work& work, const Sizes& sizes) {
  const int channel = work.block * BLOCK_CHANNELS + threadIdx.x % 4 * 2;
  const long long out_pixels = sizes.out_pixels();
#pragma unroll
  for (int m = 0; m < M_TILES; ++m)
#pragma unroll
    for (int half = 0; half < (TOGETHER ? 1 : 2); ++half) {
      const int cell = cell_of(m, half);
      const int col = work.col + cell % TILE_W, row = work.row + cell / TILE_W % TILE_H, image = work.image + cell / (TILE_W * TILE_H);
      const bool exists = cell < TILE_CELLS && col < sizes.out_width && row < sizes.out_height && image < sizes.batch;
      Out* to = output + (static_cast<long long>(image) * OUT_CHANNELS + work.group * CHANNELS_GROUP + channel) * out_pixels +
                row * sizes.out_width + col;
#pragma unroll
      for (int c = 0; c < BLOCK_CHANNELS; c += 8)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (!exists || channel + c + i >= CHANNELS_GROUP) continue;
          Out* there = to + (c + i) * out_pixels;
          const float* value = sums.of[m] + c / 2 + half * 2 + i;
          if constexpr (!TOGETHER) {
            *there = store_as<Out>(value[0]);
          } else if constexpr (sizeof(Out) == 4) {
            *reinterpret_cast<float2*>(there) = make_float2(value[0], value[2]);
          } else {
            *reinterpret_cast<u32*>(there) = ptx::pack_pair<PRECISION>(value[0], value[2]);
          }
        }
    }
}

/// Multiplies by one work after another.
struct Multiplier {
  const Places places;
  InputRing input;
  WeightRing weights;
  /// Of a step and the next.
  u32 words[2][M_TILES][4];

  __device__ __forceinline__ explicit Multiplier(u32 shared) : input(shared), weights(shared) {}

  /// The steps of a round from STEP on. `first`: of the work's rounds.
  template <int STEP>
  __device__ __forceinline__ void steps(Sums& sums, bool first) {
    if constexpr (STEP < ROUND * STEPS) {
      if constexpr (STEP % STEPS == 0) ptx::wait_for_phase(input.full(), input.parity);
      u32(&now)[M_TILES][4] = words[STEP % 2];
      places.template load<STEP % STEPS>(now, input.data());
      if constexpr (STEP % BOX_STEPS == 0) ptx::wait_for_phase(weights.full(), weights.parity);
      const u64 b = ptx::swizzled_descriptor(weights.data(), 16, 8 * ROW) + STEP % BOX_STEPS * 2;
      ptx::fence_wgmma();
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) ptx::wgmma_from_registers<BLOCK_CHANNELS, PRECISION>(sums.of[m], now[m], b);
      ptx::commit_wgmma();
      if constexpr (STEP % STEPS == STEPS - 1) {
        // The words are in registers.
        release(input.empty());
        input.advance();
      }
      ptx::wait_wgmma<1>();
      if constexpr (STEP % BOX_STEPS == 0) release(weights.empty_before(), STEP > 0 || !first);
      if constexpr (STEP % BOX_STEPS == BOX_STEPS - 1) weights.advance();
      steps<STEP + 1>(sums, first);
    }
  }

  __device__ __forceinline__ void multiply(Sums& sums, int rounds) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int i = 0; i < BLOCK_CHANNELS / 2; ++i) sums.of[m][i] = 0.f;
    // One at least, and nobody knows how many: else the compiler parts the loop.
    u32 left = ptx::keep_in_register(rounds);
    bool first = true;
#pragma unroll 1
    do {
      steps<0>(sums, first);
      first = false;
    } while (--left > 0);
    ptx::wait_wgmma<0>();
    // Else the compiler reads them as bits before.
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int i = 0; i < BLOCK_CHANNELS / 2; ++i) asm volatile("" : "+f"(sums.of[m][i]));
    release(weights.empty_before());
  }
};

extern "C" __global__ void __launch_bounds__(MULTIPLYING + ASKING, 1)
    grad_input_im2col(const __grid_constant__ TensorMap grad_output, const __grid_constant__ TensorMap weight,
                        Out* __restrict__ grad_input, const __grid_constant__ Sizes sizes) {
  extern __shared__ __align__(1024) u32 memory[];
  const u32 shared = ptx::keep_in_register((ptx::shared_address(memory) + 1023) & ~1023u);
  if (threadIdx.x == 0) {
    InputRing input(shared);
    for (int s = 0; s < INPUT_STAGES; ++s, input.advance()) {
      ptx::init_barrier(input.full(), 1);
      ptx::init_barrier(input.empty(), MULTIPLYING / 32);
    }
    WeightRing weights(shared);
    for (int s = 0; s < WEIGHT_STAGES; ++s, weights.advance()) {
      ptx::init_barrier(weights.full(), 1);
      ptx::init_barrier(weights.empty(), MULTIPLYING / 32);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();

  if (threadIdx.x >= MULTIPLYING) {
    ptx::shrink_registers<ASKING_REGISTERS>();
    ptx::wait_for_previous_launch();
    if (threadIdx.x == MULTIPLYING) ask_for_input(shared, grad_output, sizes);
    if (threadIdx.x == MULTIPLYING + 32) ask_for_weights(shared, weight, sizes);
  } else {
    ptx::grow_registers<MULTIPLY_REGISTERS>();
    Multiplier multiplier(shared);
    for_each_work_tile(Work::count(sizes), [&](int index) {
      const Work work(index, sizes);
      Sums sums;
      multiplier.multiply(sums, work.rounds);
      Out* to = grad_input;
      if constexpr (PARTIAL) to += static_cast<long long>(work.split) * sizes.batch * OUT_CHANNELS * sizes.out_pixels();
      if (PAIRED && TILE_W % 2 == 0 && sizes.out_width % 2 == 0) {
        store<PAIRED && TILE_W % 2 == 0>(sums, to, work, sizes);
      } else {
        store<false>(sums, to, work, sizes);
      }
    });
  }
}
