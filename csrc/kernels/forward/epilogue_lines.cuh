// Stores the sums of one warpgroup as 16-bit channels_last outputs, in whole lines: the 128 bytes of its 64 channels of a
// pixel. It collects a subtile of its positions at a time in shared memory of its own, [pixel][128 bytes], and stores 16 bytes
// for each lane, 8 lanes for each pixel. The rows of a multiply are channels in their order; the channels of a group are a
// multiple of 8.
#pragma once

/// Stores four 8 x 8 matrices of 16 bits transposed: a lane's word holds rows 2 (lane % 4) and the next of column lane / 4;
/// row r of matrix m goes to the address that lane 8 m + r gives.
namespace ptx {
__device__ __forceinline__ void store_matrices_transposed(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
__device__ __forceinline__ void sync_warpgroup(int index) { asm volatile("bar.sync %0, 128;" ::"r"(index + 1) : "memory"); }
}  // namespace ptx

/// Fragments of a subtile, for which there are two buffers; bytes of the buffers for each of the four warps.
constexpr int LINE_SUBTILE = 4;
constexpr int LINE_BYTES = 2 * LINE_SUBTILE * 8 * 128 / 4;

/// Fragments in the order in which they are stored: phases of a position first, then columns, rows, images.
constexpr int WARP_FRAGMENTS = PHASES * WARP_IMAGES * WARP_ROWS * WARP_COLS;
constexpr int LINE_SUBTILES = ceil_div(WARP_FRAGMENTS, LINE_SUBTILE);
struct FragmentPlace {
  int phase, col, row, image;
  __device__ constexpr explicit FragmentPlace(int index)
      : phase(index % PHASES),
        col(index / PHASES % WARP_COLS),
        row(index / (PHASES * WARP_COLS) % WARP_ROWS),
        image(index / (PHASES * WARP_COLS * WARP_ROWS)) {}
};

/// Stores the sums of a warpgroup. `staged` is the address of 2 * LINE_SUBTILE * 1024 bytes. The other arguments are those of
/// store_warp, with the first channel of the warpgroup.
__device__ __forceinline__ void store_lines(const Sums& sums, Out* output, const Epilogue& epilogue, u32 staged, const Origin& origin,
                                            int group, int first_channel, int image, int row, int col, int phase_row,
                                            int phase_col, const TileSizes& sizes) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = threadIdx.x % 32;
  Channel channels[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int channel = first_channel + warp * 16 + half * 8 + lane / 4;
    channels[half] = load_channel(epilogue, group * CO_GROUP + channel, channel < CO_GROUP);
  }
  // This lane's address for stmatrix: matrix lane / 8 is half of the warp's channels of one of two fragments. And what this
  // thread stores: 16 bytes `piece` of pixel `pixel`, of one of two fragments.
  const u32 put = staged + lane / 16 * 1024 + lane % 8 * 128 + ((warp * 2 + lane / 8 % 2) ^ lane % 8) * 16;
  const int piece = thread % 8, pixel = thread / 8 % 8, second = thread / 64;
  const u32 get = staged + second * 1024 + pixel * 128 + (piece ^ pixel) * 16;

  const WarpPlace at{origin, image, row, col, 0, phase_row, phase_col, 0, 0, sizes};
  const int first_row = pixel / FRAGMENT_W, first_col = pixel % FRAGMENT_W;
  const OutputPosition first = output_position(at, 0, first_row, first_col);
  const ShapedPlaces places(at);
  const int images = sizes.batch - origin.image - image;
  [[maybe_unused]] const int outputs_left = sizes.batch * sizes.out_pixels() - (origin.image + col + first_col);
  const bool real = first_channel + piece * 8 < CO_GROUP;
  const int row_elements = sizes.out_width * OUT_CHANNELS;
  const long long image_elements = static_cast<long long>(sizes.out_height) * row_elements;
  output += group * CO_GROUP + first_channel + piece * 8;
  Out* base = output + first.pixel * OUT_CHANNELS;

#pragma unroll
  for (int subtile = 0; subtile < LINE_SUBTILES; ++subtile) {
    const u32 buffer = subtile % 2 * (LINE_SUBTILE * 1024);
#pragma unroll
    for (int i = subtile * LINE_SUBTILE; i < min_of(WARP_FRAGMENTS, (subtile + 1) * LINE_SUBTILE); i += 2) {
      u32 words[4];
#pragma unroll
      for (int half = 0; half < 4; ++half) {
        const FragmentPlace place(min_of(i + half / 2, WARP_FRAGMENTS - 1));
        const float(&sum)[4] = sums.at(place.phase, 0, place.image, place.col, place.row);
        const Channel& channel = channels[half % 2];
        words[half] = ptx::pack_pair<PRECISION>(stored(sum[half % 2 * 2], channel, epilogue), stored(sum[half % 2 * 2 + 1], channel, epilogue));
      }
      ptx::store_matrices_transposed(put + buffer + (i - subtile * LINE_SUBTILE) * 1024, words[0], words[1], words[2], words[3]);
    }
    // The other buffer has been read: its readers have arrived here.
    ptx::sync_warpgroup(threadIdx.x / 128);
#pragma unroll
    for (int i = subtile * LINE_SUBTILE; i < min_of(WARP_FRAGMENTS, (subtile + 1) * LINE_SUBTILE); i += 2) {
      // The constants of both fragments, of which the thread stores one.
      const FragmentPlace one(i), other(min_of(i + 1, WARP_FRAGMENTS - 1));
      const auto mine = [&](int a, int b) { return a == b || second == 0 ? a : b; };
      const int in_image = mine(one.image, other.image), in_phase_row = mine(one.phase / PHASE_COLS, other.phase / PHASE_COLS);
      const int in_phase_col = mine(one.phase % PHASE_COLS, other.phase % PHASE_COLS), in_col = mine(one.col, other.col);
      bool inside = real && (i + 1 < WARP_FRAGMENTS || second == 0);
      Out* to = base;
      int output_row = 0, output_col = 0;
      if constexpr (CONTIGUOUS) {
        output_col = in_col * FRAGMENT_W;
        inside = inside && output_col < outputs_left;
      } else if constexpr (FLAT || SHAPED) {
        OutputPosition position;
        if constexpr (FLAT) {
          position = output_position(at, 0, 0, in_col * FRAGMENT_W + first_col);
        } else {
          const int in_row = mine(one.row, other.row);
          const OutputPosition even = places.at(in_row, pixel / 2, 0), odd = places.at(in_row, pixel / 2, 1);
          position = pixel % 2 ? odd : even;
        }
        to = output + position.pixel * OUT_CHANNELS;
        inside = inside && (FLAT ? position.rows > 0 : in_phase_row < position.rows && in_phase_col < position.cols);
      } else {
        output_row = mine(one.row, other.row) * FRAGMENT_H * POSITION_ROWS;
        output_col = in_col * FRAGMENT_W * STRIDE_W;
        inside = inside && in_image < images && output_row + in_phase_row < first.rows && output_col + in_phase_col < first.cols;
      }
      const long long distance =
          in_image * image_elements + static_cast<long long>(output_row + in_phase_row) * row_elements + (output_col + in_phase_col) * OUT_CHANNELS;
      const uint4 words = ptx::load_shared_vector(get + buffer + (i - subtile * LINE_SUBTILE) * 1024);
      if (inside) *reinterpret_cast<uint4*>(to + distance) = words;
    }
  }
  if constexpr (LINE_SUBTILES % 2) ptx::sync_warpgroup(threadIdx.x / 128);
}
