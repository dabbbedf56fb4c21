// A loop whose index is a constant: repeat<0, 3>(body) calls body(Number<0>{}), body(Number<1>{}), body(Number<2>{}).
#pragma once

template <int I>
struct Number {
  static constexpr int value = I;
};

/// By halves: a compiler allows some 200 calls inside each other, and a kernel may have more taps.
template <int FROM, int TO, class Body>
__device__ __forceinline__ void repeat(const Body& body) {
  if constexpr (TO - FROM == 1) {
    body(Number<FROM>{});
  } else if constexpr (FROM < TO) {
    constexpr int MIDDLE = FROM + (TO - FROM) / 2;
    repeat<FROM, MIDDLE>(body);
    repeat<MIDDLE, TO>(body);
  }
}
