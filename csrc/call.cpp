// The two ops that an eager layer and a compiled graph call, one for the output and one for the gradients; graph.py has
// their schemas. On CUDA each of them casts what an autocast casts, finds the plan of the call in the cache or has Python
// make it (plan_call in cuda/call.py), launches it, and adds the autograd node where a derivative is wanted. Where a
// subclass, a mode, a transform or a tracer has to see the call, the op passes it on to PyTorch's dispatcher.
#include "cast.h"
#include "node.h"
#include "plain.h"

#include <torch/library.h>

#include <algorithm>

namespace tconv_swap {
namespace {

constexpr const char *OUTPUT = "tconv_swap::conv_transpose2d_output", *GRADIENTS = "tconv_swap::conv_transpose2d_gradients";

/// Forward mode counts too: PyTorch's operators compute it.
bool wants_derivative(const Tensor& first, const Tensor& second, const std::optional<Tensor>& third) {
  if (torch::autograd::ForwardADLevel::try_get_by_idx(0)) return true;
  return torch::autograd::compute_requires_grad(first, second, third);
}

Tensor cast(const Tensor& tensor, at::DeviceType device, std::optional<at::ScalarType> dtype) {
  return dtype && tensor.defined() && is_cast(tensor, device, *dtype) ? tensor.to(*dtype) : tensor;
}

// ---- plain tensors ---------------------------------------------------------------------------------------------

Tensor output_of(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, at::IntArrayRef geometry,
                 std::string_view backend) {
  return call_layer(input, weight, bias, geometry, backend, false, std::nullopt).output;
}

Tensor output_with_node(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                        at::IntArrayRef geometry, std::string_view backend, bool differentiates,
                        std::optional<at::ScalarType> autocast) {
  const LayerCall made = call_layer(input, weight, bias, geometry, backend, differentiates, autocast);
  if (made.lacks_node)
    hang_node(made.output, torch::autograd::collect_next_edges(made.input, weight, bias.value_or(Tensor())),
              {made.input, made.weight, weight.scalar_type(), geometry, backend});
  return made.output;
}

std::vector<Tensor> plain_gradients_of(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                                       at::IntArrayRef geometry, Mask mask, std::string_view backend) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto plan = plan_of_call(stage_of(mask), {&grad_output, &input, &weight}, geometry, backend);
  std::vector<Tensor> found;
  for (Tensor& gradient : compute_gradients(*plan, grad_output, input, weight, {geometry}))
    if (gradient.defined()) found.push_back(std::move(gradient));
  return found;
}

// ---- the kernels of the ops ------------------------------------------------------------------------------------

/// Calls an op with the dispatch keys `keys`, or with all keys of its arguments if there are none.
c10::IValue dispatched(const char* name, std::optional<c10::DispatchKeySet> keys, std::vector<c10::IValue> stack) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  if (keys) {
    op.redispatchBoxed(*keys, &stack);
  } else {
    op.callBoxed(&stack);
  }
  return std::move(stack.at(0));
}

/// Calls the op of op.py: the tensors, stride, padding, output_padding, groups, dilation, then the backend.
c10::IValue by_whole_op(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                        c10::SymIntArrayRef geometry, std::string_view backend) {
  return by_python("tconv_swap::conv_transpose2d",
                   {input, weight, bias, geometry.slice(0, 2), geometry.slice(2, 2), geometry.slice(4, 2), geometry[6],
                    geometry.slice(7, 2), std::string(backend)});
}

// A compiler may trace these with symbolic sizes. The dispatcher would not call a kernel that takes only numbers.

Tensor output_autograd(c10::DispatchKeySet keys, const Tensor& input, const Tensor& weight,
                       const std::optional<Tensor>& bias, c10::SymIntArrayRef geometry, std::string_view backend) {
  const bool differentiates = wants_derivative(input, weight, bias);
  const auto numbers = c10::asIntArrayRefSlowOpt(geometry);
  if (numbers && is_plain(keys)) return output_with_node(input, weight, bias, *numbers, backend, differentiates, std::nullopt);
  if (differentiates) return by_whole_op(input, weight, bias, geometry, backend).toTensor();
  return dispatched(OUTPUT, keys & c10::after_autograd_keyset, {input, weight, bias, geometry, std::string(backend)})
      .toTensor();
}

std::vector<Tensor> gradients_autograd(c10::DispatchKeySet keys, const Tensor& grad_output, const Tensor& input,
                                       const Tensor& weight, c10::SymIntArrayRef geometry, Mask mask,
                                       std::string_view backend) {
  const auto numbers = c10::asIntArrayRefSlowOpt(geometry);
  if (numbers && wants_derivative(grad_output, input, weight)) {
    std::vector<Tensor> found;
    Gradients gradients = gradients_by_pytorch(grad_output, input, weight, {*numbers}, mask);
    for (size_t i = 0; i < 3; ++i)
      if (mask[i]) found.push_back(std::move(gradients[i]));
    return found;
  }
  if (numbers && is_plain(keys)) return plain_gradients_of(grad_output, input, weight, *numbers, mask, backend);
  return dispatched(GRADIENTS, keys & c10::after_autograd_keyset,
                    {grad_output, input, weight, geometry, as_list(mask), std::string(backend)})
      .toTensorVector();
}

Tensor output_autocast(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                       c10::SymIntArrayRef geometry, std::string_view backend) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKeySet(c10::DispatchKey::AutocastCUDA));
  // PyTorch's cache of cast weights is not used: it does not notice a change through weight.data inside one autocast.
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(at::kCUDA);
  const auto numbers = c10::asIntArrayRefSlowOpt(geometry);
  if (numbers && is_plain({&input, &weight, if_there(bias)}))
    return output_with_node(input, weight, bias, *numbers, backend, wants_derivative(input, weight, bias), dtype);
  const at::DeviceType device = input.device().type();
  const Maybe cast_bias = as_maybe(cast(bias.value_or(Tensor()), device, dtype));
  return dispatched(OUTPUT, std::nullopt,
                    {cast(input, device, dtype), cast(weight, device, dtype), cast_bias, geometry, std::string(backend)})
      .toTensor();
}

std::vector<Tensor> launch_program(int64_t handle, const c10::List<std::optional<Tensor>>& inputs) {
  const auto program = program_of(handle);
  TORCH_CHECK(program, "tconv_swap: there is no program ", handle);
  std::vector<void*> pointers;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const std::optional<Tensor> input = inputs.get(i);
    pointers.push_back(input ? input->data_ptr() : nullptr);
  }
  return launch(*program, pointers);
}

}  // namespace

// Weight and bias are cast below autograd, which saves a node for each: our node leads to the originals and gives their
// gradients their dtype.
LayerCall call_layer(const Tensor& input, const Tensor& weight, const Maybe& bias, at::IntArrayRef geometry,
                     std::string_view backend, bool differentiates, std::optional<at::ScalarType> autocast) {
  const at::DeviceType device = input.device().type();
  Together given{input, weight, bias.value_or(Tensor())};
  // The derivative of the input goes back through its cast.
  if (differentiates && input.requires_grad()) given[0] = cast(input, device, autocast);
  const auto [x, w, b] = autocast ? cast_together(given, device, *autocast) : given;
  const auto wants_gradient = [&](const Tensor& tensor) { return differentiates && tensor.defined() && tensor.requires_grad(); };
  const Mask later{wants_gradient(input), wants_gradient(weight), bias && wants_gradient(*bias)};
  const auto plan = plan_of_call(FORWARD_STAGE, {&x, &w, if_there(b)}, geometry, backend, later);
  if (differentiates && plan->is_pytorchs) {
    // PyTorch's own node is cheaper than ours in front of its operator.
    const Tensor with_edge = cast(given[1], device, autocast), bias_with_edge = cast(given[2], device, autocast);
    return {compute_output(*plan, x, with_edge, as_maybe(bias_with_edge), {geometry}), x, with_edge, false};
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return {compute_output(*plan, x, w, as_maybe(b), {geometry}), x, w, differentiates};
}

Gradients gradients_of(const Tensor& grad_output, const Tensor& input, const Tensor& weight, at::IntArrayRef geometry,
                       Mask mask, std::string_view backend, at::ScalarType parameters_dtype) {
  const bool is_plain_call = is_plain({&grad_output, &input, &weight});
  std::vector<Tensor> found =
      is_plain_call ? plain_gradients_of(grad_output, input, weight, geometry, mask, backend)
                : dispatched(GRADIENTS, std::nullopt,
                             {grad_output, input, weight, geometry, as_list(mask), std::string(backend)})
                      .toTensorVector();
  Gradients gradients;
  for (size_t i = 0, next = 0; i < 3; ++i)
    if (mask[i]) gradients[i] = std::move(found.at(next++));
  if (is_plain_call && parameters_dtype != weight.scalar_type()) {
    const Tensor of_input = std::exchange(gradients[0], Tensor());
    gradients = cast_together(gradients, weight.device().type(), parameters_dtype);
    gradients[0] = of_input;
  }
  return gradients;
}

}  // namespace tconv_swap

TORCH_LIBRARY_FRAGMENT(tconv_swap, library) { library.def("launch(int program, Tensor?[] inputs) -> Tensor[]"); }

// Python registers its kernels of the two ops for alias keys. A kernel for one key, as here, takes precedence.
TORCH_LIBRARY_IMPL(tconv_swap, CUDA, library) {
  library.impl("launch", &tconv_swap::launch_program);
  library.impl("conv_transpose2d_output", &tconv_swap::output_of);
  library.impl("conv_transpose2d_gradients", &tconv_swap::plain_gradients_of);
}

TORCH_LIBRARY_IMPL(tconv_swap, AutogradCUDA, library) {
  library.impl("conv_transpose2d_output", &tconv_swap::output_autograd);
  library.impl("conv_transpose2d_gradients", &tconv_swap::gradients_autograd);
}

TORCH_LIBRARY_IMPL(tconv_swap, AutocastCUDA, library) {
  library.impl("conv_transpose2d_output", &tconv_swap::output_autocast);
}
