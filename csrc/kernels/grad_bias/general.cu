// Gradient of the bias, NCHW and channels_last: the sum of grad_output over batch and pixels.
//
// A block sums CHANNELS channels over one split of the (n, pixel) positions. It writes the sum to partial[2 split,
// channel] and what rounding left of it to partial[2 split + 1, channel]; common/split_k_reduce.cu adds them up. Every
// sum has a fixed order: the same input gives the same bits.
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
constexpr int LOADS_IN_FLIGHT = 8;  // of a thread
using Sum = Accumulate<Element>::type;
using Total = CompensatedSum<Sum, (sizeof(Element) > 2)>;

/// Walks a thread through grad_output, POSITIONS positions further at each step, without dividing again.
struct PositionIterator {
  const long long pixels;         // of an image
  const long long step_elements;  // elements of a step in NCHW, which crosses POSITIONS / pixels images
  const int step_pixels;          // positions of a step beyond whole images
  long long at, pixel;

  __device__ __forceinline__ PositionIterator(long long position, int channel, long long pixels)
      : pixels(pixels),
        step_elements(POSITIONS / pixels * ((OUT_CHANNELS - 1) * pixels) + POSITIONS),
        step_pixels((int)(POSITIONS % pixels)) {
    const long long image = position / pixels;
    pixel = position - image * pixels;
    at = CHANNELS_LAST ? position * OUT_CHANNELS + channel : (image * OUT_CHANNELS + channel) * pixels + pixel;
  }
  __device__ __forceinline__ void advance() {
    if constexpr (CHANNELS_LAST) {
      at += (long long)POSITIONS * OUT_CHANNELS;
    } else {
      at += step_elements;
      pixel += step_pixels;
      if (pixel >= pixels) pixel -= pixels, at += (OUT_CHANNELS - 1) * pixels;
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    grad_bias_general(const Element* __restrict__ grad_output, Sum* __restrict__ partial,
                      const __grid_constant__ ImageSizes sizes, long long positions_per_split) {
  __shared__ Total shared[POSITIONS][CHANNELS];
  const int lane = threadIdx.x % CHANNELS, position = threadIdx.x / CHANNELS;
  const int channel = blockIdx.x % TILES * CHANNELS + lane;
  const long long split = blockIdx.x / TILES;
  const long long begin = split * positions_per_split;
  const long long pixels = (long long)sizes.out_height * sizes.out_width, all = sizes.batch * pixels;
  const long long end = begin + positions_per_split < all ? begin + positions_per_split : all;

  Total sum{};
  if (channel < OUT_CHANNELS) {
    long long p = begin + position;
    PositionIterator iterator(p, channel, pixels);
    for (; p + (LOADS_IN_FLIGHT - 1) * POSITIONS < end; p += LOADS_IN_FLIGHT * POSITIONS) {
      Element loaded[LOADS_IN_FLIGHT];
#pragma unroll
      for (Element& one : loaded) {
        one = grad_output[iterator.at];
        iterator.advance();
      }
#pragma unroll
      for (const Element& one : loaded) sum.add(load_as(one));
    }
    for (; p < end; p += POSITIONS) {
      sum.add(load_as(grad_output[iterator.at]));
      iterator.advance();
    }
  }
  shared[position][lane] = sum;
  __syncthreads();
  for (int half = POSITIONS / 2; half > 0; half /= 2) {
    if (position < half) shared[position][lane].add(shared[position + half][lane]);
    __syncthreads();
  }
  if (position == 0 && channel < OUT_CHANNELS) {
    partial[2 * split * OUT_CHANNELS + channel] = shared[0][lane].sum;
    partial[(2 * split + 1) * OUT_CHANNELS + channel] = shared[0][lane].remainder();
  }
}
