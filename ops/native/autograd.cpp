#include "native/autograd.hpp"

#include <ATen/FuncTorchTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace fuseport {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch::jit::Stack;

// What an argument of the gradient is.
enum class From { cotangent, input, output };

struct Source {
  From from;
  size_t place;
};

std::string gradient_of(const c10::Argument& argument) { return "d" + argument.name(); }

// An operator, that of its gradients, and how they belong together.
struct Wiring {
  c10::OperatorHandle op, gradient;
  std::vector<Source> arguments;  // of the gradient
  std::vector<size_t> results;    // of the gradient: the input that each is of
  std::vector<size_t> fixed;      // outputs that have no gradient

  Wiring(const c10::OperatorHandle& op, const std::string& name)
      : op(op), gradient(beside(op, name)) {
    const auto &inputs = op.schema().arguments(), &outputs = op.schema().returns();
    for (const c10::Argument& argument : gradient.schema().arguments()) {
      arguments.push_back(source(argument.name(), inputs, outputs));
    }
    for (const c10::Argument& result : gradient.schema().returns()) {
      const auto is_of = [&](const c10::Argument& a) { return gradient_of(a) == result.name(); };
      results.push_back(std::find_if(inputs.begin(), inputs.end(), is_of) - inputs.begin());
      TORCH_CHECK(results.back() < inputs.size(), gradient.schema().name(), ": ", result.name(),
                  " is the gradient of no input of ", op.schema().name());
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      const auto is_it = [&](const Source& s) { return s.from == From::cotangent && s.place == i; };
      if (std::none_of(arguments.begin(), arguments.end(), is_it)) fixed.push_back(i);
    }
  }

 private:
  // The operator of that name in the namespace of `op`.
  static c10::OperatorHandle beside(const c10::OperatorHandle& op, const std::string& name) {
    const std::string& own = op.schema().name();
    const std::string whole = own.substr(0, own.find("::") + 2) + name;
    return c10::Dispatcher::singleton().findSchemaOrThrow(whole.c_str(), "");
  }

  Source source(const std::string& name, const std::vector<c10::Argument>& inputs,
                const std::vector<c10::Argument>& outputs) const {
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (gradient_of(outputs[i]) == name) return {From::cotangent, i};
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].name() == name) return {From::input, i};
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (outputs[i].name() == name) return {From::output, i};
    }
    TORCH_CHECK(false, gradient.schema().name(), ": there is no ", name, " in ",
                op.schema().name());
  }
};

struct ByOperator : torch::autograd::Function<ByOperator> {
  // `tensors` are those of `inputs`, in order: what autograd looks at.
  static variable_list forward(AutogradContext* ctx, const Wiring* wiring, at::TensorList tensors,
                               const Stack* inputs) {
    const at::AutoDispatchBelowADInplaceOrView below;
    Stack outputs = *inputs;
    wiring->op.callBoxed(&outputs);
    variable_list saved, results, fixed;
    for (const c10::IValue& output : outputs) results.push_back(output.toTensor());
    for (size_t i = 0; i < wiring->arguments.size(); ++i) {
      const auto [from, place] = wiring->arguments[i];
      if (from == From::cotangent) continue;
      const c10::IValue& value = from == From::input ? (*inputs)[place] : outputs[place];
      if (value.isTensor()) {
        saved.push_back(value.toTensor());
      } else {
        ctx->saved_data[std::to_string(i)] = value;
      }
    }
    for (const size_t i : wiring->fixed) fixed.push_back(results[i]);
    ctx->save_for_backward(std::move(saved));
    ctx->mark_non_differentiable(fixed);
    // Wirings live as long as the process.
    ctx->saved_data["wiring"] = reinterpret_cast<int64_t>(wiring);
    return results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& cotangents) {
    const auto* wiring = reinterpret_cast<const Wiring*>(ctx->saved_data["wiring"].toInt());
    const variable_list saved = ctx->get_saved_variables();
    Stack values;
    size_t next = 0;
    for (size_t i = 0; i < wiring->arguments.size(); ++i) {
      const auto [from, place] = wiring->arguments[i];
      if (from == From::cotangent) {
        values.emplace_back(cotangents[place]);
      } else if (const auto plain = ctx->saved_data.find(std::to_string(i));
                 plain != ctx->saved_data.end()) {
        values.push_back(plain->second);
      } else {
        values.emplace_back(saved[next++]);
      }
    }
    wiring->gradient.callBoxed(&values);
    // The first and the last of forward's arguments are no tensors.
    const auto& inputs = wiring->op.schema().arguments();
    variable_list gradients{Tensor()};
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!inputs[i].type()->isSubtypeOf(*c10::TensorType::get())) continue;
      const auto found = std::find(wiring->results.begin(), wiring->results.end(), i);
      gradients.push_back(found == wiring->results.end()
                              ? Tensor()
                              : values[found - wiring->results.begin()].toTensor());
    }
    gradients.emplace_back();
    return gradients;
  }
};

// The kernel of an operator for the key Autograd.
class Differentiated : public c10::OperatorKernel {
 public:
  explicit Differentiated(std::string gradient) : gradient_(std::move(gradient)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    const auto given = torch::jit::last(*stack, op.schema().arguments().size());
    if (!at::functorch::functorchTLSAccessor() &&
        std::none_of(given.begin(), given.end(), is_followed)) {
      const at::AutoDispatchBelowADInplaceOrView below;
      return op.callBoxed(stack);
    }
    const Wiring& wiring = wiring_of(op);
    const Stack inputs = given.vec();
    torch::jit::drop(*stack, inputs.size());
    variable_list tensors;
    for (const c10::IValue& value : inputs) {
      if (value.isTensor()) tensors.push_back(value.toTensor());
    }
    for (const Tensor& result : ByOperator::apply(&wiring, at::TensorList(tensors), &inputs)) {
      stack->emplace_back(result);
    }
  }

 private:
  // Whether autograd wants to know what is computed of a value.
  static bool is_followed(const c10::IValue& value) {
    if (!value.isTensor() || !value.toTensor().defined()) return false;
    const Tensor& tensor = value.toTensor();
    return (at::GradMode::is_enabled() && tensor.requires_grad()) || tensor._fw_grad(0).defined();
  }

  const Wiring& wiring_of(const c10::OperatorHandle& op) {
    // When the first call comes all operators are there. It is never deleted: graphs refer to it.
    std::call_once(once_, [&] { wiring_ = new Wiring(op, gradient_); });
    return *wiring_;
  }

  std::string gradient_;
  std::once_flag once_;
  const Wiring* wiring_ = nullptr;
};

}  // namespace

void differentiated_by(torch::Library& m, const char* name, const char* gradient) {
  m.impl(name,
         torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Differentiated>(gradient)));
  undifferentiated(m, gradient);
}

void undifferentiated(torch::Library& m, const char* name) {
  m.impl(name, torch::autograd::autogradNotImplementedFallback());
}

}  // namespace fuseport
