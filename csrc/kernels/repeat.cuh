// A loop whose index is a constant: repeat<0, 3>(body) calls body(Number<0>{}), body(Number<1>{}), body(Number<2>{}).
#pragma once

template <int I>
struct Number {
  static constexpr int value = I;
};

template <int FROM, int TO, class Body>
__device__ __forceinline__ void repeat(const Body& body) {
  if constexpr (FROM < TO) {
    body(Number<FROM>{});
    repeat<FROM + 1, TO>(body);
  }
}
