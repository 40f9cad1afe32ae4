// One chunk of one head's data, as reals. Rows are steps; those past the end are zero, and so are
// columns that fill a row up to whole vectors. Compiled once per instruction set.
#pragma once

#include "native/blocks.hpp"
#include "native/products.hpp"
#include "native/scratch.hpp"
#include "ssd_chunk_scan/kernel.hpp"

namespace fuseport::ssd_chunk_scan::FUSEPORT_ISA {

using namespace fuseport::FUSEPORT_ISA;

// Numbers in a row of so many that are in use.
template <class F>
FUSEPORT_INLINE int64_t padded(int64_t count) {
  return (count + F::LANES - 1) / F::LANES * F::LANES;
}

struct Steps {
  int64_t start;
  int count, rows;  // rows: whole blocks of registers

  Steps(const Problem& p, int64_t chunk) {
    start = chunk * CHUNK;
    count = (int)(p.length - start < CHUNK ? p.length - start : CHUNK);
    rows = (count + PRODUCT_ROWS - 1) / PRODUCT_ROWS * PRODUCT_ROWS;
  }
};

template <class F, class Stored>
static void load_steps(const Strided& s, int64_t batch, int64_t head, const Steps& steps,
                       int64_t columns, int64_t stride, typename F::Real* tile) {
  const Stored* from =
      (const Stored*)s.data + batch * s.batch + steps.start * s.step + head * s.head;
  if (columns < stride) {
    memset(tile, 0, sizeof *tile * steps.rows * stride);
  } else if (steps.count < steps.rows) {
    memset(tile + steps.count * stride, 0, sizeof *tile * (steps.rows - steps.count) * stride);
  }
  load_block<F>(from, s.step, s.column, steps.count, (int)columns, tile, (int)stride);
}

// What a chunk of a batch entry and group has prepared.
template <class F>
struct Prepared {
  using Real = typename F::Real;
  Real *B, *C, *CB;

  static int64_t size(const Problem& p) { return 2 * CHUNK * padded<F>(p.states) + CHUNK * CHUNK; }
  Prepared(const Problem& p, Real* at)
      : B(at), C(B + CHUNK * padded<F>(p.states)), CB(C + CHUNK * padded<F>(p.states)) {}
  Prepared(const Problem& p, int64_t batch, int64_t chunk, int64_t group)
      : Prepared(p, (Real*)p.prepared +
                        ((batch * p.chunks() + chunk) * p.groups + group) * size(p)) {}
};

// `transposed`: B as (N, 64).
template <class F, class Stored>
static void prepare(const Problem& p, int64_t batch, int64_t chunk, int64_t group,
                    const Prepared<F>& to, typename F::Real* transposed) {
  using Real = typename F::Real;
  const int64_t stride = padded<F>(p.states);
  const Steps steps(p, chunk);
  load_steps<F, Stored>(p.B, batch, group, steps, p.states, stride, to.B);
  load_steps<F, Stored>(p.C, batch, group, steps, p.states, stride, to.C);
  memset(transposed, 0, sizeof(Real) * p.states * CHUNK);
  load_block<F>(to.B, 1, stride, (int)p.states, steps.count, transposed, (int)CHUNK);
  memset(to.CB, 0, sizeof(Real) * CHUNK * CHUNK);
  multiply<F>({{to.C, stride, 1}, transposed, CHUNK, to.CB, CHUNK, steps.rows, (int)CHUNK,
               (int)p.states},
              Zeros::none, true);
}

template <class F, class Stored>
static void prepare_unit(const Problem& p, int64_t unit, void* scratch) {
  const int64_t group = unit % p.groups, chunk = unit / p.groups % p.chunks();
  const int64_t batch = unit / p.groups / p.chunks();
  prepare<F, Stored>(p, batch, chunk, group, Prepared<F>(p, batch, chunk, group),
                     (typename F::Real*)scratch);
}

// What was prepared, or is now, where groups are not shared.
template <class F>
struct OwnPrepared {
  typename F::Real *at, *transposed;

  OwnPrepared(const Problem& p, Scratch& scratch) {
    const bool own = !p.shares_groups();
    scratch.take(own ? Prepared<F>::size(p) : 0, &at);
    scratch.take(own ? p.states * CHUNK : 0, &transposed);
  }
  template <class Stored>
  Prepared<F> of(const Problem& p, int64_t batch, int64_t chunk, int64_t group) const {
    if (p.prepared) return Prepared<F>(p, batch, chunk, group);
    const Prepared<F> own(p, at);
    prepare<F, Stored>(p, batch, chunk, group, own, transposed);
    return own;
  }
  // With B alone.
  template <class Stored>
  Prepared<F> of_B(const Problem& p, int64_t batch, int64_t chunk, int64_t group) const {
    if (p.prepared) return Prepared<F>(p, batch, chunk, group);
    const Prepared<F> own(p, at);
    load_steps<F, Stored>(p.B, batch, group, Steps(p, chunk), p.states, padded<F>(p.states),
                          own.B);
    return own;
  }
};

// v from a lane on, zero before it, whatever is there.
template <class F>
FUSEPORT_INLINE typename F::Vector lanes_from(typename F::Vector v, int start) {
  typename F::Integers lane;
  for (int i = 0; i < F::LANES; ++i) lane[i] = i;
  return lane < (typename F::Integers{} + start) ? typename F::Vector{} : v;
}

// The steps of a chunk of one head, and the decays between them. The sum of δA, which begins anew
// with each sequence, is kept in double, as a real and what that lacks: a difference of two large
// sums is then as good as a small one.
template <class F>
struct Decays {
  using Real = typename F::Real;
  using Vector = typename F::Vector;
  alignas(64) Real raw[CHUNK];        // dt + bias
  alignas(64) Real smooth[CHUNK];     // after softplus
  alignas(64) Real step[CHUNK];       // after the limits; 0 past the end
  alignas(64) Real outer[CHUNK];      // exp(c_t); 0 where the state before the chunk has no part
  alignas(64) Real remaining[CHUNK];  // exp(c_T - c_t); 0 before the last sequence
  alignas(64) Real weight[CHUNK];     // remaining · step
  alignas(64) Real high[CHUNK];
  alignas(64) Real low[CHUNK];
  int first[CHUNK];  // of the steps of this chunk that are of step t's sequence
  Real decay;        // exp(c_T), or 0

  template <class Stored>
  void load(const Problem& p, int64_t batch, int64_t head, const Steps& steps) {
    double exponents[CHUNK];  // δA, or what is given in its place
    if (p.log_decay.data) load_decays(p, batch, head, steps, exponents);
    else load_steps<Stored>(p, batch, head, steps, exponents);
    const int entered = sequences(p, batch, steps);
    double sum = 0;
    for (int t = 0; t < CHUNK; ++t) {
      if (first[t] == t) sum = 0;
      sum += exponents[t];
      high[t] = (Real)sum;
      const Real rest = (Real)(sum - (double)high[t]);
      low[t] = rest == rest ? rest : (Real)0;
    }
    for (int t = 0; t < CHUNK; t += F::LANES) {
      using fuseport::FUSEPORT_ISA::load;
      store<F>(outer + t, exp<F>(load<F>(high + t)));
      const Vector left = (high[CHUNK - 1] - load<F>(high + t)) + (low[CHUNK - 1] - load<F>(low + t));
      store<F>(remaining + t, exp<F>(left));
      store<F>(weight + t, exp<F>(left) * load<F>(step + t));
    }
    for (int t = entered; t < CHUNK; ++t) outer[t] = 0;
    for (int t = 0; t < first[CHUNK - 1]; ++t) remaining[t] = weight[t] = 0;
    decay = outer[CHUNK - 1];
  }

  void load_decays(const Problem& p, int64_t batch, int64_t head, const Steps& steps,
                   double* exponents) {
    const Strided& from = p.log_decay;
    const Real* at =
        (const Real*)from.data + batch * from.batch + steps.start * from.step + head * from.head;
    for (int t = 0; t < CHUNK; ++t) {
      exponents[t] = t < steps.count ? (double)at[t * from.step] : 0;
      if (exponents[t] < LEAST_LOG_DECAY) exponents[t] = LEAST_LOG_DECAY;
      step[t] = t < steps.count;
    }
  }

  template <class Stored>
  void load_steps(const Problem& p, int64_t batch, int64_t head, const Steps& steps,
                  double* exponents) {
    const Real bias = ((const Real*)p.dt_bias)[head], A = ((const Real*)p.A)[head];
    const Real* limit = (const Real*)p.dt_limit;
    const Stored* from = (const Stored*)p.dt.data + batch * p.dt.batch +
                         steps.start * p.dt.step + head * p.dt.head;
    for (int t = 0; t < CHUNK; ++t)
      raw[t] = t < steps.count ? (Real)(to_real(from[t * p.dt.step]) + bias) : (Real)0;
    for (int t = 0; t < CHUNK; t += F::LANES) {
      Vector s = fuseport::FUSEPORT_ISA::load<F>(raw + t);
      if (p.softplus) s = softplus<F>(s);
      store<F>(smooth + t, s);
      s = at_most<F>(limit[1], at_least<F>(limit[0], s));
      store<F>(step + t, first_lanes<F>(s, steps.count - t));
    }
    for (int t = 0; t < CHUNK; ++t) exponents[t] = (double)step[t] * (double)A;
  }

  // Sets `first`; how many steps are of the sequence that enters the chunk. Those past the end are
  // of the last one.
  int sequences(const Problem& p, int64_t batch, const Steps& steps) {
    const int32_t* of = p.seq_idx + batch * p.length + steps.start;
    const int begin = steps.start > 0 ? 0 : 1;
    int32_t changed = 0;
    for (int t = begin; t < steps.count; ++t) changed |= of[t] ^ of[t - 1];
    memset(first, 0, sizeof first);
    if (!changed) return CHUNK;
    int entered = CHUNK, latest = 0;
    for (int t = begin; t < CHUNK; ++t) {
      if (t < steps.count && of[t] != of[t - 1]) {
        latest = t;
        if (entered == CHUNK) entered = t;
      }
      first[t] = latest;
    }
    return entered;
  }

  // exp(c_t - c_s), for a vector of s from `s` on; 0 where s > t, and in other sequences.
  inline __attribute__((always_inline)) Vector between(int t, int s) const {
    using fuseport::FUSEPORT_ISA::load;
    const Vector difference = (high[t] - load<F>(high + s)) + (low[t] - load<F>(low + s));
    const Vector decays = first_lanes<F>(exp<F>(difference), t + 1 - s);
    if (__builtin_expect(first[t] <= s, 1)) return decays;
    return lanes_from<F>(decays, first[t] - s);
  }

  // The first vector of a row of M that is not zero.
  inline __attribute__((always_inline)) int begin(int t) const {
    return first[t] / F::LANES * F::LANES;
  }
};

// M_ts, (64, 64): zero above the diagonal, and between sequences.
template <class F>
static void load_M(const Decays<F>& k, const typename F::Real* CB, int rows,
                   typename F::Real* M) {
  memset(M, 0, sizeof *M * rows * CHUNK);
  for (int t = 0; t < rows; ++t)
    for (int s = k.begin(t); s <= t; s += F::LANES)
      store<F>(M + t * CHUNK + s,
               first_lanes<F>(load<F>(CB + t * CHUNK + s), t + 1 - s) * k.between(t, s) *
                   load<F>(k.step + s));
}

// to = from, each row times its scale.
template <class F>
static void scale_rows(const typename F::Real* from, const typename F::Real* scale, int rows,
                       int64_t stride, typename F::Real* to) {
  for (int t = 0; t < rows; ++t)
    for (int64_t i = 0; i < stride; i += F::LANES)
      store<F>(to + t * stride + i, load<F>(from + t * stride + i) * scale[t]);
}

// The state after a chunk, (N, padded P), from that before it.
template <class F>
static void advance(const Problem& p, const Decays<F>& k, const Prepared<F>& of, const Steps& steps,
                    const typename F::Real* x, typename F::Real* weighted,
                    typename F::Real* state) {
  const int64_t width = padded<F>(p.width), states = padded<F>(p.states);
  scale_rows<F>(x, k.weight, steps.rows, width, weighted);
  Product<F> product{{of.B, 1, states}, weighted, width, state, width, (int)p.states, (int)width,
                     steps.count};
  product.keep = k.decay;  // 0 clears what was there
  multiply<F>(product);
}

// y without D: (rows, padded P).
template <class F>
static void outputs(const Problem& p, const Decays<F>& k, const Prepared<F>& of, const Steps& steps,
                    const typename F::Real* x, const typename F::Real* state,
                    typename F::Real* M, typename F::Real* y) {
  const int64_t width = padded<F>(p.width), states = padded<F>(p.states);
  Product<F> read{{of.C, states, 1}, state, width, y, width, steps.rows, (int)width, (int)p.states};
  read.scale = k.outer;
  multiply<F>(read);
  load_M<F>(k, of.CB, steps.rows, M);
  Product<F> within{{M, CHUNK, 1}, x, width, y, width, steps.rows, (int)width, steps.rows};
  within.keep = 1;
  multiply<F>(within, Zeros::above);
}

// States as (b, H, P, N) become (N, padded P), and back.
template <class F>
static void load_state(const Problem& p, const void* from, int64_t batch, int64_t head,
                       typename F::Real* state) {
  const int64_t width = padded<F>(p.width);
  memset(state, 0, sizeof *state * p.states * width);
  const auto* at = (const typename F::Real*)from + (batch * p.heads + head) * p.width * p.states;
  load_block<F>(at, 1, p.states, (int)p.states, (int)p.width, state, (int)width);
}

template <class F>
static void store_state(const Problem& p, const typename F::Real* state, int64_t batch,
                        int64_t head, void* to) {
  auto* at = (typename F::Real*)to + (batch * p.heads + head) * p.width * p.states;
  store_block<F>(state, (int)padded<F>(p.width), (int)p.states, (int)p.width, at, 1, p.states);
}

// D of a head, up to whole vectors.
template <class F>
static void load_D(const Problem& p, int64_t head, typename F::Real* row) {
  memset(row, 0, sizeof *row * padded<F>(p.width));
  memcpy(row, (const typename F::Real*)p.D + head * p.width, sizeof *row * p.width);
}

// Rows of (b, l, H, P), contiguous.
template <class F, class Stored>
static void store_steps(const Problem& p, const typename F::Real* tile, int64_t batch, int64_t head,
                        const Steps& steps, void* to) {
  Stored* at = (Stored*)to + ((batch * p.length + steps.start) * p.heads + head) * p.width;
  store_block<F>(tile, (int)padded<F>(p.width), steps.count, (int)p.width, at, p.heads * p.width,
                 1);
}

}  // namespace fuseport::ssd_chunk_scan::FUSEPORT_ISA
