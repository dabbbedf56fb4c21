// The casts of an autocast: up to three tensors of a call at once, below autograd.
#pragma once

#include "compute.h"

namespace at::autocast {
// Its header includes all of ATen's operators.
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
}  // namespace at::autocast

namespace tconv_swap {

/// Whether an autocast of this device casts a tensor, as dispatch.cast in Python decides.
inline bool is_cast(const Tensor& tensor, at::DeviceType device, at::ScalarType dtype) {
  return tensor.device().type() == device && tensor.is_floating_point() && tensor.scalar_type() != at::kDouble &&
         tensor.scalar_type() != dtype;
}

/// Returns the plan that casts such tensors, of which the last ones may be null.
inline std::shared_ptr<const CallPlan> plan_of_cast(Tensors tensors, at::ScalarType dtype) {
  return plan_of(key_of(CAST_STAGE | static_cast<int64_t>(dtype) << 8, tensors, {}, ""), "tconv_swap::plan_cast_call",
                 [&] { return std::vector<c10::IValue>{as_list(tensors), dtype}; });
}

using Together = std::array<Tensor, 3>;  // undefined: absent

/// Returns the tensors, those cast that an autocast casts. One launch casts them all if they have one dtype.
inline Together cast_together(const Together& given, at::DeviceType device, at::ScalarType dtype) {
  Together found = given;
  std::array<const Tensor*, 3> needed{};
  std::array<size_t, 3> places{};
  size_t count = 0;
  bool is_alike = true;
  for (size_t i = 0; i < given.size(); ++i) {
    if (!given[i].defined() || !is_cast(given[i], device, dtype)) continue;
    is_alike &= !count || (given[i].scalar_type() == needed[0]->scalar_type() && given[i].device() == needed[0]->device());
    places[count] = i;
    needed[count++] = &given[i];
  }
  if (!count) return found;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensors tensors{needed[0], needed[1], needed[2]};
  const auto plan = is_alike ? plan_of_cast(tensors, dtype) : nullptr;
  if (!plan || plan->steps.at(0).handle == PYTORCH) {
    for (size_t i = 0; i < count; ++i) found[places[i]] = needed[i]->to(dtype);
    return found;
  }
  std::vector<Tensor> copies = run(plan->steps.at(0), tensors);
  for (size_t i = 0; i < count; ++i) found[places[i]] = std::move(copies.at(i));
  return found;
}

}  // namespace tconv_swap
