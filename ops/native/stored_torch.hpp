// What the bindings to torch of ops whose weight is stored do alike, on the CPU and on CUDA.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>
#include <vector>

#include "native/checks.hpp"
#include "native/empty.hpp"
#include "native/stored_weight.hpp"
#include "native/torch.hpp"

namespace fuseport::stored {

using at::Tensor;

// The checks of x, of bias and of a cotangent, which such ops have alike.
struct Check : fuseport::Check {
  Check(const char* op, const char* first_name, const Tensor& first)
      : fuseport::Check{op, first_name, first} {}

  void rows(const char* meaning) const {
    require(first.dim() >= 1, first_name, meaning, tuple(first.sizes()));
    const at::ScalarType dtype = first.scalar_type();
    const bool known = dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat ||
                       dtype == at::kDouble;
    require(known, first_name, "float16, bfloat16, float32 or float64", name_of(dtype));
  }

  void inputs(const Tensor& bias, int64_t in_features) const {
    rows("(..., in_features)");
    std::vector<int64_t> sizes = first.sizes().vec();
    sizes.back() = in_features;
    require(first.sizes() == at::IntArrayRef(sizes), "x", "(..., in_features) = " + tuple(sizes),
            tuple(first.sizes()));
    like("bias", bias, first.scalar_type());
    require(bias.dim() == 1, "bias", "(out_features,)", tuple(bias.sizes()));
  }

  // The dtype of scales.
  at::ScalarType wide() const {
    return first.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  }
};

// The first input of an op, which passed the checks, as rows. It holds a tensor, since that may be a
// copy.
struct FirstInput {
  Tensor flat;
  Rows rows;

  // Sets the sizes of a problem, too.
  FirstInput(const Tensor& first, int64_t in_features, int64_t out_features, Sizes& p) {
    p.dtype = dtype_of(first);
    p.rows = 1;
    for (int64_t i = 0; i < first.dim() - 1; ++i) p.rows *= first.size(i);
    p.in = in_features;
    p.out = out_features;
    flat = first.reshape({p.rows, first.size(-1)});
    rows = {flat.const_data_ptr(), flat.stride(0), flat.stride(1)};
  }
};

// Of `t`'s leading sizes, and so many columns.
inline Tensor empty_rows(const Tensor& t, int64_t columns) {
  std::vector<int64_t> sizes = t.sizes().vec();
  sizes.back() = columns;
  return empty_tensor(sizes, t.options());
}

// The layer, by an op's kernels for the CPU.
template <class Problem>
Tensor linear(const Kernels<Problem>& k, const Problem& p, const Rows& rows, const Tensor& x,
              const Tensor& bias) {
  const Tensor addend = bias.contiguous();
  Tensor out = empty_rows(x, p.out);
  run(Host{}, k, p, Forward{rows, addend.const_data_ptr(), out.mutable_data_ptr()});
  return out;
}

// Its dx and dbias.
template <class Problem>
std::tuple<Tensor, Tensor> linear_backward(const Kernels<Problem>& k, const Problem& p,
                                           const Rows& rows, const Tensor& dout) {
  Tensor dx = empty_rows(dout, p.in), dbias = empty_tensor({p.out}, dout.options());
  run(Host{}, k, p, Backward{rows, dx.mutable_data_ptr(), dbias.mutable_data_ptr()});
  return {dx, dbias};
}

}  // namespace fuseport::stored
