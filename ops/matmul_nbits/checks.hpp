// What the inputs must be: the checks of shapes.py, in their order, with their messages.
#pragma once

#include "native/stored_torch.hpp"

namespace fuseport::matmul_nbits {

using at::Tensor;

struct Check : stored::Check {
  using stored::Check::Check;

  void inputs(const Tensor& packed, const Tensor& scales, const Tensor& zero_points,
              const Tensor& bias, int64_t in_features, int64_t bits, int64_t group_size) const {
    stored::Check::inputs(bias, in_features);
    weight(packed, scales, zero_points, bias.size(0), in_features, bits, group_size);
  }

  void cotangent(const Tensor& packed, const Tensor& scales, const Tensor& zero_points,
                 int64_t in_features, int64_t bits, int64_t group_size) const {
    rows("(..., out_features)");
    weight(packed, scales, zero_points, first.size(-1), in_features, bits, group_size);
  }

 private:
  void weight(const Tensor& packed, const Tensor& scales, const Tensor& zero_points,
              int64_t out_features, int64_t in_features, int64_t bits, int64_t group_size) const {
    require(bits == 2 || bits == 4 || bits == 8, "bits", "2, 4 or 8", bits);
    const bool whole = group_size >= 16 && group_size % 16 == 0;
    require(whole, "group_size", "a multiple of 16", group_size);
    require(in_features >= 0, "in_features", "not negative", in_features);
    const int64_t groups = (in_features + group_size - 1) / group_size;
    like("packed", packed, at::kByte);
    shape("packed", packed, "(out_features, groups, group_size*bits/8)",
          {out_features, groups, group_size / 8 * bits});
    like("scales", scales, wide());
    shape("scales", scales, "(out_features, groups)", {out_features, groups});
    like("zero_points", zero_points, at::kByte);
    shape("zero_points", zero_points, "(out_features, groups*bits/8)",
          {out_features, (groups * bits + 7) / 8});
  }
};

}  // namespace fuseport::matmul_nbits
