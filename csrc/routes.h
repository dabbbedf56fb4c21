// What csrc/node.cpp knows of calls that were made before, and how it goes their way again: routes, as cuda/route.py
// has them, the launching of their plans, and the ops of Python's that are asked where something is not as it was.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <array>
#include <atomic>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace tconv_swap {

using at::Tensor;
using torch::autograd::variable_list;

// ---- routes ------------------------------------------------------------------------------------------------

constexpr int64_t PYTORCH = -1;  // in place of a plan: PyTorch's operator

using Mask = std::array<bool, 3>;

struct Step {
  int64_t plan;
  Mask mask;
};
struct Gradients {
  std::optional<at::MemoryFormat> form;  // that grad_output is brought to
  std::vector<Step> steps;
};
struct Route {
  int64_t plan;
  std::optional<bool> tf32;  // the state of the switch that this holds for
  std::optional<at::ScalarType> cast;  // to what an autocast wanted
  bool has_bias;
  std::vector<int64_t> stride, padding, output_padding, dilation;
  int64_t groups;
  std::vector<int64_t> input_strides, weight_strides;  // asked where PyTorch's operator computes
  std::string backend;
  std::array<std::atomic<const Gradients*>, 8> gradients{};  // by mask, never deleted

  bool holds() const {
    if (!tf32) return true;
    const auto precision = at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::CONV);
    return *tf32 == (precision == at::Float32Precision::TF32);
  }
};

inline std::mutex routes_mutex;
inline std::deque<Route> routes;  // never shrinks, and growing moves no route

inline Route& route_of(int64_t number) {
  std::lock_guard<std::mutex> lock(routes_mutex);
  return routes.at(static_cast<size_t>(number));
}

inline size_t index_of(const Mask& mask) { return mask[0] + 2 * mask[1] + 4 * mask[2]; }

// ---- tensors that nobody but us wants to see ----------------------------------------------------------------

inline uint64_t functionality(at::DispatchKeySet keys) { return keys.raw_repr() & ~c10::full_backend_mask; }

// No subclass, vmap, functionalization, tracer, dispatch mode, lazy negation or zero.
inline bool is_plain(at::DispatchKeySet keys) {
  static const uint64_t PLAIN = functionality(
      at::DispatchKeySet({at::DispatchKey::Dense, at::DispatchKey::ADInplaceOrView, at::DispatchKey::BackendSelect}) |
      c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset);
  return (functionality(keys) & ~PLAIN) == 0;
}

inline bool is_eager() {
  return is_plain(c10::impl::tls_local_dispatch_key_set().included_) &&
         !torch::autograd::ForwardADLevel::try_get_by_idx(0);
}

// ---- launching -----------------------------------------------------------------------------------------------

// tconv_relaunch of launch.cpp.
using Relaunch = size_t (*)(int64_t, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle*);
inline Relaunch relaunch_handles = nullptr;

inline AtenTensorHandle handle_of(const Tensor& tensor) {
  return reinterpret_cast<AtenTensorHandle>(const_cast<Tensor*>(&tensor));
}

/// A plan's outputs; none where the tensors lie otherwise than when it was made.
inline std::vector<Tensor> relaunch(int64_t plan, const Tensor& first, const Tensor& second, const Tensor* third) {
  AtenTensorHandle handles[3];
  const size_t count =
      relaunch_handles(plan, handle_of(first), handle_of(second), third ? handle_of(*third) : nullptr, handles);
  std::vector<Tensor> outputs;
  outputs.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    outputs.push_back(std::move(*reinterpret_cast<Tensor*>(handles[i])));
    aoti_torch_delete_tensor_object(handles[i]);
  }
  return outputs;
}

/// None where the tensors lie otherwise than when the route was made.
inline std::optional<Tensor> output_again(const Route& route, const Tensor& input, const Tensor& weight,
                                   const std::optional<Tensor>& bias) {
  if (route.plan != PYTORCH) {
    std::vector<Tensor> outputs = relaunch(route.plan, input, weight, bias ? &*bias : nullptr);
    if (outputs.empty()) return std::nullopt;
    return std::move(outputs[0]);
  }
  if (input.strides() != route.input_strides || weight.strides() != route.weight_strides) return std::nullopt;
  const at::NoGradGuard no_grad;
  return at::convolution(input, weight, bias, route.stride, route.padding, route.dilation, true, route.output_padding,
                         route.groups);
}

/// In the places of input, weight and bias; none where something is otherwise, or nothing is known of this mask.
inline std::optional<variable_list> gradients_again(const Route& route, const Mask& mask, const Tensor& given,
                                             const Tensor& input, const Tensor& weight) {
  const Gradients* known = route.gradients[index_of(mask)].load(std::memory_order_acquire);
  if (!known || !route.holds()) return std::nullopt;
  // The gradient of a sum is one number, expanded.
  const Tensor grad_output = known->form ? given.contiguous(*known->form) : given;
  variable_list gradients(3);
  for (const Step& step : known->steps) {
    if (step.plan == PYTORCH) {
      const std::array<int64_t, 1> out_channels{weight.size(1) * route.groups};
      auto [of_input, of_weight, of_bias] =
          at::convolution_backward(grad_output, input, weight, at::OptionalIntArrayRef(out_channels), route.stride,
                                   route.padding, route.dilation, true, route.output_padding, route.groups, step.mask);
      Tensor found[] = {of_input, of_weight, of_bias};
      for (size_t i = 0; i < 3; ++i)
        if (step.mask[i]) gradients[i] = std::move(found[i]);
      continue;
    }
    std::vector<Tensor> found = relaunch(step.plan, grad_output, input, &weight);
    if (found.empty()) return std::nullopt;
    for (size_t i = 0, next = 0; i < 3; ++i)
      if (step.mask[i]) gradients[i] = std::move(found.at(next++));
  }
  return gradients;
}

/// What an op of Python's computes.
inline c10::IValue by_python(const char* name, std::vector<c10::IValue> stack) {
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(&stack);
  return std::move(stack.at(0));
}

/// The gradients asked for, in order, each back in its own place.
inline variable_list spread(const std::vector<Tensor>& found, const Mask& mask) {
  variable_list gradients(3);
  for (size_t i = 0, next = 0; i < 3; ++i)
    if (mask[i]) gradients[i] = found.at(next++);
  return gradients;
}

inline c10::List<bool> as_list(const Mask& mask) { return c10::List<bool>({mask[0], mask[1], mask[2]}); }

}  // namespace tconv_swap
