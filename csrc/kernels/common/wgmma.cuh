// Warpgroup matrix multiply (sm_90a): 64 x N x 8 words of k, both operands in shared memory, sums in registers.
//
// Without swizzle, operands lie as planes of 16 bytes of k: [plane][row][16 bytes]. Eight rows are 128 contiguous bytes; the
// next eight are `group_bytes` further on, the next 16 bytes of k are `plane_bytes` further on. So an operand may begin at
// any row: the shift of a tap is an address (measured on an H200: as fast as without a shift).
#pragma once

namespace ptx {

using u64 = unsigned long long;

__device__ __forceinline__ u64 matrix_descriptor(u32 address, u32 plane_bytes, u32 group_bytes) {
  return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(plane_bytes >> 4) << 16 |
         static_cast<u64>(group_bytes >> 4) << 32;
}

/// The descriptor of an operand that was loaded with a swizzle (common/tma.cuh); it may begin at any row. Along k: rows of
/// 128 (64, 32) bytes of k, the next eight rows `group_bytes` further on, the next step of k 32 bytes further on;
/// `block_bytes` is not used. Across k (16 bits): a row is one k of 64 (32, 16) rows of the operand, `group_bytes` is the
/// distance from 8 k to the next 8, `block_bytes` from 64 (32, 16) rows of the operand to the next.
template <int SWIZZLE_BYTES = 128>
__device__ __forceinline__ u64 swizzled_descriptor(u32 address, u32 block_bytes, u32 group_bytes) {
  static_assert(SWIZZLE_BYTES == 128 || SWIZZLE_BYTES == 64 || SWIZZLE_BYTES == 32);
  return matrix_descriptor(address, block_bytes, group_bytes) | (SWIZZLE_BYTES == 128 ? 1ull : SWIZZLE_BYTES == 64 ? 2ull : 3ull) << 62;
}

/// Needed before the first multiply after other instructions wrote its registers.
__device__ __forceinline__ void fence_wgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_wgmma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_wgmma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
/// Makes this thread's writes to shared memory visible to the multiplies and TMA stores after the next barrier.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

#define TCONV_R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TCONV_R16(i) TCONV_R4(i), TCONV_R4(i + 4), TCONV_R4(i + 8), TCONV_R4(i + 12)
#define TCONV_R8 TCONV_R4(0), TCONV_R4(4)
#define TCONV_R12 TCONV_R8, TCONV_R4(8)
#define TCONV_R20 TCONV_R16(0), TCONV_R4(16)
#define TCONV_R24 TCONV_R20, TCONV_R4(20)
#define TCONV_R28 TCONV_R24, TCONV_R4(24)
#define TCONV_R32 TCONV_R16(0), TCONV_R16(16)
#define TCONV_R36 TCONV_R32, TCONV_R4(32)
#define TCONV_R40 TCONV_R36, TCONV_R4(36)
#define TCONV_R44 TCONV_R40, TCONV_R4(40)
#define TCONV_R48 TCONV_R44, TCONV_R4(44)
#define TCONV_R52 TCONV_R48, TCONV_R4(48)
#define TCONV_R56 TCONV_R52, TCONV_R4(52)
#define TCONV_R60 TCONV_R56, TCONV_R4(56)
#define TCONV_R64 TCONV_R60, TCONV_R4(60)
#define TCONV_R96 TCONV_R64, TCONV_R16(64), TCONV_R16(80)
#define TCONV_R128 TCONV_R96, TCONV_R16(96), TCONV_R16(112)
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
#define TCONV_O52 TCONV_O48 ", %48, %49, %50, %51"
#define TCONV_O56 TCONV_O52 ", %52, %53, %54, %55"
#define TCONV_O60 TCONV_O56 ", %56, %57, %58, %59"
#define TCONV_O64 TCONV_O60 ", %60, %61, %62, %63"
#define TCONV_O96 TCONV_O64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TCONV_O128 TCONV_O96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// The registers come last: they are many arguments.
#define TCONV_WGMMA_16_BIT(N, OPERANDS, A, B, ADD, TYPES, MAJORS, ...)                                             \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES " {" OPERANDS "}, " A ", " B                \
               ", " ADD ", 1, 1, " MAJORS ";" : __VA_ARGS__ : "l"(a), "l"(b))
#define TCONV_WGMMA(N, OPERANDS, A, B, ADD, ...)                                                                   \
  if constexpr (PRECISION == FP16 && ACROSS_K && !B_ACROSS_K) {                                                    \
    TCONV_WGMMA_16_BIT(N, OPERANDS, A, B, ADD, "f16.f16", "1, 0", __VA_ARGS__);                                    \
  } else if constexpr (PRECISION == BF16 && ACROSS_K && !B_ACROSS_K) {                                             \
    TCONV_WGMMA_16_BIT(N, OPERANDS, A, B, ADD, "bf16.bf16", "1, 0", __VA_ARGS__);                                  \
  } else if constexpr (PRECISION == FP16 && ACROSS_K) {                                                                   \
    TCONV_WGMMA_16_BIT(N, OPERANDS, A, B, ADD, "f16.f16", "1, 1", __VA_ARGS__);                                    \
  } else if constexpr (PRECISION == FP16 && B_ACROSS_K) {                                                          \
    TCONV_WGMMA_16_BIT(N, OPERANDS, A, B, ADD, "f16.f16", "0, 1", __VA_ARGS__);                                    \
  } else if constexpr (PRECISION == FP16) {                                                                        \
    TCONV_WGMMA_16_BIT(N, OPERANDS, A, B, ADD, "f16.f16", "0, 0", __VA_ARGS__);                                    \
  } else if constexpr (PRECISION == BF16 && ACROSS_K) {                                                            \
    TCONV_WGMMA_16_BIT(N, OPERANDS, A, B, ADD, "bf16.bf16", "1, 1", __VA_ARGS__);                                  \
  } else if constexpr (PRECISION == BF16 && B_ACROSS_K) {                                                          \
    TCONV_WGMMA_16_BIT(N, OPERANDS, A, B, ADD, "bf16.bf16", "0, 1", __VA_ARGS__);                                  \
  } else if constexpr (PRECISION == BF16) {                                                                        \
    TCONV_WGMMA_16_BIT(N, OPERANDS, A, B, ADD, "bf16.bf16", "0, 0", __VA_ARGS__);                                  \
  } else {                                                                                                         \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k8.f32.tf32.tf32 {" OPERANDS "}, " A ", " B               \
                 ", " ADD ", 1, 1;" : __VA_ARGS__ : "l"(a), "l"(b));                                               \
  }

#define TCONV_WGMMAS(ADD)                                                                                          \
  if constexpr (N == 32) {                                                                                         \
    TCONV_WGMMA(32, TCONV_O16, "%16", "%17", ADD, TCONV_R16(0))                                                    \
  } else if constexpr (N == 56) {                                                                                  \
    TCONV_WGMMA(56, TCONV_O28, "%28", "%29", ADD, TCONV_R28)                                                       \
  } else if constexpr (N == 64) {                                                                                  \
    TCONV_WGMMA(64, TCONV_O32, "%32", "%33", ADD, TCONV_R32)                                                       \
  } else if constexpr (N == 72) {                                                                                  \
    TCONV_WGMMA(72, TCONV_O36, "%36", "%37", ADD, TCONV_R36)                                                       \
  } else if constexpr (N == 80) {                                                                                  \
    TCONV_WGMMA(80, TCONV_O40, "%40", "%41", ADD, TCONV_R40)                                                       \
  } else if constexpr (N == 88) {                                                                                  \
    TCONV_WGMMA(88, TCONV_O44, "%44", "%45", ADD, TCONV_R44)                                                       \
  } else if constexpr (N == 96) {                                                                                  \
    TCONV_WGMMA(96, TCONV_O48, "%48", "%49", ADD, TCONV_R48)                                                       \
  } else if constexpr (N == 104) {                                                                                 \
    TCONV_WGMMA(104, TCONV_O52, "%52", "%53", ADD, TCONV_R52)                                                      \
  } else if constexpr (N == 112) {                                                                                 \
    TCONV_WGMMA(112, TCONV_O56, "%56", "%57", ADD, TCONV_R56)                                                      \
  } else if constexpr (N == 120) {                                                                                 \
    TCONV_WGMMA(120, TCONV_O60, "%60", "%61", ADD, TCONV_R60)                                                      \
  } else if constexpr (N == 128) {                                                                                 \
    TCONV_WGMMA(128, TCONV_O64, "%64", "%65", ADD, TCONV_R64)                                                      \
  } else if constexpr (N == 192) {                                                                                 \
    TCONV_WGMMA(192, TCONV_O96, "%96", "%97", ADD, TCONV_R96)                                                      \
  } else if constexpr (N == 256) {                                                                                 \
    TCONV_WGMMA(256, TCONV_O128, "%128", "%129", ADD, TCONV_R128)                                                  \
  }

/// d += a * b, or d = a * b. d[4 j + r] of lane 4g + t of warp w: row 16 w + g + 8 (r / 2), column 8 j + 2 t + r % 2.
///
/// ACROSS_K (16 bits only): both operands lie as planes of 8 rows (of m, of n), [plane][k][16 bytes]. In a descriptor,
/// `plane_bytes` is then the distance from 8 k to the next 8, `group_bytes` from 8 rows to the next 8. A shift along k is an
/// address. Without B_ACROSS_K only A lies like this; with B_ACROSS_K alone, only B.
template <int PRECISION, int N, bool ADD = true, bool ACROSS_K = false, bool B_ACROSS_K = ACROSS_K>
__device__ __forceinline__ void wgmma(float* d, u64 a, u64 b) {
  static_assert(!(ACROSS_K || B_ACROSS_K) || PRECISION == FP16 || PRECISION == BF16);
  static_assert(N == 32 || (N >= 56 && N <= 128 && N % 8 == 0) || N == 192 || N == 256);
  if constexpr (ADD) {
    TCONV_WGMMAS("1")
  } else {
    TCONV_WGMMAS("0")
  }
}

/// The same with A in registers: a[0..3] = rows (g, g + 8, g, g + 8) of the words (t, t, t + 4, t + 4) of k of warp w's 16,
/// a word being one TF32 number or two neighbours in 16 bits. They must not change until the multiply has been waited for.
template <int N, int PRECISION = TF32, bool ADD = true>
__device__ __forceinline__ void wgmma_from_registers(float* d, const u32 (&a)[4], u64 b) {
  static_assert((N >= 16 && N <= 96 && N % 8 == 0) || N == 128 || N == 192 || N == 256);
#define TCONV_WGMMA_TYPED(N, TYPES, ADD, ENDING, OPERANDS, A, B, ...)                                              \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N TYPES " {" OPERANDS "}, {" A "}, " B ", " ADD ", 1, 1" ENDING \
               ";" : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#define TCONV_WGMMA_REGISTERS(N, ...)                                                                              \
  if constexpr (PRECISION == FP16 && ADD) {                                                                        \
    TCONV_WGMMA_TYPED(N, "k16.f32.f16.f16", "1", ", 0", __VA_ARGS__)                                               \
  } else if constexpr (PRECISION == FP16) {                                                                        \
    TCONV_WGMMA_TYPED(N, "k16.f32.f16.f16", "0", ", 0", __VA_ARGS__)                                               \
  } else if constexpr (PRECISION == BF16 && ADD) {                                                                 \
    TCONV_WGMMA_TYPED(N, "k16.f32.bf16.bf16", "1", ", 0", __VA_ARGS__)                                             \
  } else if constexpr (PRECISION == BF16) {                                                                        \
    TCONV_WGMMA_TYPED(N, "k16.f32.bf16.bf16", "0", ", 0", __VA_ARGS__)                                             \
  } else if constexpr (ADD) {                                                                                      \
    TCONV_WGMMA_TYPED(N, "k8.f32.tf32.tf32", "1", "", __VA_ARGS__)                                                 \
  } else {                                                                                                         \
    TCONV_WGMMA_TYPED(N, "k8.f32.tf32.tf32", "0", "", __VA_ARGS__)                                                 \
  }
  if constexpr (N == 16) {
    TCONV_WGMMA_REGISTERS(16, TCONV_O8, "%8, %9, %10, %11", "%12", TCONV_R8)
  } else if constexpr (N == 24) {
    TCONV_WGMMA_REGISTERS(24, TCONV_O12, "%12, %13, %14, %15", "%16", TCONV_R12)
  } else if constexpr (N == 32) {
    TCONV_WGMMA_REGISTERS(32, TCONV_O16, "%16, %17, %18, %19", "%20", TCONV_R16(0))
  } else if constexpr (N == 40) {
    TCONV_WGMMA_REGISTERS(40, TCONV_O20, "%20, %21, %22, %23", "%24", TCONV_R20)
  } else if constexpr (N == 48) {
    TCONV_WGMMA_REGISTERS(48, TCONV_O24, "%24, %25, %26, %27", "%28", TCONV_R24)
  } else if constexpr (N == 56) {
    TCONV_WGMMA_REGISTERS(56, TCONV_O28, "%28, %29, %30, %31", "%32", TCONV_R28)
  } else if constexpr (N == 64) {
    TCONV_WGMMA_REGISTERS(64, TCONV_O32, "%32, %33, %34, %35", "%36", TCONV_R32)
  } else if constexpr (N == 72) {
    TCONV_WGMMA_REGISTERS(72, TCONV_O36, "%36, %37, %38, %39", "%40", TCONV_R36)
  } else if constexpr (N == 80) {
    TCONV_WGMMA_REGISTERS(80, TCONV_O40, "%40, %41, %42, %43", "%44", TCONV_R40)
  } else if constexpr (N == 88) {
    TCONV_WGMMA_REGISTERS(88, TCONV_O44, "%44, %45, %46, %47", "%48", TCONV_R44)
  } else if constexpr (N == 96) {
    TCONV_WGMMA_REGISTERS(96, TCONV_O48, "%48, %49, %50, %51", "%52", TCONV_R48)
  } else if constexpr (N == 128) {
    TCONV_WGMMA_REGISTERS(128, TCONV_O64, "%64, %65, %66, %67", "%68", TCONV_R64)
  } else if constexpr (N == 192) {
    TCONV_WGMMA_REGISTERS(192, TCONV_O96, "%96, %97, %98, %99", "%100", TCONV_R96)
  } else if constexpr (N == 256) {
    TCONV_WGMMA_REGISTERS(256, TCONV_O128, "%128, %129, %130, %131", "%132", TCONV_R128)
  }
#undef TCONV_WGMMA_TYPED
#undef TCONV_WGMMA_REGISTERS
}

#undef TCONV_WGMMAS
#undef TCONV_WGMMA_16_BIT
#undef TCONV_WGMMA
#undef TCONV_O16
#undef TCONV_R24
#undef TCONV_R20
#undef TCONV_R12
#undef TCONV_R8
#undef TCONV_O24
#undef TCONV_O20
#undef TCONV_O12
#undef TCONV_O8
#undef TCONV_O28
#undef TCONV_O32
#undef TCONV_O36
#undef TCONV_O40
#undef TCONV_O44
#undef TCONV_O48
#undef TCONV_O52
#undef TCONV_O56
#undef TCONV_O60
#undef TCONV_O64
#undef TCONV_O96
#undef TCONV_O128
#undef TCONV_R4
#undef TCONV_R16
#undef TCONV_R28
#undef TCONV_R32
#undef TCONV_R36
#undef TCONV_R40
#undef TCONV_R44
#undef TCONV_R48
#undef TCONV_R52
#undef TCONV_R56
#undef TCONV_R60
#undef TCONV_R64
#undef TCONV_R96
#undef TCONV_R128

}  // namespace ptx
