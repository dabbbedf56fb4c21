// Works of a block that stays, and teams of its warps that take them in turns: while one stores what it multiplied, the
// other multiplies. The rings of stages go on from one team's work to the other's, so each skips what is not its own.
#pragma once

/// Works of this block: body(index) for each, or, for one of several teams, for those that are its own.
template <class Body>
__device__ __forceinline__ void each_work(int works, const Body& body, int team = 0, int teams = 1) {
  for (int index = blockIdx.x + team * gridDim.x; index < works; index += gridDim.x * teams) body(index);
}

/// A team may wait for its stages only in its turn: a barrier's parity tells one phase from the next, but not from the
/// one after. One barrier for each team, in shared memory.
template <int COUNT>
struct Turns {
  ptx::u32 mine, theirs, parity;

  /// The first team's first turn comes by itself.
  __device__ __forceinline__ Turns(ptx::u32 barriers, int team)
      : mine(barriers + team * 8), theirs(barriers + (COUNT - 1 - team) * 8), parity(team == 0) {}
  __device__ __forceinline__ static void set_up(ptx::u32 barriers, int warps) {
    for (int team = 0; team < COUNT; ++team) ptx::init_barrier(barriers + team * 8, warps);
  }
  __device__ __forceinline__ void wait() {
    if constexpr (COUNT > 1) ptx::wait_for_phase(mine, parity);
    parity ^= 1;
  }
  /// By every warp.
  __device__ __forceinline__ void pass() const {
    if (COUNT > 1 && threadIdx.x % 32 == 0) ptx::arrive(theirs);
  }
};
