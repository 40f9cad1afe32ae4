// The operators of given decays, as the bindings to torch have them on the CPU and on CUDA.
#pragma once

#include "ssd_chunk_scan/checks.hpp"
#include "ssd_chunk_scan/torch.hpp"

namespace fuseport::ssd_chunk_scan {

// run(problem, forward), of a problem that is not empty.
template <class Run>
Outputs discrete_forward(const Run& run, FUSEPORT_DISCRETE) {
  Check{"ssd_chunk_scan_discrete", x}.discrete(log_decay, B, C, D, initial_states, seq_idx);
  Tensor out = flat(x), final_states = flat(initial_states);
  if (x.numel() == 0) {
    final_states.copy_(initial_states);  // of no steps
    return {out, final_states};
  }
  const Inputs inputs(x, log_decay, B, C, D, initial_states, seq_idx);
  run(inputs.problem, Forward{out.mutable_data_ptr(), final_states.mutable_data_ptr()});
  return {out, final_states};
}

// run(problem, backward, totals), of a problem that is not empty.
template <class Run>
DiscreteGradients discrete_backward(const Run& run, const Tensor& dout, const Tensor& dfinal,
                                    FUSEPORT_DISCRETE) {
  const Check check{"ssd_chunk_scan_discrete_backward", x};
  check.discrete(log_decay, B, C, D, initial_states, seq_idx);
  check.backward(dout, dfinal, B);
  Tensor dx = flat(x), ddecay = flat(log_decay), dB = flat(B), dC = flat(C), dD = flat(D);
  Tensor dinitial = flat(initial_states);
  if (x.numel() == 0) {
    for (Tensor* t : {&dx, &ddecay, &dB, &dC, &dD}) t->zero_();
    dinitial.copy_(dfinal);
    return {dx, ddecay, dB, dC, dD, dinitial};
  }
  const Inputs inputs(x, log_decay, B, C, D, initial_states, seq_idx);
  const Tensor dfinal_states = dfinal.contiguous();
  Backward backward;
  backward.dout = strided(dout);
  backward.dfinal_states = dfinal_states.const_data_ptr();
  backward.dx = dx.mutable_data_ptr();
  backward.dlog_decay = ddecay.mutable_data_ptr();
  backward.dinitial_states = dinitial.mutable_data_ptr();
  Totals totals;
  totals.dB = dB.mutable_data_ptr();
  totals.dC = dC.mutable_data_ptr();
  totals.dD = dD.mutable_data_ptr();
  run(inputs.problem, backward, totals);
  return {dx, ddecay, dB, dC, dD, dinitial};
}

}  // namespace fuseport::ssd_chunk_scan
