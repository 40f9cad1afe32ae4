// The passes of norms on CUDA, with a gate or without: which kernels, in what order, for which problem.
#pragma once

#include "rms_norm/cuda_held.cuh"
#include "rms_norm/cuda_plain.cuh"

namespace fuseport::rms_norm::cuda {

// Whether packs of 16 bytes can be moved at once.
template <class Stored>
bool in_packs(const Problem& p, const Rows& rows) {
  constexpr int V = VECTOR<Stored>;
  return rows.channel_stride == 1 &&
         aligned<V, Stored>(rows.data, p.inner > 1 ? rows.inner_stride : 0,
                            p.rows > p.inner ? rows.outer_stride : 0);
}

// `step` times as many threads share a group until they hold it: in the forward no more than must,
// so that each asks for much at once.
template <class Stored, class... Other>
Plan plan_of(const Problem& p, int step, const Other&... rows) {
  constexpr int V = VECTOR<Stored>;
  const int64_t packs = p.group / V;
  const bool weight = p.weight_stride == 1 && (p.weight_dtype == p.dtype
                                                   ? aligned<V, Stored>(p.weight)
                                                   : aligned<V, Real<Stored>>(p.weight));
  Plan plan;
  plan.plain = p.group % V != 0 || packs > PACKS * MOST_LANES || !weight ||
               !(in_packs<Stored>(p, rows) && ...);
  if (plan.plain) {
    plan.lanes = plan.threads = PLAIN_THREADS;
  } else {
    plan.lanes = 8;
    while (packs > PACKS * plan.lanes) plan.lanes *= step;
    plan.threads = plan.lanes > 128 ? plan.lanes : 128;
  }
  while (1 << plan.lane_bits < plan.lanes) ++plan.lane_bits;
  // Each part is a row of sums in memory: no more than keep the device busy, each of some rows.
  constexpr int64_t BUSY = 512, ROWS = 8;
  const int64_t groups = plan.groups = p.channels / p.group, slots = plan.threads / plan.lanes;
  const int64_t all = (p.rows + slots * ROWS - 1) / (slots * ROWS);
  const int64_t busy = BUSY * multiprocessors() / plan.threads;
  const int64_t wanted = groups > 0 ? (busy + groups - 1) / groups : 0;
  plan.parts = all < wanted ? all : wanted;
  return plan;
}

// With z where there is a gate.
template <bool GATED, class... Other>
Plan plan_for(const Problem& p, int step, const Other&... rows) {
  Plan plan;
  with_dtype(p.dtype, [&](auto stored) -> const char* {
    using Stored = decltype(stored);
    plan = GATED ? plan_of<Stored>(p, step, p.x, p.z, rows...)
                 : plan_of<Stored>(p, step, p.x, rows...);
    return nullptr;
  });
  return plan;
}

template <bool GATED>
const char* run_forward(const Problem& p, const Plan& plan, const Forward& f, void* stream) {
  if (p.rows * p.channels == 0) return nullptr;
  return with_dtype(p.dtype, [&](auto stored) {
    using Stored = decltype(stored);
    using Value = Real<Stored>;
    const int64_t all = p.rows * (p.channels / p.group), slots = plan.threads / plan.lanes;
    const int64_t shared = plan.threads / 32 * (int64_t)sizeof(Value);
    if (plan.plain)
      return launch(forward_plain_kernel<Value, GATED>, all, plan.threads, shared, stream, p, f);
    auto* kernel = forward_kernel<Stored, GATED ? Mode::gate_first : Mode::plain>;
    if (GATED && p.mode == Mode::norm_first)
      kernel = forward_kernel<Stored, GATED ? Mode::norm_first : Mode::plain>;
    return launch(kernel, (all + slots - 1) / slots, plan.threads, shared, stream, p, plan, f);
  });
}

template <bool GATED>
const char* run_backward(const Problem& p, const Plan& plan, const Gradients& b, void* scratch,
                         void* stream) {
  if (p.channels == 0) return nullptr;
  return with_dtype(p.dtype, [&](auto stored) {
    using Stored = decltype(stored);
    using Value = Real<Stored>;
    const int64_t blocks = plan.parts * (p.channels / p.group);
    const int64_t shared = plan.threads * VECTOR<Stored> * (int64_t)sizeof(Value);
    auto* const parts = (Value*)scratch;
    const char* error = nullptr;
    if (blocks > 0)
      error = plan.plain ? launch(backward_plain_kernel<Value, GATED>, blocks, plan.threads, shared,
                                  stream, p, plan, b, parts)
                         : launch(backward_kernel<Stored, GATED>, blocks, plan.threads, shared,
                                  stream, p, plan, b, parts);
    if (error) return error;
    return launch(sum_weight_kernel<Value>, part_blocks(p.channels), PART_THREADS, PART_SHARED,
                  stream, p, (const Value*)parts, plan.parts, b.dweight);
  });
}

inline int64_t scratch_of(const Problem& p, const Plan& plan) {
  return plan.parts * p.channels * (p.dtype == Dtype::float64 ? 8 : 4);
}

template <bool GATED>
constexpr Kernels KERNELS{
    [](const Problem& p) { return plan_for<GATED>(p, 2); },
    [](const Problem& p, const Gradients& b) { return plan_for<GATED>(p, 4, b.dout); },
    scratch_of,
    run_forward<GATED>,
    run_backward<GATED>,
};

}  // namespace fuseport::rms_norm::cuda
