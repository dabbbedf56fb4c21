// Gradient of the weight (and of the bias) on Hopper's warpgroup multiply (sm_90a) in TF32, in channels_last: the product
// of grad_weight_rows.cu, whose lines of pixels four warps make on the way to shared memory.
//
// In memory a pixel's channels are neighbours, in shared memory a channel's pixels. A lane of a filling warp reads one
// channel of eight pixels, rounds them, and stores two pieces of 16 bytes; then it asks for those of the next stage, which
// are under way until their turn comes again. So a tap's shift and phase are only which
// pixel is read, and pixels are counted over all images: no part of a stage is empty but at the end.
//
// Covers: float32 (TF32), channels_last; any kernel, stride, padding, output padding, dilation, groups. Warpgroup 0
// fills, the other two multiply, 64 rows each. Sums as in grad_weight_rows.cu. WITH_BIAS: blocks of the first
// input channels also add up grad_output where a tap's offset lies in [0, stride) (with its like it reads every pixel
// once), by slice, eight pixels of a stage and tap: bias_partial[slice][which eight][tap][co], zeros for other taps.
#include "compensated_sum.cuh"
#include "mma.cuh"
#include "wgmma.cuh"
#include "pipeline.cuh"
#include "grad_weight_rows_layout.cuh"

constexpr int BOX = 32;
#include "grad_weight_rows_multiply.cuh"

constexpr int FILLING_WARPS = 4, LANE_PIXELS = STAGE_PIXELS / FILLING_WARPS;
/// Groups of 32 channels of each operand; those of grad_output by runs of one chunk.
constexpr int INPUT_GROUPS = INPUT_SIDE / 32, OUTPUT_GROUPS = OUTPUT_SIDE / 32, RUN_GROUPS = CHUNK / 32, RUNS = OUTPUT_GROUPS / RUN_GROUPS;
constexpr int FILL_REGISTERS = 184, MULTIPLY_REGISTERS = 160;
constexpr int PIXELS = HEIGHT * WIDTH;
static_assert(LANE_PIXELS == 8 && INPUT_SIDE % 32 == 0 && CHUNK % 32 == 0);

/// A run of groups of grad_output's channels, all of one tap.
struct Run {
  const float* from;  // this lane's first channel, of pixel 0
  int down, across;   // the tap's offset in pixels
  int channels;       // from this lane's first on, that exist
  int tap;
  bool counts;        // for the bias
};

__device__ __forceinline__ Run run_of(const Place& place, int number, const float* grad_output, int lane) {
  Run run;
  const int chunk = place.first_chunk + number;
  const int channel = place.group * CO_GROUP + chunk % CHANNEL_CHUNKS * CHUNK + lane;
  run.tap = chunk / CHANNEL_CHUNKS;
  run.down = run.tap / KERNEL_W * DILATION_H - PADDING_H;
  run.across = run.tap % KERNEL_W * DILATION_W - PADDING_W;
  run.channels = run.tap < TAPS ? OUT_CHANNELS - channel : 0;
  run.from = grad_output + channel;
  asm volatile("" : "+l"(run.from));
  run.counts = run.tap < TAPS && run.down >= 0 && run.down < STRIDE_H && run.across >= 0 && run.across < STRIDE_W;
  return run;
}

/// Eight pixels of this lane's channel to its row of a stage, rounded to nearest: half a unit is added and the multiplier
/// cuts off the rest. Returns their sum, which also tells whether all are finite.
__device__ __forceinline__ float store_row(u32 rows, int row, int octet, const float (&values)[LANE_PIXELS]) {
  u32 words[LANE_PIXELS];
#pragma unroll
  for (int i = 0; i < LANE_PIXELS; ++i) words[i] = __float_as_uint(values[i]) + 0x1000;
  const float sum = ((values[0] + values[1]) + (values[2] + values[3])) + ((values[4] + values[5]) + (values[6] + values[7]));
  if (!(fabsf(sum) < __int_as_float(0x7f800000))) {
#pragma unroll
    for (int i = 0; i < LANE_PIXELS; ++i) words[i] = ptx::round_to_tf32(__float_as_uint(values[i]));
  }
#pragma unroll
  for (int half = 0; half < 2; ++half)
    ptx::store_shared<4>(rows + row * BOX_ROW_BYTES + ((octet * 2 + half) ^ (row & 7)) * 16, words + half * 4);
  return sum;
}

/// Which pixels of a tensor the lanes' pixels of a stage are: lane i finds the i-th, -1 if there is none.
struct Pixels {
  int in, out[RUNS];

  __device__ __forceinline__ Pixels(long long pixel, long long all, const Run (&runs)[RUNS]) {
    const bool exists = pixel < all;
    const int image = static_cast<int>(pixel / PIXELS), rest = static_cast<int>(pixel % PIXELS), h = rest / WIDTH, w = rest % WIDTH;
    in = exists ? static_cast<int>(pixel) : -1;
#pragma unroll
    for (int r = 0; r < RUNS; ++r) {
      const int oh = h * STRIDE_H + runs[r].down, ow = w * STRIDE_W + runs[r].across;
      const bool inside = exists && runs[r].tap < TAPS && static_cast<unsigned>(oh) < static_cast<unsigned>(OUT_HEIGHT) &&
                          static_cast<unsigned>(ow) < static_cast<unsigned>(OUT_WIDTH);
      out[r] = inside ? (image * OUT_HEIGHT + oh) * OUT_WIDTH + ow : -1;
    }
  }
};

/// Ask for a lane's channels, 32 apart, of eight pixels; zeros where there is no pixel or no channel. In the order of the
/// program: the compiler would wait with it.
template <int CHANNELS, bool ALL_EXIST, int COUNT>
__device__ __forceinline__ void load_rows(float (*values)[LANE_PIXELS], const float* from, int pixels, int channels) {
#pragma unroll
  for (int i = 0; i < LANE_PIXELS; ++i) {
    const int at = __shfl_sync(0xffffffffu, pixels, i);
    const char* const there = reinterpret_cast<const char*>(from) + static_cast<long long>(at) * (CHANNELS * 4);
#pragma unroll
    for (int g = 0; g < COUNT; ++g)
      asm volatile(
          "{\n .reg .pred there;\n setp.ge.s32 there, %2, 0;\n mov.b32 %0, 0;\n @there ld.global.nc.f32 %0, [%1];\n}"
          : "=&f"(values[g][i])
          : "l"(there + g * 128), "r"(ALL_EXIST || g * 32 < channels ? at : -1));
  }
}

/// One warp: its eight pixels of stage after stage.
__device__ __forceinline__ void fill(Ring ring, const float* __restrict__ input, const float* __restrict__ grad_output,
                                     float* __restrict__ bias_partial, const Place& place, int warp, int lane, int first_stage,
                                     int stages, long long batch) {
  const long long all = batch * PIXELS;
  Run runs[RUNS];
#pragma unroll
  for (int r = 0; r < RUNS; ++r) runs[r] = run_of(place, r, grad_output, lane);
  const int input_channel = place.group * CI_GROUP + place.ci + lane, input_channels = IN_CHANNELS - input_channel;
  const float* input_from = input + input_channel;
  asm volatile("" : "+l"(input_from));
  float in[INPUT_GROUPS][LANE_PIXELS], out[OUTPUT_GROUPS][LANE_PIXELS];
  CompensatedSum<float> bias[OUTPUT_GROUPS] = {};

  // Neighbouring groups read the same pixels.
  constexpr int INPUT_UNIT = 2, OUTPUT_UNIT = RUN_GROUPS < 4 ? RUN_GROUPS : 4;
  constexpr bool ALL_INPUT = CI_GROUP % INPUT_SIDE == 0, ALL_OUTPUT = CO_GROUP % CHUNK == 0;
  const auto load_input = [&](int g, const Pixels& at) {
    load_rows<IN_CHANNELS, ALL_INPUT, INPUT_UNIT>(in + g, input_from + g * 32, at.in, input_channels - g * 32);
  };
  const auto load_output = [&](int g, const Pixels& at) {
    const int r = g / RUN_GROUPS, first = g % RUN_GROUPS * 32;
    load_rows<OUT_CHANNELS, ALL_OUTPUT, OUTPUT_UNIT>(out + g, runs[r].from + first, at.out[r], runs[r].channels - first);
  };
  long long pixel = first_stage * static_cast<long long>(STAGE_PIXELS) + warp * LANE_PIXELS + lane % LANE_PIXELS;
  const Pixels first(pixel, all, runs);
#pragma unroll
  for (int g = 0; g < INPUT_GROUPS; g += INPUT_UNIT) load_input(g, first);
#pragma unroll
  for (int g = 0; g < OUTPUT_GROUPS; g += OUTPUT_UNIT) load_output(g, first);
  for (int s = 0; s < stages; ++s) {
    pixel += STAGE_PIXELS;
    // Of the slice's last stage nothing follows.
    const Pixels next(pixel, s + 1 < stages ? all : 0, runs);
    ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
    const u32 to_input = SWAPPED ? ring.cols() : ring.rows(), to_output = SWAPPED ? ring.rows() : ring.cols();
#pragma unroll
    for (int g = 0; g < INPUT_GROUPS; ++g) {
      store_row(to_input, g * 32 + lane, warp, in[g]);
      if (g % INPUT_UNIT == INPUT_UNIT - 1) load_input(g - (INPUT_UNIT - 1), next);
    }
#pragma unroll
    for (int g = 0; g < OUTPUT_GROUPS; ++g) {
      const float sum = store_row(to_output, g * 32 + lane, warp, out[g]);
      if constexpr (WITH_BIAS) bias[g].add(sum);
      if (g % OUTPUT_UNIT == OUTPUT_UNIT - 1) load_output(g - (OUTPUT_UNIT - 1), next);
    }
    ptx::publish_to_multiplies();
    __syncwarp();
    if (lane == 0) ptx::arrive(ring.full());
    ring.advance();
  }
  if (WITH_BIAS && place.ci == 0) {
#pragma unroll
    for (int g = 0; g < OUTPUT_GROUPS; ++g) {
      const Run& run = runs[g / RUN_GROUPS];
      const int co = (place.first_chunk + g / RUN_GROUPS) % CHANNEL_CHUNKS * CHUNK + g % RUN_GROUPS * 32 + lane;
      const long long row = (static_cast<long long>(place.slice) * FILLING_WARPS + warp) * TAPS + run.tap;
      if (run.tap < TAPS && co < CO_GROUP)
        bias_partial[row * OUT_CHANNELS + place.group * CO_GROUP + co] = run.counts ? bias[g].value() : 0.f;
    }
  }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    grad_weight_turned(const float* __restrict__ input, const float* __restrict__ grad_output, float* __restrict__ gradient,
                       float* __restrict__ bias_partial, long long batch, long long slices) {
  extern __shared__ __align__(1024) u32 shared[];
  const Ring ring((ptx::shared_address(shared) + 1023) & ~1023u);
  const Place place(blockIdx.x);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    Ring each = ring;
    for (each.stage = 0; each.stage < STAGES; ++each.stage) {
      ptx::set_up_barrier(each.full(), FILLING_WARPS);
      ptx::set_up_barrier(each.empty(), MULTIPLYING_WARPS);
    }
    ptx::publish_barriers();
  }
  __syncthreads();
  const long long all = (batch * PIXELS + STAGE_PIXELS - 1) / STAGE_PIXELS;
  const int first_stage = static_cast<int>(all * place.slice / slices);
  const int stages = static_cast<int>(all * (place.slice + 1) / slices) - first_stage;
  ptx::let_next_launch_start();
  if (warp < FILLING_WARPS) {
    ptx::grow_registers<FILL_REGISTERS>();
    fill(ring, input, grad_output, bias_partial, place, warp, lane, first_stage, stages, batch);
  } else {
    ptx::shrink_registers<MULTIPLY_REGISTERS>();
    float sums[TILE_COLS / 2];
    multiply_all(ring, sums, warp / 4 - FILLING_WARPS / 4, stages, lane);
    store(sums, place, (warp - FILLING_WARPS) * 16, lane, gradient);
  }
}
