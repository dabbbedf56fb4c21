// Gradient of the input, strides above 1, from NCHW tensors without a layout conversion, and from channels_last tensors of few
// channels (sm_90a): an implicit GEMM whose im2col operand exists only in registers.
//
//   M = positions, each one pixel of grad_input: WARPGROUPS times M_TILES multiplies of 64 positions
//   N = BLOCK_CHANNELS channels of the input
//   K = channels of the output x taps, in the weight's own order: it needs no packing
//
// The tensor memory accelerator (TMA) loads both operands into two rings of stages. A stage of the input is a box of
// grad_output, [image][channel][row][column]: all that the taps of the tile's positions reach in STAGE_CHANNELS channels, for
// STEPS steps of k. A stage of the weights is 128 bytes of k of BLOCK_CHANNELS rows, swizzled: four steps. A step of k is 8
// words of 32 bits. A word is one tap in float32 and two taps in 16 bits, which are loaded at once, or as HALVES where no
// single word of the box holds both. Each thread loads its words of the left operand from the box, by an address for each
// position and an offset for each word of k, so another kernel, stride or padding only changes the table of offsets, which
// lies in shared memory; registers hold the addresses where they are few. wgmma reads the weights from shared memory.
//
// The launch gives the shape of a tile (Im2colTileShape): its images, rows and columns of positions, numbered in this order
// (rows of a multiply past the last one are not stored), the box, and the stages that hold it. So one kernel has for each
// size the shape that fits it. An offset is compiled in as channels, rows and columns; the launch says how many elements a
// channel and a row of the box take. `paired`: rows g and g + 8 of a multiply are neighbouring positions, which one thread
// stores together.
//
// The main loop goes by stages of the weights. A round is the fewest stages of the input that fill whole ones; the table has
// the offsets of a round. A stage of the input is whole channels, or all of k, of which the last steps may be zeros: channels
// that grad_output does not have, in STAGE_CHANNELS, or with which the last round is filled up.
//
// channels_last: the channels of a pixel are columns of its row, so that to this kernel grad_output is one channel, with kernel,
// stride and padding that many times as wide. OUTPUT_CHANNELS_LAST: grad_input lies so.
//
// Covers: float32 as TF32 (TMA rounds), float16, bfloat16; rows of grad_output and of the weight that are multiples of 16
// bytes; any kernel, stride, padding, dilation; several groups if their channels fill whole rounds. `wide`: the tensor map
// has two dimensions for the columns, COLUMN_BLOCK of them and the rest, because a box has at most 256 elements along a
// dimension. PARTIAL: grad_input is float32 [sizes.splits, ...], and each split has its share of the rounds.
#include "grad_input/tma_gemm.cuh"

// ---- the im2col operand ------------------------------------------------------------------------------------------

constexpr int ITEM = static_cast<int>(sizeof(Element)), WORD = 4 / ITEM, TAPS = KERNEL_H * KERNEL_W;
constexpr int STEP_WORDS = 8, STAGE_K = STEPS * STEP_WORDS * WORD;
static_assert(STAGE_CHANNELS * TAPS == STAGE_K || (STAGE_CHANNELS * TAPS > STAGE_K && STAGE_K >= K_GROUP * TAPS && GROUPS == 1));

/// The channels, rows and columns of a box from the first element that a position reads to its k-th of a stage.
struct Offset {
  int channels, rows, cols;

  __device__ __forceinline__ int bytes(const Im2colTileShape& shape) const {
    return (channels * shape.channel_pitch + rows * shape.row_pitch + cols) * ITEM;
  }
};
__device__ __forceinline__ Offset offset_of_k(u32 k) {
  const u32 channel = k / TAPS, tap = k % TAPS;
  const int row = tap / KERNEL_W, col = tap % KERNEL_W;
  return {static_cast<int>(channel), row * DILATION_H, col * DILATION_W};
}
/// How many loads a word takes.
constexpr int LOADS = HALVES ? 2 : 1;
static_assert(!HALVES || WORD == 2);

// ---- shared memory, in bytes from its beginning ------------------------------------------------------------------

constexpr int BOX_WORDS = ROW / 4, BOX_STEPS = BOX_WORDS / STEP_WORDS;
/// How many stages of the input, and of the weights, a round has, and how many rounds the sum over k has.
constexpr int ROUND = STEPS % BOX_STEPS == 0 ? 1 : STEPS % 2 == 0 ? 2 : 4, ROUND_WEIGHT_STAGES = ROUND * STEPS / BOX_STEPS;
constexpr int ROUNDS = ceil_div(K_GROUP, STAGE_CHANNELS * ROUND);
static_assert(BOX_STEPS == 4 && STEPS >= BOX_STEPS && (GROUPS == 1 || K_GROUP % (STAGE_CHANNELS * ROUND) == 0));

/// The table of offsets, in units of 2 bytes: [stage of the weights in the round][word of k, modulo 4][load][pair of four words].
constexpr int FOURS = 2 * BOX_STEPS, TABLE_ROW = LOADS * FOURS * 2, TABLE_BYTES = ROUND_WEIGHT_STAGES * 4 * TABLE_ROW;
constexpr int TABLE = 2 * (MAX_INPUT_STAGES + MAX_WEIGHT_STAGES) * 8;
static_assert(TABLE % 16 == 0 && TABLE + TABLE_BYTES <= HEAD_BYTES && HEAD_BYTES % 1024 == 0);

/// Two producer threads issue copies; the rest of their warpgroup is there because registers move by whole warpgroups.
constexpr int CONSUMER_THREADS = 128 * WARPGROUPS, PRODUCER_THREADS = 128;
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = WARPGROUPS == 3 ? 160 : 240;

using InputRing = LaunchRing<MAX_INPUT_STAGES>;
using WeightRing = LaunchRing<MAX_WEIGHT_STAGES>;

/// The barriers come first, then the table of offsets, the stages of the weights, and those of the input.
__device__ __forceinline__ WeightRing weight_ring(u32 shared, const Im2colTileShape& shape) {
  return {shared + 2 * MAX_INPUT_STAGES * 8, shared + HEAD_BYTES, shape.weight_stages, WEIGHT_BYTES};
}
__device__ __forceinline__ InputRing input_ring(u32 shared, const Im2colTileShape& shape) {
  return {shared, shared + HEAD_BYTES + shape.weight_stages * WEIGHT_BYTES, shape.input_stages, shape.input_pitch};
}

/// One work tile of a persistent block. `image`, `row`, `col`: its first position.
struct Work {
  int split, block, group, image, row, col;
  int first_round, rounds;

  __device__ __forceinline__ Work(int index, const Sizes& sizes, const Im2colTileShape& shape)
      : split(0), first_round(0), rounds(ROUNDS) {
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
    image = images * shape.images;
    row = rows * shape.rows;
    col = sizes.row_tiles.remainder(in_image, rows) * static_cast<int>(shape.cols.value);
  }
};

#include "common/ping_pong.cuh"

// ---- the producers -----------------------------------------------------------------------------------------------

__device__ __forceinline__ void produce_input(u32 shared, const TensorMap& map, const Sizes& sizes,
                                              const Im2colTileShape& shape) {
  InputRing ring = input_ring(shared, shape);
  for_each_work_tile(work_tiles(sizes), [&](int index) {
    const Work work(index, sizes, shape);
    const int row = work.row * STEP_H - PADDING_H, col = work.col * STEP_W - PADDING_W - shape.alignment_columns;
    int channel = work.group * K_GROUP + work.first_round * ROUND * STAGE_CHANNELS;
#pragma unroll 1
    for (int stage = work.rounds * ROUND; stage > 0; --stage, channel += STAGE_CHANNELS) {
      ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
      ptx::arrive_expect_tx(ring.full(), shape.input_bytes);
      if (shape.wide) {
        ptx::tma_load(ring.data(), map, 0, col / COLUMN_BLOCK, row, channel, work.image, ring.full());
      } else {
        ptx::tma_load(ring.data(), map, col, row, channel, work.image, ring.full());
      }
      ring.advance();
    }
  });
}

__device__ __forceinline__ void produce_weights(u32 shared, const TensorMap& map, const Sizes& sizes,
                                                const Im2colTileShape& shape) {
  WeightRing ring = weight_ring(shared, shape);
  for_each_work_tile(work_tiles(sizes), [&](int index) {
    const Work work(index, sizes, shape);
    int k = work.first_round * ROUND_WEIGHT_STAGES * BOX_WORDS * WORD;
#pragma unroll 1
    for (int box = work.rounds * ROUND_WEIGHT_STAGES; box > 0; --box, k += BOX_WORDS * WORD) {
      ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
      ptx::arrive_expect_tx(ring.full(), WEIGHT_BYTES);
      ptx::tma_load(ring.data(), map, k, work.block * BLOCK_CHANNELS, work.group, ring.full());
      ring.advance();
    }
  });
}

// ---- the consumers -----------------------------------------------------------------------------------------------

/// Returns the number within the tile of the position that is row g + 8 * half of this thread's warp in multiply `m`.
__device__ __forceinline__ int tile_position(int m, int half, bool paired) {
  const int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4;
  return threadIdx.x / 128 * (64 * M_TILES) + m * 64 + warp * 16 + (paired ? 2 * g + half : g + 8 * half);
}

/// A position of a tile. It may lie past the last image.
struct TilePosition {
  int image, row, col;

  __device__ __forceinline__ TilePosition(int position, const Im2colTileShape& shape) {
    const int line = shape.cols.quotient(position);
    col = shape.cols.remainder(position, line);
    image = shape.image_positions.quotient(position);
    row = line - image * shape.rows;
  }
};

/// Writes the table of offsets. Called by all threads.
__device__ __forceinline__ void write_offsets(u32 shared, const Im2colTileShape& shape) {
  for (u32 i = threadIdx.x; i < TABLE_BYTES / 2; i += CONSUMER_THREADS + PRODUCER_THREADS) {
    const u32 four = i % FOURS, load = i / FOURS % LOADS, t = i / (FOURS * LOADS) % 4, box = i / (FOURS * LOADS * 4);
    const u32 word = (box * FOURS + four) % (2 * STEPS) * 4 + t;
    ptx::store_shared_half(shared + TABLE + 2 * i, offset_of_k(word * WORD + load).bytes(shape) / 2);
  }
}

/// Whether registers hold the address of each word of a round, from the beginning of a stage.
constexpr bool KEEPS_ADDRESSES = ROUND_WEIGHT_STAGES == 1 && !HALVES;

/// Loads this thread's words of the im2col operand. All offsets are bytes from the beginning of a stage.
struct InputOperand {
  const u32 table;
  u32 position[M_TILES][2];
  /// Those of the steps of a stage of the weights, two in a word, and of the next stage.
  u32 offsets[LOADS][FOURS / 2], next_offsets[LOADS][FOURS / 2];
  u32 next_in_round = 0;
  /// Of the steps of a round, if KEEPS_ADDRESSES.
  u32 addresses[FOURS][M_TILES][2];

  __device__ __forceinline__ InputOperand(u32 shared, const Im2colTileShape& shape)
      : table(shared + TABLE + threadIdx.x % 4 * TABLE_ROW) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const TilePosition at(tile_position(m, half, shape.paired), shape);
        const Offset first{at.image * STAGE_CHANNELS, at.row * STEP_H, at.col * STEP_W};
        position[m][half] = shape.alignment_columns * ITEM + (at.image < shape.images ? first.bytes(shape) : 0);
      }
    load_next_offsets();
    advance_offsets();
    if constexpr (KEEPS_ADDRESSES) {
#pragma unroll
      for (int i = 0; i < FOURS; ++i)
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            addresses[i][m][half] = ptx::keep_in_register(position[m][half] + offset(i, 0));
    }
  }

  /// Returns the offset of this lane's word of the four words number `four` of these steps.
  __device__ __forceinline__ u32 offset(int four, int load) const {
    const u32 both = offsets[load][four / 2];
    return 2 * (four % 2 == 0 ? both & 0xffff : both >> 16);
  }

  /// Loads the offsets of the next stage of the weights. A round ends where a work tile does.
  __device__ __forceinline__ void load_next_offsets() {
#pragma unroll
    for (int load = 0; load < LOADS; ++load)
      ptx::load_shared_bytes<16>(next_offsets[load], table + next_in_round * (4 * TABLE_ROW) + load * (2 * FOURS));
    if (++next_in_round == ROUND_WEIGHT_STAGES) next_in_round = 0;
  }
  __device__ __forceinline__ void advance_offsets() {
#pragma unroll
    for (int load = 0; load < LOADS; ++load)
#pragma unroll
      for (int i = 0; i < FOURS / 2; ++i) offsets[load][i] = next_offsets[load][i];
  }

  /// Loads the words of one of these steps: words t of both rows, then words t + 4.
  template <int STEP>
  __device__ __forceinline__ void load(u32 (&words)[M_TILES][4], u32 stage) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      u32 from[LOADS];
#pragma unroll
      for (int load = 0; load < LOADS; ++load)
        // Pinned: otherwise the compiler keeps the sum for each pair of a position and a word in a register of its own.
        from[load] = ptx::keep_in_register(stage + offset(2 * STEP + i, load));
#pragma unroll
      for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          u32 loaded[LOADS];
#pragma unroll
          for (int load = 0; load < LOADS; ++load) {
            const u32 address = KEEPS_ADDRESSES ? stage + addresses[2 * STEP + i][m][half] : from[load] + position[m][half];
            ptx::load_shared_bytes<HALVES ? 2 : 4>(loaded + load, address);
          }
          words[m][2 * i + half] = HALVES ? __byte_perm(loaded[0], loaded[LOADS - 1], 0x5410) : loaded[0];
        }
    }
  }
};

#include "grad_input/im2col_store.cuh"

/// A consumer warpgroup, which computes one work tile after another.
struct Consumer {
  InputOperand operand;
  InputRing input;
  WeightRing weights;
  /// The im2col operand of a step and of the next one.
  u32 words[2][M_TILES][4];

  __device__ __forceinline__ Consumer(u32 shared, const Im2colTileShape& shape)
      : operand(shared, shape), input(input_ring(shared, shape)), weights(weight_ring(shared, shape)) {}

  /// Multiplies the steps of a stage of the weights from STEP on. `left`: the steps of this stage of the input; `first`: the work
  /// tile begins.
  template <int STEP>
  __device__ __forceinline__ void steps(Accumulators& accumulators, u32& left, bool first) {
    if constexpr (STEP < BOX_STEPS) {
      constexpr bool MAY_BEGIN = STEP == 0 || STEPS % BOX_STEPS != 0, MAY_END = STEP == BOX_STEPS - 1 || STEPS % BOX_STEPS != 0;
      if (MAY_BEGIN && (STEPS == BOX_STEPS || left == STEPS)) ptx::wait_for_phase(input.full(), input.parity);
      u32(&now)[M_TILES][4] = words[STEP % 2];
      operand.template load<STEP>(now, input.data());
      if (STEP == 0) ptx::wait_for_phase(weights.full(), weights.parity);
      const u64 b = ptx::swizzled_descriptor(weights.data(), 16, 8 * ROW) + STEP * 2;
      ptx::fence_wgmma();
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) ptx::wgmma_from_registers<BLOCK_CHANNELS, PRECISION>(accumulators.of[m], now[m], b);
      ptx::commit_wgmma();
      if (STEP == 0 && ROUND_WEIGHT_STAGES > 1) operand.load_next_offsets();
      --left;
      if (MAY_END && (STEPS == BOX_STEPS || left == 0)) {
        // The words are in registers, so the stage can be loaded again.
        release(input.empty());
        input.advance();
        left = STEPS;
      }
      ptx::wait_wgmma<1>();
      if (STEP == 0) release(weights.empty_before(), !first);
      steps<STEP + 1>(accumulators, left, first);
    }
  }

  __device__ __forceinline__ void multiply(Accumulators& accumulators, int rounds) {
    accumulators.clear();
    // At least one, and the compiler must not know how many: otherwise it splits the loop.
    u32 boxes = ptx::keep_in_register(rounds * ROUND_WEIGHT_STAGES), left = STEPS;
    bool first = true;
#pragma unroll 1
    do {
      // Pinned: otherwise the compiler makes a copy of the loop for each number that it may be.
      left = ptx::keep_in_register(left);
      steps<0>(accumulators, left, first);
      if (ROUND_WEIGHT_STAGES > 1) operand.advance_offsets();
      weights.advance();
      first = false;
    } while (--boxes > 0);
    accumulators.wait();
    release(weights.empty_before());
  }
};

extern "C" __global__ void __launch_bounds__(CONSUMER_THREADS + PRODUCER_THREADS, 1)
    grad_input_im2col(const __grid_constant__ TensorMap grad_output, const __grid_constant__ TensorMap weight,
                      Out* __restrict__ grad_input, const __grid_constant__ Sizes sizes,
                      const __grid_constant__ Im2colTileShape shape) {
  extern __shared__ __align__(1024) u32 memory[];
  const u32 shared = ptx::keep_in_register((ptx::shared_address(memory) + 1023) & ~1023u);
  if (threadIdx.x == 0) {
    input_ring(shared, shape).init(1, CONSUMER_THREADS / 32);
    weight_ring(shared, shape).init(1, CONSUMER_THREADS / 32);
    ptx::fence_barrier_init();
  }
  write_offsets(shared, shape);
  __syncthreads();

  if (threadIdx.x >= CONSUMER_THREADS) {
    ptx::shrink_registers<PRODUCER_REGISTERS>();
    ptx::wait_for_previous_launch();
    if (threadIdx.x == CONSUMER_THREADS) produce_input(shared, grad_output, sizes, shape);
    if (threadIdx.x == CONSUMER_THREADS + 32) produce_weights(shared, weight, sizes, shape);
  } else {
    ptx::grow_registers<CONSUMER_REGISTERS>();
    Consumer consumer(shared, shape);
    for_each_work_tile(work_tiles(sizes), [&](int index) {
      const Work work(index, sizes, shape);
      Accumulators accumulators;
      consumer.multiply(accumulators, work.rounds);
      Out* to = grad_input;
      if constexpr (PARTIAL) to += split_offset(work.split, sizes);
      if (!OUTPUT_CHANNELS_LAST && shape.paired && (shape.cols.value | sizes.out_width) % 2 == 0) {
        store<true>(accumulators, to, work, sizes, shape);
      } else {
        store<false>(accumulators, to, work, sizes, shape);
      }
    });
  }
}
