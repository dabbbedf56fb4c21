// Copies a tensor in NCHW to planes of positions, [plane][n][channel][row][column], so that pixels are the k of a product.
// Values are rounded to TF32. Plane (i, j) holds what one phase of the stride, or one tap, reads: position (row, column) is
// pixel (row * STRIDE_H + row offset i, column * STRIDE_W + column offset j), or zero outside the tensor.
//
// There is a plane for the column offset of each column of taps, so that no tap is shifted along a row (the boxes of TMA
// begin at multiples of 16 bytes). Row offsets are the residues of the taps, each once, and a tap is shifted by whole rows;
// with IM2COL_ROWS there is a plane for each row of taps too. Each plane begins with ZERO_ROWS rows of zeros. Positions that
// no tap reaches from any of sizes.pixel_rows rows of input pixels are zero.
//
// Covers float32 in NCHW; any kernel, stride, padding, dilation. A warp copies sizes.segment positions of one channel of an
// image to all planes. With WITH_BIAS it also adds up the pixels it reads, where the planes whose offsets lie in [0, stride)
// hold every pixel once: bias_partial[n * segments + segment][2][channel] is the sum, and what rounding lost of it.
#include "common/integers.cuh"
#include "common/compensated_sum.cuh"
#include "common/mma.cuh"
#include "common/sizes.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int PLANES = ROW_PHASES * COL_PHASES;
/// Positions that a lane loads before it stores them.
constexpr int UNROLL = PLANES >= 8 ? 1 : 8 / PLANES;

__device__ constexpr int residue(int offset, int stride) { return (offset % stride + stride) % stride; }
__device__ constexpr int row_offset(int i) {
  return IM2COL_ROWS ? i * DILATION_H - PADDING_H : residue(i * DILATION_H - PADDING_H, STRIDE_H);
}
__device__ constexpr int col_offset(int j) { return j * DILATION_W - PADDING_W; }
__device__ constexpr bool counts(int plane) {
  const int down = row_offset(plane / COL_PHASES), across = col_offset(plane % COL_PHASES);
  return down >= 0 && down < STRIDE_H && across >= 0 && across < STRIDE_W;
}

/// Returns whether a tap of this plane reaches a row of positions from one of the rows of input pixels.
__device__ __forceinline__ bool reached(const SpaceToDepthSizes& sizes, int row, int plane) {
  bool found = IM2COL_ROWS;
#pragma unroll
  for (int k = 0; k < KERNEL_H; k += ROW_PHASES)
    if (const int tap = k + plane / COL_PHASES; tap < KERNEL_H) {
      const int pixel = row - ZERO_ROWS - floor_div(tap * DILATION_H - PADDING_H, STRIDE_H);
      found |= pixel >= 0 && pixel < sizes.pixel_rows;
    }
  return found;
}

/// Returns the pixel of a position in a plane, counted within a channel of an image; -1 if there is none.
__device__ __forceinline__ int pixel(const SpaceToDepthSizes& sizes, int row, int col, int plane) {
  const int h = (row - ZERO_ROWS) * STRIDE_H + row_offset(plane / COL_PHASES), w = col * STRIDE_W + col_offset(plane % COL_PHASES);
  const bool inside = static_cast<unsigned>(h) < static_cast<unsigned>(sizes.source_height) &&
                      static_cast<unsigned>(w) < static_cast<unsigned>(sizes.source_width);
  return inside ? h * sizes.source_width + w : -1;
}

__device__ __forceinline__ float rounded(float value) { return __uint_as_float(ptx::round_to_tf32(__float_as_uint(value))); }

/// Copies positions `begin` to `end` of a channel to all planes; returns this lane's part of the sum of the channel.
__device__ __forceinline__ CompensatedSum<float> copy_channel(const SpaceToDepthSizes& sizes, const float* __restrict__ from, float* __restrict__ to, long long plane_pitch,
                                                              int begin, int end, int lane) {
  CompensatedSum<float> sum{};
  for (int first = begin + lane; first < end; first += 32 * UNROLL) {
    float values[UNROLL][PLANES];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int position = first + u * 32, row = sizes.columns.quotient(position), col = sizes.columns.remainder(position, row);
#pragma unroll
      for (int plane = 0; plane < PLANES; ++plane) {
        const int at = position < end ? pixel(sizes, row, col, plane) : -1;
        values[u][plane] = at >= 0 ? __ldg(from + at) : 0.f;
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int position = first + u * 32, row = sizes.columns.quotient(position), col = sizes.columns.remainder(position, row);
      if (position >= end) break;
#pragma unroll
      for (int plane = 0; plane < PLANES; ++plane) {
        if (WITH_BIAS && counts(plane)) sum.add(values[u][plane]);
        to[plane * plane_pitch + position] = reached(sizes, row, plane) ? rounded(values[u][plane]) : 0.f;
      }
    }
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    space_to_depth(const float* __restrict__ source, float* __restrict__ planes, float* __restrict__ bias_partial,
                const __grid_constant__ SpaceToDepthSizes sizes) {
  ptx::wait_for_previous_launch();
  ptx::let_next_launch_start();
  const int lane = threadIdx.x % 32;
  const int work = blockIdx.x * WARPS + threadIdx.x / 32;
  const long long plane_pitch = (long long)sizes.batch * CHANNELS * sizes.pitch;
  const int number = sizes.segments.quotient(work), segment = sizes.segments.remainder(work, number);
  const long long image = number;  // n and channel
  if (image >= (long long)sizes.batch * CHANNELS) return;
  const int begin = segment * sizes.segment, end = begin + sizes.segment < sizes.positions ? begin + sizes.segment : sizes.positions;
  CompensatedSum<float> sum = copy_channel(sizes, source + image * (static_cast<long long>(sizes.source_height) * sizes.source_width),
                                           planes + image * sizes.pitch, plane_pitch, begin, end, lane);
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
