// Sums that keep what rounding takes from them, in a second number: as exact as twice the precision (Knuth's two-sum).
// An infinity or a NaN comes out as from a plain sum. What ends in 16 bits is rounded far more than a plain float32 sum
// loses, and is added up so (not COMPENSATED).
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
  /// Add what the lane has whose number differs in the bits of `mask`: both then hold the same.
  __device__ __forceinline__ void add_lane(int mask) {
    add(CompensatedSum{__shfl_xor_sync(0xffffffffu, sum, mask), __shfl_xor_sync(0xffffffffu, lost, mask)});
  }
  /// What is missing in `sum`: nothing where it is no finite number.
  __device__ __forceinline__ T remainder() const { return sum - sum == 0 ? lost : 0; }
  __device__ __forceinline__ T value() const { return sum + remainder(); }
};
