// The kernels for CUDA, for all dtypes; ops/cuda.py compiles this file with nvcc.
#include "dplr_delta_rule/cuda_backward.cuh"

namespace fuseport::dplr_delta_rule::cuda {

const char* forward(const Problem& p, const Forward& to, void* stream) {
  return with_dtype(p.dtype, [&](auto stored) {
    Walk walk;
    walk.out = to.out;
    walk.running = to.final_state;
    return run_walk<decltype(stored), false>(p, walk, stream);
  });
}

int64_t backward_scratch(const Problem& p) {
  return p.dtype == Dtype::float64 ? BackwardScratch<double>(p, nullptr).bytes
                                   : BackwardScratch<float>(p, nullptr).bytes;
}

const char* backward(const Problem& p, const Backward& to, void* scratch, void* stream) {
  return with_dtype(p.dtype, [&](auto stored) {
    using Stored = decltype(stored);
    return run_backward<Stored>(p, to, BackwardScratch<Real<Stored>>(p, scratch), stream);
  });
}

}  // namespace fuseport::dplr_delta_rule::cuda
