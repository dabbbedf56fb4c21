// The warps of gradients/narrow_joint.cu that compute the gradient of the weight: the input times im2col rows.
#pragma once

constexpr int N_TILES = K_STEPS * STEP_BYTES / ITEM / 8;  // tiles of 8 taps
/// n tiles whose products a warp computes at the same time in float32: each is a chain of products that wait for each other.
constexpr int N_TILES_AT_ONCE = 3;

struct GradWeightConsumer {
  const int lane, warp_m, warp_k;
  float sum[WEIGHT_M_TILES][N_TILES][4] = {};

  __device__ __forceinline__ explicit GradWeightConsumer(int warp)
      : lane(threadIdx.x % 32), warp_m(warp % WEIGHT_WARPS_M), warp_k(warp / WEIGHT_WARPS_M) {}

  __device__ __forceinline__ void compute(u32 input, u32 im2col) {
#pragma unroll(IS_IEEE ? 1 : 2)
    for (int i = 0; i < PIXELS / 16 / WEIGHT_WARPS_K; ++i) {
      const int pixels16 = i * WEIGHT_WARPS_K + warp_k;
      if constexpr (IS_IEEE) {
        multiply_split(input, im2col, pixels16);
      } else {
        multiply_16_bit(input, im2col, pixels16);
      }
    }
  }

  __device__ __forceinline__ void multiply_16_bit(u32 input, u32 im2col, int pixels16) {
    // For ldmatrix lane 8m + r gives the address of row r of matrix m. A fragment of the input is (channels, pixels) 0 0, 8 0,
    // 0 8, 8 8; it is transposed in channels_last.
    const int m = lane / 8, r = lane % 8;
    uint4 x[WEIGHT_M_TILES];
#pragma unroll
    for (int tile = 0; tile < WEIGHT_M_TILES; ++tile) {
      const int channel = (warp_m * WEIGHT_M_TILES + tile) * 16 + m % 2 * 8, pixel = pixels16 * 16 + m / 2 * 8;
      u32 words[4];
      if constexpr (CHANNELS_LAST) {
        ptx::load_matrices_transposed(
            words, input + channel / ROW_ELEMENTS * BOX_BYTES + (pixel + r) * 128 + ((channel % ROW_ELEMENTS / 8) ^ r) * 16);
      } else {
        ptx::load_matrices(words, input + pixel / ROW_ELEMENTS * BOX_BYTES + (channel + r) * 128 + ((pixel % ROW_ELEMENTS / 8) ^ r) * 16);
      }
      x[tile] = make_uint4(words[0], words[1], words[2], words[3]);
    }
    const u32 at = im2col + im2col_offset(pixels16 * 16 + m % 2 * 8 + r) + m / 2 * 16;
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
      u32 taps[4];
      ptx::load_matrices_transposed(taps, at + n * 16);
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int tile = 0; tile < WEIGHT_M_TILES; ++tile) {
          const u32 b[2] = {taps[2 * j], taps[2 * j + 1]};
          ptx::mma<PRECISION>(sum[tile][(n + j) % N_TILES], x[tile], b);
        }
    }
  }

  __device__ __forceinline__ void multiply_split(u32 input, u32 im2col, int pixels16) {
    const int g = lane / 4, t = lane % 4;
    // Two steps of 8 pixels: q = 2 * step + i is the lane's pixel for k = t (i = 0) and t + 4 (i = 1). In NCHW a lane has four
    // neighbours of a row, in channels_last two.
    const int first = CHANNELS_LAST ? pixels16 * 16 + 2 * t : pixels16 / 2 * 32 + pixels16 % 2 * 4 + 8 * t;
    const auto pixel_of = [](int q) { return CHANNELS_LAST ? q / 2 * 8 + q % 2 : q; };
    uint4 x[WEIGHT_M_TILES][2][PARTS];
#pragma unroll
    for (int tile = 0; tile < WEIGHT_M_TILES; ++tile) {
      float values[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int channel = (warp_m * WEIGHT_M_TILES + tile) * 16 + half * 8 + g;
        if constexpr (CHANNELS_LAST) {
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            const int pixel = first + pixel_of(q);
            values[half][q] = __uint_as_float(ptx::load_shared(input + channel / ROW_ELEMENTS * BOX_BYTES + pixel * 128 +
                                                               ((channel % ROW_ELEMENTS / 4) ^ (pixel % 8)) * 16 + channel % 4 * 4));
          }
        } else {
          const uint4 row =
              ptx::load_shared_vector(input + pixels16 / 2 * BOX_BYTES + channel * 128 + ((2 * t + pixels16 % 2) ^ g) * 16);
          values[half][0] = __uint_as_float(row.x), values[half][1] = __uint_as_float(row.y);
          values[half][2] = __uint_as_float(row.z), values[half][3] = __uint_as_float(row.w);
        }
      }
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        u32 parts[4][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) split(parts[i][0], parts[i][1], values[i % 2][2 * step + i / 2]);
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
          x[tile][step][part] = make_uint4(parts[0][part], parts[1][part], parts[2][part], parts[3][part]);
      }
    }
    u32 at[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) at[q] = ptx::keep_in_register(im2col + im2col_offset(first + pixel_of(q)) + g * 4);
#pragma unroll
    for (int n0 = 0; n0 < N_TILES; n0 += N_TILES_AT_ONCE) {
      u32 taps[N_TILES_AT_ONCE][2][PARTS][2];
      float products[N_TILES_AT_ONCE][WEIGHT_M_TILES][4];
#pragma unroll
      for (int n = 0; n < N_TILES_AT_ONCE; ++n)
#pragma unroll
        for (int q = 0; q < 4; ++q)
#pragma unroll
          for (int part = 0; part < PARTS; ++part)
            if (n0 + n < N_TILES) taps[n][q / 2][part][q % 2] = ptx::load_shared(at[q] + part * IM2COL_PART + (n0 + n) * 32);
      static_for<0, 6>([&](auto round) {
        constexpr int STEP = decltype(round)::value / 3, ROUND = decltype(round)::value % 3;
#pragma unroll
        for (int n = 0; n < N_TILES_AT_ONCE; ++n)
#pragma unroll
          for (int tile = 0; tile < WEIGHT_M_TILES; ++tile)
            if (n0 + n < N_TILES)
              multiply_part<ROUND, ROUND == 0 && STEP == 0>(products[n][tile], x[tile][STEP], taps[n][STEP][0],
                                                            taps[n][STEP][PARTS - 1]);
      });
#pragma unroll
      for (int n = 0; n < N_TILES_AT_ONCE; ++n)
#pragma unroll
        for (int tile = 0; tile < WEIGHT_M_TILES; ++tile)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (n0 + n < N_TILES) sum[tile][(n0 + n) % N_TILES][i] += products[n][tile][i];
    }
  }

  /// Adds up the sums of the warps that shared the pixels; one of them stores the block's sums. `memory`: shared memory that no
  /// warp reads any more.
  __device__ __forceinline__ void finish(float* memory, float* partial) {
    constexpr int SUMS = WEIGHT_M_TILES * N_TILES * 4;
    static_assert(WEIGHT_WARPS_M * (WEIGHT_WARPS_K / 2) * SUMS * 128 <= IM2COL_AT);
#pragma unroll
    for (int half = WEIGHT_WARPS_K / 2; half > 0; half /= 2) {
      float* const to = memory + (warp_m * (WEIGHT_WARPS_K / 2) + warp_k % half) * (SUMS * 32) + lane;
      if (warp_k >= half && warp_k < 2 * half) {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) to[i * 32] = (&sum[0][0][0])[i];
      }
      ptx::sync_named_barrier<2, 32 * WEIGHT_WARPS>();
      if (warp_k < half) {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) (&sum[0][0][0])[i] += to[i * 32];
      }
      ptx::sync_named_barrier<2, 32 * WEIGHT_WARPS>();
    }
    if (warp_k > 0) return;
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int tile = 0; tile < WEIGHT_M_TILES; ++tile)
#pragma unroll
      for (int n = 0; n < N_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int ci = (warp_m * WEIGHT_M_TILES + tile) * 16 + i / 2 * 8 + g, tap = n * 8 + 2 * t + i % 2;
          if (ci >= IN_CHANNELS || tap >= ALL_TAPS) continue;
          Digits digits{static_cast<unsigned>(tap)};
          const int kw = digits.next(KERNEL_W), kh = digits.next(KERNEL_H);
          partial[at_weight(ci, digits.rest, kh, kw)] = sum[tile][n][i];
        }
  }
};
