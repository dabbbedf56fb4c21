// Casts up to three dense tensors from type From to type To in one launch. A block casts THREADS * ELEMENTS elements of one
// tensor; the blocks of a tensor follow those of the tensor before. All pointers are aligned to 16 bytes. An absent tensor
// has no block.
#include "common/types.cuh"

constexpr int TENSORS = 3;
/// Elements that a thread casts: at least 16 bytes of the narrower type.
constexpr int ELEMENTS = 8;

struct CastSizes {
  int counts[TENSORS];      // elements
  int end_blocks[TENSORS];  // the first block behind those of each tensor
};

template <class T>
struct alignas(16) Vector {
  T elements[ELEMENTS];
};

extern "C" __global__ void __launch_bounds__(THREADS)
    cast(const From* first, const From* second, const From* third, To* first_copy, To* second_copy, To* third_copy,
         const CastSizes sizes) {
  const int block = static_cast<int>(blockIdx.x);
  const int tensor = (block >= sizes.end_blocks[0]) + (block >= sizes.end_blocks[1]);
  const From* const source = tensor == 0 ? first : tensor == 1 ? second : third;
  To* const copy = tensor == 0 ? first_copy : tensor == 1 ? second_copy : third_copy;
  const int before = tensor == 0 ? 0 : tensor == 1 ? sizes.end_blocks[0] : sizes.end_blocks[1];
  const int count = tensor == 0 ? sizes.counts[0] : tensor == 1 ? sizes.counts[1] : sizes.counts[2];
  // Unsigned: the last block may reach beyond 2^31.
  const unsigned begin = (static_cast<unsigned>(block - before) * THREADS + threadIdx.x) * ELEMENTS;
  if (begin + ELEMENTS <= static_cast<unsigned>(count)) {
    const Vector<From> read = *reinterpret_cast<const Vector<From>*>(source + begin);
    Vector<To> written;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) written.elements[i] = store_as<To>(load_as(read.elements[i]));
    *reinterpret_cast<Vector<To>*>(copy + begin) = written;
  } else {
    for (unsigned i = begin; i < static_cast<unsigned>(count); ++i) copy[i] = store_as<To>(load_as(source[i]));
  }
}
