// Of grad_weight/pixel_rows.cu: the ring of stages, the multiplies, and where the sums go. Included where STAGES, BOX
// and the constants of grad_weight/pixel_rows_layout.cuh are known.
//
// A stage is 32 pixels in boxes of BOX: [box][row][BOX pixels] of the rows, then of the columns, with TMA's swizzle
// (common/tma.cuh).
#pragma once

using ptx::u32;

constexpr int STAGE_PIXELS = 32;
constexpr int BOXES = STAGE_PIXELS / BOX;
constexpr int BOX_ROW_BYTES = BOX * 4;
constexpr int ROWS_BYTES = TILE_ROWS * BOX_ROW_BYTES, COLS_BYTES = TILE_COLS * BOX_ROW_BYTES;  // of one box
constexpr int STAGE_BYTES = BOXES * (ROWS_BYTES + COLS_BYTES);
constexpr int EIGHT_ROWS = 8 * BOX_ROW_BYTES;
constexpr int CONSUMER_WARPS = 8;
static_assert(STAGE_BYTES % 1024 == 0 && ROWS_BYTES * BOXES % 1024 == 0);

struct Ring {
  u32 base;
  int stage = 0;
  u32 parity = 0;

  __device__ __forceinline__ explicit Ring(u32 base) : base(base) {}
  __device__ __forceinline__ u32 rows() const { return base + stage * STAGE_BYTES; }
  __device__ __forceinline__ u32 cols() const { return rows() + BOXES * ROWS_BYTES; }
  __device__ __forceinline__ u32 full() const { return base + STAGES * STAGE_BYTES + stage * 8; }
  __device__ __forceinline__ u32 empty() const { return full() + STAGES * 8; }
  __device__ __forceinline__ u32 empty_before() const { return stage ? empty() - 8 : empty() + (STAGES - 1) * 8; }
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/// The consumer: one warpgroup's multiplies.
__device__ __forceinline__ void multiply_stages(Ring ring, float (&sums)[TILE_COLS / 2], int warpgroup, int stages, int lane) {
#pragma unroll
  for (float& sum : sums) sum = 0.f;
  for (int s = 0; s < stages; ++s) {
    ptx::wait_for_phase(ring.full(), ring.parity);
    const ptx::u64 rows = ptx::swizzled_descriptor<BOX_ROW_BYTES>(ring.rows() + warpgroup * 64 * BOX_ROW_BYTES, 16, EIGHT_ROWS);
    const ptx::u64 cols = ptx::swizzled_descriptor<BOX_ROW_BYTES>(ring.cols(), 16, EIGHT_ROWS);
    ptx::fence_wgmma();
#pragma unroll
    for (int box = 0; box < BOXES; ++box)
#pragma unroll
      for (int k = 0; k < BOX / 8; ++k)
        ptx::wgmma<ptx::TF32, TILE_COLS>(sums, rows + (box * ROWS_BYTES + k * 32) / 16, cols + (box * COLS_BYTES + k * 32) / 16);
    ptx::commit_wgmma();
    // This warp has multiplied the stage before.
    ptx::wait_wgmma<1>();
    if (s > 0) {
      if constexpr (MULTICAST == NONE) {
        if (lane == 0) ptx::arrive(ring.empty_before());
      } else {
        if (lane < CLUSTER) ptx::arrive_in_cluster(ring.empty_before(), lane);
      }
    }
    ring.advance();
  }
  ptx::wait_wgmma<0>();
}

/// Offset of an entry of the gradient; -1 where a tile reaches beyond it.
__device__ __forceinline__ long long gradient_offset(const Place& place, int in, int out) {
  const int chunk = place.first_chunk + out / CHUNK, tap = chunk / CHANNEL_CHUNKS;
  const int ci = place.ci + in, co = chunk % CHANNEL_CHUNKS * CHUNK + out % CHUNK;
  if (ci >= CI_GROUP || co >= CO_GROUP || tap >= TAPS) return -1;
  return (static_cast<long long>(place.group * CI_GROUP + ci) * TAPS + tap) * CO_GROUP + co;
}

__device__ __forceinline__ void store(const float (&sums)[TILE_COLS / 2], const Place& place, int first_row, int lane, float* gradient) {
  gradient += static_cast<long long>(place.split) * IN_CHANNELS * TAPS * CO_GROUP;
#pragma unroll
  for (int j = 0; j < TILE_COLS / 8; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + lane / 4 + half * 8, col = j * 8 + lane % 4 * 2;
      const float first = sums[j * 4 + half * 2], second = sums[j * 4 + half * 2 + 1];
      if constexpr (!SWAPPED && CO_GROUP % 2 == 0) {
        const long long at = gradient_offset(place, row, col);
        if (at >= 0) *reinterpret_cast<float2*>(gradient + at) = make_float2(first, second);
      } else {
        const long long at = SWAPPED ? gradient_offset(place, col, row) : gradient_offset(place, row, col);
        const long long next = SWAPPED ? gradient_offset(place, col + 1, row) : gradient_offset(place, row, col + 1);
        if (at >= 0) gradient[at] = first;
        if (next >= 0) gradient[next] = second;
      }
    }
}
