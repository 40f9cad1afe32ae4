// What the bindings of all ops to torch are written with.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "native/dtype.hpp"
#include "native/empty.hpp"
#include "native/parallel.hpp"

namespace fuseport {

// Torch's threads and memory, for `for_each_unit`.
struct Host {
  struct Memory {
    at::Tensor buffer;
    char* data() const { return static_cast<char*>(buffer.mutable_data_ptr()); }
  };

  Memory scratch(int64_t bytes) const { return {empty_tensor({bytes}, at::kByte)}; }
  int64_t threads_for(int64_t units, int64_t steps) const {
    return fuseport::threads_for(units, steps);
  }
  template <class Work>
  void parallel(int64_t units, int64_t threads, const Work& work) const {
    fuseport::parallel(units, threads, work);
  }
};

// Of a tensor that passed the checks.
inline Dtype dtype_of(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kHalf:
      return Dtype::float16;
    case at::kBFloat16:
      return Dtype::bfloat16;
    case at::kDouble:
      return Dtype::float64;
    default:
      return Dtype::float32;
  }
}

}  // namespace fuseport
