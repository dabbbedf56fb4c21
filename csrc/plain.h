// Whether a call may bypass the dispatcher because nothing but its caller has to see it.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/forward_grad.h>

#include <initializer_list>

namespace tconv_swap {

inline uint64_t functionality(at::DispatchKeySet keys) { return keys.raw_repr() & ~c10::full_backend_mask; }

/// Whether there is no subclass, vmap, functionalization, tracer, dispatch mode, lazy negation or zero tensor.
inline bool is_plain(at::DispatchKeySet keys) {
  static const uint64_t PLAIN = functionality(
      at::DispatchKeySet({at::DispatchKey::Dense, at::DispatchKey::ADInplaceOrView, at::DispatchKey::BackendSelect}) |
      c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset);
  return (functionality(keys | c10::impl::tls_local_dispatch_key_set().included_) & ~PLAIN) == 0 &&
         !torch::autograd::ForwardADLevel::try_get_by_idx(0);
}

inline bool is_plain(std::initializer_list<const at::Tensor*> tensors) {
  at::DispatchKeySet keys;
  for (const at::Tensor* tensor : tensors)
    if (tensor && tensor->defined()) keys = keys | tensor->key_set();
  return is_plain(keys);
}

}  // namespace tconv_swap
