// The product of forward/col2im.cu: weights, operand B of a wgmma, in shared memory; pixels, operand A, in registers; and the
// stores of the products to a buffer in shared memory.
#pragma once

#include "common/raw.cuh"

// ---- weights -------------------------------------------------------------------------------------------------------

/// Loads all weights, with all threads; writes zeros for channels and products that do not exist. Eight neighbouring threads
/// read neighbours of M.
__device__ __forceinline__ void load_weights(char* weights, const Element* from) {
#pragma unroll 8
  for (int i = threadIdx.x; i < K / 2 * N; i += THREADS) {
    Digits digits{static_cast<unsigned>(i)};
    const int m_low = digits.next(8), pair = digits.next(4), m = digits.next(N / 8) * 8 + m_low, plane = digits.rest;
    const int place = WEIGHT_CHANNELS_LAST ? m % TAPS * OUT_CHANNELS + m / TAPS : m;
    Element of[2] = {};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int ci = plane * 8 + pair * 2 + k;
      if (ci < IN_CHANNELS && m < M) of[k] = from[ci * M + place];
    }
    u32 words[PARTS];
    if constexpr (IS_16_BIT) {
      words[0] = bits_of(of[0]) | bits_of(of[1]) << 16;
    } else {
      split(words, load_as(of[0]), load_as(of[1]));
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
      *reinterpret_cast<u32*>(weights + part * PART_BYTES + plane * PLANE_BYTES + m * 16 + pair * 4) = words[part];
  }
}

// ---- the product ---------------------------------------------------------------------------------------------------

using Sums = float[N / 2];
constexpr int MULTIPLIED = IS_16_BIT ? PRECISION : ptx::BF16;

/// Multiplies this warp's pixels; four warps do so together. `weights` and `panel` are addresses.
__device__ __forceinline__ void multiply(Sums& sums, u32 weights, u32 panel, const InputPlaces& places) {
  const auto b = [&](int part, int step) {
    return ptx::matrix_descriptor(weights + part * PART_BYTES + step * 2 * PLANE_BYTES, PLANE_BYTES, 128);
  };
  if constexpr (IS_16_BIT) {
    u32 a[K_STEPS][PARTS][4];
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step) load_input(a[step], panel, places, step);
    ptx::fence_wgmma();
    static_for<0, K_STEPS>([&](auto index) {
      constexpr int STEP = decltype(index)::value;
      ptx::wgmma_from_registers<N, MULTIPLIED, (STEP > 0)>(sums, a[STEP][0], b(0, STEP));
    });
    ptx::commit_wgmma();
    ptx::wait_wgmma<0>();
  } else {
    // The smallest products come first; those left out are below the rounding error of float32. The multiplier truncates its
    // sums; adding the sums of each step here rounds to nearest.
    constexpr int LOW = PARTS - 1, MIDDLE = PARTS / 2;
    u32 a[2][PARTS][4];
    Sums part[PARTIAL_SUMS];
    const auto begin = [&](auto index) {
      constexpr int STEP = decltype(index)::value;
      const auto& here = a[STEP % 2];
      float* const to = part[STEP % PARTIAL_SUMS];
      ptx::fence_wgmma();
      ptx::wgmma_from_registers<N, MULTIPLIED, false>(to, here[0], b(LOW, STEP));
      ptx::wgmma_from_registers<N, MULTIPLIED>(to, here[LOW], b(0, STEP));
      ptx::wgmma_from_registers<N, MULTIPLIED>(to, here[MIDDLE], b(MIDDLE, STEP));
      ptx::wgmma_from_registers<N, MULTIPLIED>(to, here[0], b(MIDDLE, STEP));
      ptx::wgmma_from_registers<N, MULTIPLIED>(to, here[MIDDLE], b(0, STEP));
      ptx::wgmma_from_registers<N, MULTIPLIED>(to, here[0], b(0, STEP));
      ptx::commit_wgmma();
    };
    // With two partial sums, a step is multiplied while the step before it is added up.
    constexpr int STEPS_AHEAD = PARTIAL_SUMS - 1;
    load_input(a[0], panel, places, 0);
    begin(IndexConstant<0>{});
    if constexpr (K_STEPS > 1) load_input(a[1], panel, places, 1);
    static_for<0, K_STEPS>([&](auto index) {
      constexpr int STEP = decltype(index)::value;
      if constexpr (STEPS_AHEAD == 1 && STEP + 1 < K_STEPS) begin(IndexConstant<STEP + 1>{});
      ptx::wait_wgmma<(STEP + 1 < K_STEPS ? STEPS_AHEAD : 0)>();
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        const float added = part[STEP % PARTIAL_SUMS][i];
        sums[i] = STEP == 0 ? added : sums[i] + added;
      }
      if constexpr (STEPS_AHEAD == 0 && STEP + 1 < K_STEPS) begin(IndexConstant<STEP + 1>{});
      if constexpr (STEP + 2 < K_STEPS) load_input(a[STEP % 2], panel, places, STEP + 2);
    });
  }
}

/// Writes a warp's products to a row of a buffer, from its first pixel's column on.
__device__ __forceinline__ void store_products(const Sums& sums, float* row) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float* const to = row + 2 * t * PITCH + g;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const int column = i / 4 * 8 + i % 2;  // and 2 t
    // If these padding columns were unused, the compiler would serialize the multiplies.
    if (column >= M) asm volatile("" ::"f"(sums[i]));
    if (i / 4 * 8 + 8 <= M || column + 2 * t < M) to[column * PITCH + i % 4 / 2 * 8] = sums[i];
  }
}
