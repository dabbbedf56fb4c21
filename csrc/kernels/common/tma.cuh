// Loads of boxes of a tensor to shared memory by TMA (sm_90). A tensor map (program.TensorMap) describes the tensor, one
// thread issues the load, and a barrier of common/pipeline.cuh completes when the bytes have arrived. The part of a box that
// lies outside the tensor is filled with zeros.
//
// With a swizzle of 128 bytes, a box with rows of 128 bytes lies as [row][128 bytes], and bits 7 to 9 of the address permute
// its 16-byte pieces. The multiplier undoes this by the address as well, so an operand may begin at any row: the shift of a
// tap is an address. (Measured on an H200: right at every shift and pitch, along k and across it, at full speed, if the base
// offset of the descriptor is 0 and the box begins at a multiple of 1024 bytes.)
#pragma once

/// A kernel takes a tensor map by value: `const __grid_constant__ TensorMap map`.
struct alignas(64) TensorMap {
  char bytes[128];
};

namespace ptx {

/// Prefetches a tensor map.
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Loads the box whose first element is (x0, x1, x2, x3), innermost first. It may begin outside the tensor. x0 must be a
/// multiple of 16 bytes, or the GPU raises an illegal instruction (seen on an H200 at -1, float32).
__device__ __forceinline__ void tma_load(u32 to, const TensorMap& map, int x0, int x1, int x2, int x3, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
      : "memory");
}
__device__ __forceinline__ void tma_load(u32 to, const TensorMap& map, int x0, int x1, int x2, int x3, int x4, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}
__device__ __forceinline__ void tma_load(u32 to, const TensorMap& map, int x0, int x1, int x2, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2)
      : "memory");
}
__device__ __forceinline__ void tma_load(u32 to, const TensorMap& map, int x0, int x1, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x0), "r"(x1)
      : "memory");
}

/// Loads pixels in a row of (channel, column, row, image) on, in im2col mode: those of the map's box whose first column and row
/// these are, with `col_offset` and `row_offset` (from 0 to 255) added to the column and row of each.
__device__ __forceinline__ void tma_load_im2col(u32 to, const TensorMap& map, int channel, int col, int row, int image, int col_offset,
                                                int row_offset, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2], {%7, %8};" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(channel), "r"(col), "r"(row), "r"(image), "h"(static_cast<unsigned short>(col_offset)),
      "h"(static_cast<unsigned short>(row_offset))
      : "memory");
}

}  // namespace ptx
