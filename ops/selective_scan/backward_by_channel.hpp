// The backward kernel for the problems of by_channel.hpp: states in lanes, one channel after another. The
// formulas are at the top of reference.py, the names of what is computed in backward.hpp.
#pragma once

#include "selective_scan/by_channel.hpp"

namespace fuseport::selective_scan::FUSEPORT_ISA {

constexpr int64_t STRETCH = 4 * CHUNK;  // steps for which B, C and their gradients are laid out

// What is known of one channel at as many steps as a vector has lanes.
template <class F>
struct StepsBack : DividedSteps<F> {
  typename F::Real delta[F::LANES], slope[F::LANES], drive[F::LANES], dy[F::LANES], gate[F::LANES];
  typename F::Real y[F::LANES], ddrive[F::LANES], ddelta[F::LANES];
};

// Few arrays, since the addresses of many would not stay in registers.
template <class F>
struct ChannelBackwardScratch {
  using Real = typename F::Real;
  static constexpr int B = 0, C = STATES, dB = 2 * STATES, dC = 3 * STATES, COEFFICIENTS = 4 * STATES;
  static constexpr int BEFORE = 0, DECAY = STATES, HISTORY = 2 * STATES;
  DecayScratch<F> decays;
  Real* coefficients;      // [step of a stretch][COEFFICIENTS]
  Real *states, *adjoint;  // [chunk of the stretch][channel][state]; [channel][state]
  StepsBack<F>* steps;     // of one channel in a stretch
  Real* history;           // [step of a chunk][HISTORY]: h_{t-1}, and a_t
  Real *D, *bias;
  double *dA, *dD, *dbias;  // sums over all steps
  int64_t bytes;

  ChannelBackwardScratch(const Problem&, void* base) {
    Scratch s{(char*)base};
    decays.take(s);
    s.take(STRETCH * COEFFICIENTS, &coefficients);
    s.take(STRETCH / CHUNK * BLOCK * STATES, &states);
    s.take(BLOCK * STATES, &adjoint);
    s.take(STRETCH / F::LANES, &steps);
    s.take(CHUNK * HISTORY, &history);
    s.take(BLOCK, &D, &bias);
    s.take(BLOCK * STATES, &dA);
    s.take(BLOCK, &dD, &dbias);
    bytes = s.used;
  }
};

static bool by_channel(const Problem& p, const Backward& k) {
  return by_channel(p) && k.dout.time == 1 && k.du.time == 1 && k.ddelta.time == 1 &&
         (!p.z.data || k.dz.time == 1);
}

// What a channel reads and writes in a stretch.
template <class Stored>
struct BackwardRows {
  const Stored *u, *delta, *z, *dout;
  Stored *du, *ddelta, *dz;
};

// Before the states of a stretch. Returns whence decays come.
template <class F, class Stored, bool GATED>
static Source prepare_channel(const ChannelBackwardScratch<F>& s, const Problem& p,
                              const Tables<F>& tables, const BackwardRows<Stored>& rows,
                              int channel, int64_t count) {
  using Vector = typename F::Vector;
  using Real = typename F::Real;
  constexpr int LANES = F::LANES;
  const Vector bias = splat<F>(s.bias[channel]);
  Source source = Source::FINE;
  each_vector<F>(count, [&](int64_t t, auto part) {
    StepsBack<F>* steps = s.steps + t / LANES;
    const Vector raw = part.load(rows.delta + t) + bias;
    Vector delta = raw, slope = splat<F>(1);
    if (p.softplus) {
      const Vector e = exp_of_minus_magnitude<F>(raw);
      delta = softplus_of<F>(raw, e);
      slope = logistic_of<F>(raw, e);  // 1 above 20, as torch has it
    }
    delta = part.chosen(delta, 0);  // which leaves states as they are
    tables.divide(delta, *steps);
    const Source found = tables.source(delta, *steps);
    source = found > source ? found : source;
    store<F>(steps->delta, delta);
    store<F>(steps->slope, slope);
    store<F>(steps->drive, delta * part.load(rows.u + t));
    Vector dy = part.load(rows.dout + t);
    if constexpr (GATED) {
      const Vector z = part.load(rows.z + t), sigma = logistic<F>(z);
      store<F>(steps->gate, dy * (sigma * ((Real)1 + z * ((Real)1 - sigma))));
      dy *= z * sigma;
    }
    store<F>(steps->dy, dy);
  });
  if (source == Source::EACH)  // of all steps
    for (StepsBack<F>* steps = s.steps; steps < s.steps + (count + LANES - 1) / LANES; ++steps)
      store<F>(steps->rest, bounded<F>(load<F>(steps->delta), splat<F>(s.decays.limit[channel])));
  return source;
}

// After them.
template <class F, class Stored, bool GATED>
static void finish_channel(const ChannelBackwardScratch<F>& s, const BackwardRows<Stored>& rows,
                           int channel, int64_t count) {
  using Vector = typename F::Vector;
  constexpr int LANES = F::LANES;
  const Vector D = splat<F>(s.D[channel]);
  Vector dD = Vector{}, dbias = Vector{};
  each_vector<F>(count, [&](int64_t t, auto part) {
    const StepsBack<F>* steps = s.steps + t / LANES;
    const Vector u = part.load(rows.u + t), dy = load<F>(steps->dy);
    const Vector ddrive = load<F>(steps->ddrive);
    const Vector ddelta = (u * ddrive + load<F>(steps->ddelta)) * load<F>(steps->slope);
    dD += dy * u;
    dbias += ddelta;
    part.store(ddelta, rows.ddelta + t);
    part.store(load<F>(steps->delta) * ddrive + D * dy, rows.du + t);
    if constexpr (GATED)
      part.store(load<F>(steps->gate) * (load<F>(steps->y) + D * u), rows.dz + t);
  });
  for (int i = 0; i < LANES; ++i) {
    s.dD[channel] += (double)dD[i];
    s.dbias[channel] += (double)dbias[i];
  }
}

// The states of a channel, through a chunk and back.
template <class F, bool GATED, Source SOURCE>
class ChannelBack {
  using Vector = typename F::Vector;
  using Real = typename F::Real;
  using S = ChannelBackwardScratch<F>;
  static constexpr int LANES = F::LANES, VECTORS = STATES / LANES;

  const Tables<F> tables;  // of its own, or else stores might change it
  Vector h[VECTORS], g[VECTORS], A[VECTORS], dA[VECTORS];

 public:
  FUSEPORT_INLINED ChannelBack(const Tables<F>& tables, const Real* A_, const Real* state,
                               const Real* adjoint)
      : tables(tables) {
    for (int v = 0; v < VECTORS; ++v) {
      h[v] = load<F>(state + v * LANES);
      g[v] = load<F>(adjoint + v * LANES);
      A[v] = load<F>(A_ + v * LANES);
      dA[v] = Vector{};
    }
  }

  // As many steps as a vector has lanes; some of them may lie past the last one.
  FUSEPORT_INLINED void forward(StepsBack<F>& steps, const Real* coefficients, Real* history) {
    Vector fours[LANES / 4];
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += 4) {
      Vector products[4];
#pragma GCC unroll 4
      for (int j = i; j < i + 4; ++j) {
        const Vector rest = splat<F>(steps.rest[j]), drive = splat<F>(steps.drive[j]);
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; ++v) {
          const Real* from = coefficients + j * S::COEFFICIENTS + v * LANES;
          Real* saved = history + j * S::HISTORY + v * LANES;
          const Vector a = tables.template decay<SOURCE>(rest, steps.index[j], v);
          store<F>(saved + S::BEFORE, h[v]);
          store<F>(saved + S::DECAY, a);
          h[v] = a * h[v] + drive * load<F>(from + S::B);
          if constexpr (GATED) {
            const Vector product = load<F>(from + S::C) * h[v];
            products[j - i] = v == 0 ? product : products[j - i] + product;
          }
        }
      }
      if constexpr (GATED) fours[i / 4] = sums_within_quarters<F>(products);
    }
    if constexpr (GATED) store<F>(steps.y, sums_of_quarters<F>(fours));
  }

  // Back through the first `count` of them, or through all of them with WHOLE.
  template <bool WHOLE>
  FUSEPORT_INLINED void back(StepsBack<F>& steps, Real* coefficients, const Real* history,
                             int64_t count) {
    Vector ddrives[LANES / 4], ddeltas[LANES / 4];
#pragma GCC unroll 4
    for (int i = LANES - 4; i >= 0; i -= 4) {
      Vector to_drive[4], to_delta[4];
#pragma GCC unroll 4
      for (int j = i + 3; j >= i; --j) {
        to_drive[j - i] = to_delta[j - i] = Vector{};
        if (!WHOLE && j >= count) continue;
        const Vector drive = splat<F>(steps.drive[j]), delta = splat<F>(steps.delta[j]);
        const Vector dy = splat<F>(steps.dy[j]);
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; ++v) {
          Real* at = coefficients + j * S::COEFFICIENTS + v * LANES;
          const Real* saved = history + j * S::HISTORY + v * LANES;
          const Vector before = load<F>(saved + S::BEFORE);
          g[v] += load<F>(at + S::C) * dy;
          store<F>(at + S::dC, load<F>(at + S::dC) + dy * h[v]);
          store<F>(at + S::dB, load<F>(at + S::dB) + drive * g[v]);
          to_drive[j - i] += g[v] * load<F>(at + S::B);
          g[v] *= load<F>(saved + S::DECAY);
          const Vector dexponent = g[v] * before;
          dA[v] += dexponent * delta;
          to_delta[j - i] += dexponent * A[v];
          h[v] = before;
        }
      }
      ddrives[i / 4] = sums_within_quarters<F>(to_drive);
      ddeltas[i / 4] = sums_within_quarters<F>(to_delta);
    }
    store<F>(steps.ddrive, sums_of_quarters<F>(ddrives));
    store<F>(steps.ddelta, sums_of_quarters<F>(ddeltas));
  }

  FUSEPORT_INLINED void save(Real* adjoint, double* dA_) const {
    for (int v = 0; v < VECTORS; ++v) {
      store<F>(adjoint + v * LANES, g[v]);
      Whole<F>{}.add(dA[v], dA_ + v * LANES);
    }
  }
};

template <class F, bool GATED, Source SOURCE>
static void chunks_back(const ChannelBackwardScratch<F>& s, const Tables<F>& tables,
                        const typename F::Real* A, int channel, int64_t count) {
  using S = ChannelBackwardScratch<F>;
  constexpr int LANES = F::LANES;
  typename F::Real *coefficients = s.coefficients, *history = s.history;
  typename F::Real* adjoint = s.adjoint + channel * STATES;
  StepsBack<F>* steps = s.steps;
  for (int64_t begin = (count - 1) / CHUNK * CHUNK; begin >= 0; begin -= CHUNK) {
    const auto* state = s.states + (begin / CHUNK * BLOCK + channel) * STATES;
    const int64_t end = count - begin < CHUNK ? count : begin + CHUNK;
    ChannelBack<F, GATED, SOURCE> chunk(tables, A, state, adjoint);
    int64_t t = begin;
    for (; t < end; t += LANES)
      chunk.forward(steps[t / LANES], coefficients + t * S::COEFFICIENTS,
                    history + (t - begin) * S::HISTORY);
    while ((t -= LANES) >= begin) {
      auto* of_step = coefficients + t * S::COEFFICIENTS;
      const auto* saved = history + (t - begin) * S::HISTORY;
      if (end - t >= LANES) {
        chunk.template back<true>(steps[t / LANES], of_step, saved, LANES);
      } else {
        chunk.template back<false>(steps[t / LANES], of_step, saved, end - t);
      }
    }
    chunk.save(adjoint, s.dA + channel * STATES);
  }
}

template <class F, class Stored, bool GATED>
static void stretch_back(const ChannelBackwardScratch<F>& s, const Problem& p, const Unit& unit,
                         int channel, int64_t count, const BackwardRows<Stored>& rows) {
  const Tables<F> tables(s.decays, p, unit, channel);
  const auto* A = (const typename F::Real*)p.A + (unit.channel + channel) * STATES;
  const Source source = prepare_channel<F, Stored, GATED>(s, p, tables, rows, channel, count);
  with_source(source, [&]<Source SOURCE>() {
    chunks_back<F, GATED, SOURCE>(s, tables, A, channel, count);
  });
  finish_channel<F, Stored, GATED>(s, rows, channel, count);
}

template <class F, class Stored>
static void backward_by_channel(const Problem& p, const Backward& k, int64_t index,
                                void* scratch) {
  using Real = typename F::Real;
  using S = ChannelBackwardScratch<F>;
  const Unit unit(p, index);
  const S s(p, scratch);
  const int64_t first = unit.batch * p.channels + unit.channel, all = unit.channels * STATES;
  const int64_t part = (unit.batch * p.blocks() + unit.block) * STATES * p.length;
  s.decays.begin(p, unit);
  memcpy(s.adjoint, (const Real*)k.dlast_state + first * STATES, sizeof(Real) * all);
  load_channels(p.D, unit, s.D);
  load_channels(p.delta_bias, unit, s.bias);
  clear(all, s.dA);
  clear(BLOCK, s.dD, s.dbias);

  for (int64_t start = (p.length - 1) / STRETCH * STRETCH; start >= 0; start -= STRETCH) {
    const Steps steps(p, start, STRETCH);
    clear(STRETCH * S::COEFFICIENTS, s.coefficients);
    load_by_step<F, Stored>(p.B, unit, steps, s.coefficients + S::B, S::COEFFICIENTS);
    load_by_step<F, Stored>(p.C, unit, steps, s.coefficients + S::C, S::COEFFICIENTS);
    for (int64_t t = 0; t < steps.count; t += CHUNK) {
      const Real* saved = saved_states((const Real*)k.chunk_states, p, unit, (start + t) / CHUNK);
      load_states<F>(saved, p.channels, 1, STATES, unit, s.decays.tile);
      load_block<F>(s.decays.tile, 1, BLOCK, BLOCK, STATES, s.states + t / CHUNK * BLOCK * STATES,
                    STATES);
    }
    for (int channel = 0; channel < unit.channels; ++channel) {
      const auto row = [&](const auto& q) {
        return (Stored*)first_of<const Stored>(q, unit, steps) + channel * q.channel;
      };
      const BackwardRows<Stored> rows = {
          row(p.u), row(p.delta), p.z.data ? row(p.z) : nullptr,    row(k.dout),
          row(k.du), row(k.ddelta), p.z.data ? row(k.dz) : nullptr};
      const auto back = p.z.data ? stretch_back<F, Stored, true> : stretch_back<F, Stored, false>;
      back(s, p, unit, channel, steps.count, rows);
    }
    for (const auto& [from, to] : {std::pair{S::dB, k.dB}, std::pair{S::dC, k.dC}})
      store_block<F>(s.coefficients + from, S::COEFFICIENTS, steps.count, STATES,
                     (Real*)to + part + start, 1, p.length);
  }
  memcpy(k.dA + first * STATES, s.dA, sizeof(double) * all);
  memcpy(k.dD + first, s.dD, sizeof(double) * unit.channels);
  memcpy(k.ddelta_bias + first, s.dbias, sizeof(double) * unit.channels);
}

}  // namespace fuseport::selective_scan::FUSEPORT_ISA
