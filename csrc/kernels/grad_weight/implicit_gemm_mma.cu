// Gradient of the weight (and of the bias) with mma.sync: an implicit GEMM over all pixels of the input.
//
//   grad_weight[ci, co, kh, kw] = sum over n, ih, iw of
//       input[n, ci, ih, iw] * grad_output[n, co, ih * STRIDE_H - PADDING_H + kh * DILATION_H, (the same for w)]
//
// A block computes BLOCK_M input channels x BLOCK_N output channels x TAP_ROWS x TAP_COLS taps of one group over one
// split of the tiles of pixels (grad_weight/implicit_gemm_windows.cuh), which pass through a ring of STAGES stages; all
// its taps multiply what is loaded once. Its warps share m, n, taps and the pixels of a tile. The input's fragments
// (A) are loaded once for all taps of a warp, grad_output's (B) at each tap's shift.
//
// The tensor cores truncate their sums: every `flush` tiles the sums are added, rounded to nearest, to the workspace.
//
// Covers: float32 (TF32, or IEEE by three TF32 products), float16, bfloat16; NCHW and channels_last; any kernel,
// stride, padding, output padding, dilation, groups; sm_80 and later. grad_weight/implicit_gemm.py decides where it is
// used. Tensors are 16-byte aligned. WITH_BIAS: the taps whose offset lies in [0, STRIDE) together read each pixel of
// grad_output once (OUT_* = STRIDE_* x input): their fragments are added up into row [split][tap block, m block, warp]
// of `bias_partial`.
#include "common/compensated_sum.cuh"
#include "common/mma.cuh"
#include "grad_weight/implicit_gemm_windows.cuh"
#include "grad_weight/implicit_gemm_producer.cuh"
#include "grad_weight/implicit_gemm_store.cuh"

constexpr int PARTS = PRECISION == ptx::IEEE ? 2 : 1;
/// Pixels of one multiply.
constexpr int STEP = IS_16_BIT ? 16 : 8;
constexpr int STEPS = TILE_PIXELS / STEP;
static_assert(TILE_PIXELS % STEP == 0 && STEPS % WARPS_K == 0);

/// Bytes from the first channel of a position to another channel of it, and from position to position.
template <class Win>
__device__ constexpr int channel_bytes(int channel) {
  return IS_16_BIT ? channel / 8 * Win::OCTET_BYTES : channel * Win::CHANNEL_STRIDE * 4;
}
template <class Win>
constexpr int POSITION_BYTES = IS_16_BIT ? 16 : Win::POSITION_STRIDE * 4;

/// The element of a fragment of 8 channels x STEP pixels that this lane reads or addresses, in bytes from the first.
template <class Win>
__device__ __forceinline__ int lane_bytes(int lane, bool channels_in_pairs) {
  if constexpr (IS_16_BIT) {
    // Lane 8 j + r addresses row r (a pixel) of matrix j. A: (m, k), (m + 8, k), (m, k + 8), (m + 8, k + 8). B: k before n.
    const int j = lane / 8;
    const int octet = channels_in_pairs ? j % 2 : j / 2, half = channels_in_pairs ? j / 2 : j % 2;
    return octet * Win::OCTET_BYTES + Win::position(half * 8 + lane % 8) * 16;
  } else {
    return channel_bytes<Win>(lane / 4) + Win::position(lane % 4) * POSITION_BYTES<Win>;
  }
}

/// Rounds a word to the tensor cores' type, and returns in `low` what rounding left.
__device__ __forceinline__ void round_operand(u32& word, [[maybe_unused]] u32& low) {
  if constexpr (!IS_16_BIT) {
    const u32 exact = word;
    word = ptx::round_to_tf32(exact);
    if constexpr (PARTS == 2) low = ptx::low_part(__uint_as_float(exact), word);
  }
}

using BiasSum = CompensatedSum<float, !IS_16_BIT>;
/// Warps, of this block and others, that read the same pixels of grad_output: they take turns in adding them up for the
/// bias.
constexpr int BIAS_RANKS = M_BLOCKS * WARPS_M;

/// The sum of the numbers in a word.
__device__ __forceinline__ float sum_of(u32 word) {
  if constexpr (PRECISION == ptx::FP16) {
    return load_as(Half{static_cast<unsigned short>(word)}) + load_as(Half{static_cast<unsigned short>(word >> 16)});
  } else if constexpr (PRECISION == ptx::BF16) {
    return __uint_as_float(word << 16) + __uint_as_float(word & 0xffff0000u);
  } else {
    return __uint_as_float(word);
  }
}

/// Four sums over the four lanes that hold a fragment's row: lane t gets that of values[t % 4].
__device__ __forceinline__ float sum_of_lanes(const float* values) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  const float low = (odd ? values[1] : values[0]) + __shfl_xor_sync(0xffffffffu, odd ? values[0] : values[1], 1);
  const float high = (odd ? values[3] : values[2]) + __shfl_xor_sync(0xffffffffu, odd ? values[2] : values[3], 1);
  return (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, 2);
}

constexpr int BIAS_FRAGMENTS = ceil_div(N_FRAGMENTS, 4) * 4;
/// With few taps the bias is added up between the multiplies. With many taps it is added up once, after them, except
/// where registers are scarce (IEEE).
constexpr bool BIAS_EACH_TAP = PARTS == 2 || WARP_TAPS <= 2;

using In = InputWindow;
using Out = OutputWindow;

struct Accumulators {
  float sums[FRAGMENTS][4];
  BiasSum bias[BIAS_FRAGMENTS / 4];  // lane t has fragments t, t + 4 and so on

  __device__ __forceinline__ void clear_sums() {
#pragma unroll
    for (auto& fragment : sums)
#pragma unroll
      for (float& sum : fragment) sum = 0.f;
  }

  /// Adds this lane's sums of grad_output to the bias, and clears them.
  __device__ __forceinline__ void add_to_bias(float (&fragment_sums)[BIAS_FRAGMENTS]) {
#pragma unroll
    for (int n = 0; n < BIAS_FRAGMENTS; n += 4) {
      bias[n / 4].add(sum_of_lanes(fragment_sums + n));
#pragma unroll
      for (int i = 0; i < 4; ++i) fragment_sums[n + i] = 0.f;
    }
  }

  /// Multiplies one step. `input`, `output`: this lane's address in the step's first fragment. `tap_bytes`: offsets of
  /// the warp's taps; bit i of `bias_taps`: tap i counts for the bias.
  __device__ __forceinline__ void step(u32 input, u32 output, const int (&tap_bytes)[WARP_TAPS], u32 bias_taps) {
    constexpr int IN_HALF = (In::position(4) - In::position(0)) * POSITION_BYTES<In>;
    constexpr int OUT_HALF = (Out::position(4) - Out::position(0)) * POSITION_BYTES<Out>;
    uint4 a[M_FRAGMENTS], a_low[PARTS == 2 ? M_FRAGMENTS : 1];
#pragma unroll
    for (int i = 0; i < M_FRAGMENTS; ++i) {
      const u32 from = input + channel_bytes<In>(16 * i);
      u32 words[4];
      if constexpr (IS_16_BIT) {
        ptx::load_matrices_transposed(words, from);
      } else {
        words[0] = ptx::load_shared(from);
        words[1] = ptx::load_shared(from + channel_bytes<In>(8));
        words[2] = ptx::load_shared(from + IN_HALF);
        words[3] = ptx::load_shared(from + channel_bytes<In>(8) + IN_HALF);
      }
      u32 low[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) round_operand(words[r], low[r]);
      a[i] = make_uint4(words[0], words[1], words[2], words[3]);
      if constexpr (PARTS == 2) a_low[i] = make_uint4(low[0], low[1], low[2], low[3]);
    }
    // Sums of grad_output over the taps that count for the bias.
    float fragment_sums[BIAS_FRAGMENTS] = {};
#pragma unroll
    for (int tap = 0; tap < WARP_TAPS; ++tap) {
      u32 b[N_FRAGMENTS][2];
      const u32 from = output + tap_bytes[tap];
      if constexpr (IS_16_BIT) {
#pragma unroll
        for (int n = 0; n + 1 < N_FRAGMENTS; n += 2) {
          u32 words[4];
          ptx::load_matrices_transposed(words, from + channel_bytes<Out>(8 * n));
          b[n][0] = words[0], b[n][1] = words[1], b[n + 1][0] = words[2], b[n + 1][1] = words[3];
        }
        if constexpr (N_FRAGMENTS % 2) ptx::load_matrices_transposed(b[N_FRAGMENTS - 1], from + channel_bytes<Out>(8 * (N_FRAGMENTS - 1)));
      } else {
#pragma unroll
        for (int n = 0; n < N_FRAGMENTS; ++n) {
          b[n][0] = ptx::load_shared(from + channel_bytes<Out>(8 * n));
          b[n][1] = ptx::load_shared(from + channel_bytes<Out>(8 * n) + OUT_HALF);
        }
      }
      if (WITH_BIAS && bias_taps >> tap & 1) {
#pragma unroll
        for (int n = 0; n < N_FRAGMENTS; ++n) fragment_sums[n] += sum_of(b[n][0]) + sum_of(b[n][1]);
        if constexpr (BIAS_EACH_TAP) add_to_bias(fragment_sums);
      }
#pragma unroll
      for (int n = 0; n < N_FRAGMENTS; ++n) {
        u32 low[2];
        round_operand(b[n][0], low[0]);
        round_operand(b[n][1], low[1]);
#pragma unroll
        for (int i = 0; i < M_FRAGMENTS; ++i) {
          float(&sum)[4] = sums[(i * WARP_TAPS + tap) * N_FRAGMENTS + n];
          if constexpr (PARTS == 2) {
            // The tensor cores truncate their sums; this addition rounds those of the three products to nearest once.
            float part[4] = {0.f, 0.f, 0.f, 0.f};
            ptx::mma<PRECISION>(part, a[i], low);
            ptx::mma<PRECISION>(part, a_low[i], b[n]);
            ptx::mma<PRECISION>(part, a[i], b[n]);
#pragma unroll
            for (int r = 0; r < 4; ++r) sum[r] += part[r];
          } else {
            ptx::mma<PRECISION>(sum, a[i], b[n]);
          }
        }
      }
    }
    if (WITH_BIAS && !BIAS_EACH_TAP && bias_taps) add_to_bias(fragment_sums);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_MULTIPROCESSOR)
    grad_weight_implicit_gemm_mma(const Element* __restrict__ input, const Element* __restrict__ grad_output, Element* __restrict__ gradient,
                    float4* __restrict__ partial, float* __restrict__ bias_partial,
                    const __grid_constant__ GradWeightTileSizes sizes) {
  extern __shared__ __align__(128) u32 shared[];
  const u32 stages = ptx::keep_in_register(ptx::shared_address(shared));
  const Place place = Place::of(blockIdx.x);
  Producer producer(input, grad_output, place, sizes, stages);

  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % TILE_WARPS, warp_k = threadIdx.x / 32 / TILE_WARPS;
  const WarpPlace at(warp);
  int tap_bytes[WARP_TAPS];
  u32 bias_taps = 0;
#pragma unroll
  for (int i = 0; i < WARP_TAPS; ++i) {
    const int tap = at.t * WARP_TAPS + i;
    tap_bytes[i] = tap_offset(place, tap) * POSITION_BYTES<Out>;
    if (reads_each_once(place, tap)) bias_taps |= 1u << i;
  }
  const int bias_rank = place.m0 / BLOCK_M * WARPS_M + at.m;
  int bias_turn = bias_rank;  // steps until it is this warp's turn
  const u32 input_lane = channel_bytes<In>(at.m * WARP_M) + lane_bytes<In>(lane, true);
  const u32 output_lane = channel_bytes<Out>(at.n * WARP_N) + lane_bytes<Out>(lane, false);

  Accumulators all;
  all.clear_sums();
#pragma unroll
  for (BiasSum& sum : all.bias) sum = {};

  // What goes through registers is loaded one tile before it is stored, and stored one tile before it is used.
  producer.load(0);
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) producer.copy(s);
  producer.store(0);
  producer.load(1);
  bool flushed = false;
  int since_flush = 0;
  for (int index = 0; index < producer.count; ++index) {
    ptx::wait_copies<STAGES - 2>();
    __syncthreads();
    producer.copy(index + STAGES - 1);
    const u32 from_input = producer.input_stage(index) + input_lane, from_output = producer.output_stage(index) + output_lane;
#pragma unroll 1
    for (int step = warp_k; step < STEPS; step += WARPS_K) {
      all.step(from_input + In::position(step * STEP) * POSITION_BYTES<In>,
               from_output + Out::position(step * STEP) * POSITION_BYTES<Out>, tap_bytes, bias_turn == 0 ? bias_taps : 0);
      bias_turn = bias_turn == 0 ? BIAS_RANKS - 1 : bias_turn - 1;
    }
    producer.store(index + 1);
    producer.load(index + 2);
    if (++since_flush == sizes.flush) {
      store_partial(all.sums, place, warp, lane, place.split * WARPS_K + warp_k, partial, flushed);
      all.clear_sums();
      flushed = true;
      since_flush = 0;
    }
  }
  ptx::let_next_launch_start();

  if (sizes.through_workspace) {
    store_partial(all.sums, place, warp, lane, place.split * WARPS_K + warp_k, partial, flushed);
  } else {
    store_gradient<STAGED_BYTES <= SHARED_BYTES>(all.sums, place, warp, lane, reinterpret_cast<float*>(shared), gradient);
  }
  if (WITH_BIAS) {
    static_assert(BIAS_WRITERS == BIAS_RANKS * WARPS_K * WARPS_T);
    const int row = place.split * BIAS_ROWS + (place.tap_block_w * TapsH::BLOCKS + place.tap_block_h) * BIAS_WRITERS +
                    (bias_rank * WARPS_K + warp_k) * WARPS_T + at.t;
#pragma unroll
    for (int i = 0; i < BIAS_FRAGMENTS / 4; ++i) {
      const int n = 4 * i + lane % 4, channel = place.n0 + at.n * WARP_N + n * 8 + lane / 4;
      if (n < N_FRAGMENTS && channel < CO_GROUP)
        bias_partial[row * OUT_CHANNELS + place.group * CO_GROUP + channel] = all.bias[i].value();
    }
  }
}
