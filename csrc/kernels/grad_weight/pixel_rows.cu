// Gradient of the weight with wgmma (sm_90a) in TF32, both operands read from shared memory, with pixels along k.
//
//   128 x TILE_COLS: input channels by chunks of output channels, each chunk of one tap (SWAPPED: transposed); K = pixels
//
// In TF32 wgmma reads only operands that are contiguous along k, and k are pixels. So both operands are rows of
// pixels, one for each image and channel (NCHW itself, or a copy by common/space_to_depth.cu), loaded in boxes of BOX
// pixels and many channels: [box][channel][BOX pixels]. grad_output is copied to planes, one for each column of taps
// and phase of rows (sizes.im2col_rows: each row of taps). A tap is a plane and a shift by whole rows of the image, which
// is where its box begins. What lies outside is read as zero. A stage is 32 pixels.
//
// Covers: float32 (TF32); any kernel, stride, padding, output padding, dilation, groups; image rows of a multiple of 4
// pixels, or sizes.im2col_rows, or no tap shifted by rows; the layouts that the tensor maps describe. Warpgroup 0 is the
// producer, the other two are the consumers, 64 rows each. MULTICAST: two blocks of a cluster load one operand
// together, each half of it for both. The pixels are cut into splits; a split's sums are gradient[split][ci][tap][co],
// which grad_weight/pixel_rows_reduce.cu adds up.
#include "common/mma.cuh"
#include "common/wgmma.cuh"
#include "common/pipeline.cuh"
#include "common/tma.cuh"
#include "grad_weight/pixel_rows_layout.cuh"
#include "grad_weight/pixel_rows_multiply.cuh"
#include "grad_weight/ring_barriers.cuh"
#include "common/sizes.cuh"

constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
/// A coordinate outside of every tensor, whatever is added as a shift.
constexpr int OUT_OF_BOUNDS = 1 << 28;

/// The rows of the image by which a tap is shifted, counted from the ZERO_ROWS rows of zeros before a plane.
__device__ __forceinline__ int row_shift(int kh) { return ZERO_ROWS + floor_div(kh * DILATION_H - PADDING_H, STRIDE_H); }

/// Copies a box of an operand to this block, or by multicast to every block of the cluster.
template <bool MULTICAST_COPY>
__device__ __forceinline__ void copy_to(u32 to, const TensorMap& map, int pixel, int channel, int image, u32 barrier) {
  if constexpr (MULTICAST_COPY) {
    ptx::tma_load_multicast(to, map, pixel, channel, image, barrier, (1 << CLUSTER) - 1);
  } else {
    ptx::tma_load(to, map, pixel, channel, image, barrier);
  }
}

/// How many boxes one side of the tile takes (ALL), and how many of them this block loads (OWN).
template <int SIDE, int BOX_CHANNELS, bool MULTICAST_COPY>
struct Copies {
  static constexpr int ALL = SIDE / BOX_CHANNELS;
  static constexpr int OWN = MULTICAST_COPY ? ALL / CLUSTER : ALL;
  static_assert(SIDE % BOX_CHANNELS == 0 && (!MULTICAST_COPY || ALL % CLUSTER == 0));
};
using InputCopies = Copies<INPUT_SIDE, INPUT_BOX_CHANNELS, MULTICAST == INPUT>;
using OutputCopies = Copies<OUTPUT_SIDE, OUTPUT_BOX_CHANNELS, MULTICAST == OUTPUT>;
static_assert(CHUNK % OUTPUT_BOX_CHANNELS == 0);

/// The producer, one thread: loads stage after stage.
__device__ __forceinline__ void produce(Ring ring, const TensorMap& input, const TensorMap& planes, const Place& place, u32 rank,
                                     int first_stage, int stages, const PixelRowsSizes& sizes) {
  constexpr bool MULTICASTS_INPUT = MULTICAST == INPUT, MULTICASTS_OUTPUT = MULTICAST == OUTPUT;
  int channel[OutputCopies::OWN], shift[OutputCopies::OWN], plane_images[OutputCopies::OWN];
  const int first_copy = MULTICASTS_OUTPUT ? rank * OutputCopies::OWN : 0;
#pragma unroll
  for (int i = 0; i < OutputCopies::OWN; ++i) {
    const int row = (first_copy + i) * OUTPUT_BOX_CHANNELS, chunk = place.first_chunk + row / CHUNK;
    const int tap = chunk / CHANNEL_CHUNKS, kh = tap / KERNEL_W, kw = tap % KERNEL_W;
    const bool exists = tap < TAPS;
    channel[i] = exists ? place.group * CO_GROUP + chunk % CHANNEL_CHUNKS * CHUNK + row % CHUNK : OUT_OF_BOUNDS;
    shift[i] = exists && !sizes.im2col_rows ? row_shift(kh) * sizes.width : 0;
    plane_images[i] = exists ? ((sizes.im2col_rows ? kh : kh % ROW_PHASES) * KERNEL_W + kw) * sizes.batch : 0;
  }
  const int first_box = first_stage * BOXES, row_boxes = ceil_div(sizes.pixels, BOX);
  int pixel = first_box % row_boxes * BOX, image = first_box / row_boxes;
  for (int s = 0; s < stages; ++s) {
    ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
    ptx::arrive_expect_tx(ring.full(), STAGE_BYTES);
#pragma unroll
    for (int box = 0; box < BOXES; ++box) {
      const int at = image < sizes.batch ? pixel : OUT_OF_BOUNDS;
      const u32 to_rows = ring.rows() + box * ROWS_BYTES, to_cols = ring.cols() + box * COLS_BYTES;
      const u32 to_input = SWAPPED ? to_cols : to_rows, to_output = SWAPPED ? to_rows : to_cols;
#pragma unroll
      for (int i = 0; i < InputCopies::OWN; ++i) {
        const int row = ((MULTICASTS_INPUT ? rank * InputCopies::OWN : 0) + i) * INPUT_BOX_CHANNELS;
        copy_to<MULTICASTS_INPUT>(to_input + row * BOX_ROW_BYTES, input, at, place.group * CI_GROUP + place.ci + row, image, ring.full());
      }
#pragma unroll
      for (int i = 0; i < OutputCopies::OWN; ++i)
        copy_to<MULTICASTS_OUTPUT>(to_output + (first_copy + i) * OUTPUT_BOX_CHANNELS * BOX_ROW_BYTES, planes, at + shift[i], channel[i],
                             plane_images[i] + image, ring.full());
      pixel += BOX;
      if (pixel >= sizes.pixels) pixel = 0, ++image;
    }
    ring.advance();
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(384, 1)
    grad_weight_pixel_rows(const __grid_constant__ TensorMap input, const __grid_constant__ TensorMap planes, float* __restrict__ gradient,
                     const __grid_constant__ PixelRowsSizes sizes) {
  extern __shared__ __align__(1024) u32 shared[];
  const Ring ring((ptx::shared_address(shared) + 1023) & ~1023u);
  const Place place(blockIdx.x);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(input);
    ptx::prefetch_tensor_map(planes);
    init_ring<STAGES>(ring, 1, CONSUMER_WARPS * CLUSTER);
    ptx::fence_barrier_init();
  }
  if constexpr (MULTICAST == NONE) {
    __syncthreads();
  } else {
    ptx::sync_cluster();
  }
  const long long boxes = (long long)sizes.batch * ceil_div(sizes.pixels, BOX), all = (boxes + BOXES - 1) / BOXES;
  const int first_stage = static_cast<int>(all * place.split / sizes.splits);
  const int stages = static_cast<int>(all * (place.split + 1) / sizes.splits) - first_stage;
  ptx::wait_for_previous_launch();
  ptx::let_next_launch_start();
  if (warp < 4) {
    ptx::shrink_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0)
      produce(ring, input, planes, place, MULTICAST == NONE ? 0 : ptx::cluster_rank(), first_stage, stages, sizes);
  } else {
    ptx::grow_registers<CONSUMER_REGISTERS>();
    float sums[TILE_COLS / 2];
    multiply_stages(ring, sums, warp / 4 - 1, stages, lane);
    store(sums, place, (warp - 4) * 16, lane, gradient);
  }
  // A block must not end while the other may still write to its shared memory.
  if constexpr (MULTICAST != NONE) {
    __syncwarp();
    ptx::sync_cluster();
  }
}
