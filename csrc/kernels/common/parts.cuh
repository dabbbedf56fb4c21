// Operands of 16-bit tensor cores (sm_80 and later): 16-bit numbers as they are (PARTS = 1), or a float32 number as the sum
// of PARTS BFloat16, each the rounded rest of those before. 3 parts are exact and take six products; 2 parts take three and
// lose 2^-17 of the number, a hundredth of what TF32 loses.
#pragma once

constexpr bool IS_16_BIT = sizeof(Element) == 2;

/// Splits two float32 into PARTS words of two BFloat16 each. 3 x 8 bits hold the 24 bits of the mantissa exactly.
__device__ __forceinline__ void split(ptx::u32 (&words)[PARTS], float low, float high) {
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    words[part] = ptx::pack_pair<ptx::BF16>(low, high);
    low -= __uint_as_float(words[part] << 16);
    high -= __uint_as_float(words[part] & 0xffff0000u);
  }
}

/// sum += a * b over all parts.
__device__ __forceinline__ void multiply_parts(float (&sum)[4], const uint4 (&a)[PARTS], const ptx::u32 (&b)[2][PARTS]) {
  const auto multiply = [&](float(&to)[4], int i, int j) {
    const ptx::u32 fragment[2] = {b[0][j], b[1][j]};
    ptx::mma<IS_16_BIT ? PRECISION : ptx::BF16>(to, a[i], fragment);
  };
  if constexpr (PARTS == 1) {
    multiply(sum, 0, 0);
  } else {
    // The smallest products come first; those left out are smaller than what the parts lose. The multiplier truncates its
    // sums; adding them here rounds to nearest, once for all of them.
    float part[4] = {0.f, 0.f, 0.f, 0.f};
    if constexpr (PARTS == 3) {
      multiply(part, 0, 2);
      multiply(part, 2, 0);
      multiply(part, 1, 1);
    }
    multiply(part, 0, 1);
    multiply(part, 1, 0);
    multiply(part, 0, 0);
#pragma unroll
    for (int r = 0; r < 4; ++r) sum[r] += part[r];
  }
}
