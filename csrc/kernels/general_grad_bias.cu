// Gradient of the bias, NCHW and channels_last: the sum of grad_output over batch and pixels.
//
// A block sums CHANNELS channels over one slice of the (n, pixel) positions and writes partial[slice, channel];
// reduce_slices adds the slices. Every sum has a fixed order: the same input gives the same bits.
constexpr int CHANNELS = CHANNELS_LAST ? 32 : 1;  // neighbouring threads read neighbouring memory
constexpr int POSITIONS = THREADS / CHANNELS;
constexpr int TILES = (OUT_CHANNELS + CHANNELS - 1) / CHANNELS;
using Sum = Accumulate<Element>::type;

extern "C" __global__ void __launch_bounds__(THREADS)
    general_grad_bias(const Element* __restrict__ grad_output, Sum* __restrict__ partial, long long batch,
                      long long positions_per_slice) {
  __shared__ Sum shared[POSITIONS][CHANNELS];
  constexpr long long PIXELS = (long long)OUT_HEIGHT * OUT_WIDTH;
  const int lane = threadIdx.x % CHANNELS, position = threadIdx.x / CHANNELS;
  const int channel = blockIdx.x % TILES * CHANNELS + lane;
  const long long slice = blockIdx.x / TILES;
  const long long begin = slice * positions_per_slice;
  const long long all = batch * PIXELS;
  const long long end = begin + positions_per_slice < all ? begin + positions_per_slice : all;

  Sum sum = 0;
  if (channel < OUT_CHANNELS)
    for (long long p = begin + position; p < end; p += POSITIONS) {
      const long long at = CHANNELS_LAST ? p * OUT_CHANNELS + channel
                                         : (p / PIXELS * OUT_CHANNELS + channel) * PIXELS + p % PIXELS;
      sum += load_as(grad_output[at]);
    }
  shared[position][lane] = sum;
  __syncthreads();
  for (int half = POSITIONS / 2; half > 0; half /= 2) {
    if (position < half) shared[position][lane] += shared[position + half][lane];
    __syncthreads();
  }
  if (position == 0 && channel < OUT_CHANNELS) partial[slice * OUT_CHANNELS + channel] = shared[0][lane];
}
