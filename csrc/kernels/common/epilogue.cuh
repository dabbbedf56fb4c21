// What a forward kernel does with a sum before it stores it: adds the layer's bias (HAS_BIAS); with NORMALIZES also applies
// a norm, by running statistics as they are when the kernel runs; then ACTIVATION. In float32, whatever is stored.
//
// Constants, which tconv_swap/kernels/common/epilogue.py writes: HAS_BIAS, NORMALIZES, ACTIVATION, and Parameter, the type of the
// norm's vectors of [out_channels].
#pragma once

#include "common/activation.cuh"

/// A kernel's argument in place of the bias, where there is a norm or an activation. What is absent is null: the bias without
/// HAS_BIAS, all vectors without NORMALIZES, weight and shift of a norm without parameters.
struct BlockEpilogue {
  const Element* bias;
  const Parameter *weight, *shift, *mean, *variance;
  float eps, slope;
};

constexpr bool HAS_BLOCK_EPILOGUE = NORMALIZES || ACTIVATION != IDENTITY;

template <bool IS_BLOCK>
struct EpilogueArgument {
  using type = const Element* __restrict__;  // the bias
};
template <>
struct EpilogueArgument<true> {
  using type = BlockEpilogue;
};
using Epilogue = EpilogueArgument<HAS_BLOCK_EPILOGUE>::type;

/// Of an output channel: an output is its sum times `scale` plus `shift`, activated.
struct Channel {
  Accumulate<Element>::type scale, shift;
};

/// Nothing is read of a channel that does not exist.
template <class Argument>
__device__ __forceinline__ Channel load_channel(const Argument& epilogue, int channel, bool exists = true) {
  Channel found{1, 0};
  if constexpr (!HAS_BLOCK_EPILOGUE) {
    if (HAS_BIAS && exists) found.shift = load_as(epilogue[channel]);
  } else {
    if (HAS_BIAS && exists) found.shift = load_as(epilogue.bias[channel]);
    if (NORMALIZES && exists) {
      found.scale = __frsqrt_rn(load_as(epilogue.variance[channel]) + epilogue.eps);
      if (epilogue.weight) found.scale *= load_as(epilogue.weight[channel]);
      found.shift = (found.shift - load_as(epilogue.mean[channel])) * found.scale;
      if (epilogue.shift) found.shift += load_as(epilogue.shift[channel]);
    }
  }
  return found;
}

/// The output that `sum` becomes.
template <class Argument, class Sum>
__device__ __forceinline__ Sum apply_epilogue(Sum sum, const Channel& channel, const Argument& epilogue) {
  if constexpr (NORMALIZES) {
    sum = fmaf(sum, channel.scale, channel.shift);
  } else if constexpr (HAS_BIAS) {
    sum += channel.shift;
  }
  if constexpr (ACTIVATION != IDENTITY) {
    sum = activate(sum, epilogue.slope);
  }
  return sum;
}
