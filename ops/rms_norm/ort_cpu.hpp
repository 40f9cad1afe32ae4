// Norms as custom ops of ONNX Runtime, on the CPU: what the ort.cpp of both ops is written with.
#pragma once

#include "rms_norm/binding.hpp"
#include "rms_norm/ort.hpp"

namespace fuseport::rms_norm {

// KERNELS is the op's function kernels().
template <auto KERNELS>
struct PassesOnCpu {
  using Context = ort::Context;

  template <Dtype DTYPE>
  static void forward(const Context& context, const Problem& p, void* out) {
    const auto rstd = context.allocate<Real<DTYPE>>({p.rows, p.groups()});
    const Forward forward{out, rstd.data()};
    const Kernels& k = KERNELS();
    for_each_unit(context, k, p,
                  [&](int64_t unit, void* scratch) { k.forward(p, forward, unit, scratch); });
  }

  template <Dtype DTYPE>
  static void backward(const Context& context, const NodeInputs& inputs, const NodeGradients& g) {
    const Problem& p = inputs.problem;
    const auto rstd = context.allocate<Real<DTYPE>>({p.rows, p.groups()});
    const auto parts = context.allocate<double>({p.units(), p.channels});
    // The node has no rstd to start from: each unit computes its own again.
    const Forward again{nullptr, rstd.data()};
    const Backward backward{inputs.rows(g.dout), rstd.data(), g.dx, g.dz, parts.data()};
    const Kernels& k = KERNELS();
    for_each_unit(context, k, p, [&](int64_t unit, void* scratch) {
      k.forward(p, again, unit, scratch);
      k.backward(p, backward, unit, scratch);
    });
    sum_weight_gradient(context, k, p, {parts.data(), g.dweight});
  }
};

}  // namespace fuseport::rms_norm
