// Calls made again, without Python: what eager.py and route.py do for a differentiable call and its gradients, as a
// node of PyTorch's C++ autograd, and for a call whose operands an autocast casts; and what graph_calls.py does for the
// two ops that a compiled graph calls. Whatever is not as it was goes back to Python: `differentiable` returns nothing,
// all else is asked from ops that Python implements.
//
// Python tells a route once (tconv_add_route), the steps of its gradients for a mask once (tconv_add_gradients), and
// which calls of graphs it answers (tconv_add_answer).
// A library apart from launch.cpp's, because it takes libtorch's own headers (AT_PER_OPERATOR_HEADERS: half of them),
// which only who trains or compiles need wait for. Where they have changed so that it does not build, Python does it.
#include "routes.h"

#include <torch/library.h>

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>

using namespace tconv_swap;
using torch::autograd::AutogradContext;

namespace {

// ---- the node ------------------------------------------------------------------------------------------------

/// What was computed already: no Tensor of its own, that autograd would take for an operand.
struct Computed {
  int64_t route;
  Tensor output;
};

struct TransposedConvolution : torch::autograd::Function<TransposedConvolution> {
  static Tensor forward(AutogradContext* context, const Computed& computed, const Tensor& input, const Tensor& weight,
                        const std::optional<Tensor>&) {
    context->save_for_backward({input, weight});
    context->saved_data["route"] = computed.route;
    return computed.output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    const variable_list saved = context->get_saved_variables();
    const Tensor &grad_output = grad_outputs.at(0), &input = saved.at(0), &weight = saved.at(1);
    const int64_t number = context->saved_data["route"].toInt();
    const Route& route = route_of(number);
    const Mask mask{context->needs_input_grad(0), context->needs_input_grad(1),
                    route.has_bias && context->needs_input_grad(2)};
    variable_list gradients;
    const auto keys = grad_output.key_set() | input.key_set() | weight.key_set();
    if (at::GradMode::is_enabled() || !is_eager() || !is_plain(keys)) {
      // Gradients of gradients, and of batches of gradients, are the op's business.
      const c10::IValue found =
          by_python("tconv_swap::conv_transpose2d_backward",
                    {grad_output, input, weight, route.stride, route.padding, route.output_padding, route.groups,
                     route.dilation, as_list(mask), route.backend});
      gradients = spread(found.toTensorVector(), mask);
    } else {
      if (auto again = gradients_again(route, mask, grad_output, input, weight)) {
        gradients = std::move(*again);
      } else {
        const c10::IValue found =
            by_python("tconv_swap::gradients_anew", {number, grad_output, input, weight, as_list(mask)});
        gradients = spread(found.toTensorVector(), mask);
      }
    }
    gradients.insert(gradients.begin(), Tensor());  // of Computed
    return gradients;
  }
};

/// As eager.cast.
Tensor cast(const Tensor& tensor, at::DeviceType device, std::optional<at::ScalarType> dtype) {
  const bool eligible =
      dtype && tensor.device().type() == device && tensor.is_floating_point() && tensor.scalar_type() != at::kDouble;
  return eligible ? tensor.to(*dtype) : tensor;
}

/// In forward mode, too: the op knows how.
bool wants_derivative(std::initializer_list<const Tensor*> tensors) {
  if (torch::autograd::ForwardADLevel::try_get_by_idx(0)) return true;
  return at::GradMode::is_enabled() &&
         std::any_of(tensors.begin(), tensors.end(), [](const Tensor* one) { return one && one->requires_grad(); });
}

/// ``[output]``, with a node behind it where a derivative is wanted; nothing where the tensors lie otherwise than when
/// the route was made.
std::vector<Tensor> differentiable(int64_t number, const Tensor& given_input, const Tensor& given_weight,
                                   const std::optional<Tensor>& given_bias) {
  const Route& route = route_of(number);
  auto keys = given_input.key_set() | given_weight.key_set();
  if (given_bias) keys = keys | given_bias->key_set();
  if (!is_plain(keys) || given_bias.has_value() != route.has_bias) return {};
  const at::DeviceType device = given_input.device().type();
  const Tensor input = cast(given_input, device, route.cast), weight = cast(given_weight, device, route.cast);
  std::optional<Tensor> bias;
  if (given_bias) bias = cast(*given_bias, device, route.cast);
  std::optional<Tensor> output = output_again(route, input, weight, bias);
  if (!output) return {};
  if (!wants_derivative({&input, &weight, bias ? &*bias : nullptr})) return {std::move(*output)};
  return {TransposedConvolution::apply(Computed{number, std::move(*output)}, input, weight, bias)};
}

// ---- what a compiled graph calls (graph.py) --------------------------------------------------------------------

enum Op : int64_t { OUTPUT, GRADIENTS };
using Key = std::vector<int64_t>;  // as key_of in graph_calls.py makes it

struct Hash {
  size_t operator()(const Key& key) const {
    const auto* bytes = reinterpret_cast<const char*>(key.data());
    return std::hash<std::string_view>()({bytes, key.size() * sizeof(key[0])});
  }
};
struct Answer {
  const Route* route;
  at::MemoryFormat form;  // that the graph was promised
};

std::shared_mutex answers_mutex;
std::unordered_map<Key, Answer, Hash> answers;

std::optional<Answer> answer_to(Op op, const Tensor& input, const Tensor& weight, bool has_bias,
                                at::IntArrayRef geometry, std::string_view backend) {
  Key key{op, input.get_device(), static_cast<int64_t>(input.scalar_type()), has_bias};
  for (const Tensor* tensor : {&input, &weight}) {
    key.insert(key.end(), tensor->sizes().begin(), tensor->sizes().end());
    key.insert(key.end(), tensor->strides().begin(), tensor->strides().end());
  }
  key.insert(key.end(), geometry.begin(), geometry.end());
  key.insert(key.end(), backend.begin(), backend.end());
  std::shared_lock<std::shared_mutex> lock(answers_mutex);
  const auto found = answers.find(key);
  return found == answers.end() ? std::nullopt : std::optional(found->second);
}

Tensor output(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, at::IntArrayRef geometry,
              std::string_view backend) {
  const auto known = answer_to(OUTPUT, input, weight, bias.has_value(), geometry, backend);
  if (known && known->route->holds())
    if (auto again = output_again(*known->route, input, weight, bias)) return again->contiguous(known->form);
  return by_python("tconv_swap::conv_transpose2d_output_anew",
                   {input, weight, bias, geometry, std::string(backend)})
      .toTensor();
}

std::vector<Tensor> gradients(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                              at::IntArrayRef geometry, Mask mask, std::string_view backend) {
  const at::NoGradGuard no_grad;
  const auto known = answer_to(GRADIENTS, input, weight, false, geometry, backend);
  if (known) {
    if (auto again = gradients_again(*known->route, mask, grad_output, input, weight)) {
      std::vector<Tensor> found;
      for (Tensor& gradient : *again)
        if (gradient.defined()) found.push_back(gradient.dim() == 4 ? gradient.contiguous(known->form) : gradient);
      return found;
    }
  }
  return by_python("tconv_swap::conv_transpose2d_gradients_anew",
                   {grad_output, input, weight, geometry, as_list(mask), std::string(backend)})
      .toTensorVector();
}

/// Stride, padding, output_padding, groups, dilation behind the tensors, and more behind those: as op.py's ops take it.
std::vector<c10::IValue> spelled_out(std::vector<c10::IValue> tensors, c10::SymIntArrayRef geometry,
                                     std::vector<c10::IValue> more) {
  for (const size_t at : {0, 2, 4}) tensors.emplace_back(geometry.slice(at, 2));
  tensors.emplace_back(geometry[6]);
  tensors.emplace_back(geometry.slice(7, 2));
  tensors.insert(tensors.end(), more.begin(), more.end());
  return tensors;
}

/// Below autograd, where somebody else (a mode, functionalization) wants to see the call.
c10::IValue redispatched(const char* name, c10::DispatchKeySet keys, std::vector<c10::IValue> stack) {
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").redispatchBoxed(keys & c10::after_autograd_keyset, &stack);
  return std::move(stack.at(0));
}

// Sizes may be symbols in these two, which a compiler traces: their kernels would not even be called with numbers.

Tensor output_autograd(c10::DispatchKeySet keys, const Tensor& input, const Tensor& weight,
                       const std::optional<Tensor>& bias, c10::SymIntArrayRef geometry, std::string_view backend) {
  if (wants_derivative({&input, &weight, bias ? &*bias : nullptr}))
    return by_python("tconv_swap::conv_transpose2d",
                     spelled_out({input, weight, bias}, geometry, {std::string(backend)}))
        .toTensor();
  const auto numbers = c10::asIntArrayRefSlowOpt(geometry);
  if (numbers && is_plain(keys)) return output(input, weight, bias, *numbers, backend);
  return redispatched("tconv_swap::conv_transpose2d_output", keys,
                      {input, weight, bias, geometry, std::string(backend)})
      .toTensor();
}

std::vector<Tensor> gradients_autograd(c10::DispatchKeySet keys, const Tensor& grad_output, const Tensor& input,
                                       const Tensor& weight, c10::SymIntArrayRef geometry, Mask mask,
                                       std::string_view backend) {
  if (wants_derivative({&grad_output, &input, &weight}))
    return by_python("tconv_swap::conv_transpose2d_backward",
                     spelled_out({grad_output, input, weight}, geometry, {as_list(mask), std::string(backend)}))
        .toTensorVector();
  const auto numbers = c10::asIntArrayRefSlowOpt(geometry);
  if (numbers && is_plain(keys)) return gradients(grad_output, input, weight, *numbers, mask, backend);
  return redispatched("tconv_swap::conv_transpose2d_gradients", keys,
                      {grad_output, input, weight, geometry, as_list(mask), std::string(backend)})
      .toTensorVector();
}

}  // namespace

// ---- the cold path, called by ctypes -------------------------------------------------------------------------

extern "C" void tconv_use_launcher(Relaunch relaunch) { relaunch_handles = relaunch; }

// Adds a route; `words` as route.py writes them. Returns its number.
extern "C" int64_t tconv_add_route(const int64_t* words, const char* backend) {
  auto next = [&words] { return *words++; };
  auto several = [&next](int64_t count) {
    std::vector<int64_t> numbers;
    for (int64_t i = 0; i < count; ++i) numbers.push_back(next());
    return numbers;
  };
  std::lock_guard<std::mutex> lock(routes_mutex);
  Route& route = routes.emplace_back();
  route.plan = next();
  if (const int64_t tf32 = next(); tf32 >= 0) route.tf32 = tf32 != 0;
  if (const int64_t cast = next(); cast >= 0) route.cast = static_cast<at::ScalarType>(cast);
  route.has_bias = next() != 0;
  route.stride = several(2);
  route.padding = several(2);
  route.output_padding = several(2);
  route.groups = next();
  route.dilation = several(2);
  route.input_strides = several(4);
  route.weight_strides = several(4);
  route.backend = backend;
  return static_cast<int64_t>(routes.size()) - 1;
}

// Says by what steps a route's gradients are computed from now on; `words` as route.py writes them.
extern "C" void tconv_add_gradients(int64_t number, const int64_t* words) {
  auto next = [&words] { return *words++; };
  auto mask = [&next] {
    Mask read;
    for (bool& wanted : read) wanted = next() != 0;
    return read;
  };
  auto gradients = std::make_unique<Gradients>();
  const Mask asked = mask();
  if (const int64_t channels_last = next(); channels_last >= 0)
    gradients->form = channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
  const int64_t count = next();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t plan = next();
    gradients->steps.push_back({plan, mask()});
  }
  // What was known before may be in use.
  route_of(number).gradients[index_of(asked)].store(gradients.release(), std::memory_order_release);
}

// From now on a graph's calls with `key` take this route; their results lie channels_last, or contiguous.
extern "C" void tconv_add_answer(int64_t number, int64_t channels_last, const int64_t* key, size_t size) {
  const Answer answer{&route_of(number), channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous};
  std::unique_lock<std::shared_mutex> lock(answers_mutex);
  answers.insert_or_assign(Key(key, key + size), answer);
}

// From now on every call of a graph is asked from Python.
extern "C" void tconv_forget_answers() {
  std::unique_lock<std::shared_mutex> lock(answers_mutex);
  answers.clear();
}

TORCH_LIBRARY_FRAGMENT(tconv_swap, library) {
  library.def("differentiable(int route, Tensor input, Tensor weight, Tensor? bias) -> Tensor[]", &differentiable);
}

// Python's kernels of these are CompositeExplicitAutograd, which those for one device come before.
TORCH_LIBRARY_IMPL(tconv_swap, CUDA, library) {
  library.impl("conv_transpose2d_output", &output);
  library.impl("conv_transpose2d_gradients", &gradients);
}

TORCH_LIBRARY_IMPL(tconv_swap, AutogradCUDA, library) {
  library.impl("conv_transpose2d_output", &output_autograd);
  library.impl("conv_transpose2d_gradients", &gradients_autograd);
}
