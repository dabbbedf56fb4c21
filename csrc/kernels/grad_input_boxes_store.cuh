// How a warpgroup of grad_input_boxes.cu stores what it summed up: in channels_last by boxes, in NCHW from registers.
#pragma once

/// sums.of[m][c / 8 * 4 + r] of lane 4g + t: cell g + r / 2 * 8 of the warp's 16 of multiply m, channel c + 2t + r % 2.
struct Sums {
  float of[M_TILES][BLOCK_CHANNELS / 2];
};

/// Channels of one box of grad_input; with fewer blocks than that the map's edge cuts it.
constexpr int STORED_CHANNELS = ROW / static_cast<int>(sizeof(Out));
static_assert(BLOCK_CHANNELS % STORED_CHANNELS == 0 || M_BLOCKS == 1);

/// Cells of a warpgroup, and which of them is the first of 8 that lie along its rows.
constexpr int WARPGROUP_H = TILE_H / WARPGROUPS_H, WARPGROUP_N = TILE_N / (WARPGROUPS / WARPGROUPS_H);
__device__ __forceinline__ int place_of_group(int m, int group) { return m * MULTIPLY_PLACES + group * GROUP_PLACES; }

/// Put STORED_CHANNELS channels, from `FIRST` of the block on, into the warpgroup's rows, one for each cell.
template <int FIRST>
__device__ __forceinline__ void stage_channels(const Sums& sums, u32 staged) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  constexpr int LAST = least(FIRST + STORED_CHANNELS, BLOCK_CHANNELS);
#pragma unroll
  for (int m = 0; m < M_TILES; ++m) {
    if constexpr (sizeof(Out) == 2) {
      const int r = lane % 8;
      const u32 to = staged + (place_of_group(m, warp * 2 + lane / 8 % 2) + r) * ROW;
#pragma unroll
      for (int c = FIRST; c < LAST; c += 16) {
        const float* of = &sums.of[m][c / 2];
        const u32 words[4] = {ptx::pack_pair<PRECISION>(of[0], of[1]), ptx::pack_pair<PRECISION>(of[2], of[3]),
                              ptx::pack_pair<PRECISION>(of[4], of[5]), ptx::pack_pair<PRECISION>(of[6], of[7])};
        ptx::store_matrices(to + (((c - FIRST) / 8 + lane / 16) ^ r) * 16, words);
      }
    } else {
      const int g = lane / 4, t = lane % 4;
#pragma unroll
      for (int c = FIRST; c < LAST; c += 8)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* of = &sums.of[m][c / 2 + half * 2];
          const u32 words[2] = {__float_as_uint(of[0]), __float_as_uint(of[1])};
          const u32 to = staged + (place_of_group(m, warp * 2 + half) + g) * ROW;
          ptx::store_shared<2>(to + (((c - FIRST) / 4 + t / 2) ^ g) * 16 + t % 2 * 8, words);
        }
    }
  }
}

/// `first`: the warpgroup's first cell.
__device__ __forceinline__ void store_channels_last(const Sums& sums, const TensorMap& output, u32 staged, const Work& work, const Cell& first) {
  const int warpgroup = threadIdx.x / 128;
  const bool storing = threadIdx.x % 128 == 0;
  constexpr int BOXES = ceil_div(BLOCK_CHANNELS, STORED_CHANNELS);
  static_assert(BOXES % STORE_BUFFERS == 0);
  repeat<0, BOXES>([&](auto number) {
    constexpr int FIRST = decltype(number)::value * STORED_CHANNELS;
    const u32 buffer = staged + decltype(number)::value % STORE_BUFFERS * STAGED_BYTES;
    if (storing) ptx::wait_stores_read<STORE_BUFFERS - 1>();
    ptx::meet(1 + warpgroup, 128);
    stage_channels<FIRST>(sums, buffer);
    ptx::publish_to_multiplies();
    ptx::meet(1 + warpgroup, 128);
    if (storing) {
      ptx::store_box(output, work.block * BLOCK_CHANNELS + FIRST, SPLITS > 1 ? work.split : work.group, first.col, first.row,
                     first.image, buffer);
      ptx::commit_stores();
    }
  });
}

/// 8 lanes store 8 neighbouring pixels of a channel.
__device__ __forceinline__ void store_nchw(const Sums& sums, Out* output, const Work& work, const Cell& first, int batch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, g = lane / 4, t = lane % 4;
  const int channel = work.block * BLOCK_CHANNELS + 2 * t;
#pragma unroll
  for (int m = 0; m < M_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int place = place_of_group(m, warp * 2 + half) + g;
      const int col = first.col + place % TILE_W, box_row = place / TILE_W;
      int row = first.row + box_row % WARPGROUP_H, image = first.image + box_row / WARPGROUP_H;
      bool inside = col < OUT_WIDTH && box_row < WARPGROUP_H * WARPGROUP_N;
      if constexpr (FLAT) {
        image = row / OUT_HEIGHT;
        row %= OUT_HEIGHT;
      }
      inside = inside && row < OUT_HEIGHT && image < batch;
      image += work.split * batch;
      Out* to = output + (static_cast<long long>(image) * OUT_CHANNELS + work.group * CHANNELS_GROUP + channel) * (OUT_HEIGHT * OUT_WIDTH) +
                row * OUT_WIDTH + col;
#pragma unroll
      for (int c = 0; c < BLOCK_CHANNELS; c += 8)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (inside && channel + c + i < CHANNELS_GROUP)
            to[static_cast<long long>(c + i) * (OUT_HEIGHT * OUT_WIDTH)] = store_as<Out>(sums.of[m][c / 2 + half * 2 + i]);
    }
}
