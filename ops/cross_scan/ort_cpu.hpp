// Walks over images as custom ops of ONNX Runtime, and their sums, on the CPU: what the ort.cpp of
// both ops is written with.
#pragma once

#include "cross_scan/binding.hpp"
#include "cross_scan/ort.hpp"

namespace fuseport::cross_scan {

// KERNELS is the op's function kernels().
template <auto KERNELS>
struct PassesOnCpu {
  using Context = ort::Context;

  static void scan(const Context& context, const Problem& p, const Scan& scan) {
    const Kernels& k = KERNELS();
    for_each_unit(context, p, [&](int64_t unit) { k.scan(p, scan, unit); });
  }

  static void merge(const Context& context, const Problem& p, const Merge& merge) {
    const Kernels& k = KERNELS();
    for_each_unit(context, p, [&](int64_t unit) { k.merge(p, merge, unit); });
  }
};

}  // namespace fuseport::cross_scan
