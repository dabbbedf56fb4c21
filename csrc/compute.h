// A call of tensors that nobody but us wants to see: its steps, known or asked from Python, are run in order.
#pragma once

#include "answers.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/strides.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <string>
#include <tuple>

extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace tconv_swap {

using at::Tensor;
using Maybe = std::optional<Tensor>;

inline const Tensor* if_there(const Tensor& tensor) { return tensor.defined() ? &tensor : nullptr; }
inline const Tensor* if_there(const Maybe& tensor) { return tensor ? if_there(*tensor) : nullptr; }
inline Maybe as_maybe(const Tensor& tensor) { return tensor.defined() ? Maybe(tensor) : std::nullopt; }

/// Stride, padding, output_padding, groups and dilation, as an op takes them: nine numbers.
struct Geometry {
  at::IntArrayRef words;
  at::IntArrayRef stride() const { return words.slice(0, 2); }
  at::IntArrayRef padding() const { return words.slice(2, 2); }
  at::IntArrayRef output_padding() const { return words.slice(4, 2); }
  int64_t groups() const { return words[6]; }
  at::IntArrayRef dilation() const { return words.slice(7, 2); }
};

/// What an op that Python implements returns.
inline c10::IValue by_python(const char* name, std::vector<c10::IValue> stack) {
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(&stack);
  return std::move(stack.at(0));
}

inline c10::List<bool> as_list(const Mask& mask) { return c10::List<bool>({mask[0], mask[1], mask[2]}); }

using Tensors = std::initializer_list<const Tensor*>;  // null: absent

inline c10::List<std::optional<Tensor>> as_list(Tensors tensors) {
  c10::List<std::optional<Tensor>> list;
  for (const Tensor* tensor : tensors) list.push_back(tensor ? std::optional(*tensor) : std::nullopt);
  return list;
}

inline std::optional<at::MemoryFormat> format_of(int64_t word) {
  if (word < 0) return std::nullopt;
  return word == 0 ? at::MemoryFormat::Contiguous : at::MemoryFormat::ChannelsLast;
}

/// An answer as call.answer writes it.
inline std::shared_ptr<const Answer> read_answer(const std::vector<int64_t>& words) {
  auto word = words.begin();
  auto answer = std::make_shared<Answer>();
  answer->format = *format_of(*word++);
  answer->is_pytorchs = *word++ != 0;
  while (word != words.end()) {
    Step step{*word++, nullptr, {}, {}};
    for (bool& wanted : step.mask) wanted = *word++ != 0;
    for (auto& format : step.formats) format = format_of(*word++);
    if (step.handle != PYTORCH) {
      step.program = program_of(step.handle);
      drop_program(step.handle);
    }
    answer->steps.push_back(std::move(step));
  }
  return answer;
}

/// How a call of this kind is computed: known, or what `ask` returns, in words.
template <class Ask>
std::shared_ptr<const Answer> known_or_asked(const Key& key, const Ask& ask) {
  Answers& answers = Answers::instance();
  if (auto known = answers.find(key)) return known;
  const uint64_t epoch = answers.epoch();
  const at::AutoDispatchBelowAutograd below_autograd;
  auto asked = read_answer(ask());
  answers.keep(key, asked, epoch);
  return asked;
}

/// How a call with such tensors is computed. Python is asked where that is not known, and raises where they do not fit.
inline std::shared_ptr<const Answer> answer_to(int64_t stage, Tensors tensors, at::IntArrayRef geometry,
                                               std::string_view backend) {
  return known_or_asked(key_of(stage, tensors, geometry, backend), [&] {
    const Mask mask{(stage & 1) != 0, (stage & 2) != 0, (stage & 4) != 0};
    return by_python("tconv_swap::answer", {as_list(tensors), geometry, as_list(mask), std::string(backend)}).toIntVector();
  });
}

inline Tensor empty(const Output& output, const at::Device& device) {
  return at::detail::empty_strided_cuda(output.sizes, output.strides, static_cast<at::ScalarType>(output.dtype), device);
}

/// The program's outputs, computed on the current stream of its device.
inline std::vector<Tensor> launch(const Program& program, c10::ArrayRef<void*> inputs) {
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(program.device));
  const c10::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_CHECK(aoti_torch_get_current_cuda_stream(program.device, &stream) == AOTI_TORCH_SUCCESS,
              "tconv_swap: no current stream on cuda:", program.device);
  std::vector<Tensor> outputs;
  c10::SmallVector<void*, 8> pointers;
  outputs.reserve(program.outputs.size());
  for (const Output& output : program.outputs) {
    outputs.push_back(empty(output, device));
    pointers.push_back(outputs.back().mutable_data_ptr());
  }
  Tensor workspace;
  if (program.workspace_bytes)
    workspace = empty({static_cast<int32_t>(at::kByte), {program.workspace_bytes}, {1}}, device);
  launch(program, stream, inputs.data(), pointers.data(),
         workspace.defined() ? static_cast<char*>(workspace.mutable_data_ptr()) : nullptr);
  return outputs;
}

/// A dense copy; on CUDA without the dispatcher's steps on the way to one.
inline Tensor copy_of(const Tensor& tensor, at::MemoryFormat format) {
  if (!tensor.is_cuda() || tensor.dim() != 4) return tensor.clone(format);
  c10::DimVector strides = c10::contiguous_strides(tensor.sizes());
  if (format == at::MemoryFormat::ChannelsLast) strides = c10::get_channels_last_strides_2d(tensor.sizes());
  const Tensor copy = at::detail::empty_strided_cuda(tensor.sizes(), strides, tensor.scalar_type(), tensor.device());
  return copy.copy_(tensor);
}

inline std::vector<Tensor> run(const Step& step, Tensors tensors) {
  c10::SmallVector<Tensor, 3> copies;  // kept until the kernels are launched
  c10::SmallVector<const Tensor*, 7> laid_out;
  copies.reserve(3);
  size_t index = 0;
  for (const Tensor* tensor : tensors) {
    const auto format = index < step.formats.size() ? step.formats[index] : std::nullopt;
    ++index;
    if (tensor && format) {
      copies.push_back(copy_of(*tensor, *format));
      tensor = &copies.back();
    }
    laid_out.push_back(tensor);
  }
  if (!step.program) {
    // Tests stand in for the GPU here; on one, a step that is not PyTorch's has a program.
    c10::List<std::optional<Tensor>> list;
    for (const Tensor* tensor : laid_out) list.push_back(tensor ? std::optional(*tensor) : std::nullopt);
    return by_python("tconv_swap::launch", {step.handle, list}).toTensorVector();
  }
  c10::SmallVector<void*, 7> pointers;
  // Const is lost here alone: a program's inputs are read only.
  for (const Tensor* tensor : laid_out) pointers.push_back(tensor ? const_cast<void*>(tensor->const_data_ptr()) : nullptr);
  return launch(*step.program, pointers);
}

/// ``[batch, out_channels, out_height, out_width]``.
inline Tensor compute_output(const Answer& answer, const Tensor& input, const Tensor& weight,
                             const std::optional<Tensor>& bias, const Geometry& geometry) {
  const Step& step = answer.steps.at(0);
  const Tensor output = step.handle == PYTORCH
                            ? at::convolution(input, weight, bias, geometry.stride(), geometry.padding(), geometry.dilation(),
                                              true, geometry.output_padding(), geometry.groups())
                            : run(step, {&input, &weight, bias ? &*bias : nullptr}).at(0);
  return output.contiguous(answer.format);
}

using Gradients = std::array<Tensor, 3>;  // of input, weight and bias; undefined where it is not asked for

/// PyTorch's own formulation, which autograd, functorch and modes know.
inline Gradients gradients_by_pytorch(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                                      const Geometry& geometry, const Mask& mask) {
  const std::array<int64_t, 1> out_channels{weight.size(1) * geometry.groups()};
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      grad_output, input, weight, at::OptionalIntArrayRef(out_channels), geometry.stride(), geometry.padding(),
      geometry.dilation(), true, geometry.output_padding(), geometry.groups(), mask);
  return {std::move(of_input), std::move(of_weight), std::move(of_bias)};
}

inline Gradients compute_gradients(const Answer& answer, const Tensor& grad_output, const Tensor& input,
                                   const Tensor& weight, const Geometry& geometry) {
  Gradients gradients;
  for (const Step& step : answer.steps) {
    if (step.handle == PYTORCH) {
      Gradients found = gradients_by_pytorch(grad_output, input, weight, geometry, step.mask);
      for (size_t i = 0; i < 3; ++i)
        if (step.mask[i]) gradients[i] = std::move(found[i]);
    } else {
      std::vector<Tensor> found = run(step, {&grad_output, &input, &weight});
      for (size_t i = 0, next = 0; i < 3; ++i)
        if (step.mask[i]) gradients[i] = std::move(found.at(next++));
    }
  }
  for (Tensor& gradient : gradients)
    if (gradient.defined() && gradient.dim() == 4) gradient = gradient.contiguous(answer.format);
  return gradients;
}

}  // namespace tconv_swap
