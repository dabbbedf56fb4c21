// The warps of grad_weight/stride1.cu that bring rows: one thread asks for boxes; in channels_last the other warps turn the
// input's, from one place in shared memory to another.
#pragma once

constexpr int FILL_WARPS = 4, TURN_WARPS = FILL_WARPS - 1;
/// Four pixels of 32 channels are what a warp turns at a time.
constexpr int PIECES = TILE_CI / BOX * (STRIP / 4);

/// visit(column, i) for each row that comes, in order: the i-th of grad_output; i < 0 before the first.
template <class Visit>
__device__ __forceinline__ void each_row(const Place& place, const GradWeightStride1Sizes& sizes, int columns, const Visit& visit) {
  for (int c = place.slice; c < columns; c += sizes.splits) {
    const Column column(sizes, c);
#pragma unroll 1
    for (int i = -LAG; i < column.rows; ++i) visit(column, i);
  }
}

/// One thread. A row of grad_output comes with the row of the input that its first row of taps reads.
__device__ __forceinline__ void ask(Ring ring, RawRing raw, const TensorMap& input, const TensorMap& grad_output, const Place& place,
                                    const GradWeightStride1Sizes& sizes, int columns) {
  const int input_channel = place.group * CI_GROUP + place.ci, output_channel = place.group * CO_GROUP + place.first_channel();
  each_row(place, sizes, columns, [&](const Column& column, int i) {
    const int row = column.begin + i, input_row = row + PADDING_H - place.tap_row;
    const int output_bytes = i < 0 ? 0 : OUTPUT_BOXES * OUTPUT_COPIED;
    if constexpr (CHANNELS_LAST) {
      ptx::wait_for_phase(raw.empty(), raw.parity ^ 1);
      ptx::arrive_expect_tx(raw.full(), RAW_BYTES);
#pragma unroll
      for (int box = 0; box < TILE_CI / BOX; ++box)
        ptx::tma_load(raw.data() + box * STRIP * BOX_ROW_BYTES, input, input_channel + box * BOX, column.strip, input_row, column.image,
                      raw.full());
      raw.advance();
      ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
      ptx::arrive_expect_tx(ring.full(), output_bytes);
    } else {
      ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
      ptx::arrive_expect_tx(ring.full(), BOXES * ROW_BYTES * (ring.twice() ? 2 : 1) + output_bytes);
#pragma unroll
      for (int box = 0; box < BOXES; ++box) {
        const u32 to = ring.row() + box * BOX_PITCH;
        ptx::tma_load(to, input, column.strip + box * BOX, input_row, input_channel, column.image, ring.full());
        if (ring.twice())
          ptx::tma_load(to + SLOTS * ROW_BYTES, input, column.strip + box * BOX, input_row, input_channel, column.image, ring.full());
      }
    }
    if (i >= 0) {
#pragma unroll
      for (int box = 0; box < OUTPUT_BOXES; ++box) {
        const u32 to = ring.output() + box * OUTPUT_BOX_BYTES;
        const int col = column.strip - PADDING_W - lead(sizes, row, box);
        if constexpr (CHANNELS_LAST) {
          ptx::tma_load(to, grad_output, output_channel + box * BOX, col, row, column.image, ring.full());
        } else if constexpr (LINES) {
          const int pixel = box * (sizes.out_height * sizes.out_width) + row * sizes.out_width + col;
          ptx::tma_load(to, grad_output, pixel, output_channel / PLANES, column.image, ring.full());
        } else {
          ptx::tma_load(to, grad_output, col, row, output_channel, column.image, ring.full());
        }
      }
    }
    ring.advance();
  });
}

/// Of eight pixels 0, 2, 4 and 6 come first, then the others: so a warp's words of grad_output lie in different banks.
__device__ __forceinline__ void turn(u32 from, u32 to, bool twice, int warp, int lane) {
#pragma unroll 4
  for (int piece = warp; piece < PIECES; piece += TURN_WARPS) {
    const int box = piece / (STRIP / 4), part = piece % (STRIP / 4);
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      words[i] = ptx::load_shared(from + (box * STRIP + part / 2 * 8 + part % 2 + i * 2) * BOX_ROW_BYTES + lane * 4);
    const u32 there = to + part / 8 * BOX_PITCH + (box * BOX + lane) * BOX_ROW_BYTES + (part % 8 ^ lane % 8) * 16;
    ptx::store_shared<4>(there, words);
    if (twice) ptx::store_shared<4>(there + SLOTS * ROW_BYTES, words);
  }
}

/// One of TURN_WARPS warps.
__device__ __forceinline__ void turn_rows(Ring ring, RawRing raw, const Place& place, const GradWeightStride1Sizes& sizes, int columns, int warp, int lane) {
  each_row(place, sizes, columns, [&](const Column&, int) {
    ptx::wait_for_phase(raw.full(), raw.parity);
    ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
    turn(raw.data(), ring.row(), ring.twice(), warp, lane);
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
