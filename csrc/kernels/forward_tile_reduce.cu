// output = bias + the sum over splits of partial [SPLITS, output], in the order of the splits: the last step of a
// forward pass whose sum over input channels is split. OUT_PIXELS = OUT_HEIGHT * OUT_WIDTH.
#include "mma.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    forward_tile_reduce(const float* __restrict__ partial, const Element* __restrict__ bias,
                        Element* __restrict__ output, long long count) {
  ptx::wait_for_previous_launch();
  const long long i = (static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x) * VECTOR;
  if (i >= count) return;
  float sum[VECTOR];
#pragma unroll
  for (int v = 0; v < VECTOR; ++v) {
    const int channel = static_cast<int>(OUTPUT_CHANNELS_LAST ? (i + v) % OUT_CHANNELS : (i + v) / OUT_PIXELS % OUT_CHANNELS);
    sum[v] = HAS_BIAS ? load_as(bias[channel]) : 0.f;
  }
#pragma unroll
  for (int s = 0; s < SPLITS; ++s) {
    float part[VECTOR];
    if constexpr (VECTOR == 4) {
      const float4 p = *reinterpret_cast<const float4*>(partial + s * count + i);
      part[0] = p.x, part[1] = p.y, part[2] = p.z, part[3] = p.w;
    } else {
      part[0] = partial[s * count + i];
    }
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) sum[v] += part[v];
  }
#pragma unroll
  for (int v = 0; v < VECTOR; ++v) output[i + v] = store_as<Element>(sum[v]);
}
