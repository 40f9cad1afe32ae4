// The kernels for one instruction set, FUSEPORT_ISA; build.py compiles this file for each.
#include "ms_deform_attn/kernel.hpp"

#include "ms_deform_attn/backward.hpp"
#include "ms_deform_attn/forward.hpp"

namespace fuseport::ms_deform_attn::FUSEPORT_ISA {

namespace {

int64_t forward_scratch(const Problem& p) {
#define FUSEPORT_CALL(F, Stored) (forward_bytes<F, Stored>(p))
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
  return 0;
}

int64_t backward_scratch(const Problem& p) {
#define FUSEPORT_CALL(F, Stored) (backward_bytes<F>(p))
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
  return 0;
}

void forward(const Problem& p, const Forward& f, int64_t unit, void* scratch) {
#define FUSEPORT_CALL(F, Stored)                                             \
  (p.wide_points ? forward_unit<F, Stored, typename F::Real>(p, f, unit, scratch) \
                 : forward_unit<F, Stored, Stored>(p, f, unit, scratch))
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

void backward(const Problem& p, const Backward& b, int64_t unit, void* scratch) {
#define FUSEPORT_CALL(F, Stored)                                              \
  (p.wide_points ? backward_unit<F, Stored, typename F::Real>(p, b, unit, scratch) \
                 : backward_unit<F, Stored, Stored>(p, b, unit, scratch))
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

}  // namespace

const Kernels table{forward_scratch, backward_scratch, forward, backward};

}  // namespace fuseport::ms_deform_attn::FUSEPORT_ISA
