// Of grad_weight/stride1.cu: the producer, one thread that issues the TMA copies of rows; in channels_last the other
// warps transpose the input's rows from one place in shared memory to another.
#pragma once

constexpr int PRODUCER_WARPS = 4, TRANSPOSE_WARPS = PRODUCER_WARPS - 1;
/// A warp transposes a piece at a time: four pixels of 32 channels.
constexpr int PIECES = TILE_CI / BOX * (TILE_W / 4);

/// Calls visit(segment, i) for each row that is loaded, in order: the i-th of grad_output; i < 0 before the first.
template <class Visit>
__device__ __forceinline__ void for_each_row(const Place& place, const GradWeightStride1Sizes& sizes, int segments, const Visit& visit) {
  for (int c = place.split; c < segments; c += sizes.splits) {
    const Segment segment(sizes, c);
#pragma unroll 1
    for (int i = -HALO_ROWS; i < segment.rows; ++i) visit(segment, i);
  }
}

/// The producer, one thread. A row of grad_output is loaded with the row of the input that its first row of taps reads.
__device__ __forceinline__ void produce(Ring ring, RawRing raw, const TensorMap& input, const TensorMap& grad_output, const Place& place,
                                    const GradWeightStride1Sizes& sizes, int segments) {
  const int input_channel = place.group * CI_GROUP + place.ci, output_channel = place.group * CO_GROUP + place.first_channel();
  for_each_row(place, sizes, segments, [&](const Segment& segment, int i) {
    const int row = segment.begin + i, input_row = row + PADDING_H - place.tap_row;
    const int output_bytes = i < 0 ? 0 : OUTPUT_BOXES * OUTPUT_COPIED;
    if constexpr (CHANNELS_LAST) {
      ptx::wait_for_phase(raw.empty(), raw.parity ^ 1);
      ptx::arrive_expect_tx(raw.full(), RAW_BYTES);
#pragma unroll
      for (int box = 0; box < TILE_CI / BOX; ++box)
        ptx::tma_load(raw.data() + box * TILE_W * BOX_ROW_BYTES, input, input_channel + box * BOX, segment.col, input_row, segment.image,
                      raw.full());
      raw.advance();
      ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
      ptx::arrive_expect_tx(ring.full(), output_bytes);
    } else {
      ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
      ptx::arrive_expect_tx(ring.full(), BOXES * ROW_BYTES * (ring.wraps() ? 2 : 1) + output_bytes);
#pragma unroll
      for (int box = 0; box < BOXES; ++box) {
        const u32 to = ring.row() + box * BOX_PITCH;
        ptx::tma_load(to, input, segment.col + box * BOX, input_row, input_channel, segment.image, ring.full());
        if (ring.wraps())
          ptx::tma_load(to + STAGES * ROW_BYTES, input, segment.col + box * BOX, input_row, input_channel, segment.image, ring.full());
      }
    }
    if (i >= 0) {
#pragma unroll
      for (int box = 0; box < OUTPUT_BOXES; ++box) {
        const u32 to = ring.output() + box * OUTPUT_BOX_BYTES;
        const int col = segment.col - PADDING_W - misalignment(sizes, row, box);
        if constexpr (CHANNELS_LAST) {
          ptx::tma_load(to, grad_output, output_channel + box * BOX, col, row, segment.image, ring.full());
        } else if constexpr (LINEAR_OUTPUT) {
          const int pixel = box * (sizes.out_height * sizes.out_width) + row * sizes.out_width + col;
          ptx::tma_load(to, grad_output, pixel, output_channel / PLANES, segment.image, ring.full());
        } else {
          ptx::tma_load(to, grad_output, col, row, output_channel, segment.image, ring.full());
        }
      }
    }
    ring.advance();
  });
}

/// Of eight pixels 0, 2, 4 and 6 are stored first, then the others, so that a warp's fragments of grad_output lie in
/// different banks.
__device__ __forceinline__ void transpose(u32 from, u32 to, bool wraps, int warp, int lane) {
#pragma unroll 4
  for (int piece = warp; piece < PIECES; piece += TRANSPOSE_WARPS) {
    const int box = piece / (TILE_W / 4), quad = piece % (TILE_W / 4);
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      words[i] = ptx::load_shared(from + (box * TILE_W + quad / 2 * 8 + quad % 2 + i * 2) * BOX_ROW_BYTES + lane * 4);
    const u32 there = to + quad / 8 * BOX_PITCH + (box * BOX + lane) * BOX_ROW_BYTES + (quad % 8 ^ lane % 8) * 16;
    ptx::store_shared<4>(there, words);
    if (wraps) ptx::store_shared<4>(there + STAGES * ROW_BYTES, words);
  }
}

/// One of TRANSPOSE_WARPS warps.
__device__ __forceinline__ void transpose_rows(Ring ring, RawRing raw, const Place& place, const GradWeightStride1Sizes& sizes, int segments, int warp, int lane) {
  for_each_row(place, sizes, segments, [&](const Segment&, int) {
    ptx::wait_for_phase(raw.full(), raw.parity);
    ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
    transpose(raw.data(), ring.row(), ring.wraps(), warp, lane);
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
      ptx::arrive(ring.full());
      ptx::arrive(raw.empty());
    }
    ring.advance();
    raw.advance();
  });
}
