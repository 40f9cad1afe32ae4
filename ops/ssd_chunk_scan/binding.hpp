// What the bindings of the kernels to torch and to ONNX Runtime do alike, over raw pointers.
#pragma once

#include <cstdint>

#include "native/schedule.hpp"
#include "ssd_chunk_scan/kernel.hpp"

namespace fuseport::ssd_chunk_scan {

// The problem is not empty. `host` is as for fuseport::for_each_unit.

template <class Host, class Run>
void for_each_unit(const Host& host, const Problem& p, int64_t units, int64_t scratch_bytes,
                   const Run& run) {
  const int64_t steps = p.batches * p.length * p.heads * p.width;
  fuseport::for_each_unit(host, units, steps, scratch_bytes, run);
}

// Calls run(p) with what all heads of a group share in place, where groups are shared.
template <class Host, class Run>
void with_prepared(const Host& host, Problem p, const Run& run) {
  const Kernels& k = kernels();
  const int64_t bytes = k.prepared_bytes(p);
  if (bytes == 0) return run(p);
  const auto buffer = host.scratch(bytes + 64);
  p.prepared = aligned(buffer.data());
  for_each_unit(host, p, p.batches * p.chunks() * p.groups, k.scratch_bytes(p, false),
                [&](int64_t unit, void* scratch) { k.prepare(p, unit, scratch); });
  run(p);
}

template <class Host>
void run_forward(const Host& host, const Problem& problem, const Forward& forward) {
  with_prepared(host, problem, [&](const Problem& p) {
    const Kernels& k = kernels();
    for_each_unit(host, p, p.batches * p.heads, k.scratch_bytes(p, false),
                  [&](int64_t unit, void* scratch) { k.forward(p, forward, unit, scratch); });
  });
}

inline void sum_batches(const Problem& p, const double* parts, int64_t count, void* total) {
  if (p.dtype == Dtype::float64) {
    fuseport::sum_batches(parts, p.batches, count, static_cast<double*>(total));
  } else {
    fuseport::sum_batches(parts, p.batches, count, static_cast<float*>(total));
  }
}

template <class Host>
void run_backward(const Host& host, const Problem& problem, Backward backward,
                  const Totals& totals) {
  const Kernels& k = kernels();
  // One part that is stored as it is computed is the sum.
  const bool whole = problem.blocks_per_group() == 1 &&
                     (problem.dtype == Dtype::float32 || problem.dtype == Dtype::float64);
  const int64_t parts = whole ? 0
                              : problem.batches * problem.length * problem.blocks() *
                                    problem.states * real_bytes(problem.dtype);
  const int64_t all_heads = problem.batches * problem.heads;
  const auto dB = host.scratch(parts), dC = host.scratch(parts);
  const auto sums = host.scratch(all_heads * (problem.width + 2) * 8 + 64);
  backward.dB = whole ? totals.dB : dB.data();
  backward.dC = whole ? totals.dC : dC.data();
  backward.dA = reinterpret_cast<double*>(aligned(sums.data()));
  backward.ddt_bias = backward.dA + all_heads;
  backward.dD = backward.ddt_bias + all_heads;
  with_prepared(host, problem, [&](const Problem& p) {
    for_each_unit(host, p, p.batches * p.blocks(), k.scratch_bytes(p, true),
                  [&](int64_t unit, void* scratch) { k.backward(p, backward, unit, scratch); });
  });
  const Sum sum_B{backward.dB, totals.dB}, sum_C{backward.dC, totals.dC};
  if (!whole)
    for (const Sum& sum : {sum_B, sum_C})
      for_each_unit(host, problem, problem.batches * problem.length, 0,
                    [&](int64_t unit, void*) { k.sum(problem, sum, unit); });
  if (totals.dA) sum_batches(problem, backward.dA, problem.heads, totals.dA);
  if (totals.ddt_bias) sum_batches(problem, backward.ddt_bias, problem.heads, totals.ddt_bias);
  sum_batches(problem, backward.dD, problem.heads * problem.width, totals.dD);
}

}  // namespace fuseport::ssd_chunk_scan
