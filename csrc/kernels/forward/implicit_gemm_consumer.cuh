// The consumers of forward/implicit_gemm_{wgmma,tma,tma_nchw}.cu: threads that multiply and store.
#pragma once

/// Adds the products of one chunk to `sums`. `weights` describes the warpgroup's weights, `input` its first position with the
/// smallest shifts, `row_pitch` the pixels from a row to the next. Calls `after` with its number after each tap of a step.
template <int GROUP_ROW, int GROUP_COL, class After>
__device__ __forceinline__ void multiply_chunk(Sums& sums, ptx::u64 weights, ptx::u64 input, int row_pitch, const After& after) {
  constexpr int STEP = TMA_WEIGHTS ? TMA_STEP_WEIGHTS : group_taps(GROUP_ROW * GROUP_COLS + GROUP_COL) * TAP_WORDS / 4;
  constexpr int STEP_INPUT = PIXEL_MAJOR ? 16 * BOX_ROW_BYTES / 16 : TMA_INPUT ? 2 : STEP_WORDS / 4 * PLANE_PITCH;
#pragma unroll
  for (int step = 0; step < CHUNK_STEPS; ++step)
    static_for<0, TAPS>([&](auto index) {
      constexpr int KH = decltype(index)::value / KERNEL_W, KW = decltype(index)::value % KERNEL_W;
      if constexpr (ROWS_AXIS.group(KH) == GROUP_ROW && COLS_AXIS.group(KW) == GROUP_COL) {
        constexpr int RANK = ROWS_AXIS.rank(KH) * COLS_AXIS.count(GROUP_COL) + COLS_AXIS.rank(KW);
        constexpr int PHASE = ROWS_AXIS.phase(KH) % PHASE_ROWS * PHASE_COLS + COLS_AXIS.phase(KW) % PHASE_COLS;
        constexpr int SHIFT_H = ROWS_AXIS.shift(KH) - MIN_SHIFT_H, SHIFT_W = (COLS_AXIS.shift(KW) - MIN_SHIFT_W) * (NARROW ? SHIFTED_PITCH : 1);
#pragma unroll
        for (int image = 0; image < MULTIPLY_IMAGES; ++image)
#pragma unroll
          for (int i = 0; i < MULTIPLIES; ++i)
            ptx::wgmma<PRECISION, MULTIPLY_POSITIONS, true, TMA_WEIGHTS, PIXEL_MAJOR>(
                NARROW ? sums.at(PHASE, 0, 0, 0, i) : sums.at(PHASE, 0, image, i * MULTIPLY_COLS, 0), weights + step * STEP + RANK * TAP_WEIGHTS,
                input + step * STEP_INPUT + SHIFT_H * row_pitch * (PIXEL_BYTES / 16) + (SHIFT_W + image * IMAGE_PITCH + i * (8 * MULTIPLY_COLS)) * (PIXEL_BYTES / 16));
        after(step * TAPS + decltype(index)::value);
      }
    });
}

/// Tells the producers that this warp has multiplied a stage.
__device__ __forceinline__ void release(u32 empty) {
  if (threadIdx.x % 32 == 0) ptx::arrive(empty);
}

template <int GROUP_ROW, int GROUP_COL>
__device__ __forceinline__ void add_chunks(Sums& sums, Ring& ring, int chunks, int weights_from, int input_from, int group_pitch, int row_pitch) {
  // If this loop were unrolled, the compiler would wait between the first multiplies.
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    ptx::wait_for_phase(ring.full(), ring.parity);
    ptx::fence_wgmma();
    const ptx::u64 weights = weights_descriptor((RESIDENT_WEIGHTS ? ring.base + RESIDENT_AT + chunk * (WEIGHT_WORDS * 4) : ring.weights()) + weights_from);
    const ptx::u64 input = input_descriptor(ring.input() + input_from, group_pitch);
    if constexpr (STAGGER > 0) {
      multiply_chunk<GROUP_ROW, GROUP_COL>(sums, weights, input, row_pitch, [&](int product) {
        ptx::commit_wgmma();
        ptx::wait_wgmma<PENDING>();
        if (product == PENDING - 1 && chunk > 0) release(ring.empty_before());
        if (product == STAGGER % PRODUCTS && chunk == STAGGER / PRODUCTS && threadIdx.x < 128) release(ring.base + STAGGER_BARRIER);
      });
    } else {
      multiply_chunk<GROUP_ROW, GROUP_COL>(sums, weights, input, row_pitch, [](int) {});
      ptx::commit_wgmma();
      ptx::wait_wgmma<1>();
      if (chunk > 0) release(ring.empty_before());
    }
    ring.advance();
  }
  ptx::wait_wgmma<0>();
  release(ring.empty_before());
}

__device__ __forceinline__ void run_consumer(u32 shared, char* memory, const Epilogue& epilogue, Out* output, const TileSizes& sizes) {
  const int warp = threadIdx.x / 32, warp_m = warp % WARPS_M, warp_n = warp / WARPS_M;
  int warp_w = warp_n % WARPS_W * (WARP_COLS * FRAGMENT_W);
  int warp_h = warp_n / WARPS_W % WARPS_H * (WARP_ROWS * FRAGMENT_H);
  int warp_image = warp_n / (WARPS_W * WARPS_H) * (WARP_IMAGES * FRAGMENT_N);
  int group_pitch = GROUP_PITCH, row_pitch = ROW_PITCH;
  int first_pixel = warp_image * IMAGE_PITCH + warp_h * POSITION_INPUT_ROWS * ROW_PITCH + warp_w + LEFT_PAD;
  if constexpr (SHAPED) {
    const TileShape& shape = shape_of(sizes);
    warp_image = warp_n * shape.warpgroup_images, warp_h = warp_n * shape.warpgroup_rows, warp_w = warp_n * shape.warpgroup_cols;
    group_pitch = shape.group_pixels, row_pitch = shape.row_pixels, first_pixel = warp_n * shape.warpgroup_pixels;
  }
  Out* staged = reinterpret_cast<Out*>(memory + STAGED_AT + warp * SUBTILE_BUFFER);

  Ring ring(shared);
  const BlockWork block(sizes);
  for (int index = block.first; index < block.end; ++index) {
    const WorkTile work(index, sizes);
    Sums sums;
    sums.clear();
    if constexpr (STAGGER > 0) {
      if (warp >= 4) ptx::wait_for_phase(shared + STAGGER_BARRIER, (index - block.first) % 2);
    }
    if constexpr (ROWS_AXIS.uniform() && COLS_AXIS.uniform()) {
      add_chunks<0, 0>(sums, ring, work.chunks, warp_m / 4 * WARPGROUP_WEIGHTS, first_pixel * PIXEL_BYTES, group_pitch, row_pitch);
    } else {
      static_for<0, PHASE_GROUPS>([&](auto index) {
        constexpr int GROUP = decltype(index)::value;
        if (work.phase_group == GROUP)
          add_chunks<GROUP / GROUP_COLS, GROUP % GROUP_COLS>(sums, ring, work.chunks, warp_m / 4 * WARPGROUP_WEIGHTS, first_pixel * PIXEL_BYTES, group_pitch, row_pitch);
      });
    }
    Out* to = output;
    if constexpr (PARTIAL) to += static_cast<long long>(work.split) * sizes.batch * OUT_CHANNELS * sizes.out_pixels();
    if constexpr (WHOLE_LINES)
      store_lines(sums, to, epilogue, shared + STAGED_AT + warp / 4 * (4 * SUBTILE_BUFFER), work.origin, work.group,
                  work.m_block * BLOCK_CHANNELS + warp_m / 4 * 64, warp_image, warp_h, warp_w,
                  work.phase_group / GROUP_COLS * PHASE_ROWS, work.phase_group % GROUP_COLS * PHASE_COLS, sizes);
    else
      store_warp(sums, to, epilogue, staged, work.origin, work.group, work.m_block * BLOCK_CHANNELS, warp_m * 16, warp_image,
               warp_h, warp_w, work.phase_group / GROUP_COLS * PHASE_ROWS, work.phase_group % GROUP_COLS * PHASE_COLS, sizes);
  }
}

