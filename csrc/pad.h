// Reflection padding as one op that an eager nn.ReflectionPad2d of ours calls on CUDA. blocks/padding.py has its schema and
// plans calls that are not in the cache. The op launches the plan and adds one autograd node where a derivative is wanted.
// Where something else has to see the call (is_plain in plain.h), or the kernel does not support it, it returns None: PyTorch's
// module then computes the call.
#pragma once

#include "compute.h"
#include "plain.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/reflection_pad2d_backward.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

namespace tconv_swap {

constexpr int64_t PAD_FORWARD = 25, PAD_BACKWARD = 26;  // the numbers of blocks/padding.py

/// `form`: the padding; for a backward pass also whether the image lies in channels_last.
inline std::shared_ptr<const CallPlan> plan_of_pad(int64_t stage, const Tensor& tensor, at::IntArrayRef form) {
  return plan_of(key_of(stage, {&tensor}, form, ""), "tconv_swap::plan_pad_call",
                 [&] { return std::vector<c10::IValue>{tensor, form, stage}; });
}

/// Saves no tensor: padding is linear, so its gradient needs the sizes alone.
struct ReflectionPadBackward : torch::autograd::Node {
  std::vector<int64_t> sizes, padding;  // `sizes`: of the image
  bool channels_last;

  ReflectionPadBackward(at::IntArrayRef sizes, at::IntArrayRef padding, bool channels_last)
      : sizes(sizes.vec()), padding(padding.vec()), channels_last(channels_last) {}

  std::string name() const override { return "ReflectionPadBackward"; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const Tensor& grad = grads[0];
    if (!grad.defined() || !task_should_compute_output(0)) return {Tensor()};
    // PyTorch's operator has derivatives of every order, and functorch and modes support it. It reads only the sizes of the
    // image.
    if (at::GradMode::is_enabled() || !is_plain({&grad}))
      return {at::reflection_pad2d_backward(grad, at::empty(sizes, grad.options()), padding)};
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    std::vector<int64_t> form = padding;
    form.push_back(channels_last);
    return {run(plan_of_pad(PAD_BACKWARD, grad, form)->steps.at(0), {&grad}).at(0)};
  }
};

inline Maybe reflection_pad(const Tensor& input, at::IntArrayRef padding) {
  if (!is_plain({&input})) return std::nullopt;
  Tensor output;
  bool channels_last = false;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto plan = plan_of_pad(PAD_FORWARD, input, padding);
    if (plan->is_pytorchs) return std::nullopt;
    channels_last = plan->format == at::MemoryFormat::ChannelsLast;
    output = run(plan->steps.at(0), {&input}).at(0);
  }
  if (torch::autograd::compute_requires_grad(input)) {
    const std::shared_ptr<ReflectionPadBackward> node(new ReflectionPadBackward(input.sizes(), padding, channels_last),
                                                      torch::autograd::deleteNode);
    node->set_next_edges(torch::autograd::collect_next_edges(input));
    torch::autograd::set_history(output, node);
  }
  return output;
}

}  // namespace tconv_swap
