#pragma once
namespace ptx {
using u64 = unsigned long long;
inline u64 matrix_descriptor(u32 a, u32 p, u32 g) { return (u64)((a & 0x3ffff) >> 4) | (u64)(p >> 4) << 16 | (u64)(g >> 4) << 32; }
inline void fence_sums() {} inline void commit_multiplies() {} template <int P> void wait_multiplies() {} inline void publish_to_multiplies() {}
inline float elem(u64 d, int row, int k, bool half) {
  unsigned base = (d & 0x3fff) << 4, plane = ((d >> 16) & 0x3fff) << 4, grp = ((d >> 32) & 0x3fff) << 4;
  int per = half ? 8 : 4; unsigned a = base + (k / per) * plane + (row / 8) * grp + (row % 8) * 16 + (k % per) * (half ? 2 : 4);
  if (a + 4 > SHARED_BYTES + 2) { puts("wgmma out of bounds"); abort(); }
  if (half) { Half h; memcpy(&h.bits, (char*)shared + a, 2); return load_as(h); }
  unsigned u; memcpy(&u, (char*)shared + a, 4); return __uint_as_float(u & ~0x1fffu);
}
template <int P, int N> void multiply(float* d, u64 a, u64 b) {
  int lane = threadIdx.x % 32, w = threadIdx.x / 32 % 4, g = lane / 4, t = lane % 4; bool half = P == FP16;
  for (int j = 0; j < N / 8; j++) for (int r = 0; r < 4; r++) {
    int row = 16 * w + g + 8 * (r / 2), col = 8 * j + 2 * t + r % 2; float s = 0;
    for (int k = 0; k < (half ? 16 : 8); k++) s += elem(a, row, k, half) * elem(b, col, k, half);
    d[4 * j + r] += s; }
}
}
