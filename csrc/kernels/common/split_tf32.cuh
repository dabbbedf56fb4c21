// float32 products by TF32 tensor cores: a number is split into two parts, and two numbers are multiplied by three products.
#pragma once
#include "common/mma.cuh"

// Splits a number that TF32 cannot hold: high is the nearest TF32 number, low is the rest.
__device__ __forceinline__ void split(ptx::u32& high, ptx::u32& low, float value) {
  high = (__float_as_uint(value) + 0x1000u) & 0xffffe000u;
  low = __float_as_uint(value - __uint_as_float(high));
}

// One of the three products, the small ones first: sum = (with BEGIN) or sum += a.low * b.high in round 0, a.high * b.low in
// round 1, a.high * b.high in round 2. `a` has its high part first and its low part last. A product waits for the last one of
// the same sum, so callers do each round for several sums.
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
