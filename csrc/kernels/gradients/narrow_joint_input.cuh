// The warps of gradients/narrow_joint.cu that compute the gradient of the input: im2col rows times weights.
#pragma once

/// Stores the weights as fragments. The words of a fragment are rows g and g + 8 of k = t, then of k = t + 4. In channels_last
/// the rows are permuted so that a lane's results are neighbours.
__device__ __forceinline__ void load_weights(char* to, const Element* weight) {
#pragma unroll 4
  for (int e = threadIdx.x; e < CHANNELS / 16 * K_STEPS * 128; e += THREADS) {
    Digits digits{static_cast<unsigned>(e)};
    const int word = digits.next(4), t = digits.next(4), g = digits.next(8), step = digits.next(K_STEPS), tile = digits.rest;
    const int ci = tile * 16 + (CHANNELS_LAST ? g / 2 * 4 + word % 2 * 2 + g % 2 : word % 2 * 8 + g);
    const auto value = [&](int in_step) {
      const int tap = step * (STEP_BYTES / ITEM) + in_step;
      Digits tap_digits{static_cast<unsigned>(tap)};
      const int kw = tap_digits.next(KERNEL_W), kh = tap_digits.next(KERNEL_H), co = tap_digits.rest;
      return ci < IN_CHANNELS && tap < ALL_TAPS ? weight[at_weight(ci, co, kh, kw)] : Element{};
    };
    u32 words[2];
    if constexpr (IS_IEEE) {
      split(words[0], words[1], load_as(value(word / 2 * 4 + t)));
    } else {
      const int first = word / 2 * 8 + 2 * t;
      words[0] = Im2colProducer::bits(value(first)) | Im2colProducer::bits(value(first + 1)) << 16;
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
      *reinterpret_cast<u32*>(to + (((tile * K_STEPS + step) * PARTS + part) * 32 + g * 4 + t) * 16 + word * 4) = words[part];
  }
}

struct GradInputConsumer {
  const int lane, warp_c, first_pixel;
  u32 weights, im2col_at;

  __device__ __forceinline__ GradInputConsumer(u32 shared, int warp)
      : lane(threadIdx.x % 32), warp_c(warp % INPUT_WARPS_C), first_pixel(warp / INPUT_WARPS_C * INPUT_P_TILES * 16) {
    weights = ptx::keep_in_register(shared + WEIGHTS_AT + (warp_c * INPUT_C_TILES * K_STEPS * PARTS * 32 + lane) * 16);
    // For ldmatrix lane 8m + r gives the address of row r of matrix m. In NCHW: 8 pixels and two vectors of k, then 8 more
    // pixels, permuted so that a lane's results are neighbours. In channels_last: 16 pixels, then the second vector of k.
    const int m = lane / 8, r = lane % 8;
    const int pixel = CHANNELS_LAST ? m % 2 * 8 + r : r / 2 * 4 + m / 2 * 2 + r % 2, vector = CHANNELS_LAST ? m / 2 : m % 2;
    im2col_at = im2col_offset(first_pixel + pixel) + vector * 16;
  }

  // Sums of 16 pixels: [16 channels][half of the pixels or, in channels_last, of the channels].
  struct Sums {
    float of[INPUT_C_TILES][2][4];
  };

  // Multiplies one step of k. The products of float32 begin a new sum.
  __device__ __forceinline__ static void multiply(Sums& sums, const u32 (&taps)[PARTS][4], const uint4 (&w)[INPUT_C_TILES][PARTS]) {
    const auto half_of = [](const uint4& v, int j) { return make_uint2(j ? v.y : v.x, j ? v.w : v.z); };
    const uint4 im2col[2] = {as_vector(taps[0]), as_vector(taps[PARTS - 1])};
    static_for<0, IS_IEEE ? 3 : 1>([&](auto round) {
      constexpr int ROUND = decltype(round)::value;
#pragma unroll
      for (int c = 0; c < INPUT_C_TILES; ++c)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint2 weight_high = half_of(w[c][0], j), weight_low = half_of(w[c][PARTS - 1], j);
          const u32 high[2] = {CHANNELS_LAST ? weight_high.x : taps[0][2 * j], CHANNELS_LAST ? weight_high.y : taps[0][2 * j + 1]};
          const u32 low[2] = {CHANNELS_LAST ? weight_low.x : taps[PARTS - 1][2 * j],
                              CHANNELS_LAST ? weight_low.y : taps[PARTS - 1][2 * j + 1]};
          const uint4 rows[2] = {CHANNELS_LAST ? im2col[0] : w[c][0], CHANNELS_LAST ? im2col[1] : w[c][PARTS - 1]};
          if constexpr (IS_IEEE) {
            multiply_part<ROUND, ROUND == 0>(sums.of[c][j], rows, high, low);
          } else {
            ptx::mma<PRECISION>(sums.of[c][j], rows[0], high);
          }
        }
    });
  }

  __device__ __forceinline__ void compute(u32 im2col, const PatchSizes& sizes, int tile, Element* grad_input) const {
    Sums sum[INPUT_P_TILES] = {};
    const u32 row_address = ptx::keep_in_register(im2col + im2col_at);
#pragma unroll(IS_IEEE ? 1 : 3)
    for (int step = 0; step < K_STEPS; ++step) {
      uint4 w[INPUT_C_TILES][PARTS];
#pragma unroll
      for (int c = 0; c < INPUT_C_TILES; ++c)
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
          w[c][part] = ptx::load_shared_vector(weights + ((c * K_STEPS + step) * PARTS + part) * 512);
#pragma unroll
      for (int p = 0; p < INPUT_P_TILES; ++p) {
        u32 taps[PARTS][4];
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
          ptx::load_matrices(taps[part], row_address + part * IM2COL_PART + p * 2 * IM2COL_GROUP + step * STEP_BYTES);
        if constexpr (IS_IEEE) {
          Sums products;
          multiply(products, taps, w);
#pragma unroll
          for (int i = 0; i < INPUT_C_TILES * 8; ++i) (&sum[p].of[0][0][0])[i] += (&products.of[0][0][0])[i];
        } else {
          multiply(sum[p], taps, w);
        }
      }
    }
    store(sum, sizes, tile, grad_input);
  }

  __device__ __forceinline__ static uint4 as_vector(const u32 (&m)[4]) { return make_uint4(m[0], m[1], m[2], m[3]); }

  __device__ __forceinline__ void store(const Sums (&sum)[INPUT_P_TILES], const PatchSizes& sizes, int tile,
                                        Element* grad_input) const {
    const Tile first = Tile::of(sizes, tile);
    const int pixel0 = first.pixel + first_pixel, g = lane / 4, t = lane % 4;
    Element* const to = grad_input + first.image * input_elements(sizes);
#pragma unroll
    for (int c = 0; c < INPUT_C_TILES; ++c)
#pragma unroll
      for (int p = 0; p < INPUT_P_TILES; ++p)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = half * 8 + g, column = 4 * t;
          const int ci = (warp_c * INPUT_C_TILES + c) * 16 + (CHANNELS_LAST ? column : row);
          const int pixel = pixel0 + p * 16 + (CHANNELS_LAST ? row : column);
          if (ci >= IN_CHANNELS || pixel >= sizes.pixels) continue;
          PackOf<Element, 4> pack;
#pragma unroll
          for (int i = 0; i < 4; ++i) pack.elements[i] = store_as<Element>(sum[p].of[c][i / 2][half * 2 + i % 2]);
          *reinterpret_cast<PackOf<Element, 4>*>(to + (CHANNELS_LAST ? (Index)pixel * IN_CHANNELS + ci : (Index)ci * sizes.pixels + pixel)) = pack;
        }
  }
};
