// What the bindings of the kernels to torch and to ONNX Runtime do alike, over raw pointers.
#pragma once

#include <cstdint>

#include "native/schedule.hpp"
#include "nf4_linear/kernel.hpp"

namespace fuseport::nf4_linear {

constexpr int64_t A_STEP = 16;  // products that take as long as a step of `threads_for`

template <class Host>
void run_forward(const Host& host, const Problem& p, const Forward& f) {
  if (p.rows == 0 || p.out == 0) return;
  const Kernels& k = kernels();
  for_each_unit(host, p.forward_units(), p.rows * p.out * p.in / A_STEP, k.scratch_bytes(p),
                [&](int64_t unit, void* scratch) { k.forward(p, f, unit, scratch); });
}

template <class Host>
void run_backward(const Host& host, const Problem& p, const Backward& b) {
  const Kernels& k = kernels();
  if (p.rows > 0 && p.in > 0)
    for_each_unit(host, p.backward_units(), p.rows * p.out * p.in / A_STEP, k.scratch_bytes(p),
                  [&](int64_t unit, void* scratch) { k.backward(p, b, unit, scratch); });
  if (p.out > 0)
    for_each_unit(host, p.bias_units(), p.rows * p.out / A_STEP, k.scratch_bytes(p),
                  [&](int64_t unit, void* scratch) { k.sum_rows(p, b, unit, scratch); });
}

inline int shift_of(int64_t block_size) {
  int shift = 0;
  while (block_size >> shift > 1) ++shift;
  return shift;
}

}  // namespace fuseport::nf4_linear
