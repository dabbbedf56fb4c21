// Gradient of the weight on Hopper's warpgroup multiply (sm_90a) in TF32, both operands read from shared memory.
//
//   128 x TILE_COLS: input channels by chunks of output channels, each of a tap (SWAPPED: the other way round); K = pixels
//
// In TF32 the multiplier takes only what lies along k, and k are pixels. So both operands come as lines of pixels (NCHW's
// own order, or what common/space_to_depth.cu made of it), by boxes of BOX pixels and many channels: [box][channel][BOX pixels].
// grad_output lies parted in planes, one for each column of taps and phase of rows (IM2COL_ROWS: each row of taps). A tap
// is a plane and a shift in whole rows, which is where its box begins. What lies outside is read as zeros. A stage is 32 pixels.
//
// Covers: float32 (TF32); any kernel, stride, padding, output padding, dilation, groups; rows of a multiple of 4 pixels, or
// IM2COL_ROWS, or no tap is shifted; what the maps say of layouts. Warpgroup 0 asks for boxes, the other two multiply, 64
// rows each. SHARES: two blocks bring one operand together, each half of it for both. Pixels are split in `slices`; a
// slice's sums are gradient[slice][ci][tap][co], which grad_weight/pixel_rows_reduce.cu adds up.
#include "common/integers.cuh"
#include "common/mma.cuh"
#include "common/wgmma.cuh"
#include "common/pipeline.cuh"
#include "common/tma.cuh"
#include "grad_weight/pixel_rows_layout.cuh"
#include "grad_weight/pixel_rows_multiply.cuh"
#include "common/sizes.cuh"

constexpr int FILL_REGISTERS = 40, MULTIPLY_REGISTERS = 232;
/// A coordinate outside every tensor, with whatever shift.
constexpr int NOWHERE = 1 << 28;

/// The rows by which a tap is shifted, after ZERO_ROWS rows.
__device__ __forceinline__ int row_shift(int kh) { return IM2COL_ROWS ? 0 : ZERO_ROWS + floor_div(kh * DILATION_H - PADDING_H, STRIDE_H); }

/// A part of an operand's box: to every block that shares it, or to this one alone.
template <bool SHARED>
__device__ __forceinline__ void bring(u32 to, const TensorMap& map, int pixel, int channel, int image, u32 barrier) {
  if constexpr (SHARED) {
    ptx::tma_load_multicast(to, map, pixel, channel, image, barrier, (1 << CLUSTER) - 1);
  } else {
    ptx::tma_load(to, map, pixel, channel, image, barrier);
  }
}

/// What a copy brings of one side, and which copies are this block's.
template <int SIDE, int COPY_ROWS, bool SHARED>
struct Copies {
  static constexpr int ALL = SIDE / COPY_ROWS;
  static constexpr int OWN = SHARED ? ALL / CLUSTER : ALL;
  static_assert(SIDE % COPY_ROWS == 0 && (!SHARED || ALL % CLUSTER == 0));
};
using InputCopies = Copies<INPUT_SIDE, INPUT_COPY, SHARES == INPUT>;
using OutputCopies = Copies<OUTPUT_SIDE, OUTPUT_COPY, SHARES == OUTPUT>;
static_assert(CHUNK % OUTPUT_COPY == 0);

/// One thread: fill stage after stage.
__device__ __forceinline__ void fill(Ring ring, const TensorMap& input, const TensorMap& planes, const Place& place, u32 rank,
                                     int first_stage, int stages, const PixelRowsSizes& sizes) {
  constexpr bool SHARES_INPUT = SHARES == INPUT, SHARES_OUTPUT = SHARES == OUTPUT;
  int channel[OutputCopies::OWN], shift[OutputCopies::OWN], plane_images[OutputCopies::OWN];
  const int first_copy = SHARES_OUTPUT ? rank * OutputCopies::OWN : 0;
#pragma unroll
  for (int i = 0; i < OutputCopies::OWN; ++i) {
    const int row = (first_copy + i) * OUTPUT_COPY, chunk = place.first_chunk + row / CHUNK;
    const int tap = chunk / CHANNEL_CHUNKS, kh = tap / KERNEL_W, kw = tap % KERNEL_W;
    const bool exists = tap < TAPS;
    channel[i] = exists ? place.group * CO_GROUP + chunk % CHANNEL_CHUNKS * CHUNK + row % CHUNK : NOWHERE;
    shift[i] = exists ? row_shift(kh) * sizes.width : 0;
    plane_images[i] = exists ? (kh % ROW_PHASES * KERNEL_W + kw) * sizes.batch : 0;
  }
  const int first_box = first_stage * BOXES, boxes_of_line = ceil_div(sizes.pixels, BOX);
  int pixel = first_box % boxes_of_line * BOX, image = first_box / boxes_of_line;
  for (int s = 0; s < stages; ++s) {
    ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
    ptx::arrive_expect_tx(ring.full(), STAGE_BYTES);
#pragma unroll
    for (int box = 0; box < BOXES; ++box) {
      const int at = image < sizes.batch ? pixel : NOWHERE;
      const u32 to_rows = ring.rows() + box * ROWS_BYTES, to_cols = ring.cols() + box * COLS_BYTES;
      const u32 to_input = SWAPPED ? to_cols : to_rows, to_output = SWAPPED ? to_rows : to_cols;
#pragma unroll
      for (int i = 0; i < InputCopies::OWN; ++i) {
        const int row = ((SHARES_INPUT ? rank * InputCopies::OWN : 0) + i) * INPUT_COPY;
        bring<SHARES_INPUT>(to_input + row * BOX_ROW_BYTES, input, at, place.group * CI_GROUP + place.ci + row, image, ring.full());
      }
#pragma unroll
      for (int i = 0; i < OutputCopies::OWN; ++i)
        bring<SHARES_OUTPUT>(to_output + (first_copy + i) * OUTPUT_COPY * BOX_ROW_BYTES, planes, at + shift[i], channel[i],
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
    Ring each = ring;
    for (each.stage = 0; each.stage < STAGES; ++each.stage) {
      ptx::init_barrier(each.full(), 1);
      ptx::init_barrier(each.empty(), MULTIPLYING_WARPS * CLUSTER);
    }
    ptx::fence_barrier_init();
  }
  if constexpr (SHARES == NOBODY) {
    __syncthreads();
  } else {
    ptx::sync_cluster();
  }
  const long long boxes = (long long)sizes.batch * ceil_div(sizes.pixels, BOX), all = (boxes + BOXES - 1) / BOXES;
  const int first_stage = static_cast<int>(all * place.slice / sizes.splits);
  const int stages = static_cast<int>(all * (place.slice + 1) / sizes.splits) - first_stage;
  ptx::wait_for_previous_launch();
  ptx::let_next_launch_start();
  if (warp < 4) {
    ptx::shrink_registers<FILL_REGISTERS>();
    if (threadIdx.x == 0)
      fill(ring, input, planes, place, SHARES == NOBODY ? 0 : ptx::cluster_rank(), first_stage, stages, sizes);
  } else {
    ptx::grow_registers<MULTIPLY_REGISTERS>();
    float sums[TILE_COLS / 2];
    multiply_all(ring, sums, warp / 4 - 1, stages, lane);
    store(sums, place, (warp - 4) * 16, lane, gradient);
  }
  // Nobody leaves while another may still reach its shared memory.
  if constexpr (SHARES != NOBODY) {
    __syncwarp();
    ptx::sync_cluster();
  }
}
