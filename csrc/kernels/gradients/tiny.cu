// All gradients of a tiny problem, any geometry and layout: one launch without a workspace. grad_output may have any strides,
// also strides of 0 (the gradient of a sum is one number that is broadcast).
//
//   grad_input[n, ci, ih, iw] = sum over co in the group of ci, and kh, kw, of grad_output[n, co, oh, ow] *
//       weight[ci, co, kh, kw], with oh = ih * stride_h - padding_h + kh * dilation_h inside the output (and the same
//       horizontally)
//   grad_weight[ci, co, kh, kw] = sum over n, ih, iw of input[n, ci, ih, iw] * grad_output[n, co, oh, ow], oh, ow as above
//   grad_bias[co] = sum over n, oh, ow of grad_output[n, co, oh, ow]
//
// The first blocks compute the gradient of the input, one thread for each element; the next that of the weight and the
// last that of the bias, one warp for each element. Every sum has a fixed order: the same input gives the same bits.
#include "common/compensated_sum.cuh"
#include "common/tiny.cuh"

constexpr int LANES = 32, WARPS = THREADS / LANES;
using Total = CompensatedSum<Sum, (sizeof(Element) > 2)>;

struct Pixel {
  int n, row, col;

  /// Returns pixel `index` of all images.
  __device__ __forceinline__ static Pixel of(int index, int rows, int cols) {
    const int line = index / cols;
    return {line / rows, line % rows, index - line * cols};
  }
};

/// Returns the sum of all lanes, in each lane.
__device__ __forceinline__ Sum over_lanes(Sum sum) {
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
  return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gradients_tiny(const Element* __restrict__ grad_output, const Element* __restrict__ input,
                   const Element* __restrict__ weight, Element* __restrict__ grad_input,
                   Element* __restrict__ grad_weight, Element* __restrict__ grad_bias,
                   const __grid_constant__ Problem p, const __grid_constant__ Strides of_grad_output,
                   const __grid_constant__ Strides of_input, const __grid_constant__ Strides of_weight,
                   const __grid_constant__ Strides of_grad_input, const __grid_constant__ Strides of_grad_weight) {
  const Axis &vertical = p.vertical, &horizontal = p.horizontal;
  const int block = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int lane = thread % LANES, warp = thread / LANES;

  if (block < p.end_blocks[0]) {
    const int at = block * THREADS + thread;
    if (at >= p.counts[0]) return;
    const int iw = at % horizontal.in, above = at / horizontal.in;
    const int ih = above % vertical.in, image = above / vertical.in;
    const int ci = image % p.channels_in, n = image / p.channels_in;
    const int first_out = ci / p.group_in * p.group_out;
    Sum sum = 0;
    for (int kh = 0; kh < vertical.kernel; ++kh) {
      const int oh = ih * vertical.stride - vertical.padding + kh * vertical.dilation;
      if (oh < 0 || oh >= vertical.out) continue;
      for (int kw = 0; kw < horizontal.kernel; ++kw) {
        const int ow = iw * horizontal.stride - horizontal.padding + kw * horizontal.dilation;
        if (ow < 0 || ow >= horizontal.out) continue;
        const Element* from = grad_output + of_grad_output.at(n, first_out, oh, ow);
        const Element* by = weight + of_weight.at(ci, 0, kh, kw);
#pragma unroll 8
        for (int co = 0; co < p.group_out; ++co)
          sum += load_as(from[co * of_grad_output.channel]) * load_as(by[co * of_weight.channel]);
      }
    }
    grad_input[of_grad_input.at(n, ci, ih, iw)] = store_as<Element>(sum);
    return;
  }

  if (block < p.end_blocks[1]) {
    const int at = (block - p.end_blocks[0]) * WARPS + warp;
    if (at >= p.counts[1]) return;
    const int kw = at % horizontal.kernel, above = at / horizontal.kernel;
    const int kh = above % vertical.kernel, pair = above / vertical.kernel;
    const int co = pair % p.group_out, ci = pair / p.group_out;
    const int channel = ci / p.group_in * p.group_out + co;
    Sum sum = 0;
#pragma unroll 4
    for (int index = lane; index < p.pixels_in; index += LANES) {
      const Pixel pixel = Pixel::of(index, vertical.in, horizontal.in);
      const int oh = pixel.row * vertical.stride - vertical.padding + kh * vertical.dilation;
      const int ow = pixel.col * horizontal.stride - horizontal.padding + kw * horizontal.dilation;
      if (oh < 0 || ow < 0 || oh >= vertical.out || ow >= horizontal.out) continue;
      sum += load_as(input[of_input.at(pixel.n, ci, pixel.row, pixel.col)]) *
             load_as(grad_output[of_grad_output.at(pixel.n, channel, oh, ow)]);
    }
    sum = over_lanes(sum);
    if (lane == 0) grad_weight[of_grad_weight.at(ci, co, kh, kw)] = store_as<Element>(sum);
    return;
  }

  const int channel = (block - p.end_blocks[1]) * WARPS + warp;
  if (channel >= p.counts[2]) return;
  Total total{};
#pragma unroll 4
  for (int index = lane; index < p.pixels_out; index += LANES) {
    const Pixel pixel = Pixel::of(index, vertical.out, horizontal.out);
    total.add(load_as(grad_output[of_grad_output.at(pixel.n, channel, pixel.row, pixel.col)]));
  }
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2) total.add_lane(mask);
  if (lane == 0) grad_bias[channel] = store_as<Element>(total.value());
}
