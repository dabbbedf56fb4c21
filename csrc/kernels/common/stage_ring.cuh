// The ring of stages that hold input and weights. Needs STAGES, STAGE_WORDS, INPUT_WORDS and BARRIERS.
#pragma once

#include "common/stages.cuh"

struct Ring : StageRing<STAGES, 0, STAGE_WORDS * 4, BARRIERS> {
  using StageRing::StageRing;
  __device__ __forceinline__ u32 input() const { return data(); }
  __device__ __forceinline__ u32 weights() const { return input() + round_up(INPUT_WORDS, 4) * 4; }
};
