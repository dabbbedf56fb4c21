// Boxes of tensors to shared memory and back by the copy engine (TMA, sm_90): a tensor map (program.TensorMap) says how
// the tensor lies, one thread asks, a barrier of common/pipeline.cuh learns when the bytes are there. What of a box lies outside
// the tensor arrives as zeros and is not written.
//
// With a swizzle of 128 bytes a box of rows of 128 bytes lies as rows, [row][128 bytes], whose 16-byte pieces are permuted
// by bits 7 to 9 of their address. The multiplier undoes that by the address too, so an operand may begin at any row:
// a tap's shift is an address (measured on an H200: right at every shift and pitch, along k and across it, at full
// speed, as long as the descriptor's base offset stays 0 and the box began at a multiple of 1024 bytes).
#pragma once

/// A kernel takes it by value: `const __grid_constant__ TensorMap map`.
struct alignas(64) TensorMap {
  char bytes[128];
};

namespace ptx {

/// Tell the copy engine early which map comes.
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// A box whose first element is (x0, x1, x2, x3), innermost first; may begin outside. x0 counts a multiple of 16 bytes, or
/// an illegal instruction is raised (seen on an H200 at -1, float32).
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

/// The same to every block of the cluster whose bit is set in `blocks`: to the same place, on the same barrier.
__device__ __forceinline__ void tma_load_multicast(u32 to, const TensorMap& map, int x0, int x1, int x2, u32 barrier,
                                                    unsigned short blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "h"(blocks)
      : "memory");
}

}  // namespace ptx
