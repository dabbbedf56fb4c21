// A block in training: a transposed convolution, the norm behind it and the activation, as one op with one autograd node. An
// eager block calls it on CUDA; blocks/kernels.py has its schema. The plans are those of the two ops that compute a layer and
// a norm, and so are the kernels and all their bits.
#pragma once

#include "node.h"
#include "norm.h"

namespace torch::autograd {
// Its header includes the engine's.
TORCH_API bool get_current_graph_task_keep_graph();
}  // namespace torch::autograd

namespace tconv_swap {

/// The input of the norm is the layer's output, which nothing else has.
struct BlockBackward : torch::autograd::Node {
  SavedLayer layer;
  SavedNorm norm;

  BlockBackward(SavedLayer layer, SavedNorm norm) : layer(std::move(layer)), norm(std::move(norm)) {}

  std::string name() const override { return "BlockBackward"; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    layer.release();
    norm.release();
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    torch::autograd::variable_list gradients(5);
    const Mask of_layer{task_should_compute_output(0), task_should_compute_output(1), task_should_compute_output(2)};
    const NormMask of_norm{stage_of(of_layer) != 0, task_should_compute_output(3), task_should_compute_output(4), false};
    if (!grads[0].defined() || of_norm == NormMask{}) return gradients;
    NormGradients found = norm.gradients(grads[0], layer_output(), Tensor(), of_norm);
    gradients[3] = std::move(found[1]);
    gradients[4] = std::move(found[2]);
    if (!of_norm[0]) return gradients;
    // The memory of these is free for the layer's gradients, as if the norm had a node of its own.
    grads[0].reset();
    if (!torch::autograd::get_current_graph_task_keep_graph()) norm.release();
    Gradients of_operands = layer.gradients(found[0], of_layer, next_edge(1));
    for (size_t i = 0; i < 3; ++i) gradients[i] = std::move(of_operands[i]);
    return gradients;
  }

 private:
  /// Where grad mode is on, the output leads back to what it was computed from.
  Tensor layer_output() {
    Tensor output = norm.input.unpack();
    if (!at::GradMode::is_enabled()) return output;
    output = output.variable_data();
    hang_node(output, {next_edge(0), next_edge(1), next_edge(2)},
              {layer.input.unpack(), layer.weight.unpack(), layer.parameters_dtype, layer.geometry, layer.backend});
    return output;
  }
};

/// Returns the output of the block and true; the output of the layer alone and false, if norm and activation are still to be
/// computed; nothing and false, if PyTorch's modules compute all of it.
inline std::tuple<Maybe, bool> call_block(const Tensor& input, const Tensor& weight, const Maybe& bias,
                                          const NormTensors& norm, at::IntArrayRef geometry, std::string_view backend,
                                          at::IntArrayRef form, std::optional<at::ScalarType> autocast) {
  if (!is_plain({&input, &weight, if_there(bias), if_there(norm.weight), if_there(norm.bias), if_there(norm.running_mean),
                 if_there(norm.running_var), if_there(norm.batches)}))
    return {std::nullopt, false};
  const bool differentiates = torch::autograd::compute_requires_grad(input, weight, bias);
  const LayerCall made = call_layer(input, weight, bias, geometry, backend, differentiates, autocast);
  if (!made.lacks_node) return {made.output, false};
  auto to_layer = torch::autograd::collect_next_edges(made.input, weight, bias.value_or(Tensor()));
  SavedLayer saved(made.input, made.weight, weight.scalar_type(), geometry, backend);
  const std::vector<Tensor> found = call_norm(made.output, norm, std::nullopt, form, true);
  if (found.empty()) {
    hang_node(made.output, std::move(to_layer), std::move(saved));
    return {made.output, false};
  }
  const Tensor w = norm.weight.value_or(Tensor()), b = norm.bias.value_or(Tensor());
  const std::shared_ptr<BlockBackward> node(
      new BlockBackward(std::move(saved), {{made.output, w, b, found.at(1), Tensor()}, form}), torch::autograd::deleteNode);
  for (auto& edge : torch::autograd::collect_next_edges(w, b)) to_layer.push_back(std::move(edge));
  node->set_next_edges(std::move(to_layer));
  torch::autograd::set_history(found.at(0), node);
  return {found.at(0), true};
}

}  // namespace tconv_swap
