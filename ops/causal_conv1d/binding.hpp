// What the bindings of the kernels to torch and to ONNX Runtime do alike, over raw pointers.
#pragma once

#include <cstdint>

#include "causal_conv1d/kernel.hpp"

namespace fuseport::causal_conv1d {

// Calls run(unit, scratch) for all units on the host's threads; scratch is each thread's own.
// `host` has threads_for(units, steps), parallel(units, threads, work), and scratch(bytes), whose
// result owns memory, with data() for its address.
template <class Host, class Run>
void for_each_unit(const Host& host, const Problem& p, const Run& run) {
  const int64_t units = p.units(), stride = (kernels().scratch_bytes(p) + 63) / 64 * 64;
  const int64_t threads = host.threads_for(units, p.batches * p.channels * p.length);
  const auto buffer = host.scratch(threads * stride + 64);
  char* base = buffer.data();
  base += (64 - reinterpret_cast<uintptr_t>(base) % 64) % 64;
  host.parallel(units, threads,
                [&](int64_t unit, int64_t slot) { run(unit, base + slot * stride); });
}

}  // namespace fuseport::causal_conv1d
