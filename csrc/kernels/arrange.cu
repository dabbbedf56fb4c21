// Matrices [batch, ROWS, COLUMNS] into [batch, COLUMNS, ROWS]: activations and weights from NCHW to channels_last (rows are
// channels, columns pixels or taps) and back. With WITH_SUMS also the sum of each row over columns and batch: of
// grad_output, the gradient of the bias. ROWS or COLUMNS are whole pieces of 16 bytes, ROWS are with sums.
//
// A block turns BLOCK_ROWS rows (128 bytes of them, if there are as many) by BLOCK_COLUMNS columns of BLOCK_MATRICES
// matrices. Rows come by 16 bytes through registers (faster than copies past them) and lie in shared memory as in memory; they leave by vectors, in lines of 128
// bytes. Where a row begins between two pieces of 16 bytes, what lies before it in the first is the end of another row, and
// comes with it.
//
// partial[blocks of columns and matrices][ROWS] takes the sums, added up by pairs; reduce_slices.cu does the rest.
#include "mma.cuh"
#include "tile_index.cuh"

constexpr int common_factor(int a, int b) { return b == 0 ? a : common_factor(b, a % b); }

constexpr int ITEM = static_cast<int>(sizeof(Element));
constexpr int PIECE = 16 / ITEM;
/// Elements of a store, and threads that share a column.
constexpr int VECTOR = common_factor(ROWS, PIECE), VECTORS = BLOCK_ROWS / VECTOR;
constexpr int ROW_BLOCKS = ceil_div(ROWS, BLOCK_ROWS), COLUMN_BLOCKS = ceil_div(COLUMNS, BLOCK_COLUMNS);
constexpr int POSITIONS = BLOCK_MATRICES * BLOCK_COLUMNS;

static_assert((ROWS % PIECE == 0 || COLUMNS % PIECE == 0) && (COLUMN_BLOCKS == 1 || BLOCK_COLUMNS % PIECE == 0));
static_assert(BLOCK_ROWS % PIECE == 0 && THREADS % VECTORS == 0);
static_assert(!WITH_SUMS || (VECTOR == PIECE && 32 % VECTORS == 0 && BLOCK_ROWS <= THREADS));

/// Elements before a row's first in its first piece: ROWS or COLUMNS are multiples of PIECE, and so is a block's first.
constexpr int lead(int row) { return row % PIECE * (COLUMNS % PIECE) % PIECE; }
constexpr int most_lead() {
  int most = 0;
  for (int row = 0; row < PIECE; ++row) most = lead(row) > most ? lead(row) : most;
  return most;
}
constexpr int ROW_PIECES = ceil_div(most_lead() + BLOCK_COLUMNS, PIECE);
constexpr int SLOTS = ceil_div(BLOCK_MATRICES * BLOCK_ROWS * ROW_PIECES, THREADS);
/// 16 bytes more after every PIECE rows: a warp's reads meet all banks.
constexpr int ROW_PITCH = ROW_PIECES * PIECE, MATRIX_PITCH = BLOCK_ROWS * ROW_PITCH + BLOCK_ROWS;
static_assert(BLOCK_MATRICES * MATRIX_PITCH * ITEM == SHARED_BYTES && MATRIX_PITCH * ITEM % 16 == 0, "the plan counts otherwise");

constexpr int row_place(int row) { return row * ROW_PITCH + row / PIECE * PIECE; }

using Vector = uint4;

/// Which piece of a block the thread brings as its `slot`-th.
struct Place {
  int piece, row, matrix;
  __device__ __forceinline__ explicit Place(int slot) {
    Digits digits{slot * THREADS + threadIdx.x};
    piece = digits.next(ROW_PIECES);
    row = digits.next(BLOCK_ROWS);
    matrix = static_cast<int>(digits.rest);
  }
};

/// Where a block begins; `slice` counts the blocks of the same rows.
struct Block {
  int row, column, slice;
  long long matrix;
  __device__ __forceinline__ Block() {
    row = static_cast<int>(blockIdx.x) % ROW_BLOCKS * BLOCK_ROWS;
    slice = static_cast<int>(blockIdx.x) / ROW_BLOCKS;
    column = slice % COLUMN_BLOCKS * BLOCK_COLUMNS;
    matrix = static_cast<long long>(slice / COLUMN_BLOCKS) * BLOCK_MATRICES;
  }
};

/// Each thread's sums are of the rows of its vector.
__device__ __forceinline__ void add_up(const float (&sums)[VECTOR], const Block& block, float* __restrict__ partial) {
  __shared__ float of_warps[THREADS / 32][BLOCK_ROWS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = threadIdx.x;
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) {
    float sum = sums[j];
#pragma unroll
    for (int other = VECTORS; other < 32; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
    if (lane < VECTORS) of_warps[warp][lane * VECTOR + j] = sum;
  }
  __syncthreads();
  if (row >= BLOCK_ROWS || block.row + row >= ROWS) return;
#pragma unroll
  for (int half = THREADS / 64; half > 0; half /= 2)
#pragma unroll
    for (int i = 0; i < half; ++i) of_warps[i][row] += of_warps[i + half][row];
  partial[static_cast<long long>(block.slice) * ROWS + block.row + row] = of_warps[0][row];
}

extern "C" __global__ void __launch_bounds__(THREADS)
    arrange(const Element* __restrict__ from, Element* __restrict__ to, float* __restrict__ partial, long long batch) {
  extern __shared__ __align__(128) char memory[];
  ptx::let_next_launch_start();
  const Block block;
  Vector pieces[SLOTS];
#pragma unroll
  for (int slot = 0; slot < SLOTS; ++slot) {
    const Place at(slot);
    const int row = block.row + at.row, column = block.column - lead(at.row) + at.piece * PIECE;
    if (at.matrix < BLOCK_MATRICES && block.matrix + at.matrix < batch && row < ROWS && column < COLUMNS)
      pieces[slot] = *reinterpret_cast<const Vector*>(from + ((block.matrix + at.matrix) * ROWS + row) * COLUMNS + column);
  }
#pragma unroll
  for (int slot = 0; slot < SLOTS; ++slot) {
    const Place at(slot);
    if (at.matrix < BLOCK_MATRICES)
      *reinterpret_cast<Vector*>(memory + (at.matrix * MATRIX_PITCH + row_place(at.row) + at.piece * PIECE) * ITEM) = pieces[slot];
  }
  __syncthreads();

  const Element* rows = reinterpret_cast<const Element*>(memory);
  const int row = threadIdx.x % VECTORS * VECTOR;
  [[maybe_unused]] float sums[VECTOR] = {};
#pragma unroll
  for (int first = 0; first < POSITIONS; first += THREADS / VECTORS) {
    const int position = first + static_cast<int>(threadIdx.x) / VECTORS;
    const int matrix = position / BLOCK_COLUMNS, column = position % BLOCK_COLUMNS;
    if (position < POSITIONS && block.matrix + matrix < batch && block.row + row < ROWS && block.column + column < COLUMNS) {
      const Element* begin = rows + matrix * MATRIX_PITCH + row_place(row) + column;
      Pack<VECTOR> turned;
      // Of a shorter vector's rows none has a lead.
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) turned.elements[j] = begin[j * ROW_PITCH + lead(j)];
      *reinterpret_cast<Pack<VECTOR>*>(to + ((block.matrix + matrix) * COLUMNS + block.column + column) * ROWS + block.row + row) = turned;
      if constexpr (WITH_SUMS) {
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) sums[j] += load_as(turned.elements[j]);
      }
    }
  }
  if constexpr (WITH_SUMS) add_up(sums, block, partial);
  // The launch after this one waits for this one only: so this one ends after the one before it.
  ptx::wait_for_previous_launch();
}
