// The interface of launch.cpp: programs, which are plain data, and their launch. It includes no header of torch or CUDA.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace tconv_swap {

enum class ArgumentKind : int64_t { Input, Output, Workspace, Int64, TensorMap, Struct, Fields };  // program.ArgumentKind
struct Argument {
  ArgumentKind kind;
  int64_t value;
};
struct TiledTensor {  // program.TensorMap
  Argument base;
  int64_t offset;
  int element, swizzle, promotion;
  uint32_t dimensions;
  uint64_t sizes[5], strides[5];
  uint32_t box[5], steps[5];
  bool im2col;
  int32_t corners[4];
};
struct Launch {  // program.Launch
  void* kernel;
  unsigned grid, block, shared_bytes;
  bool overlaps_previous;
  std::vector<Argument> arguments;
  std::vector<TiledTensor> tensor_maps;
  std::vector<std::vector<int32_t>> structs;
};
struct Output {  // program.Output
  int32_t dtype;  // c10::ScalarType
  std::vector<int64_t> sizes, strides;
};
struct Program {  // program.Plan, on one device
  int device;
  int64_t workspace_bytes;
  std::vector<Output> outputs;
  std::vector<Launch> launches;
};

/// Returns the program of a handle of tconv_add_program; null if there is none.
std::shared_ptr<const Program> program_of(int64_t handle);

/// Makes the handle invalid. The program lives as long as a shared pointer holds it.
void drop_program(int64_t handle);

/// Launches the kernels in order on `stream`. The pointers to the inputs (null where one is absent), the outputs and the
/// workspace are on the program's device, which is the current device.
///
/// Throws std::runtime_error with the driver's message if the driver refuses.
void launch(const Program& program, void* stream, void* const* inputs, void* const* outputs, char* workspace);

}  // namespace tconv_swap
