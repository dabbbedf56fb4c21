// Of forward/epilogue_lines.cuh, epilogue_nchw.cuh and epilogue_warp.cuh: the outputs to which sums belong, and vectors of them.
#pragma once

constexpr int OUT_PER_WORD = 4 / sizeof(Out);

/// Writes COUNT neighbouring outputs to an address that is aligned to them all, at most 16 bytes.
template <int COUNT>
__device__ __forceinline__ void write_vector(Out* to, const float* v) {
  if constexpr (OUT_16_BIT && COUNT == 1) {
    *to = store_as<Out>(v[0]);
  } else {
    u32 words[COUNT / OUT_PER_WORD];
#pragma unroll
    for (int i = 0; i < COUNT / OUT_PER_WORD; ++i)
      words[i] = OUT_16_BIT ? ptx::pack_pair<PRECISION>(v[2 * i], v[(2 * i + 1) % COUNT]) : __float_as_uint(v[i]);
    if constexpr (COUNT / OUT_PER_WORD == 4) {
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    } else if constexpr (COUNT / OUT_PER_WORD == 2) {
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    } else {
      *reinterpret_cast<u32*>(to) = words[0];
    }
  }
}

/// Copies COUNT neighbouring outputs between addresses that are aligned to them all, at most 16 bytes.
template <int COUNT>
__device__ __forceinline__ void copy_vector(Out* to, const Out* from) {
  constexpr int BYTES = COUNT * static_cast<int>(sizeof(Out));
  if constexpr (BYTES == 16) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
  } else if constexpr (BYTES == 8) {
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from);
  } else if constexpr (BYTES == 4) {
    *reinterpret_cast<u32*>(to) = *reinterpret_cast<const u32*>(from);
  } else {
    *to = *from;
  }
}

/// The outputs to which the sums of one warp belong.
struct WarpPlace {
  Origin origin;                 // of the block's tile
  int image, row, col;           // first position of the warp in the tile
  int stack_row;                 // with STACK, the row of a position to which the warp's channels belong
  int phase_row, phase_col;      // first phase of the block
  int out_channel;               // first channel of the warp, of all channels
  int channels_left;             // channels of the group from there on
  const TileSizes& sizes;
};

/// The first output of a position, and whether it exists.
struct OutputPosition {
  long long pixel;  // counted over all images
  int rows, cols;   // rows and columns of the output from there to the edge; none where the position does not exist
};

/// The position at distance (image, row, col) from the warp's first.
__device__ __forceinline__ OutputPosition output_position(const WarpPlace& at, int image, int row, int col) {
  const Position position = position_at(at.origin, at.image + image, at.row + row, at.col + col, at.sizes);
  const int out_row = position.row * POSITION_ROWS + at.stack_row + at.phase_row, out_col = position.col * STRIDE_W + at.phase_col;
  return {static_cast<long long>(position.image) * at.sizes.out_pixels() + static_cast<long long>(out_row) * at.sizes.out_width + out_col,
          position.image < at.sizes.batch ? at.sizes.out_height - out_row : 0, at.sizes.out_width - out_col};
}

/// Whether the outputs of neighbouring positions of a FLAT map are neighbours, too.
constexpr bool CONTIGUOUS = FLAT && POSITION_ROWS == 1 && STRIDE_W == 1;
