// One warpgroup's sums to 16-bit channels_last outputs, in whole lines of its 64 channels: a part of its cells at a time goes by
// way of shared memory of the warpgroup's own, [pixel][128 bytes], and leaves by 16 bytes a lane, 8 lanes a pixel.
// Rows of a multiply are channels in their order; the channels of a group are a multiple of 8.
#pragma once

/// Four 8 x 8 matrices of 16 bits, turned: a lane's word is column lane / 4, rows 2 (lane % 4) and the next; row r of
/// matrix m goes to the address that lane 8 m + r gives.
namespace ptx {
__device__ __forceinline__ void store_matrices_turned(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
__device__ __forceinline__ void meet_warpgroup(int index) { asm volatile("bar.sync %0, 128;" ::"r"(index + 1) : "memory"); }
}  // namespace ptx

/// Fragments of a part, of which there are two buffers; bytes of them for each of the four warps.
constexpr int LINE_PART = 4;
constexpr int LINE_BYTES = 2 * LINE_PART * 8 * 128 / 4;

/// Fragments in the order in which they leave: phases of a cell first, then columns, rows, images.
constexpr int WARP_FRAGMENTS = PHASES * WARP_IMAGES * WARP_ROWS * WARP_COLS;
constexpr int LINE_PARTS = ceil_div(WARP_FRAGMENTS, LINE_PART);
struct FragmentPlace {
  int phase, col, row, image;
  __device__ constexpr explicit FragmentPlace(int index)
      : phase(index % PHASES),
        col(index / PHASES % WARP_COLS),
        row(index / (PHASES * WARP_COLS) % WARP_ROWS),
        image(index / (PHASES * WARP_COLS * WARP_ROWS)) {}
};

/// `staged`: address of 2 * LINE_PART * 1024 bytes; the other arguments as of store_warp, the channel of the warpgroup.
__device__ __forceinline__ void store_lines(const Sums& sums, Out* output, const Epilogue& epilogue, u32 staged, const Origin& origin,
                                            int group, int first_channel, int image, int row, int col, int phase_row,
                                            int phase_col, const Sizes& sizes) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = threadIdx.x % 32;
  Channel channels[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int channel = first_channel + warp * 16 + half * 8 + lane / 4;
    channels[half] = load_channel(epilogue, group * CO_GROUP + channel, channel < CO_GROUP);
  }
  // Where this lane's address of the turned matrices lies: matrix lane / 8 is half of the warp's channels of one of two
  // fragments. And what this thread stores: 16 bytes `piece` of pixel `pixel`, of one of two fragments.
  const u32 put = staged + lane / 16 * 1024 + lane % 8 * 128 + ((warp * 2 + lane / 8 % 2) ^ lane % 8) * 16;
  const int piece = thread % 8, pixel = thread / 8 % 8, second = thread / 64;
  const u32 get = staged + second * 1024 + pixel * 128 + (piece ^ pixel) * 16;

  const WarpPlace at{origin, image, row, col, 0, phase_row, phase_col, 0, 0, sizes};
  const int first_row = pixel / FRAGMENT_W, first_col = pixel % FRAGMENT_W;
  const OutCell first = out_cell(at, 0, first_row, first_col);
  const int images = sizes.batch - origin.image - image;
  [[maybe_unused]] const int outputs_left = sizes.batch * sizes.out_pixels() - (origin.image + col + first_col);
  const bool real = first_channel + piece * 8 < CO_GROUP;
  const int row_elements = sizes.out_width * OUT_CHANNELS;
  const long long image_elements = static_cast<long long>(sizes.out_height) * row_elements;
  output += group * CO_GROUP + first_channel + piece * 8;
  Out* base = output + first.pixel * OUT_CHANNELS;

#pragma unroll
  for (int part = 0; part < LINE_PARTS; ++part) {
    const u32 buffer = part % 2 * (LINE_PART * 1024);
#pragma unroll
    for (int i = part * LINE_PART; i < min_of(WARP_FRAGMENTS, (part + 1) * LINE_PART); i += 2) {
      u32 words[4];
#pragma unroll
      for (int half = 0; half < 4; ++half) {
        const FragmentPlace place(min_of(i + half / 2, WARP_FRAGMENTS - 1));
        const float(&sum)[4] = sums.at(place.phase, 0, place.image, place.col, place.row);
        const Channel& channel = channels[half % 2];
        words[half] = ptx::pack_pair<PRECISION>(stored(sum[half % 2 * 2], channel, epilogue), stored(sum[half % 2 * 2 + 1], channel, epilogue));
      }
      ptx::store_matrices_turned(put + buffer + (i - part * LINE_PART) * 1024, words[0], words[1], words[2], words[3]);
    }
    // The buffer after this one was read before its readers came here.
    ptx::meet_warpgroup(threadIdx.x / 128);
#pragma unroll
    for (int i = part * LINE_PART; i < min_of(WARP_FRAGMENTS, (part + 1) * LINE_PART); i += 2) {
      // Constants of both fragments, of which the thread stores one.
      const FragmentPlace one(i), other(min_of(i + 1, WARP_FRAGMENTS - 1));
      const auto mine = [&](int a, int b) { return a == b || second == 0 ? a : b; };
      const int in_image = mine(one.image, other.image), in_phase_row = mine(one.phase / PHASE_COLS, other.phase / PHASE_COLS);
      const int in_phase_col = mine(one.phase % PHASE_COLS, other.phase % PHASE_COLS), in_col = mine(one.col, other.col);
      bool inside = real && (i + 1 < WARP_FRAGMENTS || second == 0);
      Out* to = base;
      int cell_row = 0, cell_col = 0;
      if constexpr (DENSE) {
        cell_col = in_col * FRAGMENT_W;
        inside = inside && cell_col < outputs_left;
      } else if constexpr (FLAT) {
        const OutCell cell = out_cell(at, 0, 0, in_col * FRAGMENT_W + first_col);
        to = output + cell.pixel * OUT_CHANNELS;
        inside = inside && cell.rows > 0;
      } else {
        cell_row = mine(one.row, other.row) * FRAGMENT_H * CELL_ROWS;
        cell_col = in_col * FRAGMENT_W * STRIDE_W;
        inside = inside && in_image < images && cell_row + in_phase_row < first.rows && cell_col + in_phase_col < first.cols;
      }
      const long long distance =
          in_image * image_elements + static_cast<long long>(cell_row + in_phase_row) * row_elements + (cell_col + in_phase_col) * OUT_CHANNELS;
      const uint4 words = ptx::load_shared_vector(get + buffer + (i - part * LINE_PART) * 1024);
      if (inside) *reinterpret_cast<uint4*>(to + distance) = words;
    }
  }
  if constexpr (LINE_PARTS % 2) ptx::meet_warpgroup(threadIdx.x / 128);
}
