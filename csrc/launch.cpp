// The hot path: allocate a plan's outputs and workspace, launch its kernels on the current stream.
//
// The cold path (planning, compiling) is Python's: it hands over each kernel once (tconv_load_kernel) and each
// plan once (tconv_add_plan), as a list of numbers whose order plan_words in launch.py writes. A call then
// costs one op: tconv_swap::launch(plan, tensors) -> tensors, or tconv_swap::relaunch, which launches only where
// the tensors lie as those that the plan was made for and else gives back none: cheaper than to compare in Python.
//
// Built against libtorch's stable ABI, and the driver API by hand: the few declarations below have not changed
// since CUDA 12.0, and with them a user needs no CUDA toolkit.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

using torch::stable::Tensor;

extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace {

// ---- the driver API ----------------------------------------------------------------------------------------

using Result = int;
struct LaunchAttribute {
  int id;
  char pad[4];
  union {
    char bytes[64];
    int programmatic_stream_serialization;
  } value;
};
struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};
constexpr int ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6;
struct alignas(64) TensorMap {
  char bytes[128];
};
constexpr int FUNCTION_MAX_DYNAMIC_SHARED_BYTES = 8;
constexpr int DEFAULT_SHARED_LIMIT = 48 * 1024;

struct Driver {
  Result (*get_error_name)(Result, const char**);
  Result (*get_error_string)(Result, const char**);
  Result (*library_load_data)(void**, const void*, void*, void*, unsigned, void*, void*, unsigned);
  Result (*library_get_kernel)(void**, void*, const char*);
  Result (*kernel_set_attribute)(int, int, void*, int);
  Result (*launch_kernel)(const LaunchConfig*, void*, void**, void**);
  Result (*context_get_current)(void**);
  Result (*context_set_current)(void*);
  Result (*primary_context_retain)(void**, int);
  // Null with a driver older than CUDA 12, which knows no GPU whose plans have tensor maps.
  Result (*tensor_map_encode_tiled)(TensorMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*,
                                    const uint32_t*, const uint32_t*, int, int, int, int);

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) throw std::runtime_error(std::string("cannot load the NVIDIA driver: ") + dlerror());
    auto find = [library](auto& function, const char* name) {
      void* symbol = dlsym(library, name);
      if (!symbol) throw std::runtime_error(std::string("the NVIDIA driver is too old, it lacks ") + name);
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
    };
    find(get_error_name, "cuGetErrorName");
    find(get_error_string, "cuGetErrorString");
    find(library_load_data, "cuLibraryLoadData");
    find(library_get_kernel, "cuLibraryGetKernel");
    find(kernel_set_attribute, "cuKernelSetAttribute");
    find(launch_kernel, "cuLaunchKernelEx");
    find(context_get_current, "cuCtxGetCurrent");
    find(context_set_current, "cuCtxSetCurrent");
    find(primary_context_retain, "cuDevicePrimaryCtxRetain");
    tensor_map_encode_tiled = reinterpret_cast<decltype(tensor_map_encode_tiled)>(dlsym(library, "cuTensorMapEncodeTiled"));
  }
};

const Driver& driver() {
  static const Driver instance;
  return instance;
}

void check(Result result, const char* what) {
  if (result == 0) return;
  const char *name = "unknown error", *text = "";
  driver().get_error_name(result, &name);
  driver().get_error_string(result, &text);
  throw std::runtime_error(std::string("CUDA error in ") + what + ": " + name + " (" + text + ")");
}

// A thread that has made no CUDA call yet (autograd's) has no context, and the driver API does not make one.
void ensure_context(int device) {
  void* context = nullptr;
  check(driver().context_get_current(&context), "cuCtxGetCurrent");
  if (context) return;
  check(driver().primary_context_retain(&context, device), "cuDevicePrimaryCtxRetain");
  check(driver().context_set_current(context), "cuCtxSetCurrent");
}

// ---- plans -------------------------------------------------------------------------------------------------

enum class ArgumentKind : int64_t { Input = 0, Output = 1, Workspace = 2, Int64 = 3, TensorMap = 4, Struct = 5 };  // program.ArgumentKind
struct Argument {
  ArgumentKind kind;
  int64_t value;
};
struct BoxedTensor {  // program.TensorMap
  Argument base;
  int64_t offset;
  int element, swizzle, promotion;
  uint32_t dimensions;
  uint64_t sizes[5], strides[5];
  uint32_t box[5], steps[5];
};
struct Launch {
  void* kernel;
  unsigned grid, block, shared_bytes;
  bool overlaps_previous;
  std::vector<Argument> arguments;
  std::vector<BoxedTensor> tensor_maps;
  std::vector<std::vector<int32_t>> structs;
};
struct Output {
  int32_t dtype;
  std::vector<int64_t> sizes, strides;
};
struct Input {
  bool present;
  std::vector<int64_t> sizes, strides;
};
struct Plan {
  int32_t dtype;
  int device;
  int64_t workspace_bytes;
  std::vector<Input> inputs;  // as they lay when the plan was made; none where that was not told
  std::vector<Output> outputs;
  std::vector<Launch> launches;
};

std::mutex plans_mutex;
std::deque<Plan> plans;  // never shrinks, and growing moves no plan: a handle and a reference stay good

Tensor allocate(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int32_t dtype, int device) {
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                                  dtype, aoti_torch_device_type_cuda(), device, &handle));
  return Tensor(handle);
}

/// What the pointers of a call's arguments come from.
struct Operands {
  void* const* inputs;
  const std::vector<Tensor>& outputs;
  char* workspace;

  void* pointer(const Argument& argument) const {
    switch (argument.kind) {
      case ArgumentKind::Input: return inputs[argument.value];
      case ArgumentKind::Output: return outputs[argument.value].data_ptr();
      case ArgumentKind::Workspace: return workspace + argument.value;
      default: throw std::runtime_error("an argument of a tconv_swap kernel is no pointer");
    }
  }
};

void encode(TensorMap* map, const BoxedTensor& tensor, const Operands& operands) {
  constexpr int NO_INTERLEAVE = 0, ZEROS_OUTSIDE = 0;
  if (!driver().tensor_map_encode_tiled)
    throw std::runtime_error("the NVIDIA driver is too old, it lacks cuTensorMapEncodeTiled");
  void* base = static_cast<char*>(operands.pointer(tensor.base)) + tensor.offset;
  check(driver().tensor_map_encode_tiled(map, tensor.element, tensor.dimensions, base, tensor.sizes, tensor.strides,
                                         tensor.box, tensor.steps, NO_INTERLEAVE, tensor.swizzle, tensor.promotion,
                                         ZEROS_OUTSIDE),
        "cuTensorMapEncodeTiled");
}

void run(const Launch& launch, void* stream, const Operands& operands) {
  constexpr size_t MOST = 16, MOST_MAPS = 8;
  const size_t count = launch.arguments.size();
  if (count > MOST || launch.tensor_maps.size() > MOST_MAPS)
    throw std::runtime_error("a kernel of tconv_swap takes too many arguments");
  TensorMap maps[MOST_MAPS];
  for (size_t i = 0; i < launch.tensor_maps.size(); ++i) encode(&maps[i], launch.tensor_maps[i], operands);
  union {
    void* pointer;
    int64_t number;
  } values[MOST];
  void* addresses[MOST];
  for (size_t i = 0; i < count; ++i) {
    const Argument& argument = launch.arguments[i];
    addresses[i] = &values[i];
    switch (argument.kind) {
      case ArgumentKind::Int64: values[i].number = argument.value; break;
      case ArgumentKind::TensorMap: addresses[i] = &maps[argument.value]; break;
      // The driver copies the words; its interface takes no pointer to const.
      case ArgumentKind::Struct: addresses[i] = const_cast<int32_t*>(launch.structs[argument.value].data()); break;
      default: values[i].pointer = operands.pointer(argument);
    }
  }
  LaunchAttribute overlap{};
  overlap.id = ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  overlap.value.programmatic_stream_serialization = 1;
  const LaunchConfig config{launch.grid, 1, 1, launch.block, 1, 1, launch.shared_bytes, stream,
                            &overlap,    launch.overlaps_previous ? 1u : 0u};
  check(driver().launch_kernel(&config, launch.kernel, addresses, nullptr), "cuLaunchKernelEx");
}

const Plan& plan_of(int64_t handle) {
  std::lock_guard<std::mutex> lock(plans_mutex);
  return plans.at(static_cast<size_t>(handle));
}

constexpr uintptr_t ALIGNMENT = 16;  // call.ALIGNMENT

bool lies_as(const Tensor& tensor, const Input& input, const Plan& plan) {
  int32_t dtype, device_index;
  int64_t dimensions, *sizes, *strides;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &device_index));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor.get(), &dimensions));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor.get(), &sizes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor.get(), &strides));
  return input.present && dtype == plan.dtype && device_index == plan.device &&
         dimensions == static_cast<int64_t>(input.sizes.size()) &&
         std::equal(input.sizes.begin(), input.sizes.end(), sizes) &&
         std::equal(input.strides.begin(), input.strides.end(), strides) &&
         reinterpret_cast<uintptr_t>(tensor.data_ptr()) % ALIGNMENT == 0;
}

std::vector<Tensor> launch(int64_t handle, std::vector<std::optional<Tensor>> given) {
  const Plan* plan = &plan_of(handle);
  const int device = plan->device;
  const torch::stable::accelerator::DeviceGuard guard(device);
  ensure_context(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));

  std::vector<Tensor> outputs;
  outputs.reserve(plan->outputs.size());
  for (const Output& output : plan->outputs)
    outputs.push_back(allocate(output.sizes, output.strides, output.dtype, device));
  std::optional<Tensor> workspace;
  if (plan->workspace_bytes)
    workspace = allocate({plan->workspace_bytes}, {1}, aoti_torch_dtype_uint8(), device);

  std::vector<void*> inputs;
  for (const std::optional<Tensor>& input : given) inputs.push_back(input ? input->data_ptr() : nullptr);
  char* scratch = workspace ? static_cast<char*>(workspace->data_ptr()) : nullptr;
  const Operands operands{inputs.data(), outputs, scratch};
  for (const Launch& step : plan->launches) run(step, stream, operands);
  return outputs;
}

std::vector<Tensor> relaunch(int64_t handle, Tensor first, Tensor second, std::optional<Tensor> third) {
  const Plan& plan = plan_of(handle);
  if (plan.inputs.size() != 3 || !lies_as(first, plan.inputs[0], plan) || !lies_as(second, plan.inputs[1], plan) ||
      (third ? !lies_as(*third, plan.inputs[2], plan) : plan.inputs[2].present))
    return {};
  return launch(handle, {first, second, third});
}

// ---- the cold path, called by ctypes: an error's text is kept for tconv_last_error ---------------------------

thread_local std::string last_error;

template <class Work>
int guarded(Work work) {
  try {
    work();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
}

}  // namespace

extern "C" const char* tconv_last_error() { return last_error.c_str(); }

// Loads machine code and finds one kernel in it, for every device of the process. The code is never unloaded.
extern "C" int tconv_load_kernel(const void* image, const char* entry, void** kernel) {
  return guarded([&] {
    void* library = nullptr;
    check(driver().library_load_data(&library, image, nullptr, nullptr, 0, nullptr, nullptr, 0), "cuLibraryLoadData");
    check(driver().library_get_kernel(kernel, library, entry), "cuLibraryGetKernel");
  });
}

// Adds a plan for a device; `words` as plan_words in launch.py writes them.
extern "C" int tconv_add_plan(const int64_t* words, int device, int64_t* handle) {
  return guarded([&] {
    auto next = [&words] { return *words++; };
    Plan plan;
    plan.dtype = static_cast<int32_t>(next());
    plan.device = device;
    plan.workspace_bytes = next();
    plan.outputs.resize(static_cast<size_t>(next()));
    for (Output& output : plan.outputs) {
      output.dtype = static_cast<int32_t>(next());
      const int64_t dimensions = next();
      for (int64_t i = 0; i < dimensions; ++i) output.sizes.push_back(next());
      for (int64_t i = 0; i < dimensions; ++i) output.strides.push_back(next());
    }
    plan.launches.resize(static_cast<size_t>(next()));
    for (Launch& launch : plan.launches) {
      launch.kernel = reinterpret_cast<void*>(next());
      launch.grid = static_cast<unsigned>(next());
      launch.block = static_cast<unsigned>(next());
      launch.shared_bytes = static_cast<unsigned>(next());
      launch.overlaps_previous = next() != 0;
      launch.arguments.resize(static_cast<size_t>(next()));
      for (Argument& argument : launch.arguments) {
        argument.kind = static_cast<ArgumentKind>(next());
        argument.value = next();
      }
      launch.tensor_maps.resize(static_cast<size_t>(next()));
      for (BoxedTensor& tensor : launch.tensor_maps) {
        tensor.base.kind = static_cast<ArgumentKind>(next());
        tensor.base.value = next();
        tensor.offset = next();
        tensor.element = static_cast<int>(next());
        const int64_t swizzle_bytes = next();
        tensor.swizzle = swizzle_bytes == 0 ? 0 : swizzle_bytes == 32 ? 1 : swizzle_bytes == 64 ? 2 : 3;
        const int64_t fetched_bytes = next();
        tensor.promotion = fetched_bytes == 64 ? 1 : fetched_bytes == 128 ? 2 : 3;
        tensor.dimensions = static_cast<uint32_t>(next());
        if (tensor.dimensions < 1 || tensor.dimensions > 5) throw std::runtime_error("a tensor map has 1 to 5 dimensions");
        for (uint32_t i = 0; i < tensor.dimensions; ++i) tensor.sizes[i] = static_cast<uint64_t>(next());
        for (uint32_t i = 0; i + 1 < tensor.dimensions; ++i) tensor.strides[i] = static_cast<uint64_t>(next());
        for (uint32_t i = 0; i < tensor.dimensions; ++i) tensor.box[i] = static_cast<uint32_t>(next());
        for (uint32_t i = 0; i < tensor.dimensions; ++i) tensor.steps[i] = static_cast<uint32_t>(next());
      }
      launch.structs.resize(static_cast<size_t>(next()));
      for (std::vector<int32_t>& one : launch.structs) {
        one.resize(static_cast<size_t>(next()));
        for (int32_t& word : one) word = static_cast<int32_t>(next());
      }
      if (launch.shared_bytes > DEFAULT_SHARED_LIMIT)
        check(driver().kernel_set_attribute(FUNCTION_MAX_DYNAMIC_SHARED_BYTES, static_cast<int>(launch.shared_bytes),
                                            launch.kernel, device),
              "cuKernelSetAttribute");
    }
    plan.inputs.resize(static_cast<size_t>(next()));
    for (Input& input : plan.inputs) {
      input.present = next() != 0;
      const int64_t dimensions = next();
      for (int64_t i = 0; i < dimensions; ++i) input.sizes.push_back(next());
      for (int64_t i = 0; i < dimensions; ++i) input.strides.push_back(next());
    }
    std::lock_guard<std::mutex> lock(plans_mutex);
    *handle = static_cast<int64_t>(plans.size());
    plans.push_back(std::move(plan));
  });
}

// relaunch for node.cpp: on handles that stay the caller's, of which `third` may be null. Writes the outputs' handles (at
// most 3), which the caller deletes, and returns how many.
extern "C" size_t tconv_relaunch(int64_t plan, AtenTensorHandle first, AtenTensorHandle second, AtenTensorHandle third,
                                 AtenTensorHandle* outputs) {
  auto own = [](AtenTensorHandle handle) {
    AtenTensorHandle copy;
    TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handle, &copy));
    return Tensor(copy);
  };
  const auto computed = relaunch(plan, own(first), own(second), third ? std::optional(own(third)) : std::nullopt);
  for (const Tensor& output : computed) TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(output.get(), outputs++));
  return computed.size();
}

STABLE_TORCH_LIBRARY_FRAGMENT(tconv_swap, library) {
  library.def("launch(int plan, Tensor?[] inputs) -> Tensor[]");
  library.def("relaunch(int plan, Tensor first, Tensor second, Tensor? third) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(tconv_swap, CUDA, library) {
  library.impl("launch", TORCH_BOX(&launch));
  library.impl("relaunch", TORCH_BOX(&relaunch));
}
