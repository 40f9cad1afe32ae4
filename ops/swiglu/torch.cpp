// SwiGLU for torch: schemas, CPU kernels, autograd.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>
#include <tuple>
#include <vector>

#include "native/checks.hpp"
#include "native/empty.hpp"
#include "native/torch.hpp"
#include "swiglu/kernel.hpp"

namespace fuseport::swiglu {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Gradients = std::tuple<Tensor, Tensor>;

// The checks of shapes.py, in their order, with their messages.
void check_first(const Check& check) {
  const Tensor& t = check.first;
  const char* name = check.first_name;
  check.require(t.dim() >= 1, name, "(..., d)", tuple(t.sizes()));
  const at::ScalarType dtype = t.scalar_type();
  const bool half = dtype == at::kHalf || dtype == at::kBFloat16;
  check.require(half || dtype == at::kFloat || dtype == at::kDouble, name,
                "float16, bfloat16, float32 or float64", name_of(dtype));
}

void check_like(const Check& check, const char* name, const Tensor& t, const char* meaning,
                at::IntArrayRef shape) {
  check.like(name, t, check.first.scalar_type());
  check.require(t.sizes() == shape, name, std::string(meaning) + " = " + tuple(shape),
                tuple(t.sizes()));
}

std::vector<int64_t> half_shape(const Check& check) {
  std::vector<int64_t> sizes = check.first.sizes().vec();
  check.require(sizes.back() % 2 == 0, check.first_name, "of an even last size", sizes.back());
  sizes.back() /= 2;
  return sizes;
}

// The tensor itself where its rows are contiguous and one stride says where they are, else a copy.
Tensor in_rows(const Tensor& t) {
  if (t.numel() == 0) return t;
  if (t.size(-1) > 1 && t.stride(-1) != 1) return t.contiguous();
  int64_t expected = -1;
  for (int64_t i = t.dim() - 2; i >= 0; --i) {
    if (t.size(i) == 1) continue;
    if (expected >= 0 && t.stride(i) != expected) return t.contiguous();
    expected = t.stride(i) * t.size(i);
  }
  return t;
}

// From row to row, of a tensor that `in_rows` gave.
int64_t stride_of(const Tensor& t) {
  for (int64_t i = t.dim() - 2; i >= 0; --i)
    if (t.size(i) != 1) return t.stride(i);
  return t.size(-1);
}

Rows rows_of(const Tensor& t) { return {t.const_data_ptr(), stride_of(t)}; }

MutableRows rows_of(Tensor& t) { return {t.mutable_data_ptr(), stride_of(t)}; }

Problem problem_of(const Tensor& gate, const Tensor& up) {
  const int64_t channels = gate.size(-1);
  return {dtype_of(gate), channels ? gate.numel() / channels : 0, channels, rows_of(gate),
          rows_of(up)};
}

// The halves of rows that hold both.
std::tuple<Tensor, Tensor> halves(const Tensor& t) {
  const int64_t half = t.size(-1) / 2;
  return {t.narrow(-1, 0, half), t.narrow(-1, half, half)};
}

Tensor forward_cpu(const Tensor& gate, const Tensor& up) {
  const Tensor g = in_rows(gate), u = in_rows(up);
  Tensor out = empty_tensor(gate.sizes(), gate.options());
  const Problem p = problem_of(g, u);
  const MutableRows to = rows_of(out);
  for_each_unit(Host{}, p, [&](int64_t unit) { kernels().forward(p, to, unit); });
  return out;
}

void backward_cpu(const Tensor& dout, const Tensor& gate, const Tensor& up, Tensor& dgate,
                  Tensor& dup) {
  const Tensor dy = in_rows(dout), g = in_rows(gate), u = in_rows(up);
  const Problem p = problem_of(g, u);
  const Backward b{rows_of(dy), rows_of(dgate), rows_of(dup)};
  for_each_unit(Host{}, p, [&](int64_t unit) { kernels().backward(p, b, unit); });
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  const Check check{"swiglu", "gate", gate};
  check_first(check);
  check_like(check, "up", up, "gate's shape", gate.sizes());
  return forward_cpu(gate, up);
}

Gradients swiglu_backward(const Tensor& dout, const Tensor& gate, const Tensor& up) {
  const Check check{"swiglu_backward", "gate", gate};
  check_first(check);
  check_like(check, "up", up, "gate's shape", gate.sizes());
  check_like(check, "dout", dout, "the output's shape", gate.sizes());
  Tensor dgate = empty_tensor(gate.sizes(), gate.options());
  Tensor dup = empty_tensor(gate.sizes(), gate.options());
  backward_cpu(dout, gate, up, dgate, dup);
  return {dgate, dup};
}

Tensor packed(const Tensor& x) {
  const Check check{"swiglu_packed", "x", x};
  check_first(check);
  half_shape(check);
  const auto [gate, up] = halves(x);
  return forward_cpu(gate, up);
}

Tensor packed_backward(const Tensor& dout, const Tensor& x) {
  const Check check{"swiglu_packed_backward", "x", x};
  check_first(check);
  check_like(check, "dout", dout, "the output's shape", half_shape(check));
  Tensor dx = empty_tensor(x.sizes(), x.options());
  auto [dgate, dup] = halves(dx);
  const auto [gate, up] = halves(x);
  backward_cpu(dout, gate, up, dgate, dup);
  return dx;
}

// Autograd sees operators only, by their names, so that traces hold them whole and fakes stand in
// for them.
struct SwigluFunction : torch::autograd::Function<SwigluFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& gate, const Tensor& up) {
    static const auto op = operator_named<decltype(swiglu)>("fuseport::swiglu");
    const at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({gate, up});
    return op.call(gate, up);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& cotangents) {
    static const auto op = operator_named<decltype(swiglu_backward)>("fuseport::swiglu_backward");
    const variable_list s = ctx->get_saved_variables();
    auto [dgate, dup] = op.call(cotangents[0], s[0], s[1]);
    return {dgate, dup};
  }
};

struct PackedFunction : torch::autograd::Function<PackedFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x) {
    static const auto op = operator_named<decltype(packed)>("fuseport::swiglu_packed");
    const at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({x});
    return op.call(x);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& cotangents) {
    static const auto op =
        operator_named<decltype(packed_backward)>("fuseport::swiglu_packed_backward");
    return {op.call(cotangents[0], ctx->get_saved_variables()[0])};
  }
};

Tensor swiglu_autograd(const Tensor& gate, const Tensor& up) {
  return SwigluFunction::apply(gate, up);
}

Tensor packed_autograd(const Tensor& x) { return PackedFunction::apply(x); }

TORCH_LIBRARY_FRAGMENT(fuseport, m) {
  // Where the fakes come from: torch names this module to whom they are missing.
  m.set_python_module("fuseport.ops.registration");
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor out");
  m.def("swiglu_backward(Tensor dout, Tensor gate, Tensor up) -> (Tensor dgate, Tensor dup)");
  m.def("swiglu_packed(Tensor x) -> Tensor out");
  m.def("swiglu_packed_backward(Tensor dout, Tensor x) -> Tensor dx");
}

TORCH_LIBRARY_IMPL(fuseport, CPU, m) {
  m.impl("swiglu", swiglu);
  m.impl("swiglu_backward", swiglu_backward);
  m.impl("swiglu_packed", packed);
  m.impl("swiglu_packed_backward", packed_backward);
}

TORCH_LIBRARY_IMPL(fuseport, Autograd, m) {
  m.impl("swiglu", swiglu_autograd);
  m.impl("swiglu_packed", packed_autograd);
  // Gradients of gradients: they run as they are, and refuse when they are differentiated.
  m.impl("swiglu_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("swiglu_packed_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace
}  // namespace fuseport::swiglu
