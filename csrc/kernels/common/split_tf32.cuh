// float32 out of products of TF32: a number in two parts, and a multiply of two numbers in three.
#pragma once
#include "common/mma.cuh"

// As TF32 cannot hold it: high is rounded to nearest, low is what is left.
__device__ __forceinline__ void split(ptx::u32& high, ptx::u32& low, float value) {
  high = (__float_as_uint(value) + 0x1000u) & 0xffffe000u;
  low = __float_as_uint(value - __uint_as_float(high));
}

// The products one by one, the small ones first: sum = (BEGIN) or sum += a.low * b.high in round 0, then a.high * b.low,
// then a.high * b.high. `a`: its high part first, its low part last. A sum waits for its last product: callers have several
// of them take each round together.
template <int ROUND, bool BEGIN, int PARTS>
__device__ __forceinline__ void multiply_part(float (&sum)[4], const uint4 (&a)[PARTS], const ptx::u32 (&high)[2],
                                              const ptx::u32 (&low)[2]) {
  const uint4& factor = a[ROUND == 0 ? PARTS - 1 : 0];
  const ptx::u32(&other)[2] = ROUND == 1 ? low : high;
  if constexpr (BEGIN) {
    ptx::mma_first(sum, factor, other);
  } else {
    ptx::mma<ptx::TF32>(sum, factor, other);
  }
}
