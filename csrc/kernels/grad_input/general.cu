// Gradient of the input, any geometry, any dtype, NCHW and channels_last: a strided convolution of grad_output.
//
//   grad_input[n, ci, ih, iw] = sum over co in the group of ci, and kh, kw, with
//       oh = ih * STRIDE_H - PADDING_H + kh * DILATION_H inside the output (and the same horizontally)
//       of grad_output[n, co, oh, ow] * weight[ci, co, kh, kw]
//
// A block computes one tile of one group: m = input pixels over the whole batch, n = input channels of the group,
// k = (tap, output channel).
#include "common/images.cuh"
#include "common/tile_gemm.cuh"

constexpr int TILES_N = (CI_GROUP + TILE_N - 1) / TILE_N;
constexpr long long TERMS = (long long)TAPS * CO_GROUP;

extern "C" __global__ void __launch_bounds__(THREADS, sizeof(Element) == 8 ? 1 : 2)
    grad_input_general(const Element* __restrict__ grad_output, const Element* __restrict__ weight,
                       Element* __restrict__ grad_input, const __grid_constant__ ImageSizes sizes) {
  __shared__ TileShared shared;
  unsigned block = blockIdx.x;
  const int n0 = block % TILES_N * TILE_N;
  block /= TILES_N;
  const int group = block % GROUPS;
  const long long m0 = (long long)(block / GROUPS) * TILE_M;

  using ShareA = Share<TILE_M, CHANNELS_LAST>;
  using ShareB = Share<TILE_N, false>;
  Pixel pixels[A_LOADS];
#pragma unroll
  for (int i = 0; i < A_LOADS; ++i) pixels[i] = Pixel::of(sizes, m0 + ShareA::row(i));

  auto load_a = [&](int i, long long k) -> Sum {
    const int tap = (int)(k / CO_GROUP), co = (int)(k % CO_GROUP);
    const Pixel& p = pixels[i];
    const int oh = p.row * STRIDE_H - PADDING_H + tap / KERNEL_W * DILATION_H;
    const int ow = p.column * STRIDE_W - PADDING_W + tap % KERNEL_W * DILATION_W;
    if (p.image >= sizes.batch || oh < 0 || ow < 0 || oh >= sizes.out_height || ow >= sizes.out_width) return 0;
    return load_as(grad_output[at_output(sizes, p.image, group * CO_GROUP + co, oh, ow)]);
  };
  auto load_b = [&](int i, long long k) -> Sum {
    const int tap = (int)(k / CO_GROUP), co = (int)(k % CO_GROUP), ci = n0 + ShareB::row(i);
    if (ci >= CI_GROUP) return 0;
    return load_as(weight[at_weight(group * CI_GROUP + ci, co, tap / KERNEL_W, tap % KERNEL_W)]);
  };

  constexpr bool M_FASTEST = !CHANNELS_LAST;
  Sum sum[THREAD_M][THREAD_N];
  tile_gemm<CHANNELS_LAST, false, M_FASTEST, TERMS>(shared, 0, TERMS, load_a, load_b, sum);

#pragma unroll
  for (int i = 0; i < THREAD_M; ++i) {
    const Pixel p = Pixel::of(sizes, m0 + Owned<M_FASTEST>::m(i));
#pragma unroll
    for (int j = 0; j < THREAD_N; ++j) {
      const int ci = n0 + Owned<M_FASTEST>::n(j);
      if (p.image >= sizes.batch || ci >= CI_GROUP) continue;
      grad_input[at_input(sizes, p.image, group * CI_GROUP + ci, p.row, p.column)] = store_as<Element>(sum[i][j]);
    }
  }
}
