// Compensated sums: a second number collects what rounding loses, so that the sum is as exact as in twice the precision
// (Knuth's two-sum). Infinities and NaN behave as in a plain sum. Results in 16 bits lose far more when they are rounded than
// a plain float32 sum loses, so they use one (COMPENSATED is false).
#pragma once

template <class T, bool COMPENSATED = true>
struct CompensatedSum {
  T sum, lost;

  __device__ __forceinline__ void add(T x) {
    if constexpr (!COMPENSATED) {
      sum += x;
      return;
    }
    const T total = sum + x;
    const T taken = total - sum;
    lost += (sum - (total - taken)) + (x - taken);
    sum = total;
  }
  __device__ __forceinline__ void add(const CompensatedSum& other) {
    add(other.sum);
    lost += other.lost;
  }
  /// Adds the sum of the lane whose number differs in the bits of `mask`. Both lanes then hold the same sum.
  __device__ __forceinline__ void add_lane(int mask) {
    add(CompensatedSum{__shfl_xor_sync(0xffffffffu, sum, mask), __shfl_xor_sync(0xffffffffu, lost, mask)});
  }
  /// What `sum` lacks; 0 where it is not finite.
  __device__ __forceinline__ T remainder() const { return sum - sum == 0 ? lost : 0; }
  __device__ __forceinline__ T value() const { return sum + remainder(); }
};
