// The kernels for one instruction set, FUSEPORT_ISA; build.py compiles this file for each.
#include "selective_scan/kernel.hpp"

#include "selective_scan/backward.hpp"
#include "selective_scan/backward_by_channel.hpp"
#include "selective_scan/complex.hpp"
#include "selective_scan/complex_backward.hpp"
#include "selective_scan/forward.hpp"

namespace fuseport::selective_scan::FUSEPORT_ISA {

namespace {

template <template <class> class S, template <class> class ComplexS,
          template <class> class ByChannelS>
int64_t scratch_bytes(const Problem& p) {
  if (p.dtype == Dtype::float64)
    return p.complex ? ComplexS<F64>(p, nullptr).bytes : S<F64>(p, nullptr).bytes;
  if (p.complex) return ComplexS<F32>(p, nullptr).bytes;
  const int64_t bytes = S<F32>(p, nullptr).bytes;
  if constexpr (BY_CHANNEL<F32>) {
    const int64_t by = by_channel(p) ? ByChannelS<F32>(p, nullptr).bytes : 0;
    return bytes > by ? bytes : by;
  }
  return bytes;
}

int64_t forward_scratch(const Problem& p) {
  return scratch_bytes<ForwardScratch, ComplexForwardScratch, ChannelScratch>(p);
}

int64_t backward_scratch(const Problem& p) {
  return scratch_bytes<BackwardScratch, ComplexBackwardScratch, ChannelBackwardScratch>(p);
}

template <class F, class Stored>
void forward_of(const Problem& p, const Forward& k, int64_t unit, void* scratch) {
  if (p.complex) return complex_forward_unit<F, Stored>(p, k, unit, scratch);
  if constexpr (BY_CHANNEL<F>)
    if (by_channel(p, k)) return forward_by_channel<F, Stored>(p, k, unit, scratch);
  forward_unit<F, Stored>(p, k, unit, scratch);
}

void forward(const Problem& p, const Forward& k, int64_t unit, void* scratch) {
#define FUSEPORT_CALL(F, Stored) forward_of<F, Stored>(p, k, unit, scratch)
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

template <class F, class Stored>
void backward_of(const Problem& p, const Backward& k, int64_t unit, void* scratch) {
  if (p.complex) return complex_backward_unit<F, Stored>(p, k, unit, scratch);
  if constexpr (BY_CHANNEL<F>)
    if (by_channel(p, k)) return backward_by_channel<F, Stored>(p, k, unit, scratch);
  backward_unit<F, Stored>(p, k, unit, scratch);
}

void backward(const Problem& p, const Backward& k, int64_t unit, void* scratch) {
#define FUSEPORT_CALL(F, Stored) backward_of<F, Stored>(p, k, unit, scratch)
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

void sum_units(const Problem& p, const SumUnits& k, int64_t unit) {
#define FUSEPORT_CALL(F, Stored) sum_row<typename F::Real, Stored>(p, k, unit)
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

}  // namespace

const Kernels table{forward_scratch, backward_scratch, forward, backward, sum_units};

}  // namespace fuseport::selective_scan::FUSEPORT_ISA
