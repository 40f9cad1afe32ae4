// The kernels for CUDA, for all dtypes; ops/cuda.py compiles this file with nvcc.
#include "causal_conv1d/kernel.cuh"

namespace fuseport::causal_conv1d::cuda {

Plan forward_plan(const Problem& p, const Forward& f) {
  Plan plan;
  with_dtype(p.dtype, [&](auto stored) -> const char* {
    plan = plan_of<decltype(stored)>(p, p.x, read_only(f.out));
    return nullptr;
  });
  return plan;
}

Plan backward_plan(const Problem& p, const Gradients& k) {
  Plan plan;
  with_dtype(p.dtype, [&](auto stored) -> const char* {
    plan = plan_of<decltype(stored)>(p, p.x, k.dout, read_only(k.dx));
    return nullptr;
  });
  return plan;
}

int64_t backward_scratch(const Problem& p, const Plan& plan) {
  const int64_t real = p.dtype == Dtype::float64 ? 8 : 4;
  return real * p.channels * (plan.plain ? p.batches * p.length : plan.parts * SUMS);
}

const char* forward(const Problem& p, const Plan& plan, const Forward& f, void* stream) {
  return with_dtype(p.dtype, [&](auto stored) {
    return run_forward<decltype(stored)>(p, plan, f, stream);
  });
}

const char* backward(const Problem& p, const Plan& plan, const Gradients& k, void* scratch,
                     void* stream) {
  return with_dtype(p.dtype, [&](auto stored) {
    return run_backward<decltype(stored)>(p, plan, k, scratch, stream);
  });
}

}  // namespace fuseport::causal_conv1d::cuda
