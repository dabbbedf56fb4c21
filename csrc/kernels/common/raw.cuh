// Vectors of elements that are loaded ahead and stay in registers as raw words until they are used. NVRTC 13.0 unpacks a
// struct of 16-bit elements right after its load, which waits for the load (seen in the SASS of grad_input_narrow_mma).
#pragma once
#include "common/types.cuh"

__device__ __forceinline__ unsigned bits_of(float x) { return __float_as_uint(x); }
template <class T>
__device__ __forceinline__ unsigned bits_of(T x) {
  return x.bits;
}
__device__ __forceinline__ float of_bits(unsigned bits, float) { return __uint_as_float(bits); }
template <class T>
__device__ __forceinline__ float of_bits(unsigned bits, T) {
  return load_as(T{(unsigned short)bits});
}

// N neighbours in memory, as raw words.
template <int N>
struct Raw {
  static constexpr int BYTES = N * sizeof(Element), WORDS = BYTES < 4 ? 1 : BYTES / 4;
  unsigned words[WORDS];

  __device__ __forceinline__ void load(const Element* from, bool inside) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) words[i] = 0;
    if (!inside) return;
    if constexpr (BYTES == 2) {
      words[0] = *reinterpret_cast<const unsigned short*>(from);
    } else if constexpr (BYTES == 4) {
      words[0] = *reinterpret_cast<const unsigned*>(from);
    } else if constexpr (BYTES == 8) {
      const uint2 v = *reinterpret_cast<const uint2*>(from);
      words[0] = v.x, words[1] = v.y;
    } else {
      static_assert(BYTES == 16);
      const uint4 v = *reinterpret_cast<const uint4*>(from);
      words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    }
  }
  /// Returns `values` rounded to the type of an element.
  __device__ __forceinline__ static Raw of(const float* values) {
    Raw made;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) made.words[i] = 0;
#pragma unroll
    for (int i = 0; i < N; ++i)
      made.words[i * sizeof(Element) / 4] |= bits_of(store_as<Element>(values[i])) << 8 * sizeof(Element) * i % 32;
    return made;
  }
  /// Rounds `values` and stores them by one instruction (NVRTC 13.0 splits other vector stores here).
  __device__ __forceinline__ static void store(Element* to, const float* values) { of(values).write(to); }
  __device__ __forceinline__ void write(Element* to) const {
    if constexpr (BYTES == 2)
      *reinterpret_cast<unsigned short*>(to) = (unsigned short)words[0];
    else if constexpr (BYTES == 4)
      *reinterpret_cast<unsigned*>(to) = words[0];
    else if constexpr (BYTES == 8)
      asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(words[0]), "r"(words[1]) : "memory");
    else
      asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                   : "memory");
  }
  __device__ __forceinline__ float operator[](int i) const {
    return of_bits(words[i * sizeof(Element) / 4] >> 8 * sizeof(Element) * i % 32, Element{});
  }
};
