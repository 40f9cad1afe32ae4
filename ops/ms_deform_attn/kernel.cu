// The kernels for CUDA, for all dtypes; ops/cuda.py compiles this file with nvcc.
#include "ms_deform_attn/kernel.cuh"

#include "ms_deform_attn/cuda_gather.cuh"

namespace fuseport::ms_deform_attn::cuda {

int64_t pairs_at_once(const Problem& p) { return most_pairs(p); }

int64_t most_starts(const Problem& p, const Slice& slice) {
  return slice.pairs * most_cells(p) + 1;
}

const char* forward(const Problem& p, const Forward& f, void* stream) {
  return run_forward(p, f, stream);
}

const char* backward_of_samples(const Problem& p, const Backward& b, void* stream) {
  return run_samples(p, b, stream);
}

const char* find_cells(const Problem& p, const Slice& slice, int32_t* cells, void* stream) {
  return run_cells(p, slice, cells, stream);
}

const char* gather(const Problem& p, const Backward& b, const Slice& slice, const int32_t* cells,
                   const int64_t* samples, int32_t* starts, void* stream) {
  return run_gather(p, b, slice, cells, samples, starts, stream);
}

}  // namespace fuseport::ms_deform_attn::cuda
