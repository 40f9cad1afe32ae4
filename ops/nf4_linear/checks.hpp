// What the inputs must be: the checks of shapes.py, in their order, with their messages.
#pragma once

#include <vector>

#include "native/checks.hpp"

namespace fuseport::nf4_linear {

using at::Tensor;

struct Check : fuseport::Check {
  Check(const char* op, const char* first_name, const Tensor& first)
      : fuseport::Check{op, first_name, first} {}

  void inputs(const Tensor& packed, const Tensor& absmax, const Tensor& bias, int64_t in_features,
              int64_t block_size, int64_t quant_type) const {
    rows("(..., in_features)");
    std::vector<int64_t> sizes = first.sizes().vec();
    sizes.back() = in_features;
    require(first.sizes() == at::IntArrayRef(sizes), "x", "(..., in_features) = " + tuple(sizes),
            tuple(first.sizes()));
    like("bias", bias, first.scalar_type());
    require(bias.dim() == 1, "bias", "(out_features,)", tuple(bias.sizes()));
    weight(packed, absmax, bias.size(0), in_features, block_size, quant_type);
  }

  void cotangent(const Tensor& packed, const Tensor& absmax, int64_t in_features,
                 int64_t block_size, int64_t quant_type) const {
    rows("(..., out_features)");
    weight(packed, absmax, first.size(-1), in_features, block_size, quant_type);
  }

 private:
  void rows(const char* meaning) const {
    require(first.dim() >= 1, first_name, meaning, tuple(first.sizes()));
    const at::ScalarType dtype = first.scalar_type();
    const bool known = dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat ||
                       dtype == at::kDouble;
    require(known, first_name, "float16, bfloat16, float32 or float64", name_of(dtype));
  }

  void weight(const Tensor& packed, const Tensor& absmax, int64_t out_features,
              int64_t in_features, int64_t block_size, int64_t quant_type) const {
    const bool power = block_size >= 16 && (block_size & (block_size - 1)) == 0;
    require(power, "block_size", "a power of two from 16 up", block_size);
    require(quant_type == 0 || quant_type == 1, "quant_type", "0 (FP4) or 1 (NF4)", quant_type);
    require(in_features >= 0, "in_features", "not negative", in_features);
    const int64_t values = out_features * in_features;
    like("packed", packed, at::kByte);
    shape("packed", packed, "(out_features*in_features/2,)", {(values + 1) / 2});
    like("absmax", absmax, first.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
    shape("absmax", absmax, "(out_features*in_features/block_size,)",
          {(values + block_size - 1) / block_size});
  }
};

}  // namespace fuseport::nf4_linear
