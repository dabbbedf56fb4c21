// The ring whose stages hold input and weights. Included where STAGES, STAGE_WORDS, INPUT_WORDS and BARRIERS are known.
#pragma once

#include "common/stages.cuh"

struct Ring : StageRing<STAGES, 0, STAGE_WORDS * 4, BARRIERS> {
  using StageRing::StageRing;
  __device__ __forceinline__ u32 input() const { return data(); }
  __device__ __forceinline__ u32 weights() const { return input() + round_up(INPUT_WORDS, 4) * 4; }
};
