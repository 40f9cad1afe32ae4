// The kernels for CUDA, for all dtypes; ops/cuda.py compiles this file with nvcc.
#include "ms_deform_attn/kernel.cuh"

#include "ms_deform_attn/cuda_gather.cuh"

namespace fuseport::ms_deform_attn::cuda {

int64_t pairs_at_once(const Problem& p) { return most_pairs(p); }

const char* backward_scratch(const Problem& p, int64_t pairs_at_once, int64_t* bytes) {
  *bytes = 0;
  if (nothing_to_sort(p)) return nullptr;
  const Cells cells = cells_of(p, pairs_at_once);
  *bytes = cells.bytes();
  return cells.error;
}

const char* forward(const Problem& p, const Forward& f, void* stream) {
  return run_forward(p, f, stream);
}

const char* backward(const Problem& p, const Backward& b, int64_t pairs_at_once, void* scratch,
                     void* stream) {
  const char* error = run_samples(p, b, stream);
  return error ? error : run_gather(p, b, pairs_at_once, scratch, stream);
}

}  // namespace fuseport::ms_deform_attn::cuda
