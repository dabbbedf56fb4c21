// output[i] = sum over slices s of partial[s, i], in the order of s: the last step of every split sum.
using Sum = Accumulate<Element>::type;

extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_slices(const Sum* __restrict__ partial, Element* __restrict__ output, long long count,
                  long long slices) {
  const long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
  if (i >= count) return;
  Sum sum = 0;
  for (long long s = 0; s < slices; ++s) sum += partial[s * count + i];
  output[i] = store_as<Element>(sum);
}
