// Statistics of a tile, from its threads, blocks and slices: always in the same order, so always the same bits.
//
// A Moments is a mean and the sum of squared distances to it: two of them are put together by Chan, Golub and LeVeque's
// formula (1979), which loses nothing where the mean is far from zero. A Sums is two plain sums.
#pragma once
#include "norm/norm.cuh"

struct Moments {
  float mean = 0.f, squares = 0.f;
};
struct Sums {
  float gradient = 0.f, product = 0.f;
};

/// `a` of `n` values becomes that of these and the `k` values of `b`.
__device__ __forceinline__ void merge(Moments& a, float n, const Moments& b, float k) {
  const float share = __fdividef(k, fmaxf(n + k, 1.f)), delta = b.mean - a.mean;
  a.mean += delta * share;
  a.squares += b.squares + delta * delta * (n * share);
}
__device__ __forceinline__ void merge(Sums& a, float, const Sums& b, float) {
  a.gradient += b.gradient, a.product += b.product;
}
__device__ __forceinline__ float from_lane(float x, int distance) { return __shfl_down_sync(~0u, x, distance); }
__device__ __forceinline__ Moments from_lane(const Moments& x, int distance) {
  return {from_lane(x.mean, distance), from_lane(x.squares, distance)};
}
__device__ __forceinline__ Sums from_lane(const Sums& x, int distance) {
  return {from_lane(x.gradient, distance), from_lane(x.product, distance)};
}

constexpr int MOST_LANES = 16, WARPS = THREADS / 32;
constexpr int WIDTH = CHANNELS_LAST ? MOST_LANES * VALUES : 1;

template <class Statistic>
struct Reduction {
  Statistic of_warps[WARPS][WIDTH];
  float counts[WARPS];
  Statistic of_block[WIDTH];

  /// Puts together what the threads have: thread t has K statistics of `n` values each, those from (t % lanes) * K on of
  /// lanes * K. Leaves them in of_block for threads that come to `_` the next barrier; `lanes` is a power of two.
  template <int K>
  __device__ __forceinline__ void of_threads(Statistic (&mine)[K], float n, int lanes) {
    for (int distance = 16; distance >= lanes; distance /= 2) {
      const float k = from_lane(n, distance);
#pragma unroll
      for (int j = 0; j < K; ++j) {
        const Statistic other = from_lane(mine[j], distance);
        merge(mine[j], n, other, k);
      }
      n += k;
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, sharers = max(1, THREADS / max(32, lanes));
    if (lane < lanes) {
      // Where a row of lanes is wider than a warp, several warps have a part of it each.
      const int row = lanes > 32 ? threadIdx.x / lanes : warp, first = (threadIdx.x & (lanes - 1)) * K;
#pragma unroll
      for (int j = 0; j < K; ++j) of_warps[row][first + j] = mine[j];
      if (first == 0) counts[row] = n;
    }
    __syncthreads();
    for (int t = threadIdx.x; t < lanes * K; t += THREADS) {
      Statistic all = of_warps[0][t];
      float total = counts[0];
      for (int row = 1; row < sharers; ++row) {
        merge(all, total, of_warps[row][t], counts[row]);
        total += counts[row];
      }
      of_block[t] = all;
    }
    __syncthreads();
  }

  /// Puts together what the blocks of a cluster have in of_block; thread t < width gets that of statistic t.
  __device__ __forceinline__ Statistic of_cluster(const Shape& s, const Tile& tile, float values_of_item) const {
    const int width = tile.width();
    Statistic all{};
    if constexpr (CLUSTER == 1) {
      if (threadIdx.x < width) all = of_block[threadIdx.x];
    } else {
#if __CUDA_ARCH__ >= 900
      asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
      if (threadIdx.x < width) {
        const unsigned here = static_cast<unsigned>(__cvta_generic_to_shared(&of_block[threadIdx.x]));
        float total = 0.f;
#pragma unroll
        for (int rank = 0; rank < CLUSTER; ++rank) {
          unsigned there;
          float one, other;
          asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
          asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(one) : "r"(there) : "memory");
          asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(other) : "r"(there + 4) : "memory");
          const float k = Tile::taken(s, tile.slice / CLUSTER * CLUSTER + rank, s.slice) * values_of_item;
          merge(all, total, Statistic{one, other}, k);
          total += k;
        }
      }
#endif
    }
    return all;
  }

  /// Puts together what the launch before left of each slice; thread t < width gets that of statistic t.
  __device__ __forceinline__ Statistic of_partials(const Shape& s, const Tile& tile, const float* partial,
                                                   float values_of_item) {
    const int width = tile.width(), sharers = max(1, THREADS / width);
    const int t = threadIdx.x & (width - 1), sharer = threadIdx.x / width, group = tile.group(s, t);
    Statistic mine[1] = {};
    float total = 0.f;
    if (group >= 0 && sharer < sharers) {
#pragma unroll 4
      for (int p = sharer; p < s.partials; p += sharers) {
        const float* from = partial + 2 * ((long long)p * s.groups + group);
        const float k = Tile::taken(s, p, s.partial) * values_of_item;
        const float2 one = *reinterpret_cast<const float2*>(from);
        merge(mine[0], total, Statistic{one.x, one.y}, k);
        total += k;
      }
    }
    of_threads<1>(mine, total, width);
    return threadIdx.x < width ? of_block[threadIdx.x] : Statistic{};
  }
};

/// A block whose memory others of its cluster may still read must not end.
__device__ __forceinline__ void leave_cluster() {
#if __CUDA_ARCH__ >= 900
  if constexpr (CLUSTER > 1)
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
