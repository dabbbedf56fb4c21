// A norm, a tensor that is added to its output, and the activation behind them, as one op that an eager block calls on CUDA.
// blocks/kernels.py has its schema and plans calls that are not in the cache. The op launches the plan and adds one autograd
// node where a derivative is wanted. Where something else has to see the call (is_plain in plain.h), it does nothing and
// returns None: PyTorch's modules then compute the call.
#pragma once

#include "compute.h"
#include "plain.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

namespace tconv_swap {

// The numbers of blocks/kernels.py. A backward pass adds 1 for the gradient of the input, 2 for those of weight and bias.
constexpr int64_t NORM_FORWARD = 16, NORM_FORWARD_THAT_SAVES = 17, NORM_BACKWARD = 18;
constexpr size_t AVERAGES = 0;  // the word of a form that says that num_batches_tracked is counted and gives the momentum

inline std::shared_ptr<const CallPlan> plan_of_norm(int64_t stage, Tensors tensors, at::IntArrayRef form) {
  return plan_of(key_of(stage, tensors, form, ""), "tconv_swap::plan_norm_call",
                 [&] { return std::vector<c10::IValue>{as_list(tensors), form, stage}; });
}

// ---- the backward pass -----------------------------------------------------------------------------------------

using NormMask = std::array<bool, 4>;         // which of the gradients of input, weight, bias and what was added
using NormGradients = std::array<Tensor, 4>;  // of these; undefined where the mask leaves it out

/// The tensors that a backward pass needs. `statistics`: means and 1 / sqrt(variance + eps). `output` is defined only where
/// a tensor was added.
struct Kept {
  const Tensor &input, &weight, &bias, &statistics, &output;
};

/// Returns the gradient of a parameter of the shape and dtype of `like`. A kernel may have written one for each image.
inline Tensor summed_over_images(const Tensor& found, const Tensor& like) {
  if (found.numel() == like.numel()) return found.to(like.scalar_type());
  return found.view({-1, like.numel()}).sum(0).to(like.scalar_type());
}

/// Returns the output in the format that the kernel reads. A hook of autograd's may have changed its layout; a call plan
/// copies only the first three tensors of a step, and this is the sixth.
inline Tensor laid_out(const Tensor& output, at::MemoryFormat format) {
  if (!output.defined()) return output;
  const bool is_aligned = reinterpret_cast<uintptr_t>(output.const_data_ptr()) % ALIGNMENT == 0;
  return is_aligned && output.is_contiguous(format) ? output : copy_of(output, format);
}

inline NormGradients norm_gradients(const Tensor& grad_output, const Kept& kept, at::IntArrayRef form,
                                    const NormMask& mask) {
  const bool of_input = mask[0] || kept.output.defined();  // kernels of a sum always write it
  const bool of_parameters = mask[1] || mask[2];
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto plan = plan_of_norm(NORM_BACKWARD + of_input + 2 * of_parameters,
                                     {&grad_output, &kept.input, &kept.statistics, if_there(kept.weight),
                                      if_there(kept.bias), if_there(kept.output)},
                                     form);
  const Tensor output = laid_out(kept.output, plan->format);
  const std::vector<Tensor> found =
      run(plan->steps.at(0), {&grad_output, &kept.input, &kept.statistics, if_there(kept.weight), if_there(kept.bias),
                                if_there(output)});
  NormGradients gradients;
  if (mask[0]) gradients[0] = found.at(0);
  if (mask[1]) gradients[1] = summed_over_images(found.at(of_input), kept.weight);
  if (mask[2]) gradients[2] = summed_over_images(found.at(of_input + 1), kept.bias);
  if (mask[3]) gradients[3] = found.back();
  return gradients;
}

/// Returns the gradients by PyTorch's own operators, which autograd, functorch and modes support.
inline NormGradients norm_gradients_by_pytorch(const Tensor& grad_output, const Kept& kept, at::IntArrayRef form,
                                               const NormMask& mask) {
  const auto found = by_python("tconv_swap::norm_gradients_by_pytorch",
                               {grad_output, kept.input, kept.statistics, as_maybe(kept.weight), as_maybe(kept.bias),
                                as_maybe(kept.output), form, c10::List<bool>({mask[0], mask[1], mask[2], mask[3]})})
                         .toTensorVector();
  NormGradients gradients;
  for (size_t i = 0, next = 0; i < mask.size(); ++i)
    if (mask[i]) gradients[i] = found.at(next++);
  return gradients;
}

/// What the gradients of a norm need.
struct SavedNorm {
  torch::autograd::SavedVariable input, weight, bias, statistics;
  // Where a tensor was added: the output, as PyTorch's activations save it. The added tensor may change meanwhile.
  torch::autograd::SavedVariable output;
  std::vector<int64_t> form;

  SavedNorm(const Kept& kept, at::IntArrayRef form)
      : input(kept.input, false),
        weight(kept.weight, false),
        bias(kept.bias, false),
        statistics(kept.statistics, false),
        form(form.vec()) {}

  void release() {
    for (auto* saved : {&input, &weight, &bias, &statistics, &output}) saved->reset_data();
  }

  /// Returns the gradients, differentiable where grad mode is on. `x`: the unpacked input. `z`: the unpacked output.
  NormGradients gradients(const Tensor& grad_output, const Tensor& x, const Tensor& z, const NormMask& mask) const {
    const Tensor w = weight.unpack(), b = bias.unpack(), s = statistics.unpack();
    const bool is_ours = !at::GradMode::is_enabled() && is_plain({&grad_output, &x, &w, &b, &s, &z});
    return (is_ours ? norm_gradients : norm_gradients_by_pytorch)(grad_output, {x, w, b, s, z}, form, mask);
  }
};

struct NormActivationBackward : torch::autograd::Node {
  SavedNorm saved;

  explicit NormActivationBackward(SavedNorm saved) : saved(std::move(saved)) {}

  std::string name() const override { return "NormActivationBackward"; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    saved.release();
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const Tensor x = saved.input.unpack(), z = saved.output.unpack(getptr());
    torch::autograd::variable_list gradients(4);
    NormMask mask;
    for (size_t i = 0; i < mask.size(); ++i) mask[i] = task_should_compute_output(i);
    if (!grads[0].defined() || mask == NormMask{}) return gradients;
    NormGradients found = saved.gradients(grads[0], x, z, mask);
    for (size_t i = 0; i < mask.size(); ++i) gradients[i] = std::move(found[i]);
    return gradients;
  }
};

/// Makes the computed `output` differentiable. `added` is undefined where nothing was added.
inline void hang_node(const Tensor& output, const Kept& kept, const Tensor& added, at::IntArrayRef form) {
  const std::shared_ptr<NormActivationBackward> node(new NormActivationBackward({kept, form}), torch::autograd::deleteNode);
  node->set_next_edges(torch::autograd::collect_next_edges(kept.input, kept.weight, kept.bias, added));
  torch::autograd::set_history(output, node);
  if (kept.output.defined()) node->saved.output = torch::autograd::SavedVariable(kept.output, true);
}

// ---- the forward pass --------------------------------------------------------------------------------------------

/// The parameters and buffers of a norm.
struct NormTensors {
  const Maybe &weight, &bias, &running_mean, &running_var, &batches;
};

/// Returns the output and, if it `saves`, the statistics; returns nothing, without any effect, if PyTorch's modules
/// compute the call.
inline std::vector<Tensor> call_norm(const Tensor& input, const NormTensors& norm, const Maybe& added,
                                     at::IntArrayRef form, bool saves) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensors tensors = {&input,
                           if_there(norm.weight),
                           if_there(norm.bias),
                           if_there(norm.running_mean),
                           if_there(norm.running_var),
                           if_there(norm.batches),
                           if_there(added)};
  const auto plan = plan_of_norm(saves ? NORM_FORWARD_THAT_SAVES : NORM_FORWARD, tensors, form);
  if (plan->is_pytorchs) return {};
  if (form[AVERAGES]) norm.batches->add_(1);
  std::vector<Tensor> found = run(plan->steps.at(0), tensors);
  // PyTorch's module bumps the version too: it counts by an operator.
  if (norm.batches && !norm.batches->is_inference()) norm.batches->unsafeGetTensorImpl()->bump_version();
  return found;
}

inline Maybe norm_activation(const Tensor& input, const Maybe& weight, const Maybe& bias, const Maybe& running_mean,
                             const Maybe& running_var, const Maybe& batches, const Maybe& added, at::IntArrayRef form) {
  if (!is_plain({&input, if_there(weight), if_there(bias), if_there(running_mean), if_there(running_var),
                 if_there(batches), if_there(added)}))
    return std::nullopt;
  const Tensor w = weight.value_or(Tensor()), b = bias.value_or(Tensor()), a = added.value_or(Tensor());
  const bool differentiates = torch::autograd::compute_requires_grad(input, w, b, a);
  std::vector<Tensor> found = call_norm(input, {weight, bias, running_mean, running_var, batches}, added, form, differentiates);
  if (found.empty()) return std::nullopt;
  const Tensor& output = found.at(0);
  if (differentiates) hang_node(output, {input, w, b, found.at(1), a.defined() ? output : a}, a, form);
  return std::move(found.at(0));
}

}  // namespace tconv_swap
