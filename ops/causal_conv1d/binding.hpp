// What the bindings of the kernels to torch and to ONNX Runtime do alike, over raw pointers.
#pragma once

#include <cstdint>

#include "causal_conv1d/kernel.hpp"
#include "native/schedule.hpp"

namespace fuseport::causal_conv1d {

// Calls run(unit, scratch) for all units on the host's threads.
template <class Host, class Run>
void for_each_unit(const Host& host, const Problem& p, const Run& run) {
  const int64_t steps = p.batches * p.channels * p.length;
  fuseport::for_each_unit(host, p.units(), steps, kernels().scratch_bytes(p), run);
}

}  // namespace fuseport::causal_conv1d
