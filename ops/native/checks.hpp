// What the bindings to torch check of their inputs.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <sstream>
#include <string>

namespace fuseport {

using at::Tensor;

// A shape as Python prints a tuple.
inline std::string tuple(at::IntArrayRef shape) {
  std::ostringstream text;
  text << '(';
  for (size_t i = 0; i < shape.size(); ++i) text << (i ? ", " : "") << shape[i];
  text << (shape.size() == 1 ? ",)" : ")");
  return text.str();
}

inline std::string name_of(at::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

// The checks of ops/checks.py, with their messages. Device and names are held against those of the
// first input.
struct Check {
  const char* op;
  const char* first_name;
  const Tensor& first;

  template <class Got>
  void require(bool holds, const char* name, const std::string& expected, const Got& got) const {
    TORCH_CHECK_VALUE(holds, "fuseport::", op, ": ", name, " must be ", expected, "; got ", got);
  }

  void shape(const char* name, const Tensor& t, const char* meaning,
             at::IntArrayRef expected) const {
    require(t.sizes() == expected, name, std::string(meaning) + " = " + tuple(expected),
            tuple(t.sizes()));
  }

  void like(const char* name, const Tensor& t, at::ScalarType dtype) const {
    require(t.scalar_type() == dtype, name, name_of(dtype), name_of(t.scalar_type()));
    require(t.device() == first.device(), name,
            "on " + first.device().str() + ", like " + first_name, t.device());
  }
};

}  // namespace fuseport
