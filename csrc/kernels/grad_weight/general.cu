// Gradient of the weight, any geometry, any dtype, NCHW and channels_last: an implicit GEMM over all input pixels.
//
//   grad_weight[ci, co, kh, kw] = sum over n, ih, iw, with
//       oh = ih * STRIDE_H - PADDING_H + kh * DILATION_H inside the output (and the same horizontally)
//       of input[n, ci, ih, iw] * grad_output[n, co, oh, ow]
//
// A block computes one tile of one group over one split of the pixels: m = input channels of the group, n = (tap,
// output channel), k = pixels. Splits go to partial[split, ...] in the weight's own memory order;
// common/split_k_reduce.cu adds them up in a fixed order, so the same input gives the same bits.
#include "common/images.cuh"
#include "common/tile_gemm.cuh"

constexpr int COLUMNS = TAPS * CO_GROUP;
constexpr int TILES_M = (CI_GROUP + TILE_M - 1) / TILE_M;
constexpr int TILES_N = (COLUMNS + TILE_N - 1) / TILE_N;
constexpr long long UNBOUNDED = 1LL << 62;  // the batch may be of any size

extern "C" __global__ void __launch_bounds__(THREADS, sizeof(Element) == 8 ? 1 : 2)
    grad_weight_general(const Element* __restrict__ input, const Element* __restrict__ grad_output,
                        Sum* __restrict__ partial, const __grid_constant__ ImageSizes sizes,
                        long long pixels_per_split) {
  __shared__ TileShared shared;
  unsigned block = blockIdx.x;
  const int n0 = block % TILES_N * TILE_N;
  block /= TILES_N;
  const int m0 = block % TILES_M * TILE_M;
  block /= TILES_M;
  const int group = block % GROUPS;
  const long long split = block / GROUPS;
  const long long pixels = (long long)sizes.batch * sizes.height * sizes.width;
  const long long k_begin = split * pixels_per_split;
  const long long k_end = k_begin + pixels_per_split < pixels ? k_begin + pixels_per_split : pixels;

  constexpr bool K_FASTEST = !CHANNELS_LAST;
  using ShareA = Share<TILE_M, K_FASTEST>;
  using ShareB = Share<TILE_N, K_FASTEST>;

  auto load_a = [&](int i, long long k) -> Sum {
    const int ci = m0 + ShareA::row(i);
    if (ci >= CI_GROUP) return 0;
    const Pixel p = Pixel::of(sizes, k);
    return load_as(input[at_input(sizes, p.image, group * CI_GROUP + ci, p.row, p.column)]);
  };
  auto load_b = [&](int i, long long k) -> Sum {
    const int column = n0 + ShareB::row(i);
    if (column >= COLUMNS) return 0;
    const int co = column % CO_GROUP, tap = column / CO_GROUP;
    const Pixel p = Pixel::of(sizes, k);
    const int oh = p.row * STRIDE_H - PADDING_H + tap / KERNEL_W * DILATION_H;
    const int ow = p.column * STRIDE_W - PADDING_W + tap % KERNEL_W * DILATION_W;
    if (oh < 0 || ow < 0 || oh >= sizes.out_height || ow >= sizes.out_width) return 0;
    return load_as(grad_output[at_output(sizes, p.image, group * CO_GROUP + co, oh, ow)]);
  };

  Sum sum[THREAD_M][THREAD_N];
  tile_gemm<K_FASTEST, K_FASTEST, false, UNBOUNDED>(shared, k_begin, k_end, load_a, load_b, sum);

  Sum* mine = partial + split * ((long long)IN_CHANNELS * COLUMNS);
#pragma unroll
  for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
    for (int j = 0; j < THREAD_N; ++j) {
      const int ci = m0 + Owned<false>::m(i), column = n0 + Owned<false>::n(j);
      if (ci >= CI_GROUP || column >= COLUMNS) continue;
      const int tap = column / CO_GROUP;
      mine[at_weight(group * CI_GROUP + ci, column % CO_GROUP, tap / KERNEL_W, tap % KERNEL_W)] = sum[i][j];
    }
}
