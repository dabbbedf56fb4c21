// Of grad_weight/im2col_nchw.cu and grad_weight/im2col_nhwc.cu: the consumers' multiplies, with A fragments in registers and B in
// shared memory. Included where M_TILES, TILE_CI, STEPS, Ring and AFragments are known.
#pragma once

/// The consumer: one warp's multiplies. While a step is multiplied, the next step's fragments are loaded.
/// wait_for_stage(ring) returns when the stage is full; load(fragments, stage address, step) loads A; step_offset(step) are
/// bytes from the beginning of the stage to B, in rows of ROW_BYTES; end_stage() follows a stage's last step.
template <int ROW_BYTES, class Wait, class Load, class StepOffset, class EndStage>
__device__ __forceinline__ void multiply_stages(Ring ring, float (&sums)[M_TILES][TILE_CI / 2], int lane, int stages, const Wait& wait_for_stage,
                                                const Load& load, const StepOffset& step_offset, const EndStage& end_stage) {
#pragma unroll
  for (auto& m_tile : sums)
#pragma unroll
    for (float& sum : m_tile) sum = 0.f;
  AFragments even, odd;
  for (int s = 0; s < stages; ++s) {
    wait_for_stage(ring);
    const ptx::u64 b = ptx::swizzled_descriptor<ROW_BYTES>(ring.data(), 16, 8 * ROW_BYTES);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      AFragments& a = step % 2 ? odd : even;
      load(a, ring.data(), step);
      ptx::fence_wgmma();
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) ptx::wgmma_from_registers<TILE_CI>(sums[m], a[m], b + step_offset(step) / 16);
      ptx::commit_wgmma();
      // The step before is multiplied, so its registers are free; after the first step also the stage before is.
      ptx::wait_wgmma<1>();
      if (step == 0 && s > 0 && lane == 0) ptx::arrive(ring.empty_before());
    }
    end_stage();
    ring.advance();
  }
  ptx::wait_wgmma<0>();
}
