// The producers of forward/implicit_gemm_tma_nchw.cu: one thread issues the loads of boxes, all threads transpose the loaded
// chunks into planes.
#pragma once

#include "common/stages.cuh"

/// The ring of chunks in NCHW.
using NchwRing = StageRing<NCHW_STAGES, NCHW_AT, NCHW_BYTES, NCHW_BARRIERS>;

// FLAT: the plan ensures that no box lies in two images.

/// Issues the loads of one chunk after another.
struct TmaInputLoader {
  NchwRing nchw;
  ChunkIterator chunks;
  int channel;

  __device__ __forceinline__ TmaInputLoader(u32 shared, const Sizes& sizes) : nchw(shared), chunks(sizes) { set_tile(); }
  __device__ __forceinline__ void set_tile() {
    channel = chunks.work.group * CI_GROUP + chunks.work.first_chunk * CHUNK_CHANNELS;
  }
  __device__ __forceinline__ void copy(const TensorMap& input) {
    const Origin& origin = chunks.work.origin;
    ptx::arrive_expect_tx(nchw.full(), NCHW_BYTES);
    if constexpr (FLAT) {
      const int image = chunks.sizes.image_positions.quotient(origin.image);
      ptx::tma_load(nchw.data(), input, chunks.sizes.image_positions.remainder(origin.image, image), channel, 0, image, nchw.full());
    } else {
#pragma unroll
      for (int image = 0; image < TILE_N; ++image)
        ptx::tma_load(nchw.data() + image * (NCHW_BYTES / TILE_N), input, origin.col + MIN_SHIFT_W - LEFT_PAD, channel,
                      origin.row * POSITION_INPUT_ROWS + MIN_SHIFT_H, origin.image + image, nchw.full());
    }
    nchw.advance();
    channel += CHUNK_CHANNELS;
    if (chunks.next()) set_tile();
  }
};

// What one warp transposes at a time: for 16 bits 4 pieces of 8 pixels x 8 channels, as matrices of ldmatrix; for float32 a
// piece of 4 channels of a pixel for each lane. Neighbouring pieces are pixels of a row.
constexpr int PIECE_PIXELS = IS_16_BIT ? 8 : 1;
constexpr int ROW_PIECES = HALO_W / PIECE_PIXELS;
constexpr int PIECES = TILE_N * HALO_H * CHUNK_PLANES * ROW_PIECES;
constexpr int WARP_PIECES = IS_16_BIT ? 4 : 32;
constexpr int SLOTS = ceil_div(PIECES, WARP_PIECES * PRODUCER_WARPS);
constexpr int PLANE_CHANNELS = 4 * CHANNELS_PER_WORD;

struct Transposer {
  u32 from[SLOTS];  // offsets in bytes in a chunk of NCHW
  u32 to[SLOTS];    // offsets in bytes in a stage of planes

  __device__ __forceinline__ Transposer() {
    const int lane = threadIdx.x % 32, warp = (threadIdx.x - THREADS) / 32;
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      // Behind the last piece, that piece is transposed again: the same bytes are written to the same place.
      const int piece = min_of(PIECES - 1, (s * PRODUCER_WARPS + warp) * WARP_PIECES + (IS_16_BIT ? lane / 8 : lane));
      const int w = piece % ROW_PIECES * PIECE_PIXELS, plane = piece / ROW_PIECES % CHUNK_PLANES;
      const int row = piece / (ROW_PIECES * CHUNK_PLANES), image = row / HALO_H, h = row % HALO_H;
      // 16 bits: lane 8m + r gives the address of channel r of matrix m for ldmatrix, and of pixel r for stmatrix.
      const int channel = plane * PLANE_CHANNELS + (IS_16_BIT ? lane % 8 : 0), pixel = w + (IS_16_BIT ? lane % 8 : 0);
      from[s] = ((row * CHUNK_CHANNELS + channel) * HALO_W + w) * ITEM;
      to[s] = (plane * PLANE_PITCH + image * IMAGE_PITCH + h * ROW_PITCH + pixel) * 16;
    }
  }

  __device__ __forceinline__ void operator()(u32 nchw, u32 stage) const {
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      if constexpr (IS_16_BIT) {
        u32 m[4];
        ptx::load_matrices_transposed(m, nchw + from[s]);
        ptx::store_matrices(stage + to[s], m);
      } else {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = ptx::load_shared(nchw + from[s] + i * (HALO_W * ITEM));
        ptx::store_shared<4>(stage + to[s], words);
      }
    }
  }
};

/// A producer thread. All of them transpose; the first one issues the loads, too.
struct Producer {
  u32 shared;
  Ring ring;
  NchwRing nchw;
  ChunkIterator chunks;
  WeightLoader weights;

  __device__ __forceinline__ Producer(u32 shared, const u32* packed, const Sizes& sizes)
      : shared(shared), ring(shared), nchw(shared), chunks(sizes), weights(packed) {
    weights.set_tile(chunks.work);
  }

  __device__ __forceinline__ void run(const TensorMap& input) {
    const bool issues = threadIdx.x == THREADS;
    const Transposer transpose;
    TmaInputLoader loader(shared, chunks.sizes);
    if (issues) {
#pragma unroll 1
      for (int i = 0; i < NCHW_STAGES && !loader.chunks.done(); ++i) loader.copy(input);
    }
    ptx::wait_for_previous_launch();
#pragma unroll 1
    for (bool first = true; !chunks.done(); first = false) {
      // The stage of the chunk before this one is loaded with the chunk NCHW_STAGES - 1 after this one.
      if (issues && !first && !loader.chunks.done()) {
        ptx::wait_for_phase(loader.nchw.empty(), loader.nchw.parity ^ 1);
        loader.copy(input);
      }
      __syncwarp();
      ptx::wait_for_phase(nchw.full(), nchw.parity);
      ptx::wait_for_phase(ring.empty(), ring.parity ^ 1);
      if (issues) {
        ptx::arrive_expect_tx(ring.full(), weights.bytes);
        weights.copy(ring.weights(), ring.full());
      }
      __syncwarp();
      transpose(nchw.data(), ring.input());
      ptx::fence_proxy_async();
      // Each thread arrives for itself, which is as fast as one thread for its warp, and which racecheck understands
      // (benchmarks/racecheck.cu).
      ptx::arrive(ring.full());
      ptx::arrive(nchw.empty());
      ring.advance();
      nchw.advance();
      weights.advance();
      if (chunks.next()) weights.set_tile(chunks.work);
    }
  }
};
