// Computes the output from `partial` [splits, output]: it adds up the splits in their order and applies the epilogue. It is
// the last launch of a pass whose sum over input channels is split (split-K).
#include "common/mma.cuh"
#include "common/epilogue.cuh"
#include "common/sizes.cuh"

struct ReduceSizes {
  int count;           // of the output's elements
  int splits;
  Divisor out_pixels;  // of an image
};

extern "C" __global__ void __launch_bounds__(THREADS)
    forward_implicit_gemm_split_k(const float* __restrict__ partial, const __grid_constant__ Epilogue epilogue,
                        Element* __restrict__ output, const __grid_constant__ ReduceSizes sizes) {
  ptx::wait_for_previous_launch();
  const int i = static_cast<int>(blockIdx.x * THREADS + threadIdx.x) * VECTOR;
  if (i >= sizes.count) return;
  float sum[VECTOR] = {};
  const float* from = partial + i;
#pragma unroll 4
  for (int s = 0; s < sizes.splits; ++s, from += sizes.count) {
    float part[VECTOR];
    if constexpr (VECTOR == 4) {
      const float4 p = *reinterpret_cast<const float4*>(from);
      part[0] = p.x, part[1] = p.y, part[2] = p.z, part[3] = p.w;
    } else {
      part[0] = *from;
    }
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) sum[v] += part[v];
  }
#pragma unroll
  for (int v = 0; v < VECTOR; ++v) {
    const int channel = (OUTPUT_CHANNELS_LAST ? i + v : sizes.out_pixels.quotient(i + v)) % OUT_CHANNELS;
    output[i + v] = store_as<Element>(apply_epilogue(sum[v], load_channel(epilogue, channel), epilogue));
  }
}
