// What the bindings of the kernels to torch and to ONNX Runtime do alike, over raw pointers.
#pragma once

#include <cstdint>

#include "cross_scan/problem.hpp"

namespace fuseport::cross_scan {

// Calls run(unit) for all units on the host's threads.
template <class Host, class Run>
void for_each_unit(const Host& host, const Problem& p, const Run& run) {
  if (p.empty()) return;
  const int64_t threads = host.threads_for(p.units(), 4 * p.planes() * p.pixels());
  host.parallel(p.units(), threads, [&](int64_t unit, int64_t) { run(unit); });
}

}  // namespace fuseport::cross_scan
