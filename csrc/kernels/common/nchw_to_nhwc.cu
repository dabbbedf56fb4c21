// Matrices [batch, ROWS, columns] into [batch, columns, ROWS]: activations and weights from NCHW to channels_last (rows are
// channels, columns pixels or taps) and back. With WITH_SUMS also the sum of each row over columns and batch: of
// grad_output, the gradient of the bias. ROWS are whole pieces of 16 bytes, or columns are and sums
// are not wanted; RAGGED: columns are not.
//
// A block turns BLOCK_ROWS rows (128 bytes of them, if there are as many) by some columns of some matrices, at most
// MAX_POSITIONS of them all. Rows come by 16 bytes through registers (faster than copies past them) and lie in shared memory as in memory; they leave by vectors, in lines of 128
// bytes. Where a row begins between two pieces of 16 bytes, what lies before it in the first is the end of another row, and
// comes with it.
//
// partial[blocks of columns and matrices][ROWS] takes the sums, added up by pairs; common/split_k_reduce.cu does the rest.
#include "common/integers.cuh"
#include "common/mma.cuh"
#include "common/sizes.cuh"
#include "common/tile_index.cuh"

struct TransposeSizes {
  int batch, columns;
  int matrices, positions;  // of a block: positions are columns of all its matrices
  Divisor block_columns;    // columns of a block
  Divisor column_blocks;    // blocks for all columns
  Divisor row_pieces;       // pieces that hold a block's columns of a row
};

constexpr int ITEM = static_cast<int>(sizeof(Element));
constexpr int PIECE = 16 / ITEM;
/// Elements of a store, and threads that share a column.
constexpr int VECTOR = gcd(ROWS, PIECE), VECTORS = BLOCK_ROWS / VECTOR;
constexpr int ROW_BLOCKS = ceil_div(ROWS, BLOCK_ROWS);

static_assert(ROWS % PIECE == 0 || !RAGGED);
static_assert(BLOCK_ROWS % PIECE == 0 && THREADS % VECTORS == 0);
static_assert(!WITH_SUMS || (VECTOR == PIECE && 32 % VECTORS == 0 && BLOCK_ROWS <= THREADS));

/// Elements before a row's first in its first piece: ROWS or columns are multiples of PIECE, and so is a block's first.
__device__ __forceinline__ int lead(int row, const TransposeSizes& sizes) { return RAGGED ? row % PIECE * (sizes.columns % PIECE) % PIECE : 0; }
/// Pieces of the same row of all matrices, at most.
constexpr int MAX_PIECES = ceil_div((RAGGED ? PIECE - 1 : 0) + MAX_POSITIONS, PIECE);
constexpr int SLOTS = ceil_div(BLOCK_ROWS * MAX_PIECES, THREADS);

/// In shared memory, in elements: 16 bytes more after every PIECE rows, so that a warp's reads meet all banks.
struct Pitches {
  int row, matrix;
  __device__ __forceinline__ explicit Pitches(const TransposeSizes& sizes)
      : row(static_cast<int>(sizes.row_pieces.value) * PIECE), matrix(BLOCK_ROWS * row + BLOCK_ROWS) {}
  __device__ __forceinline__ int place(int in_matrix, int in_row) const { return in_matrix * matrix + in_row * row + in_row / PIECE * PIECE; }
};

using Vector = uint4;

/// Which piece of a block the thread brings as its `slot`-th.
struct Place {
  int piece, row, matrix;
  __device__ __forceinline__ Place(int slot, const TransposeSizes& sizes) {
    const int index = slot * THREADS + static_cast<int>(threadIdx.x), rows = sizes.row_pieces.quotient(index);
    piece = sizes.row_pieces.remainder(index, rows);
    row = rows % BLOCK_ROWS;
    matrix = rows / BLOCK_ROWS;
  }
};

/// Where a block begins; `slice` counts the blocks of the same rows.
struct Block {
  int row, column, slice;
  long long matrix;
  __device__ __forceinline__ explicit Block(const TransposeSizes& sizes) {
    row = static_cast<int>(blockIdx.x) % ROW_BLOCKS * BLOCK_ROWS;
    slice = static_cast<int>(blockIdx.x) / ROW_BLOCKS;
    const int matrices = sizes.column_blocks.quotient(slice);
    column = sizes.column_blocks.remainder(slice, matrices) * static_cast<int>(sizes.block_columns.value);
    matrix = static_cast<long long>(matrices) * sizes.matrices;
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

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    nchw_to_nhwc(const Element* __restrict__ from, Element* __restrict__ to, float* __restrict__ partial,
            const __grid_constant__ TransposeSizes sizes) {
  extern __shared__ __align__(128) char memory[];
  ptx::let_next_launch_start();
  const Block block(sizes);
  const Pitches pitches(sizes);
  const int columns = sizes.columns;
  Vector pieces[SLOTS];
#pragma unroll
  for (int slot = 0; slot < SLOTS; ++slot) {
    const Place at(slot, sizes);
    const int row = block.row + at.row, column = block.column - lead(at.row, sizes) + at.piece * PIECE;
    if (at.matrix < sizes.matrices && block.matrix + at.matrix < sizes.batch && row < ROWS && column < columns)
      pieces[slot] = *reinterpret_cast<const Vector*>(from + ((block.matrix + at.matrix) * ROWS + row) * columns + column);
  }
#pragma unroll
  for (int slot = 0; slot < SLOTS; ++slot) {
    const Place at(slot, sizes);
    if (at.matrix < sizes.matrices)
      *reinterpret_cast<Vector*>(memory + (pitches.place(at.matrix, at.row) + at.piece * PIECE) * ITEM) = pieces[slot];
  }
  __syncthreads();

  const Element* rows = reinterpret_cast<const Element*>(memory);
  const int row = threadIdx.x % VECTORS * VECTOR;
  [[maybe_unused]] float sums[VECTOR] = {};
#pragma unroll
  for (int first = 0; first < MAX_POSITIONS; first += THREADS / VECTORS) {
    const int position = first + static_cast<int>(threadIdx.x) / VECTORS;
    const int matrix = sizes.block_columns.quotient(position), column = sizes.block_columns.remainder(position, matrix);
    if (position < sizes.positions && block.matrix + matrix < sizes.batch && block.row + row < ROWS && block.column + column < columns) {
      const Element* begin = rows + pitches.place(matrix, row) + column;
      Pack<VECTOR> turned;
      // Of a shorter vector's rows none has a lead.
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) turned.elements[j] = begin[j * pitches.row + lead(j, sizes)];
      *reinterpret_cast<Pack<VECTOR>*>(to + ((block.matrix + matrix) * columns + block.column + column) * ROWS + block.row + row) = turned;
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
