// What the nodes of delta rules share in ONNX Runtime, on the CPU and on CUDA.
#pragma once

#include <cmath>

#include "native/ort.hpp"
#include "native/strided.hpp"

namespace fuseport::ort {

constexpr size_t stored_bytes(Dtype dtype) {
  return dtype == Dtype::float64 ? 8 : dtype == Dtype::float32 ? 4 : 2;
}

// scale_mantissa·2^scale_exponent, the node's first two attributes; 2^1024 stands for Inf.
inline double scale_of(const Call& call) {
  const int64_t mantissa = call.attributes[0], exponent = call.attributes[1];
  const bool finite = exponent >= -1200 && exponent <= 971;
  call.require(finite || exponent == 1024, "scale_exponent", "in -1200 to 971, or 1024", exponent);
  return finite ? std::ldexp(static_cast<double>(mantissa), static_cast<int>(exponent))
                : static_cast<double>(mantissa) * INFINITY;
}

// (b, l, heads, columns), contiguous.
inline Strided sequence(const Tensor& t) {
  const int64_t l = t.shape[1], heads = t.shape[2], columns = t.shape[3];
  return {t.data, l * heads * columns, heads * columns, columns, 1};
}

}  // namespace fuseport::ort
