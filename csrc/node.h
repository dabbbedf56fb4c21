// The autograd node of a transposed convolution.
#pragma once

#include "compute.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

namespace tconv_swap {

/// Returns the gradients. Those of weight and bias have the dtype of the parameters if the tensors are plain.
Gradients gradients_of(const Tensor& grad_output, const Tensor& input, const Tensor& weight, at::IntArrayRef geometry,
                       Mask mask, std::string_view backend, at::ScalarType parameters_dtype);

struct ConvTranspose2dBackward : torch::autograd::Node {
  torch::autograd::SavedVariable input, weight;
  at::ScalarType parameters_dtype;  // differs from that of the saved weight where an autocast has cast it
  std::vector<int64_t> geometry;
  std::string backend;

  std::string name() const override { return "ConvTranspose2dBackward"; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    input.reset_data();
    weight.reset_data();
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const Tensor x = input.unpack();
    Tensor w = weight.unpack();
    torch::autograd::variable_list gradients(3);
    const Mask mask{task_should_compute_output(0), task_should_compute_output(1), task_should_compute_output(2)};
    if (!grads[0].defined() || stage_of(mask) == 0) return gradients;
    if (at::GradMode::is_enabled()) {
      if (parameters_dtype != w.scalar_type()) {
        // The copy has the gradient edge of the weight.
        w = w.variable_data();
        if (next_edge(1).is_valid()) torch::autograd::impl::set_gradient_edge(w, next_edge(1));
      }
      Gradients found = gradients_by_pytorch(grads[0], x, w, {geometry}, mask);
      for (size_t i = 0; i < 3; ++i)
        if (mask[i]) gradients[i] = std::move(found[i]);
      return gradients;
    }
    Gradients found = gradients_of(grads[0], x, w, geometry, mask, backend, parameters_dtype);
    for (size_t i = 0; i < 3; ++i) gradients[i] = std::move(found[i]);
    return gradients;
  }
};

/// The weight and bias that the gradients belong to.
struct Parameters {
  const Tensor& weight;
  const std::optional<Tensor>& bias;
};

/// Makes `output`, which was computed from `input`, `weight` and a bias, differentiable. `weight` may be a copy of the
/// weight in `parameters` in another dtype.
inline void hang_node(const Tensor& output, const Tensor& input, const Tensor& weight, const Parameters& parameters,
                      at::IntArrayRef geometry, std::string_view backend) {
  const std::shared_ptr<ConvTranspose2dBackward> node(new ConvTranspose2dBackward, torch::autograd::deleteNode);
  node->set_next_edges(
      torch::autograd::collect_next_edges(input, parameters.weight, parameters.bias ? *parameters.bias : Tensor()));
  node->input = torch::autograd::SavedVariable(input, false);
  node->weight = torch::autograd::SavedVariable(weight, false);
  node->parameters_dtype = parameters.weight.scalar_type();
  node->geometry = geometry.vec();
  node->backend = backend;
  torch::autograd::set_history(output, node);
}

}  // namespace tconv_swap
