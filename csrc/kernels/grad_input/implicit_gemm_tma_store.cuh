// The epilogue of a warp of grad_input/implicit_gemm_tma.cu. In channels_last it stores through rows of its own in shared
// memory, so that 8 lanes store 128 bytes of a position. In NCHW it stores from registers: 8 lanes store 8 neighbouring
// positions of a channel.
//
// accumulators.of[m][c / 2 + r] of lane 4g + t belongs to position g + r / 2 * 8 of the warp's 16 of multiply m, and to
// channel c + 2t + r % 2.
#pragma once

/// Channels of one pass through shared memory. Fewer channels than a pass are one block, whose last channels are not stored.
constexpr int STORED_CHANNELS = ROW / static_cast<int>(sizeof(Out));
static_assert(!OUTPUT_CHANNELS_LAST || BLOCK_CHANNELS % STORED_CHANNELS == 0 || M_BLOCKS == 1);

/// The position that is row `row` of the warp's 16 of multiply `m`: its image, and its pixel of the image, or -1 if it does
/// not exist.
struct Position {
  int image, pixel;
};
__device__ __forceinline__ Position position_of_row(const Work& work, const Sizes& sizes, const BoxTileShape& shape, int m, int row) {
  const int warp = threadIdx.x / 32 % 4, warpgroup = threadIdx.x / 128 % WARPGROUPS;
  const int in_tile = m * shape.multiply_positions + (warp * 2 + row / 8) * shape.group_positions + row % 8;
  if constexpr (DENSE) {
    const int position = work.position + warpgroup * WARPGROUP_POSITIONS + in_tile;
    const int image = sizes.image_positions.quotient(position), in_image = sizes.image_positions.remainder(position, image);
    const int row = sizes.row_positions.quotient(in_image), col = sizes.row_positions.remainder(in_image, row);
    const bool inside = row < sizes.out_height && col < sizes.out_width && image < sizes.batch;
    return {image, inside ? row * sizes.out_width + col : -1};
  } else {
    const int line = in_tile >> shape.col_bits, further_images = line >> shape.warpgroup_row_bits;
    const int at_row = work.row + warpgroup * shape.warpgroup_rows + line - (further_images << shape.warpgroup_row_bits);
    const int image = work.image + warpgroup * shape.warpgroup_images + further_images;
    const int col = work.col + in_tile - (line << shape.col_bits);
    const bool inside = at_row < sizes.out_height && col < sizes.out_width && image < sizes.batch;
    return {image, inside ? at_row * sizes.out_width + col : -1};
  }
}

/// Writes STORED_CHANNELS channels of one multiply, from channel FIRST of the block on, to the warp's 16 rows of shared memory.
template <int FIRST>
__device__ __forceinline__ void stage_channels(const float* accumulators, u32 staged) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  constexpr int LAST = min_of(FIRST + STORED_CHANNELS, BLOCK_CHANNELS);
  if constexpr (sizeof(Out) == 2) {
#pragma unroll
    for (int c = FIRST; c < LAST; c += 16) {
      const float* of = accumulators + c / 2;
      const u32 words[4] = {ptx::pack_pair<PRECISION>(of[0], of[1]), ptx::pack_pair<PRECISION>(of[2], of[3]),
                            ptx::pack_pair<PRECISION>(of[4], of[5]), ptx::pack_pair<PRECISION>(of[6], of[7])};
      ptx::store_matrices(staged + lane % 16 * ROW + (((c - FIRST) / 8 + lane / 16) ^ lane % 8) * 16, words);
    }
  } else {
#pragma unroll
    for (int c = FIRST; c < LAST; c += 8)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* of = accumulators + c / 2 + half * 2;
        const u32 words[2] = {__float_as_uint(of[0]), __float_as_uint(of[1])};
        ptx::store_shared<2>(staged + (half * 8 + g) * ROW + (((c - FIRST) / 4 + t / 2) ^ g) * 16 + t % 2 * 8, words);
      }
  }
}

/// Stores a work tile. `staged`: the address of the warp's own shared memory.
__device__ __forceinline__ void store_channels_last(const Accumulators& accumulators, Out* output, u32 staged, const Work& work, const Sizes& sizes,
                                                    const BoxTileShape& shape) {
  const int lane = threadIdx.x % 32, piece = lane % 8;
  const int channel = work.block * BLOCK_CHANNELS + piece * (16 / static_cast<int>(sizeof(Out)));
  Out* first = output + work.group * CHANNELS_GROUP + channel;
  static_for<0, M_TILES>([&](auto multiply) {
    constexpr int M = decltype(multiply)::value;
    int pixel[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Position position = position_of_row(work, sizes, shape, M, i * 4 + lane / 8);
      pixel[i] = position.pixel < 0 ? -1 : position.image * sizes.out_pixels() + position.pixel;
    }
    static_for<0, ceil_div(BLOCK_CHANNELS, STORED_CHANNELS)>([&](auto number) {
      constexpr int FIRST = decltype(number)::value * STORED_CHANNELS;
      __syncwarp();
      stage_channels<FIRST>(accumulators.of[M], staged);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = i * 4 + lane / 8;
        const uint4 v = ptx::load_shared_vector(staged + row * ROW + (piece ^ row % 8) * 16);
        if (pixel[i] >= 0 && channel + FIRST < CHANNELS_GROUP)
          *reinterpret_cast<uint4*>(first + static_cast<long long>(pixel[i]) * OUT_CHANNELS + FIRST) = v;
      }
    });
  });
}

__device__ __forceinline__ void store_nchw(const Accumulators& accumulators, Out* output, const Work& work, const Sizes& sizes, const BoxTileShape& shape) {
  const int lane = threadIdx.x % 32, channel = work.block * BLOCK_CHANNELS + lane % 4 * 2;
  const long long out_pixels = sizes.out_pixels();
#pragma unroll
  for (int m = 0; m < M_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Position position = position_of_row(work, sizes, shape, m, half * 8 + lane / 4);
      const long long first_channel = static_cast<long long>(position.image) * OUT_CHANNELS + work.group * CHANNELS_GROUP + channel;
      Out* to = output + first_channel * out_pixels + position.pixel;
#pragma unroll
      for (int c = 0; c < BLOCK_CHANNELS; c += 8)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (position.pixel >= 0 && channel + c + i < CHANNELS_GROUP)
            to[(c + i) * out_pixels] = store_as<Out>(accumulators.of[m][c / 2 + half * 2 + i]);
    }
}
