// Backward: one unit is a batch entry and a head. It computes the states before all chunks again, then
// goes back through them; the formulas are those of reference.py. Compiled once per instruction set.
//
// Each step has five sums over values, for each key, and two over keys, for each value: so that the five
// add up whole vectors, a vector is of keys here, and a row of values. A block has as many values as a
// vector has lanes: native/rule_tiles.hpp.
#pragma once

#include "dplr_delta_rule/tiles.hpp"
#include "native/parts.hpp"

namespace fuseport::dplr_delta_rule::FUSEPORT_ISA {

template <class F>
struct BackwardScratch {
  using Real = typename F::Real;
  Real *states, *cotangent;  // before each chunk and after the last; all blocks
  Real* before;              // of a block: its state before each step of a chunk
  Real* reads;               // (l, padded V): what each step's a reads
  Real *q, *k, *b, *decays;  // (32, padded K)
  Real* a;                   // the same with a row more
  Real *dq, *dk, *da, *db, *ddecay;   // (32, padded K)
  Real *v, *dout, *dreads, *dv;       // (32, padded V)
  Real *of_reads, *of_values;         // (32, lanes): parts of sums over values
  Real* zeros;                        // (padded K or padded V)
  int64_t bytes;

  BackwardScratch(const Problem& p, void* base) {
    const int64_t row = padded<F>(p.keys), wide = padded<F>(p.values);
    Scratch scratch{(char*)base};
    scratch.take((p.chunks() + 1) * row * wide, &states);
    scratch.take(row * wide, &cotangent);
    scratch.take(CHUNK * row * F::LANES, &before);
    scratch.take(p.length * wide, &reads);
    scratch.take(CHUNK * row, &q, &k, &b, &decays, &dq, &dk, &da, &db, &ddecay);
    scratch.take((CHUNK + 1) * row, &a);
    scratch.take(CHUNK * wide, &v, &dout, &dreads, &dv);
    scratch.take(CHUNK * F::LANES, &of_reads, &of_values);
    scratch.take(row > wide ? row : wide, &zeros);
    bytes = scratch.used;
  }
};

// Rows of what a step writes: of keys the first three, of values the others.
template <class Real>
struct Written {
  const Real *decay, *k, *b, *v, *read;
};

// A step's state from that before it, and in lane v what the step after it reads of value v.
template <class F>
FUSEPORT_INLINE typename F::Vector walk(typename F::Real* state, int64_t row,
                                        const Written<typename F::Real>& s,
                                        const typename F::Real* next_a) {
  using Vector = typename F::Vector;
  constexpr int LANES = F::LANES;
  Vector sums[LANES] = {};
  for (int64_t i = 0; i < row; i += LANES) {
    const Vector kept = load<F>(s.decay + i), key = load<F>(s.k + i), writing = load<F>(s.b + i);
    const Vector reading = load<F>(next_a + i);
    typename F::Real* square = state + i * LANES;
#pragma GCC unroll 16
    for (int v = 0; v < LANES; ++v) {
      Vector next = load<F>(square + v * LANES) * kept;
      next += key * s.v[v];
      next += writing * s.read[v];
      store<F>(square + v * LANES, next);
      sums[v] += reading * next;
    }
  }
  return sums_of_lanes<F>(sums);
}

// In lane v, what a reads of value v.
template <class F>
FUSEPORT_INLINE typename F::Vector read_block(const typename F::Real* state, int64_t row,
                                              const typename F::Real* a) {
  typename F::Vector sums[F::LANES] = {};
  for (int64_t i = 0; i < row; i += F::LANES)
#pragma GCC unroll 16
    for (int v = 0; v < F::LANES; ++v)
      sums[v] += load<F>(a + i) * load<F>(state + (i + v) * F::LANES);
  return sums_of_lanes<F>(sums);
}

// A step's state of a block, from that before it.
template <class F>
FUSEPORT_INLINE void walk_again(const typename F::Real* from, int64_t row,
                                const Written<typename F::Real>& s, typename F::Real* to) {
  using Vector = typename F::Vector;
  constexpr int LANES = F::LANES;
  for (int64_t i = 0; i < row; i += LANES) {
    const Vector kept = load<F>(s.decay + i), key = load<F>(s.k + i), writing = load<F>(s.b + i);
#pragma GCC unroll 16
    for (int v = 0; v < LANES; ++v) {
      const int64_t at = (i + v) * LANES;
      Vector next = load<F>(from + at) * kept;
      next += key * s.v[v];
      next += writing * s.read[v];
      store<F>(to + at, next);
    }
  }
}

// Of a step, in lane v what belongs to value v: the cotangents of what a read, and of the value.
template <class F>
struct Cotangents {
  typename F::Vector read, value;
};

// Rows of one step: of keys the first four, of values the next four, and the sums, which are added to.
// `earlier` ones are of the step before, into which the cotangent of the state goes.
template <class Real>
struct BackStep {
  const Real *a, *decay, *earlier_q, *earlier_k, *earlier_b;
  const Real *v, *read, *dout, *dread, *earlier_dout;
  Real *dq, *dk, *da, *db, *ddecay;
};

// How many values' sums over keys are made at a time: two of each stay in registers, beside the five
// over values.
template <class F>
constexpr int AT_ONCE = WIDTH == 64 && F::LANES > 8 ? 8 : F::LANES < 4 ? F::LANES : 4;

// What a step's output adds to the cotangent of the state, and what comes of that.
template <class F>
FUSEPORT_INLINE Cotangents<F> enter(typename F::Real* cotangent, int64_t row,
                                    const typename F::Real* q, const typename F::Real* k,
                                    const typename F::Real* b, const typename F::Real* dout) {
  using Vector = typename F::Vector;
  constexpr int LANES = F::LANES, ROWS = AT_ONCE<F>;
  Vector reads[LANES], values[LANES];
  for (int from = 0; from < LANES; from += ROWS) {
    Vector read[ROWS] = {}, value[ROWS] = {};
    for (int64_t i = 0; i < row; i += LANES) {
      const Vector query = load<F>(q + i), key = load<F>(k + i), writing = load<F>(b + i);
#pragma GCC unroll 8
      for (int v = 0; v < ROWS; ++v) {
        typename F::Real* at = cotangent + (i + from + v) * LANES;
        const Vector d = load<F>(at) + query * dout[from + v];
        store<F>(at, d);
        read[v] += writing * d;
        value[v] += key * d;
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < ROWS; ++v) {
      reads[from + v] = read[v];
      values[from + v] = value[v];
    }
  }
  return {sums_of_lanes<F>(reads), sums_of_lanes<F>(values)};
}

// Through one step, and into that before. The sums for q and the decay leave out the step's own part.
template <class F>
FUSEPORT_INLINE Cotangents<F> back(const typename F::Real* before, typename F::Real* cotangent,
                                   int64_t row, const BackStep<typename F::Real>& s) {
  using Vector = typename F::Vector;
  constexpr int LANES = F::LANES, ROWS = AT_ONCE<F>;
  Vector reads[LANES], values[LANES];
  for (int from = 0; from < LANES; from += ROWS) {
    Vector read[ROWS] = {}, value[ROWS] = {};
    for (int64_t i = 0; i < row; i += LANES) {
      const Vector reading = load<F>(s.a + i), kept = load<F>(s.decay + i);
      const Vector query = load<F>(s.earlier_q + i), key = load<F>(s.earlier_k + i);
      const Vector writing = load<F>(s.earlier_b + i);
      Vector dq = load<F>(s.dq + i), dk = load<F>(s.dk + i), da = load<F>(s.da + i);
      Vector db = load<F>(s.db + i), ddecay = load<F>(s.ddecay + i);
#pragma GCC unroll 8
      for (int v = 0; v < ROWS; ++v) {
        const int of = from + v;
        const Vector state = load<F>(before + (i + of) * LANES);
        typename F::Real* at = cotangent + (i + of) * LANES;
        Vector d = load<F>(at);
        dq += state * s.dout[of];
        da += state * s.dread[of];
        ddecay += state * d;
        dk += d * s.v[of];
        db += d * s.read[of];
        d = d * kept + reading * s.dread[of];
        d += query * s.earlier_dout[of];
        store<F>(at, d);
        read[v] += writing * d;
        value[v] += key * d;
      }
      store<F>(s.dq + i, dq);
      store<F>(s.dk + i, dk);
      store<F>(s.da + i, da);
      store<F>(s.db + i, db);
      store<F>(s.ddecay + i, ddecay);
    }
#pragma GCC unroll 8
    for (int v = 0; v < ROWS; ++v) {
      reads[from + v] = read[v];
      values[from + v] = value[v];
    }
  }
  return {sums_of_lanes<F>(reads), sums_of_lanes<F>(values)};
}

template <class F>
FUSEPORT_INLINE Written<typename F::Real> written(const BackwardScratch<F>& s, int64_t row,
                                                  int64_t wide, int64_t start, int64_t t,
                                                  int64_t v) {
  const int64_t at = t * row;
  return {s.decays + at, s.k + at, s.b + at, s.v + t * wide + v, s.reads + (start + t) * wide + v};
}

// The states before all chunks, and what all steps read.
template <class F, class Stored>
static void walk_head(const Problem& p, int64_t batch, int64_t head, const BackwardScratch<F>& s) {
  using Real = typename F::Real;
  const int64_t row = padded<F>(p.keys), wide = padded<F>(p.values), size = row * wide;
  const int64_t of_state = (batch * p.heads + head) * p.keys * p.values;
  load_blocks<F>(p.keys, p.values, (const Real*)p.initial_state + of_state, s.states);
  for (int64_t chunk = 0; chunk < p.chunks(); ++chunk) {
    const Chunk c(p, batch, head, chunk * CHUNK);
    load_keys<F, Stored>(p, c, p.k, row, s.k);
    load_keys<F, Stored>(p, c, p.b, row, s.b);
    load_keys_and_next<F, Stored>(p, c, p.a, row, s.a);
    load_decays<F>(p, c, row, s.decays);
    load_steps<F, Stored>(p.v, batch, head, c.start, c.count, 0, (int)p.values, wide, s.v);
    Real* state = s.states + (chunk + 1) * size;
    memcpy(state, state - size, sizeof(Real) * size);
    for (int64_t v = 0; v < wide; v += F::LANES, state += row * F::LANES) {
      Real* reads = s.reads + c.start * wide + v;
      if (chunk == 0) store<F>(reads, read_block<F>(state, row, s.a));
      for (int t = 0; t < c.count; ++t) {
        const auto step = written<F>(s, row, wide, c.start, t, v);
        const typename F::Vector next = walk<F>(state, row, step, s.a + (t + 1) * row);
        if (t + 1 < c.count || c.more) store<F>(reads + (t + 1) * wide, next);
      }
    }
  }
}

// A chunk's steps of one block of values, from the last.
template <class F>
static void back_block(int64_t row, int64_t wide, const Chunk& c, int64_t v,
                       const typename F::Real* first, const BackwardScratch<F>& s) {
  using Real = typename F::Real;
  constexpr int LANES = F::LANES;
  const int64_t size = row * LANES;
  memcpy(s.before, first, sizeof(Real) * size);
  for (int t = 1; t < c.count; ++t)
    walk_again<F>(s.before + (t - 1) * size, row, written<F>(s, row, wide, c.start, t - 1, v),
                  s.before + t * size);
  Real* cotangent = s.cotangent + v * row;
  const int64_t last = c.count - 1;
  Cotangents<F> found = enter<F>(cotangent, row, s.q + last * row, s.k + last * row,
                                 s.b + last * row, s.dout + last * wide + v);
  for (int64_t t = last; t >= 0; --t) {
    const int64_t at = t * wide + v, of = t * row;
    const Real *dout = s.dout + at, *values = s.v + at, *read = s.reads + (c.start + t) * wide + v;
    store<F>(s.dreads + at, found.read);
    store<F>(s.dv + at, found.value);
    Real *of_reads = s.of_reads + t * LANES, *of_values = s.of_values + t * LANES;
    store<F>(of_reads, load<F>(of_reads) + load<F>(read) * load<F>(dout));
    store<F>(of_values, load<F>(of_values) + load<F>(values) * load<F>(dout));
    const BackStep<Real> step{s.a + of,
                              s.decays + of,
                              t ? s.q + of - row : s.zeros,
                              t ? s.k + of - row : s.zeros,
                              t ? s.b + of - row : s.zeros,
                              values,
                              read,
                              dout,
                              s.dreads + at,
                              t ? dout - wide : s.zeros,
                              s.dq + of,
                              s.dk + of,
                              s.da + of,
                              s.db + of,
                              s.ddecay + of};
    found = back<F>(s.before + t * size, cotangent, row, step);
  }
}

// What sums over values leave out: of the state that q reads, the step's own part; the factors.
template <class F>
static void finish_keys(const Problem& p, const Chunk& c, int64_t row, const BackwardScratch<F>& s) {
  using Real = typename F::Real;
  const auto sum = [](const Real* numbers) {
    return summed<F>(F::LANES, [&](int64_t i, auto part) { return part.load(numbers + i); });
  };
  for (int t = 0; t < c.count; ++t) {
    const Real read = sum(s.of_reads + t * F::LANES), value = sum(s.of_values + t * F::LANES);
    for (int64_t i = t * row; i < (t + 1) * row; i += F::LANES) {
      const typename F::Vector kept = load<F>(s.decays + i);
      const auto own = load<F>(s.b + i) * read + load<F>(s.k + i) * value;
      store<F>(s.dq + i, (load<F>(s.dq + i) * kept + own) * (Real)p.scale);
      store<F>(s.ddecay + i, load<F>(s.ddecay + i) * kept);
    }
  }
}

template <class F, class Stored>
static void back_chunk(const Problem& p, const Backward& to, const Chunk& c,
                       const BackwardScratch<F>& s) {
  using Real = typename F::Real;
  constexpr int LANES = F::LANES;
  const int64_t row = padded<F>(p.keys), wide = padded<F>(p.values);
  load_keys<F, Stored>(p, c, p.q, row, s.q);
  scale_tile<F>(s.q, c.count * row, (Real)p.scale);
  load_keys<F, Stored>(p, c, p.k, row, s.k);
  load_keys<F, Stored>(p, c, p.a, row, s.a);
  load_keys<F, Stored>(p, c, p.b, row, s.b);
  load_decays<F>(p, c, row, s.decays);
  load_steps<F, Stored>(p.v, c.batch, c.head, c.start, c.count, 0, (int)p.values, wide, s.v);
  load_steps<F, Stored>(to.dout, c.batch, c.head, c.start, c.count, 0, (int)p.values, wide, s.dout);
  for (Real* sums : {s.dq, s.dk, s.da, s.db, s.ddecay}) memset(sums, 0, sizeof(Real) * c.count * row);
  for (Real* sums : {s.of_reads, s.of_values}) memset(sums, 0, sizeof(Real) * c.count * LANES);
  const Real* before = s.states + c.start / CHUNK * row * wide;
  for (int64_t v = 0; v < wide; v += LANES) back_block<F>(row, wide, c, v, before + v * row, s);
  finish_keys<F>(p, c, row, s);

  const int64_t first = (c.batch * p.length + c.start) * p.heads + c.head;
  const auto give = [&](const Real* tile, auto* all) {
    store_block<F>(tile, (int)row, c.count, (int)p.keys, all + first * p.keys, p.heads * p.keys, 1);
  };
  give(s.dq, (Stored*)to.dq);
  give(s.dk, (Stored*)to.dk);
  give(s.da, (Stored*)to.da);
  give(s.db, (Stored*)to.db);
  give(s.ddecay, (Real*)to.dlog_decay);
  store_block<F>(s.dv, (int)wide, c.count, (int)p.values, (Stored*)to.dv + first * p.values,
                 p.heads * p.values, 1);
}

template <class F, class Stored>
static void backward_unit(const Problem& p, const Backward& to, int64_t unit, void* scratch) {
  using Real = typename F::Real;
  const BackwardScratch<F> s(p, scratch);
  const int64_t batch = unit / p.heads, head = unit % p.heads;
  const int64_t row = padded<F>(p.keys), wide = padded<F>(p.values);
  const int64_t of_state = (batch * p.heads + head) * p.keys * p.values;
  fill<Real>(s.zeros, row > wide ? row : wide, 0);
  walk_head<F, Stored>(p, batch, head, s);
  load_blocks<F>(p.keys, p.values, (const Real*)to.dfinal_state + of_state, s.cotangent);
  for (int64_t chunk = p.chunks() - 1; chunk >= 0; --chunk)
    back_chunk<F, Stored>(p, to, Chunk(p, batch, head, chunk * CHUNK), s);
  store_blocks<F>(p.keys, p.values, s.cotangent, (Real*)to.dinitial_state + of_state);
}

}  // namespace fuseport::dplr_delta_rule::FUSEPORT_ISA
