// Numbers as the tensor cores of sm_80 and up multiply them in 16 bits: themselves (PARTS = 1), or float32 as PARTS
// BFloat16, each what rounding left over of the one before. The sum of 3 is the number, by six products; 2 leave out
// 2^-17 of it, by three, which is a hundredth of what TF32 leaves out.
#pragma once

constexpr bool IS_16_BIT = sizeof(Element) == 2;

/// Two float32 as PARTS words of two BFloat16 each: 3 x 8 bits hold the 24 of both, with nothing left over.
__device__ __forceinline__ void split(ptx::u32 (&words)[PARTS], float low, float high) {
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    words[part] = ptx::pack_pair<ptx::BF16>(low, high);
    low -= __uint_as_float(words[part] << 16);
    high -= __uint_as_float(words[part] & 0xffff0000u);
  }
}

/// sum += a * b, of all parts.
__device__ __forceinline__ void multiply_parts(float (&sum)[4], const uint4 (&a)[PARTS], const ptx::u32 (&b)[2][PARTS]) {
  const auto multiply = [&](float(&to)[4], int i, int j) {
    const ptx::u32 fragment[2] = {b[0][j], b[1][j]};
    ptx::mma<IS_16_BIT ? PRECISION : ptx::BF16>(to, a[i], fragment);
  };
  if constexpr (PARTS == 1) {
    multiply(sum, 0, 0);
  } else {
    // The smallest products first; those left out are below what the parts leave out. The multiplier truncates its
    // sums; adding them here rounds to nearest, once for all.
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
