// The kernels for one instruction set, FUSEPORT_ISA; build.py compiles this file for each.
#include "swiglu/kernel.hpp"

#include "native/storage.hpp"

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

// The first few of a vector's numbers, and zeros.
template <class F, class Stored>
FUSEPORT_INLINE typename F::Vector load_some(const Stored* from, int64_t count) {
  Stored numbers[F::LANES] = {};
  memcpy(numbers, from, count * sizeof *from);
  return load_reals<F>(numbers);
}

template <class F, class Stored>
FUSEPORT_INLINE void store_some(typename F::Vector v, Stored* to, int64_t count) {
  Stored numbers[F::LANES];
  store_reals<F>(v, numbers);
  memcpy(to, numbers, count * sizeof *to);
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
    const auto product = [](Vector g, Vector u) { return g * logistic<F>(g) * u; };
    int64_t c = 0;
    for (; c + F::LANES <= count; c += F::LANES)
      store_reals<F>(product(load_reals<F>(gate + c), load_reals<F>(up + c)), to + c);
    if (const int64_t left = count - c)
      store_some<F>(product(load_some<F>(gate + c, left), load_some<F>(up + c, left)), to + c, left);
  });
}

template <class F>
struct Gradients {
  typename F::Vector dgate, dup;
};

template <class F, class Stored>
void backward_unit(const Problem& p, const Backward& b, int64_t unit) {
  using Vector = typename F::Vector;
  each_row(p, unit, [&](int64_t row, int64_t start, int64_t count) {
    const Stored* gate = row_of<Stored>(p.gate, row) + start;
    const Stored* up = row_of<Stored>(p.up, row) + start;
    const Stored* dout = row_of<Stored>(b.dout, row) + start;
    Stored* dgate = row_of<Stored>(b.dgate, row) + start;
    Stored* dup = row_of<Stored>(b.dup, row) + start;
    const auto gradients = [](Vector g, Vector u, Vector dy) -> Gradients<F> {
      constexpr typename F::Real one = 1;
      const Vector s = logistic<F>(g), slope = s * (one + g * (one - s));
      return {dy * u * slope, dy * (g * s)};
    };
    int64_t c = 0;
    for (; c + F::LANES <= count; c += F::LANES) {
      const auto found = gradients(load_reals<F>(gate + c), load_reals<F>(up + c),
                                   load_reals<F>(dout + c));
      store_reals<F>(found.dgate, dgate + c);
      store_reals<F>(found.dup, dup + c);
    }
    if (const int64_t left = count - c) {
      const auto found = gradients(load_some<F>(gate + c, left), load_some<F>(up + c, left),
                                   load_some<F>(dout + c, left));
      store_some<F>(found.dgate, dgate + c, left);
      store_some<F>(found.dup, dup + c, left);
    }
  });
}

}  // namespace

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

}  // namespace fuseport::swiglu::FUSEPORT_ISA
