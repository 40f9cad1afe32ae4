// The kernels for one instruction set, FUSEPORT_ISA; build.py compiles this file for each.
#include "softmax_cross_entropy/kernel.hpp"

#include "native/parts.hpp"

namespace fuseport::softmax_cross_entropy::FUSEPORT_ISA {

using namespace fuseport::FUSEPORT_ISA;

namespace {

constexpr int64_t BLOCK = 1 << 11;  // numbers that are summed in float before they are in double

// The largest of a row; NaN if there is one.
template <class F, class Stored>
FUSEPORT_INLINE typename F::Real largest_of(const Stored* row, int64_t count) {
  using Vector = typename F::Vector;
  using Real = typename F::Real;
  constexpr int CHAINS = 4;
  const auto larger = [](Vector m, Vector x) { return (x > m) | (x != x) ? x : m; };
  Vector m[CHAINS];
  for (Vector& chain : m) chain = splat<F>(-(Real)__builtin_inf());
  int64_t i = 0;
  for (; i + CHAINS * F::LANES <= count; i += CHAINS * F::LANES)
#pragma GCC unroll 4
    for (int j = 0; j < CHAINS; ++j) m[j] = larger(m[j], load_reals<F>(row + i + j * F::LANES));
  each_vector<F>(count - i, [&](int64_t c, auto part) {
    m[0] = larger(m[0], part.chosen(part.load(row + i + c), -(Real)__builtin_inf()));
  });
  const Vector all = larger(larger(m[0], m[1]), larger(m[2], m[3]));
  Real found = all[0];
  for (int j = 1; j < F::LANES; ++j) found = all[j] > found || all[j] != all[j] ? all[j] : found;
  return found;
}

// The sum of term(vector of logits less the largest), over a row.
template <class F, class Stored, class Term>
FUSEPORT_INLINE double summed_over(const Stored* row, int64_t count, typename F::Real largest,
                                   const Term& term) {
  const typename F::Vector m = splat<F>(largest);
  double total = 0;
  for (int64_t start = 0; start < count; start += BLOCK) {
    const int64_t some = count - start < BLOCK ? count - start : BLOCK;
    total += (double)summed<F>(some, [&](int64_t i, auto part) {
      return part.chosen(term(part.load(row + start + i) - m), 0);
    });
  }
  return total;
}

template <class F, class Stored>
FUSEPORT_INLINE void forward_row(const Problem& p, const Forward& f, int64_t r) {
  using Vector = typename F::Vector;
  using Real = typename F::Real;
  const Stored* const row = (const Stored*)p.logits + r * p.stride;
  const Real largest = largest_of<F>(row, p.classes);
  const double total =
      summed_over<F>(row, p.classes, largest, [](Vector z) { return exp<F>(z); });
  Real loss = 0;
  if (const int64_t target = p.targets[r]; target != p.ignore_index) {
    const Real chosen = to_real(row[target]) - largest;
    double aim = (1 - p.label_smoothing) * (double)chosen;
    if (p.label_smoothing > 0) {  // else classes ruled out by -Inf would count
      const double sum = summed_over<F>(row, p.classes, largest, [](Vector z) { return z; });
      aim += p.label_smoothing * sum / (double)p.classes;
    }
    loss = (Real)(__builtin_log(total) - aim);
  }
  ((Real*)f.losses)[r] = loss;
  ((Real*)f.largest)[r] = largest;
  ((Real*)f.total)[r] = (Real)total;
}

template <class F, class Stored>
FUSEPORT_INLINE void backward_row(const Problem& p, const Backward& b, int64_t r) {
  using Vector = typename F::Vector;
  using Real = typename F::Real;
  const Stored* const row = (const Stored*)p.logits + r * p.stride;
  Stored* const to = (Stored*)b.dlogits + r * p.classes;
  const int64_t target = p.targets[r];
  if (target == p.ignore_index) {
    memset((void*)to, 0, sizeof *to * p.classes);
    return;
  }
  const Vector m = splat<F>(((const Real*)b.largest)[r]);
  const Vector total = splat<F>(((const Real*)b.total)[r]);
  const Vector dloss = splat<F>(((const Real*)b.dlosses)[r]);
  const Real smooth = (Real)(p.label_smoothing / (double)p.classes);
  const auto gradient = [&](Vector x, Real aim) { return dloss * (exp<F>(x - m) / total - aim); };
  each_vector<F>(p.classes, [&](int64_t i, auto part) {
    part.store(gradient(part.load(row + i), smooth), to + i);
  });
  const Real aim = (Real)(1 - p.label_smoothing) + smooth;
  from_real((Real)gradient(splat<F>(to_real(row[target])), aim)[0], to + target);
}

template <class F, class Stored>
void forward_unit(const Problem& p, const Forward& f, int64_t unit) {
  const int64_t first = unit * p.rows_per_unit(), end = first + p.rows_per_unit();
  for (int64_t r = first; r < end && r < p.rows; ++r) forward_row<F, Stored>(p, f, r);
}

template <class F, class Stored>
void backward_unit(const Problem& p, const Backward& b, int64_t unit) {
  const int64_t first = unit * p.rows_per_unit(), end = first + p.rows_per_unit();
  for (int64_t r = first; r < end && r < p.rows; ++r) backward_row<F, Stored>(p, b, r);
}

void forward(const Problem& p, const Forward& f, int64_t unit) {
#define FUSEPORT_CALL(F, Stored) forward_unit<F, Stored>(p, f, unit)
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

}  // namespace fuseport::softmax_cross_entropy::FUSEPORT_ISA
