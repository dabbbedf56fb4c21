// Forward of a tiny problem of any geometry and layout: one launch without a workspace, one thread for each output.
//
//   output[n, co, oh, ow] = bias[co] + sum over ci in the group of co, and kh, kw, with
//       oh + padding_h - kh * dilation_h = stride_h * ih, 0 <= ih < height (and the same horizontally)
//       of input[n, ci, ih, iw] * weight[ci, co, kh, kw]
//
// A block computes THREADS outputs in the order of NCHW. Offsets are 32-bit integers.
#include "common/tiny.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    forward_tiny(const Element* __restrict__ input, const Element* __restrict__ weight,
                 const Element* __restrict__ bias, Element* __restrict__ output, const __grid_constant__ Problem p,
                 const __grid_constant__ Strides of_input, const __grid_constant__ Strides of_weight,
                 const __grid_constant__ Strides of_output) {
  const int at = static_cast<int>(blockIdx.x) * THREADS + static_cast<int>(threadIdx.x);
  if (at >= p.counts[0]) return;
  const Axis &vertical = p.vertical, &horizontal = p.horizontal;
  const int ow = at % horizontal.out, above = at / horizontal.out;
  const int oh = above % vertical.out, image = above / vertical.out;
  const int channel = image % p.channels_out, n = image / p.channels_out;
  const int first_in = channel / p.group_out * p.group_in, co = channel % p.group_out;

  Sum sum = 0;
  int ih, first_iw;
  int kh = vertical.first_tap(oh, ih);
  const int first_kw = horizontal.first_tap(ow, first_iw);
  for (; kh < vertical.kernel; kh += vertical.step, ih -= vertical.step_back) {
    if (ih < 0 || ih >= vertical.in) continue;
    int iw = first_iw;
    for (int kw = first_kw; kw < horizontal.kernel; kw += horizontal.step, iw -= horizontal.step_back) {
      if (iw < 0 || iw >= horizontal.in) continue;
      const Element* from = input + of_input.at(n, first_in, ih, iw);
      const Element* by = weight + of_weight.at(first_in, co, kh, kw);
#pragma unroll 8
      for (int ci = 0; ci < p.group_in; ++ci)
        sum += load_as(from[ci * of_input.channel]) * load_as(by[ci * of_weight.batch]);
    }
  }
  if (bias) sum += load_as(bias[channel]);
  output[of_output.at(n, channel, oh, ow)] = store_as<Element>(sum);
}
