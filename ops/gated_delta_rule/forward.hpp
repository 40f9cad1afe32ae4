// Forward: one unit is a batch entry, a head and a block of columns of its state, which stays in the
// first cache. Compiled once per instruction set.
//
// It goes step by step, at four operations for each number of the state. Products of matrices over a
// chunk, the WY form, would have three, and for K = V = 128 and chunks of 64 a fourth within the chunk.
#pragma once

#include "gated_delta_rule/tiles.hpp"

namespace fuseport::gated_delta_rule::FUSEPORT_ISA {

template <class F>
constexpr int COLUMNS = 2 * F::LANES;  // of a block

template <class F>
FUSEPORT_INLINE int64_t column_blocks(const Problem& p) {
  return (p.values + COLUMNS<F> - 1) / COLUMNS<F>;
}

template <class F>
struct ForwardScratch {
  using Real = typename F::Real;
  Real *state;           // (K, columns)
  Real *q, *k, *decays;  // (32, padded K), the last two with a row more: of the step that follows
  Real *v, *out;         // (32, columns)
  Real* rates;
  int64_t bytes;

  ForwardScratch(const Problem& p, void* base) {
    const int64_t row = padded<F>(p.keys);
    Scratch scratch{(char*)base};
    scratch.take(p.keys * COLUMNS<F>, &state);
    scratch.take(CHUNK * row, &q);
    scratch.take((CHUNK + 1) * row, &k, &decays);
    scratch.take(CHUNK * COLUMNS<F>, &v, &out);
    scratch.take(CHUNK, &rates);
    bytes = scratch.used;
  }
};

// What a step leaves of a block of columns: its output, and of the state as the next step decays it,
// what that step's key stands for.
template <class F, int VECTORS>
struct Read {
  typename F::Vector out[VECTORS], known[VECTORS];
};

// Writes an update under key k, reads the state for q, decays it, and reads it for the next key: the
// state goes through the registers once. Sums are of two parts, which do not wait for each other.
template <class F, int VECTORS>
FUSEPORT_INLINE Read<F, VECTORS> advance(typename F::Real* state, int64_t rows,
                                         const typename F::Real* k, const typename F::Real* q,
                                         const typename F::Real* decay,
                                         const typename F::Real* next_k,
                                         const typename F::Vector (&update)[VECTORS]) {
  using Vector = typename F::Vector;
  Vector outs[2][VECTORS] = {}, knowns[2][VECTORS] = {};
  for (int64_t i = 0; i < rows; i += 2) {
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
      if (i + part == rows) break;
      typename F::Real* at = state + (i + part) * VECTORS * F::LANES;
      const Vector key = splat<F>(k[i + part]), query = splat<F>(q[i + part]);
      const Vector kept = splat<F>(decay[i + part]), next = splat<F>(next_k[i + part]);
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; ++v) {
        Vector s = load<F>(at + v * F::LANES) + key * update[v];
        outs[part][v] += query * s;
        s = s * kept;
        knowns[part][v] += next * s;
        store<F>(at + v * F::LANES, s);
      }
    }
  }
  Read<F, VECTORS> read;
#pragma GCC unroll 2
  for (int v = 0; v < VECTORS; ++v) {
    read.out[v] = outs[0][v] + outs[1][v];
    read.known[v] = knowns[0][v] + knowns[1][v];
  }
  return read;
}

template <class F, class Stored, int VECTORS>
static void forward_columns(const Problem& p, const Forward& to, int64_t batch, int64_t head,
                            int64_t first, int columns, const ForwardScratch<F>& s) {
  using Real = typename F::Real;
  using Vector = typename F::Vector;
  constexpr int WIDE = VECTORS * F::LANES;
  const int64_t row = padded<F>(p.keys), rows = p.keys, group = head / p.heads_per_group();
  const int64_t of_state = (batch * p.heads + head) * p.keys * p.values + first;
  memset(s.state, 0, sizeof(Real) * rows * WIDE);
  load_block<F>((const Real*)p.initial_state + of_state, p.values, 1, (int)p.keys, columns, s.state,
                WIDE);
  const Vector nothing[VECTORS] = {};
  Read<F, VECTORS> read;
  for (int64_t start = 0; start < p.length; start += CHUNK) {
    const int count = (int)(p.length - start < CHUNK ? p.length - start : CHUNK);
    const bool more = start + count < p.length;
    load_steps<F, Stored>(p.q, batch, group, start, count, 0, (int)p.keys, row, s.q);
    scale_tile<F>(s.q, count * row, (Real)p.scale);
    load_steps<F, Stored>(p.k, batch, group, start, count + more, 0, (int)p.keys, row, s.k);
    load_decays<F>(p, batch, head, start, count + more, row, s.decays);
    if (!more) {  // the last state is neither read nor decayed
      fill<Real>(s.k + count * row, row, 0);
      fill<Real>(s.decays + count * row, row, 1);
    }
    load_steps<F, Stored>(p.v, batch, head, start, count, first, columns, WIDE, s.v);
    load_rates<F>(p, batch, head, start, count, s.rates);
    if (start == 0)
      read = advance<F, VECTORS>(s.state, rows, s.k, s.k, s.decays, s.k, nothing);
    for (int t = 0; t < count; ++t) {
      Vector update[VECTORS];
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; ++v)
        update[v] = (load<F>(s.v + t * WIDE + v * F::LANES) - read.known[v]) * s.rates[t];
      const int64_t at = t * row, next = at + row;
      read = advance<F, VECTORS>(s.state, rows, s.k + at, s.q + at, s.decays + next, s.k + next,
                                 update);
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; ++v) store<F>(s.out + t * WIDE + v * F::LANES, read.out[v]);
    }
    Stored* out = (Stored*)to.out + ((batch * p.length + start) * p.heads + head) * p.values + first;
    store_block<F>(s.out, WIDE, count, columns, out, p.heads * p.values, 1);
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

}  // namespace fuseport::gated_delta_rule::FUSEPORT_ISA
