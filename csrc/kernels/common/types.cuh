// Element types and their conversions, without cuda_fp16.h: kernels compile in a fraction of the time and need no header
// that a user may not have.
#pragma once

struct Half {
  unsigned short bits;
};
struct BFloat16 {
  unsigned short bits;
};

// The first of two types if the condition holds, otherwise the second.
template <bool IS_FIRST, class First, class Second>
struct Select {
  using type = Second;
};
template <class First, class Second>
struct Select<true, First, Second> {
  using type = First;
};

// The type of accumulators: float64 for float64, float32 for all others.
template <class T>
struct Accumulate {
  using type = float;
};
template <>
struct Accumulate<double> {
  using type = double;
};

__device__ __forceinline__ double load_as(double x) { return x; }
__device__ __forceinline__ float load_as(float x) { return x; }
__device__ __forceinline__ float load_as(Half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
__device__ __forceinline__ float load_as(BFloat16 x) { return __uint_as_float((unsigned)x.bits << 16); }

template <class T>
__device__ __forceinline__ T store_as(typename Accumulate<T>::type x) {
  return x;
}
template <>
__device__ __forceinline__ Half store_as<Half>(float x) {
  Half y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
// Rounds to nearest, ties to even, by integer arithmetic where there is no instruction.
template <>
__device__ __forceinline__ BFloat16 store_as<BFloat16>(float x) {
#if __CUDA_ARCH__ >= 800
  BFloat16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
#else
  const unsigned bits = __float_as_uint(x);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const unsigned rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return BFloat16{(unsigned short)(nan ? 0x7fffu : rounded >> 16)};
#endif
}
