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

// ---- plain tensors ---------------------------------------------------------------------------------------------

Tensor output_of(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, at::IntArrayRef geometry,
                 std::string_view backend) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto plan = plan_of_call(FORWARD_STAGE, {&input, &weight, bias ? &*bias : nullptr}, geometry, backend);
  return compute_output(*plan, input, weight, bias, {geometry});
}

Tensor differentiable_output_of(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                                at::IntArrayRef geometry, std::string_view backend) {
  const auto plan = plan_of_call(FORWARD_STAGE, {&input, &weight, bias ? &*bias : nullptr}, geometry, backend);
  // PyTorch's own node is cheaper than ours in front of its operator.
  if (plan->is_pytorchs) return compute_output(*plan, input, weight, bias, {geometry});
  Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    output = compute_output(*plan, input, weight, bias, {geometry});
  }
  hang_node(output, input, weight, {weight, bias}, geometry, backend);
  return output;
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
  if (numbers && is_plain(keys))
    return (differentiates ? differentiable_output_of : output_of)(input, weight, bias, *numbers, backend);
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

Tensor cast(const Tensor& tensor, at::DeviceType device, at::ScalarType dtype) {
  return is_cast(tensor, device, dtype) ? tensor.to(dtype) : tensor;
}

/// Weight and bias are cast below autograd, which saves a node for each: our node leads to the originals and gives their
/// gradients their dtype.
Tensor cast_output_of(const Tensor& given_input, const Tensor& given_weight, const std::optional<Tensor>& given_bias,
                      at::IntArrayRef geometry, std::string_view backend, at::ScalarType dtype) {
  const at::DeviceType device = given_input.device().type();
  const bool differentiates = wants_derivative(given_input, given_weight, given_bias);
  // The derivative of the input goes back through its cast.
  const Tensor to_cast = differentiates && given_input.requires_grad() ? cast(given_input, device, dtype) : given_input;
  const auto [input, weight, cast_bias] =
      cast_together({to_cast, given_weight, given_bias ? *given_bias : Tensor()}, device, dtype);
  std::optional<Tensor> bias;
  if (given_bias) bias = cast_bias;
  const auto plan = plan_of_call(FORWARD_STAGE, {&input, &weight, bias ? &*bias : nullptr}, geometry, backend);
  if (differentiates && plan->is_pytorchs) {
    if (given_bias) bias = cast(*given_bias, device, dtype);
    return compute_output(*plan, input, cast(given_weight, device, dtype), bias, {geometry});
  }
  Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    output = compute_output(*plan, input, weight, bias, {geometry});
  }
  if (differentiates) hang_node(output, input, weight, {given_weight, given_bias}, geometry, backend);
  return output;
}

Tensor output_autocast(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                       c10::SymIntArrayRef geometry, std::string_view backend) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKeySet(c10::DispatchKey::AutocastCUDA));
  // PyTorch's cache of cast weights is not used: it does not notice a change through weight.data inside one autocast.
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(at::kCUDA);
  const auto numbers = c10::asIntArrayRefSlowOpt(geometry);
  if (numbers && is_plain(input, weight, bias)) return cast_output_of(input, weight, bias, *numbers, backend, dtype);
  const at::DeviceType device = input.device().type();
  std::optional<Tensor> cast_bias;
  if (bias) cast_bias = cast(*bias, device, dtype);
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

Gradients gradients_of(const Tensor& grad_output, const Tensor& input, const Tensor& weight, at::IntArrayRef geometry,
                       Mask mask, std::string_view backend, at::ScalarType parameters_dtype) {
  const bool is_plain_call = is_plain(grad_output, input, weight);
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

// Empties the cache of call plans: from now on every choice is made anew.
extern "C" void tconv_forget() { tconv_swap::PlanCache::instance().forget(); }

// Returns how many call plans the cache holds.
extern "C" int64_t tconv_known() { return static_cast<int64_t>(tconv_swap::PlanCache::instance().size()); }

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
