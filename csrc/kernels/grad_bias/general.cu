// Gradient of the bias, NCHW and channels_last: the sum of grad_output over batch and pixels.
//
// A block adds up one split of grad_output for its channels: it writes the sum to partial[row, channel], and in the next row
// what rounding left of it, if sums are compensated; common/split_k_reduce.cu adds up the rows. Every sum has a fixed order:
// the same input gives the same bits.
//
// Threads load VECTOR elements at once, LOADS_IN_FLIGHT times before they add them up. In NCHW a block has one channel, and
// the vectors of its planes follow each other. In channels_last the tensor is one row of vectors, of which each PERIOD have
// the same channels; a thread stays at one place of the period and has a sum for each element of a vector.
#include "common/compensated_sum.cuh"
#include "common/images.cuh"
#include "common/mma.cuh"

constexpr int PERIOD = OUT_CHANNELS / gcd(OUT_CHANNELS, VECTOR);
constexpr int TILES = CHANNELS_LAST ? ceil_div(PERIOD, THREADS) : OUT_CHANNELS;
constexpr int WIDTH = ceil_div(PERIOD, TILES);               // vectors of a period that a block has, in channels_last
constexpr int GROUPS_OF_THREADS = THREADS / WIDTH;           // periods that a block adds up at once, in channels_last
constexpr int PERIOD_POSITIONS = PERIOD * VECTOR / OUT_CHANNELS;
constexpr bool COMPENSATED = sizeof(Element) > 2;
constexpr int ROWS = COMPENSATED ? 2 : 1;  // of a split
using Sum = Accumulate<Element>::type;
using Total = CompensatedSum<Sum, COMPENSATED>;
static_assert(!CHANNELS_LAST || TILES == 1 || PERIOD_POSITIONS == 1, "a channel has its sums in one block");

struct Vector {
  Element elements[VECTOR];
};

__device__ __forceinline__ Vector load(const Element* __restrict__ from) {
  Vector vector;
  if constexpr (sizeof vector == 16) {
    const uint4 raw = __ldg(reinterpret_cast<const uint4*>(from));
    memcpy(&vector, &raw, sizeof vector);
  } else {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) vector.elements[i] = from[i];
  }
  return vector;
}
/// The same, with zeros outside of a row of `count` elements, in which the vector's first element has number `first`.
__device__ __forceinline__ Vector load_inside(const Element* __restrict__ from, Index first, Index count) {
  Vector vector{};
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    if (first + i >= 0 && first + i < count) vector.elements[i] = from[i];
  }
  return vector;
}

__device__ __forceinline__ void store(Sum* __restrict__ partial, int split, int channel, const Total& sum) {
  partial[(long long)ROWS * split * OUT_CHANNELS + channel] = sum.sum;
  if constexpr (COMPENSATED) partial[((long long)ROWS * split + 1) * OUT_CHANNELS + channel] = sum.remainder();
}

/// The vectors of a channel's planes, in NCHW, from one thread to its next: THREADS vectors further at each step, without
/// dividing again. Where planes are WHOLE vectors, `plane` points to the vector itself.
template <bool WHOLE>
struct PlaneIterator {
  const Element* plane;
  Index vector;
  const Index vectors, step_vectors;
  const long long image_elements, step_elements;

  __device__ __forceinline__ PlaneIterator(const Element* grad_output, int channel, Index number, Index vectors,
                                           long long pixels)
      : vectors(vectors),
        step_vectors(THREADS % vectors),
        image_elements(WHOLE ? (OUT_CHANNELS - 1) * pixels : OUT_CHANNELS * pixels),
        step_elements(THREADS / vectors * image_elements + (WHOLE ? THREADS * VECTOR : 0)) {
    const Index image = number / vectors;
    vector = number - image * vectors;
    plane = grad_output + (image * (long long)OUT_CHANNELS + channel) * pixels + (WHOLE ? vector * (long long)VECTOR : 0);
  }
  __device__ __forceinline__ void advance() {
    plane += step_elements;
    vector += step_vectors;
    if (vector >= vectors) vector -= vectors, plane += image_elements;
  }
};

template <bool WHOLE>
__device__ __forceinline__ Total sum_planes(const Element* __restrict__ grad_output, int channel, Index begin, Index end,
                                            Index vectors, Index pixels) {
  // The vectors at the ends of planes take registers, so fewer are loaded at once.
  constexpr int LOADS = WHOLE ? LOADS_IN_FLIGHT : LOADS_IN_FLIGHT / 2;
  Total sum{};
  PlaneIterator<WHOLE> iterator(grad_output, channel, begin + (int)threadIdx.x, vectors, pixels);
  for (Index left = end - begin - (int)threadIdx.x; left > 0; left -= LOADS * THREADS) {
    Vector loaded[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      loaded[i] = Vector{};
      if (left > i * THREADS) {
        if constexpr (WHOLE) {
          loaded[i] = load(iterator.plane);
        } else {
          // Vectors begin at multiples of VECTOR elements; the first and the last of a plane may extend beyond it.
          const int before = (unsigned)(iterator.plane - grad_output) % VECTOR;
          const Index first = iterator.vector * VECTOR - before;
          const Element* from = iterator.plane + first;
          const bool inside = first >= 0 && first + VECTOR <= pixels;
          loaded[i] = inside ? load(from) : load_inside(from, first, pixels);
        }
      }
      iterator.advance();
    }
#pragma unroll
    for (const Vector& vector : loaded) {
#pragma unroll
      for (const Element& one : vector.elements) sum.add(load_as(one));
    }
  }
  return sum;
}

/// Adds up the vectors of one place of the periods [begin, end), every GROUPS_OF_THREADS-th.
__device__ __forceinline__ void sum_periods(Total (&sums)[VECTOR], const Element* __restrict__ grad_output, int place,
                                            Index begin, Index end) {
  const Element* at = grad_output + ((long long)begin * PERIOD + place) * VECTOR;
  for (Index left = end - begin; left > 0; left -= LOADS_IN_FLIGHT * GROUPS_OF_THREADS) {
    Vector loaded[LOADS_IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < LOADS_IN_FLIGHT; ++i) {
      loaded[i] = Vector{};
      if (left > i * GROUPS_OF_THREADS) loaded[i] = load(at + i * GROUPS_OF_THREADS * PERIOD * VECTOR);
    }
    at += LOADS_IN_FLIGHT * GROUPS_OF_THREADS * PERIOD * VECTOR;
#pragma unroll
    for (const Vector& vector : loaded) {
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) sums[i].add(load_as(vector.elements[i]));
    }
  }
}

__device__ __forceinline__ void sum_channels_last(const Element* __restrict__ grad_output, Sum* __restrict__ partial,
                                                  long long positions, int tile, int split, Index begin, Index end) {
  __shared__ Total shared[VECTOR][THREADS];
  const int thread = threadIdx.x, group = thread / WIDTH, place = tile * WIDTH + thread % WIDTH;
  const bool active = group < GROUPS_OF_THREADS && place < PERIOD;
  Total sums[VECTOR] = {};
  if (active) {
    // The last period may have fewer positions than others.
    const Index whole = positions / PERIOD_POSITIONS;
    const Index whole_end = end < whole ? end : whole;
    sum_periods(sums, grad_output, place, begin + group, whole_end);
    if (PERIOD_POSITIONS > 1 && whole < end && group == 0) {
      const Element* period = grad_output + (long long)whole * PERIOD * VECTOR;
      const int rest = (int)(positions % PERIOD_POSITIONS) * OUT_CHANNELS;
      const Vector last = load_inside(period + place * VECTOR, place * VECTOR, rest);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) sums[i].add(load_as(last.elements[i]));
    }
  }
  ptx::let_next_launch_start();
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) shared[i][thread] = sums[i];
  __syncthreads();
  for (int groups = GROUPS_OF_THREADS; groups > 1;) {
    const int half = (groups + 1) / 2;
    if (group + half < groups) {
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) shared[i][thread].add(shared[i][thread + half * WIDTH]);
    }
    groups = half;
    __syncthreads();
  }
  const int tile_channels = TILES == 1 ? OUT_CHANNELS : WIDTH * VECTOR;
  for (int one = thread; one < tile_channels; one += THREADS) {
    const int channel = tile * WIDTH * VECTOR + one;
    if (channel >= OUT_CHANNELS) break;
    Total sum = shared[one % VECTOR][one / VECTOR];
#pragma unroll
    for (int i = 1; i < PERIOD_POSITIONS; ++i) {
      const int element = one + i * OUT_CHANNELS;
      sum.add(shared[element % VECTOR][element / VECTOR]);
    }
    store(partial, split, channel, sum);
  }
}

__device__ __forceinline__ void sum_nchw(const Element* __restrict__ grad_output, Sum* __restrict__ partial,
                                         Index pixels, int channel, int split, Index begin, Index end) {
  __shared__ Total shared[THREADS / 32];
  const bool whole = pixels % VECTOR == 0;
  const Index vectors = whole ? pixels / VECTOR : (pixels + VECTOR - 2) / VECTOR + 1;
  Total sum = whole ? sum_planes<true>(grad_output, channel, begin, end, vectors, pixels)
                    : sum_planes<false>(grad_output, channel, begin, end, vectors, pixels);
  ptx::let_next_launch_start();
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum.add_lane(mask);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
#pragma unroll
  for (int warp = 1; warp < THREADS / 32; ++warp) sum.add(shared[warp]);
  store(partial, split, channel, sum);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    grad_bias_general(const Element* __restrict__ grad_output, Sum* __restrict__ partial,
                      const __grid_constant__ ImageSizes sizes, long long per_split, long long all) {
  const int tile = blockIdx.x % TILES, split = blockIdx.x / TILES;
  const long long begin = split * per_split;  // vectors of a channel's planes, or periods
  const long long end = begin + per_split < all ? begin + per_split : all;
  const long long pixels = (long long)sizes.out_height * sizes.out_width;
  if constexpr (CHANNELS_LAST) {
    sum_channels_last(grad_output, partial, sizes.batch * pixels, tile, split, (Index)begin, (Index)end);
  } else {
    sum_nchw(grad_output, partial, (Index)pixels, tile, split, (Index)begin, (Index)end);
  }
}
