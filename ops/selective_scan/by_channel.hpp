// The forward kernel for 16 states, of which time is the last dimension in memory: states in lanes, one
// channel after another. What the steps of a channel have in common is looked up, which takes half the
// instructions of an exponential, and but for B and C nothing is transposed.
//
// exp(δ̂·A) = 2^(j·step·c) · exp(rest·A), where c = log2(e)·A, step is a power of two for which step·|c| is
// at most 1/16, j = nearest(δ̂/step), and rest = δ̂ - j·step, without error. The first factor is a row of
// one table, or the product of rows of two; for the second, |rest·A| ≤ ln(2)/32, of which Taylor's
// polynomial of degree 3 is good to a tenth of an ulp.
#pragma once

#include "selective_scan/tiles.hpp"

namespace fuseport::selective_scan::FUSEPORT_ISA {

constexpr int64_t SPAN = 16 * CHUNK;  // steps for which B and C are laid out
constexpr int64_t SHORT = (WIDTH == 64 ? 10 : 6) * CHUNK;  // fewer do not repay the tables
constexpr int STATES = 16;
constexpr int FINE = 64, COARSE = 64;  // rows of the tables: of j % FINE, and of j / FINE

template <class F>
struct ChannelScratch {
  using Real = typename F::Real;
  Real *B, *C;        // [step][state] of a span
  Real* tables;       // of each channel [row][state], fine before coarse
  uint32_t* known;    // of each channel, how many j are in the tables
  Real* exponent;     // [channel][state]
  Real* states;       // [chunk of the span][channel][state], before each chunk; then the present ones
  Real *tile, *D, *bias, *limit;
  int64_t bytes;

  ChannelScratch(const Problem&, void* base) {
    Scratch s{(char*)base};
    s.take(SPAN * STATES, &B, &C);
    s.take(BLOCK * (FINE + COARSE) * STATES, &tables);
    s.take(BLOCK, &known);
    s.take(BLOCK * STATES, &exponent, &tile);
    s.take((SPAN / CHUNK + 1) * BLOCK * STATES, &states);
    s.take(BLOCK, &D, &bias, &limit);
    bytes = s.used;
  }

  Real* before(int64_t chunk) const { return states + chunk * BLOCK * STATES; }
  Real* now() const { return before(SPAN / CHUNK); }
};

// Whether this kernel is for vectors of such reals, and for a problem.
template <class F>
constexpr bool BY_CHANNEL = WIDTH >= 32 && sizeof(typename F::Real) == 4;

static bool by_channel(const Problem& p, const Forward& f) {
  return p.states == STATES && p.length >= SHORT && p.u.time == 1 && p.delta.time == 1 &&
         (!p.z.data || p.z.time == 1) && f.out.data && f.out.time == 1 && p.B.varies && p.C.varies;
}

// How decays come: from one table, from two, or each by its own exponential.
enum class Decays { FINE, BOTH, EACH };

// Some steps, as many as a vector has lanes.
template <class F>
struct SomeSteps {
  alignas(64) typename F::Real rest[F::LANES];  // δ̂ itself where no table serves
  typename F::Real drive[F::LANES];             // δ̂·u
  uint32_t index[F::LANES];                     // j
};

// The first `count` numbers from one on, or zeros. WHOLE: there are as many as a vector has lanes.
template <class F, bool WHOLE, class Stored>
FUSEPORT_INLINE typename F::Vector numbers(const Stored* from, int64_t count) {
  if (WHOLE || count >= F::LANES) return load_reals<F>(from);
  typename F::Real some[F::LANES] = {};
  for (int i = 0; i < count; ++i) some[i] = to_real(from[i]);
  return load<F>(some);
}

// Of one channel. Passed by value, so that nothing of what registers hold is where a call might change it.
template <class F>
struct Tables {
  using Vector = typename F::Vector;
  using Real = typename F::Real;
  using Bits = typename F::Bits;
  static constexpr int LANES = F::LANES;
  // The largest |c| that has tables: the cube of A is finite.
  static constexpr Real STEEP = (Real)0x1p30;

  Real *fine, *coarse;
  const Real* exponent;
  uint32_t* known;
  Real limit, step;

  Tables(const ChannelScratch<F>& s, int channel)
      : fine(s.tables + channel * (FINE + COARSE) * STATES), coarse(fine + FINE * STATES),
        exponent(s.exponent + channel * STATES), known(s.known + channel), limit(s.limit[channel]) {
    // FAR / limit is the largest |c|, or 1; without the mantissa, a power of two.
    const Bits mantissa = ~Bits{} >> (32 - F::MANTISSA);
    const Vector power = (Vector)((Bits)splat<F>(limit) & ~mantissa);
    step = power[0] * (Real)(1 / F::FAR / 16);
  }

  // Where some j is not in the tables: they grow, unless it lies beyond them, as that of a negative δ̂
  // and of NaN does, or A is too large.
  __attribute__((noinline)) static Decays with(Tables tables, Bits index, Vector delta, Real* rest) {
    uint32_t last = 0;
    for (int i = 0; i < LANES; ++i) last = index[i] > last ? index[i] : last;
    if (last >= FINE * COARSE || !(tables.limit >= F::FAR / STEEP)) {
      store<F>(rest, bounded<F>(delta, splat<F>(tables.limit)));
      return Decays::EACH;
    }
    const auto build = [&](Real* table, uint32_t from, uint32_t to, Real size) {
      for (uint32_t row = from; row < to; ++row)
        for (int at = 0; at < STATES; at += LANES)
          store<F>(table + row * STATES + at,
                   exp2_of_product<F>(splat<F>(size * (Real)(int)row),
                                      load<F>(tables.exponent + at)));
    };
    const uint32_t known = *tables.known, rows = last / FINE + 1;
    build(tables.fine, known < FINE ? known : FINE, last < FINE ? last + 1 : FINE, tables.step);
    if (rows > 1)
      build(tables.coarse, known > FINE ? known / FINE : 0, rows, tables.step * FINE);
    *tables.known = rows > 1 ? rows * FINE : last + 1;
    return rows > 1 ? Decays::BOTH : Decays::FINE;
  }
};

// The states of a channel, and what becomes of them.
template <class F>
class Channel {
  using Vector = typename F::Vector;
  using Real = typename F::Real;
  using Bits = typename F::Bits;
  static constexpr int LANES = F::LANES, VECTORS = STATES / LANES;

  const Tables<F> tables;
  const Vector step, per;  // `per` is 1 / step
  Vector h[VECTORS], first[VECTORS], second[VECTORS], third[VECTORS];  // Taylor's
  Vector products[LANES];  // C·h of some steps

 public:
  FUSEPORT_INLINED Channel(const ChannelScratch<F>& s, const Problem& p, const Unit& unit,
                           int channel)
      : tables(s, channel), step(splat<F>(tables.step)), per((Real)1 / step) {
    const Real* A = (const Real*)p.A + (unit.channel + channel) * STATES;
    for (int v = 0; v < VECTORS; ++v) {
      h[v] = load<F>(s.now() + channel * STATES + v * LANES);
      first[v] = load<F>(A + v * LANES);
      second[v] = first[v] * first[v] * (Real)0.5;
      third[v] = first[v] * second[v] * (Real)(1.0 / 3);
    }
  }

  FUSEPORT_INLINED void save(Real* to) const {
    for (int v = 0; v < VECTORS; ++v) store<F>(to + v * LANES, h[v]);
  }

  FUSEPORT_INLINED void prepare(Vector delta, Vector u, SomeSteps<F>& to) const {
    const Vector shifted = delta * per + F::ROUND;
    const Bits index = (Bits)shifted - (Bits)splat<F>(F::ROUND);
    memcpy(to.index, &index, sizeof index);
    store<F>(to.rest, delta - (shifted - F::ROUND) * step);
    store<F>(to.drive, delta * u);
  }

  // To be asked before these steps are scanned.
  FUSEPORT_INLINED Decays decays(Vector delta, SomeSteps<F>& steps) const {
    Bits index;
    memcpy(&index, steps.index, sizeof index);
    const uint32_t known = *tables.known;
    if (any(index >= Bits{} + known)) [[unlikely]]
      return Tables<F>::with(tables, index, delta, steps.rest);
    return known > FINE ? Decays::BOTH : Decays::FINE;
  }

  // A quarter of some steps, given B and C at the first of them.
  template <Decays DECAYS, int QUARTER>
  FUSEPORT_INLINED void scan(const SomeSteps<F>& steps, const Real* B, const Real* C) {
#pragma GCC unroll 4
    for (int i = QUARTER * LANES / 4; i < (QUARTER + 1) * LANES / 4; ++i) {
      const Vector rest = splat<F>(steps.rest[i]), drive = splat<F>(steps.drive[i]);
      const uint32_t j = steps.index[i];
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; ++v) {
        const int at = v * LANES;
        Vector a;
        if constexpr (DECAYS == Decays::EACH) {
          a = exp2_of_product<F>(rest, load<F>(tables.exponent + at));
        } else {
          a = load<F>(tables.fine + j % FINE * STATES + at);
          if constexpr (DECAYS == Decays::BOTH)
            a *= load<F>(tables.coarse + j / FINE * STATES + at);
          a += a * (((third[v] * rest + second[v]) * rest + first[v]) * rest);
        }
        h[v] = a * h[v] + drive * load<F>(B + i * STATES + at);
        const Vector product = load<F>(C + i * STATES + at) * h[v];
        products[i] = v == 0 ? product : products[i] + product;
      }
    }
  }

  // Σ C·h of them, after the last quarter.
  FUSEPORT_INLINED Vector y() { return sums_of_lanes<F>(products); }
};

// What a channel reads and writes in a span.
template <class Stored>
struct Rows {
  const Stored *u, *delta, *z;
  Stored* out;
};

// δ̂ of `count` steps, or more, which leaves states as they are past the last one.
template <class F, bool WHOLE>
FUSEPORT_INLINE typename F::Vector first_steps(typename F::Vector delta, int64_t count) {
  if (WHOLE || count >= F::LANES) return delta;
  return first_lanes<F>(delta, (int)count);
}

// Steps from `t` on, as many as a vector has lanes, through the states, and those from `next` on up to
// them. What comes before states and after them are long chains of instructions that wait for each other:
// they go between the parts of a scan, in which a processor finds enough to do meanwhile. WHOLE: all
// steps are there. Returns how decays come for the next ones.
template <class F, class Stored, bool SOFTPLUS, bool GATED, bool WHOLE, Decays DECAYS>
FUSEPORT_INLINE Decays scan_some(Channel<F>& channel, const SomeSteps<F>& now, SomeSteps<F>& soon,
                                 const typename F::Real* B, const typename F::Real* C,
                                 typename F::Vector bias, typename F::Vector D,
                                 const Rows<Stored>& rows, int64_t t, int64_t next,
                                 int64_t count) {
  using Vector = typename F::Vector;
  const int64_t left = count - next;
  Vector delta = numbers<F, WHOLE>(rows.delta + next, left) + bias;
  Vector gate = Vector{}, e = gate, gate_e = gate;
  const auto reduced = reduced_minus_magnitude<F>(delta);
  channel.template scan<DECAYS, 0>(now, B, C);
  if constexpr (SOFTPLUS) e = reduced.exp();
  if constexpr (GATED) gate = numbers<F, WHOLE>(rows.z + t, count - t);
  const auto reduced_gate = reduced_minus_magnitude<F>(gate);
  channel.template scan<DECAYS, 1>(now, B, C);
  if constexpr (SOFTPLUS) delta = softplus_of<F>(delta, e);
  delta = first_steps<F, WHOLE>(delta, left);
  if constexpr (GATED) gate_e = reduced_gate.exp();
  channel.template scan<DECAYS, 2>(now, B, C);
  channel.prepare(delta, numbers<F, WHOLE>(rows.u + next, left), soon);
  if constexpr (GATED) gate *= logistic_of<F>(gate, gate_e);
  channel.template scan<DECAYS, 3>(now, B, C);

  Vector y = channel.y() + D * numbers<F, WHOLE>(rows.u + t, count - t);
  if constexpr (GATED) y *= gate;
  if (WHOLE || count - t >= F::LANES) {
    store_reals<F>(y, rows.out + t);
  } else {
    for (int i = 0; i < count - t; ++i) from_real(y[i], rows.out + t + i);
  }
  return channel.decays(delta, soon);
}

template <class F, class Stored, bool SOFTPLUS, bool GATED>
static void scan_rows(const ChannelScratch<F>& s, const Problem& p, const Unit& unit, int index,
                      int64_t count, const Rows<Stored>& rows, const Rows<Stored>& next_rows) {
  using Vector = typename F::Vector;
  constexpr int LANES = F::LANES;
  const Vector bias = splat<F>(s.bias[index]), D = splat<F>(s.D[index]);
  Channel<F> channel(s, p, unit, index);
  SomeSteps<F> some[2];
  Vector delta = numbers<F, false>(rows.delta, count) + bias;
  if constexpr (SOFTPLUS) delta = softplus<F>(delta);
  delta = first_steps<F, false>(delta, count);
  channel.prepare(delta, numbers<F, false>(rows.u, count), some[0]);
  Decays decays = channel.decays(delta, some[0]);
  for (int64_t t = 0; t < count; t += LANES) {
    if (t % CHUNK == 0) channel.save(s.before(t / CHUNK) + index * STATES);
    for (const Stored* row : {next_rows.u, next_rows.delta, (const Stored*)next_rows.out})
      __builtin_prefetch(row + t);
    if constexpr (GATED) __builtin_prefetch(next_rows.z + t);
    const auto scan = [&]<bool WHOLE, Decays DECAYS>() __attribute__((always_inline)) {
      const int now = t / LANES % 2;
      decays = scan_some<F, Stored, SOFTPLUS, GATED, WHOLE, DECAYS>(
          channel, some[now], some[1 - now], s.B + t * STATES, s.C + t * STATES, bias, D, rows, t,
          t + LANES < count ? t + LANES : t, count);
    };
    if (count - t < 2 * LANES || decays == Decays::EACH) {
      if (decays == Decays::BOTH) {
        scan.template operator()<false, Decays::BOTH>();
      } else if (decays == Decays::FINE) {
        scan.template operator()<false, Decays::FINE>();
      } else {
        scan.template operator()<false, Decays::EACH>();
      }
    } else if (decays == Decays::BOTH) {
      scan.template operator()<true, Decays::BOTH>();
    } else {
      scan.template operator()<true, Decays::FINE>();
    }
  }
  channel.save(s.now() + index * STATES);
}

template <class F, class Stored>
static void scan_span(const ChannelScratch<F>& s, const Problem& p, const Forward& f,
                      const Unit& unit, const Steps& steps, int channel) {
  const auto rows = [&](int channel) {
    const auto row = [&](const auto& q) {
      return first_of<const Stored>(q, unit, steps) + channel * q.channel;
    };
    return Rows<Stored>{row(p.u), row(p.delta), p.z.data ? row(p.z) : nullptr, (Stored*)row(f.out)};
  };
  const auto run = [&]<bool SOFTPLUS, bool GATED>() {
    scan_rows<F, Stored, SOFTPLUS, GATED>(s, p, unit, channel, steps.count, rows(channel),
                                          rows(channel + 1));
  };
  if (p.softplus) {
    p.z.data ? run.template operator()<true, true>() : run.template operator()<true, false>();
  } else {
    p.z.data ? run.template operator()<false, true>() : run.template operator()<false, false>();
  }
}

// B or C over a span, as [step][state]; zero past the last step.
template <class F, class Stored>
static void load_by_step(const Coefficient& k, const Unit& unit, const Steps& steps,
                         typename F::Real* tile) {
  const Stored* from = (const Stored*)k.data + unit.batch * k.batch +
                       unit.channel / k.channels * k.group + steps.start * k.time;
  if (steps.count < SPAN) memset(tile, 0, sizeof *tile * SPAN * STATES);
  load_block<F>(from, k.time, k.state, steps.count, STATES, tile, STATES);
}

template <class F, class Stored>
static void forward_by_channel(const Problem& p, const Forward& f, int64_t index, void* scratch) {
  using Real = typename F::Real;
  const Unit unit(p, index);
  const ChannelScratch<F> s(p, scratch);
  const auto save = [&](const Real* states, int64_t chunk) {
    load_block<F>(states, 1, STATES, STATES, BLOCK, s.tile, BLOCK);
    store_states<F>(s.tile, STATES, unit, saved_states((Real*)f.chunk_states, p, unit, chunk),
                    p.channels, 1);
  };
  load_A<F>(p, unit, s.tile);
  to_exponents<F>(STATES, s.tile, s.limit);
  load_block<F>(s.tile, 1, BLOCK, BLOCK, STATES, s.exponent, STATES);
  load_channels(p.D, unit, s.D);
  load_channels(p.delta_bias, unit, s.bias);
  clear(BLOCK, s.known);
  clear(BLOCK * STATES, s.now());

  for (int64_t start = 0; start < p.length; start += SPAN) {
    const Steps steps(p, start, SPAN);
    load_by_step<F, Stored>(p.B, unit, steps, s.B);
    load_by_step<F, Stored>(p.C, unit, steps, s.C);
    for (int channel = 0; channel < unit.channels; ++channel)
      scan_span<F, Stored>(s, p, f, unit, steps, channel);
    for (int64_t t = 0; t < steps.count; t += CHUNK)
      save(s.before(t / CHUNK), (start + t) / CHUNK);
  }
  save(s.now(), p.chunks());
  if (f.last_state)
    memcpy((Real*)f.last_state + (unit.batch * p.channels + unit.channel) * STATES, s.now(),
           sizeof(Real) * unit.channels * STATES);
}

}  // namespace fuseport::selective_scan::FUSEPORT_ISA
