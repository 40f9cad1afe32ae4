// The kernels for one instruction set, FUSEPORT_ISA; build.py compiles this file for each.
#include "dplr_delta_rule/kernel.hpp"

#include "dplr_delta_rule/backward.hpp"
#include "dplr_delta_rule/forward.hpp"

namespace fuseport::dplr_delta_rule::FUSEPORT_ISA {

namespace {

template <class F>
static int64_t scratch_bytes_of(const Problem& p, bool backward) {
  return backward ? BackwardScratch<F>(p, nullptr).bytes : ForwardScratch<F>(p, nullptr).bytes;
}

static int64_t scratch_bytes(const Problem& p, bool backward) {
  return p.dtype == Dtype::float64 ? scratch_bytes_of<F64>(p, backward)
                                   : scratch_bytes_of<F32>(p, backward);
}

static int64_t forward_units(const Problem& p) {
  const int64_t blocks =
      p.dtype == Dtype::float64 ? column_blocks<F64>(p) : column_blocks<F32>(p);
  return p.batches * p.heads * blocks;
}

static void forward(const Problem& p, const Forward& to, int64_t unit, void* scratch) {
#define FUSEPORT_CALL(F, Stored) forward_unit<F, Stored>(p, to, unit, scratch)
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

static void backward(const Problem& p, const Backward& to, int64_t unit, void* scratch) {
#define FUSEPORT_CALL(F, Stored) backward_unit<F, Stored>(p, to, unit, scratch)
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

}  // namespace

const Kernels table{scratch_bytes, forward_units, forward, backward};

}  // namespace fuseport::dplr_delta_rule::FUSEPORT_ISA
