// Reduces the statistics of a tile over its threads, blocks and splits, always in the same order, so with the same
// bits.
//
// Moments are a mean and the sum of squared distances to it: two of them are merged by the formula of Chan, Golub and
// LeVeque (1979), which loses nothing where the mean is far from zero. Sums are two plain sums.
#pragma once
#include "norm/norm.cuh"

struct Moments {
  float mean = 0.f, squares = 0.f;
};
struct Sums {
  float gradient = 0.f, product = 0.f;
};

/// Merges `b` of `k` values into `a` of `n` values.
__device__ __forceinline__ void merge(Moments& a, float n, const Moments& b, float k) {
  const float share = __fdividef(k, fmaxf(n + k, 1.f)), delta = b.mean - a.mean;
  a.mean += delta * share;
  a.squares += b.squares + delta * delta * (n * share);
}
__device__ __forceinline__ void merge(Sums& a, float, const Sums& b, float) {
  a.gradient += b.gradient, a.product += b.product;
}
/// The value of the lane `distance` further on.
__device__ __forceinline__ float shuffle_down(float x, int distance) { return __shfl_down_sync(~0u, x, distance); }
__device__ __forceinline__ Moments shuffle_down(const Moments& x, int distance) {
  return {shuffle_down(x.mean, distance), shuffle_down(x.squares, distance)};
}
__device__ __forceinline__ Sums shuffle_down(const Sums& x, int distance) {
  return {shuffle_down(x.gradient, distance), shuffle_down(x.product, distance)};
}

constexpr int MAX_LANES = 16, WARPS = THREADS / 32;
constexpr int WIDTH = CHANNELS_LAST ? MAX_LANES * VALUES : 1;

template <class Statistic>
struct Reduction {
  Statistic warp_results[WARPS][WIDTH];
  float counts[WARPS];
  Statistic block_results[WIDTH];

  /// Reduces over the threads of the block: thread t has K statistics of `n` values each, those from (t % lanes) * K on
  /// of lanes * K. Leaves them in block_results, for all threads; `lanes` is a power of two.
  template <int K>
  __device__ __forceinline__ void reduce_threads(Statistic (&mine)[K], float n, int lanes) {
    for (int distance = 16; distance >= lanes; distance /= 2) {
      const float k = shuffle_down(n, distance);
#pragma unroll
      for (int j = 0; j < K; ++j) {
        const Statistic other = shuffle_down(mine[j], distance);
        merge(mine[j], n, other, k);
      }
      n += k;
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, ranks = max(1, THREADS / max(32, lanes));
    if (lane < lanes) {
      // Where a row of lanes is wider than a warp, several warps have parts of it.
      const int row = lanes > 32 ? threadIdx.x / lanes : warp, first = (threadIdx.x & (lanes - 1)) * K;
#pragma unroll
      for (int j = 0; j < K; ++j) warp_results[row][first + j] = mine[j];
      if (first == 0) counts[row] = n;
    }
    __syncthreads();
    for (int t = threadIdx.x; t < lanes * K; t += THREADS) {
      Statistic all = warp_results[0][t];
      float total = counts[0];
      for (int row = 1; row < ranks; ++row) {
        merge(all, total, warp_results[row][t], counts[row]);
        total += counts[row];
      }
      block_results[t] = all;
    }
    __syncthreads();
  }

  /// Reduces the blocks' results over the cluster; thread t < width gets statistic t.
  __device__ __forceinline__ Statistic reduce_cluster(const Shape& s, const Tile& tile, float values_of_item) const {
    const int width = tile.width();
    Statistic all{};
    if constexpr (CLUSTER == 1) {
      if (threadIdx.x < width) all = block_results[threadIdx.x];
    } else {
#if __CUDA_ARCH__ >= 900
      asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
      if (threadIdx.x < width) {
        const unsigned here = static_cast<unsigned>(__cvta_generic_to_shared(&block_results[threadIdx.x]));
        float total = 0.f;
#pragma unroll
        for (int rank = 0; rank < CLUSTER; ++rank) {
          unsigned there;
          float one, other;
          asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
          asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(one) : "r"(there) : "memory");
          asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(other) : "r"(there + 4) : "memory");
          const float k = Tile::items_of(s, tile.split / CLUSTER * CLUSTER + rank, s.split_items) * values_of_item;
          merge(all, total, Statistic{one, other}, k);
          total += k;
        }
      }
#endif
    }
    return all;
  }

  /// Reduces the partial results that the launch before left; thread t < width gets statistic t.
  __device__ __forceinline__ Statistic reduce_partials(const Shape& s, const Tile& tile, const float* partial,
                                                   float values_of_item) {
    const int width = tile.width(), ranks = max(1, THREADS / width);
    const int t = threadIdx.x & (width - 1), rank = threadIdx.x / width, group = tile.group(s, t);
    Statistic mine[1] = {};
    float total = 0.f;
    if (group >= 0 && rank < ranks) {
#pragma unroll 4
      for (int p = rank; p < s.partials; p += ranks) {
        const float* from = partial + 2 * ((long long)p * s.groups + group);
        const float k = Tile::items_of(s, p, s.partial_items) * values_of_item;
        const float2 one = *reinterpret_cast<const float2*>(from);
        merge(mine[0], total, Statistic{one.x, one.y}, k);
        total += k;
      }
    }
    reduce_threads<1>(mine, total, width);
    return threadIdx.x < width ? block_results[threadIdx.x] : Statistic{};
  }
};

/// A block must not end while others of its cluster may still read its memory.
__device__ __forceinline__ void leave_cluster() {
#if __CUDA_ARCH__ >= 900
  if constexpr (CLUSTER > 1)
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
