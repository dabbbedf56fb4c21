// Helpers of kernels that iterate over tiles: indices in mixed radix, and vectors of elements.
#pragma once

#include "common/integers.cuh"

// The digits of a number in mixed radix, the last digit first.
struct Digits {
  unsigned rest;
  __device__ __forceinline__ int next(unsigned base) {
    const unsigned digit = rest % base;
    rest /= base;
    return (int)digit;
  }
};

// N neighbours in memory, loaded or stored by one access.
template <class T, int N>
struct alignas(N * sizeof(T)) PackOf {
  T elements[N];
};
template <int N>
using Pack = PackOf<Element, N>;
