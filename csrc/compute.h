// A call with plain tensors: finds its plan in the cache or has Python make it, and runs its steps in order. compute.cpp
// defines what is declared here: every file that differentiates includes it.
#pragma once

#include "plan_cache.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>
#include <c10/util/FunctionRef.h>

#include <string>

namespace tconv_swap {

using at::Tensor;
using Maybe = std::optional<Tensor>;

inline const Tensor* if_there(const Tensor& tensor) { return tensor.defined() ? &tensor : nullptr; }
inline const Tensor* if_there(const Maybe& tensor) { return tensor ? if_there(*tensor) : nullptr; }
inline Maybe as_maybe(const Tensor& tensor) { return tensor.defined() ? Maybe(tensor) : std::nullopt; }

/// Stride, padding, output_padding, groups and dilation as an op takes them, nine numbers.
struct Geometry {
  at::IntArrayRef words;
  at::IntArrayRef stride() const { return words.slice(0, 2); }
  at::IntArrayRef padding() const { return words.slice(2, 2); }
  at::IntArrayRef output_padding() const { return words.slice(4, 2); }
  int64_t groups() const { return words[6]; }
  at::IntArrayRef dilation() const { return words.slice(7, 2); }
};

using Tensors = std::initializer_list<const Tensor*>;  // null: absent

c10::List<bool> as_list(const Mask& mask);
c10::List<std::optional<Tensor>> as_list(Tensors tensors);

/// Calls an op that Python implements, and returns its result.
c10::IValue by_python(const char* name, std::vector<c10::IValue> stack);

/// Returns the plan of a kind of call: from the cache, or from the words that a planner of Python's returns for `arguments`.
std::shared_ptr<const CallPlan> plan_of(const Key& key, const char* planner,
                                        c10::function_ref<std::vector<c10::IValue>()> arguments);

/// Returns the plan of a call with such tensors. Throws what Python raises if the tensors do not fit together. `later`: the
/// gradients that a backward pass of this call will compute; if the call is planned, they are planned in the background.
std::shared_ptr<const CallPlan> plan_of_call(int64_t stage, Tensors tensors, at::IntArrayRef geometry,
                                             std::string_view backend, const Mask& later = {});

/// Launches a program on the current stream of its device; returns its outputs.
std::vector<Tensor> launch(const Program& program, c10::ArrayRef<void*> inputs);

/// Returns a dense copy.
Tensor copy_of(const Tensor& tensor, at::MemoryFormat format);

std::vector<Tensor> run(const Step& step, Tensors tensors);

/// Returns the output, ``[batch, out_channels, out_height, out_width]``.
Tensor compute_output(const CallPlan& plan, const Tensor& input, const Tensor& weight, const Maybe& bias,
                      const Geometry& geometry);

using Gradients = std::array<Tensor, 3>;  // of input, weight and bias; undefined where the mask leaves it out

/// Returns the gradients by PyTorch's own operator, which autograd, functorch and modes support.
Gradients gradients_by_pytorch(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                               const Geometry& geometry, const Mask& mask);

Gradients compute_gradients(const CallPlan& plan, const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                            const Geometry& geometry);

}  // namespace tconv_swap
