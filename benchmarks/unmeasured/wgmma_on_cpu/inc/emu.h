#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <cstdint>
#include <pthread.h>
#include <vector>
#define __device__
#define __global__
#define __forceinline__ inline
#define __restrict__
#define __shared__
#define __align__(x)
#define __launch_bounds__(...)
struct uint4 { unsigned x, y, z, w; }; struct uint2 { unsigned x, y; };
inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
inline uint2 make_uint2(unsigned a, unsigned b) { return {a, b}; }
struct Dim { int x; };
extern thread_local Dim threadIdx; extern Dim blockIdx, gridDim;
void __syncthreads();
inline unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
inline float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  unsigned char v[8]; memcpy(v, &a, 4); memcpy(v + 4, &b, 4); unsigned r = 0;
  for (int i = 0; i < 4; i++) r |= (unsigned)v[(s >> (4 * i)) & 7] << (8 * i); return r; }
template <class T> T __ldg(const T* p) { return *p; }
template <class T> void __stcs(T* p, T v) { *p = v; }
struct Half { unsigned short bits; }; struct BFloat16 { unsigned short bits; };
inline float load_as(float x) { return x; }
inline float load_as(Half x) { _Float16 h; memcpy(&h, &x.bits, 2); return (float)h; }
template <class T> T store_as(float x);
template <> inline float store_as<float>(float x) { return x; }
template <> inline Half store_as<Half>(float x) { _Float16 h = (_Float16)x; Half r; memcpy(&r.bits, &h, 2); return r; }
extern unsigned shared[];
extern const char *in_lo, *in_hi;
