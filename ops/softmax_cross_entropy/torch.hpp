// What the bindings of the loss to torch share: the operators, over the passes of a device.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <tuple>

#include "native/checks.hpp"
#include "native/empty.hpp"
#include "native/torch.hpp"
#include "softmax_cross_entropy/kernel.hpp"

namespace fuseport::softmax_cross_entropy {

using Losses = std::tuple<Tensor, Tensor, Tensor>;

inline at::ScalarType wide(const Tensor& logits) {
  return logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// The checks of shapes.py, in their order, with their messages.
inline void check_inputs(const Check& check, const Tensor& logits, const Tensor& targets,
                         double label_smoothing) {
  check.require(logits.dim() == 2, "logits", "(n, V)", tuple(logits.sizes()));
  const at::ScalarType dtype = logits.scalar_type();
  check.require(dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat ||
                    dtype == at::kDouble,
                "logits", "float16, bfloat16, float32 or float64", name_of(dtype));
  check.require(logits.size(1) >= 1, "logits", "of one class or more", tuple(logits.sizes()));
  check.like("targets", targets, at::kLong);
  check.shape("targets", targets, "(n,)", {logits.size(0)});
  check.require(label_smoothing >= 0 && label_smoothing <= 1, "label_smoothing", "in 0 to 1",
                label_smoothing);
}

inline void check_saved(const Check& check, const Tensor& logits, const char* name,
                        const Tensor& t) {
  check.like(name, t, wide(logits));
  check.shape(name, t, "(n,)", {logits.size(0)});
}

// Of contiguous targets, and of logits that `in_rows` gave.
inline Problem problem_of(const Tensor& logits, const Tensor& targets, int64_t ignore_index,
                          double label_smoothing) {
  return {dtype_of(logits),   logits.size(0),
          logits.size(1),     logits.const_data_ptr(),
          logits.stride(0),   static_cast<const int64_t*>(targets.const_data_ptr()),
          ignore_index,       label_smoothing};
}

// The tensor itself where classes are contiguous, else a copy.
inline Tensor in_rows(const Tensor& t) {
  return t.size(1) > 1 && t.stride(1) != 1 ? t.contiguous() : t;
}

// Passes::check(check, problem) is of targets, as far as a device's are known; Passes::forward(op,
// logits, problem, forward) and Passes::backward(op, logits, problem, backward) are of what may be
// empty.
template <class Passes>
struct Operators {
  static Losses forward(const Tensor& logits, const Tensor& targets, int64_t ignore_index,
                        double label_smoothing) {
    const Check check{"softmax_cross_entropy", "logits", logits};
    check_inputs(check, logits, targets, label_smoothing);
    const Tensor rows = in_rows(logits), chosen = targets.contiguous();
    const Problem p = problem_of(rows, chosen, ignore_index, label_smoothing);
    Passes::check(check, p);
    const auto empty = [&] {
      return empty_tensor({logits.size(0)}, logits.options().dtype(wide(logits)));
    };
    Tensor losses = empty(), largest = empty(), total = empty();
    const Forward f{losses.mutable_data_ptr(), largest.mutable_data_ptr(),
                    total.mutable_data_ptr()};
    Passes::forward(check.op, logits, p, f);
    return {losses, largest, total};
  }

  static Tensor backward(const Tensor& dlosses, const Tensor& logits, const Tensor& targets,
                         const Tensor& largest, const Tensor& total, int64_t ignore_index,
                         double label_smoothing) {
    const Check check{"softmax_cross_entropy_backward", "logits", logits};
    check_inputs(check, logits, targets, label_smoothing);
    check_saved(check, logits, "dlosses", dlosses);
    check_saved(check, logits, "largest", largest);
    check_saved(check, logits, "total", total);
    const Tensor rows = in_rows(logits), chosen = targets.contiguous();
    const Problem p = problem_of(rows, chosen, ignore_index, label_smoothing);
    Passes::check(check, p);
    const Tensor dy = dlosses.contiguous(), m = largest.contiguous(), sum = total.contiguous();
    Tensor dlogits = empty_tensor(logits.sizes(), logits.options());
    const Backward b{dy.const_data_ptr(), m.const_data_ptr(), sum.const_data_ptr(),
                     dlogits.mutable_data_ptr()};
    Passes::backward(check.op, logits, p, b);
    return dlogits;
  }
};

}  // namespace fuseport::softmax_cross_entropy
