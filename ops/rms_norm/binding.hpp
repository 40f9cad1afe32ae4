// What the bindings of the kernels to torch and to ONNX Runtime do alike, over raw pointers.
#pragma once

#include <cstdint>

#include "rms_norm/problem.hpp"

namespace fuseport::rms_norm {

// Calls run(unit, scratch) for all units on the host's threads; scratch is each thread's own.
// `host` has threads_for(units, steps), parallel(units, threads, work), and scratch(bytes), whose
// result owns memory, with data() for its address.
template <class Host, class Run>
void for_each_unit(const Host& host, const Kernels& k, const Problem& p, const Run& run) {
  const int64_t units = p.units(), stride = (k.scratch_bytes(p) + 63) / 64 * 64;
  if (units == 0) return;
  const int64_t threads = host.threads_for(units, p.rows * p.channels);
  const auto buffer = host.scratch(threads * stride + 64);
  char* base = buffer.data();
  base += (64 - reinterpret_cast<uintptr_t>(base) % 64) % 64;
  host.parallel(units, threads,
                [&](int64_t unit, int64_t slot) { run(unit, base + slot * stride); });
}

// Adds up weight's gradient over units; zeros where there are no rows.
template <class Host>
void sum_weight_gradient(const Host& host, const Kernels& k, const Problem& p,
                         const SumUnits& sum) {
  const int64_t units = (p.channels + SUM_COLUMNS - 1) / SUM_COLUMNS;
  const int64_t threads = units ? host.threads_for(units, p.channels * p.units()) : 1;
  host.parallel(units, threads, [&](int64_t unit, int64_t) { k.sum_units(p, sum, unit); });
}

}  // namespace fuseport::rms_norm
