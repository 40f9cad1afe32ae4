// Forward: one unit is a batch entry, a head and a block of columns of its state, which stays in the
// first cache. Compiled once per instruction set.
//
// It goes step by step, at five operations for each number of the state. Of a chunk's products, which a
// decay for each key channel makes of keys as they are decayed from the chunk's start, powers would
// overflow, and take divisions.
#pragma once

#include "dplr_delta_rule/tiles.hpp"

namespace fuseport::dplr_delta_rule::FUSEPORT_ISA {

template <class F>
constexpr int COLUMNS = 2 * F::LANES;  // of a block

template <class F>
FUSEPORT_INLINE int64_t column_blocks(const Problem& p) {
  return (p.values + COLUMNS<F> - 1) / COLUMNS<F>;
}

template <class F>
struct ForwardScratch {
  using Real = typename F::Real;
  Real* state;              // (K, columns)
  Real *q, *k, *b, *decays;  // (32, padded K)
  Real* a;                  // the same with a row more: of the step that follows
  Real *v, *out;            // (32, columns)
  int64_t bytes;

  ForwardScratch(const Problem& p, void* base) {
    const int64_t row = padded<F>(p.keys);
    Scratch scratch{(char*)base};
    scratch.take(p.keys * COLUMNS<F>, &state);
    scratch.take(CHUNK * row, &q, &k, &b, &decays);
    scratch.take((CHUNK + 1) * row, &a);
    scratch.take(CHUNK * COLUMNS<F>, &v, &out);
    bytes = scratch.used;
  }
};

// Rows of keys of one step; `next_a` is of that after it.
template <class Real>
struct Step {
  const Real *q, *k, *b, *decay, *next_a;
};

// What a step leaves of a block of columns: its output, and what the next one reads of the state.
template <class F, int VECTORS>
struct Read {
  typename F::Vector out[VECTORS], next[VECTORS];
};

// Decays the state, writes what was read of it and the values, reads it for q and for the next step: it
// goes through the registers once. Sums are of two parts, which do not wait for each other.
template <class F, int VECTORS>
FUSEPORT_INLINE Read<F, VECTORS> advance(typename F::Real* state, int64_t rows,
                                         const Step<typename F::Real>& step,
                                         const typename F::Vector (&read)[VECTORS],
                                         const typename F::Vector (&values)[VECTORS]) {
  using Vector = typename F::Vector;
  Vector outs[2][VECTORS] = {}, nexts[2][VECTORS] = {};
  for (int64_t i = 0; i < rows; i += 2) {
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
      const int64_t r = i + part;
      if (r == rows) break;
      typename F::Real* at = state + r * VECTORS * F::LANES;
      const Vector kept = splat<F>(step.decay[r]), key = splat<F>(step.k[r]);
      const Vector writing = splat<F>(step.b[r]), query = splat<F>(step.q[r]);
      const Vector reading = splat<F>(step.next_a[r]);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) {
        Vector s = load<F>(at + v * F::LANES) * kept;
        s += key * values[v];
        s += writing * read[v];
        outs[part][v] += query * s;
        nexts[part][v] += reading * s;
        store<F>(at + v * F::LANES, s);
      }
    }
  }
  Read<F, VECTORS> found;
#pragma GCC unroll 4
  for (int v = 0; v < VECTORS; ++v) {
    found.out[v] = outs[0][v] + outs[1][v];
    found.next[v] = nexts[0][v] + nexts[1][v];
  }
  return found;
}

// What the first step reads of the state before it.
template <class F, int VECTORS>
FUSEPORT_INLINE void read_first(const typename F::Real* state, int64_t rows,
                                const typename F::Real* a, typename F::Vector (&read)[VECTORS]) {
#pragma GCC unroll 4
  for (int v = 0; v < VECTORS; ++v) {
    read[v] = typename F::Vector{};
    for (int64_t i = 0; i < rows; ++i)
      read[v] += splat<F>(a[i]) * load<F>(state + (i * VECTORS + v) * F::LANES);
  }
}

template <class F, class Stored, int VECTORS>
static void forward_columns(const Problem& p, const Forward& to, int64_t batch, int64_t head,
                            int64_t first, int columns, const ForwardScratch<F>& s) {
  using Real = typename F::Real;
  using Vector = typename F::Vector;
  constexpr int WIDE = VECTORS * F::LANES;
  const int64_t row = padded<F>(p.keys), rows = p.keys;
  const int64_t of_state = (batch * p.heads + head) * p.keys * p.values + first;
  memset(s.state, 0, sizeof(Real) * rows * WIDE);
  load_block<F>((const Real*)p.initial_state + of_state, p.values, 1, (int)p.keys, columns, s.state,
                WIDE);
  Read<F, VECTORS> found;
  for (int64_t start = 0; start < p.length; start += CHUNK) {
    const Chunk c(p, batch, head, start);
    load_keys<F, Stored>(p, c, p.q, row, s.q);
    scale_tile<F>(s.q, c.count * row, (Real)p.scale);
    load_keys<F, Stored>(p, c, p.k, row, s.k);
    load_keys<F, Stored>(p, c, p.b, row, s.b);
    load_keys_and_next<F, Stored>(p, c, p.a, row, s.a);
    load_decays<F>(p, c, row, s.decays);
    load_steps<F, Stored>(p.v, batch, head, start, c.count, first, columns, WIDE, s.v);
    if (start == 0) read_first<F, VECTORS>(s.state, rows, s.a, found.next);
    for (int t = 0; t < c.count; ++t) {
      Vector values[VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) values[v] = load<F>(s.v + t * WIDE + v * F::LANES);
      const int64_t at = t * row;
      const Step<Real> step{s.q + at, s.k + at, s.b + at, s.decays + at, s.a + at + row};
      found = advance<F, VECTORS>(s.state, rows, step, found.next, values);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) store<F>(s.out + t * WIDE + v * F::LANES, found.out[v]);
    }
    Stored* out = (Stored*)to.out + ((batch * p.length + start) * p.heads + head) * p.values + first;
    store_block<F>(s.out, WIDE, c.count, columns, out, p.heads * p.values, 1);
  }
  store_block<F>(s.state, WIDE, (int)p.keys, columns, (Real*)to.final_state + of_state, p.values,
                 1);
}

template <class F, class Stored>
static void forward_unit(const Problem& p, const Forward& to, int64_t unit, void* scratch) {
  const ForwardScratch<F> s(p, scratch);
  const int64_t blocks = column_blocks<F>(p), first = unit % blocks * COLUMNS<F>;
  const int64_t batch = unit / blocks / p.heads, head = unit / blocks % p.heads;
  const int columns = (int)(p.values - first < COLUMNS<F> ? p.values - first : COLUMNS<F>);
  if (columns > F::LANES)
    forward_columns<F, Stored, 2>(p, to, batch, head, first, columns, s);
  else
    forward_columns<F, Stored, 1>(p, to, batch, head, first, columns, s);
}

}  // namespace fuseport::dplr_delta_rule::FUSEPORT_ISA
