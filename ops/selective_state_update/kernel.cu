// The kernel for CUDA, for all dtypes; ops/cuda.py compiles this file with nvcc.
#include "selective_state_update/kernel.cuh"

namespace fuseport::selective_state_update::cuda {

const char* update(const Problem& p, void* stream) {
  if (p.batches * p.heads * p.channels == 0) return nullptr;
  return with_dtype(p.dtype, [&](auto stored) {
    using Stored = decltype(stored);
    return p.wide_state ? run<Stored, Real<Stored>>(p, stream) : run<Stored, Stored>(p, stream);
  });
}

}  // namespace fuseport::selective_state_update::cuda
