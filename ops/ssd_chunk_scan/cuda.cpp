// The operators of the chunked scan on CUDA: the same schemas as in torch.cpp, another dispatch key.
// Products of matrices are torch's own; cuda.hpp says what the kernels between them do.
#include "ssd_chunk_scan/cuda.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <array>
#include <optional>

#include "native/cuda_torch.hpp"
#include "ssd_chunk_scan/checks.hpp"
#include "ssd_chunk_scan/torch.hpp"

namespace fuseport::ssd_chunk_scan {
namespace {

// What is found first: the steps.
struct Pass {
  const char* op;
  const Problem& p;
  void* stream;
  at::TensorOptions real;
  int64_t chunks = p.batches * p.chunks();
  Tensor step, total, rest, begin;
  cuda::Steps steps;

  Pass(const char* op, const Problem& p, void* stream, at::TensorOptions real)
      : op(op), p(p), stream(stream), real(real) {
    step = at::empty({chunks, CHUNK, p.heads}, real);
    total = at::empty_like(step);
    rest = at::empty_like(step);
    begin = at::empty({chunks, CHUNK}, real.dtype(at::kInt));
    steps = {step.mutable_data_ptr(), total.mutable_data_ptr(), rest.mutable_data_ptr(),
             begin.mutable_data_ptr<int32_t>()};
    check(cuda::find_steps(p, steps, stream));
  }

  void check(const char* error) const { check_cuda(op, error); }

  // Where there are kernels for it.
  void walk(cuda::Walk walk) const {
    const cuda::Segments segments = cuda::segments(p);
    Tensor states;
    if (segments.count > 1) {
      states = at::empty({p.batches * segments.count, p.heads, p.width, p.states}, real);
      cuda::Walk before = walk;
      before.segments = walk.segments = states.mutable_data_ptr();
      before.end = nullptr;  // the last segment's is not known yet
      check(cuda::add_up(p, steps, segments, before, stream));
      check(cuda::carry(p, steps, segments, before, stream));
    }
    check(cuda::walk(p, steps, segments, walk, stream));
  }
};

// What a pass of products needs besides, as matrices in batches: of each chunk and head, or group.
struct Work : Pass {
  Tensor x, weighted, B, C, CB, M, states, within, across;
  cuda::Forward forward;

  Work(const char* op, const Problem& p, void* stream, at::TensorOptions real)
      : Pass(op, p, stream, real) {
    x = heads(p.width);
    weighted = groups(p.heads_per_group() * p.width);
    B = groups(p.states);
    C = groups(p.states);
    forward.x = x.mutable_data_ptr();
    forward.weighted = weighted.mutable_data_ptr();
    forward.B = B.mutable_data_ptr();
    forward.C = C.mutable_data_ptr();
    check(cuda::spread(p, steps, forward, stream));
  }

  Tensor heads(int64_t width) const { return at::empty({chunks * p.heads, CHUNK, width}, real); }
  Tensor groups(int64_t width) const { return at::empty({chunks * p.groups, CHUNK, width}, real); }

  // (b, c, H, P, N), as one matrix for each group.
  Tensor of_groups(const Tensor& states) const {
    return states.view({chunks * p.groups, p.heads_per_group() * p.width, p.states});
  }

  // The states before the chunks, and after the last.
  void carry(void* final_states) {
    states = at::bmm(weighted.mT(), B);
    forward.states = states.mutable_data_ptr();
    cuda::Walk walk;
    walk.start = p.initial_states;
    walk.end = final_states;
    walk.segments = forward.states;
    check(cuda::carry(p, steps, {1, p.chunks()}, walk, stream));
    across = at::bmm(C, of_groups(states).mT());
    forward.across = across.mutable_data_ptr();
    CB = at::bmm(C, B.mT());
    forward.CB = CB.mutable_data_ptr();
  }

  // What the steps of a chunk read of each other.
  void mix() {
    M = heads(CHUNK);
    forward.M = M.mutable_data_ptr();
    check(cuda::mix(p, steps, forward, stream));
    within = at::bmm(M, x);
    forward.within = within.mutable_data_ptr();
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
  if (cuda::walks(inputs.problem)) {
    cuda::Walk walk;
    walk.start = inputs.problem.initial_states;
    walk.end = final_states.mutable_data_ptr();
    walk.out = out.mutable_data_ptr();
    Pass(op, inputs.problem, device.stream(), A.options()).walk(walk);
    return {out, final_states};
  }
  Work work(op, inputs.problem, device.stream(), A.options());
  work.forward.out = out.mutable_data_ptr();
  work.carry(final_states.mutable_data_ptr());
  work.mix();
  work.check(cuda::finish(work.p, work.steps, work.forward, work.stream));
  return {out, final_states};
}

// Of (b·c·G, T, N), as B and C are.
void join(const Tensor& chunks, const Problem& p, const Tensor& to) {
  const Tensor whole = chunks.view({p.batches, p.chunks(), p.groups, CHUNK, p.states});
  to.copy_(whole.transpose(2, 3).flatten(1, 2).narrow(1, 0, p.length));
}

Tensor sum_of_chunks(const Tensor& parts, const Tensor& like) {
  return parts.sum(0).to(like.scalar_type()).view(like.sizes());
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
  const Problem& p = inputs.problem;
  const at::TensorOptions real = A.options();
  const auto parts = [&](int64_t count) {
    return at::empty({p.batches * p.chunks(), count}, real.dtype(at::kDouble));
  };
  const Tensor dA = parts(p.heads), dbias = parts(p.heads), dD = parts(p.heads * p.width);
  cuda::Backward b;
  b.dout = strided(dout);
  b.dA = dA.mutable_data_ptr<double>();
  b.ddt_bias = dbias.mutable_data_ptr<double>();
  b.dD = dD.mutable_data_ptr<double>();
  b.dx = dx.mutable_data_ptr();
  b.ddt = ddt.mutable_data_ptr();
  if (z) b.dz = dz.mutable_data_ptr();
  cuda::Walk back;
  back.back = true;
  back.start = dfinal_states.const_data_ptr();
  back.end = dinitial.mutable_data_ptr();
  back.dout = b.dout;
  const auto result = [&] {
    return std::array<Tensor, 9>{dx, ddt, sum_of_chunks(dA, A), dB,      dC, sum_of_chunks(dD, D),
                                 dz, sum_of_chunks(dbias, dt_bias), dinitial};
  };

  if (cuda::has_gradients(p)) {
    const Pass pass(op, p, device.stream(), real);
    const Tensor states = at::empty({pass.chunks, p.heads, p.width, p.states}, real);
    const Tensor dstates = at::empty_like(states);
    cuda::Walk forth;
    forth.start = p.initial_states;
    forth.kept = b.forward.states = states.mutable_data_ptr();
    pass.walk(forth);
    back.kept = b.dstates = dstates.mutable_data_ptr();
    pass.walk(back);
    const int64_t sums = cuda::sums_of_heads(p);
    const Tensor dBs = at::empty({pass.chunks * p.groups, sums, CHUNK, p.states}, real);
    const Tensor dCs = at::empty_like(dBs);
    b.dB = dBs.mutable_data_ptr();
    b.dC = dCs.mutable_data_ptr();
    pass.check(cuda::gradients(p, pass.steps, b, pass.stream));
    join(dBs.sum(1), p, dB);
    join(dCs.sum(1), p, dC);
    return result();
  }

  Work work(op, p, device.stream(), real);
  work.carry(nullptr);
  if (z) work.mix();
  const Tensor dy = work.heads(p.width), outer = at::empty_like(work.weighted);
  b.forward = work.forward;
  b.dy = dy.mutable_data_ptr();
  b.dy_outer = outer.mutable_data_ptr();
  work.check(cuda::spread_back(p, work.steps, b, work.stream));

  const Tensor dstates = at::bmm(outer.mT(), work.C);
  b.dstates = dstates.mutable_data_ptr();
  back.segments = b.dstates;
  work.check(cuda::carry(p, work.steps, {1, p.chunks()}, back, work.stream));

  const Tensor dM = at::bmm(dy, work.x.mT());
  Tensor Q = at::empty({work.chunks * p.groups, cuda::parts(p), CHUNK, CHUNK}, work.real);
  const Tensor columns = at::empty({work.chunks, p.heads, CHUNK}, work.real);
  const Tensor excess = at::empty(columns.sizes(), work.real.dtype(at::kDouble));
  b.dM = dM.mutable_data_ptr();
  b.Q = Q.mutable_data_ptr();
  b.row_excess = excess.mutable_data_ptr<double>();
  b.column_sums = columns.mutable_data_ptr();
  work.check(cuda::mix_back(p, work.steps, b, work.stream));

  const Tensor of_groups = work.of_groups(dstates), gB = at::bmm(work.B, of_groups.mT());
  const Tensor dx_within = at::bmm(dM.mT(), dy);  // where M is now
  b.gB = gB.mutable_data_ptr();
  b.dx_within = dx_within.mutable_data_ptr();
  work.check(cuda::finish_back(p, work.steps, b, work.stream));

  Q = Q.sum(1);
  join(at::baddbmm(at::bmm(outer, work.of_groups(work.states)), Q, work.B), p, dC);
  join(at::baddbmm(at::bmm(work.weighted, of_groups), Q.mT(), work.C), p, dB);
  return result();
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
}

}  // namespace
}  // namespace fuseport::ssd_chunk_scan
