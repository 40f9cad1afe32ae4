// What the bindings of SwiGLU to torch share: the operators, over the passes of a device.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <tuple>
#include <vector>

#include "native/checks.hpp"
#include "native/empty.hpp"
#include "native/torch.hpp"
#include "swiglu/kernel.hpp"

namespace fuseport::swiglu {

using Gradients = std::tuple<Tensor, Tensor>;

// The checks of shapes.py, in their order, with their messages.
inline void check_first(const Check& check) {
  const Tensor& t = check.first;
  const char* name = check.first_name;
  check.require(t.dim() >= 1, name, "(..., d)", tuple(t.sizes()));
  const at::ScalarType dtype = t.scalar_type();
  const bool half = dtype == at::kHalf || dtype == at::kBFloat16;
  check.require(half || dtype == at::kFloat || dtype == at::kDouble, name,
                "float16, bfloat16, float32 or float64", name_of(dtype));
}

inline void check_like(const Check& check, const char* name, const Tensor& t, const char* meaning,
                at::IntArrayRef shape) {
  check.like(name, t, check.first.scalar_type());
  check.shape(name, t, meaning, shape);
}

inline std::vector<int64_t> half_shape(const Check& check) {
  std::vector<int64_t> sizes = check.first.sizes().vec();
  check.require(sizes.back() % 2 == 0, check.first_name, "of an even last size", sizes.back());
  sizes.back() /= 2;
  return sizes;
}

// The tensor itself where its rows are contiguous and one stride says where they are, else a copy.
inline Tensor in_rows(const Tensor& t) {
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
inline int64_t stride_of(const Tensor& t) {
  for (int64_t i = t.dim() - 2; i >= 0; --i)
    if (t.size(i) != 1) return t.stride(i);
  return t.size(-1);
}

inline Rows rows_of(const Tensor& t) { return {t.const_data_ptr(), stride_of(t)}; }

inline MutableRows rows_of(Tensor& t) { return {t.mutable_data_ptr(), stride_of(t)}; }

inline Problem problem_of(const Tensor& gate, const Tensor& up) {
  const int64_t channels = gate.size(-1);
  return {dtype_of(gate), channels ? gate.numel() / channels : 0, channels, rows_of(gate),
          rows_of(up)};
}

// The halves of rows that hold both.
inline std::tuple<Tensor, Tensor> halves(const Tensor& t) {
  const int64_t half = t.size(-1) / 2;
  return {t.narrow(-1, 0, half), t.narrow(-1, half, half)};
}

// Passes::forward(op, gate, problem, out) and Passes::backward(op, gate, problem, backward) are of what
// may be empty.
template <class Passes>
struct Operators {
  static Tensor swiglu(const Tensor& gate, const Tensor& up) {
    const Check check{"swiglu", "gate", gate};
    check_first(check);
    check_like(check, "up", up, "gate's shape", gate.sizes());
    return forward(check.op, gate, up);
  }

  static Gradients swiglu_backward(const Tensor& dout, const Tensor& gate, const Tensor& up) {
    const Check check{"swiglu_backward", "gate", gate};
    check_first(check);
    check_like(check, "up", up, "gate's shape", gate.sizes());
    check_like(check, "dout", dout, "the output's shape", gate.sizes());
    Tensor dgate = empty_tensor(gate.sizes(), gate.options());
    Tensor dup = empty_tensor(gate.sizes(), gate.options());
    backward(check.op, dout, gate, up, dgate, dup);
    return {dgate, dup};
  }

  static Tensor packed(const Tensor& x) {
    const Check check{"swiglu_packed", "x", x};
    check_first(check);
    half_shape(check);
    const auto [gate, up] = halves(x);
    return forward(check.op, gate, up);
  }

  static Tensor packed_backward(const Tensor& dout, const Tensor& x) {
    const Check check{"swiglu_packed_backward", "x", x};
    check_first(check);
    check_like(check, "dout", dout, "the output's shape", half_shape(check));
    Tensor dx = empty_tensor(x.sizes(), x.options());
    auto [dgate, dup] = halves(dx);
    const auto [gate, up] = halves(x);
    backward(check.op, dout, gate, up, dgate, dup);
    return dx;
  }

 private:
  static Tensor forward(const char* op, const Tensor& gate, const Tensor& up) {
    const Tensor g = in_rows(gate), u = in_rows(up);
    Tensor out = empty_tensor(gate.sizes(), gate.options());
    Passes::forward(op, gate, problem_of(g, u), rows_of(out));
    return out;
  }

  static void backward(const char* op, const Tensor& dout, const Tensor& gate, const Tensor& up,
                       Tensor& dgate, Tensor& dup) {
    const Tensor dy = in_rows(dout), g = in_rows(gate), u = in_rows(up);
    const Backward b{rows_of(dy), rows_of(dgate), rows_of(dup)};
    Passes::backward(op, gate, problem_of(g, u), b);
  }
};

}  // namespace fuseport::swiglu
