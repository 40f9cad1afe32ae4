// Backward: one unit is a batch entry and a group, whose heads' parts of dq and dk are added up here. For
// each head it computes the states before all chunks again, then goes back through them; the formulas
// are those of reference.py. Compiled once per instruction set.
//
// Each step has three sums over values, for each key, and one over keys, for each value: so that the
// three add up whole vectors, a vector is of keys here, and a row of values. A block has as many values
// as a vector has lanes; what it holds of a state or its cotangent is (padded K / lanes) squares of
// lanes × lanes, a row of a square being that of a value.
#pragma once

#include "gated_delta_rule/tiles.hpp"
#include "native/parts.hpp"

namespace fuseport::gated_delta_rule::FUSEPORT_ISA {

template <class F>
struct BackwardScratch {
  using Real = typename F::Real;
  Real *states, *cotangent;  // of a head, before each chunk and after the last; all of its blocks
  Real* decayed;             // of a block: its state in each step of a chunk, before the update
  Real *dq, *dk;             // (l, padded K)
  Real* errors;              // (l, padded V): of a head, v less what its key stood for
  Real* q;                   // (32, padded K)
  Real *k, *decays;          // the same with a row more
  Real* dg;                  // (32, padded K)
  Real *v, *updates, *dout, *dv;  // (32, padded V)
  Real* rates;
  Real *dbeta, *shared;  // (32, lanes): parts of sums over values
  Real* zeros;           // (padded K or padded V)
  int64_t bytes;

  BackwardScratch(const Problem& p, void* base) {
    const int64_t row = padded<F>(p.keys), wide = padded<F>(p.values);
    Scratch scratch{(char*)base};
    scratch.take((p.chunks() + 1) * row * wide, &states);
    scratch.take(row * wide, &cotangent);
    scratch.take(CHUNK * row * F::LANES, &decayed);
    scratch.take(p.length * row, &dq, &dk);
    scratch.take(p.length * wide, &errors);
    scratch.take((CHUNK + 1) * row, &k, &decays);
    scratch.take(CHUNK * row, &q, &dg);
    scratch.take(CHUNK * wide, &v, &updates, &dout, &dv);
    scratch.take(CHUNK, &rates);
    scratch.take(CHUNK * F::LANES, &dbeta, &shared);
    scratch.take(row > wide ? row : wide, &zeros);
    bytes = scratch.used;
  }
};

// Writes updates under key k, decays the state, and reads it for the next key: what that stood for.
template <class F>
FUSEPORT_INLINE typename F::Vector walk(typename F::Real* state, int64_t row,
                                        const typename F::Real* k, const typename F::Real* updates,
                                        const typename F::Real* decay,
                                        const typename F::Real* next_k) {
  using Vector = typename F::Vector;
  constexpr int LANES = F::LANES;
  Vector sums[LANES] = {};
  for (int64_t i = 0; i < row; i += LANES) {
    const Vector key = load<F>(k + i), kept = load<F>(decay + i), next = load<F>(next_k + i);
    typename F::Real* square = state + i * LANES;
#pragma GCC unroll 16
    for (int v = 0; v < LANES; ++v) {
      const Vector s = (load<F>(square + v * LANES) + key * updates[v]) * kept;
      store<F>(square + v * LANES, s);
      sums[v] += next * s;
    }
  }
  return sums_of_lanes<F>(sums);
}

// The state of a block in each step of a chunk, decayed and not yet updated, from that before them.
template <class F>
static void walk_again(const typename F::Real* before, int64_t row, int count,
                       const typename F::Real* k, const typename F::Real* decays,
                       const typename F::Real* updates, int64_t wide, typename F::Real* decayed) {
  using Vector = typename F::Vector;
  constexpr int LANES = F::LANES;
  for (int64_t i = 0; i < row; i += LANES) {
    const Vector kept = load<F>(decays + i);
    for (int v = 0; v < LANES; ++v) {
      const int64_t at = (i + v) * LANES;
      store<F>(decayed + at, load<F>(before + at) * kept);
    }
  }
  for (int t = 1; t < count; ++t) {
    const typename F::Real* from = decayed + (t - 1) * row * LANES;
    typename F::Real* to = decayed + t * row * LANES;
    const typename F::Real* update = updates + (t - 1) * wide;
    for (int64_t i = 0; i < row; i += LANES) {
      const Vector key = load<F>(k + (t - 1) * row + i), kept = load<F>(decays + t * row + i);
#pragma GCC unroll 16
      for (int v = 0; v < LANES; ++v) {
        const int64_t at = (i + v) * LANES;
        store<F>(to + at, (load<F>(from + at) + key * update[v]) * kept);
      }
    }
  }
}

// What a step's output adds to the cotangent of the state, and the cotangent of the step's update.
template <class F>
FUSEPORT_INLINE typename F::Vector enter(typename F::Real* cotangent, int64_t row,
                                         const typename F::Real* q, const typename F::Real* k,
                                         const typename F::Real* dout) {
  using Vector = typename F::Vector;
  constexpr int LANES = F::LANES;
  Vector sums[LANES] = {};
  for (int64_t i = 0; i < row; i += LANES) {
    const Vector query = load<F>(q + i), key = load<F>(k + i);
    typename F::Real* square = cotangent + i * LANES;
#pragma GCC unroll 16
    for (int v = 0; v < LANES; ++v) {
      const Vector d = load<F>(square + v * LANES) + query * dout[v];
      store<F>(square + v * LANES, d);
      sums[v] += key * d;
    }
  }
  return sums_of_lanes<F>(sums);
}

// Rows of one step: of keys, the first four and the gradients, which are added to; of values, the
// others. `earlier_` are of the step before, into which the cotangent of the state goes.
template <class Real>
struct BackStep {
  const Real *k, *decay, *earlier_q, *earlier_k;
  const Real *updates, *dout, *dv, *earlier_dout;
  Real *dq, *dk, *dg;
};

// Through one step, and into that before: the cotangent of that one's update.
template <class F>
FUSEPORT_INLINE typename F::Vector back(const typename F::Real* decayed,
                                        typename F::Real* cotangent, int64_t row,
                                        const BackStep<typename F::Real>& s) {
  using Vector = typename F::Vector;
  constexpr int LANES = F::LANES;
  Vector sums[LANES] = {};
  for (int64_t i = 0; i < row; i += LANES) {
    const Vector key = load<F>(s.k + i), kept = load<F>(s.decay + i);
    const Vector query = load<F>(s.earlier_q + i), earlier = load<F>(s.earlier_k + i);
    Vector dq{}, dk{}, dg{};
    const typename F::Real* states = decayed + i * LANES;
    typename F::Real* square = cotangent + i * LANES;
#pragma GCC unroll 16
    for (int v = 0; v < LANES; ++v) {
      const Vector state = load<F>(states + v * LANES);
      Vector d = load<F>(square + v * LANES);
      dq += state * s.dout[v];
      dk += d * s.updates[v];
      dk -= state * s.dv[v];
      d -= key * s.dv[v];
      dg += state * d;
      d = d * kept + query * s.earlier_dout[v];
      store<F>(square + v * LANES, d);
      sums[v] += earlier * d;
    }
    store<F>(s.dq + i, load<F>(s.dq + i) + dq);
    store<F>(s.dk + i, load<F>(s.dk + i) + dk);
    store<F>(s.dg + i, load<F>(s.dg + i) + dg);
  }
  return sums_of_lanes<F>(sums);
}

// The states before all chunks of a head, and the errors of all steps.
template <class F, class Stored>
static void walk_head(const Problem& p, int64_t batch, int64_t head, const BackwardScratch<F>& s) {
  using Real = typename F::Real;
  const int64_t row = padded<F>(p.keys), wide = padded<F>(p.values), size = row * wide;
  const int64_t group = head / p.heads_per_group();
  const int64_t of_state = (batch * p.heads + head) * p.keys * p.values;
  load_blocks<F>(p.keys, p.values, (const Real*)p.initial_state + of_state, s.states);
  for (int64_t chunk = 0; chunk < p.chunks(); ++chunk) {
    const int64_t start = chunk * CHUNK;
    const int count = (int)(p.length - start < CHUNK ? p.length - start : CHUNK);
    load_steps<F, Stored>(p.k, batch, group, start, count, 0, (int)p.keys, row, s.k);
    load_decays<F>(p, batch, head, start, count, row, s.decays);
    fill<Real>(s.k + count * row, row, 0);
    fill<Real>(s.decays + count * row, row, 1);
    load_steps<F, Stored>(p.v, batch, head, start, count, 0, (int)p.values, wide, s.v);
    load_rates<F>(p, batch, head, start, count, s.rates);
    Real* state = s.states + (chunk + 1) * size;
    memcpy(state, state - size, sizeof(Real) * size);
    for (int64_t v = 0; v < wide; v += F::LANES, state += row * F::LANES) {
      typename F::Vector known = walk<F>(state, row, s.zeros, s.zeros, s.decays, s.k);
      for (int t = 0; t < count; ++t) {
        const int64_t at = t * row, next = at + row;
        const typename F::Vector error = load<F>(s.v + t * wide + v) - known;
        store<F>(s.errors + (start + t) * wide + v, error);
        store<F>(s.updates + t * wide + v, error * s.rates[t]);
        known = walk<F>(state, row, s.k + at, s.updates + t * wide + v, s.decays + next, s.k + next);
      }
    }
  }
}

// A chunk's steps of one block of values, from the last.
template <class F>
static void back_block(int64_t row, int64_t wide, int64_t start, int count, int64_t v,
                       const typename F::Real* before, const BackwardScratch<F>& s) {
  using Real = typename F::Real;
  using Vector = typename F::Vector;
  constexpr int LANES = F::LANES;
  walk_again<F>(before, row, count, s.k, s.decays, s.updates + v, wide, s.decayed);
  Real* cotangent = s.cotangent + v * row;
  const int64_t last = count - 1;
  Vector dupdate = enter<F>(cotangent, row, s.q + last * row, s.k + last * row,
                            s.dout + last * wide + v);
  for (int64_t t = last; t >= 0; --t) {
    const int64_t at = t * wide + v;
    const Real *dout = s.dout + at, *updates = s.updates + at;
    store<F>(s.dv + at, dupdate * s.rates[t]);
    Real *dbeta = s.dbeta + t * LANES, *shared = s.shared + t * LANES;
    store<F>(dbeta, load<F>(dbeta) + dupdate * load<F>(s.errors + (start + t) * wide + v));
    store<F>(shared, load<F>(shared) + load<F>(updates) * load<F>(dout));
    const BackStep<Real> step{s.k + t * row,
                              s.decays + t * row,
                              t ? s.q + (t - 1) * row : s.zeros,
                              t ? s.k + (t - 1) * row : s.zeros,
                              updates,
                              dout,
                              s.dv + at,
                              t ? dout - wide : s.zeros,
                              s.dq + (start + t) * row,
                              s.dk + (start + t) * row,
                              s.dg + t * row};
    dupdate = back<F>(s.decayed + t * row * LANES, cotangent, row, step);
  }
}

template <class F, class Stored>
static void back_chunk(const Problem& p, const Backward& to, int64_t batch, int64_t head,
                       int64_t chunk, const BackwardScratch<F>& s) {
  using Real = typename F::Real;
  constexpr int LANES = F::LANES;
  const int64_t row = padded<F>(p.keys), wide = padded<F>(p.values), start = chunk * CHUNK;
  const int64_t group = head / p.heads_per_group();
  const int count = (int)(p.length - start < CHUNK ? p.length - start : CHUNK);
  load_steps<F, Stored>(p.q, batch, group, start, count, 0, (int)p.keys, row, s.q);
  scale_tile<F>(s.q, count * row, (Real)p.scale);
  load_steps<F, Stored>(p.k, batch, group, start, count, 0, (int)p.keys, row, s.k);
  load_decays<F>(p, batch, head, start, count, row, s.decays);
  load_steps<F, Stored>(to.dout, batch, head, start, count, 0, (int)p.values, wide, s.dout);
  load_rates<F>(p, batch, head, start, count, s.rates);
  for (int t = 0; t < count; ++t)
    for (int64_t v = 0; v < wide; v += LANES)
      store<F>(s.updates + t * wide + v,
               load<F>(s.errors + (start + t) * wide + v) * s.rates[t]);
  memset(s.dg, 0, sizeof(Real) * count * row);
  memset(s.dbeta, 0, sizeof(Real) * count * LANES);
  memset(s.shared, 0, sizeof(Real) * count * LANES);
  const Real* before = s.states + chunk * row * wide;
  for (int64_t v = 0; v < wide; v += LANES)
    back_block<F>(row, wide, start, count, v, before + v * row, s);

  const int64_t first = (batch * p.length + start) * p.heads + head;
  for (int t = 0; t < count; ++t) {
    const auto sum = [](const Real* numbers, int64_t of) {
      return summed<F>(of, [&](int64_t i, auto part) { return part.load(numbers + i); });
    };
    // The states that were read for q are those with the update.
    const Real both = sum(s.shared + t * LANES, LANES);
    Real* dq = s.dq + (start + t) * row;
    for (int64_t i = 0; i < row; i += LANES)
      store<F>(dq + i, load<F>(dq + i) + load<F>(s.k + t * row + i) * both);
    const int64_t at = first + t * p.heads;
    ((Real*)to.dbeta)[at] = sum(s.dbeta + t * LANES, LANES);
    if (p.channels)
      memcpy((Real*)to.dg + at * p.keys, s.dg + t * row, sizeof(Real) * p.keys);
    else
      ((Real*)to.dg)[at] = sum(s.dg + t * row, p.keys);
  }
  store_block<F>(s.dv, (int)wide, count, (int)p.values, (Stored*)to.dv + first * p.values,
                 p.heads * p.values, 1);
}

template <class F, class Stored>
static void backward_unit(const Problem& p, const Backward& to, int64_t unit, void* scratch) {
  using Real = typename F::Real;
  const BackwardScratch<F> s(p, scratch);
  const int64_t batch = unit / p.groups, group = unit % p.groups;
  const int64_t row = padded<F>(p.keys), wide = padded<F>(p.values);
  fill<Real>(s.zeros, row > wide ? row : wide, 0);
  memset(s.dq, 0, sizeof(Real) * p.length * row);
  memset(s.dk, 0, sizeof(Real) * p.length * row);
  for (int64_t i = 0; i < p.heads_per_group(); ++i) {
    const int64_t head = group * p.heads_per_group() + i;
    const int64_t of_state = (batch * p.heads + head) * p.keys * p.values;
    walk_head<F, Stored>(p, batch, head, s);
    load_blocks<F>(p.keys, p.values, (const Real*)to.dfinal_state + of_state, s.cotangent);
    for (int64_t chunk = p.chunks() - 1; chunk >= 0; --chunk)
      back_chunk<F, Stored>(p, to, batch, head, chunk, s);
    store_blocks<F>(p.keys, p.values, s.cotangent, (Real*)to.dinitial_state + of_state);
  }
  scale_tile<F>(s.dq, p.length * row, (Real)p.scale);
  const int64_t first = (batch * p.length * p.groups + group) * p.keys, step = p.groups * p.keys;
  for (int64_t start = 0; start < p.length; start += CHUNK) {
    const int count = (int)(p.length - start < CHUNK ? p.length - start : CHUNK);
    const int64_t at = first + start * step;
    store_block<F>(s.dq + start * row, (int)row, count, (int)p.keys, (Stored*)to.dq + at, step, 1);
    store_block<F>(s.dk + start * row, (int)row, count, (int)p.keys, (Stored*)to.dk + at, step, 1);
  }
}

}  // namespace fuseport::gated_delta_rule::FUSEPORT_ISA
