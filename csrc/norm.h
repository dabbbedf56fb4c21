// The one way of a norm and of the activation behind it: an op that an eager block calls on CUDA (blocks/kernels.py has its
// schema, and answers for calls that are not known). Each kind of call is found among the answers of answers.h, launched,
// and hangs one autograd node where a derivative is wanted. What others want to see is left to PyTorch's modules: nothing
// is done, and None returned.
#pragma once

#include "compute.h"
#include "plain.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

namespace tconv_swap {

using Maybe = std::optional<Tensor>;

inline const Tensor* if_there(const Tensor& tensor) { return tensor.defined() ? &tensor : nullptr; }
inline const Tensor* if_there(const Maybe& tensor) { return tensor ? if_there(*tensor) : nullptr; }
inline Maybe as_maybe(const Tensor& tensor) { return tensor.defined() ? Maybe(tensor) : std::nullopt; }

// As kernels.py numbers them. Of a backward pass: 1 more for the gradient of the input, 2 for those of weight and bias.
constexpr int64_t NORM_FORWARD = 16, NORM_FORWARD_THAT_SAVES = 17, NORM_BACKWARD = 18;
constexpr size_t AVERAGES = 0;  // of a form's words: num_batches_tracked goes up, and gives the momentum

inline std::shared_ptr<const Answer> norm_answer_to(int64_t stage, Tensors tensors, at::IntArrayRef form) {
  return known_or_asked(key_of(stage, tensors, form, ""), [&] {
    return by_python("tconv_swap::norm_answer", {as_list(tensors), form, stage}).toIntVector();
  });
}

// ---- the backward pass -----------------------------------------------------------------------------------------

/// What a backward pass begins from. `statistics`: means and 1 / sqrt(variance + eps).
struct Kept {
  const Tensor &input, &weight, &bias, &statistics;
};

/// Of a parameter of `like`'s kind, from what a kernel wrote: for each image by itself, or as it is.
inline Tensor summed_over_images(const Tensor& found, const Tensor& like) {
  if (found.numel() == like.numel()) return found.to(like.scalar_type());
  return found.view({-1, like.numel()}).sum(0).to(like.scalar_type());
}

inline Gradients norm_gradients(const Tensor& grad_output, const Kept& kept, at::IntArrayRef form, const Mask& mask) {
  const bool of_parameters = mask[1] || mask[2];
  const Tensors tensors = {&grad_output, &kept.input, &kept.statistics, if_there(kept.weight), if_there(kept.bias)};
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto answer = norm_answer_to(NORM_BACKWARD + mask[0] + 2 * of_parameters, tensors, form);
  const std::vector<Tensor> found = run(answer->steps.at(0), tensors);
  Gradients gradients;
  if (mask[0]) gradients[0] = found.at(0);
  if (mask[1]) gradients[1] = summed_over_images(found.at(mask[0]), kept.weight);
  if (mask[2]) gradients[2] = summed_over_images(found.at(mask[0] + 1), kept.bias);
  return gradients;
}

/// PyTorch's own formulation, which autograd, functorch and modes know.
inline Gradients norm_gradients_by_pytorch(const Tensor& grad_output, const Kept& kept, at::IntArrayRef form,
                                           const Mask& mask) {
  const auto found = by_python("tconv_swap::norm_gradients_by_pytorch",
                               {grad_output, kept.input, kept.statistics, as_maybe(kept.weight), as_maybe(kept.bias), form,
                                as_list(mask)})
                         .toTensorVector();
  Gradients gradients;
  for (size_t i = 0, next = 0; i < 3; ++i)
    if (mask[i]) gradients[i] = found.at(next++);
  return gradients;
}

struct NormActivationBackward : torch::autograd::Node {
  torch::autograd::SavedVariable input, weight, bias, statistics;
  std::vector<int64_t> form;

  std::string name() const override { return "NormActivationBackward"; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* saved : {&input, &weight, &bias, &statistics}) saved->reset_data();
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const Tensor x = input.unpack(), w = weight.unpack(), b = bias.unpack(), s = statistics.unpack();
    torch::autograd::variable_list gradients(3);
    const Mask mask{task_should_compute_output(0), task_should_compute_output(1), task_should_compute_output(2)};
    if (!grads[0].defined() || stage_of(mask) == 0) return gradients;
    auto keys = grads[0].key_set();
    for (const Tensor* tensor : {&x, &w, &b, &s}) keys = keys | tensor->key_set();
    const bool is_ours = !at::GradMode::is_enabled() && is_plain(keys);
    Gradients found = (is_ours ? norm_gradients : norm_gradients_by_pytorch)(grads[0], {x, w, b, s}, form, mask);
    for (size_t i = 0; i < 3; ++i) gradients[i] = std::move(found[i]);
    return gradients;
  }
};

/// Makes `output`, which is computed, differentiable.
inline void hang_node(const Tensor& output, const Kept& kept, at::IntArrayRef form) {
  const std::shared_ptr<NormActivationBackward> node(new NormActivationBackward, torch::autograd::deleteNode);
  node->set_next_edges(torch::autograd::collect_next_edges(kept.input, kept.weight, kept.bias));
  node->input = torch::autograd::SavedVariable(kept.input, false);
  node->weight = torch::autograd::SavedVariable(kept.weight, false);
  node->bias = torch::autograd::SavedVariable(kept.bias, false);
  node->statistics = torch::autograd::SavedVariable(kept.statistics, false);
  node->form = form.vec();
  torch::autograd::set_history(output, node);
}

// ---- the kernel of the op ---------------------------------------------------------------------------------------

inline Maybe norm_activation(const Tensor& input, const Maybe& weight, const Maybe& bias, const Maybe& running_mean,
                             const Maybe& running_var, const Maybe& batches, at::IntArrayRef form) {
  auto keys = input.key_set();
  for (const Maybe* one : {&weight, &bias, &running_mean, &running_var, &batches})
    if (*one) keys = keys | (*one)->key_set();
  if (!is_plain(keys)) return std::nullopt;
  const Tensor w = weight.value_or(Tensor()), b = bias.value_or(Tensor());
  const bool differentiates = torch::autograd::compute_requires_grad(input, w, b);
  std::vector<Tensor> found;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const Tensors tensors = {&input,                if_there(w),           if_there(b),
                             if_there(running_mean), if_there(running_var), if_there(batches)};
    const auto answer = norm_answer_to(differentiates ? NORM_FORWARD_THAT_SAVES : NORM_FORWARD, tensors, form);
    if (answer->is_pytorchs) return std::nullopt;
    if (form[AVERAGES]) batches->add_(1);
    found = run(answer->steps.at(0), tensors);
    // As PyTorch's module, which counts by an operator of its own.
    if (batches && !batches->is_inference()) batches->unsafeGetTensorImpl()->bump_version();
  }
  if (differentiates) hang_node(found.at(0), {input, w, b, found.at(1)}, form);
  return std::move(found.at(0));
}

}  // namespace tconv_swap
