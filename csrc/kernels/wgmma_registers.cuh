// Warpgroup matrix multiply of 16-bit numbers (sm_90a) with A in registers: 64 x N x 16 of k, N a multiple of 8 from 16 to
// 96; B in shared memory, along k (wgmma.cuh says how it lies).
#pragma once

namespace ptx {

#define TCONV_R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TCONV_R8 TCONV_R4(0), TCONV_R4(4)
#define TCONV_R12 TCONV_R8, TCONV_R4(8)
#define TCONV_R16 TCONV_R12, TCONV_R4(12)
#define TCONV_R20 TCONV_R16, TCONV_R4(16)
#define TCONV_R24 TCONV_R20, TCONV_R4(20)
#define TCONV_R28 TCONV_R24, TCONV_R4(24)
#define TCONV_R32 TCONV_R28, TCONV_R4(28)
#define TCONV_R36 TCONV_R32, TCONV_R4(32)
#define TCONV_R40 TCONV_R36, TCONV_R4(36)
#define TCONV_R44 TCONV_R40, TCONV_R4(40)
#define TCONV_R48 TCONV_R44, TCONV_R4(44)
#define TCONV_O8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TCONV_O12 TCONV_O8 ", %8, %9, %10, %11"
#define TCONV_O16 TCONV_O12 ", %12, %13, %14, %15"
#define TCONV_O20 TCONV_O16 ", %16, %17, %18, %19"
#define TCONV_O24 TCONV_O20 ", %20, %21, %22, %23"
#define TCONV_O28 TCONV_O24 ", %24, %25, %26, %27"
#define TCONV_O32 TCONV_O28 ", %28, %29, %30, %31"
#define TCONV_O36 TCONV_O32 ", %32, %33, %34, %35"
#define TCONV_O40 TCONV_O36 ", %36, %37, %38, %39"
#define TCONV_O44 TCONV_O40 ", %40, %41, %42, %43"
#define TCONV_O48 TCONV_O44 ", %44, %45, %46, %47"

// The registers come last: they are many arguments.
#define TCONV_WGMMA_TYPED(N, TYPE, OPERANDS, A, B, ADD, ...)                                                   \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" OPERANDS "}, {" A "}, " B  \
               ", " ADD ", 1, 1, 0;"                                                                           \
               : __VA_ARGS__                                                                                   \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define TCONV_WGMMA(N, OPERANDS, A, B, ...)                              \
  if constexpr (PRECISION == FP16 && ADD) {                              \
    TCONV_WGMMA_TYPED(N, "f16", OPERANDS, A, B, "1", __VA_ARGS__);       \
  } else if constexpr (PRECISION == FP16) {                              \
    TCONV_WGMMA_TYPED(N, "f16", OPERANDS, A, B, "0", __VA_ARGS__);       \
  } else if constexpr (ADD) {                                            \
    TCONV_WGMMA_TYPED(N, "bf16", OPERANDS, A, B, "1", __VA_ARGS__);      \
  } else {                                                               \
    TCONV_WGMMA_TYPED(N, "bf16", OPERANDS, A, B, "0", __VA_ARGS__);      \
  }

/// d += a * b, or d = a * b, for FP16 or BF16. a: of warp w's 16 rows, rows (g, g + 8, g, g + 8) of k (2t, 2t, 2t + 8,
/// 2t + 8) and the k after each. d[4 j + r]: row g + 8 (r / 2), column 8 j + 2 t + r % 2. Registers of `a` stay as they
/// are until the multiply was waited for.
template <int PRECISION, int N, bool ADD>
__device__ __forceinline__ void multiply_registers(float* d, const u32 (&a)[4], u64 b) {
  static_assert(PRECISION == FP16 || PRECISION == BF16);
  static_assert(N >= 16 && N <= 96 && N % 8 == 0);
  if constexpr (N == 16) {
    TCONV_WGMMA(16, TCONV_O8, "%8, %9, %10, %11", "%12", TCONV_R8)
  } else if constexpr (N == 24) {
    TCONV_WGMMA(24, TCONV_O12, "%12, %13, %14, %15", "%16", TCONV_R12)
  } else if constexpr (N == 32) {
    TCONV_WGMMA(32, TCONV_O16, "%16, %17, %18, %19", "%20", TCONV_R16)
  } else if constexpr (N == 40) {
    TCONV_WGMMA(40, TCONV_O20, "%20, %21, %22, %23", "%24", TCONV_R20)
  } else if constexpr (N == 48) {
    TCONV_WGMMA(48, TCONV_O24, "%24, %25, %26, %27", "%28", TCONV_R24)
  } else if constexpr (N == 56) {
    TCONV_WGMMA(56, TCONV_O28, "%28, %29, %30, %31", "%32", TCONV_R28)
  } else if constexpr (N == 64) {
    TCONV_WGMMA(64, TCONV_O32, "%32, %33, %34, %35", "%36", TCONV_R32)
  } else if constexpr (N == 72) {
    TCONV_WGMMA(72, TCONV_O36, "%36, %37, %38, %39", "%40", TCONV_R36)
  } else if constexpr (N == 80) {
    TCONV_WGMMA(80, TCONV_O40, "%40, %41, %42, %43", "%44", TCONV_R40)
  } else if constexpr (N == 88) {
    TCONV_WGMMA(88, TCONV_O44, "%44, %45, %46, %47", "%48", TCONV_R44)
  } else {
    TCONV_WGMMA(96, TCONV_O48, "%48, %49, %50, %51", "%52", TCONV_R48)
  }
}

#undef TCONV_WGMMA
#undef TCONV_WGMMA_TYPED
#undef TCONV_O8
#undef TCONV_O12
#undef TCONV_O16
#undef TCONV_O20
#undef TCONV_O24
#undef TCONV_O28
#undef TCONV_O32
#undef TCONV_O36
#undef TCONV_O40
#undef TCONV_O44
#undef TCONV_O48
#undef TCONV_R4
#undef TCONV_R8
#undef TCONV_R12
#undef TCONV_R16
#undef TCONV_R20
#undef TCONV_R24
#undef TCONV_R28
#undef TCONV_R32
#undef TCONV_R36
#undef TCONV_R40
#undef TCONV_R44
#undef TCONV_R48

}  // namespace ptx
