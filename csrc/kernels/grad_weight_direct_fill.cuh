// Of grad_weight_direct.cu: the warps that bring a stage, and those that add up grad_output for the bias.
#pragma once

/// Where one thread is that asks for stage after stage.
struct Walk {
  int image, down, across;

  __device__ __forceinline__ explicit Walk(int stage)
      : image(stage / STAGES_OF_IMAGES * IMAGES), down(stage % STAGES_OF_IMAGES / STAGES_ACROSS), across(stage % STAGES_ACROSS) {}
  __device__ __forceinline__ void advance() {
    if (++across < STAGES_ACROSS) return;
    across = 0;
    if (++down == STAGES_DOWN) down = 0, image += IMAGES;
  }
};

__device__ __forceinline__ void ask_for_grad_output(const Ring& ring, const TensorMap& map, const Place& place, const Walk& at) {
  const int channel = place.group * CO_GROUP + place.co, col = at.across * (COLS * STRIDE_W) - LEFT;
  const int row = at.down * (ROWS * STRIDE_H) + place.offset();
#pragma unroll
  for (int block = 0; block < OUT_BLOCKS; ++block) {
    const u32 to = ring.data() + INPUT_BYTES + block * BLOCK_BYTES;
    if constexpr (CHANNELS_LAST) {
      ptx::copy_box(to, map, channel + block * 32, col, row, at.image, ring.full());
    } else {
      ptx::copy_box(to, map, col + block * OUT_BLOCK, channel, row, at.image, ring.full());
    }
  }
}

/// One thread: fill stage after stage.
__device__ __forceinline__ void fill(Ring ring, RawRing raw, const TensorMap& input, const TensorMap& grad_output, const Place& place,
                                     int first_stage, int stages) {
  const int channel = place.group * CI_GROUP + place.ci;
  Walk at(first_stage);
  for (int s = 0; s < stages; ++s) {
    if constexpr (CHANNELS_LAST) {
      ptx::wait_for_phase(raw.empty(), raw.parity ^ 1);
      ptx::arrive_expecting(raw.full(), RAW_BYTES);
#pragma unroll
      for (int block = 0; block < TILE_COLS / 32; ++block)
        ptx::copy_box(raw.data() + block * RAW_BLOCK_BYTES, input, channel + block * 32, at.across * COLS, at.down * ROWS, at.image,
                      raw.full());
      raw.advance();
    }
    ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
    ptx::arrive_expecting(ring.full(), OUTPUT_BYTES + (CHANNELS_LAST ? 0 : INPUT_BYTES));
    ask_for_grad_output(ring, grad_output, place, at);
    if constexpr (!CHANNELS_LAST) {
      const int pixel = at.down * (ROWS * LINE) + at.across * COLS;
#pragma unroll
      for (int box = 0; box < BOXES; ++box)
        ptx::copy_box(ring.data() + box * BOX_BYTES, input, pixel + box % BOXES_OF_IMAGE * BOX, channel,
                      at.image + box / BOXES_OF_IMAGE, ring.full());
    }
    ring.advance();
    at.advance();
  }
}

/// One of `turners` warps: the input of stage after stage, from [pixel][channel] to [channel][pixel]. A lane turns four
/// pixels of a channel at a time.
__device__ __forceinline__ void turn(Ring ring, RawRing raw, int turner, int turners, int lane, int stages) {
  constexpr int QUADS = STAGE_PIXELS / 4, CHANNEL_BLOCKS = TILE_COLS / 32;
  for (int s = 0; s < stages; ++s) {
    ptx::wait_for_phase(raw.full(), raw.parity);
    ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
#pragma unroll 4
    for (int i = turner; i < QUADS * CHANNEL_BLOCKS; i += turners) {
      const int pixel = i / CHANNEL_BLOCKS * 4, block = i % CHANNEL_BLOCKS, row = block * 32 + lane;
      const u32 from = raw.data() + block * RAW_BLOCK_BYTES + lane % 4 * 4;
      u32 words[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) words[k] = ptx::load_shared(from + (pixel + k) * 128 + (lane / 4 ^ (pixel + k) % 8) * 16);
      const int sixteen = pixel % BOX / 4 ^ ((row * BOX * 4 >> 7) & (BOX / 4 - 1));
      ptx::store_shared<4>(ring.data() + pixel / BOX * BOX_BYTES + row * (BOX * 4) + sixteen * 16, words);
    }
    ptx::publish_to_multiplies();
    __syncwarp();
    if (lane == 0) {
      ptx::arrive(ring.full());
      ptx::arrive(raw.empty());
    }
    ring.advance();
    raw.advance();
  }
}

/// Columns that a stage counts, from LEFT on.
constexpr int COUNTED_END = LEFT + COLS * STRIDE_W < COLUMNS ? LEFT + COLS * STRIDE_W : COLUMNS;

/// In channels_last a lane has a channel of every other block.
template <int CHANNELS>
__device__ __forceinline__ void add_row_of_pixels(CompensatedSum<float> (&sums)[CHANNELS], u32 from, int warp, int lane) {
#pragma unroll 4
  for (int x = LEFT; x < COUNTED_END; ++x)
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
      const int block = warp + c * BIAS_WARPS;
      if (OUT_BLOCKS % BIAS_WARPS && block >= OUT_BLOCKS) break;
      const u32 word = ptx::load_shared(from + block * BLOCK_BYTES + x * 128 + (lane / 4 ^ x % 8) * 16 + lane % 4 * 4);
      sums[c].add(__uint_as_float(word));
    }
}

/// In NCHW two lanes share channels, 16 bytes in turn.
template <int CHANNELS>
__device__ __forceinline__ void add_rows_of_channels(CompensatedSum<float> (&sums)[CHANNELS], u32 from, int first, int lane) {
  constexpr int APART = BIAS_WARPS * 16;
#pragma unroll 2
  for (int quad = LEFT / 4 + lane % 2; quad < ceil_div(COUNTED_END, 4); quad += 2) {
    const u32 block = from + first * (OUT_BLOCK * 4) + quad * 4 / OUT_BLOCK * BLOCK_BYTES;
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

/// One of the warps that add up grad_output, from stage after stage.
__device__ __forceinline__ void add_bias(Ring ring, const Place& place, int warp, int lane, int stages, float* __restrict__ bias_partial) {
  constexpr int APART = BIAS_WARPS * (CHANNELS_LAST ? 32 : 16), CHANNELS = ceil_div(CHUNK, APART);
  // In NCHW neighbours in an order in which the swizzle keeps them apart.
  const int first = CHANNELS_LAST ? warp * 32 + lane : warp * 16 + lane / 16 * 8 + lane / 2 % 4 * 2 + lane / 8 % 2;
  CompensatedSum<float> sums[CHANNELS] = {};
  for (int s = 0; s < stages; ++s) {
    ptx::wait_for_phase(ring.full(), ring.parity);
#pragma unroll 1
    for (int row = 0; row < IMAGES * ROWS; ++row) {
      const u32 from = ring.data() + INPUT_BYTES + row * ROW_BYTES;
      if constexpr (CHANNELS_LAST) {
        add_row_of_pixels(sums, from, warp, lane);
      } else {
        add_rows_of_channels(sums, from, first, lane);
      }
    }
    __syncwarp();
    if (lane == 0) ptx::arrive(ring.empty());
    ring.advance();
  }
  float* const to = bias_partial + (place.slice * STRIDE_H + place.offset()) * (2 * OUT_CHANNELS) + place.group * CO_GROUP;
#pragma unroll
  for (int c = 0; c < CHANNELS; ++c) {
    if constexpr (!CHANNELS_LAST) sums[c].add_lane(1);
    const int channel = first + c * APART, co = place.co + channel;
    if ((CHANNELS_LAST || lane % 2 == 0) && channel < CHUNK && co < CO_GROUP) {
      to[co] = sums[c].sum;
      to[OUT_CHANNELS + co] = sums[c].remainder();
    }
  }
}
