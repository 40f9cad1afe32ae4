// The kernels for one instruction set, FUSEPORT_ISA; build.py compiles this file for each.
#include "swiglu/kernel.hpp"

#include "native/parts.hpp"

namespace fuseport::swiglu::FUSEPORT_ISA {

using namespace fuseport::FUSEPORT_ISA;

namespace {

template <class Stored>
FUSEPORT_INLINE const Stored* row_of(const Rows& rows, int64_t row) {
  return (const Stored*)rows.data + row * rows.stride;
}

template <class Stored>
FUSEPORT_INLINE Stored* row_of(const MutableRows& rows, int64_t row) {
  return (Stored*)rows.data + row * rows.stride;
}

// Calls work(row, first channel, count) for what a unit has of each row.
template <class Work>
FUSEPORT_INLINE void each_row(const Problem& p, int64_t unit, const Work& work) {
  const int64_t start = unit % p.pieces() * PIECE;
  const int64_t count = p.channels - start < PIECE ? p.channels - start : PIECE;
  const int64_t first = unit / p.pieces() * p.rows_per_unit();
  for (int64_t row = first; row < first + p.rows_per_unit() && row < p.rows; ++row)
    work(row, start, count);
}

template <class F, class Stored>
void forward_unit(const Problem& p, const MutableRows& out, int64_t unit) {
  using Vector = typename F::Vector;
  each_row(p, unit, [&](int64_t row, int64_t start, int64_t count) {
    const Stored* gate = row_of<Stored>(p.gate, row) + start;
    const Stored* up = row_of<Stored>(p.up, row) + start;
    Stored* to = row_of<Stored>(out, row) + start;
    each_vector<F>(count, [&](int64_t c, auto part) {
      const Vector g = part.load(gate + c);
      part.store(g * logistic<F>(g) * part.load(up + c), to + c);
    });
  });
}

template <class F, class Stored>
void backward_unit(const Problem& p, const Backward& b, int64_t unit) {
  using Vector = typename F::Vector;
  each_row(p, unit, [&](int64_t row, int64_t start, int64_t count) {
    const Stored* gate = row_of<Stored>(p.gate, row) + start;
    const Stored* up = row_of<Stored>(p.up, row) + start;
    const Stored* dout = row_of<Stored>(b.dout, row) + start;
    Stored* dgate = row_of<Stored>(b.dgate, row) + start;
    Stored* dup = row_of<Stored>(b.dup, row) + start;
    each_vector<F>(count, [&](int64_t c, auto part) {
      constexpr typename F::Real one = 1;
      const Vector g = part.load(gate + c), dy = part.load(dout + c);
      const Vector s = logistic<F>(g), slope = s * (one + g * (one - s));
      part.store(dy * part.load(up + c) * slope, dgate + c);
      part.store(dy * (g * s), dup + c);
    });
  });
}

void forward(const Problem& p, const MutableRows& out, int64_t unit) {
#define FUSEPORT_CALL(F, Stored) forward_unit<F, Stored>(p, out, unit)
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

void backward(const Problem& p, const Backward& b, int64_t unit) {
#define FUSEPORT_CALL(F, Stored) backward_unit<F, Stored>(p, b, unit)
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

}  // namespace

const Kernels table{forward, backward};

}  // namespace fuseport::swiglu::FUSEPORT_ISA
