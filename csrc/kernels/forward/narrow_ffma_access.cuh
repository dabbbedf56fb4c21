// The memory accesses of forward/narrow_ffma.cu. They depend on the constants of a layer (common/layer.cuh) and of the thread's
// tile: PHASES_*, THREAD_*, ADJACENT.
#pragma once
#include "common/phases.cuh"
#include "common/tile_index.cuh"

constexpr bool ALL_H = PHASES_H == STRIDE_H;
constexpr bool ALL_W = PHASES_W == STRIDE_W;

template <int N>
__device__ __forceinline__ void read_vector(float* to, const float* from) {
  if constexpr (N == 4) {
    const float4 v = *reinterpret_cast<const float4*>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else if constexpr (N == 2) {
    const float2 v = *reinterpret_cast<const float2*>(from);
    to[0] = v.x, to[1] = v.y;
  } else {
    to[0] = *from;
  }
}

// Copies N floats to shared memory asynchronously, or zeros where `inside` is false; `from` is then not read. No plan uses it on
// GPUs before sm_80.
template <int N, class T>
__device__ __forceinline__ void copy_async(float* to, const T* from, bool inside) {
#if __CUDA_ARCH__ >= 800
  const unsigned place = (unsigned)__cvta_generic_to_shared(to);
  const int bytes = inside ? 4 * N : 0;
  if constexpr (N == 4)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(from), "r"(bytes) : "memory");
  else if constexpr (N == 2)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(place), "l"(from), "r"(bytes) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(place), "l"(from), "r"(bytes) : "memory");
#endif
}
__device__ __forceinline__ void async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
__device__ __forceinline__ void async_wait_all_but_last() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
}

template <int N>
__device__ __forceinline__ void write_vector(float* to, const float* from) {
  if constexpr (N == 4)
    *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
  else if constexpr (N == 2)
    *reinterpret_cast<float2*>(to) = make_float2(from[0], from[1]);
  else
    *to = *from;
}

// A segment: elements of a thread that are neighbours in the output, SEGMENT_COLUMNS pixels of SEGMENT_CHANNELS channels.
constexpr int SEGMENT_CHANNELS = CHANNELS_LAST ? THREAD_CHANNELS : 1;
constexpr int SEGMENT_COLUMNS =
    ALL_W && SEGMENT_CHANNELS == (CHANNELS_LAST ? OUT_CHANNELS : 1) ? (ADJACENT ? THREAD_COLUMNS : 1) * PHASES_W : 1;
constexpr int SEGMENT = SEGMENT_COLUMNS * SEGMENT_CHANNELS;

// The elements of the widest store that fits a segment and the alignment of each segment's first element. The columns of the
// output are a multiple of OUT_ROW_MULTIPLE.
constexpr int store_width() {
  int width = 1;
  const int pitch = !CHANNELS_LAST ? OUT_ROW_MULTIPLE : SEGMENT_COLUMNS > 1 ? OUT_ROW_MULTIPLE * OUT_CHANNELS : CO_GROUP;
  while (2 * width * sizeof(Element) <= 16 && SEGMENT % (2 * width) == 0 && pitch % (2 * width) == 0) width *= 2;
  return width;
}
// Stores the part of a segment that lies inside the output, which has `columns` more pixels and `channels` more channels.
__device__ __forceinline__ void store_segment(Element* to, const float (&segment)[SEGMENT], int columns, int channels) {
  constexpr int N = store_width();
  if (columns >= SEGMENT_COLUMNS && channels >= SEGMENT_CHANNELS) {
#pragma unroll
    for (int i = 0; i < SEGMENT; i += N) {
      Pack<N> pack;
#pragma unroll
      for (int j = 0; j < N; ++j) pack.elements[j] = store_as<Element>(segment[i + j]);
      *reinterpret_cast<Pack<N>*>(to + i) = pack;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < SEGMENT; ++i)
    if (i / SEGMENT_CHANNELS < columns && i % SEGMENT_CHANNELS < channels) to[i] = store_as<Element>(segment[i]);
}
