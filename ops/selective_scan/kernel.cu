// The kernels for CUDA, for all dtypes; ops/cuda.py compiles this file with nvcc.
#include "selective_scan/kernel.cuh"

namespace fuseport::selective_scan::cuda {

Plan forward_plan(const Problem& p) { return plan_of<false>(p, multiprocessors()); }

Plan backward_plan(const Problem& p) { return plan_of<true>(p, multiprocessors()); }

int64_t forward_scratch(const Problem& p, const Plan& plan) {
  return ForwardParts(p, plan, nullptr).bytes;
}

int64_t backward_scratch(const Problem& p, const Plan& plan) {
  return BackwardParts(p, plan, nullptr).bytes;
}

const char* forward(const Problem& p, const Plan& plan, const Forward& f, void* scratch,
                    void* stream) {
  return p.dtype == Dtype::float64 ? run_forward<double>(p, plan, f, scratch, stream)
                                   : run_forward<float>(p, plan, f, scratch, stream);
}

const char* backward(const Problem& p, const Plan& plan, const Gradients& k, void* scratch,
                     void* stream) {
  return p.dtype == Dtype::float64 ? run_backward<double>(p, plan, k, scratch, stream)
                                   : run_backward<float>(p, plan, k, scratch, stream);
}

}  // namespace fuseport::selective_scan::cuda
