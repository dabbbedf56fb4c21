// Where the sums of grad_weight/implicit_gemm_*.cu go: with one split to the gradient, else to the workspace in the
// order of the threads, [split][tile][warp][sum][lane] in units of 4 floats, which grad_weight/split_k_reduce.cu adds
// up.
#pragma once

constexpr int WEIGHT_TILES = M_BLOCKS * N_BLOCKS * TAP_BLOCKS * GROUPS;
/// Fragments of 16 x 8 sums of one warp: [m][tap][n], where m are rows of input channels.
constexpr int M_FRAGMENTS = WARP_M / 16, N_FRAGMENTS = WARP_N / 8;
constexpr int FRAGMENTS = M_FRAGMENTS * N_FRAGMENTS * WARP_TAPS;
constexpr int TILE_WARPS = WARPS_M * WARPS_N * WARPS_T;
/// Units of 4 floats of one split.
constexpr long long SPLIT_UNITS = static_cast<long long>(WEIGHT_TILES) * TILE_WARPS * FRAGMENTS * 32;
/// Rows of partial sums of the bias that one split writes.
constexpr int BIAS_ROWS = TAP_BLOCKS * BIAS_WRITERS;

/// Which part of a block's tile a warp computes.
struct WarpPlace {
  int m, n, t;
  __device__ __forceinline__ explicit WarpPlace(int warp)
      : m(warp % WARPS_M), n(warp / WARPS_M % WARPS_N), t(warp / (WARPS_M * WARPS_N)) {}
};

/// Calls put(offset in the gradient, which of the 4 sums) for each existing sum of one lane of a fragment.
template <class Put>
__device__ __forceinline__ void for_each_sum(const Place& place, const WarpPlace& warp, int fragment, int lane, const Put& put) {
  const int tap = warp.t * WARP_TAPS + fragment / N_FRAGMENTS % WARP_TAPS;
  const int kh = TapsH::tap(place.tap_block_h, tap / TAP_COLS), kw = TapsW::tap(place.tap_block_w, tap % TAP_COLS);
  if (tap >= BLOCK_TAPS || kh >= KERNEL_H || kw >= KERNEL_W) return;
  const int row = fragment / (WARP_TAPS * N_FRAGMENTS) * 16 + lane / 4, column = fragment % N_FRAGMENTS * 8 + lane % 4 * 2;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int m = row + r / 2 * 8, n = column + r % 2;
    const int ci = place.m0 + warp.m * WARP_M + m, co = place.n0 + warp.n * WARP_N + n;
    if (ci < CI_GROUP && co < CO_GROUP) put(at_weight(place.group * CI_GROUP + ci, co, kh, kw), r);
  }
}

/// Adds a warp's sums, [fragment][4], to its partial sums, or sets them. `split` counts the warps along k too.
__device__ __forceinline__ void store_partial(const float (&sums)[FRAGMENTS][4], const Place& place, int warp, int lane, int split,
                                              float4* partial, bool add) {
  float4* to = partial + split * SPLIT_UNITS + (static_cast<long long>(place.tile) * TILE_WARPS + warp) * (FRAGMENTS * 32) + lane;
#pragma unroll
  for (int f = 0; f < FRAGMENTS; ++f) {
    float4 sum = make_float4(sums[f][0], sums[f][1], sums[f][2], sums[f][3]);
    if (add) {
      const float4 before = to[f * 32];
      sum.x += before.x, sum.y += before.y, sum.z += before.z, sum.w += before.w;
    }
    to[f * 32] = sum;
  }
}

/// One fragment of every warp along m at a time passes through shared memory, so that neighbours are stored together.
/// Each row, of one input channel, begins a quarter of the banks after the one before.
constexpr int STAGED_ROWS = WARPS_M * 16, ROW_SUMS = BLOCK_N * BLOCK_TAPS, STAGED_PITCH = round_up(ROW_SUMS, 32) + 8;
constexpr int STAGED_BYTES = STAGED_ROWS * STAGED_PITCH * 4;
/// Output channels that one instruction stores.
constexpr int STORE_VECTOR = WEIGHT_CHANNELS_LAST && IS_16_BIT && CO_GROUP % 8 == 0 && BLOCK_N % 8 == 0 ? 8 : 1;

__device__ __forceinline__ void store_gradient_staged(const float (&sums)[FRAGMENTS][4], const Place& place, const WarpPlace& at,
                                                      int lane, float* shared, Element* gradient) {
#pragma unroll
  for (int i = 0; i < M_FRAGMENTS; ++i) {
    ptx::sync_named_barrier<1, THREADS>();
#pragma unroll
    for (int f = 0; f < WARP_TAPS * N_FRAGMENTS; ++f) {
      const int tap = at.t * WARP_TAPS + f / N_FRAGMENTS;
      const int row = at.m * 16 + lane / 4, n = at.n * WARP_N + f % N_FRAGMENTS * 8 + lane % 4 * 2;
      if (tap < BLOCK_TAPS) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const int m = row + r / 2 * 8, co = n + r % 2;
          shared[m * STAGED_PITCH + (WEIGHT_CHANNELS_LAST ? tap * BLOCK_N + co : co * BLOCK_TAPS + tap)] =
              sums[i * (WARP_TAPS * N_FRAGMENTS) + f][r];
        }
      }
    }
    ptx::sync_named_barrier<1, THREADS>();
    for (unsigned e = threadIdx.x * STORE_VECTOR; e < STAGED_ROWS * ROW_SUMS; e += THREADS * STORE_VECTOR) {
      const unsigned m = e / ROW_SUMS, in_row = e % ROW_SUMS;
      const unsigned co = WEIGHT_CHANNELS_LAST ? in_row % BLOCK_N : in_row / BLOCK_TAPS;
      const unsigned tap = WEIGHT_CHANNELS_LAST ? in_row / BLOCK_N : in_row % BLOCK_TAPS;
      const int ci = place.m0 + m / 16 * WARP_M + i * 16 + m % 16;
      const int kh = TapsH::tap(place.tap_block_h, tap / TAP_COLS), kw = TapsW::tap(place.tap_block_w, tap % TAP_COLS);
      if (ci >= CI_GROUP || place.n0 + static_cast<int>(co) >= CO_GROUP || kh >= KERNEL_H || kw >= KERNEL_W) continue;
      Element* to = gradient + at_weight(place.group * CI_GROUP + ci, place.n0 + co, kh, kw);
      const float* from = shared + m * STAGED_PITCH + in_row;
      if constexpr (STORE_VECTOR == 8) {
        const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
        *reinterpret_cast<uint4*>(to) = make_uint4(ptx::pack_pair<PRECISION>(a.x, a.y), ptx::pack_pair<PRECISION>(a.z, a.w),
                                                   ptx::pack_pair<PRECISION>(b.x, b.y), ptx::pack_pair<PRECISION>(b.z, b.w));
      } else {
        *to = store_as<Element>(*from);
      }
    }
  }
}

/// Stores a block's sums, which are the only split's, to the gradient. By THREADS threads; `shared` is free, STAGED_BYTES of it if
/// THROUGH_SHARED.
template <bool THROUGH_SHARED>
__device__ __forceinline__ void store_gradient(const float (&sums)[FRAGMENTS][4], const Place& place, int warp, int lane,
                                               float* shared, Element* gradient) {
  const WarpPlace at(warp);
  if constexpr (!THROUGH_SHARED) {
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
      for_each_sum(place, at, f, lane, [&](long long offset, int r) { gradient[offset] = store_as<Element>(sums[f][r]); });
  } else {
    store_gradient_staged(sums, place, at, lane, shared, gradient);
  }
}
