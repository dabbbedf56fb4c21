// Packs weights [in, out / groups, KERNEL_H, KERNEL_W] (contiguous or channels_last) into the order from which the kernels
// forward/implicit_gemm_{mma,wgmma,tma,tma_nchw}.cu multiply (forward/implicit_gemm_taps.cuh); float32 is rounded to TF32.
// It runs before every forward pass, so that packed weights are never stale. It lets the forward kernel start at once, which
// waits for this one before it reads a weight.
//
// OF_GRAD_INPUT: the gradient of the input is a convolution of the output's gradient. It reads weights [out, in / groups,
// KERNEL_H, KERNEL_W], in the names of that convolution, with the taps reversed.
//
// One thread writes 16 bytes. Neighbouring threads read neighbouring weights, so that each weight is read once, in whole
// sectors. The loads of a thread are independent, so that the kernel waits for memory once.
#include "common/mma.cuh"
#include "common/raw.cuh"
#include "forward/implicit_gemm_taps.cuh"

using ptx::u32;

// 16 bytes hold, for wgmma, 4 words of k of one channel (a step has 2 such parts); for mma.sync, 2 words of k (t and t + 4)
// of the two channels in rows g and g + 8 (4 parts).
constexpr int PARTS_OF_STEP = PLANES ? 2 : 4;
constexpr int CHANNELS_OF_UNIT = PLANES ? 1 : 2;
constexpr int UNITS = M_BLOCKS * BLOCK_M / CHANNELS_OF_UNIT;

extern "C" __global__ void __launch_bounds__(THREADS)
    forward_implicit_gemm_pack(const Element* __restrict__ weight, u32* __restrict__ packed) {
  ptx::let_next_launch_start();
  // The innermost dimension of the weight comes first: its last one, or in channels_last its channels.
  constexpr int INNER = OF_GRAD_INPUT ? PARTS_OF_STEP * STEPS : UNITS, OUTER = OF_GRAD_INPUT ? UNITS : PARTS_OF_STEP * STEPS;
  const int i = blockIdx.x * THREADS + threadIdx.x;
  const int inner = WEIGHT_CHANNELS_LAST ? i % INNER : i / TAPS % INNER;
  const int tap = WEIGHT_CHANNELS_LAST ? i / INNER % TAPS : i % TAPS;
  const int outer = i / (INNER * TAPS) % OUTER, group = i / (INNER * TAPS * OUTER);
  const int unit = OF_GRAD_INPUT ? outer : inner;
  const int part = (OF_GRAD_INPUT ? inner : outer) % PARTS_OF_STEP, step = (OF_GRAD_INPUT ? inner : outer) / PARTS_OF_STEP;
  if (group >= GROUPS) return;

  // The unit's first channel is row `row` of a tile of 16 (below 8 where the unit has two channels).
  const int m_block = unit / (BLOCK_M / CHANNELS_OF_UNIT), in_block = unit % (BLOCK_M / CHANNELS_OF_UNIT);
  const int tile = tile_of_unit<CHANNELS_OF_UNIT>(in_block), row = row_of_unit<CHANNELS_OF_UNIT>(in_block);

  const int tap_row = tap / KERNEL_W, tap_col = tap % KERNEL_W;
  u32 high[4], low[4];
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const int k = (step * STEP_WORDS + (PLANES ? part * 4 + word : part + word / 2 * 4)) * CHANNELS_PER_WORD;
    const int m = channel_of_row(tile, PLANES ? row : row + word % 2 * 8);
    const int channel = m_block * BLOCK_CHANNELS + m % BLOCK_CHANNELS;
    const int kh = STACK > 1 ? stacked_kernel_row(m / BLOCK_CHANNELS, tap_row) : tap_row;
    const auto value = [&](int ci) -> Element {
      if (ci >= CI_GROUP || channel >= CO_GROUP || kh < 0 || kh >= KERNEL_H) return Element{};
      // The indices of the weight's first and second dimension, and the length of the second.
      const long long first = OF_GRAD_INPUT ? group * CO_GROUP + channel : group * CI_GROUP + ci;
      const int second = OF_GRAD_INPUT ? ci : channel;
      constexpr int SECOND = OF_GRAD_INPUT ? CI_GROUP : CO_GROUP;
      const int from_row = OF_GRAD_INPUT ? KERNEL_H - 1 - kh : kh;
      const int from_col = OF_GRAD_INPUT ? KERNEL_W - 1 - tap_col : tap_col;
      return weight[WEIGHT_CHANNELS_LAST ? ((first * KERNEL_H + from_row) * KERNEL_W + from_col) * SECOND + second
                                         : ((first * SECOND + second) * KERNEL_H + from_row) * KERNEL_W + from_col];
    };
    if constexpr (CHANNELS_PER_WORD == 2) {
      high[word] = bits_of(value(k)) | bits_of(value(k + 1)) << 16;
    } else {
      const float exact = load_as(value(k));
      high[word] = ptx::round_to_tf32(__float_as_uint(exact));
      low[word] = ptx::low_part(exact, high[word]);
    }
  }

  const int phase_group = ROWS_AXIS.group(tap_row) * GROUP_COLS + COLS_AXIS.group(tap_col);
  const int rank = ROWS_AXIS.rank(tap_row) * COLS_AXIS.count(COLS_AXIS.group(tap_col)) + COLS_AXIS.rank(tap_col);
  const long long before = static_cast<long long>(taps_before(phase_group)) * GROUPS * M_BLOCKS * STEPS;
  const long long within =
      ((static_cast<long long>(group) * M_BLOCKS + m_block) * STEPS + step) * group_taps(phase_group) + rank;
  const int place = PLANES ? tile / 4 * 128 + part * 64 + tile % 4 * 16 + row : tile * 32 + row * 4 + part;
  uint4* to = reinterpret_cast<uint4*>(packed + (before + within) * TAP_WORDS) + place;
  to[0] = make_uint4(high[0], high[1], high[2], high[3]);
  if constexpr (PARTS == 2) to[BLOCK_M_TILES * 32] = make_uint4(low[0], low[1], low[2], low[3]);
}
