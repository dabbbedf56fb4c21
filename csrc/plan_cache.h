// The cache of call plans: for each kind of call that was made before, the steps that compute it. The key holds everything
// that the choice depends on: stage, backend, geometry, the state of PyTorch's precision switch, and device, dtype, sizes,
// strides and alignment of each tensor.
#pragma once

#include "launch.h"

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tconv_swap {

/// Which of the gradients of input, weight and bias a call computes.
using Mask = std::array<bool, 3>;

constexpr int64_t PYTORCH = -1;  // in place of a program: PyTorch's operator

struct Step {
  int64_t handle;
  std::shared_ptr<const Program> program;  // null for PyTorch's operator
  Mask mask;
  // The format that each of the first three tensors is copied into. A tensor without one is read as it lies in memory, and
  // so are all further tensors.
  std::array<std::optional<at::MemoryFormat>, 3> formats;
};
struct CallPlan {
  std::vector<Step> steps;
  at::MemoryFormat format;  // of the result
  bool is_pytorchs;         // whether PyTorch's operator computes this forward pass and every gradient
};

using Key = c10::SmallVector<int64_t, 64>;

constexpr int64_t FORWARD_STAGE = 8;  // gradients have their mask, 1 to 7; norm.h has 16 to 21, block.h 24, pad.h 25 and 26
constexpr int64_t CAST_STAGE = 32;    // with the dtype in the bits above
inline int64_t stage_of(const Mask& mask) { return mask[0] + 2 * mask[1] + 4 * mask[2]; }

constexpr uintptr_t ALIGNMENT = 16;  // bytes, as ALIGNMENT of cuda/call.py

Key key_of(int64_t stage, std::initializer_list<const at::Tensor*> tensors, at::IntArrayRef geometry,
           std::string_view backend);

/// The cache is bounded. Where sizes change all the time, it drops those that were used least recently, half of them at a
/// time.
class PlanCache {
 public:
  static PlanCache& instance() {
    // Never destroyed: threads may still call while the process ends.
    static auto* cache = new PlanCache;
    return *cache;
  }

  std::shared_ptr<const CallPlan> find(const Key& key) {
    {
      std::shared_lock<std::shared_mutex> lock(mutex_);
      if (const auto found = recent_.find(key); found != recent_.end()) return found->second;
      if (older_.find(key) == older_.end()) return nullptr;
    }
    std::unique_lock<std::shared_mutex> lock(mutex_);
    const auto found = older_.find(key);
    if (found == older_.end()) return nullptr;
    std::shared_ptr<const CallPlan> plan = std::move(found->second);
    older_.erase(found);
    insert(key, plan);
    return plan;
  }

  /// How often the cache was emptied.
  uint64_t epoch() {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    return epoch_;
  }

  /// Keeps nothing if the cache was emptied since `epoch`: the choice may have changed meanwhile.
  void keep(const Key& key, std::shared_ptr<const CallPlan> plan, uint64_t epoch) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    if (epoch == epoch_) insert(key, std::move(plan));
  }

  void forget() {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    recent_.clear();
    older_.clear();
    ++epoch_;
  }

  size_t size() {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    return recent_.size() + older_.size();
  }

 private:
  static constexpr size_t MAX_RECENT = 2048;

  struct Hash {
    size_t operator()(const Key& key) const {
      // FNV-1a, by words.
      uint64_t hash = 0xcbf29ce484222325;
      for (const int64_t word : key) hash = (hash ^ static_cast<uint64_t>(word)) * 0x100000001b3;
      return hash ^ hash >> 32;
    }
  };
  using Map = std::unordered_map<Key, std::shared_ptr<const CallPlan>, Hash>;

  void insert(const Key& key, std::shared_ptr<const CallPlan> plan) {
    if (recent_.size() >= MAX_RECENT) {
      older_ = std::move(recent_);
      recent_ = Map();
    }
    recent_.insert_or_assign(key, std::move(plan));
  }

  std::shared_mutex mutex_;
  Map recent_, older_;
  uint64_t epoch_ = 0;
};

}  // namespace tconv_swap
