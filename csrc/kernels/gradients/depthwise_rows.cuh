// Rows of grad_output and of the input for gradients/depthwise.cu: they are prefetched one step ahead, kept in registers as
// they are in memory, and converted to float when they are used.
#pragma once
#include "common/images.cuh"
#include "common/raw.cuh"
#include "common/tile_index.cuh"

// Columns of grad_output that a tile's columns of the input meet. In NCHW one load reads LOAD neighbours from a multiple of
// LOAD, at which rows of grad_output begin; HEAD columns before them and TAIL columns after them are loaded one by one. In
// channels_last LOAD is 1.
constexpr int COLUMNS = (TILE_W - 1) * STRIDE_W + (KERNEL_W - 1) * DILATION_W + 1;
constexpr int HEAD = PADDING_W % LOAD < COLUMNS ? PADDING_W % LOAD : COLUMNS;
constexpr int BODY = (COLUMNS - HEAD) / LOAD, TAIL = COLUMNS - HEAD - BODY * LOAD;
static_assert(CHANNELS_LAST ? LOAD == 1 : TILE_W * STRIDE_W % LOAD == 0);

// The columns of one row of grad_output that a tile meets.
struct GradOutputRow {
  Raw<1> head[HEAD ? HEAD : 1], tail[TAIL ? TAIL : 1];
  Raw<LOAD> body[BODY ? BODY : 1];

  __device__ __forceinline__ void read(float (&to)[COLUMNS]) const {
#pragma unroll
    for (int column = 0; column < COLUMNS; ++column) {
      const int in_body = column - HEAD, in_tail = in_body - BODY * LOAD;
      to[column] = in_body < 0 ? head[column][0] : in_tail < 0 ? body[in_body / LOAD][in_body % LOAD] : tail[in_tail][0];
    }
  }
};

// Prefetches a tile's columns of one row. `from`: the address of the first column, which may be outside; is_inside(column):
// whether a column exists.
template <class Inside>
__device__ __forceinline__ void prefetch_row(GradOutputRow& to, const Element* from, const Inside& is_inside) {
  constexpr int PITCH = CHANNELS_LAST ? OUT_CHANNELS : 1;
#pragma unroll
  for (int i = 0; i < HEAD; ++i) to.head[i].load(from + i * PITCH, is_inside(i));
#pragma unroll
  for (int i = 0; i < BODY; ++i) to.body[i].load(from + (HEAD + i * LOAD) * PITCH, is_inside(HEAD + i * LOAD));
#pragma unroll
  for (int i = COLUMNS - TAIL; i < COLUMNS; ++i) to.tail[i - (COLUMNS - TAIL)].load(from + i * PITCH, is_inside(i));
}

// A tile's columns of one row of the input.
struct InputRow {
  static constexpr int MAX_LOAD = 16 / sizeof(Element), N = CHANNELS_LAST ? 1 : TILE_W < MAX_LOAD ? TILE_W : MAX_LOAD;
  static constexpr int PITCH = CHANNELS_LAST ? IN_CHANNELS : N;
  Raw<N> raw[TILE_W / N];

  __device__ __forceinline__ void prefetch(const Element* from, bool inside) {
#pragma unroll
    for (int i = 0; i < TILE_W / N; ++i) raw[i].load(from + i * PITCH, inside);
  }
  __device__ __forceinline__ void read(float (&to)[TILE_W]) const {
#pragma unroll
    for (int i = 0; i < TILE_W; ++i) to[i] = raw[i / N][i % N];
  }
};
