// A loop over constants: static_for<0, 3>(body) calls body(IndexConstant<0>{}), body(IndexConstant<1>{}) and
// body(IndexConstant<2>{}).
#pragma once

template <int I>
struct IndexConstant {
  static constexpr int value = I;
};

/// Divides the range by halves: a compiler allows about 200 nested calls, and a kernel may have more taps.
template <int FROM, int TO, class Body>
__device__ __forceinline__ void static_for(const Body& body) {
  if constexpr (TO - FROM == 1) {
    body(IndexConstant<FROM>{});
  } else if constexpr (FROM < TO) {
    constexpr int MIDDLE = FROM + (TO - FROM) / 2;
    static_for<FROM, MIDDLE>(body);
    static_for<MIDDLE, TO>(body);
  }
}
