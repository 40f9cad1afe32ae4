// What the bindings to torch and to ONNX Runtime check of data, before a kernel reads any.
#pragma once

#include <cstdint>
#include <string>

namespace fuseport::ms_deform_attn {

// check_levels of shapes.py, with its messages: kernels read no position that is not there.
struct Levels {
  static constexpr int64_t LIMIT = (int64_t(1) << 31) - 1;
  const int64_t* shapes;
  const int64_t* starts;
  int64_t count, positions;

  bool sizes_fit(int64_t i) const {
    return shapes[2 * i] >= 0 && shapes[2 * i] <= LIMIT && shapes[2 * i + 1] >= 0 &&
           shapes[2 * i + 1] <= LIMIT;
  }
  bool within(int64_t i) const {
    return starts[i] >= 0 && starts[i] <= positions - shapes[2 * i] * shapes[2 * i + 1];
  }

  // require(holds, name, expected, got) throws where something does not hold.
  template <class Require>
  void check(const Require& require) const {
    const auto text = [](int64_t n) { return std::to_string(n); };
    require(positions <= LIMIT, "value", "of at most 2^31 - 1 positions", text(positions));
    for (int64_t i = 0; i < count; ++i) {
      const std::string height = text(shapes[2 * i]), width = text(shapes[2 * i + 1]);
      const std::string level = "[" + text(i) + "]";
      require(sizes_fit(i), "value_spatial_shapes" + level, "of sizes from 0 to 2^31 - 1",
              "(" + height + ", " + width + ")");
      require(within(i), "value_level_start_index" + level,
              "such that " + height + " x " + width + " positions from there are within value's " +
                  text(positions),
              text(starts[i]));
    }
  }
};

}  // namespace fuseport::ms_deform_attn
