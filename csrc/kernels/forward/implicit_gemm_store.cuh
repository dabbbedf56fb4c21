// Stores accumulators: applies the epilogue, and stores the longest vectors that the layout and the shape allow.
#pragma once

#include "common/epilogue.cuh"

/// The type that is stored: float32 for partial sums of a split over k, the output's type for whole sums.
using Out = Select<PARTIAL, float, Element>::type;
constexpr bool OUT_16_BIT = sizeof(Out) == 2;
constexpr int MAX_STORE = 16 / sizeof(Out);

/// In NCHW there are many short stores far apart; streaming stores are up to twice as fast for them (measured on an H200).
template <class Words>
__device__ __forceinline__ void store_words(Words* to, Words words) {
  if constexpr (OUTPUT_CHANNELS_LAST) {
    *to = words;
  } else {
    __stcs(to, words);
  }
}

/// Stores COUNT neighbouring outputs to an address that is aligned to them all, at most 16 bytes.
template <int COUNT>
__device__ __forceinline__ void store_vector(Out* to, const float* v) {
  if constexpr (OUT_16_BIT && COUNT == 1) {
    *to = store_as<Out>(v[0]);
  } else {
    constexpr int WORDS = COUNT * sizeof(Out) / 4;
    u32 words[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      if constexpr (OUT_16_BIT) {
        words[i] = ptx::pack_pair<PRECISION>(v[2 * i], v[2 * i + 1]);
      } else {
        words[i] = __float_as_uint(v[i]);
      }
    }
    if constexpr (WORDS == 4) {
      store_words(reinterpret_cast<uint4*>(to), make_uint4(words[0], words[1], words[2], words[3]));
    } else if constexpr (WORDS == 2) {
      store_words(reinterpret_cast<uint2*>(to), make_uint2(words[0], words[1]));
    } else {
      store_words(reinterpret_cast<u32*>(to), words[0]);
    }
  }
}

/// The accumulators of one warp: [phase][tile of 16 channels][image, column and row of a fragment][element of the fragment].
constexpr int PHASES = PHASE_ROWS * PHASE_COLS;
struct Sums {
  float all[PHASES][WARP_M_TILES][WARP_IMAGES * WARP_COLS * WARP_ROWS][4];

  /// The accumulators of one wgmma lie together: those of the rows of a column, or with NARROW of the images of a row.
  __device__ __forceinline__ float (&at(int phase, int tile, int image, int col, int row))[4] {
    return all[phase][tile][NARROW ? row * WARP_IMAGES + image : (image * WARP_COLS + col) * WARP_ROWS + row];
  }
  __device__ __forceinline__ const float (&at(int phase, int tile, int image, int col, int row) const)[4] {
    return const_cast<Sums*>(this)->at(phase, tile, image, col, row);
  }

  __device__ __forceinline__ void clear() {
    float* flat = &all[0][0][0][0];
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(all) / sizeof(float)); ++i) flat[i] = 0.f;
  }

  __device__ __forceinline__ void add(const Sums& other) {
    float* flat = &all[0][0][0][0];
    const float* others = &other.all[0][0][0][0];
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(all) / sizeof(float)); ++i) flat[i] += others[i];
  }
};

/// The value to store. Partial sums of a split have no epilogue, which forward/implicit_gemm_split_k.cu applies.
__device__ __forceinline__ float stored(float sum, const Channel& channel, const Epilogue& epilogue) {
  return PARTIAL ? sum : apply_epilogue(sum, channel, epilogue);
}

/// Stores the sums of one warp. `first_channel` is the warp's, within the group; `n`, `h`, `w` are its first position within
/// the tile.
__device__ __forceinline__ void store_sums(const Sums& sums, Out* output, const Epilogue& epilogue, const Origin& origin,
                                           int group, int first_channel, int n, int h, int w, int phase_row,
                                           int phase_col, const TileSizes& sizes) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  Channel channels[WARP_M_TILES][2];
#pragma unroll
  for (int i = 0; i < WARP_M_TILES; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int channel = first_channel + channel_of_row(i, g + half * 8);
      channels[i][half] = load_channel(epilogue, group * CO_GROUP + channel, !PARTIAL && channel < CO_GROUP);
    }

  // Columns 2t and 2t + 1 of a fragment are neighbours in a row, unless the map is one pixel wide.
  constexpr bool PAIR = FRAGMENT_W > 1 && (!FLAT || EVEN_COLUMNS);
#pragma unroll
  for (int image = 0; image < WARP_IMAGES; ++image)
#pragma unroll
    for (int row = 0; row < WARP_ROWS; ++row)
#pragma unroll
      for (int col = 0; col < WARP_COLS; ++col)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool pair = PAIR && !OUTPUT_CHANNELS_LAST;
          if (pair && e == 1) continue;
          const int index = 2 * t + e;
          const Position position = position_at(origin, n + image * FRAGMENT_N + index / (FRAGMENT_W * FRAGMENT_H),
                                                h + row * FRAGMENT_H + index / FRAGMENT_W % FRAGMENT_H,
                                                w + col * FRAGMENT_W + index % FRAGMENT_W, sizes);
#pragma unroll
          for (int a = 0; a < PHASE_ROWS; ++a) {
            const int out_row = position.row * STRIDE_H + phase_row + a;
            const bool row_inside = position.inside && out_row < sizes.out_height;
            if constexpr (OUTPUT_CHANNELS_LAST) {
              constexpr int SEGMENT = 2 * WARP_M_TILES;
              constexpr int VECTOR = power_of_two_dividing(CO_GROUP, power_of_two_dividing(SEGMENT, MAX_STORE));
#pragma unroll
              for (int b = 0; b < PHASE_COLS; ++b) {
                const int out_col = position.col * STRIDE_W + phase_col + b;
                if (!row_inside || out_col >= sizes.out_width) continue;
                const int channel = first_channel + g * SEGMENT;
                Out* to = output + ((static_cast<long long>(position.image) * sizes.out_height + out_row) * sizes.out_width + out_col) * OUT_CHANNELS +
                          group * CO_GROUP + channel;
                float segment[SEGMENT];
#pragma unroll
                for (int i = 0; i < SEGMENT; ++i)
                  segment[i] = stored(sums.at(a * PHASE_COLS + b, i / 2, image, col, row)[i % 2 * 2 + e], channels[i / 2][i % 2], epilogue);
#pragma unroll
                for (int i = 0; i < SEGMENT; i += VECTOR)
                  if (CO_GROUP % SEGMENT == 0 ? channel < CO_GROUP : channel + i < CO_GROUP)
                    store_vector<VECTOR>(to + i, segment + i);
              }
            } else {
              // The phases of a position are neighbours in memory, and so are those of both positions if the block has all
              // columns of phases.
              constexpr int POSITIONS = PAIR && PHASE_COLS == STRIDE_W ? 2 : 1;
              constexpr int SEGMENT = POSITIONS * PHASE_COLS;
              constexpr int VECTOR = power_of_two_dividing(
                  OUT_ROW_MULTIPLE, power_of_two_dividing(PHASE_COLS == STRIDE_W ? SEGMENT : power_of_two_dividing(STRIDE_W, PHASE_COLS), MAX_STORE));
#pragma unroll
              for (int i = 0; i < WARP_M_TILES; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                  const int channel = first_channel + channel_of_row(i, g + half * 8);
                  if (!row_inside || channel >= CO_GROUP) continue;
#pragma unroll
                  for (int pass = 0; pass < (PAIR && POSITIONS == 1 ? 2 : 1); ++pass) {
                    const int out_col = (position.col + pass) * STRIDE_W + phase_col;
                    Out* to = output +
                              ((static_cast<long long>(position.image) * OUT_CHANNELS + group * CO_GROUP + channel) * sizes.out_height + out_row) *
                                  sizes.out_width +
                              out_col;
                    float segment[SEGMENT];
#pragma unroll
                    for (int r = 0; r < SEGMENT; ++r)
                      segment[r] = stored(sums.at(a * PHASE_COLS + r % PHASE_COLS, i, image, col, row)[half * 2 + (PAIR ? r / PHASE_COLS + pass : e)],
                                      channels[i][half], epilogue);
#pragma unroll
                    for (int r = 0; r < SEGMENT; r += VECTOR)
                      if (FLAT || out_col + r < sizes.out_width) store_vector<VECTOR>(to + r, segment + r);
                  }
                }
            }
          }
        }
}
