// What ort_cuda.hpp has of CUDA itself; ops/ort.py compiles this file with nvcc.
#include "native/cuda.cuh"

namespace fuseport::cuda {

const char* clear(void* data, int64_t bytes, void* stream) {
  return set_to_zero(data, bytes, stream);
}

const char* copy(const void* from, void* to, int64_t bytes, void* stream) {
  return copied(from, to, bytes, stream);
}

}  // namespace fuseport::cuda
