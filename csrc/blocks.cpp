// Registers the ops of blocks: a norm with an activation (norm.h), a block in evaluation (block.h), one in training
// (training.h), and reflection padding (pad.h). They are a file of their own, so that it is compiled in parallel with call.cpp.
#include "block.h"
#include "pad.h"
#include "training.h"

#include <torch/library.h>

namespace tconv_swap {
namespace {

Maybe block_output_autocast(const Tensor& input, const Tensor& weight, const Maybe& bias, const Maybe& norm_weight,
                            const Maybe& norm_bias, const Maybe& mean, const Maybe& variance, at::IntArrayRef words,
                            std::string_view backend) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKeySet(c10::DispatchKey::AutocastCUDA));
  return cast_block_output(input, weight, bias, {norm_weight, norm_bias, mean, variance}, words, backend,
                           at::autocast::get_autocast_dtype(at::kCUDA));
}

/// `casts`: whether an autocast is active.
template <bool casts>
std::tuple<Maybe, bool> block_training(const Tensor& input, const Tensor& weight, const Maybe& bias, const Maybe& norm_weight,
                                       const Maybe& norm_bias, const Maybe& running_mean, const Maybe& running_var,
                                       const Maybe& batches, at::IntArrayRef geometry, std::string_view backend,
                                       at::IntArrayRef form) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKeySet(c10::DispatchKey::AutocastCUDA));
  return call_block(input, weight, bias, {norm_weight, norm_bias, running_mean, running_var, batches}, geometry, backend, form,
                    casts ? std::optional(at::autocast::get_autocast_dtype(at::kCUDA)) : std::nullopt);
}

}  // namespace
}  // namespace tconv_swap

TORCH_LIBRARY_IMPL(tconv_swap, CUDA, library) {
  library.impl("norm_activation", &tconv_swap::norm_activation);
  library.impl("reflection_pad", &tconv_swap::reflection_pad);
  library.impl("block_output", &tconv_swap::block_output);
  library.impl("block_training", &tconv_swap::block_training<false>);
}

TORCH_LIBRARY_IMPL(tconv_swap, AutogradCUDA, library) {
  library.impl("norm_activation", &tconv_swap::norm_activation);
  library.impl("reflection_pad", &tconv_swap::reflection_pad);
  library.impl("block_output", &tconv_swap::block_output);
  library.impl("block_training", &tconv_swap::block_training<false>);
}

TORCH_LIBRARY_IMPL(tconv_swap, AutocastCUDA, library) {
  library.impl("block_output", &tconv_swap::block_output_autocast);
  library.impl("block_training", &tconv_swap::block_training<true>);
}
