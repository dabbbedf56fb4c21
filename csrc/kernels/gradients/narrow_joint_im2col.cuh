// The im2col rows of a tile of pixels, in shared memory, which both gradients multiply:
//
//   im2col[pixel (ih, iw), tap (co, kh, kw)] = grad_output[co, ih * STRIDE_H - PADDING_H + kh * DILATION_H, (iw alike)]
//
// A tile is PIXELS consecutive pixels of an image. Rows of taps lie IM2COL_PITCH bytes apart, an odd number of 16, and groups
// of 8 rows IM2COL_GROUP, so that a fragment read by ldmatrix or by words uses every bank once. 16-bit numbers are stored as
// they are, float32 as two parts of TF32, one plane after the other. Each thread loads taps of one pixel, one tile ahead, and
// stores them 16 bytes at a time.
#pragma once
#include "common/compensated_sum.cuh"
#include "common/images.cuh"
#include "common/mma.cuh"
#include "common/static_for.cuh"
#include "common/split_tf32.cuh"
#include "common/tile_index.cuh"

using ptx::u32;

constexpr int ITEM = sizeof(Element);
constexpr bool IS_IEEE = PRECISION == ptx::IEEE;
constexpr int PARTS = IS_IEEE ? 2 : 1;
// The last PRODUCER_WARPS warps of a block are the producers; if there are none, all warps produce.
constexpr int CONSUMER_THREADS = 32 * (INPUT_WARPS + WEIGHT_WARPS), THREADS = CONSUMER_THREADS + 32 * PRODUCER_WARPS;
constexpr int FIRST_PRODUCER = PRODUCER_WARPS > 0 ? CONSUMER_THREADS : 0, PRODUCER_THREADS = THREADS - FIRST_PRODUCER;

constexpr int ALL_TAPS = OUT_CHANNELS * TAPS;
constexpr int STEP_BYTES = 32;  // of k of one multiply: 8 elements of float32 or 16 of 16 bits
constexpr int K_STEPS = ceil_div(ALL_TAPS * ITEM, STEP_BYTES);
constexpr int IM2COL_PITCH = K_STEPS * STEP_BYTES + 16;
constexpr int IM2COL_GROUP = 8 * IM2COL_PITCH + 32;
constexpr int IM2COL_PART = PIXELS / 8 * IM2COL_GROUP;
constexpr int IM2COL_BYTES = PARTS * IM2COL_PART;

// Where a tile begins.
struct Tile {
  int image, pixel;
  __device__ __forceinline__ static Tile of(const PatchSizes& sizes, int tile) {
    const int image = sizes.tiles.quotient(tile);
    return {image, sizes.tiles.remainder(tile, image) * PIXELS};
  }
};

__device__ __forceinline__ constexpr int im2col_offset(int pixel) { return pixel / 8 * IM2COL_GROUP + pixel % 8 * IM2COL_PITCH; }

// The gradient of the bias counts every output pixel once: at the pixel and tap that its position divided by the stride
// gives, or at the last pixel.
using BiasSum = CompensatedSum<float, (sizeof(Element) > 2)>;

constexpr int VECTOR = 16 / ITEM, VECTORS = K_STEPS * STEP_BYTES / 16;  // taps that a thread stores at once
constexpr int PIXEL_THREADS = PRODUCER_THREADS / PIXELS, SLOTS = ceil_div(VECTORS, PIXEL_THREADS);
static_assert(PIXELS % 32 == 0 && PRODUCER_THREADS % PIXELS == 0 && KERNEL_H <= 32 && KERNEL_W <= 32);
// Neighbours in a row of grad_output that one aligned load reads; in 16 bits that is slower than single loads.
constexpr int READ_WIDTH = VECTOR_READS ? 4 : 1;
static_assert(!VECTOR_READS || (STRIDE_W % 4 == 0 && DILATION_W == 1 && !CHANNELS_LAST));

struct Im2colProducer {
  const PatchSizes& sizes;
  Element values[SLOTS][VECTOR];
  bool last_row, last_column;
  BiasSum bias[WITH_BIAS ? OUT_CHANNELS : 1] = {};

  __device__ __forceinline__ explicit Im2colProducer(const PatchSizes& sizes) : sizes(sizes) {}

  // Calls body(tap, slot, number within the slot's vector), all of them constants, for each tap of this thread.
  template <class Body>
  __device__ __forceinline__ static void for_taps(const Body& body) {
    const int producer = (threadIdx.x - FIRST_PRODUCER) / PIXELS;
    static_for<0, PIXEL_THREADS>([&](auto thread) {
      if (producer != decltype(thread)::value) return;
      static_for<0, SLOTS>([&](auto slot) {
        constexpr int AT = (decltype(slot)::value * PIXEL_THREADS + decltype(thread)::value) * VECTOR;
        static_for<0, VECTOR>([&](auto i) {
          if constexpr (AT + decltype(i)::value < VECTORS * VECTOR)
            body(IndexConstant<AT + decltype(i)::value>{}, slot, i);
        });
      });
    });
  }

  // Returns which of its READ_WIDTH neighbours a tap's column is.
  __device__ static constexpr int in_read(int kw) { return ((kw * DILATION_W - PADDING_W) % READ_WIDTH + READ_WIDTH) % READ_WIDTH; }

  __device__ __forceinline__ void load(const Element* grad_output, int tile) {
    const Tile first = Tile::of(sizes, tile);
    const int pixel = first.pixel + (threadIdx.x - FIRST_PRODUCER) % PIXELS;
    const int ih = sizes.columns.quotient(pixel), iw = sizes.columns.remainder(pixel, ih);
    const int row = ih * STRIDE_H - PADDING_H, column = iw * STRIDE_W - PADDING_W;
    last_row = ih == sizes.height - 1, last_column = iw == sizes.width - 1;
    u32 rows = 0, columns = 0;
#pragma unroll
    for (int kh = 0; kh < KERNEL_H; ++kh)
      rows |= static_cast<u32>(static_cast<unsigned>(row + kh * DILATION_H) < static_cast<unsigned>(sizes.out_height) && pixel < sizes.pixels) << kh;
#pragma unroll
    for (int kw = 0; kw < KERNEL_W; ++kw)
      columns |= static_cast<u32>(static_cast<unsigned>(column + kw * DILATION_W) < static_cast<unsigned>(sizes.out_width)) << kw;
    const Element* const from = grad_output + first.image * output_elements(sizes) + at_output(sizes, 0, 0, row, column);
    // Pinned: otherwise the offsets of all rows of taps stay in registers, which are too few.
    const int out_height = ptx::keep_in_register(sizes.out_height), out_width = ptx::keep_in_register(sizes.out_width);
    PackOf<Element, READ_WIDTH> read{};
    for_taps([&](auto tap, auto slot, auto i) {
      constexpr int TAP = decltype(tap)::value, KW = TAP % KERNEL_W, KH = TAP / KERNEL_W % KERNEL_H, CO = TAP / TAPS;
      constexpr int IN_READ = in_read(KW);
      if constexpr (TAP < ALL_TAPS) {
        if constexpr (IN_READ == 0 || KW == 0 || decltype(i)::value == 0) {
          read = PackOf<Element, READ_WIDTH>{};
          if ((rows >> KH & 1) && (columns >> KW & 1))
            read = *reinterpret_cast<const PackOf<Element, READ_WIDTH>*>(
                from + at_activation<OUT_CHANNELS>(0, CO, KH * DILATION_H, KW * DILATION_W - IN_READ, out_height, out_width));
        }
        values[decltype(slot)::value][decltype(i)::value] = read.elements[IN_READ];
      } else {
        values[decltype(slot)::value][decltype(i)::value] = Element{};
      }
    });
  }

  __device__ __forceinline__ void store(u32 im2col) {
    const u32 to = im2col + im2col_offset((threadIdx.x - FIRST_PRODUCER) % PIXELS);
    for_taps([&](auto tap, auto slot, auto i) {
      constexpr int TAP = decltype(tap)::value, SLOT = decltype(slot)::value;
      if constexpr (decltype(i)::value == VECTOR - 1) {
        u32 words[PARTS][4];
        if constexpr (IS_IEEE) {
#pragma unroll
          for (int w = 0; w < 4; ++w) split(words[0][w], words[PARTS - 1][w], load_as(values[SLOT][w]));
        } else {
#pragma unroll
          for (int w = 0; w < 4; ++w) words[0][w] = bits(values[SLOT][2 * w % VECTOR]) | bits(values[SLOT][(2 * w + 1) % VECTOR]) << 16;
        }
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
          ptx::store_shared<4>(to + part * IM2COL_PART + TAP / VECTOR * 16, words[part]);
      }
      if constexpr (WITH_BIAS && TAP < ALL_TAPS) {
        constexpr int KW = TAP % KERNEL_W, KH = TAP / KERNEL_W % KERNEL_H;
        const float value = load_as(values[SLOT][decltype(i)::value]);
        if ((KH < STRIDE_H || last_row) && (KW < STRIDE_W || last_column)) bias[TAP / TAPS].add(value);
      }
    });
  }

  __device__ __forceinline__ static u32 bits(float value) { return __float_as_uint(value); }
  template <class T>
  __device__ __forceinline__ static u32 bits(T value) {
    return value.bits;
  }
};
