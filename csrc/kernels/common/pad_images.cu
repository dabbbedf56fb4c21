// Copies images in NCHW so that TMA can load boxes of them: with longer rows, or with channels that begin at multiples of
// 16 bytes. The columns that are added are zeros. common/pad_rows.cu does the same for rows of any type, without the sums.
//
// Covers float32. A warp copies sizes.segment pixels of one channel of an image. WITH_BIAS: it also adds them up:
// bias_partial[n * segments + segment][2][channel] is the sum, and what rounding lost of it.
#include "common/compensated_sum.cuh"
#include "common/mma.cuh"
#include "common/sizes.cuh"

constexpr int WARPS = THREADS / 32;
/// Pixels that a lane loads before it stores them.
constexpr int UNROLL = 8;

/// Copies pixels `begin` to `end` of a channel; returns this lane's part of their sum.
__device__ __forceinline__ CompensatedSum<float> copy_channel(const PadImagesSizes& sizes, const float* __restrict__ from,
                                                              float* __restrict__ to, int begin, int end, int lane) {
  CompensatedSum<float> sum{};
  for (int first = begin + lane; first < end; first += 32 * UNROLL) {
    float values[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int pixel = first + u * 32, row = sizes.columns.quotient(pixel), col = sizes.columns.remainder(pixel, row);
      values[u] = pixel < end && col < sizes.width ? __ldg(from + row * sizes.width + col) : 0.f;
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int pixel = first + u * 32;
      if (pixel >= end) break;
      if constexpr (WITH_BIAS) sum.add(values[u]);
      to[pixel] = values[u];
    }
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    pad_images(const float* __restrict__ source, float* __restrict__ copy, float* __restrict__ bias_partial,
               const __grid_constant__ PadImagesSizes sizes) {
  ptx::wait_for_previous_launch();
  ptx::let_next_launch_start();
  const int lane = threadIdx.x % 32;
  const int work = blockIdx.x * WARPS + threadIdx.x / 32;
  const int number = sizes.segments.quotient(work), segment = sizes.segments.remainder(work, number);
  const long long image = number;  // n and channel
  if (image >= (long long)sizes.batch * CHANNELS) return;
  const int begin = segment * sizes.segment, end = begin + sizes.segment < sizes.pixels ? begin + sizes.segment : sizes.pixels;
  CompensatedSum<float> sum = copy_channel(sizes, source + image * (static_cast<long long>(sizes.height) * sizes.width),
                                           copy + image * sizes.pitch, begin, end, lane);
  if constexpr (WITH_BIAS) {
#pragma unroll
    for (int other = 16; other > 0; other /= 2) sum.add_lane(other);
    if (lane == 0) {
      float* const to = bias_partial + (image / CHANNELS * static_cast<int>(sizes.segments.value) + segment) * (2 * CHANNELS) + image % CHANNELS;
      to[0] = sum.sum;
      to[CHANNELS] = sum.remainder();
    }
  }
}
