// Small helpers of the kernels that walk over tiles: numbers read digit by digit, and elements that travel together.
#pragma once

#include "common/integers.cuh"

// A number read digit by digit, the last first, each with its own base.
struct Digits {
  unsigned rest;
  __device__ __forceinline__ int next(unsigned base) {
    const unsigned digit = rest % base;
    rest /= base;
    return (int)digit;
  }
};

// N neighbours in memory, moved by one access.
template <class T, int N>
struct alignas(N * sizeof(T)) PackOf {
  T elements[N];
};
template <int N>
using Pack = PackOf<Element, N>;
