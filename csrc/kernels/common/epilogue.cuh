// The epilogue of a forward kernel, which changes a sum before it is stored. It adds the bias of the layer (HAS_BIAS), applies
// a norm with the running statistics at the time of the launch (NORMALIZES), then ACTIVATION. It computes in float32,
// whatever the type of the output.
//
// Constants, from tconv_swap/kernels/common/epilogue.py: HAS_BIAS, NORMALIZES, ACTIVATION, and Parameter, the element type of
// the norm's vectors of [out_channels].
#pragma once

#include "common/activation.cuh"

/// The argument that replaces the bias of a kernel where there is a norm or an activation. Absent vectors are null: the bias
/// without HAS_BIAS, all others without NORMALIZES, weight and shift of a norm without parameters.
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

/// The factors of an output channel: an output is the activation of its sum times `scale` plus `shift`.
struct Channel {
  Accumulate<Element>::type scale, shift;
};

/// Loads the factors of a channel; reads nothing if the channel does not exist.
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

/// Returns the output for `sum`.
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
