// Weights [in, out / groups, KERNEL_H, KERNEL_W] (contiguous or channels_last) into the A fragments that
// forward_tile.cu multiplies with, rounded to TF32 there where float32 is computed with (forward_tile_taps.cuh
// says the order). Runs before every forward pass, so that packed weights are never stale, and lets the forward
// kernel start at once (it waits for this one before it reads a weight).
//
// One block packs one step of 8 words of k of one tile of 16 channels, all taps.
#include "mma.cuh"
#include "forward_tile_taps.cuh"

using ptx::u32;

__device__ __forceinline__ u32 bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ u32 bits_of(Half x) { return x.bits; }
__device__ __forceinline__ u32 bits_of(BFloat16 x) { return x.bits; }

constexpr int ROWS = 16;
constexpr int CHANNELS = STEP_WORDS * CHANNELS_PER_WORD;
// Staged through shared memory so that global reads are whole runs. An odd pitch spreads a lane's channels.
constexpr int ROW_PITCH = TAPS | 1;
constexpr int CHANNEL_PITCH = ROWS * ROW_PITCH + (CHANNELS_PER_WORD == 1 ? 8 : 0);
constexpr bool STAGED = CHANNELS * CHANNEL_PITCH * (int)sizeof(Element) <= 48 * 1024;

__device__ __forceinline__ long long weight_offset(int ci, int co, int tap) {
  return WEIGHT_CHANNELS_LAST ? ((long long)ci * TAPS + tap) * CO_GROUP + co
                              : ((long long)ci * CO_GROUP + co) * TAPS + tap;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    pack_weights(const Element* __restrict__ weight, u32* __restrict__ packed) {
  ptx::let_next_launch_start();
  __shared__ Element staged[STAGED ? CHANNELS * CHANNEL_PITCH : 1];

  int block = blockIdx.x;
  const int tile = block % BLOCK_M_TILES;
  block /= BLOCK_M_TILES;
  const int m_block = block % M_BLOCKS;
  block /= M_BLOCKS;
  const int group = block % GROUPS;
  const int step = block / GROUPS;

  const int first_ci = step * CHANNELS;
  const auto channel = [&](int row) { return m_block * BLOCK_M + channel_of_row(tile, row); };

  if constexpr (STAGED) {
    for (int e = threadIdx.x; e < CHANNELS * ROWS * TAPS; e += THREADS) {
      const int ci = e / (ROWS * TAPS), rest = e % (ROWS * TAPS);
      const int row = WEIGHT_CHANNELS_LAST ? rest % ROWS : rest / TAPS;
      const int tap = WEIGHT_CHANNELS_LAST ? rest / ROWS : rest % TAPS;
      const bool inside = first_ci + ci < CI_GROUP && channel(row) < CO_GROUP;
      staged[ci * CHANNEL_PITCH + row * ROW_PITCH + tap] =
          inside ? weight[weight_offset(group * CI_GROUP + first_ci + ci, channel(row), tap)] : Element{};
    }
    __syncthreads();
  }

  const auto value = [&](int ci, int row, int tap) -> Element {
    if constexpr (STAGED) return staged[ci * CHANNEL_PITCH + row * ROW_PITCH + tap];
    const bool inside = first_ci + ci < CI_GROUP && channel(row) < CO_GROUP;
    return inside ? weight[weight_offset(group * CI_GROUP + first_ci + ci, channel(row), tap)] : Element{};
  };

  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int tap = threadIdx.x / 32; tap < TAPS; tap += THREADS / 32) {
    const int kh = tap / KERNEL_W, kw = tap % KERNEL_W;
    const int phase_group = ROWS_AXIS.group(kh) * GROUP_COLS + COLS_AXIS.group(kw);
    const int taps = group_taps(phase_group);
    const int rank = ROWS_AXIS.rank(kh) * COLS_AXIS.count(COLS_AXIS.group(kw)) + COLS_AXIS.rank(kw);
    const long long before = (long long)taps_before(phase_group) * GROUPS * M_BLOCKS * STEPS;
    const long long within = (((long long)group * M_BLOCKS + m_block) * STEPS + step) * taps + rank;
    uint4* to = reinterpret_cast<uint4*>(packed + (before + within) * TAP_WORDS) + tile * 32 + lane;

    u32 word[4];
    u32 low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = g + i % 2 * 8, k = t + i / 2 * 4;
      if constexpr (CHANNELS_PER_WORD == 2) {
        word[i] = bits_of(value(2 * k, row, tap)) | bits_of(value(2 * k + 1, row, tap)) << 16;
      } else {
        const float exact = load_as(value(k, row, tap));
        word[i] = ptx::round_to_tf32(__float_as_uint(exact));
        low[i] = ptx::low_part(exact, word[i]);
      }
    }
    to[0] = make_uint4(word[0], word[1], word[2], word[3]);
    if constexpr (PARTS == 2) to[BLOCK_M_TILES * 32] = make_uint4(low[0], low[1], low[2], low[3]);
  }
}
