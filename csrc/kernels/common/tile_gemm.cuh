// The tile of a thread block of C[m, n] = sum over k of A[m, k] * B[k, n], for any A and B that are given as functions of
// their indices (zero outside). It uses FMA arithmetic; every general kernel is this product with two functions of its own.
//
// Tile: TILE_M x TILE_N of C per block, TILE_K of k per step through shared memory, THREAD_M x THREAD_N of C per
// thread. M_FASTEST says which index of C differs between neighbouring threads, so that stores coalesce.
// The order of the sum over k is fixed: the same input gives the same bits.
#pragma once

constexpr int THREADS_M = TILE_M / THREAD_M;
constexpr int THREADS_N = TILE_N / THREAD_N;
constexpr int THREADS = THREADS_M * THREADS_N;
constexpr int A_LOADS = (TILE_M * TILE_K + THREADS - 1) / THREADS;
constexpr int B_LOADS = (TILE_N * TILE_K + THREADS - 1) / THREADS;

using Sum = Accumulate<Element>::type;

struct TileShared {
  Sum a[TILE_K][TILE_M + 1];
  Sum b[TILE_K][TILE_N + 1];
};

// The element of a ROWS x TILE_K operand tile that a thread loads as its i-th, if it exists. Neighbouring threads take
// neighbours in memory.
template <int ROWS, bool K_FASTEST>
struct Share {
  __device__ static bool exists(int i) {
    return ROWS * TILE_K % THREADS == 0 || threadIdx.x + i * THREADS < ROWS * TILE_K;
  }
  __device__ static int row(int i) {
    const int e = threadIdx.x + i * THREADS;
    return K_FASTEST ? e / TILE_K : e % ROWS;
  }
  __device__ static int k(int i) {
    const int e = threadIdx.x + i * THREADS;
    return K_FASTEST ? e % TILE_K : e / ROWS;
  }
};

template <bool M_FASTEST>
struct Owned {
  __device__ static int m(int i) {
    return (M_FASTEST ? threadIdx.x % THREADS_M : threadIdx.x / THREADS_N) + i * THREADS_M;
  }
  __device__ static int n(int j) {
    return (M_FASTEST ? threadIdx.x / THREADS_M : threadIdx.x % THREADS_N) + j * THREADS_N;
  }
};

// load_a(i, k) and load_b(i, k) return the value of the thread's i-th element at k (a multiple of TILE_K plus the k of the
// element). MAX_TERMS is the largest number of terms of a sum: long sums are added up in pieces, so that their rounding
// error is that of short ones.
constexpr int PIECE_TERMS = 512;
template <bool A_K_FASTEST, bool B_K_FASTEST, bool M_FASTEST, long long MAX_TERMS, class LoadA, class LoadB>
__device__ __forceinline__ void tile_gemm(TileShared& shared, long long k_begin, long long k_end, LoadA load_a,
                                          LoadB load_b, Sum (&total)[THREAD_M][THREAD_N]) {
  constexpr bool PIECES = MAX_TERMS > 2 * PIECE_TERMS;
  Sum sum[THREAD_M][THREAD_N];
#pragma unroll
  for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
    for (int j = 0; j < THREAD_N; ++j) sum[i][j] = total[i][j] = 0;
  int step = 0;
  for (long long k0 = k_begin; k0 < k_end; k0 += TILE_K) {
#pragma unroll
    for (int i = 0; i < A_LOADS; ++i) {
      if (!Share<TILE_M, A_K_FASTEST>::exists(i)) break;
      const int k = Share<TILE_M, A_K_FASTEST>::k(i);
      shared.a[k][Share<TILE_M, A_K_FASTEST>::row(i)] = k0 + k < k_end ? load_a(i, k0 + k) : Sum(0);
    }
#pragma unroll
    for (int i = 0; i < B_LOADS; ++i) {
      if (!Share<TILE_N, B_K_FASTEST>::exists(i)) break;
      const int k = Share<TILE_N, B_K_FASTEST>::k(i);
      shared.b[k][Share<TILE_N, B_K_FASTEST>::row(i)] = k0 + k < k_end ? load_b(i, k0 + k) : Sum(0);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < TILE_K; ++k) {
      Sum a[THREAD_M], b[THREAD_N];
#pragma unroll
      for (int i = 0; i < THREAD_M; ++i) a[i] = shared.a[k][Owned<M_FASTEST>::m(i)];
#pragma unroll
      for (int j = 0; j < THREAD_N; ++j) b[j] = shared.b[k][Owned<M_FASTEST>::n(j)];
#pragma unroll
      for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
        for (int j = 0; j < THREAD_N; ++j) sum[i][j] += a[i] * b[j];
    }
    __syncthreads();
    if (PIECES && ++step == PIECE_TERMS / TILE_K) {
      step = 0;
#pragma unroll
      for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
        for (int j = 0; j < THREAD_N; ++j) {
          total[i][j] += sum[i][j];
          sum[i][j] = 0;
        }
    }
  }
#pragma unroll
  for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
    for (int j = 0; j < THREAD_N; ++j) total[i][j] += sum[i][j];
}
