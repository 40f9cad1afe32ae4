// The kernels for one instruction set, FUSEPORT_ISA; build.py compiles this file for each.
#include "deform_conv2d/kernel.hpp"

#include "deform_conv2d/backward.hpp"
#include "deform_conv2d/forward.hpp"

namespace fuseport::deform_conv2d::FUSEPORT_ISA {

namespace {

int64_t forward_scratch(const Problem& p) {
#define FUSEPORT_CALL(F, Stored) (ForwardScratch<F>(p, nullptr).bytes)
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

void copy_input(const Problem& p, const Shared& s, int64_t unit) {
#define FUSEPORT_CALL(F, Stored) (copy_input_unit<F, Stored>(p, s, unit))
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

void copy_weight(const Problem& p, const Shared& s, int64_t unit) {
#define FUSEPORT_CALL(F, Stored) (copy_weight_unit<F, Stored>(p, s, unit))
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

void forward(const Problem& p, const Forward& f, const Shared& s, int64_t unit, void* scratch) {
#define FUSEPORT_CALL(F, Stored) (forward_unit<F, Stored>(p, f, s, unit, scratch))
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

void backward(const Problem& p, const Backward& b, const Shared& s, int64_t unit, void* scratch) {
#define FUSEPORT_CALL(F, Stored) (backward_unit<F, Stored>(p, b, s, unit, scratch))
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

void sum_parts(const Problem& p, const Backward& b, const Shared& s, int64_t unit) {
#define FUSEPORT_CALL(F, Stored) (sum_parts_unit<F, Stored>(p, b, s, unit))
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

}  // namespace

const Kernels table{forward_scratch, backward_scratch, copy_input, copy_weight,
                    forward,         backward,         sum_parts};

}  // namespace fuseport::deform_conv2d::FUSEPORT_ISA
