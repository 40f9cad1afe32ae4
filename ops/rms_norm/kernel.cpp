// The kernels for one instruction set, FUSEPORT_ISA; build.py compiles this file for each.
#include "rms_norm/kernel.hpp"

#include "rms_norm/units.hpp"

namespace fuseport::rms_norm::FUSEPORT_ISA {

namespace {

int64_t scratch_bytes(const Problem& p) { return bytes_of_unit(p); }

void forward(const Problem& p, const Forward& f, int64_t unit, void* scratch) {
#define FUSEPORT_CALL(F, Stored) forward_unit<F, Stored, Mode::plain>(p, f, unit, scratch)
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

void backward(const Problem& p, const Backward& b, int64_t unit, void* scratch) {
#define FUSEPORT_CALL(F, Stored) backward_unit<F, Stored, Mode::plain>(p, b, unit, scratch)
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

void sum_units(const Problem& p, const SumUnits& s, int64_t unit) { sum_columns(p, s, unit); }

}  // namespace

const Kernels table{scratch_bytes, forward, backward, sum_units};

}  // namespace fuseport::rms_norm::FUSEPORT_ISA
