// Loads of one chunk of k of the weights by the copy engine, for forward/implicit_gemm_tma.cu: with TMA_WEIGHTS in their own
// layout, elsewhere packed (forward/implicit_gemm_scheduler.cuh). The dimensions of the tensor map, innermost first: channel of
// the group, input channel of the group, tap, group.
#pragma once

/// Issues the loads of weights in their own layout, in boxes of the tensor map.
struct TmaWeightLoader {
  const TensorMap* weight;
  int channel, input_channel, group, phase_group;
  u32 bytes;

  __device__ __forceinline__ explicit TmaWeightLoader(const TensorMap& weight) : weight(&weight) {}
  __device__ __forceinline__ void set_tile(const WorkTile& work) {
    channel = work.m_block * BLOCK_CHANNELS;
    input_channel = work.first_chunk * CHUNK_CHANNELS;
    group = work.group;
    phase_group = work.phase_group;
    int taps = group_taps(0);
    static_for<1, PHASE_GROUPS>([&](auto index) {
      constexpr int GROUP = decltype(index)::value;
      if (phase_group == GROUP) taps = group_taps(GROUP);
    });
    bytes = taps * (BLOCK_M / 64) * TAP_WEIGHTS * 16;
  }
  __device__ __forceinline__ void advance() { input_channel += CHUNK_CHANNELS; }
  __device__ __forceinline__ void copy(u32 to, u32 barrier) const {
    if (bytes == 0) return;
    static_for<0, TAPS / BOX_TAPS>([&](auto index) {
      constexpr int TAP = decltype(index)::value, KH = TAP / KERNEL_W, KW = TAP % KERNEL_W;
      constexpr int GROUP_ROW = ROWS_AXIS.group(KH), GROUP_COL = COLS_AXIS.group(KW);
      constexpr int RANK = ROWS_AXIS.rank(KH) * COLS_AXIS.count(GROUP_COL) + COLS_AXIS.rank(KW);
      if (phase_group == GROUP_ROW * GROUP_COLS + GROUP_COL)
#pragma unroll
        for (int part = 0; part < BLOCK_M / 64; ++part)
          ptx::tma_load(to + RANK * TAP_WEIGHTS * 16 + part * WARPGROUP_WEIGHTS, *weight, channel + part * 64, input_channel, TAP,
                        group, barrier);
    });
  }
};

/// The argument that the kernel gets for the weights, and their loader.
template <bool IS_TMA>
struct WeightsOf {
  using Argument = const u32*;
  using Loader = WeightLoader;
};
template <>
struct WeightsOf<true> {
  using Argument = TensorMap;
  using Loader = TmaWeightLoader;
};
using Weights = WeightsOf<TMA_WEIGHTS>;
