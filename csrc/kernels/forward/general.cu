// Forward of any geometry and dtype, in NCHW and channels_last: the reference on the GPU, and the fallback.
//
//   output[n, co, oh, ow] = the epilogue of the sum over ci in the group of co, and kh, kw, with
//       oh + PADDING_H - kh * DILATION_H = STRIDE_H * ih, 0 <= ih < HEIGHT (and the same horizontally)
//       of input[n, ci, ih, iw] * weight[ci, co, kh, kw]
//
// The outputs split into STRIDE_H x STRIDE_W phases; within one, the same taps reach every pixel. A block computes
// one tile of one phase and group: m = pixels of that phase over the whole batch, n = output channels of the
// group, k = (tap, input channel). A phase without taps has k = 0: its output is the epilogue of 0.
#include "common/epilogue.cuh"
#include "common/images.cuh"
#include "common/tile_gemm.cuh"

// The taps of one axis that contribute to the outputs o with (o + padding) mod stride = `residue`: first, first + STEP, and so
// on, `count` of them; none if no k * dilation is congruent to the residue.
struct PhaseTaps {
  int first, count;
};
template <int KERNEL, int STRIDE, int DILATION>
struct Axis {
  static constexpr int STEP = STRIDE / gcd(STRIDE, DILATION);
  __device__ static PhaseTaps taps(int residue) {
    int first = 0;
    while (first < KERNEL && first * DILATION % STRIDE != residue) ++first;
    return {first, first < KERNEL ? (KERNEL - 1 - first) / STEP + 1 : 0};
  }
};

constexpr int TILES_N = (CO_GROUP + TILE_N - 1) / TILE_N;
using Vertical = Axis<KERNEL_H, STRIDE_H, DILATION_H>;
using Horizontal = Axis<KERNEL_W, STRIDE_W, DILATION_W>;
// The most taps of a phase, times the channels.
constexpr long long MAX_TERMS =
    (KERNEL_H / Vertical::STEP + 1LL) * (KERNEL_W / Horizontal::STEP + 1) * CI_GROUP;

// The output pixel of a phase at position m, counted over all images.
struct OutputPixel {
  Index n;
  int oh, ow;
  bool inside;
};
__device__ __forceinline__ OutputPixel pixel_of(const ImageSizes& sizes, long long m, int phase_h, int phase_w) {
  const Pixel position = Pixel::of(sizes, m);
  OutputPixel p{position.image, position.row * STRIDE_H + phase_h, position.column * STRIDE_W + phase_w, false};
  p.inside = p.n < sizes.batch && p.oh < sizes.out_height && p.ow < sizes.out_width;
  return p;
}

extern "C" __global__ void __launch_bounds__(THREADS, sizeof(Element) == 8 ? 1 : 2)
    forward_general(const Element* __restrict__ input, const Element* __restrict__ weight,
                    const __grid_constant__ Epilogue epilogue, Element* __restrict__ output, const __grid_constant__ ImageSizes sizes) {
  __shared__ TileShared shared;
  unsigned block = blockIdx.x;
  const int tile_n = block % TILES_N;
  block /= TILES_N;
  const int group = block % GROUPS;
  block /= GROUPS;
  const int phase_w = block % STRIDE_W;
  block /= STRIDE_W;
  const int phase_h = block % STRIDE_H;
  const long long m0 = (long long)(block / STRIDE_H) * TILE_M;
  const int n0 = tile_n * TILE_N;

  const PhaseTaps taps_h = Vertical::taps((phase_h + PADDING_H) % STRIDE_H);
  const PhaseTaps taps_w = Horizontal::taps((phase_w + PADDING_W) % STRIDE_W);
  const long long k_end = (long long)taps_h.count * taps_w.count * CI_GROUP;

  using ShareA = Share<TILE_M, CHANNELS_LAST>;
  using ShareB = Share<TILE_N, false>;
  OutputPixel pixels[A_LOADS];
#pragma unroll
  for (int i = 0; i < A_LOADS; ++i) pixels[i] = pixel_of(sizes, m0 + ShareA::row(i), phase_h, phase_w);

  auto load_a = [&](int i, long long k) -> Sum {
    const int tap = (int)(k / CI_GROUP), ci = (int)(k % CI_GROUP);
    const OutputPixel& p = pixels[i];
    // The phase makes both differences multiples of the stride; they are negative above and left of the input.
    const int uh = p.oh + PADDING_H - (taps_h.first + tap / taps_w.count * Vertical::STEP) * DILATION_H;
    const int uw = p.ow + PADDING_W - (taps_w.first + tap % taps_w.count * Horizontal::STEP) * DILATION_W;
    const int ih = uh / STRIDE_H, iw = uw / STRIDE_W;
    if (!p.inside || uh < 0 || uw < 0 || ih >= sizes.height || iw >= sizes.width) return 0;
    return load_as(input[at_input(sizes, p.n, group * CI_GROUP + ci, ih, iw)]);
  };
  auto load_b = [&](int i, long long k) -> Sum {
    const int tap = (int)(k / CI_GROUP), ci = (int)(k % CI_GROUP), co = n0 + ShareB::row(i);
    if (co >= CO_GROUP) return 0;
    const int kh = taps_h.first + tap / taps_w.count * Vertical::STEP;
    const int kw = taps_w.first + tap % taps_w.count * Horizontal::STEP;
    return load_as(weight[at_weight(group * CI_GROUP + ci, co, kh, kw)]);
  };

  constexpr bool M_FASTEST = !CHANNELS_LAST;
  Sum sum[THREAD_M][THREAD_N];
  tile_gemm<CHANNELS_LAST, false, M_FASTEST, MAX_TERMS>(shared, 0, k_end, load_a, load_b, sum);

#pragma unroll
  for (int i = 0; i < THREAD_M; ++i) {
    const OutputPixel p = pixel_of(sizes, m0 + Owned<M_FASTEST>::m(i), phase_h, phase_w);
#pragma unroll
    for (int j = 0; j < THREAD_N; ++j) {
      const int co = n0 + Owned<M_FASTEST>::n(j);
      if (!p.inside || co >= CO_GROUP) continue;
      const int channel = group * CO_GROUP + co;
      output[at_output(sizes, p.n, channel, p.oh, p.ow)] =
          store_as<Element>(apply_epilogue(sum[i][j], load_channel(epilogue, channel), epilogue));
    }
  }
}
