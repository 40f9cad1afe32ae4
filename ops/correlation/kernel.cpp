// The kernels for one instruction set, FUSEPORT_ISA; build.py compiles this file for each.
#include "correlation/kernel.hpp"

#include "correlation/backward.hpp"
#include "correlation/forward.hpp"

namespace fuseport::correlation::FUSEPORT_ISA {

namespace {

int64_t forward_scratch(const Problem& p, const Plan& plan) {
#define FUSEPORT_CALL(F, Stored) (ForwardScratch<F>(plan, nullptr).bytes)
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
  return 0;
}

int64_t backward_scratch(const Problem& p, const Plan& plan) {
#define FUSEPORT_CALL(F, Stored) (BackwardScratch<F>(plan, nullptr).bytes)
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
  return 0;
}

int64_t window_scratch(const Problem& p) {
#define FUSEPORT_CALL(F, Stored) (window_bytes<F>(p))
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
  return 0;
}

void copy(const Problem& p, const Plan& plan, const Shared& s, int64_t unit) {
#define FUSEPORT_CALL(F, Stored) (copy_unit<F, Stored>(p, plan, s, unit))
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

void forward(const Problem& p, const Plan& plan, const Forward& f, const Shared& s, int64_t unit,
             void* scratch) {
#define FUSEPORT_CALL(F, Stored)                                                    \
  (p.windows() ? forward_unit<F>(p, plan, (F::Real*)s.volume, s, unit, scratch)     \
               : forward_unit<F>(p, plan, (Stored*)f.out, s, unit, scratch))
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

void sum_windows(const Problem& p, const Forward& f, const Shared& s, int64_t unit,
                 void* scratch) {
#define FUSEPORT_CALL(F, Stored) (sum_windows_unit<F, Stored>(p, f, s, unit, scratch))
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

void spread(const Problem& p, const Backward& b, const Shared& s, int64_t unit, void* scratch) {
#define FUSEPORT_CALL(F, Stored) (spread_unit<F, Stored>(p, b, s, unit, scratch))
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

void backward(const Problem& p, const Plan& plan, const Backward& b, const Shared& s, int64_t unit,
              void* scratch) {
#define FUSEPORT_CALL(F, Stored)                                                                \
  (p.windows()                                                                                  \
       ? backward_unit<F, Stored>(p, plan, b, (const F::Real*)s.volume, s, unit, scratch)       \
       : backward_unit<F, Stored>(p, plan, b, (const Stored*)b.dout, s, unit, scratch))
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

}  // namespace

const Kernels table{forward_scratch, backward_scratch, window_scratch, copy,
                    forward,         sum_windows,      spread,         backward};

}  // namespace fuseport::correlation::FUSEPORT_ISA
