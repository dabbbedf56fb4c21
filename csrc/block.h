// The one way of a block in evaluation: a transposed convolution, the norm behind it by its running statistics as they are at
// the call, and the activation, as one program. An op that an eager block calls on CUDA (blocks/evaluation.py has its schema,
// and answers for calls that are not known). Where a derivative is wanted, where somebody wants to see the call, and where
// no program of ours computes all of it, nothing is done, and None returned.
#pragma once

#include "cast.h"
#include "plain.h"

#include <torch/csrc/autograd/functions/utils.h>

namespace tconv_swap {

constexpr int64_t BLOCK_STAGE = 24;

/// Of a norm; absent where there is none, weight and bias also of a norm without parameters.
struct NormVectors {
  const Maybe &weight, &bias, &mean, &variance;
};

inline bool may_compute_block(const Tensor& input, const Tensor& weight, const Maybe& bias, const NormVectors& norm) {
  auto keys = input.key_set() | weight.key_set();
  for (const Maybe* one : {&bias, &norm.weight, &norm.bias, &norm.mean, &norm.variance})
    if (*one) keys = keys | (*one)->key_set();
  return is_plain(keys) &&
         !torch::autograd::compute_requires_grad(input, weight, bias, norm.weight, norm.bias, norm.mean, norm.variance);
}

/// Below autograd and autocasts. `words`: as block_words in blocks/evaluation.py writes them.
inline Maybe compute_block(const Tensor& input, const Tensor& weight, const Maybe& bias, const NormVectors& norm,
                           at::IntArrayRef words, std::string_view backend) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensors tensors = {&input,
                           &weight,
                           if_there(bias),
                           if_there(norm.weight),
                           if_there(norm.bias),
                           if_there(norm.mean),
                           if_there(norm.variance)};
  const auto answer = known_or_asked(key_of(BLOCK_STAGE, tensors, words, backend), [&] {
    return by_python("tconv_swap::block_answer", {as_list(tensors), words, std::string(backend)}).toIntVector();
  });
  if (answer->is_pytorchs) return std::nullopt;
  return run(answer->steps.at(0), tensors).at(0).contiguous(answer->format);
}

// ---- the kernels of the op ---------------------------------------------------------------------------------------

inline Maybe block_output(const Tensor& input, const Tensor& weight, const Maybe& bias, const Maybe& norm_weight,
                          const Maybe& norm_bias, const Maybe& mean, const Maybe& variance, at::IntArrayRef words,
                          std::string_view backend) {
  const NormVectors norm{norm_weight, norm_bias, mean, variance};
  if (!may_compute_block(input, weight, bias, norm)) return std::nullopt;
  return compute_block(input, weight, bias, norm, words, backend);
}

/// An autocast casts what the layer reads; a norm's vectors and statistics stay as they are.
inline Maybe cast_block_output(const Tensor& input, const Tensor& weight, const Maybe& bias, const NormVectors& norm,
                               at::IntArrayRef words, std::string_view backend, at::ScalarType dtype) {
  if (!may_compute_block(input, weight, bias, norm)) return std::nullopt;
  const Together cast = cast_together({input, weight, bias.value_or(Tensor())}, input.device().type(), dtype);
  return compute_block(cast[0], cast[1], as_maybe(cast[2]), norm, words, backend);
}

}  // namespace tconv_swap
