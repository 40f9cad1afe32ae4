// The backward kernel for complex A. The adjoint g here is the conjugate of torch's cotangent: with
// it the formulas are those for real A, and gradients are the conjugates of what they say.
#pragma once

#include "selective_scan/backward.hpp"
#include "selective_scan/complex.hpp"

namespace fuseport::selective_scan::FUSEPORT_ISA {

template <class F>
struct ComplexBackwardScratch {
  using Real = typename F::Real;
  static constexpr int STATES = 2;  // at a time
  Real *u, *delta, *step, *slope, *drive, *dy, *gate, *y, *ddrive, *ddelta;  // as in BackwardScratch
  Real *exponent, *turns, *turns_low;  // as in ComplexForwardScratch
  Parts<Real> A, state, adjoint, B, C;
  Real *D, *bias, *limit;
  Parts<Real> history, decay, lanes_B, lanes_C;
  Parts<double> dA, dB, dC;
  double *dD, *dbias;
  int64_t bytes;

  ComplexBackwardScratch(const Problem& p, void* base) {
    Scratch s{(char*)base};
    s.take(TILE, &u, &delta, &step, &slope, &drive, &dy, &gate, &y, &ddrive, &ddelta);
    s.take(p.states * BLOCK, &exponent, &turns, &turns_low, &A.re, &A.im, &state.re, &state.im,
           &adjoint.re, &adjoint.im);
    s.take(p.states * CHUNK, &B.re, &B.im, &C.re, &C.im);
    s.take(BLOCK, &D, &bias, &limit);
    s.take(CHUNK * STATES * F::LANES, &history.re, &history.im, &decay.re, &decay.im, &lanes_B.re,
           &lanes_B.im, &lanes_C.re, &lanes_C.im);
    s.take(p.states * BLOCK, &dA.re, &dA.im, &dB.re, &dB.im, &dC.re, &dC.im);
    s.take(BLOCK, &dD, &dbias);
    bytes = s.used;
  }
};

template <class F>
FUSEPORT_INLINE Complex<F> conjugate_times(Complex<F> x, typename F::Vector real) {
  return {x.re * real, -(x.im * real)};
}

template <class F>
FUSEPORT_INLINE void add_to(Parts<double> total, int64_t at, Complex<F> x) {
  Whole<F>{}.add(x.re, total.re + at);
  Whole<F>{}.add(x.im, total.im + at);
}

// A share of a gradient: into the sum over lanes where B or C varies, else into the lanes' own sum.
template <class F, bool VARIES>
FUSEPORT_INLINE void collect(Complex<F> x, int channel, int channels, Parts<typename F::Real> lanes,
                             int64_t at, Complex<F>& sum) {
  if constexpr (VARIES) {
    // Lanes past the last channel hold zeros, or NaN where B or C is not finite.
    if (channels - channel < F::LANES) {
      x = {first_lanes<F>(x.re, channels - channel), first_lanes<F>(x.im, channels - channel)};
    }
    if (channel > 0) x = {load<F>(lanes.re + at) + x.re, load<F>(lanes.im + at) + x.im};
    store_complex<F>(lanes, at, x);
  } else {
    sum = {sum.re + x.re, sum.im + x.im};
  }
}

// As backward_states.
template <class F, bool B_VARIES, bool C_VARIES, int STATES>
static void backward_complex_states(const ComplexBackwardScratch<F>& s, int64_t n, int channel,
                                    int channels, int steps, bool gated) {
  using Vector = typename F::Vector;
  using Real = typename F::Real;
  constexpr int LANES = F::LANES;
  const Real *deltas = s.delta + channel, *bounded_deltas = s.step + channel;
  const Real *drives = s.drive + channel, *dys = s.dy + channel;
  Real *ys = s.y + channel, *ddrives = s.ddrive + channel, *ddeltas = s.ddelta + channel;
  const Parts<Real> history = s.history, decays = s.decay, lanes_B = s.lanes_B, lanes_C = s.lanes_C;
  Rate<F> rate[STATES];
  Complex<F> A[STATES], h[STATES], g[STATES], dA[STATES], dB[STATES], dC[STATES];
  const ComplexRows<F, B_VARIES> B(s.B, n, channel);
  const ComplexRows<F, C_VARIES> C(s.C, n, channel);
  for (int i = 0; i < STATES; ++i) {
    const int64_t row = (n + i) * BLOCK + channel;
    rate[i] = Rate<F>::at(s, row);
    A[i] = load_complex<F>(s.A, row);
    h[i] = load_complex<F>(s.state, row);
    g[i] = load_complex<F>(s.adjoint, row);
    dA[i] = dB[i] = dC[i] = Complex<F>{};
  }

  for (int t = 0; t < steps; ++t) {
    const int at = t * BLOCK;
    const Vector step = load<F>(bounded_deltas + at), drive = load<F>(drives + at);
    Vector y = Vector{};
#pragma GCC unroll 4
    for (int i = 0; i < STATES; ++i) {
      const int saved = (t * STATES + i) * LANES;
      const Complex<F> a = complex_decay<F>(step, rate[i]);
      store_complex<F>(history, saved, h[i]);
      store_complex<F>(decays, saved, a);
      h[i] = complex_step<F>(a, h[i], drive, B.at(i, t));
      if (gated) y += real_product<F>(C.at(i, t), h[i]);
    }
    if (gated) store<F>(ys + at, load<F>(ys + at) + (Real)2 * y);
  }

  for (int t = steps - 1; t >= 0; --t) {
    const int at = t * BLOCK;
    const Vector delta = load<F>(deltas + at), drive = load<F>(drives + at);
    const Vector share = (Real)2 * load<F>(dys + at);
    Vector ddrive = load<F>(ddrives + at), ddelta = load<F>(ddeltas + at);
#pragma GCC unroll 4
    for (int i = 0; i < STATES; ++i) {
      const int saved = (t * STATES + i) * LANES, lanes = (i * CHUNK + t) * LANES;
      const Complex<F> before = load_complex<F>(history, saved), c = C.at(i, t);
      g[i] = {g[i].re + c.re * share, g[i].im + c.im * share};
      const Complex<F> to_C = conjugate_times<F>(h[i], share);
      const Complex<F> to_B = conjugate_times<F>(g[i], drive);
      collect<F, C_VARIES>(to_C, channel, channels, lanes_C, lanes, dC[i]);
      collect<F, B_VARIES>(to_B, channel, channels, lanes_B, lanes, dB[i]);
      ddrive += real_product<F>(g[i], B.at(i, t));
      g[i] = product<F>(g[i], load_complex<F>(decays, saved));
      const Complex<F> dexponent = product<F>(g[i], before);
      const Complex<F> to_A = conjugate_times<F>(dexponent, delta);
      dA[i] = {dA[i].re + to_A.re, dA[i].im + to_A.im};
      ddelta += real_product<F>(dexponent, A[i]);
      h[i] = before;
    }
    store<F>(ddrives + at, ddrive);
    store<F>(ddeltas + at, ddelta);
  }

  for (int i = 0; i < STATES; ++i) {
    const int64_t row = (n + i) * BLOCK + channel;
    store_complex<F>(s.adjoint, row, g[i]);
    add_to<F>(s.dA, row, dA[i]);
    if constexpr (!B_VARIES) add_to<F>(s.dB, row, dB[i]);
    if constexpr (!C_VARIES) add_to<F>(s.dC, row, dC[i]);
  }
}

// Sums lanes into rows (N, 2l) of one unit's part of dB or dC, as sum_lanes does.
template <class F>
static void sum_complex_lanes(Parts<typename F::Real> lanes, int states, int64_t n,
                              const Steps& steps, int64_t length, typename F::Real* part) {
  using Vector = typename F::Vector;
  constexpr int LANES = F::LANES;
  constexpr std::make_integer_sequence<int, LANES> each;
  for (int i = 0; i < states; ++i)
    for (int t = 0; t < steps.count; t += LANES) {
      Vector rows_re[LANES], rows_im[LANES];
#pragma GCC unroll 16
      for (int j = 0; j < LANES; ++j) rows_re[j] = load<F>(lanes.re + (i * CHUNK + t + j) * LANES);
#pragma GCC unroll 16
      for (int j = 0; j < LANES; ++j) rows_im[j] = load<F>(lanes.im + (i * CHUNK + t + j) * LANES);
      const Vector re = sums_of_lanes<F>(rows_re), im = sums_of_lanes<F>(rows_im);
      typename F::Real* to = part + 2 * ((n + i) * length + steps.start + t);
      if (steps.count - t >= LANES) {
        store<F>(to, zip<F, 0>(re, im, each));
        store<F>(to + LANES, zip<F, LANES / 2>(re, im, each));
      } else {
        for (int j = 0; j < steps.count - t; ++j) {
          to[2 * j] = re[j];
          to[2 * j + 1] = im[j];
        }
      }
    }
}

template <class F, bool B_VARIES, bool C_VARIES>
static void backward_complex_chunk(const ComplexBackwardScratch<F>& s, const Problem& p,
                                   const Unit& unit, const Steps& steps, typename F::Real* dB,
                                   typename F::Real* dC) {
  constexpr int STATES = ComplexBackwardScratch<F>::STATES;
  for (int64_t n = 0; n < p.states;) {
    const int states = n + STATES <= p.states ? STATES : 1;
    auto run = states == 1 ? backward_complex_states<F, B_VARIES, C_VARIES, 1>
                           : backward_complex_states<F, B_VARIES, C_VARIES, STATES>;
    for (int channel = 0; channel < unit.channels; channel += F::LANES)
      run(s, n, channel, unit.channels, steps.count, p.z.data != nullptr);
    if (B_VARIES) sum_complex_lanes<F>(s.lanes_B, states, n, steps, p.length, dB);
    if (C_VARIES) sum_complex_lanes<F>(s.lanes_C, states, n, steps, p.length, dC);
    n += states;
  }
}

template <class F, class Stored>
static void complex_backward_unit(const Problem& p, const Backward& k, int64_t index,
                                  void* scratch) {
  using Real = typename F::Real;
  const Unit unit(p, index);
  const ComplexBackwardScratch<F> s(p, scratch);
  const int64_t row = unit.batch * p.channels + unit.channel;
  load_complex_A<F>(p, unit, s.A);
  load_rates<F>(p, unit, s);
  load_complex_states<F>((const Real*)k.dlast_state + 2 * row * p.states, 1, p.states, p.states,
                         unit, s.adjoint);
  for (int64_t i = 0; i < p.states * BLOCK; ++i) s.adjoint.im[i] = -s.adjoint.im[i];
  load_channels(p.D, unit, s.D);
  load_channels(p.delta_bias, unit, s.bias);
  clear(p.states * BLOCK, s.dA.re, s.dA.im, s.dB.re, s.dB.im, s.dC.re, s.dC.im);
  clear(BLOCK, s.dD, s.dbias);

  const auto run = p.B.varies ? (p.C.varies ? backward_complex_chunk<F, true, true>
                                            : backward_complex_chunk<F, true, false>)
                              : (p.C.varies ? backward_complex_chunk<F, false, true>
                                            : backward_complex_chunk<F, false, false>);
  const int64_t part = (unit.batch * p.blocks() + unit.block) * p.states * p.row();
  for (int64_t chunk = p.chunks() - 1; chunk >= 0; --chunk) {
    const Steps steps(p, chunk);
    load_complex_states<F>(saved_complex_states((const Real*)k.chunk_states, p, unit, chunk),
                           p.channels, 1, p.states, unit, s.state);
    load_complex_coefficient<F, Stored>(p.B, p.states, unit, steps, s.B);
    load_complex_coefficient<F, Stored>(p.C, p.states, unit, steps, s.C);
    prepare<F, Stored>(s, p, k, unit, steps);
    run(s, p, unit, steps, (Real*)k.dB + part, (Real*)k.dC + part);
    finish<F, Stored>(s, p, k, unit, steps);
  }

  const auto write = [&](Parts<double> tile, void* total) {
    store_complex_states<F64>(tile, p.states, unit, (double*)total + 2 * row * p.states, 1,
                              p.states);
  };
  write(s.dA, k.dA);
  if (!p.B.varies) write(s.dB, k.dB);
  if (!p.C.varies) write(s.dC, k.dC);
  for (int c = 0; c < unit.channels; ++c) {
    k.dD[row + c] = s.dD[c];
    k.ddelta_bias[row + c] = s.dbias[c];
  }
}

}  // namespace fuseport::selective_scan::FUSEPORT_ISA
