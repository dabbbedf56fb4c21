// Programs and their launch. The few declarations of the driver API below have not changed since CUDA 12.0; they are
// written here so that a user needs no CUDA toolkit.
//
// Python plans and compiles. It passes each kernel once (tconv_load_kernel), and each program (tconv_add_program) as a list
// of numbers in the order that plan_words in runtime/launch.py writes.
#include "launch.h"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>

namespace tconv_swap {
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
  // Null with a driver older than CUDA 12, which supports no GPU whose plans have tensor maps.
  Result (*tensor_map_encode_tiled)(TensorMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*,
                                    const uint32_t*, const uint32_t*, int, int, int, int);
  Result (*tensor_map_encode_im2col)(TensorMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const int*,
                                     const int*, uint32_t, uint32_t, const uint32_t*, int, int, int, int);

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
    tensor_map_encode_im2col = reinterpret_cast<decltype(tensor_map_encode_im2col)>(dlsym(library, "cuTensorMapEncodeIm2col"));
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

// A thread that has made no CUDA call yet, such as one of autograd's, has no context; the driver API does not create one.
void ensure_context(int device) {
  void* context = nullptr;
  check(driver().context_get_current(&context), "cuCtxGetCurrent");
  if (context) return;
  check(driver().primary_context_retain(&context, device), "cuDevicePrimaryCtxRetain");
  check(driver().context_set_current(context), "cuCtxSetCurrent");
}

// ---- launching ---------------------------------------------------------------------------------------------

/// The tensors and the workspace that pointer arguments of kernels refer to.
struct Operands {
  void* const* inputs;
  void* const* outputs;
  char* workspace;

  void* pointer(const Argument& argument) const {
    switch (argument.kind) {
      case ArgumentKind::Input: return inputs[argument.value];
      case ArgumentKind::Output: return outputs[argument.value];
      case ArgumentKind::Workspace: return workspace + argument.value;
      default: throw std::runtime_error("an argument of a tconv_swap kernel is no pointer");
    }
  }
};

void encode(TensorMap* map, const TiledTensor& tensor, const Operands& operands) {
  constexpr int NO_INTERLEAVE = 0, ZEROS_OUTSIDE = 0;
  if (!driver().tensor_map_encode_tiled || !driver().tensor_map_encode_im2col)
    throw std::runtime_error("the NVIDIA driver is too old, it lacks cuTensorMapEncodeTiled or cuTensorMapEncodeIm2col");
  void* base = static_cast<char*>(operands.pointer(tensor.base)) + tensor.offset;
  if (tensor.im2col) {
    check(driver().tensor_map_encode_im2col(map, tensor.element, tensor.dimensions, base, tensor.sizes, tensor.strides,
                                            tensor.corners, tensor.corners + 2, tensor.box[0], tensor.box[1], tensor.steps,
                                            NO_INTERLEAVE, tensor.swizzle, tensor.promotion, ZEROS_OUTSIDE),
          "cuTensorMapEncodeIm2col");
    return;
  }
  check(driver().tensor_map_encode_tiled(map, tensor.element, tensor.dimensions, base, tensor.sizes, tensor.strides,
                                         tensor.box, tensor.steps, NO_INTERLEAVE, tensor.swizzle, tensor.promotion,
                                         ZEROS_OUTSIDE),
        "cuTensorMapEncodeTiled");
}

void run(const Launch& launch, void* stream, const Operands& operands) {
  constexpr size_t MAX_ARGUMENTS = 16, MAX_MAPS = 8;
  const size_t count = launch.arguments.size();
  if (count > MAX_ARGUMENTS || launch.tensor_maps.size() > MAX_MAPS)
    throw std::runtime_error("a kernel of tconv_swap takes too many arguments");
  TensorMap maps[MAX_MAPS];
  for (size_t i = 0; i < launch.tensor_maps.size(); ++i) encode(&maps[i], launch.tensor_maps[i], operands);
  union {
    void* pointer;
    int64_t number;
  } values[MAX_ARGUMENTS];
  void* addresses[MAX_ARGUMENTS];
  size_t parameters = 0, fields_end = 0;
  for (size_t i = 0; i < count; ++i) {
    const Argument& argument = launch.arguments[i];
    // The driver copies a struct from the address of its first field; the other fields follow it in `values`.
    if (argument.kind == ArgumentKind::Fields) {
      addresses[parameters++] = &values[i + 1];
      fields_end = i + 1 + static_cast<size_t>(argument.value);
      continue;
    }
    void* unread;
    void*& address = i < fields_end ? unread : addresses[parameters++];
    address = &values[i];
    switch (argument.kind) {
      case ArgumentKind::Int64: values[i].number = argument.value; break;
      case ArgumentKind::TensorMap: address = &maps[argument.value]; break;
      // The driver copies the words; its interface does not take pointers to const.
      case ArgumentKind::Struct: address = const_cast<int32_t*>(launch.structs[argument.value].data()); break;
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

// ---- programs ----------------------------------------------------------------------------------------------

std::mutex programs_mutex;
int64_t next_handle = 0;

std::unordered_map<int64_t, std::shared_ptr<const Program>>& programs() {
  // Never destroyed: threads may still launch while the process ends.
  static auto* instance = new std::unordered_map<int64_t, std::shared_ptr<const Program>>;
  return *instance;
}

thread_local std::string last_error;

/// Runs the work of a function that ctypes calls; keeps the text of an error for tconv_last_error.
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

/// Allows a kernel this much dynamic shared memory. Programs share kernels, so the limit of a kernel never shrinks. The
/// driver loads the kernel into the device's memory for it, which its first launch would wait for.
void allow_shared_bytes(void* kernel, int device, unsigned bytes) {
  static std::mutex mutex;
  static auto* allowed = new std::map<std::pair<void*, int>, unsigned>;
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = allowed->find({kernel, device});
  if (found != allowed->end() && bytes <= found->second) return;
  check(driver().kernel_set_attribute(FUNCTION_MAX_DYNAMIC_SHARED_BYTES, static_cast<int>(bytes), kernel, device),
        "cuKernelSetAttribute");
  (*allowed)[{kernel, device}] = bytes;
}

Program read_program(const int64_t* words, int device) {
  auto next = [&words] { return *words++; };
  Program program;
  program.device = device;
  program.workspace_bytes = next();
  program.outputs.resize(static_cast<size_t>(next()));
  for (Output& output : program.outputs) {
    output.dtype = static_cast<int32_t>(next());
    const int64_t dimensions = next();
    for (int64_t i = 0; i < dimensions; ++i) output.sizes.push_back(next());
    for (int64_t i = 0; i < dimensions; ++i) output.strides.push_back(next());
  }
  program.launches.resize(static_cast<size_t>(next()));
  for (Launch& launch : program.launches) {
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
    for (TiledTensor& tensor : launch.tensor_maps) {
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
      const int64_t corners = next();
      tensor.im2col = corners > 0;
      if (tensor.im2col && (corners != 4 || tensor.dimensions != 4))
        throw std::runtime_error("a tensor map in im2col mode has 4 dimensions and 4 numbers of corners");
      for (uint32_t i = 0; i < tensor.dimensions; ++i) tensor.sizes[i] = static_cast<uint64_t>(next());
      for (uint32_t i = 0; i + 1 < tensor.dimensions; ++i) tensor.strides[i] = static_cast<uint64_t>(next());
      for (uint32_t i = 0; i < (tensor.im2col ? 2 : tensor.dimensions); ++i) tensor.box[i] = static_cast<uint32_t>(next());
      for (uint32_t i = 0; i < tensor.dimensions; ++i) tensor.steps[i] = static_cast<uint32_t>(next());
      for (int64_t i = 0; i < corners; ++i) tensor.corners[i] = static_cast<int32_t>(next());
    }
    launch.structs.resize(static_cast<size_t>(next()));
    for (std::vector<int32_t>& one : launch.structs) {
      one.resize(static_cast<size_t>(next()));
      for (int32_t& word : one) word = static_cast<int32_t>(next());
    }
    allow_shared_bytes(launch.kernel, device, launch.shared_bytes);
  }
  return program;
}

}  // namespace

std::shared_ptr<const Program> program_of(int64_t handle) {
  std::lock_guard<std::mutex> lock(programs_mutex);
  const auto found = programs().find(handle);
  return found == programs().end() ? nullptr : found->second;
}

void drop_program(int64_t handle) {
  std::lock_guard<std::mutex> lock(programs_mutex);
  programs().erase(handle);
}

void launch(const Program& program, void* stream, void* const* inputs, void* const* outputs, char* workspace) {
  ensure_context(program.device);
  const Operands operands{inputs, outputs, workspace};
  for (const Launch& step : program.launches) run(step, stream, operands);
}

}  // namespace tconv_swap

// ---- called by ctypes, once for each program -------------------------------------------------------------------------

extern "C" const char* tconv_last_error() { return tconv_swap::last_error.c_str(); }

// Loads machine code and returns one kernel of it, which is valid on every device of the process. It is never unloaded.
extern "C" int tconv_load_kernel(const void* image, const char* entry, void** kernel) {
  using namespace tconv_swap;
  return guarded([&] {
    void* library = nullptr;
    check(driver().library_load_data(&library, image, nullptr, nullptr, 0, nullptr, nullptr, 0), "cuLibraryLoadData");
    check(driver().library_get_kernel(kernel, library, entry), "cuLibraryGetKernel");
  });
}

// Adds a program for a device. `words` are in the order that plan_words in runtime/launch.py writes.
extern "C" int tconv_add_program(const int64_t* words, int device, int64_t* handle) {
  using namespace tconv_swap;
  return guarded([&] {
    auto program = std::make_shared<const Program>(read_program(words, device));
    std::lock_guard<std::mutex> lock(programs_mutex);
    *handle = next_handle++;
    programs().emplace(*handle, std::move(program));
  });
}

extern "C" void tconv_drop_program(int64_t handle) { tconv_swap::drop_program(handle); }
