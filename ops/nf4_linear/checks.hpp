// What the inputs must be: the checks of shapes.py, in their order, with their messages.
#pragma once

#include "native/stored_torch.hpp"

namespace fuseport::nf4_linear {

using at::Tensor;

struct Check : stored::Check {
  using stored::Check::Check;

  void inputs(const Tensor& packed, const Tensor& absmax, const Tensor& bias, int64_t in_features,
              int64_t block_size, int64_t quant_type) const {
    stored::Check::inputs(bias, in_features);
    weight(packed, absmax, bias.size(0), in_features, block_size, quant_type);
  }

  void cotangent(const Tensor& packed, const Tensor& absmax, int64_t in_features,
                 int64_t block_size, int64_t quant_type) const {
    rows("(..., out_features)");
    weight(packed, absmax, first.size(-1), in_features, block_size, quant_type);
  }

 private:
  void weight(const Tensor& packed, const Tensor& absmax, int64_t out_features,
              int64_t in_features, int64_t block_size, int64_t quant_type) const {
    const bool power = block_size >= 16 && (block_size & (block_size - 1)) == 0;
    require(power, "block_size", "a power of two from 16 up", block_size);
    require(quant_type == 0 || quant_type == 1, "quant_type", "0 (FP4) or 1 (NF4)", quant_type);
    require(in_features >= 0, "in_features", "not negative", in_features);
    const int64_t values = out_features * in_features;
    like("packed", packed, at::kByte);
    shape("packed", packed, "(out_features*in_features/2,)", {(values + 1) / 2});
    like("absmax", absmax, wide());
    shape("absmax", absmax, "(out_features*in_features/block_size,)",
          {(values + block_size - 1) / block_size});
  }
};

}  // namespace fuseport::nf4_linear
