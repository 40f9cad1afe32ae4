// What the bindings of the rotary embedding to torch share: the operators, over the passes of a device.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <tuple>

#include "native/checks.hpp"
#include "native/empty.hpp"
#include "native/torch.hpp"
#include "rotary_embedding/kernel.hpp"

namespace fuseport::rotary_embedding {

using Gradients = std::tuple<Tensor, Tensor, Tensor>;

inline bool half(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

// The checks of shapes.py, in their order, with their messages.
inline void check_inputs(const Check& check, const Tensor& x, const Tensor& cos,
                         const Tensor& sin) {
  check.require(x.dim() == 4, "x", "(b, h, l, p)", tuple(x.sizes()));
  const at::ScalarType dtype = x.scalar_type();
  check.require(half(dtype) || dtype == at::kFloat || dtype == at::kDouble, "x",
                "float16, bfloat16, float32 or float64", name_of(dtype));
  const bool wide = half(dtype) && cos.scalar_type() == at::kFloat;
  check.like("cos", cos, wide ? at::kFloat : dtype);
  check.require(cos.dim() == 2 || cos.dim() == 3, "cos", "(l, r/2) or (b, l, r/2)",
                tuple(cos.sizes()));
  const int64_t pairs = cos.size(-1);
  if (cos.dim() == 2) {
    check.shape("cos", cos, "(l, r/2)", {x.size(2), pairs});
  } else {
    check.shape("cos", cos, "(b, l, r/2)", {x.size(0), x.size(2), pairs});
  }
  check.require(2 * pairs <= x.size(3), "cos", "of r/2 <= " + std::to_string(x.size(3)) + "/2",
                pairs);
  check.like("sin", sin, cos.scalar_type());
  check.shape("sin", sin, "cos's shape", cos.sizes());
}

inline void check_cotangent(const Check& check, const Tensor& dout, const Tensor& x) {
  check.like("dout", dout, x.scalar_type());
  check.shape("dout", dout, "x's shape", x.sizes());
}

// The tensor itself where its last dimension is contiguous, else a copy.
inline Tensor in_rows(const Tensor& t) {
  return t.size(-1) > 1 && t.stride(-1) != 1 ? t.contiguous() : t;
}

inline Heads heads_of(const Tensor& t) {
  return {t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

inline Table table_of(const Tensor& t) {
  return {t.const_data_ptr(), t.dim() == 3 ? t.stride(0) : 0, t.stride(-2)};
}

// Of tensors that `in_rows` gave.
inline Problem problem_of(const Tensor& x, const Tensor& cos, const Tensor& sin,
                          bool interleaved) {
  Problem p;
  p.dtype = dtype_of(x);
  p.wide_angles = cos.scalar_type() != x.scalar_type();
  p.interleaved = interleaved;
  p.of_batch = cos.dim() == 3;
  p.batch = x.size(0), p.heads = x.size(1), p.length = x.size(2), p.channels = x.size(3);
  p.pairs = cos.size(-1);
  p.x = heads_of(x), p.cos = table_of(cos), p.sin = table_of(sin);
  return p;
}

// Passes::forward(op, x, problem, out) and Passes::backward(op, x, problem, backward) are of what may
// be empty.
template <class Passes>
struct Operators {
  static Tensor forward(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved) {
    const Check check{"rotary_embedding", "x", x};
    check_inputs(check, x, cos, sin);
    const Tensor rows = in_rows(x), c = in_rows(cos), s = in_rows(sin);
    Tensor out = empty_tensor(x.sizes(), x.options());
    Passes::forward(check.op, x, problem_of(rows, c, s, interleaved), out.mutable_data_ptr());
    return out;
  }

  static Gradients backward(const Tensor& dout, const Tensor& x, const Tensor& cos,
                            const Tensor& sin, bool interleaved) {
    const Check check{"rotary_embedding_backward", "x", x};
    check_inputs(check, x, cos, sin);
    check_cotangent(check, dout, x);
    const Tensor rows = in_rows(x), c = in_rows(cos), s = in_rows(sin), dy = in_rows(dout);
    Tensor dx = empty_tensor(x.sizes(), x.options());
    Tensor dcos = empty_tensor(cos.sizes(), cos.options());
    Tensor dsin = empty_tensor(sin.sizes(), sin.options());
    const Backward g{heads_of(dy), dx.mutable_data_ptr(), dcos.mutable_data_ptr(),
                     dsin.mutable_data_ptr()};
    Passes::backward(check.op, x, problem_of(rows, c, s, interleaved), g);
    return {dx, dcos, dsin};
  }
};

}  // namespace fuseport::rotary_embedding
