// The kernels for one instruction set, FUSEPORT_ISA; build.py compiles this file for each.
#include "nf4_linear/kernel.hpp"

#include "nf4_linear/units.hpp"

namespace fuseport::nf4_linear::FUSEPORT_ISA {

namespace {

int64_t scratch_bytes(const Problem& p) {
  return p.dtype == Dtype::float64 ? Scratch<double>(p, nullptr).bytes
                                   : Scratch<float>(p, nullptr).bytes;
}

void forward(const Problem& p, const Forward& f, int64_t unit, void* scratch) {
#define FUSEPORT_CALL(F, Stored) forward_unit<F, Stored>(p, f, unit, scratch)
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

void backward(const Problem& p, const Backward& b, int64_t unit, void* scratch) {
#define FUSEPORT_CALL(F, Stored) backward_unit<F, Stored>(p, b, unit, scratch)
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

void sum_rows(const Problem& p, const Backward& b, int64_t unit, void* scratch) {
#define FUSEPORT_CALL(F, Stored) sum_unit<F, Stored>(p, b, unit, scratch)
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

}  // namespace

const Kernels table{scratch_bytes, forward, backward, sum_rows};

}  // namespace fuseport::nf4_linear::FUSEPORT_ISA
