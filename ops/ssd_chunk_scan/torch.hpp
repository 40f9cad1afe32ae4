// Inputs of torch as the kernels' problem: what the bindings for the CPU and for CUDA share.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "native/empty.hpp"
#include "native/strided_torch.hpp"
#include "native/torch.hpp"
#include "ssd_chunk_scan/kernel.hpp"

namespace fuseport::ssd_chunk_scan {

using at::Tensor;

#define FUSEPORT_INPUTS \
  const Tensor &x, const Tensor &dt, const Tensor &A, const Tensor &B, const Tensor &C, const Tensor &D
#define FUSEPORT_REST                                                         \
  const Tensor &dt_bias, const Tensor &initial_states, const Tensor &seq_idx, \
      const Tensor &dt_limit, bool softplus

using Outputs = std::tuple<Tensor, Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using GatedGradients =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

#define FUSEPORT_DISCRETE                                                                       \
  const Tensor &x, const Tensor &log_decay, const Tensor &B, const Tensor &C, const Tensor &D, \
      const Tensor &initial_states, const Tensor &seq_idx

using DiscreteGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// Inputs that passed the checks. It holds tensors, since some are made contiguous.
struct Inputs {
  Tensor A, D, dt_bias, initial_states, seq_idx, dt_limit;
  Problem problem;

  Inputs(const Tensor& x, const Tensor& dt, const Tensor& A_, const Tensor& B, const Tensor& C,
         const Tensor& D_, const std::optional<Tensor>& z, const Tensor& dt_bias_,
         const Tensor& initial, const Tensor& seq_idx_, const Tensor& limit, bool softplus)
      : Inputs(x, B, C, D_, initial, seq_idx_) {
    A = A_.contiguous();
    dt_bias = dt_bias_.contiguous();
    dt_limit = limit.contiguous();
    Problem& p = problem;
    p.softplus = softplus;
    p.dt = strided(dt);
    if (z) p.z = strided(*z);
    p.A = A.const_data_ptr();
    p.dt_bias = dt_bias.const_data_ptr();
    p.dt_limit = dt_limit.const_data_ptr();
  }

  Inputs(FUSEPORT_DISCRETE) : Inputs(x, B, C, D, initial_states, seq_idx) {
    problem.log_decay = strided(log_decay);
  }

 private:
  Inputs(const Tensor& x, const Tensor& B, const Tensor& C, const Tensor& D_, const Tensor& initial,
         const Tensor& seq_idx_)
      : D(D_.contiguous()),
        initial_states(initial.contiguous()),
        seq_idx(seq_idx_.contiguous()) {
    Problem& p = problem;
    p.dtype = dtype_of(x);
    p.batches = x.size(0);
    p.length = x.size(1);
    p.heads = x.size(2);
    p.width = x.size(3);
    p.groups = B.size(2);
    p.states = B.size(3);
    p.x = strided(x);
    p.B = strided(B);
    p.C = strided(C);
    p.D = D.const_data_ptr();
    p.initial_states = initial_states.const_data_ptr();
    p.seq_idx = seq_idx.const_data_ptr<int32_t>();
  }
};

inline Tensor flat(const Tensor& t) { return empty_tensor(t.sizes(), t.options()); }

}  // namespace fuseport::ssd_chunk_scan
