// Transposes matrices [batch, ROWS, columns] to [batch, columns, ROWS]: activations and weights from NCHW to channels_last
// (rows are channels, columns are pixels or taps) and back. With WITH_SUMS it also adds up each row over columns and batch,
// which for grad_output is the gradient of the bias. Rows or columns are a multiple of 16 bytes (a piece), rows if sums are
// wanted; RAGGED says that the columns are not.
//
// A block transposes BLOCK_ROWS rows (128 bytes of them, if there are as many) and some columns of some matrices, at most
// MAX_POSITIONS columns in all. It loads rows in pieces of 16 bytes through registers (faster than asynchronous copies) into
// shared memory, in the order of global memory, and stores columns in vectors, in lines of 128 bytes. Where a row begins
// inside a piece, the piece begins with the end of another row, which is loaded with it.
//
// partial[blocks of columns and matrices][ROWS] receives the sums, added up by pairs; common/split_k_reduce.cu adds them up.
#include "common/integers.cuh"
#include "common/mma.cuh"
#include "common/sizes.cuh"
#include "common/tile_index.cuh"

struct TransposeSizes {
  int batch, columns;
  int matrices, positions;  // of a block; positions are the columns of all its matrices
  Divisor block_columns;    // columns of a block
  Divisor column_blocks;    // blocks that share the columns of a matrix
  Divisor row_pieces;       // pieces that hold a block's columns of a row
};

constexpr int ITEM = static_cast<int>(sizeof(Element));
constexpr int PIECE = 16 / ITEM;
/// Elements of a store, and stores of a column.
constexpr int VECTOR = gcd(ROWS, PIECE), VECTORS = BLOCK_ROWS / VECTOR;
constexpr int ROW_BLOCKS = ceil_div(ROWS, BLOCK_ROWS);

static_assert(ROWS % PIECE == 0 || !RAGGED);
static_assert(BLOCK_ROWS % PIECE == 0 && THREADS % VECTORS == 0);
static_assert(!WITH_SUMS || (VECTOR == PIECE && 32 % VECTORS == 0 && BLOCK_ROWS <= THREADS));

/// Elements of the first piece of a row that lie before the row. ROWS or columns are multiples of PIECE, and so is the first
/// row of a block.
__device__ __forceinline__ int elements_before(int row, const TransposeSizes& sizes) {
  return RAGGED ? row % PIECE * (sizes.columns % PIECE) % PIECE : 0;
}
/// The most pieces of the same row of all matrices.
constexpr int MAX_PIECES = ceil_div((RAGGED ? PIECE - 1 : 0) + MAX_POSITIONS, PIECE);
constexpr int SLOTS = ceil_div(BLOCK_ROWS * MAX_PIECES, THREADS);

/// Distances in shared memory, in elements. There are 16 more bytes after every PIECE rows, so that a warp reads from all
/// banks.
struct Pitches {
  int row, matrix;
  __device__ __forceinline__ explicit Pitches(const TransposeSizes& sizes)
      : row(static_cast<int>(sizes.row_pieces.value) * PIECE), matrix(BLOCK_ROWS * row + BLOCK_ROWS) {}
  __device__ __forceinline__ int place(int in_matrix, int in_row) const { return in_matrix * matrix + in_row * row + in_row / PIECE * PIECE; }
};

using Vector = uint4;

/// The piece of a block that the thread loads as its `slot`-th.
struct Place {
  int piece, row, matrix;
  __device__ __forceinline__ Place(int slot, const TransposeSizes& sizes) {
    const int index = slot * THREADS + static_cast<int>(threadIdx.x), rows = sizes.row_pieces.quotient(index);
    piece = sizes.row_pieces.remainder(index, rows);
    row = rows % BLOCK_ROWS;
    matrix = rows / BLOCK_ROWS;
  }
};

/// The first row, column and matrix of a block; `split` counts the blocks of the same rows.
struct Block {
  int row, column, split;
  long long matrix;
  __device__ __forceinline__ explicit Block(const TransposeSizes& sizes) {
    row = static_cast<int>(blockIdx.x) % ROW_BLOCKS * BLOCK_ROWS;
    split = static_cast<int>(blockIdx.x) / ROW_BLOCKS;
    const int matrices = sizes.column_blocks.quotient(split);
    column = sizes.column_blocks.remainder(split, matrices) * static_cast<int>(sizes.block_columns.value);
    matrix = static_cast<long long>(matrices) * sizes.matrices;
  }
};

/// Adds up the sums of all threads; those of a thread belong to the rows of its vector.
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
  partial[static_cast<long long>(block.split) * ROWS + block.row + row] = of_warps[0][row];
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
    const int row = block.row + at.row, column = block.column - elements_before(at.row, sizes) + at.piece * PIECE;
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
      Pack<VECTOR> vector;
      // With shorter vectors no row begins inside a piece.
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) vector.elements[j] = begin[j * pitches.row + elements_before(j, sizes)];
      *reinterpret_cast<Pack<VECTOR>*>(to + ((block.matrix + matrix) * columns + block.column + column) * ROWS + block.row + row) = vector;
      if constexpr (WITH_SUMS) {
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) sums[j] += load_as(vector.elements[j]);
      }
    }
  }
  if constexpr (WITH_SUMS) add_up(sums, block, partial);
  // The launch after this one only waits for this one, so this one must not end before the one before it.
  ptx::wait_for_previous_launch();
}
