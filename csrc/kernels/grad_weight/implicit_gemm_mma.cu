// Gradient of the weight (and of the bias) on tensor cores, mma.sync: a product over all pixels of the input.
//
//   grad_weight[ci, co, kh, kw] = sum over n, ih, iw of
//       input[n, ci, ih, iw] * grad_output[n, co, ih * STRIDE_H - PADDING_H + kh * DILATION_H, (the same for w)]
//
// A block makes BLOCK_M input channels x BLOCK_N output channels x TAP_ROWS x TAP_COLS taps of one group over one of
// slice of the tiles of pixels (grad_weight/implicit_gemm_layout.cuh), which pass through a ring of STAGES stages; all its taps
// multiply what is loaded once. Its warps share out m, n, taps and the pixels of a tile. The input's fragments (A) are
// loaded once for all taps of a warp, grad_output's (B) at each tap's shift.
//
// The multiplier truncates its sums: every `flush` tiles they are added, rounded to nearest, to the workspace.
//
// Covers: float32 (TF32, or IEEE by three TF32 products), float16, bfloat16; NCHW and channels_last; any kernel,
// stride, padding, output padding, dilation, groups; sm_80 and up. grad_weight/implicit_gemm.py says for which it pays.
// Tensors 16-byte aligned. WITH_BIAS: taps whose offset lies in [0, STRIDE) read all of grad_output just once
// (OUT_* = STRIDE_* x input): their fragments are summed up, for row [slice][tap block, m block, warp] of `bias_partial`.
#include "common/compensated_sum.cuh"
#include "common/mma.cuh"
#include "grad_weight/implicit_gemm_layout.cuh"
#include "grad_weight/implicit_gemm_producer.cuh"
#include "grad_weight/implicit_gemm_store.cuh"

constexpr int PARTS = PRECISION == ptx::IEEE ? 2 : 1;
/// Pixels of one multiply.
constexpr int STEP = IS_16_BIT ? 16 : 8;
constexpr int STEPS = TILE_PIXELS / STEP;
static_assert(TILE_PIXELS % STEP == 0 && STEPS % WARPS_K == 0);

/// Bytes from the beginning of a window to a channel's place in a position, and from position to position.
template <class Win>
__device__ constexpr int channel_bytes(int channel) {
  return IS_16_BIT ? channel / 8 * Win::OCTET_BYTES : channel * Win::CHANNEL_STRIDE * 4;
}
template <class Win>
constexpr int POSITION_BYTES = IS_16_BIT ? 16 : Win::POSITION_STRIDE * 4;

/// Of a fragment's 8 channels x STEP pixels, the place that this lane reads or names, in bytes from the first.
template <class Win>
__device__ __forceinline__ int lane_bytes(int lane, bool channels_in_pairs) {
  if constexpr (IS_16_BIT) {
    // Lane 8 j + r names row r (a pixel) of matrix j. A: (m, k), (m + 8, k), (m, k + 8), (m + 8, k + 8). B: n the slower.
    const int j = lane / 8;
    const int octet = channels_in_pairs ? j % 2 : j / 2, half = channels_in_pairs ? j / 2 : j % 2;
    return octet * Win::OCTET_BYTES + Win::position(half * 8 + lane % 8) * 16;
  } else {
    return channel_bytes<Win>(lane / 4) + Win::position(lane % 4) * POSITION_BYTES<Win>;
  }
}

/// A word as the multiplier takes it, and what rounding left over.
__device__ __forceinline__ void split(u32& word, [[maybe_unused]] u32& low) {
  if constexpr (!IS_16_BIT) {
    const u32 exact = word;
    word = ptx::round_to_tf32(exact);
    if constexpr (PARTS == 2) low = ptx::low_part(__uint_as_float(exact), word);
  }
}

using BiasSum = CompensatedSum<float, !IS_16_BIT>;
/// Warps, of this block and others, that read the same of grad_output: they take turns in adding it up for the bias.
constexpr int BIAS_SHARERS = M_BLOCKS * WARPS_M;

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

/// Four sums over the four lanes that hold a fragment's row: lane t gets the one of values[t % 4].
__device__ __forceinline__ float sum_of_lanes(const float* values) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  const float low = (odd ? values[1] : values[0]) + __shfl_xor_sync(0xffffffffu, odd ? values[0] : values[1], 1);
  const float high = (odd ? values[3] : values[2]) + __shfl_xor_sync(0xffffffffu, odd ? values[2] : values[3], 1);
  return (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, 2);
}

constexpr int BIAS_FRAGMENTS = ceil_div(N_FRAGMENTS, 4) * 4;
/// Few taps: the sums move on among the multiplies. Many: once, after them, but where registers are short (IEEE).
constexpr bool FOLDS_EACH_TAP = PARTS == 2 || WARP_TAPS <= 2;

using In = InputWindow;
using Out = OutputWindow;

struct Accumulators {
  float sums[FRAGMENTS][4];
  BiasSum bias[BIAS_FRAGMENTS / 4];  // lane t has those of fragments t, t + 4 ...

  __device__ __forceinline__ void clear_sums() {
#pragma unroll
    for (auto& fragment : sums)
#pragma unroll
      for (float& sum : fragment) sum = 0.f;
  }

  /// Move this lane's sums of grad_output to the bias's.
  __device__ __forceinline__ void fold(float (&of_fragments)[BIAS_FRAGMENTS]) {
#pragma unroll
    for (int n = 0; n < BIAS_FRAGMENTS; n += 4) {
      bias[n / 4].add(sum_of_lanes(of_fragments + n));
#pragma unroll
      for (int i = 0; i < 4; ++i) of_fragments[n + i] = 0.f;
    }
  }

  /// Add one step. `input`, `output`: this lane's place in the step's first fragment. `tap_bytes`: of the warp's taps;
  /// bit i of `bias_taps`: tap i counts for the bias.
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
      for (int r = 0; r < 4; ++r) split(words[r], low[r]);
      a[i] = make_uint4(words[0], words[1], words[2], words[3]);
      if constexpr (PARTS == 2) a_low[i] = make_uint4(low[0], low[1], low[2], low[3]);
    }
    // Of the taps that count for the bias.
    float of_fragments[BIAS_FRAGMENTS] = {};
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
        for (int n = 0; n < N_FRAGMENTS; ++n) of_fragments[n] += sum_of(b[n][0]) + sum_of(b[n][1]);
        if constexpr (FOLDS_EACH_TAP) fold(of_fragments);
      }
#pragma unroll
      for (int n = 0; n < N_FRAGMENTS; ++n) {
        u32 low[2];
        split(b[n][0], low[0]);
        split(b[n][1], low[1]);
#pragma unroll
        for (int i = 0; i < M_FRAGMENTS; ++i) {
          float(&sum)[4] = sums[(i * WARP_TAPS + tap) * N_FRAGMENTS + n];
          if constexpr (PARTS == 2) {
            // The multiplier truncates its sums; adding them here rounds to nearest, once for the three.
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
    if (WITH_BIAS && !FOLDS_EACH_TAP && bias_taps) fold(of_fragments);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_MULTIPROCESSOR)
    grad_weight_implicit_gemm_mma(const Element* __restrict__ input, const Element* __restrict__ grad_output, Element* __restrict__ gradient,
                    float4* __restrict__ partial, float* __restrict__ bias_partial,
                    const __grid_constant__ GradWeightTileSizes sizes) {
  extern __shared__ __align__(128) u32 shared[];
  const u32 stages = ptx::keep_in_register(ptx::shared_address(shared));
  const Place place = Place::of(blockIdx.x);
  Feed feed(input, grad_output, place, sizes, stages);

  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % TILE_WARPS, warp_k = threadIdx.x / 32 / TILE_WARPS;
  const WarpPlace at(warp);
  int tap_bytes[WARP_TAPS];
  u32 bias_taps = 0;
#pragma unroll
  for (int i = 0; i < WARP_TAPS; ++i) {
    const Tap tap = Tap::of(place, at.t * WARP_TAPS + i);
    tap_bytes[i] = tap.offset * POSITION_BYTES<Out>;
    if (tap.reads_once) bias_taps |= 1u << i;
  }
  const int bias_sharer = place.m0 / BLOCK_M * WARPS_M + at.m;
  int bias_turn = bias_sharer;  // steps until it is this warp's
  const u32 input_lane = channel_bytes<In>(at.m * WARP_M) + lane_bytes<In>(lane, true);
  const u32 output_lane = channel_bytes<Out>(at.n * WARP_N) + lane_bytes<Out>(lane, false);

  Accumulators all;
  all.clear_sums();
#pragma unroll
  for (BiasSum& sum : all.bias) sum = {};

  // What goes through registers is asked for one tile ahead of its store, which is one tile ahead of its use.
  feed.load(0);
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) feed.copy(s);
  feed.store(0);
  feed.load(1);
  bool flushed = false;
  int since_flush = 0;
  for (int index = 0; index < feed.count; ++index) {
    ptx::wait_copies<STAGES - 2>();
    __syncthreads();
    feed.copy(index + STAGES - 1);
    const u32 from_input = feed.input_stage(index) + input_lane, from_output = feed.output_stage(index) + output_lane;
#pragma unroll 1
    for (int step = warp_k; step < STEPS; step += WARPS_K) {
      all.step(from_input + In::position(step * STEP) * POSITION_BYTES<In>,
               from_output + Out::position(step * STEP) * POSITION_BYTES<Out>, tap_bytes, bias_turn == 0 ? bias_taps : 0);
      bias_turn = bias_turn == 0 ? BIAS_SHARERS - 1 : bias_turn - 1;
    }
    feed.store(index + 1);
    feed.load(index + 2);
    if (++since_flush == sizes.flush) {
      store_partial(all.sums, place, warp, lane, place.slice * WARPS_K + warp_k, partial, flushed);
      all.clear_sums();
      flushed = true;
      since_flush = 0;
    }
  }
  ptx::let_next_launch_start();

  if (sizes.through_workspace) {
    store_partial(all.sums, place, warp, lane, place.slice * WARPS_K + warp_k, partial, flushed);
  } else {
    store_gradient(all.sums, place, warp, lane, reinterpret_cast<float*>(shared), gradient);
  }
  if (WITH_BIAS) {
    static_assert(BIAS_WRITERS == BIAS_SHARERS * WARPS_K * WARPS_T);
    const int row = place.slice * BIAS_ROWS + (place.tap_block_w * TapsH::BLOCKS + place.tap_block_h) * BIAS_WRITERS +
                    (bias_sharer * WARPS_K + warp_k) * WARPS_T + at.t;
#pragma unroll
    for (int i = 0; i < BIAS_FRAGMENTS / 4; ++i) {
      const int n = 4 * i + lane % 4, channel = place.n0 + at.n * WARP_N + n * 8 + lane / 4;
      if (n < N_FRAGMENTS && channel < CO_GROUP)
        bias_partial[row * OUT_CHANNELS + place.group * CO_GROUP + channel] = all.bias[i].value();
    }
  }
}
