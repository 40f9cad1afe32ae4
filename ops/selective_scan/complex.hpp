// The forward kernel for complex A: real and imaginary parts in tiles and vectors of their own.
#pragma once

#include "selective_scan/forward.hpp"

namespace fuseport::selective_scan::FUSEPORT_ISA {

template <class Number>
struct Parts {
  Number *re, *im;
};

template <class F>
struct ComplexForwardScratch {
  using Real = typename F::Real;
  Real *delta, *drive, *y;  // as in ForwardScratch
  Real *exponent, *turns, *turns_low;  // log2(e)·Re A; Im A/2π as a sum
  Parts<Real> state, B, C;
  Real *D, *bias, *limit;
  int64_t bytes;

  ComplexForwardScratch(const Problem& p, void* base) {
    Scratch s{(char*)base};
    s.take(TILE, &delta, &drive, &y);
    s.take(p.states * BLOCK, &exponent, &turns, &turns_low, &state.re, &state.im);
    s.take(p.states * CHUNK, &B.re, &B.im, &C.re, &C.im);
    s.take(BLOCK, &D, &bias, &limit);
    bytes = s.used;
  }
};

// Complex numbers per state and channel of one unit, as [state][channel], and back; strides are of
// complex numbers.
template <class F>
static void load_complex_states(const typename F::Real* from, int64_t state_stride,
                                int64_t channel_stride, int64_t states, const Unit& unit,
                                Parts<typename F::Real> tile) {
  load_states<F>(from, 2 * state_stride, 2 * channel_stride, states, unit, tile.re);
  load_states<F>(from + 1, 2 * state_stride, 2 * channel_stride, states, unit, tile.im);
}

template <class F>
static void store_complex_states(Parts<typename F::Real> tile, int64_t states, const Unit& unit,
                                 typename F::Real* to, int64_t state_stride,
                                 int64_t channel_stride) {
  store_states<F>(tile.re, states, unit, to, 2 * state_stride, 2 * channel_stride);
  store_states<F>(tile.im, states, unit, to + 1, 2 * state_stride, 2 * channel_stride);
}

// Where those of one unit are that are saved before a chunk.
template <class Real>
static Real* saved_complex_states(Real* all, const Problem& p, const Unit& unit, int64_t chunk) {
  return all + 2 * ((unit.batch * p.saved() + chunk) * p.states * p.channels + unit.channel);
}

template <class F>
static void load_complex_A(const Problem& p, const Unit& unit, Parts<typename F::Real> tile) {
  const auto* from = (const typename F::Real*)p.A + 2 * unit.channel * p.states;
  load_complex_states<F>(from, 1, p.states, p.states, unit, tile);
}

// What exp(δ̂·A) = 2^(δ̂·exponent)·exp(2πi·δ̂·turns) takes.
template <class F, class Tiles>
static void load_rates(const Problem& p, const Unit& unit, const Tiles& s) {
  using Real = typename F::Real;
  load_complex_A<F>(p, unit, {s.exponent, s.turns});
  to_exponents<F>(p.states, s.exponent, s.limit);
  constexpr long double TURN = 0x1.45f306dc9c882a53f84eafa3ea69bb82p-3L;  // 1/2π
  for (int64_t i = 0; i < p.states * BLOCK; ++i) {
    // In float64 as good as a long double: to 2^-64 on x86, to 2^-53 where that is a double.
    const long double turns = TURN * (long double)s.turns[i];
    s.turns[i] = (Real)turns;
    s.turns_low[i] = (Real)(turns - (long double)s.turns[i]);
  }
}

template <class F>
struct Rate {
  typename F::Vector exponent, turns, turns_low;

  template <class Tiles>
  FUSEPORT_INLINE Rate at(const Tiles& s, int64_t at) {
    return {load<F>(s.exponent + at), load<F>(s.turns + at), load<F>(s.turns_low + at)};
  }
};

// B or C over a chunk, like load_coefficient.
template <class F, class Stored>
static void load_complex_coefficient(const Coefficient& k, int64_t states, const Unit& unit,
                                     const Steps& steps, Parts<typename F::Real> tile) {
  if (k.varies) {
    const Stored* from = (const Stored*)k.data + unit.batch * k.batch +
                         unit.channel / k.channels * k.group + 2 * steps.start * k.time;
    load_block<F>(from, k.state, 2 * k.time, (int)states, steps.count, tile.re, CHUNK);
    load_block<F>(from + k.time, k.state, 2 * k.time, (int)states, steps.count, tile.im, CHUNK);
  } else {
    const auto* from = (const typename F::Real*)k.data + 2 * unit.channel * k.group;
    clear(CHUNK * states, tile.re, tile.im);
    load_block<F>(from, 2 * k.state, 2 * k.group, (int)states, unit.channels, tile.re, CHUNK);
    load_block<F>(from + 1, 2 * k.state, 2 * k.group, (int)states, unit.channels, tile.im, CHUNK);
  }
}

// B or C of some states at each step, as Row has it of one: addresses that differ by constants need
// no registers of their own.
template <class F, bool VARIES>
struct ComplexRows {
  const typename F::Real *re, *im;

  ComplexRows(Parts<typename F::Real> tile, int64_t first_state, int first_channel) {
    const int64_t at = first_state * CHUNK + (VARIES ? 0 : first_channel);
    re = tile.re + at;
    im = tile.im + at;
  }

  inline __attribute__((always_inline)) Complex<F> at(int state, int step) const {
    if constexpr (VARIES) {
      return {splat<F>(re[state * CHUNK + step]), splat<F>(im[state * CHUNK + step])};
    } else {
      return {load<F>(re + state * CHUNK), load<F>(im + state * CHUNK)};
    }
  }
};

template <class F>
FUSEPORT_INLINE Complex<F> load_complex(Parts<typename F::Real> tile, int64_t at) {
  return {load<F>(tile.re + at), load<F>(tile.im + at)};
}

template <class F>
FUSEPORT_INLINE void store_complex(Parts<typename F::Real> tile, int64_t at, Complex<F> x) {
  store<F>(tile.re + at, x.re);
  store<F>(tile.im + at, x.im);
}

template <class F>
FUSEPORT_INLINE Complex<F> product(Complex<F> x, Complex<F> y) {
  return {x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re};
}

template <class F>
FUSEPORT_INLINE typename F::Vector real_product(Complex<F> x, Complex<F> y) {
  return x.re * y.re - x.im * y.im;
}

// exp(δ̂·A), of a δ̂ that is bounded.
template <class F>
FUSEPORT_INLINE Complex<F> complex_decay(typename F::Vector delta, const Rate<F>& rate) {
  return turned<F>(exp2_of_product<F>(delta, rate.exponent), delta, rate.turns, rate.turns_low);
}

// The state after a step.
template <class F>
FUSEPORT_INLINE Complex<F> complex_step(Complex<F> a, Complex<F> h, typename F::Vector drive,
                                        Complex<F> B) {
  const Complex<F> kept = product(a, h);
  return {kept.re + drive * B.re, kept.im + drive * B.im};
}

// As scan_states.
template <class F, bool B_VARIES, bool C_VARIES, int STATES>
static void scan_complex_states(const ComplexForwardScratch<F>& s, int64_t n, int channel,
                                int steps) {
  using Vector = typename F::Vector;
  using Real = typename F::Real;
  const Real *deltas = s.delta + channel, *drives = s.drive + channel;
  Real* ys = s.y + channel;
  Rate<F> rate[STATES];
  Complex<F> h[STATES];
  const ComplexRows<F, B_VARIES> B(s.B, n, channel);
  const ComplexRows<F, C_VARIES> C(s.C, n, channel);
  for (int i = 0; i < STATES; ++i) {
    rate[i] = Rate<F>::at(s, (n + i) * BLOCK + channel);
    h[i] = load_complex<F>(s.state, (n + i) * BLOCK + channel);
  }
  for (int t = 0; t < steps; ++t) {
    const int at = t * BLOCK;
    const Vector delta = load<F>(deltas + at), drive = load<F>(drives + at);
    Vector y = Vector{};
#pragma GCC unroll 4
    for (int i = 0; i < STATES; ++i) {
      const Complex<F> a = complex_decay<F>(delta, rate[i]);
      h[i] = complex_step<F>(a, h[i], drive, B.at(i, t));
      y += real_product<F>(C.at(i, t), h[i]);
    }
    store<F>(ys + at, load<F>(ys + at) + (Real)2 * y);
  }
  for (int i = 0; i < STATES; ++i) store_complex<F>(s.state, (n + i) * BLOCK + channel, h[i]);
}

template <class F, bool B_VARIES, bool C_VARIES>
static void scan_complex_chunk(const ComplexForwardScratch<F>& s, const Problem& p, int channels,
                               int steps) {
  constexpr int STATES = 4;  // at a time
  for (int channel = 0; channel < channels; channel += F::LANES) {
    int64_t n = 0;
    for (; n + STATES <= p.states; n += STATES)
      scan_complex_states<F, B_VARIES, C_VARIES, STATES>(s, n, channel, steps);
    for (; n < p.states; ++n)
      scan_complex_states<F, B_VARIES, C_VARIES, 1>(s, n, channel, steps);
  }
}

template <class F, class Stored>
static void complex_forward_unit(const Problem& p, const Forward& f, int64_t index,
                                 void* scratch) {
  using Real = typename F::Real;
  const Unit unit(p, index);
  const ComplexForwardScratch<F> s(p, scratch);
  const auto scan = p.B.varies ? (p.C.varies ? scan_complex_chunk<F, true, true>
                                             : scan_complex_chunk<F, true, false>)
                               : (p.C.varies ? scan_complex_chunk<F, false, true>
                                             : scan_complex_chunk<F, false, false>);
  const auto save = [&](int64_t chunk) {
    Real* to = saved_complex_states((Real*)f.chunk_states, p, unit, chunk);
    store_complex_states<F>(s.state, p.states, unit, to, p.channels, 1);
  };
  load_rates<F>(p, unit, s);
  load_channels(p.D, unit, s.D);
  load_channels(p.delta_bias, unit, s.bias);
  clear(p.states * BLOCK, s.state.re, s.state.im);

  for (int64_t chunk = 0; chunk < p.chunks(); ++chunk) {
    const Steps steps(p, chunk);
    save(chunk);
    prepare_scan<F, Stored>(s, p, unit, steps);
    load_complex_coefficient<F, Stored>(p.B, p.states, unit, steps, s.B);
    load_complex_coefficient<F, Stored>(p.C, p.states, unit, steps, s.C);
    scan(s, p, unit.channels, steps.count);
    if (f.out.data) write_out<F, Stored>(s, p, f, unit, steps);
  }
  save(p.chunks());
  if (f.last_state) {
    Real* to = (Real*)f.last_state + 2 * (unit.batch * p.channels + unit.channel) * p.states;
    store_complex_states<F>(s.state, p.states, unit, to, 1, p.states);
  }
}

}  // namespace fuseport::selective_scan::FUSEPORT_ISA
