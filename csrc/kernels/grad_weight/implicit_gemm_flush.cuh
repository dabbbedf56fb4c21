// Of grad_weight/implicit_gemm_{wgmma,wgmma_tf32,tma}.cu: the loop over a split's tiles of pixels, in flushes. The tensor cores
// truncate their sums, so every sizes.flush tiles the sums are added, rounded to nearest, to the workspace.
#pragma once

/// Calls multiply_tiles(sums, index, end) for each flush, which multiplies the tiles from `index` to `end`, advances `index`
/// and waits for its multiplies. Stores the sums: to the workspace, or after before_store() to the gradient by way of `shared`.
template <class MultiplyTiles, class BeforeStore>
__device__ __forceinline__ void multiply_and_store(const Place& place, const GradWeightTileSizes& sizes, int count, int warp, int warp_k,
                                                   int lane, float* shared, float4* partial, Element* gradient,
                                                   const MultiplyTiles& multiply_tiles, const BeforeStore& before_store) {
  int index = 0;
  float sums[FRAGMENTS][4];
  do {
    const int first = index, end = sizes.flush < count - index ? index + sizes.flush : count;
#pragma unroll
    for (auto& fragment : sums)
#pragma unroll
      for (float& sum : fragment) sum = 0.f;
    multiply_tiles(sums, index, end);
    if (end == count) ptx::let_next_launch_start();
    if (sizes.through_workspace) store_partial(sums, place, warp, lane, place.split * WARPS_K + warp_k, partial, first > 0);
  } while (index < count);
  if (sizes.through_workspace) return;
  before_store();
  store_gradient(sums, place, warp, lane, shared, gradient);
}
