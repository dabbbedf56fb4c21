// Gradient of the weight (and of the bias) on Hopper's warpgroup multiply (sm_90a) in TF32, straight from NCHW.
//
//   M = KERNEL_W taps of a row of the kernel x CHUNK output channels, N = TILE_COLS input channels, K = pixels
//
// In TF32 the multiplier takes from shared memory only what lies along k, and k are pixels. The input lies so. Of
// grad_output k goes by the stride, so it comes from registers: the copy engine brings boxes of it as it lies, rows of
// OUT_BLOCK words, [block of columns][image][row][channel][OUT_BLOCK], swizzled, and a lane reads its words of them. A tap
// is an address. A warp's 16 rows are TAPS_TOGETHER neighbouring taps of 16 / TAPS_TOGETHER channels each: with a stride
// that is a multiple of TAPS_TOGETHER, and channels that the swizzle keeps apart, all lanes read from different banks. Taps
// that are left over are alone in their rows, and rows may be.
//
// A stage is IMAGES x ROWS x COLS pixels of the input, in boxes of BOX pixels: [box][channel][BOX pixels]. Rows of the input
// are LINE pixels apart; what lies beyond WIDTH or HEIGHT are zeros. WHOLE_ROWS: a stage has whole rows, and its boxes hold
// grad_output's columns from the first to the last, else from LEFT columns before the first pixel's.
//
// Covers: float32 (TF32), NCHW; what plan_grad_weight_direct.py claims. Warpgroup 0 asks for boxes, the others multiply,
// BLOCKS times 64 rows each. Pixels are split in `slices`; a slice's sums are gradient[slice][ci][tap][co], which
// grad_weight_rows_reduce.cu adds up (IN_WEIGHT_ORDER: [ci][co][tap], for a single slice). WITH_BIAS: two warps of warpgroup 0 add up grad_output where a row of taps has its
// offset in [0, STRIDE_H), for the first input channels: bias_partial[slice][offset][2][co], the sum and what rounding
// left of it. Without it grad_output comes rounded to TF32.
#include "compensated_sum.cuh"
#include "mma.cuh"
#include "wgmma.cuh"
#include "pipeline.cuh"
#include "ring.cuh"
#include "tma.cuh"

using ptx::u32;

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr int CI_GROUP = IN_CHANNELS / GROUPS, CO_GROUP = OUT_CHANNELS / GROUPS, TAPS = KERNEL_H * KERNEL_W;
constexpr int INPUT_TILES = ceil_div(CI_GROUP, TILE_COLS), CHUNKS = ceil_div(CO_GROUP, CHUNK), TILES = INPUT_TILES * CHUNKS * KERNEL_H;

constexpr int STAGE_PIXELS = IMAGES * ROWS * COLS, STEPS = STAGE_PIXELS / 8;
constexpr int STAGES_DOWN = ceil_div(HEIGHT, ROWS), STAGES_ACROSS = ceil_div(WIDTH, COLS), STAGES_OF_IMAGES = STAGES_DOWN * STAGES_ACROSS;
constexpr int BOXES_OF_IMAGE = ceil_div(ROWS * COLS, BOX), BOX_BYTES = TILE_COLS * BOX * 4, INPUT_BYTES = IMAGES * BOXES_OF_IMAGE * BOX_BYTES;
constexpr int ROW_BYTES = CHUNK * OUT_BLOCK * 4, BLOCK_BYTES = IMAGES * ROWS * ROW_BYTES, OUTPUT_BYTES = OUT_BLOCKS * BLOCK_BYTES;
constexpr int STAGE_BYTES = INPUT_BYTES + OUTPUT_BYTES;
static_assert(STAGE_PIXELS % 8 == 0 && (IMAGES == 1 || (STAGES_OF_IMAGES == 1 && ROWS * COLS % BOX == 0)));
static_assert(INPUT_BYTES % 1024 == 0 && BLOCK_BYTES % 1024 == 0);
static_assert(WHOLE_ROWS || (LEFT >= PADDING_W && OUT_BLOCKS * OUT_BLOCK >= LEFT - PADDING_W + (COLS - 1) * STRIDE_W +
                                                                                (KERNEL_W - 1) * DILATION_W + 1));
static_assert(!WHOLE_ROWS || (LEFT == 0 && STAGES_ACROSS == 1 && OUT_BLOCKS * OUT_BLOCK >= OUT_WIDTH));

constexpr int THREADS = 128 * (WARPGROUPS + 1), BIAS_WARPS = 2;
constexpr int FILL_REGISTERS = 56, MULTIPLY_REGISTERS = WARPGROUPS == 2 ? 224 : 152;
static_assert(WARPGROUPS * BLOCKS * 64 >= KERNEL_W * CHUNK && CHUNK % 16 == 0);

using Ring = StageRing<STAGES, 0, STAGE_BYTES, STAGES * STAGE_BYTES>;

/// What a block computes.
struct Place {
  int ci, co;  // the first, in the group
  int kh, group, slice;

  __device__ __forceinline__ explicit Place(int block) {
    const int tile = block % TILES, rest = block / TILES;
    ci = tile % INPUT_TILES * TILE_COLS;
    kh = tile / INPUT_TILES % KERNEL_H;
    co = tile / INPUT_TILES / KERNEL_H * CHUNK;
    group = rest % GROUPS;
    slice = rest / GROUPS;
  }
  __device__ __forceinline__ int offset() const { return kh * DILATION_H - PADDING_H; }
  __device__ __forceinline__ bool counts() const { return WITH_BIAS && ci == 0 && offset() >= 0 && offset() < STRIDE_H; }
};

/// One thread: fill stage after stage.
__device__ __forceinline__ void fill(Ring ring, const TensorMap& input, const TensorMap& grad_output, const Place& place,
                                     int first_stage, int stages) {
  const int input_channel = place.group * CI_GROUP + place.ci, output_channel = place.group * CO_GROUP + place.co;
  int image = first_stage / STAGES_OF_IMAGES * IMAGES;
  int down = first_stage % STAGES_OF_IMAGES / STAGES_ACROSS, across = first_stage % STAGES_ACROSS;
  for (int s = 0; s < stages; ++s) {
    ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
    ptx::arrive_expecting(ring.full(), INPUT_BYTES + OUTPUT_BYTES);
#pragma unroll
    for (int block = 0; block < OUT_BLOCKS; ++block)
      ptx::copy_box(ring.data() + INPUT_BYTES + block * BLOCK_BYTES, grad_output,
                    across * (COLS * STRIDE_W) - LEFT + block * OUT_BLOCK, output_channel,
                    down * (ROWS * STRIDE_H) + place.offset(), image, ring.full());
    const int pixel = down * (ROWS * LINE) + across * COLS;
#pragma unroll
    for (int box = 0; box < IMAGES * BOXES_OF_IMAGE; ++box)
      ptx::copy_box(ring.data() + box * BOX_BYTES, input, pixel + box % BOXES_OF_IMAGE * BOX, input_channel,
                    image + box / BOXES_OF_IMAGE, ring.full());
    ring.advance();
    if (++across == STAGES_ACROSS) {
      across = 0;
      if (++down == STAGES_DOWN) down = 0, image += IMAGES;
    }
  }
}

/// Bits of a channel's number: those by which TAPS_TOGETHER x 4 words of 8 / TAPS_TOGETHER channels lie in different banks
/// (of a swizzle that permutes pieces of 16 bytes by the address's bits 7 to 9), then the others.
constexpr int BANK_BITS = TAPS_TOGETHER == 1 ? 3 : TAPS_TOGETHER == 2 ? 2 : TAPS_TOGETHER == 4 ? 1 : 0;
__device__ constexpr int channel_bit(int i) {
  constexpr int OF_PAIRS[3][3] = {{0, 1, 2}, {0, 2, 1}, {1, 2, 0}}, OF_QUADS[3][3] = {{1, 0, 2}, {0, 1, 2}, {2, 0, 1}};
  constexpr int BLOCK = OUT_BLOCK == 8 ? 0 : OUT_BLOCK == 16 ? 1 : 2;
  return BANK_BITS == 2 ? OF_PAIRS[BLOCK][i] : BANK_BITS == 1 ? OF_QUADS[BLOCK][i] : i;
}
__device__ __forceinline__ constexpr int channel_of(int bits) {
  return (bits & 1) << channel_bit(0) | (bits >> 1 & 1) << channel_bit(1) | (bits >> 2 & 1) << channel_bit(2);
}

/// A lane's two rows of 16: a tap and two channels of it. Rows that are too many have taps that do not exist.
struct Rows {
  int kw, channel[2];

  __device__ __forceinline__ Rows(int sixteen, int g) {
    constexpr int WHOLE = KERNEL_W / TAPS_TOGETHER, CHANNELS = 16 / TAPS_TOGETHER, TOGETHER = CHUNK / CHANNELS;
    const int alone = sixteen - WHOLE * TOGETHER;
    if (TAPS_TOGETHER > 1 && (KERNEL_W % TAPS_TOGETHER == 0 || alone < 0)) {
      // Eight channels have half as many sixteens as taps are together.
      constexpr int SIXTEENS = TAPS_TOGETHER / 2, APART = 8 / TAPS_TOGETHER;
      const int unit = sixteen % TOGETHER, first = unit / SIXTEENS * 8;
      kw = sixteen / TOGETHER * TAPS_TOGETHER + g / APART;
      const int bits = g % APART | unit % SIXTEENS << (BANK_BITS + 1);
      channel[0] = first + channel_of(bits);
      channel[1] = first + channel_of(bits | 1 << BANK_BITS);
    } else {
      kw = WHOLE * TAPS_TOGETHER + alone / (CHUNK / 16);
      channel[0] = alone % (CHUNK / 16) * 16 + g;
      channel[1] = channel[0] + 8;
    }
  }
  /// Of one of a warp's blocks of rows.
  __device__ __forceinline__ static Rows of(int warp, int block, int lane) {
    return Rows((warp / 4 * BLOCKS + block) * 4 + warp % 4, lane / 4);
  }
};

/// Whether a step's pixels lie apart in the same way for every lane.
constexpr bool EVEN_QUADS = COLS % 4 == 0;

/// One step's words of grad_output, as multiply_from_registers takes them.
using Words = u32[BLOCKS][4];

/// What the swizzle flips in the number of a channel's 16 bytes.
__device__ __forceinline__ constexpr u32 flips(int channel) { return (channel * (OUT_BLOCK * 4) >> 7) & (OUT_BLOCK / 4 - 1); }

/// Rounded to nearest once the multiplier has cut off what TF32 does not have.
__device__ __forceinline__ u32 nearly_rounded(u32 word) {
  return fabsf(__uint_as_float(word)) < __int_as_float(0x7f800000) ? word + 0x1000 : word;
}

/// Where a lane's words lie.
struct WordPlaces {
  u32 col[BLOCKS];  // column in the boxes of pixel 0 of the row; may lie before the first
  u32 channel[BLOCKS][2], flip[BLOCKS][2];
  // Of each pixel that a lane takes: its row's bytes and, below 512, its columns.
  u32 pixels[EVEN_QUADS ? 1 : STEPS][2];

  __device__ __forceinline__ WordPlaces(int warp, int lane) {
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      const Rows rows = Rows::of(warp, b, lane);
      const int kw = rows.kw < KERNEL_W ? rows.kw : 0;
      col[b] = LEFT + kw * DILATION_W - PADDING_W + (EVEN_QUADS ? lane % 4 * STRIDE_W : 0);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        channel[b][half] = INPUT_BYTES + rows.channel[half] * (OUT_BLOCK * 4) + (EVEN_QUADS ? (col[b] & 3) * 4 : 0);
        flip[b][half] = flips(rows.channel[half]);
      }
    }
    if constexpr (!EVEN_QUADS) {
#pragma unroll
      for (int i = 0; i < STEPS; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int pixel = i * 8 + half * 4 + lane % 4;
          pixels[i][half] = pixel / COLS * ROW_BYTES + pixel % COLS * STRIDE_W;
        }
    }
  }

  __device__ __forceinline__ void load(Words& words, u32 stage, int step) const {
#pragma unroll
    for (int quad = 0; quad < 2; ++quad) {
      const int pixel = step * 8 + quad * 4, first = pixel % COLS * STRIDE_W;
      // Before the first column and after the last there are zeros, which no box holds.
      const bool leaves = WHOLE_ROWS && (!EVEN_QUADS || first < PADDING_W ||
                                         first + 3 * STRIDE_W + (KERNEL_W - 1) * DILATION_W - PADDING_W >= OUT_WIDTH);
      // Pinned, or the compiler keeps what it makes of them for all steps, in memory.
      const u32 packed = EVEN_QUADS ? 0 : ptx::pinned(pixels[step][quad]);
      const u32 row = stage + (EVEN_QUADS ? pixel / COLS * ROW_BYTES : packed & ~511u);
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
        const u32 x = col[b] + (EVEN_QUADS ? first : packed & 511u);
        const u32 from = row + (x / OUT_BLOCK) * BLOCK_BYTES + (EVEN_QUADS ? 0 : (x & 3) * 4);
        const bool inside = !leaves || x < OUT_WIDTH;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const u32 at = from + channel[b][half] + ((x / 4 & (OUT_BLOCK / 4 - 1)) ^ flip[b][half]) * 16;
          const u32 word = ptx::load_shared(inside ? at : stage);
          words[b][quad * 2 + half] = inside ? word : 0;
        }
      }
    }
    if constexpr (WITH_BIAS) {
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
        for (u32& word : words[b]) word = nearly_rounded(word);
    }
  }
};

/// The multiplies of one warp. While a step is multiplied, the words of the next are read.
__device__ __forceinline__ void multiply_all(Ring ring, float (&sums)[BLOCKS][TILE_COLS / 2], int warp, int lane, int stages) {
  const WordPlaces places(warp, lane);
#pragma unroll
  for (auto& block : sums)
#pragma unroll
    for (float& sum : block) sum = 0.f;
  Words even, odd;
  for (int s = 0; s < stages; ++s) {
    ptx::wait_for_phase(ring.full(), ring.parity);
    const ptx::u64 cols = ptx::swizzled_descriptor<BOX * 4>(ring.data(), 16, 8 * BOX * 4);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      Words& words = step % 2 ? odd : even;
      places.load(words, ring.data(), step);
      ptx::fence_sums();
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b)
        ptx::multiply_from_registers<TILE_COLS>(sums[b], words[b], cols + (step * 8 / BOX * BOX_BYTES + step * 8 % BOX * 4) / 16);
      ptx::commit_multiplies();
      // The step before is multiplied: its words may go, and with the first step its stage.
      ptx::wait_multiplies<1>();
      if (step == 0 && s > 0 && lane == 0) ptx::arrive(ring.empty_before());
    }
    if constexpr (STEPS % 2 != 0) ptx::wait_multiplies<0>();
    ring.advance();
  }
  ptx::wait_multiplies<0>();
}

__device__ __forceinline__ void store(const float (&sums)[BLOCKS][TILE_COLS / 2], const Place& place, int warp, int lane, float* gradient) {
  constexpr int OF_TAP = IN_WEIGHT_ORDER ? 1 : CO_GROUP, OF_CHANNEL = IN_WEIGHT_ORDER ? TAPS : 1;
  gradient += (static_cast<long long>(place.slice) * IN_CHANNELS + place.group * CI_GROUP) * (TAPS * CO_GROUP);
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    const Rows rows = Rows::of(warp, b, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int co = place.co + rows.channel[half];
      float* const to = gradient + (place.kh * KERNEL_W + rows.kw) * OF_TAP + co * OF_CHANNEL;
#pragma unroll
      for (int j = 0; j < TILE_COLS / 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (const int ci = place.ci + j * 8 + lane % 4 * 2 + i; ci < CI_GROUP && co < CO_GROUP && rows.kw < KERNEL_W)
            to[static_cast<long long>(ci) * (TAPS * CO_GROUP)] = sums[b][j * 4 + half * 2 + i];
    }
  }
}

/// One of the warps that add up grad_output, from stage after stage. Two lanes share channels, 16 bytes in turn.
__device__ __forceinline__ void add_bias(Ring ring, const Place& place, int warp, int lane, int stages, float* __restrict__ bias_partial) {
  constexpr int APART = BIAS_WARPS * 16, CHANNELS = ceil_div(CHUNK, APART);
  constexpr int END = LEFT + COLS * STRIDE_W < OUT_BLOCKS * OUT_BLOCK ? LEFT + COLS * STRIDE_W : OUT_BLOCKS * OUT_BLOCK;
  // Neighbours in an order in which the swizzle keeps them apart.
  const int first = warp * 16 + lane / 16 * 8 + lane / 2 % 4 * 2 + lane / 8 % 2;
  CompensatedSum<float> sums[CHANNELS] = {};
  for (int s = 0; s < stages; ++s) {
    ptx::wait_for_phase(ring.full(), ring.parity);
#pragma unroll 1
    for (int row = 0; row < IMAGES * ROWS; ++row) {
      const u32 from = ring.data() + INPUT_BYTES + row * ROW_BYTES + first * (OUT_BLOCK * 4);
#pragma unroll 2
      for (int quad = LEFT / 4 + lane % 2; quad < ceil_div(END, 4); quad += 2) {
        const u32 block = from + quad * 4 / OUT_BLOCK * BLOCK_BYTES;
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) {
          if (CHUNK % APART && first + c * APART >= CHUNK) break;
          // Channels APART apart are flipped alike.
          const uint4 four = ptx::load_shared_vector(block + c * (APART * OUT_BLOCK * 4) + (quad % (OUT_BLOCK / 4) ^ flips(first)) * 16);
          sums[c].add(__uint_as_float(four.x));
          sums[c].add(__uint_as_float(four.y));
          sums[c].add(__uint_as_float(four.z));
          sums[c].add(__uint_as_float(four.w));
        }
      }
    }
    __syncwarp();
    if (lane == 0) ptx::arrive(ring.empty());
    ring.advance();
  }
  float* const to = bias_partial + (place.slice * STRIDE_H + place.offset()) * (2 * OUT_CHANNELS) + place.group * CO_GROUP;
#pragma unroll
  for (int c = 0; c < CHANNELS; ++c) {
    sums[c].add_lane(1);
    const int channel = first + c * APART, co = place.co + channel;
    if (lane % 2 == 0 && channel < CHUNK && co < CO_GROUP) {
      to[co] = sums[c].sum;
      to[OUT_CHANNELS + co] = sums[c].remainder();
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    grad_weight_direct(const __grid_constant__ TensorMap input, const __grid_constant__ TensorMap grad_output,
                       float* __restrict__ gradient, float* __restrict__ bias_partial, long long batch, long long slices) {
  extern __shared__ __align__(1024) u32 shared[];
  const Ring ring((ptx::shared_address(shared) + 1023) & ~1023u);
  const Place place(blockIdx.x);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    ptx::prefetch_map(input);
    ptx::prefetch_map(grad_output);
    Ring each = ring;
    for (each.stage = 0; each.stage < STAGES; ++each.stage) {
      ptx::set_up_barrier(each.full(), 1);
      ptx::set_up_barrier(each.empty(), 4 * WARPGROUPS + (place.counts() ? BIAS_WARPS : 0));
    }
    ptx::publish_barriers();
  }
  __syncthreads();
  const long long all = (batch + IMAGES - 1) / IMAGES * STAGES_OF_IMAGES;
  const int first_stage = static_cast<int>(all * place.slice / slices);
  const int stages = static_cast<int>(all * (place.slice + 1) / slices) - first_stage;
  ptx::wait_for_previous_launch();
  ptx::let_next_launch_start();
  if (warp < 4) {
    ptx::shrink_registers<FILL_REGISTERS>();
    if (threadIdx.x == 0) fill(ring, input, grad_output, place, first_stage, stages);
    if (warp >= 4 - BIAS_WARPS && place.counts()) add_bias(ring, place, warp - (4 - BIAS_WARPS), lane, stages, bias_partial);
  } else {
    ptx::grow_registers<MULTIPLY_REGISTERS>();
    float sums[BLOCKS][TILE_COLS / 2];
    multiply_all(ring, sums, warp - 4, lane, stages);
    store(sums, place, warp - 4, lane, gradient);
  }
}
