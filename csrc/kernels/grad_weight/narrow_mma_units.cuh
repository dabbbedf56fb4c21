// The units of one tile of narrow_mma.cu, included within its kernel twice: with INSIDE where the tile lies inside the input, and
// without. As text, because as a function the compiler gave the kernels of 16 bits other machine code.
#pragma unroll TILE_UNROLL
for (int first = 0; first < UNITS; first += DEPTH)
#pragma unroll
for (int slot = 0; slot < DEPTH; ++slot) {
  float x[M_TILES][2][4];
#pragma unroll
  for (int i = 0; i < M_TILES * 8; ++i) (&x[0][0][0])[i] = ahead[slot].value(i / 8, i / 4 % 2, i % 4);
  if (first + DEPTH < UNITS) {
    if constexpr (INSIDE)
      fetch_inside(first + DEPTH, slot, true);
    else
      fetch_unit(first + DEPTH, slot);
  } else if (step + 1 < steps) {
    if (slot == 0) {
      next_unit.advance(sizes);
      corner = corner_of(next_unit);
    }
    if constexpr (INSIDE)
      fetch_inside(0, slot, next_unit.down * TILE_H + row0 + rows_down(0, slot) < sizes.height);
    else
      fetch_unit(0, slot);
  }
  const int down = rows_down(first, slot), across = columns_across(first, slot);
  // Outside of the input x is zero, but the patch may hold an infinity, and their product would be NaN.
  if (!INSIDE && ih0 + row0 + down >= sizes.height) continue;
  const u32 unit_address = lane_address + 4 * (down * PIXEL_ROWS * ROW_PITCH + across * PIXEL_PITCH);
  // Pinned, so that each load has a constant offset from it.
  u32 patch[N_TILES];
#pragma unroll
  for (int n = 0; n < N_TILES; ++n) patch[n] = ptx::keep_in_register(unit_address + taps[n]);
  const auto factor = [&](int m, int q) {
    return Factor(x[m][0][q], x[m][1][q], x[m][0][q + 1], x[m][1][q + 1]);
  };
  const auto multiply_unit = [&](const auto& gathered) {
    if constexpr (PRECISION == ptx::IEEE) {
      // Both steps of a unit are added into one partial sum.
#pragma unroll
      for (int n = 0; n < N_TILES; ++n) {
        const Rounded patches[4] = {gathered(n, 0), gathered(n, 1), gathered(n, 2), gathered(n, 3)};
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
          float part[4];
          multiply<true>(part, factor(m, 0), patches[0], patches[1]);
          multiply<false>(part, factor(m, 2), patches[2], patches[3]);
          add(sum[m][n], part);
        }
      }
    } else {
#pragma unroll
      for (int q = 0; q < 4; q += 2) {
        Rounded patches[N_TILES][2];
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) patches[n][i] = gathered(n, q + i);
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
          const Factor a = factor(m, q);
#pragma unroll
          for (int n = 0; n < N_TILES; ++n) multiply<false>(sum[m][n], a, patches[n][0], patches[n][1]);
        }
      }
    }
  };
  const auto of_pixel = [&](int n, int q) { return __uint_as_float(ptx::load_shared(patch[n] + 4 * pixel_of(q, 0) * PIXEL_PITCH)); };
  const int unit_columns = sizes.width - (iw0 + column0 + across);
  if (INSIDE || (!BY_TILE && unit_columns >= 16)) {  // the same for all lanes
    multiply_unit([&](int n, int q) { return rounded(of_pixel(n, q)); });
  } else {
    const int columns = unit_columns - INPUT_VECTOR * t;
    multiply_unit([&](int n, int q) { return rounded(pixel_of(q, 0) < columns ? of_pixel(n, q) : 0.0f); });
  }
}
