// The kernels for one instruction set, FUSEPORT_ISA; build.py compiles this file for each.
#include "ssd_chunk_scan/kernel.hpp"

#include "ssd_chunk_scan/backward.hpp"
#include "ssd_chunk_scan/forward.hpp"

namespace fuseport::ssd_chunk_scan::FUSEPORT_ISA {

namespace {

template <class F>
static int64_t prepared_bytes_of(const Problem& p) {
  if (!p.shares_groups()) return 0;
  return p.batches * p.chunks() * p.groups * Prepared<F>::size(p) * sizeof(typename F::Real);
}

template <class F>
static int64_t scratch_bytes_of(const Problem& p, bool backward) {
  const int64_t prepare = p.states * CHUNK * (int64_t)sizeof(typename F::Real);
  const int64_t pass =
      backward ? BackwardScratch<F>(p, nullptr).bytes : ForwardScratch<F>(p, nullptr).bytes;
  return prepare > pass ? prepare : pass;
}

static int64_t prepared_bytes(const Problem& p) {
  return p.dtype == Dtype::float64 ? prepared_bytes_of<F64>(p) : prepared_bytes_of<F32>(p);
}

static int64_t scratch_bytes(const Problem& p, bool backward) {
  return p.dtype == Dtype::float64 ? scratch_bytes_of<F64>(p, backward)
                                   : scratch_bytes_of<F32>(p, backward);
}

static void prepare(const Problem& p, int64_t unit, void* scratch) {
#define FUSEPORT_CALL(F, Stored) prepare_unit<F, Stored>(p, unit, scratch)
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

static void forward(const Problem& p, const Forward& k, int64_t unit, void* scratch) {
#define FUSEPORT_CALL(F, Stored) forward_unit<F, Stored>(p, k, unit, scratch)
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

static void backward(const Problem& p, const Backward& k, int64_t unit, void* scratch) {
#define FUSEPORT_CALL(F, Stored) backward_unit<F, Stored>(p, k, unit, scratch)
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

static void sum(const Problem& p, const Sum& k, int64_t unit) {
#define FUSEPORT_CALL(F, Stored) sum_unit<F, Stored>(p, k, unit)
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

}  // namespace

const Kernels table{prepared_bytes, scratch_bytes, prepare, forward, backward, sum};

}  // namespace fuseport::ssd_chunk_scan::FUSEPORT_ISA
