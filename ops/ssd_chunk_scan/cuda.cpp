// The operators of the chunked scan on CUDA: the same schemas as in torch.cpp, another dispatch key.
// Products of matrices are torch's own.
#include <ATen/core/Tensor.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <array>
#include <optional>

#include "native/cuda_torch.hpp"
#include "ssd_chunk_scan/cuda_passes.hpp"
#include "ssd_chunk_scan/discrete.hpp"

namespace fuseport::ssd_chunk_scan {
namespace {

struct Host {
  const char* op;
  const OnDevice& device;
  const Tensor& like;  // on the device, and real

  struct Scratch {
    Tensor held;

    Scratch(const Host& host, int64_t bytes) : held(device_scratch(bytes, host.like)) {}
    void* data() const { return held.mutable_data_ptr(); }
  };

  void* stream() const { return device.stream(); }
  void started(const char* error) const { check_cuda(op, error); }
  void multiply(const Problem&, const cuda::Product& m) const {
    const Tensor a = matrices(m.a, m.batches, m.rows, m.inner, m.a_transposed);
    const Tensor b = matrices(m.b, m.batches, m.inner, m.columns, m.b_transposed);
    Tensor to = matrices(m.to, m.batches, m.rows, m.columns, false);
    if (m.add) to.baddbmm_(a, b);
    else at::bmm_out(to, a, b);
  }

 private:
  // Another name for memory of scratch.
  Tensor matrices(const void* data, int64_t batches, int64_t rows, int64_t columns,
                  bool transposed) const {
    const std::array<int64_t, 3> shape{batches, transposed ? columns : rows,
                                       transposed ? rows : columns};
    const Tensor all = at::for_blob(const_cast<void*>(data), shape)
                           .options(like.options())
                           .target_device(like.device())
                           .make_tensor();
    return transposed ? all.mT() : all;
  }
};

Outputs forward_cuda(const char* op, FUSEPORT_INPUTS, const std::optional<Tensor>& z,
                     FUSEPORT_REST) {
  Check{op, x}.inputs(dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, dt_limit);
  const OnDevice device(x);
  Tensor out = flat(x), final_states = flat(initial_states);
  if (x.numel() == 0) {
    final_states.copy_(initial_states);  // of no steps
    return {out, final_states};
  }
  const Inputs inputs(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, dt_limit, softplus);
  cuda::run_forward(Host{op, device, A}, inputs.problem,
                    Forward{out.mutable_data_ptr(), final_states.mutable_data_ptr()});
  return {out, final_states};
}

// Of x, dt, A, B, C, D, z, dt_bias, initial_states; z's is undefined where there is none.
std::array<Tensor, 9> backward_cuda(const char* op, const Tensor& dout, const Tensor& dfinal,
                                    FUSEPORT_INPUTS, const std::optional<Tensor>& z,
                                    FUSEPORT_REST) {
  const Check check{op, x};
  check.inputs(dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, dt_limit);
  check.backward(dout, dfinal, B);
  const OnDevice device(x);
  Tensor dx = flat(x), ddt = flat(dt), dB = flat(B), dC = flat(C), dz = z ? flat(*z) : Tensor();
  Tensor dinitial = flat(initial_states);
  if (x.numel() == 0) {
    dinitial.copy_(dfinal);
    for (const Tensor& t : {dx, ddt, dB, dC}) t.zero_();
    if (z) dz.zero_();
    return {dx,        ddt, at::zeros_like(A),       dB, dC, at::zeros_like(D),
            dz, at::zeros_like(dt_bias), dinitial};
  }
  const Inputs inputs(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, dt_limit, softplus);
  const Tensor dfinal_states = dfinal.contiguous();
  const Tensor dA = flat(A), dD = flat(D), dbias = flat(dt_bias);
  Backward b;
  b.dout = strided(dout);
  b.dfinal_states = dfinal_states.const_data_ptr();
  b.dx = dx.mutable_data_ptr();
  b.ddt = ddt.mutable_data_ptr();
  if (z) b.dz = dz.mutable_data_ptr();
  b.dinitial_states = dinitial.mutable_data_ptr();
  cuda::run_backward(Host{op, device, A}, inputs.problem, b,
                     Totals{dA.mutable_data_ptr(), dB.mutable_data_ptr(), dC.mutable_data_ptr(),
                            dD.mutable_data_ptr(), dbias.mutable_data_ptr()});
  return {dx, ddt, dA, dB, dC, dD, dz, dbias, dinitial};
}

Outputs discrete(FUSEPORT_DISCRETE) {
  const OnDevice device(x);
  const auto run = [&](const Problem& p, const Forward& to) {
    cuda::run_forward(Host{"ssd_chunk_scan_discrete", device, D}, p, to);
  };
  return discrete_forward(run, x, log_decay, B, C, D, initial_states, seq_idx);
}

DiscreteGradients discrete_gradients(const Tensor& dout, const Tensor& dfinal, FUSEPORT_DISCRETE) {
  const OnDevice device(x);
  const auto run = [&](const Problem& p, const Backward& to, const Totals& totals) {
    cuda::run_backward(Host{"ssd_chunk_scan_discrete_backward", device, D}, p, to, totals);
  };
  return discrete_backward(run, dout, dfinal, x, log_decay, B, C, D, initial_states, seq_idx);
}

Outputs scan(FUSEPORT_INPUTS, FUSEPORT_REST) {
  return forward_cuda("ssd_chunk_scan", x, dt, A, B, C, D, {}, dt_bias, initial_states, seq_idx,
                      dt_limit, softplus);
}

Outputs scan_gated(FUSEPORT_INPUTS, const Tensor& z, FUSEPORT_REST) {
  return forward_cuda("ssd_chunk_scan_gated", x, dt, A, B, C, D, z, dt_bias, initial_states,
                      seq_idx, dt_limit, softplus);
}

Gradients scan_backward(const Tensor& dout, const Tensor& dfinal, FUSEPORT_INPUTS, FUSEPORT_REST) {
  auto g = backward_cuda("ssd_chunk_scan_backward", dout, dfinal, x, dt, A, B, C, D, {}, dt_bias,
                         initial_states, seq_idx, dt_limit, softplus);
  return {g[0], g[1], g[2], g[3], g[4], g[5], g[7], g[8]};
}

GatedGradients scan_gated_backward(const Tensor& dout, const Tensor& dfinal, FUSEPORT_INPUTS,
                                   const Tensor& z, FUSEPORT_REST) {
  auto g = backward_cuda("ssd_chunk_scan_gated_backward", dout, dfinal, x, dt, A, B, C, D, z,
                         dt_bias, initial_states, seq_idx, dt_limit, softplus);
  return {g[0], g[1], g[2], g[3], g[4], g[5], g[6], g[7], g[8]};
}

TORCH_LIBRARY_IMPL(FUSEPORT_CUDA_NAMESPACE, FUSEPORT_CUDA_KEY, m) {
  m.impl("ssd_chunk_scan", scan);
  m.impl("ssd_chunk_scan_gated", scan_gated);
  m.impl("ssd_chunk_scan_backward", scan_backward);
  m.impl("ssd_chunk_scan_gated_backward", scan_gated_backward);
  m.impl("ssd_chunk_scan_discrete", discrete);
  m.impl("ssd_chunk_scan_discrete_backward", discrete_gradients);
}

}  // namespace
}  // namespace fuseport::ssd_chunk_scan
