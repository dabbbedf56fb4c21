// What compute-sanitizer's racecheck does not follow, in small: `nvcc -arch=sm_90a -o race benchmarks/racecheck.cu`, then
// `compute-sanitizer --tool racecheck ./race x` (and e, b, eb).
//
// Two filling warps take turns at 3 stages and one warp reads them, handed over by mbarriers as in forward/implicit_gemm_wgmma.cu. All four
// are ordered the same way: writes, (__syncwarp,) arrival on `full`, wait, reads, (__syncwarp,) arrival on `empty`, wait, writes.
// Without e every lane arrives; with e one lane does for its warp, after __syncwarp. With b a bulk copy completes on `full` too.
#include <cstdint>
#include <cstdio>
#include <cstring>
constexpr int STAGES = 3, CHUNKS = 12;
__device__ uint32_t at(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
__device__ void init(uint64_t* b, int n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at(b)), "r"(n) : "memory"); }
__device__ void arrive(uint64_t* b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at(b)) : "memory"); }
__device__ void expect(uint64_t* b, int n) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at(b)), "r"(n) : "memory"); }
__device__ void wait(uint64_t* b, int parity) {
  asm volatile("{.reg .pred p;\nL%=: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra L%=;}" ::"r"(at(b)), "r"(parity) : "memory");
}
__device__ void bulk(void* to, const void* from, int n, uint64_t* b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(at(to)), "l"(from), "r"(n), "r"(at(b)) : "memory");
}
template <bool ELECTED, bool BULK>
__global__ void ring(const int* in, int* out) {
  __shared__ __align__(16) uint64_t full[STAGES], empty[STAGES];
  __shared__ __align__(128) volatile int data[STAGES][32];
  __shared__ __align__(128) int brought[STAGES][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) for (int s = 0; s < STAGES; ++s) { init(&full[s], (ELECTED ? 1 : 32) + BULK); init(&empty[s], ELECTED ? 1 : 32); }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  if (warp < 2) {
    for (int k = warp; k < CHUNKS; k += 2) {
      const int s = k % STAGES, parity = k / STAGES % 2;
      wait(&empty[s], parity ^ 1);
      if (BULK && lane == 0) { expect(&full[s], 128); bulk(brought[s], in, 128, &full[s]); }
      data[s][lane] = k + lane;
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      if (!ELECTED || lane == 0) arrive(&full[s]);
    }
  } else {
    int sum = 0;
    for (int k = 0; k < CHUNKS; ++k) {
      const int s = k % STAGES, parity = k / STAGES % 2;
      wait(&full[s], parity);
      sum += data[s][31 - lane] + (BULK ? brought[s][lane] : 0);
      if (ELECTED) __syncwarp();
      if (!ELECTED || lane == 0) arrive(&empty[s]);
    }
    out[lane] = sum;
  }
}
int main(int n, char** a) {
  int *in, *out; cudaMalloc(&in, 128); cudaMemset(in, 0, 128); cudaMalloc(&out, 128);
  const bool e = strchr(a[1], 'e'), b = strchr(a[1], 'b');
  if (e && b) ring<true, true><<<1, 96>>>(in, out);
  else if (e) ring<true, false><<<1, 96>>>(in, out);
  else if (b) ring<false, true><<<1, 96>>>(in, out);
  else ring<false, false><<<1, 96>>>(in, out);
  printf("%s: %s\n", a[1], cudaGetErrorString(cudaDeviceSynchronize()));
}
