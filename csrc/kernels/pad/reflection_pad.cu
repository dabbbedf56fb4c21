// Reflection padding of images, and its gradient.
//   output[p, row, col, k] = input[p, reflected row, reflected col, k]
//   grad_input[p, row, col, k] = sum of grad_output over the up to 3 x 3 places that the forward pass fills from there,
//     in float32 and always in the same order
// In NCHW p counts the channels of all images and there is one k; in channels_last p counts images and k the items of a
// pixel. An item is VALUES elements side by side, one memory access.
// A thread computes one place of PLANES consecutive planes, so that its reflections are found once and it has PLANES loads
// in flight; threads that lie side by side compute items that do. Padding is at least 0 and less than the size. Both
// tensors have less than 2^31 - THREADS items, so that offsets, which count items, have 32 bits.
#include "common/sizes.cuh"
#include "common/types.cuh"

using Sum = Accumulate<Element>::type;

/// In place of a position that does not exist.
constexpr int NONE = -1;
/// The positions that repeat one pixel of an axis: itself, and its reflections about both edges.
constexpr int MAX_COPIES = 3;

struct alignas(sizeof(Element) * VALUES) Item {
  Element values[VALUES];
};

/// The rows or the columns. `padded_size`: with the padding on both sides, of which `padding` lies before them.
struct Axis {
  int size, padded_size, padding;

  /// The pixel that a position of the padded axis repeats.
  __device__ __forceinline__ int reflected(int position) const {
    const int last = size - 1;
    return last - abs(last - abs(position - padding));
  }

  /// The positions of the padded axis that repeat a pixel, then NONE.
  __device__ __forceinline__ void copies_of(int pixel, int (&positions)[MAX_COPIES]) const {
    const int mirrored = 2 * (size - 1) - pixel + padding;
    const int before = pixel >= 1 && pixel <= padding ? padding - pixel : NONE;
    const int behind = pixel < size - 1 && mirrored < padded_size ? mirrored : NONE;
    positions[0] = pixel + padding;
    // Where lanes of a warp have reflections about different edges, they load them together.
    positions[1] = before != NONE ? before : behind;
    positions[2] = before != NONE ? behind : NONE;
  }
};

struct PadSizes {  // kernels/pad/reflection_pad.py writes the same words
  int planes;
  Axis rows, columns;
  Divisor plane_items, row_items;  // of the tensor that is written
  Divisor pixel_items;
};

/// What a thread computes: an item of each of `planes` planes, at most PLANES, from `first_plane` on.
struct Place {
  int first_plane, planes, row, col, item;

  __device__ __forceinline__ static Place of(int thread, const PadSizes& sizes) {
    const int group = sizes.plane_items.quotient(thread), in_plane = sizes.plane_items.remainder(thread, group);
    const int row = sizes.row_items.quotient(in_plane), in_row = sizes.row_items.remainder(in_plane, row);
    const int col = sizes.pixel_items.quotient(in_row);
    return {group * PLANES, sizes.planes - group * PLANES, row, col, sizes.pixel_items.remainder(in_row, col)};
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    reflection_pad_forward(const Item* __restrict__ input, Item* __restrict__ output, const PadSizes sizes) {
  const int thread = static_cast<int>(blockIdx.x) * THREADS + static_cast<int>(threadIdx.x);
  const Place place = Place::of(thread, sizes);
  if (place.planes <= 0) return;
  const int pixel_items = static_cast<int>(sizes.pixel_items.value);
  const int row_items = sizes.columns.size * pixel_items;
  const int read_plane = sizes.rows.size * row_items;
  const int written_plane = static_cast<int>(sizes.plane_items.value);
  const Item* const read = input + place.first_plane * read_plane + sizes.rows.reflected(place.row) * row_items +
                           sizes.columns.reflected(place.col) * pixel_items + place.item;
  Item* const written = output + place.first_plane * written_plane + sizes.plane_items.remainder(thread);
  Item items[PLANES];
#pragma unroll
  for (int i = 0; i < PLANES; ++i)
    if (i < place.planes) items[i] = read[i * read_plane];
#pragma unroll
  for (int i = 0; i < PLANES; ++i)
    if (i < place.planes) written[i * written_plane] = items[i];
}

extern "C" __global__ void __launch_bounds__(THREADS)
    reflection_pad_backward(const Item* __restrict__ grad_output, Item* __restrict__ grad_input, const PadSizes sizes) {
  const int thread = static_cast<int>(blockIdx.x) * THREADS + static_cast<int>(threadIdx.x);
  const Place place = Place::of(thread, sizes);
  if (place.planes <= 0) return;
  const int pixel_items = static_cast<int>(sizes.pixel_items.value);
  const int row_items = sizes.columns.padded_size * pixel_items;
  const int read_plane = sizes.rows.padded_size * row_items;
  const int written_plane = static_cast<int>(sizes.plane_items.value);
  const Item* const read = grad_output + place.first_plane * read_plane + place.item;
  Item* const written = grad_input + place.first_plane * written_plane + sizes.plane_items.remainder(thread);
  int rows[MAX_COPIES], columns[MAX_COPIES];
  sizes.rows.copies_of(place.row, rows);
  sizes.columns.copies_of(place.col, columns);
  Sum sums[PLANES][VALUES] = {};
#pragma unroll
  for (const int row : rows) {
    if (row == NONE) break;
#pragma unroll
    for (const int column : columns) {
      if (column == NONE) break;
      const Item* const copy = read + row * row_items + column * pixel_items;
      Item items[PLANES] = {};
#pragma unroll
      for (int i = 0; i < PLANES; ++i)
        if (i < place.planes) items[i] = copy[i * read_plane];
#pragma unroll
      for (int i = 0; i < PLANES; ++i)
#pragma unroll
        for (int value = 0; value < VALUES; ++value) sums[i][value] += load_as(items[i].values[value]);
    }
  }
#pragma unroll
  for (int i = 0; i < PLANES; ++i) {
    Item item;
#pragma unroll
    for (int value = 0; value < VALUES; ++value) item.values[value] = store_as<Element>(sums[i][value]);
    if (i < place.planes) written[i * written_plane] = item;
  }
}
