// Forward of maps of one pixel (a generator's first layer), which is a product of two matrices in their own layouts:
//
//   output[image][o] = sum over ci of input[image][ci] * weight[ci][o], where o counts the outputs of an image in memory
//
// An image's outputs have the weight's order (channel, kh, kw; in channels_last kh, kw, channel), so nothing is packed.
//
// Covers: float16, bfloat16, float32 (TF32, or IEEE by six products of BFloat16 parts: common/parts.cuh); HEIGHT = WIDTH = 1
// without padding, output padding, dilation or groups; NCHW or channels_last, the weight likewise; input rows of 4-byte
// multiples, outputs of an image of 16-byte multiples; sm_80 and later.
//
// A block computes TILE_M images x TILE_N outputs, a warp WARP_M_TILES x 16 of the images by WARP_N_TILES x 8 of the outputs.
// cp.async loads chunks of CHUNK channels of the input, and as many rows of the weight: all at once if there are at most
// STAGES chunks, else STAGES - 1 chunks ahead.
#include "common/mma.cuh"
#include "common/epilogue.cuh"
#include "common/parts.cuh"
#include "common/static_for.cuh"
#include "common/tile_index.cuh"

using ptx::u32;

constexpr int ITEM = sizeof(Element);
constexpr int THREADS = 32 * WARPS_M * WARPS_N;
constexpr int WARP_M_TILES = TILE_M / 16 / WARPS_M, WARP_N_TILES = TILE_N / 8 / WARPS_N;
static_assert(WARP_M_TILES * WARPS_M * 16 == TILE_M && WARP_N_TILES * WARPS_N * 8 == TILE_N && WARP_N_TILES % 2 == 0);
constexpr bool IS_TF32 = PRECISION == ptx::TF32;

/// Channels of one multiply.
constexpr int STEP = IS_TF32 ? 8 : 16;
constexpr int CHUNKS = ceil_div(IN_CHANNELS, CHUNK);
static_assert(CHUNK % STEP == 0);

// Pitches in bytes with which the lanes that read a fragment use different banks.
constexpr int INPUT_PITCH = CHUNK * ITEM + (IS_16_BIT || IS_TF32 ? 16 : 32);
constexpr int WEIGHT_PITCH = TILE_N * ITEM + (IS_TF32 ? 32 : 16);
constexpr int INPUT_BYTES = TILE_M * INPUT_PITCH, STAGE_BYTES = INPUT_BYTES + CHUNK * WEIGHT_PITCH;
static_assert(SHARED_BYTES == STAGES * STAGE_BYTES, "the plan and the kernel must agree");

/// Bytes of one copy of the input, which divide a row; at least 4.
constexpr int INPUT_COPY = IN_CHANNELS * ITEM % 16 == 0 ? 16 : IN_CHANNELS * ITEM % 8 == 0 ? 8 : 4;
constexpr int ROW_COPIES = CHUNK * ITEM / INPUT_COPY, WEIGHT_COPIES = TILE_N * ITEM / 16;

/// Issues the copies of a chunk of channels. Zeros are written for what lies behind the ends of the tensors.
__device__ __forceinline__ void issue_copies(u32 stage, const Element* input, const Element* weight, int chunk, int images,
                                      int outputs) {
  const int first = chunk * CHUNK;
#pragma unroll
  for (int base = 0; base < CHUNK * WEIGHT_COPIES; base += THREADS) {
    const int i = base + threadIdx.x, channel = first + i / WEIGHT_COPIES, o = i % WEIGHT_COPIES * (16 / ITEM);
    if (CHUNK * WEIGHT_COPIES % THREADS && i >= CHUNK * WEIGHT_COPIES) break;
    const bool inside = channel < IN_CHANNELS && o < outputs;
    ptx::copy_async_or_zero<16>(stage + INPUT_BYTES + i / WEIGHT_COPIES * WEIGHT_PITCH + o * ITEM,
                                weight + (inside ? static_cast<long long>(channel) * OUTPUTS + o : 0), inside);
  }
#pragma unroll
  for (int base = 0; base < TILE_M * ROW_COPIES; base += THREADS) {
    const int i = base + threadIdx.x, image = i / ROW_COPIES, channel = first + i % ROW_COPIES * (INPUT_COPY / ITEM);
    if (TILE_M * ROW_COPIES % THREADS && i >= TILE_M * ROW_COPIES) break;
    const bool inside = channel < IN_CHANNELS && image < images;
    ptx::copy_async_or_zero<INPUT_COPY>(stage + image * INPUT_PITCH + i % ROW_COPIES * INPUT_COPY,
                                        input + (inside ? image * IN_CHANNELS + channel : 0), inside);
  }
}

using Sums = float[WARP_M_TILES][WARP_N_TILES][4];

/// Adds the products of a chunk. `input` and `weight` are the addresses of the warp's first image and output.
__device__ __forceinline__ void multiply(Sums& sums, u32 input, u32 weight) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll(PARTS == 1 ? CHUNK / STEP : 1)
  for (int step = 0; step < CHUNK / STEP; ++step) {
    const u32 rows = input + step * STEP * ITEM, channels = weight + step * STEP * WEIGHT_PITCH;
    u32 b[WARP_N_TILES][2][PARTS];
    if constexpr (IS_16_BIT) {
      // ldmatrix: lane 8m + r gives the address of channel r of matrix m. The matrices are the first and the last 8 channels
      // of 8 outputs, then those of the next 8 outputs.
#pragma unroll
      for (int pair = 0; pair < WARP_N_TILES / 2; ++pair) {
        u32 m[4];
        ptx::load_matrices_transposed(m, channels + lane % 16 * WEIGHT_PITCH + lane / 16 * 16 + pair * 32);
        b[2 * pair][0][0] = m[0], b[2 * pair][1][0] = m[1], b[2 * pair + 1][0][0] = m[2], b[2 * pair + 1][1][0] = m[3];
      }
    } else {
#pragma unroll
      for (int tile = 0; tile < WARP_N_TILES; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const u32 at = channels + (g + tile * 8) * 4 + half * (STEP / 2) * WEIGHT_PITCH;
          if constexpr (IS_TF32) {
            b[tile][half][0] = ptx::round_to_tf32(ptx::load_shared(at + t * WEIGHT_PITCH));
          } else {
            split(b[tile][half], __uint_as_float(ptx::load_shared(at + 2 * t * WEIGHT_PITCH)),
                  __uint_as_float(ptx::load_shared(at + (2 * t + 1) * WEIGHT_PITCH)));
          }
        }
    }
#pragma unroll
    for (int tile = 0; tile < WARP_M_TILES; ++tile) {
      uint4 a[PARTS];
      if constexpr (IS_16_BIT) {
        u32 m[4];
        ptx::load_matrices(m, rows + (tile * 16 + lane % 16) * INPUT_PITCH + lane / 16 * 16);
        a[0] = make_uint4(m[0], m[1], m[2], m[3]);
      } else {
        u32 words[4][PARTS];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 row = rows + (tile * 16 + i % 2 * 8 + g) * INPUT_PITCH;
          if constexpr (IS_TF32) {
            words[i][0] = ptx::round_to_tf32(ptx::load_shared(row + (t + i / 2 * 4) * 4));
          } else {
            const float2 pair = ptx::load_shared_pair(row + (2 * t + i / 2 * 8) * 4);
            split(words[i], pair.x, pair.y);
          }
        }
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
          a[part] = make_uint4(words[0][part], words[1][part], words[2][part], words[3][part]);
      }
#pragma unroll
      for (int n = 0; n < WARP_N_TILES; ++n) {
        if constexpr (IS_TF32) {
          const u32 fragment[2] = {b[n][0][0], b[n][1][0]};
          ptx::mma<ptx::TF32>(sums[tile][n], a[0], fragment);
        } else {
          multiply_parts(sums[tile][n], a, b[n]);
        }
      }
    }
  }
}

/// The channel of output o of an image.
__device__ constexpr int channel_at(int o) { return CHANNELS_LAST ? o % OUT_CHANNELS : o / (OUTPUTS / OUT_CHANNELS); }

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    forward_gemm(const Element* __restrict__ input, const Element* __restrict__ weight, const __grid_constant__ Epilogue epilogue,
                  Element* __restrict__ output, long long batch) {
  extern __shared__ __align__(16) char memory[];
  const u32 shared = ptx::keep_in_register(ptx::shared_address(memory));
  // Blocks of the same outputs are neighbours, so that the weight is read from memory once.
  const int image_tiles = static_cast<int>((batch + TILE_M - 1) / TILE_M);
  const long long first_image = static_cast<long long>(blockIdx.x % image_tiles) * TILE_M;
  const int first_output = blockIdx.x / image_tiles * TILE_N;
  const int images = static_cast<int>(min(batch - first_image, static_cast<long long>(TILE_M)));
  const int outputs = min(OUTPUTS - first_output, TILE_N);
  input += first_image * IN_CHANNELS;
  weight += first_output;

  const auto issue_chunk = [&](int chunk, int stage) {
    if (chunk < CHUNKS) issue_copies(shared + stage * STAGE_BYTES, input, weight, chunk, images, outputs);
    ptx::commit_copies();
  };
  const int warp = threadIdx.x / 32, warp_m = warp % WARPS_M, warp_n = warp / WARPS_M;
  const u32 input_at = shared + warp_m * (WARP_M_TILES * 16) * INPUT_PITCH;
  const u32 weight_at = shared + INPUT_BYTES + warp_n * (WARP_N_TILES * 8) * ITEM;
  Sums sums = {};
  constexpr int PREFETCH_DISTANCE = CHUNKS <= STAGES ? CHUNKS : STAGES - 1;
  for (int chunk = 0; chunk < PREFETCH_DISTANCE; ++chunk) issue_chunk(chunk, chunk);
  if constexpr (CHUNKS <= STAGES) {
    static_for<0, CHUNKS>([&](auto index) {
      constexpr int STAGE = decltype(index)::value;
      ptx::wait_copies<CHUNKS - 1 - STAGE>();
      __syncthreads();
      multiply(sums, input_at + STAGE * STAGE_BYTES, weight_at + STAGE * STAGE_BYTES);
    });
  } else {
    int stage = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      ptx::wait_copies<STAGES - 2>();
      __syncthreads();  // all threads see the chunk, and none reads the one before
      issue_chunk(chunk + PREFETCH_DISTANCE, stage == 0 ? STAGES - 1 : stage - 1);
      multiply(sums, input_at + stage * STAGE_BYTES, weight_at + stage * STAGE_BYTES);
      if (++stage == STAGES) stage = 0;
    }
  }

  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < WARP_N_TILES; ++n) {
    const int o = (warp_n * WARP_N_TILES + n) * 8 + 2 * t;
    if (o >= outputs) continue;
    const Channel low = load_channel(epilogue, channel_at(first_output + o)), high = load_channel(epilogue, channel_at(first_output + o + 1));
#pragma unroll
    for (int tile = 0; tile < WARP_M_TILES; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int image = (warp_m * WARP_M_TILES + tile) * 16 + half * 8 + g;
        if (image >= images) continue;
        Element* const to = output + (first_image + image) * OUTPUTS + first_output + o;
        const float x = apply_epilogue(sums[tile][n][2 * half], low, epilogue), y = apply_epilogue(sums[tile][n][2 * half + 1], high, epilogue);
        if constexpr (IS_16_BIT) {
          *reinterpret_cast<u32*>(to) = ptx::pack_pair<PRECISION>(x, y);
        } else {
          *reinterpret_cast<float2*>(to) = make_float2(x, y);
        }
      }
  }
}
