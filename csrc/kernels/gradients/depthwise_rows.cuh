// Rows of grad_output and of the input as gradients/depthwise.cu walks down them: asked for a step ahead, kept as they lie
// in memory, and turned to float when they are used.
#pragma once
#include "common/images.cuh"
#include "common/raw.cuh"
#include "common/tile_index.cuh"

// Columns of grad_output that a walk's own columns of the input meet. In NCHW LOAD neighbours come at once where they lie
// at a multiple of LOAD, which rows of grad_output are: HEAD columns by themselves before them, TAIL after. In channels_last LOAD is 1.
constexpr int COLUMNS = (OWN_W - 1) * STRIDE_W + (KERNEL_W - 1) * DILATION_W + 1;
constexpr int HEAD = PADDING_W % LOAD < COLUMNS ? PADDING_W % LOAD : COLUMNS;
constexpr int BODY = (COLUMNS - HEAD) / LOAD, TAIL = COLUMNS - HEAD - BODY * LOAD;
static_assert(CHANNELS_LAST ? LOAD == 1 : OWN_W * STRIDE_W % LOAD == 0);

// What a walk meets of one row of grad_output.
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

// Ask for a walk's columns of one row; `from` is where the first lies or would lie, is_inside(column) whether one exists.
template <class Inside>
__device__ __forceinline__ void bring(GradOutputRow& to, const Element* from, const Inside& is_inside) {
  constexpr int APART = CHANNELS_LAST ? OUT_CHANNELS : 1;
#pragma unroll
  for (int i = 0; i < HEAD; ++i) to.head[i].load(from + i * APART, is_inside(i));
#pragma unroll
  for (int i = 0; i < BODY; ++i) to.body[i].load(from + (HEAD + i * LOAD) * APART, is_inside(HEAD + i * LOAD));
#pragma unroll
  for (int i = COLUMNS - TAIL; i < COLUMNS; ++i) to.tail[i - (COLUMNS - TAIL)].load(from + i * APART, is_inside(i));
}

// A walk's own columns of one row of the input.
struct InputRow {
  static constexpr int MOST = 16 / sizeof(Element), N = CHANNELS_LAST ? 1 : OWN_W < MOST ? OWN_W : MOST;
  static constexpr int APART = CHANNELS_LAST ? IN_CHANNELS : N;
  Raw<N> raw[OWN_W / N];

  __device__ __forceinline__ void load(const Element* from, bool inside) {
#pragma unroll
    for (int i = 0; i < OWN_W / N; ++i) raw[i].load(from + i * APART, inside);
  }
  __device__ __forceinline__ void read(float (&to)[OWN_W]) const {
#pragma unroll
    for (int i = 0; i < OWN_W; ++i) to[i] = raw[i / N][i % N];
  }
};
