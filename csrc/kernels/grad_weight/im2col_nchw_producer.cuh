// Of grad_weight/im2col_nchw.cu: the producer, one thread that issues the TMA copies, and the warps that add up
// grad_output for the bias.
#pragma once

/// The producer, one thread: loads stage after stage.
__device__ __forceinline__ void produce(Ring ring, const TensorMap& input, const TensorMap& grad_output, const Place& place,
                                     const Im2colNchwSizes& sizes, int first_stage, int stages) {
  const int input_channel = place.group * CI_GROUP + place.ci, output_channel = place.group * CO_GROUP + place.co;
  const int image_stages = sizes.down * sizes.across;
  int image = first_stage / image_stages * IMAGES;
  int down = first_stage % image_stages / sizes.across, across = first_stage % sizes.across;
  for (int s = 0; s < stages; ++s) {
    ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
    ptx::arrive_expect_tx(ring.full(), INPUT_BYTES + OUTPUT_BYTES);
#pragma unroll
    for (int block = 0; block < OUT_BOXES; ++block)
      ptx::tma_load(ring.data() + INPUT_BYTES + block * OUT_BOX_BYTES, grad_output,
                    across * (COLS * STRIDE_W) - LEFT_HALO + block * OUT_BOX_COLS, output_channel,
                    down * (ROWS * STRIDE_H) + place.tap_row_offset(), image, ring.full());
    // The boxes of each row, or of all rows where they are contiguous.
    const int row_step = COLS % BOX == 0 ? sizes.line - COLS : 0;
    const int pixel = down * (ROWS * sizes.line) + across * COLS;
#pragma unroll
    for (int box = 0; box < IMAGES * IMAGE_BOXES; ++box)
      ptx::tma_load(ring.data() + box * BOX_BYTES, input, pixel + box % IMAGE_BOXES * BOX + box % IMAGE_BOXES * BOX / COLS * row_step, input_channel,
                    image + box / IMAGE_BOXES, ring.full());
    ring.advance();
    if (++across == sizes.across) {
      across = 0;
      if (++down == sizes.down) down = 0, image += IMAGES;
    }
  }
}

/// One of the warps that add up grad_output, stage by stage. Two lanes share channels, 16 bytes in turns.
__device__ __forceinline__ void add_bias(Ring ring, const Place& place, int warp, int lane, int stages, float* __restrict__ bias_partial) {
  constexpr int CHANNEL_STEP = BIAS_WARPS * 16, CHANNELS = ceil_div(TILE_CO, CHANNEL_STEP);
  constexpr int END = LEFT_HALO + COLS * STRIDE_W < OUT_BOXES * OUT_BOX_COLS ? LEFT_HALO + COLS * STRIDE_W : OUT_BOXES * OUT_BOX_COLS;
  // Neighbouring lanes take channels that the swizzle keeps in different banks.
  const int first = warp * 16 + lane / 16 * 8 + lane / 2 % 4 * 2 + lane / 8 % 2;
  CompensatedSum<float> sums[CHANNELS] = {};
  for (int s = 0; s < stages; ++s) {
    ptx::wait_for_phase(ring.full(), ring.parity);
#pragma unroll 1
    for (int row = 0; row < IMAGES * ROWS; ++row) {
      const u32 from = ring.data() + INPUT_BYTES + row * ROW_BYTES + first * (OUT_BOX_COLS * 4);
#pragma unroll 2
      for (int quad = LEFT_HALO / 4 + lane % 2; quad < ceil_div(END, 4); quad += 2) {
        const u32 block = from + quad * 4 / OUT_BOX_COLS * OUT_BOX_BYTES;
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
  float* const to = bias_partial + (place.split * STRIDE_H + place.tap_row_offset()) * (2 * OUT_CHANNELS) + place.group * CO_GROUP;
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
