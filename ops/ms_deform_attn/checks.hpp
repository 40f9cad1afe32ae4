// What the inputs must be: the checks of shapes.py, in their order, with their messages.
#pragma once

#include <string>

#include "ms_deform_attn/levels.hpp"
#include "native/checks.hpp"

namespace fuseport::ms_deform_attn {

using at::Tensor;

struct Check : fuseport::Check {
  const Tensor& value;

  Check(const char* op, const Tensor& value) : fuseport::Check{op, "value", value}, value(value) {}

  void inputs(const Tensor& shapes, const Tensor& starts, const Tensor& locations,
              const Tensor& weights) const {
    require(value.dim() == 4, "value", "(b, s, h, c)", tuple(value.sizes()));
    const at::ScalarType dtype = value.scalar_type();
    require(dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat ||
                dtype == at::kDouble,
            "value", "float16, bfloat16, float32 or float64", name_of(dtype));
    const at::ScalarType wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
    const at::ScalarType own = locations.scalar_type() == wide ? wide : dtype;
    like("sampling_locations", locations, own);
    require(locations.dim() == 6, "sampling_locations", "(b, q, h, L, P, 2)",
            tuple(locations.sizes()));
    const int64_t b = value.size(0), h = value.size(2), q = locations.size(1);
    const int64_t levels = locations.size(3), points = locations.size(4);
    shape("sampling_locations", locations, "(b, q, h, L, P, 2)", {b, q, h, levels, points, 2});
    like("attention_weights", weights, own);
    shape("attention_weights", weights, "(b, q, h, L, P)", {b, q, h, levels, points});
    like("value_spatial_shapes", shapes, at::kLong);
    shape("value_spatial_shapes", shapes, "(L, 2)", {levels, 2});
    like("value_level_start_index", starts, at::kLong);
    shape("value_level_start_index", starts, "(L,)", {levels});
  }

  void cotangent(const Tensor& dout, const Tensor& locations) const {
    like("dout", dout, value.scalar_type());
    shape("dout", dout, "(b, q, h*c)",
          {value.size(0), locations.size(1), value.size(2) * value.size(3)});
  }

  // Of contiguous tensors.
  void levels(const Tensor& shapes, const Tensor& starts) const {
    const Levels levels{shapes.const_data_ptr<int64_t>(), starts.const_data_ptr<int64_t>(),
                        starts.size(0), value.size(1)};
    levels.check([&](bool holds, const std::string& name, const std::string& expected,
                     const std::string& got) { require(holds, name.c_str(), expected, got); });
  }
};

}  // namespace fuseport::ms_deform_attn
