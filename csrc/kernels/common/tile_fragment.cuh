// Fragments of the input (for its gradient, of grad_output) from shared memory for mma.sync.
#pragma once

/// Loads one fragment as it lies in shared memory.
__device__ __forceinline__ void load_fragment(u32 (&b)[2], u32 address) {
  if constexpr (INPUT_CHANNELS_LAST) {
    ptx::load_matrices(b, address);
  } else {
    b[0] = ptx::load_shared(address);
    b[1] = ptx::load_shared(address + 4 * K_PITCH * 4);
  }
}

/// Rounds float32 in `fragment` to TF32; with PARTS == 2, `low` receives the rest.
__device__ __forceinline__ void split_fragment(u32 (&fragment)[2], [[maybe_unused]] u32 (&low)[2]) {
  if constexpr (!IS_16_BIT) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 exact = fragment[i];
      fragment[i] = ptx::round_to_tf32(exact);
      if constexpr (PARTS == 2) low[i] = ptx::low_part(__uint_as_float(exact), fragment[i]);
    }
  }
}
