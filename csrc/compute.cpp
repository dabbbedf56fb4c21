// Plans, and what runs their steps, for the ops of call.cpp and blocks.cpp.
#include "compute.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/strides.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace tconv_swap {

Key key_of(int64_t stage, Tensors tensors, at::IntArrayRef geometry, std::string_view backend) {
  const Tensor& first = **tensors.begin();
  bool tf32 = false;
  if (first.scalar_type() == at::kFloat)
    tf32 = at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::CONV) ==
           at::Float32Precision::TF32;
  // Backends differ by their first letters.
  Key key{stage, tf32, backend.empty() ? 0 : backend.front()};
  key.append(geometry.begin(), geometry.end());
  for (const Tensor* tensor : tensors) {
    if (!tensor) {
      key.push_back(-1);
      continue;
    }
    const bool is_aligned = reinterpret_cast<uintptr_t>(tensor->const_data_ptr()) % ALIGNMENT == 0;
    key.push_back(tensor->dim() | int64_t(is_aligned) << 8 | int64_t(tensor->scalar_type()) << 16 |
                  int64_t(static_cast<uint8_t>(tensor->device().type())) << 24 | int64_t(tensor->get_device()) << 32);
    key.append(tensor->sizes().begin(), tensor->sizes().end());
    key.append(tensor->strides().begin(), tensor->strides().end());
  }
  return key;
}

namespace {

std::optional<at::MemoryFormat> format_of(int64_t word) {
  if (word < 0) return std::nullopt;
  return word == 0 ? at::MemoryFormat::Contiguous : at::MemoryFormat::ChannelsLast;
}

/// Reads a call plan from the words that plan_call in cuda/call.py writes.
std::shared_ptr<const CallPlan> read_call_plan(const std::vector<int64_t>& words) {
  auto word = words.begin();
  auto plan = std::make_shared<CallPlan>();
  plan->format = *format_of(*word++);
  plan->is_pytorchs = *word++ != 0;
  while (word != words.end()) {
    Step step{*word++, nullptr, {}, {}};
    for (bool& wanted : step.mask) wanted = *word++ != 0;
    for (auto& format : step.formats) format = format_of(*word++);
    if (step.handle != PYTORCH) {
      step.program = program_of(step.handle);
      drop_program(step.handle);
    }
    plan->steps.push_back(std::move(step));
  }
  return plan;
}

Tensor empty(const Output& output, const at::Device& device) {
  return at::detail::empty_strided_cuda(output.sizes, output.strides, static_cast<at::ScalarType>(output.dtype), device);
}

}  // namespace

c10::List<bool> as_list(const Mask& mask) { return c10::List<bool>({mask[0], mask[1], mask[2]}); }

c10::List<std::optional<Tensor>> as_list(Tensors tensors) {
  c10::List<std::optional<Tensor>> list;
  for (const Tensor* tensor : tensors) list.push_back(tensor ? std::optional(*tensor) : std::nullopt);
  return list;
}

c10::IValue by_python(const char* name, std::vector<c10::IValue> stack) {
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(&stack);
  return std::move(stack.at(0));
}

std::shared_ptr<const CallPlan> plan_of(const Key& key, const char* planner,
                                        c10::function_ref<std::vector<c10::IValue>()> arguments) {
  PlanCache& cache = PlanCache::instance();
  if (auto cached = cache.find(key)) return cached;
  const uint64_t epoch = cache.epoch();
  const at::AutoDispatchBelowAutograd below_autograd;
  auto made = read_call_plan(by_python(planner, arguments()).toIntVector());
  cache.keep(key, made, epoch);
  return made;
}

std::shared_ptr<const CallPlan> plan_of_call(int64_t stage, Tensors tensors, at::IntArrayRef geometry,
                                             std::string_view backend, const Mask& later) {
  return plan_of(key_of(stage, tensors, geometry, backend), "tconv_swap::plan_call", [&] {
    const Mask mask{(stage & 1) != 0, (stage & 2) != 0, (stage & 4) != 0};
    return std::vector<c10::IValue>{as_list(tensors), geometry, as_list(mask), std::string(backend), as_list(later)};
  });
}

std::vector<Tensor> launch(const Program& program, c10::ArrayRef<void*> inputs) {
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

// On CUDA this is cheaper than clone(), which goes through the dispatcher several times.
Tensor copy_of(const Tensor& tensor, at::MemoryFormat format) {
  if (!tensor.is_cuda() || tensor.dim() != 4) return tensor.clone(format);
  c10::DimVector strides = c10::contiguous_strides(tensor.sizes());
  if (format == at::MemoryFormat::ChannelsLast) strides = c10::get_channels_last_strides_2d(tensor.sizes());
  const Tensor copy = at::detail::empty_strided_cuda(tensor.sizes(), strides, tensor.scalar_type(), tensor.device());
  return copy.copy_(tensor);
}

std::vector<Tensor> run(const Step& step, Tensors tensors) {
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
    // Tests replace the GPU here. On a GPU, every step that is not PyTorch's has a program.
    c10::List<std::optional<Tensor>> list;
    for (const Tensor* tensor : laid_out) list.push_back(tensor ? std::optional(*tensor) : std::nullopt);
    return by_python("tconv_swap::launch", {step.handle, list}).toTensorVector();
  }
  c10::SmallVector<void*, 7> pointers;
  // This is the only cast from const: a program only reads its inputs.
  for (const Tensor* tensor : laid_out) pointers.push_back(tensor ? const_cast<void*>(tensor->const_data_ptr()) : nullptr);
  return launch(*step.program, pointers);
}

Tensor compute_output(const CallPlan& plan, const Tensor& input, const Tensor& weight,
                             const std::optional<Tensor>& bias, const Geometry& geometry) {
  const Step& step = plan.steps.at(0);
  const Tensor output = step.handle == PYTORCH
                            ? at::convolution(input, weight, bias, geometry.stride(), geometry.padding(), geometry.dilation(),
                                              true, geometry.output_padding(), geometry.groups())
                            : run(step, {&input, &weight, bias ? &*bias : nullptr}).at(0);
  return output.contiguous(plan.format);
}

Gradients gradients_by_pytorch(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                                      const Geometry& geometry, const Mask& mask) {
  const std::array<int64_t, 1> out_channels{weight.size(1) * geometry.groups()};
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      grad_output, input, weight, at::OptionalIntArrayRef(out_channels), geometry.stride(), geometry.padding(),
      geometry.dilation(), true, geometry.output_padding(), geometry.groups(), mask);
  return {std::move(of_input), std::move(of_weight), std::move(of_bias)};
}

Gradients compute_gradients(const CallPlan& plan, const Tensor& grad_output, const Tensor& input,
                                   const Tensor& weight, const Geometry& geometry) {
  Gradients gradients;
  for (const Step& step : plan.steps) {
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
    if (gradient.defined() && gradient.dim() == 4) gradient = gradient.contiguous(plan.format);
  return gradients;
}

}  // namespace tconv_swap

// Empties the cache of call plans: from now on every choice is made anew.
extern "C" void tconv_forget() { tconv_swap::PlanCache::instance().forget(); }

// Returns how many call plans the cache holds.
extern "C" int64_t tconv_known() { return static_cast<int64_t>(tconv_swap::PlanCache::instance().size()); }
