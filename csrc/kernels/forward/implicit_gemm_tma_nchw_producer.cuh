// The threads of forward/implicit_gemm_tma_nchw.cu that bring the input: one asks for boxes, all turn what came into planes.
#pragma once

#include "common/stages.cuh"

/// Of raw chunks.
using RawRing = StageRing<RAW_STAGES, RAW_AT, RAW_BYTES, RAW_BARRIERS>;

// FLAT: the plan sees to it that no box lies in two images.

/// Asks for one chunk after another.
struct BoxFill {
  RawRing raw;
  Walk walk;
  int channel;

  __device__ __forceinline__ BoxFill(u32 shared, const Sizes& sizes) : raw(shared), walk(sizes) { aim(); }
  __device__ __forceinline__ void aim() {
    channel = walk.work.group * CI_GROUP + walk.work.first_chunk * CHUNK_CHANNELS;
  }
  __device__ __forceinline__ void copy(const TensorMap& input) {
    const Origin& origin = walk.work.origin;
    ptx::arrive_expect_tx(raw.full(), RAW_BYTES);
    if constexpr (FLAT) {
      const int image = walk.sizes.image_positions.quotient(origin.image);
      ptx::tma_load(raw.data(), input, walk.sizes.image_positions.remainder(origin.image, image), channel, 0, image, raw.full());
    } else {
#pragma unroll
      for (int image = 0; image < TILE_N; ++image)
        ptx::tma_load(raw.data() + image * (RAW_BYTES / TILE_N), input, origin.col + MIN_SHIFT_W - LEAD, channel,
                      origin.row * CELL_INPUT_ROWS + MIN_SHIFT_H, origin.image + image, raw.full());
    }
    raw.advance();
    channel += CHUNK_CHANNELS;
    if (walk.next()) aim();
  }
};

// What one warp turns at a time. 16 bits: 4 pieces of 8 pixels x 8 channels, as matrices. float32: for each lane, the 4
// channels of a pixel. Neighbours are pixels of a row.
constexpr int TURN_PIXELS = IS_16_BIT ? 8 : 1;
constexpr int ROW_PIECES = HALO_W / TURN_PIXELS;
constexpr int PIECES = TILE_N * HALO_H * CHUNK_PLANES * ROW_PIECES;
constexpr int WARP_PIECES = IS_16_BIT ? 4 : 32;
constexpr int SLOTS = ceil_div(PIECES, WARP_PIECES * FILL_WARPS);
constexpr int PLANE_CHANNELS = 4 * CHANNELS_PER_WORD;

struct Turn {
  u32 from[SLOTS];  // bytes of a raw chunk
  u32 to[SLOTS];    // bytes of a stage

  __device__ __forceinline__ Turn() {
    const int lane = threadIdx.x % 32, warp = (threadIdx.x - THREADS) / 32;
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      // Past the last piece that one is turned again: the same bytes to the same place.
      const int piece = min_of(PIECES - 1, (s * FILL_WARPS + warp) * WARP_PIECES + (IS_16_BIT ? lane / 8 : lane));
      const int w = piece % ROW_PIECES * TURN_PIXELS, plane = piece / ROW_PIECES % CHUNK_PLANES;
      const int row = piece / (ROW_PIECES * CHUNK_PLANES), image = row / HALO_H, h = row % HALO_H;
      // 16 bits: lane 8m + r names channel r of matrix m, then pixel r.
      const int channel = plane * PLANE_CHANNELS + (IS_16_BIT ? lane % 8 : 0), pixel = w + (IS_16_BIT ? lane % 8 : 0);
      from[s] = ((row * CHUNK_CHANNELS + channel) * HALO_W + w) * ITEM;
      to[s] = (plane * PLANE_PITCH + image * IMAGE_PITCH + h * ROW_PITCH + pixel) * 16;
    }
  }

  __device__ __forceinline__ void operator()(u32 raw, u32 stage) const {
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      if constexpr (IS_16_BIT) {
        u32 m[4];
        ptx::load_matrices_transposed(m, raw + from[s]);
        ptx::store_matrices(stage + to[s], m);
      } else {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = ptx::load_shared(raw + from[s] + i * (HALO_W * ITEM));
        ptx::store_shared<4>(stage + to[s], words);
      }
    }
  }
};

/// A thread that turns; the first one asks, too.
struct Filler {
  u32 shared;
  Ring ring;
  RawRing raw;
  Walk walk;
  WeightFill weights;

  __device__ __forceinline__ Filler(u32 shared, const u32* packed, const Sizes& sizes)
      : shared(shared), ring(shared), raw(shared), walk(sizes), weights(packed) {
    weights.aim(walk.work);
  }

  __device__ __forceinline__ void run(const TensorMap& input) {
    const bool asks = threadIdx.x == THREADS;
    const Turn turn;
    BoxFill boxes(shared, walk.sizes);
    if (asks) {
#pragma unroll 1
      for (int i = 0; i < RAW_STAGES && !boxes.walk.done(); ++i) boxes.copy(input);
    }
    ptx::wait_for_previous_launch();
#pragma unroll 1
    for (bool first = true; !walk.done(); first = false) {
      // Where the chunk before this one lay comes the one RAW_STAGES - 1 after this one.
      if (asks && !first && !boxes.walk.done()) {
        ptx::wait_for_phase(boxes.raw.empty(), boxes.raw.parity ^ 1);
        boxes.copy(input);
      }
      __syncwarp();
      ptx::wait_for_phase(raw.full(), raw.parity);
      ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
      if (asks) {
        ptx::arrive_expect_tx(ring.full(), weights.bytes);
        weights.copy(ring.weights(), ring.full());
      }
      __syncwarp();
      turn(raw.data(), ring.input());
      ptx::fence_proxy_async();
      // Each thread for itself: as fast as one for its warp, and racecheck follows it (benchmarks/racecheck.cu).
      ptx::arrive(ring.full());
      ptx::arrive(raw.empty());
      ring.advance();
      raw.advance();
      weights.advance();
      if (walk.next()) weights.aim(walk.work);
    }
  }
};
