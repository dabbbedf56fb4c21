// A block in evaluation as one program: a transposed convolution, the norm behind it with its running statistics at the time
// of the call, and the activation. An eager block calls the op on CUDA; blocks/evaluation.py has its schema and plans calls
// that are not in the cache. The op returns None and does nothing where a derivative is wanted, where something else has to
// see the call (is_plain in plain.h), and where no program of ours computes all of it.
#pragma once

#include "cast.h"
#include "plain.h"

#include <torch/csrc/autograd/functions/utils.h>

namespace tconv_swap {

constexpr int64_t BLOCK_STAGE = 24;

/// The vectors of a norm. All are absent where there is no norm; weight and bias also if it has no parameters.
struct NormVectors {
  const Maybe &weight, &bias, &mean, &variance;
};

inline bool may_compute_block(const Tensor& input, const Tensor& weight, const Maybe& bias, const NormVectors& norm) {
  return is_plain({&input, &weight, if_there(bias), if_there(norm.weight), if_there(norm.bias), if_there(norm.mean),
                   if_there(norm.variance)}) &&
         !torch::autograd::compute_requires_grad(input, weight, bias, norm.weight, norm.bias, norm.mean, norm.variance);
}

/// Called below autograd and autocasts. `words` are as block_words in blocks/evaluation.py writes them.
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
  const auto plan = plan_of(key_of(BLOCK_STAGE, tensors, words, backend), "tconv_swap::plan_block_call", [&] {
    return std::vector<c10::IValue>{as_list(tensors), words, std::string(backend)};
  });
  if (plan->is_pytorchs) return std::nullopt;
  return run(plan->steps.at(0), tensors).at(0).contiguous(plan->format);
}

// ---- the kernels of the op ---------------------------------------------------------------------------------------

inline Maybe block_output(const Tensor& input, const Tensor& weight, const Maybe& bias, const Maybe& norm_weight,
                          const Maybe& norm_bias, const Maybe& mean, const Maybe& variance, at::IntArrayRef words,
                          std::string_view backend) {
  const NormVectors norm{norm_weight, norm_bias, mean, variance};
  if (!may_compute_block(input, weight, bias, norm)) return std::nullopt;
  return compute_block(input, weight, bias, norm, words, backend);
}

/// An autocast casts what the layer reads; the vectors and statistics of the norm stay as they are.
inline Maybe cast_block_output(const Tensor& input, const Tensor& weight, const Maybe& bias, const NormVectors& norm,
                               at::IntArrayRef words, std::string_view backend, at::ScalarType dtype) {
  if (!may_compute_block(input, weight, bias, norm)) return std::nullopt;
  const Together cast = cast_together({input, weight, bias.value_or(Tensor())}, input.device().type(), dtype);
  return compute_block(cast[0], cast[1], as_maybe(cast[2]), norm, words, backend);
}

}  // namespace tconv_swap
