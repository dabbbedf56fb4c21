#pragma once
#include "emu.h"
namespace ptx {
using u32 = unsigned int;
constexpr int TF32 = 0, FP16 = 1, BF16 = 2, IEEE = 3;
inline u32 shared_address(const void* p) { return (u32)((const char*)p - (const char*)shared); }
inline u32 pinned(u32 v) { return v; }
inline u32 round_to_tf32(u32 b) { return (b + 0x1000) & ~0x1fffu; }
inline u32 low_part(float v, u32 h) { return round_to_tf32(__float_as_uint(v - __uint_as_float(h))); }
template <int P> u32 pack_pair(float lo, float hi) { return store_as<Half>(lo).bits | (u32)store_as<Half>(hi).bits << 16; }
inline u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
inline u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }
template <int W> void store_shared(u32 a, const u32* v) { if (a % (W * 4)) { puts("unaligned STS"); abort(); } if (a + W * 4 > SHARED_BYTES) { puts("STS out of bounds"); abort(); } memcpy((char*)shared + a, v, W * 4); }
inline void check(const void* p, int n) { if ((const char*)p < in_lo || (const char*)p + n > in_hi) { puts("load out of bounds"); abort(); } if ((uintptr_t)p % n) { puts("unaligned load"); abort(); } }
template <int B> void load_global(u32* w, const void* p) { check(p, B); w[0] = 0; memcpy(w, p, B); }
template <int B> void copy_async(u32 to, const void* p) { if (to + B > SHARED_BYTES) { puts("cp out"); abort(); } memcpy((char*)shared + to, p, B); }
template <int B> void copy_async_or_zero(u32 to, const void* p, bool r) { if (to + B > SHARED_BYTES) { puts("cp out"); abort(); } if (r) check(p, B); if (r) memcpy((char*)shared + to, p, B); else memset((char*)shared + to, 0, B); }
inline void commit_copies() {}
template <int P> void wait_copies() {}
inline void wait_for_previous_launch() {}
inline void let_next_launch_start() {}
}
