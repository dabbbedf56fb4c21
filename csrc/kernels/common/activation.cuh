// The activations of torch.nn, which kernels apply before they store. ACTIVATION is one of the numbers of
// tconv_swap/kernels/norm/shape.py.
#pragma once

constexpr int IDENTITY = 0, RELU = 1, LEAKY_RELU = 2, RELU6 = 3, TANH = 4, SIGMOID = 5, SILU = 6, GELU = 7, GELU_TANH = 8;

constexpr float SQRT_HALF = 0.70710678118654752f, SQRT_TWO_OVER_PI = 0.79788456080286536f;
constexpr float GELU_CUBE = 0.044715f;

/// The larger, or the smaller, of both; NaN stays NaN.
__device__ __forceinline__ float max_propagating_nan(float bound, float u) {
#if __CUDA_ARCH__ >= 800
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(u) : "f"(bound));
  return u;
#else
  return u < bound ? bound : u;
#endif
}
__device__ __forceinline__ float min_propagating_nan(float bound, float u) {
#if __CUDA_ARCH__ >= 800
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(u) : "f"(bound));
  return u;
#else
  return u > bound ? bound : u;
#endif
}

/// Fast division is off by at most one unit in the last place; exact division would call a function.
__device__ __forceinline__ float sigmoid(float u) { return __fdividef(1.f, 1.f + expf(-u)); }

__device__ __forceinline__ float activate(float u, float slope) {
  if constexpr (ACTIVATION == RELU) return max_propagating_nan(0.f, u);
  if constexpr (ACTIVATION == LEAKY_RELU) return u > 0.f ? u : u * slope;
  if constexpr (ACTIVATION == RELU6) return min_propagating_nan(6.f, max_propagating_nan(0.f, u));
  if constexpr (ACTIVATION == TANH) return tanhf(u);
  if constexpr (ACTIVATION == SIGMOID) return sigmoid(u);
  if constexpr (ACTIVATION == SILU) return u * sigmoid(u);
  if constexpr (ACTIVATION == GELU) return 0.5f * u * (1.f + erff(u * SQRT_HALF));
  if constexpr (ACTIVATION == GELU_TANH)
    return 0.5f * u * (1.f + tanhf(SQRT_TWO_OVER_PI * (u + GELU_CUBE * u * u * u)));
  return u;
}
