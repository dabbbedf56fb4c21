// Small inline functions for the PTX instructions of the tensor-core kernels, for sm_80 and later.
#pragma once

namespace ptx {

using u32 = unsigned int;

/// The type of the operands of a multiply. The planners use the same numbers (forward/implicit_gemm.py).
constexpr int TF32 = 0;
constexpr int FP16 = 1;
constexpr int BF16 = 2;
constexpr int IEEE = 3;  // float32 by three TF32 products

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

/// Returns the value, which stays in a register: otherwise the compiler computes a shared address again and again.
__device__ __forceinline__ u32 keep_in_register(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

/// The same for an address in global memory.
template <typename T>
__device__ __forceinline__ const T* keep_in_register(const T* address) {
  asm volatile("" : "+l"(address));
  return address;
}

// ---- conversions ------------------------------------------------------------------------------------------

/// Rounds to nearest, ties away from zero. The multiplier would truncate raw bits, which has twice the error.
__device__ __forceinline__ u32 round_to_tf32(u32 bits) {
  u32 result;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(__uint_as_float(bits)));
  return result;
}

/// The same, ties to even, in one instruction (sm_90).
__device__ __forceinline__ u32 round_to_nearest_tf32(u32 bits) {
  u32 result;
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(result) : "f"(__uint_as_float(bits)));
  return result;
}

/// Adds half a unit of the last place of TF32, so that the multiplier's truncation rounds to nearest.
__device__ __forceinline__ u32 add_half_ulp_of_tf32(u32 bits) {
  return fabsf(__uint_as_float(bits)) < __int_as_float(0x7f800000) ? bits + 0x1000 : bits;
}

/// Returns the rest of `value` after rounding it to `high`, itself rounded to TF32.
__device__ __forceinline__ u32 low_part(float value, u32 high) {
  return round_to_tf32(__float_as_uint(value - __uint_as_float(high)));
}

/// Returns two floats as one 32-bit word of two 16-bit numbers, `low` in the low half.
template <int PRECISION>
__device__ __forceinline__ u32 pack_pair(float low, float high) {
  u32 result;
  if constexpr (PRECISION == FP16) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  }
  return result;
}

/// Return the word of the low halves of a and b, and the word of their high halves.
__device__ __forceinline__ u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

// ---- matrix multiply --------------------------------------------------------------------------------------

/// c += a * b for one 16 x 8 tile over 8 words of k, which are 8 TF32 numbers or 16 of 16 bits. Counted in words, both
/// shapes have the same fragments. With g = lane / 4 and t = lane % 4: a = (m g, k t), (g + 8, t), (g, t + 4), (g + 8, t + 4);
/// b = (k t, n g), (t + 4, g); c = (m g, n 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
template <int PRECISION>
__device__ __forceinline__ void mma(float (&c)[4], const uint4& a, const u32 (&b)[2]) {
#define TCONV_MMA(SHAPE)                                                                                          \
  asm volatile("mma.sync.aligned." SHAPE " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                 \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                   \
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b[0]), "r"(b[1]))
  if constexpr (PRECISION == FP16) {
    TCONV_MMA("m16n8k16.row.col.f32.f16.f16.f32");
  } else if constexpr (PRECISION == BF16) {
    TCONV_MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
  } else {
    TCONV_MMA("m16n8k8.row.col.f32.tf32.tf32.f32");
  }
#undef TCONV_MMA
}

/// c = a * b: like mma, for the first TF32 product of a sum.
__device__ __forceinline__ void mma_first(float (&c)[4], const uint4& a, const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b[0]), "r"(b[1]), "f"(0.0f));
}

// ---- shared memory ----------------------------------------------------------------------------------------

__device__ __forceinline__ u32 load_shared(u32 address) {
  u32 value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address));
  return value;
}

/// Returns 0 and reads nothing if the condition is false.
__device__ __forceinline__ u32 load_shared_if(bool condition, u32 address) {
  u32 value;
  asm volatile("{\n .reg .pred there;\n setp.ne.u32 there, %2, 0;\n mov.b32 %0, 0;\n @there ld.shared.u32 %0, [%1];\n}"
               : "=&r"(value)
               : "r"(address), "r"(static_cast<u32>(condition)));
  return value;
}

__device__ __forceinline__ uint4 load_shared_vector(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}

__device__ __forceinline__ float2 load_shared_pair(u32 address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
  return v;
}

template <int WORDS>
__device__ __forceinline__ void store_shared(u32 address, const u32* v) {
  if constexpr (WORDS == 4) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]));
  } else if constexpr (WORDS == 2) {
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(address), "r"(v[0]), "r"(v[1]));
  } else {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v[0]));
  }
}

/// Loads 2 to 16 bytes.
template <int BYTES>
__device__ __forceinline__ void load_shared_bytes(u32* words, u32 address) {
  if constexpr (BYTES == 16) {
    const uint4 v = load_shared_vector(address);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else if constexpr (BYTES == 8) {
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(address));
  } else if constexpr (BYTES == 4) {
    words[0] = load_shared(address);
  } else {
    unsigned short half;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(address));
    words[0] = half;
  }
}

/// Stores the low half of a word.
__device__ __forceinline__ void store_shared_half(u32 address, u32 value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<unsigned short>(value)));
}

/// Lane 8m + r gives the address of row r (16 bytes) of matrix m; lane 4r + t receives word t of row r of each matrix.
__device__ __forceinline__ void load_matrices(u32 (&m)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address));
}

__device__ __forceinline__ void load_matrices(u32 (&m)[2], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(m[0]), "=r"(m[1]) : "r"(address));
}

/// The same with each matrix transposed: lane 4r + t receives column r of rows 2t and 2t + 1, two 16-bit numbers.
__device__ __forceinline__ void load_matrices_transposed(u32 (&m)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address));
}

__device__ __forceinline__ void load_matrices_transposed(u32 (&m)[2], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(m[0]), "=r"(m[1]) : "r"(address));
}

/// Lane 8m + r gives the address for row r (16 bytes) of matrix m; lane 4r + t gives word t of row r of each matrix (sm_90).
__device__ __forceinline__ void store_matrices(u32 address, const u32 (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(m[0]), "r"(m[1]), "r"(m[2]),
               "r"(m[3])
               : "memory");
}

// ---- loads and asynchronous copies global -> shared -------------------------------------------------------------------

// Both let the L2 fetch whole lines of 128 bytes: a chunk reads a part of each line, the next chunks read the rest.

/// Loads 2, 4, 8 or 16 bytes that nothing writes during the launch.
template <int BYTES>
__device__ __forceinline__ void load_global(u32* words, const void* from) {
  if constexpr (BYTES == 16) {
    asm volatile("ld.global.nc.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from));
  } else if constexpr (BYTES == 8) {
    asm volatile("ld.global.nc.L2::128B.v2.u32 {%0,%1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(from));
  } else if constexpr (BYTES == 4) {
    asm volatile("ld.global.nc.L2::128B.u32 %0, [%1];" : "=r"(words[0]) : "l"(from));
  } else {
    static_assert(BYTES == 2);
    words[0] = __ldg(static_cast<const unsigned short*>(from));
  }
}

template <int BYTES>
__device__ __forceinline__ void copy_async(u32 to, const void* from) {
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
  } else {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES));
  }
}

/// The same, but where `inside` is false it reads nothing and writes zeros. With THROUGH_L1, 16 bytes go through the L1, as
/// smaller copies always do; otherwise each copy is a request to the L2.
template <int BYTES, bool THROUGH_L1 = false>
__device__ __forceinline__ void copy_async_or_zero(u32 to, const void* from, bool inside) {
  const int bytes = inside ? BYTES : 0;
  if constexpr (BYTES == 16 && !THROUGH_L1) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
  } else {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(bytes));
  }
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most `PENDING` of this thread's committed groups are pending.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- some of a block's threads ---------------------------------------------------------------------------------

/// Synchronises THREADS threads of the block, whole warps. Barrier 0 is that of __syncthreads.
template <int BARRIER, int THREADS>
__device__ __forceinline__ void sync_named_barrier() {
  asm volatile("bar.sync %0, %1;" ::"n"(BARRIER), "n"(THREADS) : "memory");
}

// ---- programmatic dependent launch --------------------------------------------------------------------------

/// Waits until all writes of the launch before this one are visible.
__device__ __forceinline__ void wait_for_previous_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Allows the launch after this one to start its blocks.
__device__ __forceinline__ void let_next_launch_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace ptx
