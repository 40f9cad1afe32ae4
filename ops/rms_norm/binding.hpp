// What the bindings of the kernels to torch and to ONNX Runtime do alike, over raw pointers.
#pragma once

#include <cstdint>

#include "native/schedule.hpp"
#include "rms_norm/problem.hpp"

namespace fuseport::rms_norm {

// Calls run(unit, scratch) for all units on the host's threads.
template <class Host, class Run>
void for_each_unit(const Host& host, const Kernels& k, const Problem& p, const Run& run) {
  if (p.units() == 0) return;
  fuseport::for_each_unit(host, p.units(), p.rows * p.channels, k.scratch_bytes(p), run);
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
