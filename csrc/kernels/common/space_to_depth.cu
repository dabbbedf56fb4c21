// A tensor in NCHW as lines of pixels along which a multiply may run (k = pixels), [plane][n][channel][cell row][cell
// column], one line an image, its values rounded to TF32. A plane (i, j) is what one phase of the stride, or one tap, reads:
// cell (row, column) is pixel (row * STRIDE_H + row offset i, column * STRIDE_W + column offset j), zero outside the tensor.
//
// Column offsets are the taps', so that no tap is shifted along a row (boxes of the copy engine begin at multiples of 16
// bytes). Row offsets are the taps' residues, each once, and a tap is shifted by whole rows; with IM2COL_ROWS they are
// the taps' too. Before them lie ZERO_ROWS rows of zeros. Cells that no tap reaches from any of sizes.pixel_rows rows of input pixels
// are zero.
//
// Covers: float32, NCHW; any kernel, stride, padding, dilation. A warp makes all planes of sizes.segment positions of one channel
// of an image. WITH_BIAS: it also adds up the pixels it reads, bias_partial[n * segments + segment][2][channel] (the sum, and
// what rounding left of it), where the planes whose offsets lie in [0, stride) hold every pixel once.
#include "common/integers.cuh"
#include "common/compensated_sum.cuh"
#include "common/mma.cuh"
#include "common/sizes.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int PLANES = ROW_PHASES * COL_PHASES;
/// Positions of a lane that are under way at a time.
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

/// Whether a tap of this plane reaches a row of cells from one of the rows of pixels.
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

/// A position's pixel of a plane, counted within an image's channel; -1 if there is none.
__device__ __forceinline__ int pixel(const SpaceToDepthSizes& sizes, int row, int col, int plane) {
  const int h = (row - ZERO_ROWS) * STRIDE_H + row_offset(plane / COL_PHASES), w = col * STRIDE_W + col_offset(plane % COL_PHASES);
  const bool inside = static_cast<unsigned>(h) < static_cast<unsigned>(sizes.source_height) &&
                      static_cast<unsigned>(w) < static_cast<unsigned>(sizes.source_width);
  return inside ? h * sizes.source_width + w : -1;
}

__device__ __forceinline__ float rounded(float value) { return __uint_as_float(ptx::round_to_tf32(__float_as_uint(value))); }

/// Returns this lane's part of the sum of the channel.
__device__ __forceinline__ CompensatedSum<float> part_channel(const SpaceToDepthSizes& sizes, const float* __restrict__ from, float* __restrict__ to, long long plane_pitch,
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
  const int of_line = sizes.segments.quotient(work), segment = sizes.segments.remainder(work, of_line);
  const long long image = of_line;  // n and channel
  if (image >= (long long)sizes.batch * CHANNELS) return;
  const int begin = segment * sizes.segment, end = begin + sizes.segment < sizes.positions ? begin + sizes.segment : sizes.positions;
  CompensatedSum<float> sum = part_channel(sizes, source + image * (static_cast<long long>(sizes.source_height) * sizes.source_width),
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
