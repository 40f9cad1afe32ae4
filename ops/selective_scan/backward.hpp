// The backward kernel: chunks from the last to the first, each with its states computed again from
// the one saved before it. The formulas are at the top of reference.py.
#pragma once

#include "native/parts.hpp"
#include "selective_scan/tiles.hpp"

namespace fuseport::selective_scan::FUSEPORT_ISA {

template <class F>
struct BackwardScratch {
  using Real = typename F::Real;
  static constexpr int STATES = 4;  // at a time
  Real *u, *delta, *step, *slope, *drive;  // tiles; `step` is δ̂ for the exponent, `slope` dδ̂/dδ
  Real *dy, *gate, *y;              // `gate` is what dz is, but for the factor y + D·u
  Real *ddrive, *ddelta;            // cotangents of δ̂·u, and of δ̂ in the exponent
  Real *A, *exponent, *state, *adjoint, *B, *C, *D, *bias, *limit;
  Real *history, *decay;  // of some states through a chunk, one vector each: h_{t-1}, and a_t
  Real* shares;           // of dC and dB of some states through a chunk: see Shares
  double *dA, *dB, *dC, *dD, *dbias;  // sums over all chunks
  int64_t bytes;

  BackwardScratch(const Problem& p, void* base) {
    Scratch s{(char*)base};
    s.take(TILE, &u, &delta, &step, &slope, &drive, &dy, &gate, &y, &ddrive, &ddelta);
    s.take(p.states * BLOCK, &A, &exponent, &state, &adjoint);
    s.take(p.states * CHUNK, &B, &C);
    s.take(BLOCK, &D, &bias, &limit);
    s.take(CHUNK * STATES * F::LANES, &history, &decay);
    s.take(CHUNK * (2 * STATES > F::LANES ? 2 * STATES : F::LANES), &shares);
    s.take(p.states * BLOCK, &dA, &dB, &dC);
    s.take(BLOCK, &dD, &dbias);
    bytes = s.used;
  }
};

// dC and dB of STATES states at one step, which are sums over channels: a vector holds as many of them
// as it has lanes, each as several partial sums.
template <class F, bool B_VARIES, bool C_VARIES, int STATES>
struct Shares {
  using Vector = typename F::Vector;
  using Real = typename F::Real;
  static constexpr int ROWS = STATES * (B_VARIES + C_VARIES);  // dC's before dB's
  static constexpr int FOLDED = ROWS == 0 ? 1 : ROWS < F::LANES ? ROWS : F::LANES;
  static constexpr int VECTORS = ROWS / FOLDED;

  Vector rows[VECTORS + !ROWS][FOLDED];

  FUSEPORT_INLINED Vector& C(int state) { return row(state); }
  FUSEPORT_INLINED Vector& B(int state) { return row(state + (C_VARIES ? STATES : 0)); }

  // Of the first channels of a unit, or else added to those before.
  FUSEPORT_INLINED void put(Real* shares, int step, bool first) {
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
      Real* to = shares + (step * VECTORS + v) * F::LANES;
      const Vector sums = partial_sums<F, FOLDED>(rows[v]);
      store<F>(to, first ? sums : load<F>(to) + sums);
    }
  }

  // Of states from `n` on, into rows (N, l) of one unit's part of dB and dC.
  static void sum(const Real* shares, int64_t n, const Steps& steps, int64_t length, Real* dB,
                  Real* dC) {
    constexpr int LANES = F::LANES;
    for (int v = 0; v < VECTORS; ++v)
      for (int t = 0; t < steps.count; t += LANES) {
        Vector of_step[LANES];  // past the last step: of an earlier chunk, and not stored
        load_columns<F>(shares + (t * VECTORS + v) * LANES, VECTORS * LANES, of_step);
#pragma GCC unroll 16
        for (int r = 0; r < FOLDED; ++r) {
          Vector sum = of_step[r];
          for (int i = r + FOLDED; i < LANES; i += FOLDED) sum += of_step[i];
          const int row = v * FOLDED + r;
          const bool of_C = C_VARIES && row < STATES;
          Real* to = (of_C ? dC : dB) + (n + row % STATES) * length + steps.start + t;
          if (steps.count - t >= LANES) {
            store<F>(to, sum);
          } else {
            for (int j = 0; j < steps.count - t; ++j) to[j] = sum[j];
          }
        }
      }
  }

 private:
  FUSEPORT_INLINED Vector& row(int i) { return rows[i / FOLDED][i % FOLDED]; }
};

// STATES states from `n` on, of the channels of one vector: forward through the chunk, and back. NEAR:
// all powers are, see Nearness.
template <class F, bool B_VARIES, bool C_VARIES, bool NEAR, int STATES>
static void backward_states(const BackwardScratch<F>& s, int64_t n, int channel, int channels,
                            int steps, bool gated, const Ahead& ahead, Ahead::Place& place) {
  using Vector = typename F::Vector;
  using Real = typename F::Real;
  constexpr int LANES = F::LANES;
  // Of their own, or else stores might change them.
  const Real *deltas = s.delta + channel, *exponents = s.step + channel;
  const Real *drives = s.drive + channel, *dys = s.dy + channel;
  Real *ys = s.y + channel, *ddrives = s.ddrive + channel, *ddeltas = s.ddelta + channel;
  Real *history = s.history, *decays = s.decay;
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

  Ahead::Place soon = place;
  for (int t = 0; t < steps; ++t) {
    const int at = t * BLOCK;
    const Vector step = load<F>(exponents + at), drive = load<F>(drives + at);
    ahead.some(soon);
    Vector y = load<F>(ys + at);
#pragma GCC unroll 4
    for (int i = 0; i < STATES; ++i) {
      const Vector a = decay<F, NEAR>(step, exponent[i]);
      store<F>(history + (t * STATES + i) * LANES, h[i]);
      store<F>(decays + (t * STATES + i) * LANES, a);
      h[i] = a * h[i] + drive * B[i][t];
      if (gated) y += C[i][t] * h[i];
    }
    if (gated) store<F>(ys + at, y);
  }

  // Lanes past the last channel hold zeros, or NaN where B or C is not finite: out of the sums.
  const bool partial = channels - channel < LANES;
  for (int t = steps - 1; t >= 0; --t) {
    const int at = t * BLOCK;
    const Vector delta = load<F>(deltas + at), drive = load<F>(drives + at);
    const Vector dy = load<F>(dys + at);
    ahead.some(soon);
    Vector ddrive = load<F>(ddrives + at), ddelta = load<F>(ddeltas + at);
    Shares<F, B_VARIES, C_VARIES, STATES> shares;
#pragma GCC unroll 4
    for (int i = 0; i < STATES; ++i) {
      const int saved = (t * STATES + i) * LANES;
      const Vector before = load<F>(history + saved), a = load<F>(decays + saved);
      g[i] += C[i][t] * dy;
      const Vector to_C = dy * h[i], to_B = g[i] * drive;
      if constexpr (C_VARIES) {
        shares.C(i) = partial ? first_lanes<F>(to_C, channels - channel) : to_C;
      } else {
        dC[i] += to_C;
      }
      if constexpr (B_VARIES) {
        shares.B(i) = partial ? first_lanes<F>(to_B, channels - channel) : to_B;
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
    shares.put(s.shares, t, channel == 0);
  }
  place = soon;

  for (int i = 0; i < STATES; ++i) {
    const int64_t row = (n + i) * BLOCK + channel;
    store<F>(s.adjoint + row, g[i]);
    Whole<F>{}.add(dA[i], s.dA + row);
    if constexpr (!B_VARIES) Whole<F>{}.add(dB[i], s.dB + row);
    if constexpr (!C_VARIES) Whole<F>{}.add(dC[i], s.dC + row);
  }
}

// The same of all channels.
template <class F, bool B_VARIES, bool C_VARIES, bool NEAR, int STATES>
static void backward_channels(const BackwardScratch<F>& s, const Problem& p, int64_t n,
                              const Unit& unit, const Steps& steps, const Ahead& ahead,
                              Ahead::Place& place, typename F::Real* dB, typename F::Real* dC) {
  for (int channel = 0; channel < unit.channels; channel += F::LANES)
    backward_states<F, B_VARIES, C_VARIES, NEAR, STATES>(s, n, channel, unit.channels, steps.count,
                                                         p.z.data != nullptr, ahead, place);
  Shares<F, B_VARIES, C_VARIES, STATES>::sum(s.shares, n, steps, p.length, dB, dC);
}

template <class F, bool B_VARIES, bool C_VARIES, bool NEAR>
static void backward_chunk(const BackwardScratch<F>& s, const Problem& p, const Unit& unit,
                           const Steps& steps, Ahead& ahead, typename F::Real* dB,
                           typename F::Real* dC) {
  constexpr int STATES = BackwardScratch<F>::STATES;
  ahead.share(2 * visits<F, STATES>(p, unit.channels, steps.count));  // forward and back
  Ahead::Place place = ahead.begin();
  int64_t n = 0;
  for (; n + STATES <= p.states; n += STATES)
    backward_channels<F, B_VARIES, C_VARIES, NEAR, STATES>(s, p, n, unit, steps, ahead, place, dB, dC);
  for (; n < p.states; ++n)
    backward_channels<F, B_VARIES, C_VARIES, NEAR, 1>(s, p, n, unit, steps, ahead, place, dB, dC);
}

template <class F, bool NEAR>
static auto backward_chunk_for(const Problem& p) {
  if (p.B.varies)
    return p.C.varies ? backward_chunk<F, true, true, NEAR> : backward_chunk<F, true, false, NEAR>;
  return p.C.varies ? backward_chunk<F, false, true, NEAR> : backward_chunk<F, false, false, NEAR>;
}

// Before the states: δ̂ and its slope, the drive, and the gate's share of the cotangent. Whether all
// powers are near.
template <class F, class Stored, class Tiles>
static bool prepare(const Tiles& s, const Problem& p, const Backward& k, const Unit& unit,
                    const Steps& steps) {
  using Vector = typename F::Vector;
  using Real = typename F::Real;
  load_tile<F, Stored>(p.u, unit, steps, s.u);
  load_tile<F, Stored>(p.delta, unit, steps, s.delta);
  load_tile<F, Stored>(k.dout, unit, steps, s.dy);
  if (p.z.data) load_tile<F, Stored>(p.z, unit, steps, s.gate);
  clear(BLOCK * steps.count, s.y, s.ddrive, s.ddelta);
  Nearness<F> nearness;
  for (int t = 0; t < steps.count; ++t)
    for (int c = 0; c < unit.channels; c += F::LANES) {
      const int at = t * BLOCK + c;
      const Vector raw = load<F>(s.delta + at) + load<F>(s.bias + c);
      Vector delta = raw, slope = splat<F>(1);
      if (p.softplus) {
        const Vector e = exp_of_minus_magnitude<F>(raw);
        delta = softplus_of<F>(raw, e);
        slope = raw > (Real)20 ? slope : logistic_of<F>(raw, e);
      }
      store<F>(s.delta + at, delta);
      const Vector limit = load<F>(s.limit + c);
      nearness.add(delta, limit);
      store<F>(s.step + at, bounded<F>(delta, limit));
      store<F>(s.slope + at, slope);
      store<F>(s.drive + at, delta * load<F>(s.u + at));
      if (p.z.data) {
        const Vector z = load<F>(s.gate + at), dout = load<F>(s.dy + at);
        const Vector sigma = logistic<F>(z);
        store<F>(s.dy + at, dout * (z * sigma));
        store<F>(s.gate + at, dout * (sigma * ((Real)1 + z * ((Real)1 - sigma))));
      }
    }
  return nearness.all();
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
    Whole<F>{}.add(dD, s.dD + c);
    Whole<F>{}.add(dbias, s.dbias + c);
  }
  store_tile<F, Stored>(s.ddrive, unit, steps, k.du);
  store_tile<F, Stored>(s.ddelta, unit, steps, k.ddelta);
  if (p.z.data) store_tile<F, Stored>(s.gate, unit, steps, k.dz);
}

// What a chunk reads and writes.
template <class F, class Stored>
static void foresee_chunk(const Problem& p, const Backward& k, const Unit& unit, int64_t chunk,
                          Ahead* ahead) {
  using Real = typename F::Real;
  const Steps steps(p, chunk);
  constexpr int64_t SIZE = sizeof(Real);
  ahead->add(saved_states((const Real*)k.chunk_states, p, unit, chunk), p.channels * SIZE, p.states,
             unit.channels * SIZE);
  for (const Sequence& s : {p.u, p.delta, k.dout}) foresee_tile<Stored>(s, unit, steps, ahead);
  for (const MutableSequence& s : {k.du, k.ddelta}) foresee_tile<Stored>(s, unit, steps, ahead);
  if (!p.z.data) return;
  foresee_tile<Stored>(p.z, unit, steps, ahead);
  foresee_tile<Stored>(k.dz, unit, steps, ahead);
}

template <class F, class Stored>
static void backward_unit(const Problem& p, const Backward& k, int64_t index, void* scratch) {
  using Real = typename F::Real;
  const Unit unit(p, index);
  const BackwardScratch<F> s(p, scratch);
  const int64_t row = unit.batch * p.channels + unit.channel;
  load_A<F>(p, unit, s.A);
  load_A<F>(p, unit, s.exponent);
  to_exponents<F>(p.states, s.exponent, s.limit);
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
    const bool near = prepare<F, Stored>(s, p, k, unit, steps);
    const auto run = near ? backward_chunk_for<F, true>(p) : backward_chunk_for<F, ALWAYS_NEAR>(p);
    Ahead ahead;
    if (chunk > 0) foresee_chunk<F, Stored>(p, k, unit, chunk - 1, &ahead);
    run(s, p, unit, steps, ahead, (Real*)k.dB + part, (Real*)k.dC + part);
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
