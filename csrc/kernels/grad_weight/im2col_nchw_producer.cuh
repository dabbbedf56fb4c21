// Of grad_weight/im2col_nchw.cu: the thread that asks for boxes, and the warps that add up grad_output for the bias.
#pragma once

/// One thread: fill stage after stage.
__device__ __forceinline__ void fill(Ring ring, const TensorMap& input, const TensorMap& grad_output, const Place& place,
                                     const Im2colNchwSizes& sizes, int first_stage, int stages) {
  const int input_channel = place.group * CI_GROUP + place.ci, output_channel = place.group * CO_GROUP + place.co;
  const int of_images = sizes.down * sizes.across;
  int image = first_stage / of_images * IMAGES;
  int down = first_stage % of_images / sizes.across, across = first_stage % sizes.across;
  for (int s = 0; s < stages; ++s) {
    ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
    ptx::arrive_expect_tx(ring.full(), INPUT_BYTES + OUTPUT_BYTES);
#pragma unroll
    for (int block = 0; block < OUT_BLOCKS; ++block)
      ptx::tma_load(ring.data() + INPUT_BYTES + block * BLOCK_BYTES, grad_output,
                    across * (COLS * STRIDE_W) - LEFT + block * OUT_BLOCK, output_channel,
                    down * (ROWS * STRIDE_H) + place.offset(), image, ring.full());
    // A row's boxes, or where rows lie one after another those of all.
    const int row_step = COLS % BOX == 0 ? sizes.line - COLS : 0;
    const int pixel = down * (ROWS * sizes.line) + across * COLS;
#pragma unroll
    for (int box = 0; box < IMAGES * BOXES_OF_IMAGE; ++box)
      ptx::tma_load(ring.data() + box * BOX_BYTES, input, pixel + box % BOXES_OF_IMAGE * BOX + box % BOXES_OF_IMAGE * BOX / COLS * row_step, input_channel,
                    image + box / BOXES_OF_IMAGE, ring.full());
    ring.advance();
    if (++across == sizes.across) {
      across = 0;
      if (++down == sizes.down) down = 0, image += IMAGES;
    }
  }
}

/// One of the warps that add up grad_output, from stage after stage. Two lanes share channels, 16 bytes in turn.
__device__ __forceinline__ void add_bias(Ring ring, const Place& place, int warp, int lane, int stages, float* __restrict__ bias_partial) {
  constexpr int APART = BIAS_WARPS * 16, CHANNELS = ceil_div(CHUNK, APART);
  constexpr int END = LEFT + COLS * STRIDE_W < OUT_BLOCKS * OUT_BLOCK ? LEFT + COLS * STRIDE_W : OUT_BLOCKS * OUT_BLOCK;
  // Neighbours in an order in which the swizzle keeps them apart.
  const int first = warp * 16 + lane / 16 * 8 + lane / 2 % 4 * 2 + lane / 8 % 2;
  CompensatedSum<float> sums[CHANNELS] = {};
  for (int s = 0; s < stages; ++s) {
    ptx::wait_for_phase(ring.full(), ring.parity);
#pragma unroll 1
    for (int row = 0; row < IMAGES * ROWS; ++row) {
      const u32 from = ring.data() + INPUT_BYTES + row * ROW_BYTES + first * (OUT_BLOCK * 4);
#pragma unroll 2
      for (int quad = LEFT / 4 + lane % 2; quad < ceil_div(END, 4); quad += 2) {
        const u32 block = from + quad * 4 / OUT_BLOCK * BLOCK_BYTES;
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) {
          if (CHUNK % APART && first + c * APART >= CHUNK) break;
          // Channels APART apart are flipped alike.
          const uint4 four = ptx::load_shared_vector(block + c * (APART * OUT_BLOCK * 4) + (quad % (OUT_BLOCK / 4) ^ flips(first)) * 16);
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
  float* const to = bias_partial + (place.slice * STRIDE_H + place.offset()) * (2 * OUT_CHANNELS) + place.group * CO_GROUP;
#pragma unroll
  for (int c = 0; c < CHANNELS; ++c) {
    sums[c].add_lane(1);
    const int channel = first + c * APART, co = place.co + channel;
    if (lane % 2 == 0 && channel < CHUNK && co < CO_GROUP) {
      to[co] = sums[c].sum;
      to[OUT_CHANNELS + co] = sums[c].remainder();
    }
  }
}
