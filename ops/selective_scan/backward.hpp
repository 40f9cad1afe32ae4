// The backward kernel: chunks from the last to the first, each with its states computed again from
// the one saved before it. The formulas are at the top of reference.py.
#pragma once

#include "selective_scan/tiles.hpp"

namespace fuseport::selective_scan::FUSEPORT_ISA {

template <class F>
struct BackwardScratch {
  using Real = typename F::Real;
  static constexpr int STATES = 4;  // at a time
  Real *u, *delta, *step, *slope, *drive;  // tiles; `step` is δ̂ for the exponent, `slope` dδ̂/dδ
  Real *dy, *gate, *y;              // `gate` is what dz is, but for the factor y + D·u
  Real *ddrive, *ddelta;            // cotangents of δ̂·u, and of δ̂ in the exponent
  Real *A, *exponent, *state, *adjoint, *B, *C, *D, *bias;
  Real *history, *decay;    // of some states through a chunk, one vector each: h_{t-1}, and a_t
  Real *lanes_B, *lanes_C;  // dB and dC of some states through a chunk, one vector each
  double *dA, *dB, *dC, *dD, *dbias;  // sums over all chunks
  int64_t bytes;

  BackwardScratch(const Problem& p, void* base) {
    Scratch s{(char*)base};
    s.take(TILE, &u, &delta, &step, &slope, &drive, &dy, &gate, &y, &ddrive, &ddelta);
    s.take(p.states * BLOCK, &A, &exponent, &state, &adjoint);
    s.take(p.states * CHUNK, &B, &C);
    s.take(BLOCK, &D, &bias);
    s.take(CHUNK * STATES * F::LANES, &history, &decay, &lanes_B, &lanes_C);
    s.take(p.states * BLOCK, &dA, &dB, &dC);
    s.take(BLOCK, &dD, &dbias);
    bytes = s.used;
  }
};

template <class F>
FUSEPORT_INLINE void add_to(double* total, typename F::Vector v) {
  typename F::Real lanes[F::LANES];
  store<F>(lanes, v);
  for (int i = 0; i < F::LANES; ++i) total[i] += (double)lanes[i];
}

// STATES states from `n` on, of the channels of one vector: forward through the chunk, and back.
template <class F, bool B_VARIES, bool C_VARIES, int STATES>
static void backward_states(const BackwardScratch<F>& s, int64_t n, int channel, int channels,
                            int steps, bool gated) {
  using Vector = typename F::Vector;
  using Real = typename F::Real;
  constexpr int LANES = F::LANES;
  // Of their own, or else stores might change them.
  const Real *deltas = s.delta + channel, *exponents = s.step + channel;
  const Real *drives = s.drive + channel, *dys = s.dy + channel;
  Real *ys = s.y + channel, *ddrives = s.ddrive + channel, *ddeltas = s.ddelta + channel;
  Real *history = s.history, *decays = s.decay, *lanes_B = s.lanes_B, *lanes_C = s.lanes_C;
  Vector exponent[STATES], A[STATES], h[STATES], g[STATES], dA[STATES], dB[STATES], dC[STATES];
  Row<F, B_VARIES> B[STATES];
  Row<F, C_VARIES> C[STATES];
  for (int i = 0; i < STATES; ++i) {
    exponent[i] = load<F>(s.exponent + (n + i) * BLOCK + channel);
    A[i] = load<F>(s.A + (n + i) * BLOCK + channel);
    h[i] = load<F>(s.state + (n + i) * BLOCK + channel);
    g[i] = load<F>(s.adjoint + (n + i) * BLOCK + channel);
    B[i] = Row<F, B_VARIES>::at(s.B, n + i, channel);
    C[i] = Row<F, C_VARIES>::at(s.C, n + i, channel);
    dA[i] = dB[i] = dC[i] = Vector{};
  }

  for (int t = 0; t < steps; ++t) {
    const int at = t * BLOCK;
    const Vector step = load<F>(exponents + at), drive = load<F>(drives + at);
    Vector y = load<F>(ys + at);
#pragma GCC unroll 4
    for (int i = 0; i < STATES; ++i) {
      const Vector a = exp2_of_product<F>(step, exponent[i]);
      store<F>(history + (t * STATES + i) * LANES, h[i]);
      store<F>(decays + (t * STATES + i) * LANES, a);
      h[i] = a * h[i] + drive * B[i][t];
      if (gated) y += C[i][t] * h[i];
    }
    if (gated) store<F>(ys + at, y);
  }

  // Lanes past the last channel hold zeros, or NaN where B or C is not finite: out of the sums.
  const bool partial = channels - channel < LANES;
  const bool first = channel == 0;
  for (int t = steps - 1; t >= 0; --t) {
    const int at = t * BLOCK;
    const Vector delta = load<F>(deltas + at), drive = load<F>(drives + at);
    const Vector dy = load<F>(dys + at);
    Vector ddrive = load<F>(ddrives + at), ddelta = load<F>(ddeltas + at);
#pragma GCC unroll 4
    for (int i = 0; i < STATES; ++i) {
      const int saved = (t * STATES + i) * LANES, lanes = (i * CHUNK + t) * LANES;
      const Vector before = load<F>(history + saved), a = load<F>(decays + saved);
      g[i] += C[i][t] * dy;
      Vector to_C = dy * h[i], to_B = g[i] * drive;
      if constexpr (C_VARIES) {
        if (partial) to_C = first_lanes<F>(to_C, channels - channel);
        store<F>(lanes_C + lanes, first ? to_C : load<F>(lanes_C + lanes) + to_C);
      } else {
        dC[i] += to_C;
      }
      if constexpr (B_VARIES) {
        if (partial) to_B = first_lanes<F>(to_B, channels - channel);
        store<F>(lanes_B + lanes, first ? to_B : load<F>(lanes_B + lanes) + to_B);
      } else {
        dB[i] += to_B;
      }
      ddrive += g[i] * B[i][t];
      g[i] *= a;
      const Vector dexponent = g[i] * before;
      dA[i] += dexponent * delta;
      ddelta += dexponent * A[i];
      h[i] = before;
    }
    store<F>(ddrives + at, ddrive);
    store<F>(ddeltas + at, ddelta);
  }

  for (int i = 0; i < STATES; ++i) {
    const int64_t row = (n + i) * BLOCK + channel;
    store<F>(s.adjoint + row, g[i]);
    add_to<F>(s.dA + row, dA[i]);
    if constexpr (!B_VARIES) add_to<F>(s.dB + row, dB[i]);
    if constexpr (!C_VARIES) add_to<F>(s.dC + row, dC[i]);
  }
}

// Sums lanes into rows (N, l) of one unit's part of dB or dC.
template <class F>
static void sum_lanes(const typename F::Real* lanes, int states, int64_t n, const Steps& steps,
                      int64_t length, typename F::Real* part) {
  constexpr int LANES = F::LANES;
  for (int i = 0; i < states; ++i)
    for (int t = 0; t < steps.count; t += LANES) {
      typename F::Vector rows[LANES];  // past the last step: of an earlier chunk, and not stored
#pragma GCC unroll 16
      for (int j = 0; j < LANES; ++j) rows[j] = load<F>(lanes + (i * CHUNK + t + j) * LANES);
      const typename F::Vector sums = sums_of_lanes<F>(rows);
      typename F::Real* to = part + (n + i) * length + steps.start + t;
      if (steps.count - t >= LANES) {
        store<F>(to, sums);
      } else {
        for (int j = 0; j < steps.count - t; ++j) to[j] = sums[j];
      }
    }
}

template <class F, bool B_VARIES, bool C_VARIES>
static void backward_chunk(const BackwardScratch<F>& s, const Problem& p, const Unit& unit,
                           const Steps& steps, typename F::Real* dB, typename F::Real* dC) {
  constexpr int STATES = BackwardScratch<F>::STATES;
  for (int64_t n = 0; n < p.states;) {
    const int states = n + STATES <= p.states ? STATES : 1;
    auto run = states == 1 ? backward_states<F, B_VARIES, C_VARIES, 1>
                           : backward_states<F, B_VARIES, C_VARIES, STATES>;
    for (int channel = 0; channel < unit.channels; channel += F::LANES)
      run(s, n, channel, unit.channels, steps.count, p.z.data != nullptr);
    if (B_VARIES) sum_lanes<F>(s.lanes_B, states, n, steps, p.length, dB);
    if (C_VARIES) sum_lanes<F>(s.lanes_C, states, n, steps, p.length, dC);
    n += states;
  }
}

// Before the states: δ̂ and its slope, the drive, and the gate's share of the cotangent.
template <class F, class Stored, class Tiles>
static void prepare(const Tiles& s, const Problem& p, const Backward& k, const Unit& unit,
                    const Steps& steps) {
  using Vector = typename F::Vector;
  using Real = typename F::Real;
  load_tile<F, Stored>(p.u, unit, steps, s.u);
  load_tile<F, Stored>(p.delta, unit, steps, s.delta);
  load_tile<F, Stored>(k.dout, unit, steps, s.dy);
  if (p.z.data) load_tile<F, Stored>(p.z, unit, steps, s.gate);
  clear(BLOCK * steps.count, s.y, s.ddrive, s.ddelta);
  for (int t = 0; t < steps.count; ++t)
    for (int c = 0; c < unit.channels; c += F::LANES) {
      const int at = t * BLOCK + c;
      const Vector raw = load<F>(s.delta + at) + load<F>(s.bias + c);
      Vector delta = raw, slope = splat<F>(1);
      if (p.softplus) {
        delta = softplus<F>(raw);
        slope = raw > (Real)20 ? slope : logistic<F>(raw);
      }
      store<F>(s.delta + at, delta);
      store<F>(s.step + at, bounded<F>(delta));
      store<F>(s.slope + at, slope);
      store<F>(s.drive + at, delta * load<F>(s.u + at));
      if (p.z.data) {
        const Vector z = load<F>(s.gate + at), dout = load<F>(s.dy + at);
        const Vector sigma = logistic<F>(z);
        store<F>(s.dy + at, dout * (z * sigma));
        store<F>(s.gate + at, dout * (sigma * ((Real)1 + z * ((Real)1 - sigma))));
      }
    }
}

// After them: du, dδ and dz of the chunk, and its share of dD and the bias's gradient.
template <class F, class Stored, class Tiles>
static void finish(const Tiles& s, const Problem& p, const Backward& k, const Unit& unit,
                   const Steps& steps) {
  using Vector = typename F::Vector;
  for (int c = 0; c < unit.channels; c += F::LANES) {
    const Vector D = load<F>(s.D + c);
    Vector dD = Vector{}, dbias = Vector{};
    for (int t = 0; t < steps.count; ++t) {
      const int at = t * BLOCK + c;
      const Vector u = load<F>(s.u + at), dy = load<F>(s.dy + at), ddrive = load<F>(s.ddrive + at);
      const Vector ddelta = (u * ddrive + load<F>(s.ddelta + at)) * load<F>(s.slope + at);
      dD += dy * u;
      dbias += ddelta;
      store<F>(s.ddelta + at, ddelta);
      store<F>(s.ddrive + at, load<F>(s.delta + at) * ddrive + D * dy);
      if (p.z.data) store<F>(s.gate + at, load<F>(s.gate + at) * (load<F>(s.y + at) + D * u));
    }
    add_to<F>(s.dD + c, dD);
    add_to<F>(s.dbias + c, dbias);
  }
  store_tile<F, Stored>(s.ddrive, unit, steps, k.du);
  store_tile<F, Stored>(s.ddelta, unit, steps, k.ddelta);
  if (p.z.data) store_tile<F, Stored>(s.gate, unit, steps, k.dz);
}

template <class F, class Stored>
static void backward_unit(const Problem& p, const Backward& k, int64_t index, void* scratch) {
  using Real = typename F::Real;
  const Unit unit(p, index);
  const BackwardScratch<F> s(p, scratch);
  const int64_t row = unit.batch * p.channels + unit.channel;
  load_A<F>(p, unit, s.A);
  load_A<F>(p, unit, s.exponent);
  to_exponents<F>(p.states * BLOCK, s.exponent);
  load_states<F>((const Real*)k.dlast_state + row * p.states, 1, p.states, p.states, unit,
                 s.adjoint);
  load_channels(p.D, unit, s.D);
  load_channels(p.delta_bias, unit, s.bias);
  clear(p.states * BLOCK, s.dA, s.dB, s.dC);
  clear(BLOCK, s.dD, s.dbias);

  const int64_t part = (unit.batch * p.blocks() + unit.block) * p.states * p.length;
  for (int64_t chunk = p.chunks() - 1; chunk >= 0; --chunk) {
    const Steps steps(p, chunk);
    load_states<F>(saved_states((const Real*)k.chunk_states, p, unit, chunk), p.channels, 1,
                   p.states, unit, s.state);
    load_coefficient<F, Stored>(p.B, p.states, unit, steps, s.B);
    load_coefficient<F, Stored>(p.C, p.states, unit, steps, s.C);
    prepare<F, Stored>(s, p, k, unit, steps);
    auto run = p.B.varies
                   ? (p.C.varies ? backward_chunk<F, true, true> : backward_chunk<F, true, false>)
                   : (p.C.varies ? backward_chunk<F, false, true> : backward_chunk<F, false, false>);
    run(s, p, unit, steps, (Real*)k.dB + part, (Real*)k.dC + part);
    finish<F, Stored>(s, p, k, unit, steps);
  }

  const auto write = [&](const double* tile, void* total) {
    store_states<F64>(tile, p.states, unit, (double*)total + row * p.states, 1, p.states);
  };
  write(s.dA, k.dA);
  if (!p.B.varies) write(s.dB, k.dB);
  if (!p.C.varies) write(s.dC, k.dC);
  for (int c = 0; c < unit.channels; ++c) {
    k.dD[row + c] = s.dD[c];
    k.ddelta_bias[row + c] = s.dbias[c];
  }
}

// One row of dB or dC: the sum over the blocks of its group, in their order.
template <class Real, class Stored>
static void sum_row(const Problem& p, const SumUnits& k, int64_t row) {
  const int64_t n = row % p.states, group = row / p.states % k.groups;
  const int64_t batch = row / p.states / k.groups, blocks = p.blocks() / k.groups;
  const Real* first = (const Real*)k.parts +
                      ((batch * p.blocks() + group * blocks) * p.states + n) * p.row();
  Stored* to = (Stored*)k.total + row * p.row();
  for (int64_t start = 0; start < p.row(); start += CHUNK) {
    const int count = (int)(p.row() - start < CHUNK ? p.row() - start : CHUNK);
    double total[CHUNK] = {};
    for (int64_t block = 0; block < blocks; ++block) {
      const Real* from = first + block * p.states * p.row() + start;
      for (int t = 0; t < count; ++t) total[t] += (double)from[t];
    }
    for (int t = 0; t < count; ++t) from_real((Real)total[t], to + start + t);
  }
}

}  // namespace fuseport::selective_scan::FUSEPORT_ISA
