// Packs weights [in, out / groups, KERNEL_H, KERNEL_W] (contiguous or channels_last) into the order from which
// forward/narrow_mma.cu multiplies (forward/narrow_mma_layout.cuh). It runs before every forward pass, so that packed weights
// are never stale, and lets the forward kernel start at once.
//
// One thread writes the 16 bytes of one lane of a fragment. Neighbouring threads have neighbouring rows of M.
#include "common/mma.cuh"
#include "common/raw.cuh"
#include "forward/narrow_mma_layout.cuh"

using ptx::u32;

/// The tap with which the input `shift` pixels after a position contributes to its output `phase`, or -1.
template <int KERNEL, int STRIDE, int PADDING, int DILATION>
__device__ __forceinline__ int tap_of(int phase, int shift) {
  const int distance = phase + PADDING - STRIDE * shift;
  return distance >= 0 && distance % DILATION == 0 && distance / DILATION < KERNEL ? distance / DILATION : -1;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    forward_narrow_mma_pack(const Element* __restrict__ weight, u32* __restrict__ packed) {
  ptx::let_next_launch_start();
  Digits digits{blockIdx.x * THREADS + threadIdx.x};
  const int g = digits.next(8), tile = digits.next(M_TILES), t = digits.next(4);
  const int v = digits.next(V), pair = digits.next(PAIRS), group = digits.next(GROUPS);
  const int pass = digits.rest;
  if (pass >= PASSES) return;

  const int shift_h = first_row(pass) + (V - 1 - v) * V_STEP;
  u32 words[4][PARTS];
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const int m = m_of_row(tile, g + word % 2 * 8), half = pair * 2 + word / 2;
    const Place place = place_of(m, USED_COLUMNS);
    const int column_shift = half / GROUP_HALVES;
    const int shift_w = Horizontal::LOWEST + SHIFTS.first[tile] + column_shift;
    const int kh = tap_of<KERNEL_H, STRIDE_H, PADDING_H, DILATION_H>(STACKED ? place.row : pass, shift_h);
    const int kw = tap_of<KERNEL_W, STRIDE_W, PADDING_W, DILATION_W>(place.column, shift_w);
    const bool real = m < M && column_shift < SHIFTS.count[tile] && kh >= 0 && kw >= 0;
    const auto value = [&](int ci) -> Element {
      if (!real || ci >= CI_GROUP) return Element{};
      return weight[at_weight(group * CI_GROUP + ci, place.channel, kh, kw)];
    };
    const int ci = half % GROUP_HALVES * HALF_CHANNELS + t * 2;
    if constexpr (IS_16_BIT) {
      words[word][0] = bits_of(value(ci)) | bits_of(value(ci + 1)) << 16;
    } else {
      split(words[word], load_as(value(ci)), load_as(value(ci + 1)));
    }
  }
  const long long fragment = (((static_cast<long long>(pass) * GROUPS + group) * M_TILES + tile) * PAIRS + pair) * V + v;
  uint4* const to = reinterpret_cast<uint4*>(packed) + fragment * PARTS * 32 + g * 4 + t;
#pragma unroll
  for (int part = 0; part < PARTS; ++part)
    to[part * 32] = make_uint4(words[0][part], words[1][part], words[2][part], words[3][part]);
}
