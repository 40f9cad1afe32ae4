// What the bindings of the kernels to torch and to ONNX Runtime do alike, over raw pointers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "native/schedule.hpp"
#include "selective_scan/kernel.hpp"

namespace fuseport::selective_scan {

// Channels in a row that share a group of B and one of C: a group's border is where a multiple of
// d/G is, for G of B and of C alike.
inline int64_t span_of(int64_t channels, int64_t groups_B, int64_t groups_C) {
  return std::max<int64_t>(1, std::gcd(channels / groups_B, channels / groups_C));
}

// Calls run(unit, scratch) for all units on the host's threads.
template <class Host, class Run>
void for_each_unit(const Host& host, const Problem& p, int64_t scratch_bytes, const Run& run) {
  const int64_t steps = p.batches * p.channels * p.length * p.states;
  fuseport::for_each_unit(host, p.units(), steps, scratch_bytes, run);
}

}  // namespace fuseport::selective_scan
