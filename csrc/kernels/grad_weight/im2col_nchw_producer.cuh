// Of grad_weight/im2col_nchw.cu: the producer, one thread that issues the TMA copies, and the warps that add up
// grad_output for the bias.
#pragma once

/// The producer, one thread: loads stage after stage.
__device__ __forceinline__ void produce(Ring ring, const TensorMap& input, const TensorMap& grad_output, const Place& place,
                                        const Im2colNchwSizes& sizes, int first_stage, int stages) {
  const int input_channel = place.group * CI_GROUP + place.ci, output_channel = place.group * CO_GROUP + place.co;
  const int loaded = input_bytes(sizes), out_box = out_box_bytes(sizes);
  StagePlace at(first_stage, sizes);
#pragma unroll 1
  for (int s = 0; s < stages; ++s) {
    ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
    ptx::arrive_expect_tx(ring.full(), loaded + sizes.out_boxes * out_box);
    const int column = at.across * (sizes.cols * STRIDE_W) - sizes.left_halo;
#pragma unroll 1
    for (int block = 0; block < sizes.out_boxes; ++block)
      ptx::tma_load(ring.data() + loaded + block * out_box, grad_output, column + block * OUT_BOX_COLS, output_channel,
                    at.down * (sizes.rows * STRIDE_H) + place.tap_row_offset(), at.image, ring.full());
    const int pixel = at.down * (sizes.rows * sizes.pitch) + at.across * sizes.cols;
    u32 to = ring.data();
#pragma unroll 1
    for (int image = 0; image < sizes.images; ++image)
#pragma unroll 1
      for (int box = 0; box < sizes.run_boxes; ++box, to += BOX_BYTES)
        ptx::tma_load(to, input, pixel + box * BOX, input_channel, at.image + image, ring.full());
    ring.advance();
    at.advance(sizes);
  }
}

/// One of the warps that add up grad_output, every CI_TILES-th stage. Two lanes share channels, 16 bytes in turns.
__device__ __forceinline__ void add_bias(Ring ring, const Place& place, const Im2colNchwSizes& sizes, int warp, int lane, int stages,
                                         float* __restrict__ bias_partial) {
  constexpr int CHANNEL_STEP = BIAS_WARPS * 16, CHANNELS = ceil_div(TILE_CO, CHANNEL_STEP);
  const int boxes_end = sizes.out_boxes * OUT_BOX_COLS, stage_end = sizes.left_halo + sizes.cols * STRIDE_W;
  const int end = ceil_div(stage_end < boxes_end ? stage_end : boxes_end, 4);
  const int out_box = out_box_bytes(sizes), rows = sizes.images * sizes.rows, turn = place.ci / TILE_CI;
  // Neighbouring lanes take channels that the swizzle keeps in different banks.
  const int first = warp * 16 + lane / 16 * 8 + lane / 2 % 4 * 2 + lane / 8 % 2;
  CompensatedSum<float> sums[CHANNELS] = {};
  for (int s = 0; s < stages; ++s) {
    ptx::wait_for_phase(ring.full(), ring.parity);
    u32 from = ring.data() + input_bytes(sizes) + first * (OUT_BOX_COLS * 4);
#pragma unroll 1
    for (int row = s % CI_TILES == turn ? rows : 0; row > 0; --row, from += ROW_BYTES) {
#pragma unroll 2
      for (int quad = sizes.left_halo / 4 + lane % 2; quad < end; quad += 2) {
        const u32 block = from + quad * 4 / OUT_BOX_COLS * out_box;
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) {
          if (TILE_CO % CHANNEL_STEP && first + c * CHANNEL_STEP >= TILE_CO) break;
          // Channels CHANNEL_STEP apart have the same swizzle.
          const uint4 four = ptx::load_shared_vector(block + c * (CHANNEL_STEP * OUT_BOX_COLS * 4) + (quad % (OUT_BOX_COLS / 4) ^ swizzle_of(first)) * 16);
          sums[c].add(__uint_as_float(four.x));
          sums[c].add(__uint_as_float(four.y));
          sums[c].add(__uint_as_float(four.z));
          sums[c].add(__uint_as_float(four.w));
        }
      }
    }
    __syncwarp();
    if (lane == 0) ptx::arrive(ring.empty());
    ring.advance();
  }
  const int partial_row = (place.split * CI_TILES + turn) * STRIDE_H + place.tap_row_offset();
  float* const to = bias_partial + partial_row * (2 * OUT_CHANNELS) + place.group * CO_GROUP;
#pragma unroll
  for (int c = 0; c < CHANNELS; ++c) {
    sums[c].add_lane(1);
    const int channel = first + c * CHANNEL_STEP, co = place.co + channel;
    if (lane % 2 == 0 && channel < TILE_CO && co < CO_GROUP) {
      to[co] = sums[c].sum;
      to[OUT_CHANNELS + co] = sums[c].remainder();
    }
  }
}
