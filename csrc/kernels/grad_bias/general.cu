// Gradient of the bias, NCHW and channels_last: the sum of grad_output over batch and pixels.
//
// A block sums CHANNELS channels over one slice of the (n, pixel) positions and writes partial[2 slice, channel] and
// what rounding left of it to partial[2 slice + 1, channel]; split_k_reduce adds them up. Every sum has a fixed order:
// the same input gives the same bits.
#include "common/compensated_sum.cuh"
#include "common/images.cuh"

/// The smallest power of 2 that holds `count`, at most 32.
constexpr int lanes_for(int count) {
  int lanes = 1;
  while (lanes < count && lanes < 32) lanes *= 2;
  return lanes;
}
constexpr int CHANNELS = CHANNELS_LAST ? lanes_for(OUT_CHANNELS) : 1;  // neighbouring threads read neighbouring memory
constexpr int POSITIONS = THREADS / CHANNELS;
constexpr int TILES = (OUT_CHANNELS + CHANNELS - 1) / CHANNELS;
constexpr int AHEAD = 8;  // loads that a thread has under way
using Sum = Accumulate<Element>::type;
using Total = CompensatedSum<Sum, (sizeof(Element) > 2)>;

/// A thread's way through grad_output: POSITIONS positions further at each step.
struct Walk {
  const long long pixels;   // of an image
  const long long further;  // of a step's elements in NCHW, where it ends in an image as far in as it began
  const int left;           // of a step's positions behind whole images
  long long at, pixel;

  __device__ __forceinline__ Walk(long long position, int channel, long long pixels)
      : pixels(pixels),
        further(POSITIONS / pixels * ((OUT_CHANNELS - 1) * pixels) + POSITIONS),
        left((int)(POSITIONS % pixels)) {
    const long long image = position / pixels;
    pixel = position - image * pixels;
    at = CHANNELS_LAST ? position * OUT_CHANNELS + channel : (image * OUT_CHANNELS + channel) * pixels + pixel;
  }
  __device__ __forceinline__ void advance() {
    if constexpr (CHANNELS_LAST) {
      at += (long long)POSITIONS * OUT_CHANNELS;
    } else {
      at += further;
      pixel += left;
      if (pixel >= pixels) pixel -= pixels, at += (OUT_CHANNELS - 1) * pixels;
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    grad_bias_general(const Element* __restrict__ grad_output, Sum* __restrict__ partial,
                      const __grid_constant__ ImageSizes sizes, long long positions_per_slice) {
  __shared__ Total shared[POSITIONS][CHANNELS];
  const int lane = threadIdx.x % CHANNELS, position = threadIdx.x / CHANNELS;
  const int channel = blockIdx.x % TILES * CHANNELS + lane;
  const long long slice = blockIdx.x / TILES;
  const long long begin = slice * positions_per_slice;
  const long long pixels = (long long)sizes.out_height * sizes.out_width, all = sizes.batch * pixels;
  const long long end = begin + positions_per_slice < all ? begin + positions_per_slice : all;

  Total sum{};
  if (channel < OUT_CHANNELS) {
    long long p = begin + position;
    Walk walk(p, channel, pixels);
    for (; p + (AHEAD - 1) * POSITIONS < end; p += AHEAD * POSITIONS) {
      Element loaded[AHEAD];
#pragma unroll
      for (Element& one : loaded) {
        one = grad_output[walk.at];
        walk.advance();
      }
#pragma unroll
      for (const Element& one : loaded) sum.add(load_as(one));
    }
    for (; p < end; p += POSITIONS) {
      sum.add(load_as(grad_output[walk.at]));
      walk.advance();
    }
  }
  shared[position][lane] = sum;
  __syncthreads();
  for (int half = POSITIONS / 2; half > 0; half /= 2) {
    if (position < half) shared[position][lane].add(shared[position + half][lane]);
    __syncthreads();
  }
  if (position == 0 && channel < OUT_CHANNELS) {
    partial[2 * slice * OUT_CHANNELS + channel] = shared[0][lane].sum;
    partial[(2 * slice + 1) * OUT_CHANNELS + channel] = shared[0][lane].remainder();
  }
}
