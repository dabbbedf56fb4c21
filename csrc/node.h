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

/// What the gradients of a layer need. `weight` may be a copy of the layer's weight in another dtype.
struct SavedLayer {
  torch::autograd::SavedVariable input, weight;
  at::ScalarType parameters_dtype;  // differs from that of the saved weight where an autocast has cast it
  std::vector<int64_t> geometry;
  std::string backend;

  SavedLayer(const Tensor& input, const Tensor& weight, at::ScalarType parameters_dtype, at::IntArrayRef geometry,
             std::string_view backend)
      : input(input, false),
        weight(weight, false),
        parameters_dtype(parameters_dtype),
        geometry(geometry.vec()),
        backend(backend) {}

  void release() {
    input.reset_data();
    weight.reset_data();
  }

  /// Returns the gradients, differentiable where grad mode is on. `to_weight` is the edge that leads to the layer's weight.
  Gradients gradients(const Tensor& grad_output, const Mask& mask, const torch::autograd::Edge& to_weight) const {
    const Tensor x = input.unpack();
    Tensor w = weight.unpack();
    if (!at::GradMode::is_enabled()) return gradients_of(grad_output, x, w, geometry, mask, backend, parameters_dtype);
    if (parameters_dtype != w.scalar_type()) {
      // The copy has the gradient edge of the weight.
      w = w.variable_data();
      if (to_weight.is_valid()) torch::autograd::impl::set_gradient_edge(w, to_weight);
    }
    Gradients found = gradients_by_pytorch(grad_output, x, w, {geometry}, mask);
    for (size_t i = 0; i < 3; ++i)
      if (!mask[i]) found[i] = Tensor();
    return found;
  }
};

struct ConvTranspose2dBackward : torch::autograd::Node {
  SavedLayer saved;

  explicit ConvTranspose2dBackward(SavedLayer saved) : saved(std::move(saved)) {}

  std::string name() const override { return "ConvTranspose2dBackward"; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    saved.release();
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    torch::autograd::variable_list gradients(3);
    const Mask mask{task_should_compute_output(0), task_should_compute_output(1), task_should_compute_output(2)};
    if (!grads[0].defined() || stage_of(mask) == 0) return gradients;
    Gradients found = saved.gradients(grads[0], mask, next_edge(1));
    for (size_t i = 0; i < 3; ++i) gradients[i] = std::move(found[i]);
    return gradients;
  }
};

/// Makes a layer's `output` differentiable. The edges lead to its input, weight and bias.
inline void hang_node(const Tensor& output, torch::autograd::edge_list edges, SavedLayer saved) {
  const std::shared_ptr<ConvTranspose2dBackward> node(new ConvTranspose2dBackward(std::move(saved)),
                                                      torch::autograd::deleteNode);
  node->set_next_edges(std::move(edges));
  torch::autograd::set_history(output, node);
}

/// A layer's forward pass. `input` and `weight` are what its kernels read, which an autocast has cast.
struct LayerCall {
  Tensor output, input, weight;
  bool lacks_node;  // a derivative is wanted, and PyTorch's operator has not hung its own node
};

/// Computes a layer of plain tensors. `autocast`: the dtype to which an active autocast casts.
LayerCall call_layer(const Tensor& input, const Tensor& weight, const Maybe& bias, at::IntArrayRef geometry,
                     std::string_view backend, bool differentiates, std::optional<at::ScalarType> autocast);

}  // namespace tconv_swap
