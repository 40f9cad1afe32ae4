// Norms of units of rows, forward and backward: lanes are channels, and two passes over a row, of
// which the second finds it in a cache. Compiled once per instruction set.
#pragma once

#include "rms_norm/problem.hpp"
#include "rms_norm/rows.hpp"

namespace fuseport::rms_norm::FUSEPORT_ISA {

template <class F>
struct Gate {
  typename F::Vector silu, slope;  // SiLU(z), and its derivative

  FUSEPORT_INLINE Gate of(typename F::Vector z) {
    const typename F::Vector one = splat<F>(1), sigmoid = logistic<F>(z);
    return {z * sigmoid, sigmoid * (one + z * (one - sigmoid))};
  }
};

// 1/√(mean of squares + eps) of a group, given the sum of squares.
template <class F>
FUSEPORT_INLINE typename F::Real rstd_of(const Problem& p, typename F::Real squares) {
  return (typename F::Real)(1 / __builtin_sqrt((double)squares / (double)p.group + p.eps));
}

// One group of one row, in memory that is contiguous. `v` is scratch for a group.
template <class F, Mode MODE, class In, class Out>
FUSEPORT_INLINE typename F::Real forward_group(const Problem& p, const In* x, const In* z,
                                               const typename F::Real* weight,
                                               typename F::Real* v, Out* out) {
  using Vector = typename F::Vector;
  const typename F::Real squares = summed<F>(p.group, [&](int64_t c, auto part) {
    Vector value = part.load(x + c);
    if constexpr (MODE == Mode::gate_first) {
      const Vector gate = part.load(z + c);
      value *= gate * logistic<F>(gate);
      part.store(value, v + c);
    }
    return value * value;
  });
  const typename F::Real rstd = rstd_of<F>(p, squares);
  if (!out) return rstd;
  const Vector r = splat<F>(rstd);
  each_vector<F>(p.group, [&](int64_t c, auto part) {
    Vector n = (MODE == Mode::gate_first ? part.load(v + c) : part.load(x + c)) * r;
    n *= part.load(weight + c);
    if constexpr (MODE == Mode::norm_first) {
      const Vector gate = part.load(z + c);
      n *= gate * logistic<F>(gate);
    }
    part.store(n, out + c);
  });
  return rstd;
}

template <class F, Mode MODE, class In, class Out>
static void forward_rows(const Problem& p, const Forward& f, int64_t row, int count,
                         const In* const* x, const In* const* z,
                         const Scratch<typename F::Real>& s) {
  const int64_t groups = p.groups();
  auto* rstd = (typename F::Real*)f.rstd + row * groups;
  for (int i = 0; i < count; ++i)
    for (int64_t k = 0; k < groups; ++k) {
      const int64_t at = k * p.group;
      Out* out = f.out ? (Out*)f.out + (row + i) * p.channels + at : nullptr;
      const In* gate = MODE == Mode::plain ? nullptr : z[i] + at;
      rstd[i * groups + k] =
          forward_group<F, MODE>(p, x[i] + at, gate, s.weight + at, s.row, out);
    }
}

template <class F, class Stored, Mode MODE>
static void forward_unit(const Problem& p, const Forward& f, int64_t unit, void* base) {
  using Real = typename F::Real;
  const Scratch<Real> s(p, base);
  load_weight<F>(p, s.weight);
  const Rows* const inputs[] = {&p.x, &p.z};
  constexpr int COUNT = MODE == Mode::plain ? 1 : 2;
  each_tile<F, Stored, COUNT>(p, inputs, unit, s, [&](int64_t row, int count, auto rows) {
    forward_rows<F, MODE, typename decltype(rows)::In, Stored>(p, f, row, count, rows.at[0],
                                                               rows.at[COUNT - 1], s);
  });
}

// One group of a few rows. Weight's gradient adds up over these rows in a register, and from there
// in double.
template <class F, Mode MODE, class In, class Out>
FUSEPORT_INLINE void backward_group(const Problem& p, int count, const In* const* xs,
                                    const In* const* zs, const In* const* dys,
                                    const typename F::Real* rstd, const typename F::Real* weight,
                                    Out* const* dxs, Out* const* dzs, int64_t at,
                                    double* dweight) {
  using Vector = typename F::Vector;
  using Real = typename F::Real;
  const int64_t groups = p.groups();
  Real mean[TILE];  // of g·n
  for (int i = 0; i < count; ++i) {
    const In *x = xs[i] + at, *dy = dys[i] + at, *z = MODE == Mode::plain ? nullptr : zs[i] + at;
    const Real sum = summed<F>(p.group, [&](int64_t c, auto part) {
      Vector product = part.load(x + c) * (part.load(dy + c) * part.load(weight + c));
      if constexpr (MODE != Mode::plain) {
        const Vector gate = part.load(z + c);
        product *= gate * logistic<F>(gate);
      }
      return product;
    });
    mean[i] = (Real)((double)sum * (double)rstd[i * groups] / (double)p.group);
  }
  each_vector<F>(p.group, [&](int64_t c, auto part) {
    const Vector w = part.load(weight + c);
    Vector dw{};
    for (int i = 0; i < count; ++i) {
      const Vector x = part.load(xs[i] + at + c), dy = part.load(dys[i] + at + c);
      const Vector r = splat<F>(rstd[i * groups]), m = splat<F>(mean[i]);
      if constexpr (MODE == Mode::plain) {
        const Vector n = x * r;
        dw += dy * n;
        part.store(r * (dy * w - n * m), dxs[i] + at + c);
      } else {
        const Gate<F> gate = Gate<F>::of(part.load(zs[i] + at + c));
        const Vector v = MODE == Mode::gate_first ? x * gate.silu : x, n = v * r;
        const Vector dn = MODE == Mode::gate_first ? dy : dy * gate.silu;
        dw += dn * n;
        const Vector dv = r * (dn * w - n * m);
        part.store(MODE == Mode::gate_first ? dv * gate.silu : dv, dxs[i] + at + c);
        const Vector dsilu = MODE == Mode::gate_first ? dv * x : dy * n * w;
        part.store(dsilu * gate.slope, dzs[i] + at + c);
      }
    }
    part.add(dw, dweight + c);
  });
}

template <class F, class Stored, Mode MODE>
static void backward_unit(const Problem& p, const Backward& b, int64_t unit, void* base) {
  using Real = typename F::Real;
  const Scratch<Real> s(p, base);
  load_weight<F>(p, s.weight);
  double* dweight = b.dweight + unit * p.channels;
  memset(dweight, 0, sizeof *dweight * p.channels);
  const Rows* const inputs[] = {&p.x, &b.dout, &p.z};
  constexpr int COUNT = MODE == Mode::plain ? 2 : 3;
  each_tile<F, Stored, COUNT>(p, inputs, unit, s, [&](int64_t row, int count, auto rows) {
    Stored *dx[TILE], *dz[TILE];
    for (int i = 0; i < count; ++i) {
      dx[i] = (Stored*)b.dx + (row + i) * p.channels;
      dz[i] = (Stored*)b.dz + (MODE == Mode::plain ? 0 : (row + i) * p.channels);
    }
    for (int first = 0; first < count; first += AT_ONCE) {
      const int some = count - first < AT_ONCE ? count - first : AT_ONCE;
      for (int64_t k = 0; k < p.groups(); ++k) {
        const int64_t at = k * p.group;
        const Real* rstd = (const Real*)b.rstd + (row + first) * p.groups() + k;
        backward_group<F, MODE>(p, some, rows.at[0] + first, rows.at[COUNT - 1] + first,
                                rows.at[1] + first, rstd, s.weight + at, dx + first, dz + first,
                                at, dweight + at);
      }
    }
  });
}

template <class F, class Stored>
static void sum_columns_as(const Problem& p, const SumUnits& s, int64_t unit) {
  const int64_t start = unit * SUM_COLUMNS;
  const int64_t end = start + SUM_COLUMNS < p.channels ? start + SUM_COLUMNS : p.channels;
  double sums[SUM_COLUMNS] = {};
  for (int64_t u = 0; u < p.units(); ++u)
    for (int64_t c = start; c < end; ++c) sums[c - start] += s.parts[u * p.channels + c];
  for (int64_t c = start; c < end; ++c)
    from_real((typename F::Real)sums[c - start], (Stored*)s.total + c);
}

static void sum_columns(const Problem& p, const SumUnits& s, int64_t unit) {
#define FUSEPORT_CALL(F, Stored) sum_columns_as<F, Stored>(p, s, unit)
  FUSEPORT_DISPATCH(p.weight_dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

static int64_t bytes_of_unit(const Problem& p) {
  return p.dtype == Dtype::float64 ? Scratch<double>(p, nullptr).bytes
                                   : Scratch<float>(p, nullptr).bytes;
}

}  // namespace fuseport::rms_norm::FUSEPORT_ISA
