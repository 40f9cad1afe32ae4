// Norms as custom ops of ONNX Runtime's CUDA provider: what the ort_cuda.cpp of both ops is written
// with.
#pragma once

#include "native/ort_cuda.hpp"
#include "rms_norm/cuda.hpp"
#include "rms_norm/ort.hpp"

namespace fuseport::rms_norm {

// KERNELS is the op's function cuda::kernels().
template <auto KERNELS>
struct PassesOnCuda {
  using Context = ort::CudaContext;

  template <Dtype DTYPE>
  static void forward(const Context& context, const Problem& p, void* out) {
    const auto rstd = context.allocate<Real<DTYPE>>({p.rows, p.groups()});
    start_forward(context, p, Forward{out, rstd.data()});
  }

  template <Dtype DTYPE>
  static void backward(const Context& context, const NodeInputs& inputs, const NodeGradients& g) {
    const Problem& p = inputs.problem;
    const auto rstd = context.allocate<Real<DTYPE>>({p.rows, p.groups()});
    // The node has no rstd to start from: it is computed again, and the output with it, which goes
    // where dx will be.
    start_forward(context, p, Forward{g.dx, rstd.data()});

    const cuda::Kernels& k = KERNELS();
    const cuda::Gradients backward{inputs.rows(g.dout), rstd.data(), g.dx, g.dz, g.dweight};
    const cuda::Plan plan = k.backward_plan(p, backward);
    const auto scratch = context.scratch(k.backward_scratch(p, plan));
    context.started(k.backward(p, plan, backward, scratch.data(), context.stream()));
  }

 private:
  static void start_forward(const Context& context, const Problem& p, const Forward& forward) {
    const cuda::Kernels& k = KERNELS();
    context.started(k.forward(p, k.forward_plan(p), forward, context.stream()));
  }
};

}  // namespace fuseport::rms_norm
