// The forward kernel for 16 states, of which time is the last dimension in memory: states in lanes, one
// channel after another, with decays from tables. But for B and C nothing is transposed.
#pragma once

#include "selective_scan/decays.hpp"

namespace fuseport::selective_scan::FUSEPORT_ISA {

constexpr int64_t SPAN = 16 * CHUNK;  // steps for which B and C are laid out
constexpr int64_t SHORT = (WIDTH == 64 ? 10 : 6) * CHUNK;  // fewer do not repay the tables

template <class F>
struct ChannelScratch {
  using Real = typename F::Real;
  DecayScratch<F> decays;
  Real *B, *C;   // [step][state] of a span
  Real* states;  // [chunk of the span][channel][state], before each chunk; then the present ones
  Real *tile, *D, *bias;
  int64_t bytes;

  ChannelScratch(const Problem&, void* base) {
    Scratch s{(char*)base};
    decays.take(s);
    s.take(SPAN * STATES, &B, &C);
    s.take((SPAN / CHUNK + 1) * BLOCK * STATES, &states);
    s.take(BLOCK * STATES, &tile);
    s.take(BLOCK, &D, &bias);
    bytes = s.used;
  }

  Real* before(int64_t chunk) const { return states + chunk * BLOCK * STATES; }
  Real* now() const { return before(SPAN / CHUNK); }
};

// Whether this kernel is the one for a problem.
static bool by_channel(const Problem& p, const Forward& f) {
  return p.states == STATES && p.length >= SHORT && p.u.time == 1 && p.delta.time == 1 &&
         (!p.z.data || p.z.time == 1) && (!f.out.data || f.out.time == 1) && p.B.varies &&
         p.C.varies;
}

// Some steps, as many as a vector has lanes.
template <class F>
struct SomeSteps : DividedSteps<F> {
  typename F::Real drive[F::LANES];  // δ̂·u
};

// The states of a channel.
template <class F>
class Channel {
  using Vector = typename F::Vector;
  using Real = typename F::Real;
  static constexpr int LANES = F::LANES, VECTORS = STATES / LANES;

  Vector h[VECTORS], products[LANES];  // C·h of some steps

 public:
  const Tables<F> tables;

  FUSEPORT_INLINED Channel(const ChannelScratch<F>& s, const Problem& p, const Unit& unit,
                           int channel)
      : tables(s.decays, p, unit, channel) {
    for (int v = 0; v < VECTORS; ++v) h[v] = load<F>(s.now() + channel * STATES + v * LANES);
  }

  FUSEPORT_INLINED void save(Real* to) const {
    for (int v = 0; v < VECTORS; ++v) store<F>(to + v * LANES, h[v]);
  }

  // A quarter of some steps, given B and C at the first of them.
  template <Source SOURCE, int QUARTER>
  FUSEPORT_INLINED void scan(const SomeSteps<F>& steps, const Real* B, const Real* C) {
#pragma GCC unroll 4
    for (int i = QUARTER * LANES / 4; i < (QUARTER + 1) * LANES / 4; ++i) {
      const Vector rest = splat<F>(steps.rest[i]), drive = splat<F>(steps.drive[i]);
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; ++v) {
        const int at = i * STATES + v * LANES;
        const Vector a = tables.template decay<SOURCE>(rest, steps.index[i], v);
        h[v] = a * h[v] + drive * load<F>(B + at);
        const Vector product = load<F>(C + at) * h[v];
        products[i] = v == 0 ? product : products[i] + product;
      }
    }
  }

  // Σ C·h of them, after the last quarter.
  FUSEPORT_INLINED Vector y() { return sums_of_lanes<F>(products); }
};

// What a channel reads and writes in a span; `out` is null where only states are wanted.
template <class Stored>
struct Rows {
  const Stored *u, *delta, *z;
  Stored* out;
};

// Steps from `t` on, as many as a vector has lanes, through the states, and those from `next` on up to
// them. What comes before states and after them are long chains of instructions that wait for each other:
// they go between the parts of a scan, in which a processor finds enough to do meanwhile. WHOLE: all
// steps are there. Returns whence the decays of the next ones come.
template <class F, class Stored, bool SOFTPLUS, bool GATED, bool WHOLE, Source SOURCE>
FUSEPORT_INLINE Source scan_some(Channel<F>& channel, const SomeSteps<F>& now, SomeSteps<F>& soon,
                                 const typename F::Real* B, const typename F::Real* C,
                                 typename F::Vector bias, typename F::Vector D,
                                 const Rows<Stored>& rows, int64_t t, int64_t next,
                                 int64_t count) {
  using Vector = typename F::Vector;
  const int64_t left = count - next;
  Vector delta = numbers<F, WHOLE>(rows.delta + next, left) + bias;
  Vector gate = Vector{}, e = gate, gate_e = gate;
  const auto reduced = reduced_minus_magnitude<F>(delta);
  channel.template scan<SOURCE, 0>(now, B, C);
  if constexpr (SOFTPLUS) e = reduced.exp();
  if constexpr (GATED) gate = numbers<F, WHOLE>(rows.z + t, count - t);
  const auto reduced_gate = reduced_minus_magnitude<F>(gate);
  channel.template scan<SOURCE, 1>(now, B, C);
  if constexpr (SOFTPLUS) delta = softplus_of<F>(delta, e);
  delta = first_steps<F, WHOLE>(delta, left);
  if constexpr (GATED) gate_e = reduced_gate.exp();
  channel.template scan<SOURCE, 2>(now, B, C);
  channel.tables.divide(delta, soon);
  store<F>(soon.drive, delta * numbers<F, WHOLE>(rows.u + next, left));
  if constexpr (GATED) gate *= logistic_of<F>(gate, gate_e);
  channel.template scan<SOURCE, 3>(now, B, C);

  Vector y = channel.y() + D * numbers<F, WHOLE>(rows.u + t, count - t);
  if constexpr (GATED) y *= gate;
  if (rows.out) store_numbers<F, WHOLE>(y, rows.out + t, count - t);
  return channel.tables.source(delta, soon);
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
  channel.tables.divide(delta, some[0]);
  store<F>(some[0].drive, delta * numbers<F, false>(rows.u, count));
  Source source = channel.tables.source(delta, some[0]);
  for (int64_t t = 0; t < count; t += LANES) {
    if (t % CHUNK == 0) channel.save(s.before(t / CHUNK) + index * STATES);
    for (const Stored* row : {next_rows.u, next_rows.delta, (const Stored*)next_rows.out})
      __builtin_prefetch(row + t);
    if constexpr (GATED) __builtin_prefetch(next_rows.z + t);
    const auto scan = [&]<bool WHOLE, Source SOURCE>() __attribute__((always_inline)) {
      const int now = t / LANES % 2;
      source = scan_some<F, Stored, SOFTPLUS, GATED, WHOLE, SOURCE>(
          channel, some[now], some[1 - now], s.B + t * STATES, s.C + t * STATES, bias, D, rows, t,
          t + LANES < count ? t + LANES : t, count);
    };
    if (count - t < 2 * LANES || source == Source::EACH) {
      if (source == Source::BOTH) {
        scan.template operator()<false, Source::BOTH>();
      } else if (source == Source::FINE) {
        scan.template operator()<false, Source::FINE>();
      } else {
        scan.template operator()<false, Source::EACH>();
      }
    } else if (source == Source::BOTH) {
      scan.template operator()<true, Source::BOTH>();
    } else {
      scan.template operator()<true, Source::FINE>();
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
    const Stored* z = p.z.data ? row(p.z) : nullptr;
    return Rows<Stored>{row(p.u), row(p.delta), z, f.out.data ? (Stored*)row(f.out) : nullptr};
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
  s.decays.begin(p, unit);
  load_channels(p.D, unit, s.D);
  load_channels(p.delta_bias, unit, s.bias);
  clear(BLOCK * STATES, s.now());

  for (int64_t start = 0; start < p.length; start += SPAN) {
    const Steps steps(p, start, SPAN);
    if (steps.count < SPAN) clear(SPAN * STATES, s.B, s.C);
    load_by_step<F, Stored>(p.B, unit, steps, s.B, STATES);
    load_by_step<F, Stored>(p.C, unit, steps, s.C, STATES);
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
