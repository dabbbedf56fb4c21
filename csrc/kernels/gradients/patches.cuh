// The patches of a tile of pixels, in shared memory, for both gradients to multiply:
//
//   patch[pixel (ih, iw), tap (co, kh, kw)] = grad_output[co, ih * STRIDE_H - PADDING_H + kh * DILATION_H, (iw alike)]
//
// A tile is PIXELS pixels of an image that follow each other. Rows of taps lie PATCH_PITCH bytes apart, an odd number of
// 16, and 8 of them PATCH_GROUP: a fragment by ldmatrix or by words meets every bank once. 16 bits lie as they are, float32
// in two parts of TF32, one plane after the other. Each thread gathers taps of one pixel, by 16 bytes of shared memory; it
// asks for them one tile ahead.
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
// GATHER_WARPS, the last of a block, gather; where there are none, all do.
constexpr int MULTIPLY_THREADS = 32 * (INPUT_WARPS + WEIGHT_WARPS), THREADS = MULTIPLY_THREADS + 32 * GATHER_WARPS;
constexpr int FIRST_GATHERING = GATHER_WARPS > 0 ? MULTIPLY_THREADS : 0, GATHERING = THREADS - FIRST_GATHERING;

constexpr int ALL_TAPS = OUT_CHANNELS * TAPS;
constexpr int STEP_BYTES = 32;  // of a multiply's k: 8 float32 or 16 of 16 bits
constexpr int K_STEPS = ceil_div(ALL_TAPS * ITEM, STEP_BYTES);
constexpr int PATCH_PITCH = K_STEPS * STEP_BYTES + 16;
constexpr int PATCH_GROUP = 8 * PATCH_PITCH + 32;
constexpr int PATCH_PART = PIXELS / 8 * PATCH_GROUP;
constexpr int PATCH_BYTES = PARTS * PATCH_PART;

// Where a tile begins.
struct Run {
  int image, pixel;
  __device__ __forceinline__ static Run of(const PatchSizes& sizes, int tile) {
    const int image = sizes.tiles.quotient(tile);
    return {image, sizes.tiles.remainder(tile, image) * PIXELS};
  }
};

__device__ __forceinline__ constexpr int patch_place(int pixel) { return pixel / 8 * PATCH_GROUP + pixel % 8 * PATCH_PITCH; }

// The gradient of the bias: every output pixel is counted at the pixel and tap that its position divided by the stride
// names, or at the last pixel.
using BiasSum = CompensatedSum<float, (sizeof(Element) > 2)>;

constexpr int CHUNK = 16 / ITEM, CHUNKS = K_STEPS * STEP_BYTES / 16;  // taps that a thread writes at once
constexpr int GATHERERS = GATHERING / PIXELS, SLOTS = ceil_div(CHUNKS, GATHERERS);
static_assert(PIXELS % 32 == 0 && GATHERING % PIXELS == 0 && KERNEL_H <= 32 && KERNEL_W <= 32);
// Neighbours in a row of grad_output that are read at once, from aligned places; in 16 bits slower than one by one.
constexpr int READ = IN_FOURS ? 4 : 1;
static_assert(!IN_FOURS || (STRIDE_W % 4 == 0 && DILATION_W == 1 && !CHANNELS_LAST));

struct Gatherer {
  const PatchSizes& sizes;
  Element values[SLOTS][CHUNK];
  bool last_row, last_column;
  BiasSum bias[WITH_BIAS ? OUT_CHANNELS : 1] = {};

  __device__ __forceinline__ explicit Gatherer(const PatchSizes& sizes) : sizes(sizes) {}

  // body(tap, slot, which of the slot's chunk), constants all, for each tap of this thread's.
  template <class Body>
  __device__ __forceinline__ static void for_taps(const Body& body) {
    const int gatherer = (threadIdx.x - FIRST_GATHERING) / PIXELS;
    static_for<0, GATHERERS>([&](auto own) {
      if (gatherer != decltype(own)::value) return;
      static_for<0, SLOTS>([&](auto slot) {
        constexpr int AT = (decltype(slot)::value * GATHERERS + decltype(own)::value) * CHUNK;
        static_for<0, CHUNK>([&](auto i) {
          if constexpr (AT + decltype(i)::value < CHUNKS * CHUNK)
            body(IndexConstant<AT + decltype(i)::value>{}, slot, i);
        });
      });
    });
  }

  // Where in its READ neighbours a tap's column lies.
  __device__ static constexpr int in_read(int kw) { return ((kw * DILATION_W - PADDING_W) % READ + READ) % READ; }

  __device__ __forceinline__ void fetch(const Element* grad_output, int tile) {
    const Run run = Run::of(sizes, tile);
    const int pixel = run.pixel + (threadIdx.x - FIRST_GATHERING) % PIXELS;
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
    const Element* const from = grad_output + run.image * output_elements(sizes) + at_output(sizes, 0, 0, row, column);
    // Pinned: kept, the places of all rows of taps would take too many registers.
    const int out_height = ptx::keep_in_register(sizes.out_height), out_width = ptx::keep_in_register(sizes.out_width);
    PackOf<Element, READ> pack{};
    for_taps([&](auto tap, auto slot, auto i) {
      constexpr int TAP = decltype(tap)::value, KW = TAP % KERNEL_W, KH = TAP / KERNEL_W % KERNEL_H, CO = TAP / TAPS;
      constexpr int IN_READ = in_read(KW);
      if constexpr (TAP < ALL_TAPS) {
        if constexpr (IN_READ == 0 || KW == 0 || decltype(i)::value == 0) {
          pack = PackOf<Element, READ>{};
          if ((rows >> KH & 1) && (columns >> KW & 1))
            pack = *reinterpret_cast<const PackOf<Element, READ>*>(
                from + at_activation<OUT_CHANNELS>(0, CO, KH * DILATION_H, KW * DILATION_W - IN_READ, out_height, out_width));
        }
        values[decltype(slot)::value][decltype(i)::value] = pack.elements[IN_READ];
      } else {
        values[decltype(slot)::value][decltype(i)::value] = Element{};
      }
    });
  }

  __device__ __forceinline__ void put(u32 patches) {
    const u32 to = patches + patch_place((threadIdx.x - FIRST_GATHERING) % PIXELS);
    for_taps([&](auto tap, auto slot, auto i) {
      constexpr int TAP = decltype(tap)::value, SLOT = decltype(slot)::value;
      if constexpr (decltype(i)::value == CHUNK - 1) {
        u32 words[PARTS][4];
        if constexpr (IS_IEEE) {
#pragma unroll
          for (int w = 0; w < 4; ++w) split(words[0][w], words[PARTS - 1][w], load_as(values[SLOT][w]));
        } else {
#pragma unroll
          for (int w = 0; w < 4; ++w) words[0][w] = bits(values[SLOT][2 * w % CHUNK]) | bits(values[SLOT][(2 * w + 1) % CHUNK]) << 16;
        }
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
          ptx::store_shared<4>(to + part * PATCH_PART + TAP / CHUNK * 16, words[part]);
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
