// What the bindings of the kernels to torch and to ONNX Runtime do alike, over raw pointers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "selective_scan/kernel.hpp"

namespace fuseport::selective_scan {

// Channels in a row that share a group of B and one of C: a group's border is where a multiple of
// d/G is, for G of B and of C alike.
inline int64_t span_of(int64_t channels, int64_t groups_B, int64_t groups_C) {
  return std::max<int64_t>(1, std::gcd(channels / groups_B, channels / groups_C));
}

// Calls run(unit, scratch) for all units on the host's threads; scratch is each thread's own.
// `host` has threads_for(units, steps), parallel(units, threads, work), and scratch(bytes), whose
// result owns memory, with data() for its address.
template <class Host, class Run>
void for_each_unit(const Host& host, const Problem& p, int64_t scratch_bytes, const Run& run) {
  const int64_t units = p.units(), stride = (scratch_bytes + 63) / 64 * 64;
  const int64_t threads =
      host.threads_for(units, p.batches * p.channels * p.length * p.states);
  const auto buffer = host.scratch(threads * stride + 64);
  char* base = buffer.data();
  base += (64 - reinterpret_cast<uintptr_t>(base) % 64) % 64;
  host.parallel(units, threads,
                [&](int64_t unit, int64_t slot) { run(unit, base + slot * stride); });
}

// The sum over batches of (b, count), in their order, rounded once.
template <class Real>
void sum_batches(const double* parts, int64_t batches, int64_t count, Real* total) {
  for (int64_t i = 0; i < count; ++i) {
    double sum = 0;
    for (int64_t b = 0; b < batches; ++b) sum += parts[b * count + i];
    total[i] = static_cast<Real>(sum);
  }
}

}  // namespace fuseport::selective_scan
