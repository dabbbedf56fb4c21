// Of grad_weight/im2col_nhwc.cu: the producer, one thread that issues the TMA copies, and the warps that transpose the
// input's boxes.
#pragma once

/// The producer, one thread: loads stage after stage.
__device__ __forceinline__ void produce(Ring ring, const TensorMap& input, const TensorMap& grad_output, const Place& place,
                                        const Im2colNhwcSizes& sizes) {
  const int input_channel = place.group * CI_GROUP + place.ci, output_channel = place.group * CO_GROUP + place.co;
  const int first = sizes.tiles.first_tile(place.split), stages = sizes.tiles.tiles_of(place.split);
  const int copied = INPUT_BYTES + OUTPUT_BOXES * copied_bytes(sizes), box_bytes = output_box_bytes(sizes);
  for (int s = 0; s < stages; ++s) {
    const PixelPlace at = sizes.first_pixel(first + s);
    ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
    ptx::arrive_expect_tx(ring.full(), copied);
#pragma unroll
    for (int box = 0; box < INPUT_BOXES; ++box)
      ptx::tma_load(ring.data() + box * INPUT_BOX_BYTES, input, input_channel + box * BOX_CHANNELS, at.col, at.row, at.image, ring.full());
#pragma unroll
    for (int i = 0; i < TAP_ROWS; ++i)
#pragma unroll
      for (int j = 0; j < TAP_COLS; ++j) {
        if (first_tap_of_box(j) != j) continue;
#pragma unroll
        for (int c = 0; c < CO_BOXES; ++c)
          ptx::tma_load(ring.data() + INPUT_BYTES + (tap_boxes(i, j) + c) * box_bytes, grad_output, output_channel + c * BOX_CHANNELS,
                        at.col * STRIDE_W + place.col_offset(j), at.row * STRIDE_H + place.row_offset(i), at.image, ring.full());
      }
    ring.advance();
  }
}

/// One of the warps that transpose the input's boxes in place, from [pixel][channel] to [channel][k]: a lane takes four
/// channels of the four pixels that are 16 bytes of k, twice.
__device__ __forceinline__ void transpose(Ring ring, int warp, int lane, int stages) {
  const int piece = lane % 8, quad = lane / 8;
  u32 from[4], to[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const int pixel = pixel_of(piece / 2, piece % 2, t), channel = quad * 4 + t;
    from[t] = pixel * ROW_BYTES + (quad ^ (pixel & 7)) * 16;
    to[t] = channel * ROW_BYTES + (piece ^ (channel & 7)) * 16;
  }
  for (int s = 0; s < stages; ++s) {
    ptx::wait_for_phase(ring.full(), ring.parity);
#pragma unroll
    for (int box = 0; box < ceil_div(INPUT_BOXES, TRANSPOSE_WARPS); ++box) {
      const int mine = box * TRANSPOSE_WARPS + warp;
      if (INPUT_BOXES % TRANSPOSE_WARPS && mine >= INPUT_BOXES) break;
      const u32 at = ring.data() + mine * INPUT_BOX_BYTES;
      u32 words[2][4][4];
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int t = 0; t < 4; ++t) ptx::load_shared_bytes<16>(words[half][t], at + (from[t] ^ half * 64));
      __syncwarp();
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const u32 four[4] = {words[half][0][c], words[half][1][c], words[half][2][c], words[half][3][c]};
          ptx::store_shared<4>(at + to[c] + half * 16 * ROW_BYTES, four);
        }
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) ptx::arrive(ring.transposed());
    ring.advance();
  }
}
