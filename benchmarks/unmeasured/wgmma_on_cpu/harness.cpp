thread_local Dim threadIdx; Dim blockIdx, gridDim; const char *in_lo, *in_hi;
alignas(1024) unsigned shared[256 * 1024 / 4];
static pthread_barrier_t bar; void __syncthreads() { if (NTHREADS > 1 && !packing) pthread_barrier_wait(&bar); }
