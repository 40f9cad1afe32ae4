// The kernels for one instruction set, FUSEPORT_ISA; build.py compiles this file for each.
#include "causal_conv1d/kernel.hpp"

#include "causal_conv1d/backward.hpp"
#include "causal_conv1d/forward.hpp"

namespace fuseport::causal_conv1d::FUSEPORT_ISA {

namespace {

// And with the layout, the width where it is the one of most models, and whether there is seq_idx.
#define FUSEPORT_UNIT(unit, F, Stored, W, PACKED)                                  \
  (p.time_last ? unit<F, Stored, true, W, PACKED>(p, k, index, scratch)            \
               : unit<F, Stored, false, W, PACKED>(p, k, index, scratch))
#define FUSEPORT_ANY_UNIT(unit, F, Stored)                                         \
  (p.packed ? (p.width == 4 ? FUSEPORT_UNIT(unit, F, Stored, 4, true)             \
                             : FUSEPORT_UNIT(unit, F, Stored, 0, true))            \
             : (p.width == 4 ? FUSEPORT_UNIT(unit, F, Stored, 4, false)            \
                             : FUSEPORT_UNIT(unit, F, Stored, 0, false)))

int64_t scratch_bytes(const Problem& p) {
  return p.dtype == Dtype::float64 ? Scratch<F64>(p, nullptr).bytes
                                   : Scratch<F32>(p, nullptr).bytes;
}

void forward(const Problem& p, const Forward& k, int64_t index, void* scratch) {
#define FUSEPORT_CALL(F, Stored) FUSEPORT_ANY_UNIT(forward_unit, F, Stored)
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

void backward(const Problem& p, const Backward& k, int64_t index, void* scratch) {
#define FUSEPORT_CALL(F, Stored) FUSEPORT_ANY_UNIT(backward_unit, F, Stored)
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

void finish(const Problem& p, const Backward& k) {
#define FUSEPORT_CALL(F, Stored)                                \
  (p.wide_weight ? finish_as<typename F::Real, typename F::Real>(p, k) \
                 : finish_as<typename F::Real, Stored>(p, k))
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

}  // namespace

const Kernels table{scratch_bytes, forward, backward, finish};

}  // namespace fuseport::causal_conv1d::FUSEPORT_ISA
