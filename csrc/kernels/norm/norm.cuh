// What the kernels of normalisation share: where the values of a tile lie, and the derivatives of the activations.
//
// A tile is what one block, or the `splits` blocks that share it, reduces:
//   NCHW           one channel of all images (BatchNorm) or of one (InstanceNorm): segments of `spatial` contiguous
//   values;
//                  one statistic.
//   channels_last  LANES * VALUES channels of all pixels (BatchNorm), or of one image's (InstanceNorm): one statistic for
//                  each channel.
// An item is what one thread loads at a time: VALUES neighbours in memory, at most 16 bytes.
//
// Constants: Element, Parameter (of weight, bias and running statistics), VALUES, THREADS, CHANNELS_LAST, ACTIVATION,
// CLUSTER (blocks of a cluster, which share a tile; 1: none), STAGE, ADDS (a tensor is added before the activation).
#pragma once
#include "common/mma.cuh"
#include "common/activation.cuh"
#include "common/raw.cuh"

#if __CUDA_ARCH__ >= 900
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_DIMS
static_assert(CLUSTER == 1, "clusters are of sm_90 and later");
#endif

/// STAGE. FUSED: one launch, where a block or a cluster has a whole tile. Else one launch that reduces and one that
/// applies.
constexpr int FUSED = 0, REDUCE = 1, APPLY = 2;
/// Items that a thread loads before it uses the first.
constexpr int UNROLL = CHANNELS_LAST || VALUES >= 4 ? 4 : 8;
constexpr int STATISTICS = CHANNELS_LAST ? VALUES : 1;

using Item = Raw<VALUES>;

/// The struct argument, in the order of Tiling.struct_words of tconv_swap/kernels/norm/shape.py.
struct Shape {
  int channels, spatial, items;
  int segment;               // NCHW: items of a segment, and the magic number that divides by it
  unsigned magic;
  int shift;
  int segments_stride;       // NCHW: from one segment to the next, in multiples of `spatial`
  int channel_tiles, lane_bits;  // channels_last
  int splits, split_items;   // blocks that share a tile, and how many items each has
  int cached;                // items of each thread that stay in shared memory
  int partials, partial_items;  // partial sums that the launch before left, and how many items each is of
  int groups;                // statistics of the tensor: channels, or images times channels
  int trains;                // the statistics are the batch's, not the running ones
  int counts;                // 1: num_batches_tracked goes up; -1: it is up already, and its inverse is the momentum
  float count, eps, momentum, slope;
};

/// Which part of which tile a block has.
struct Tile {
  int index, split, first, step, end;
  int lanes, lane, statistic, parameter;
  bool inside;
  long long base;

  __device__ __forceinline__ Tile(const Shape& s, unsigned block) {
    index = static_cast<int>(block / (unsigned)s.splits), split = static_cast<int>(block % (unsigned)s.splits);
    const int begin = split * s.split_items;
    end = min(s.items, begin + s.split_items);
    if constexpr (CHANNELS_LAST) {
      lanes = 1 << s.lane_bits, lane = threadIdx.x & (lanes - 1);
      const int set = index / s.channel_tiles;
      parameter = ((index - set * s.channel_tiles) * lanes + lane) * VALUES;
      inside = parameter < s.channels;
      statistic = set * s.channels + parameter;
      base = (long long)set * s.items * s.channels + parameter;
      first = begin + (threadIdx.x >> s.lane_bits), step = THREADS >> s.lane_bits;
      if (!inside) first = end;
    } else {
      lanes = 1, lane = 0, inside = true;
      statistic = index, parameter = index % s.channels;
      base = (long long)index * s.spatial;
      first = begin + threadIdx.x, step = THREADS;
    }
  }
  __device__ __forceinline__ long long offset(const Shape& s, int item) const {
    if constexpr (CHANNELS_LAST) {
      return base + (long long)item * s.channels;
    } else {
      const int segment = static_cast<int>((__umulhi((unsigned)item, s.magic) + (unsigned)item) >> s.shift);
      return base + (long long)segment * s.segments_stride * s.spatial + (item - segment * s.segment) * VALUES;
    }
  }
  /// Items of a split, if each has at most `each`.
  __device__ __forceinline__ static int items_of(const Shape& s, int split, int each) {
    return max(0, min(s.items - split * each, each));
  }
  /// How many statistics the tile has; and for which of all statistics thread `t` of the first `width` is (negative:
  /// none).
  __device__ __forceinline__ int width() const { return CHANNELS_LAST ? lanes * VALUES : 1; }
  __device__ __forceinline__ int group(const Shape& s, int t) const {
    if constexpr (!CHANNELS_LAST) return index;
    const int set = index / s.channel_tiles, channel = (index - set * s.channel_tiles) * lanes * VALUES + t;
    return channel < s.channels ? set * s.channels + channel : -1;
  }
};

// ---- items that stay in shared memory from the reduction to the last pass --------------------------------------------

extern __shared__ uint4 cached_items[];

/// Address of item `k` of this thread: the items of neighbouring threads are neighbours.
__device__ __forceinline__ unsigned cached_at(int k) {
  const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(cached_items));
  return base + (unsigned)(k * THREADS + threadIdx.x) * Item::BYTES;
}
__device__ __forceinline__ void store_cached(int k, const Item& item) {
  if constexpr (Item::BYTES == 16)
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(cached_at(k)), "r"(item.words[0]), "r"(item.words[1]),
                 "r"(item.words[2]), "r"(item.words[3])
                 : "memory");
  else if constexpr (Item::BYTES == 8)
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(cached_at(k)), "r"(item.words[0]), "r"(item.words[1]) : "memory");
  else if constexpr (Item::BYTES == 4)
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(cached_at(k)), "r"(item.words[0]) : "memory");
  else
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(cached_at(k)), "h"((unsigned short)item.words[0]) : "memory");
}
__device__ __forceinline__ void load_cached(int k, Item& item) {
  if constexpr (Item::BYTES == 16) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(item.words[0]), "=r"(item.words[1]), "=r"(item.words[2]), "=r"(item.words[3])
                 : "r"(cached_at(k))
                 : "memory");
  } else if constexpr (Item::BYTES == 8) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(item.words[0]), "=r"(item.words[1]) : "r"(cached_at(k)) : "memory");
  } else if constexpr (Item::BYTES == 4) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(item.words[0]) : "r"(cached_at(k)) : "memory");
  } else {
    unsigned short word;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(word) : "r"(cached_at(k)) : "memory");
    item.words[0] = word;
  }
}

// ---- derivatives of the activations ------------------------------------------------------------------------------

constexpr float ONE_OVER_SQRT_TWO_PI = 0.39894228040143268f;

/// The gradient of the activation's input `u`, from that of its output.
__device__ __forceinline__ float activation_gradient(float gradient, float u, float slope) {
  if constexpr (ACTIVATION == RELU) return u <= 0.f ? 0.f : gradient;
  if constexpr (ACTIVATION == LEAKY_RELU) return u > 0.f ? gradient : gradient * slope;
  if constexpr (ACTIVATION == RELU6) return u <= 0.f || u >= 6.f ? 0.f : gradient;
  if constexpr (ACTIVATION == TANH) {
    const float z = tanhf(u);
    return gradient * (1.f - z * z);
  }
  if constexpr (ACTIVATION == SIGMOID) {
    const float z = sigmoid(u);
    return gradient * (z * (1.f - z));
  }
  if constexpr (ACTIVATION == SILU) {
    const float z = sigmoid(u);
    return gradient * (z * (1.f + u * (1.f - z)));
  }
  if constexpr (ACTIVATION == GELU)
    return gradient * (0.5f * (1.f + erff(u * SQRT_HALF)) + u * ONE_OVER_SQRT_TWO_PI * expf(-0.5f * u * u));
  if constexpr (ACTIVATION == GELU_TANH) {
    const float t = tanhf(SQRT_TWO_OVER_PI * (u + GELU_CUBE * u * u * u));
    const float slope_of_t = (1.f - t * t) * SQRT_TWO_OVER_PI * (1.f + 3.f * GELU_CUBE * u * u);
    return gradient * (0.5f * (1.f + t) + 0.5f * u * slope_of_t);
  }
  return gradient;
}

/// The same from the activation's output `z`, for the activations whose derivative follows from it.
__device__ __forceinline__ float activation_gradient_from_output(float z, float gradient) {
  static_assert(!ADDS || ACTIVATION == RELU || ACTIVATION == TANH || ACTIVATION == SIGMOID);
  if constexpr (ACTIVATION == RELU) return z <= 0.f ? 0.f : gradient;
  if constexpr (ACTIVATION == TANH) return gradient * (1.f - z * z);
  if constexpr (ACTIVATION == SIGMOID) return gradient * (z * (1.f - z));
  return gradient;
}
