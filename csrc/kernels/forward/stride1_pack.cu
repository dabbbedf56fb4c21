// Packs weights [in, out, KERNEL_H, KERNEL_W] (contiguous or channels_last) into the order from which forward/stride1.cu
// multiplies (forward/stride1_weights.cuh); float32 is rounded to TF32. It runs before every forward pass, so that packed
// weights are never stale.
//
// OF_GRAD_INPUT: the gradient of the input is a convolution of the output's gradient. It reads weights [out, in, KERNEL_H,
// KERNEL_W], in the names of that convolution, with the taps reversed. A thread writes 16 bytes.
#include "common/mma.cuh"
#include "forward/stride1_weights.cuh"

__device__ __forceinline__ float rounded(float value) { return __uint_as_float(ptx::round_to_tf32(__float_as_uint(value))); }
__device__ __forceinline__ Half rounded(Half value) { return value; }
__device__ __forceinline__ BFloat16 rounded(BFloat16 value) { return value; }

template <int COUNT>
struct alignas(16) Pack {
  Element elements[COUNT];
};

extern "C" __global__ void __launch_bounds__(THREADS) forward_stride1_pack(const Element* __restrict__ weight, uint4* __restrict__ packed) {
  ptx::let_next_launch_start();
  constexpr int ROW_PIECES = CHUNK_BYTES / 16, PIECE = 16 / ITEM, CHUNKS = K_CHANNELS / CHUNK;
  constexpr int PIECES = WEIGHT_BYTES / 16 * CHANNEL_TILES;
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i >= PIECES) return;
  const int channel_row = i / ROW_PIECES % TILE_CHANNELS, place = i / (ROW_PIECES * TILE_CHANNELS) % STACK;
  const int part = i / (ROW_PIECES * TILE_CHANNELS * STACK), chunk = part % CHUNKS, b = part / CHUNKS % KERNEL_W;
  const int out = part / (CHUNKS * KERNEL_W) * TILE_CHANNELS + channel_row, a = stacked_row(place);
  const int kh = OF_GRAD_INPUT ? a : KERNEL_H - 1 - a, kw = OF_GRAD_INPUT ? b : KERNEL_W - 1 - b;
  Pack<PIECE> words;
#pragma unroll
  for (int word = 0; word < PIECE; ++word) {
    const int in = chunk * CHUNK + swizzled(i % ROW_PIECES, channel_row) * PIECE + word;
    const long long first = OF_GRAD_INPUT ? out : in;
    const int second = OF_GRAD_INPUT ? in : out;
    constexpr int SECOND = OF_GRAD_INPUT ? IN_CHANNELS : OUT_CHANNELS;
    const long long at = WEIGHT_CHANNELS_LAST ? ((first * KERNEL_H + kh) * KERNEL_W + kw) * SECOND + second
                                              : ((first * SECOND + second) * KERNEL_H + kh) * KERNEL_W + kw;
    words.elements[word] = in < IN_CHANNELS && out < OUT_CHANNELS ? rounded(weight[at]) : Element{};
  }
  packed[i] = *reinterpret_cast<const uint4*>(&words);
}
