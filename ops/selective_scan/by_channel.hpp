// The forward kernel for 16 states, of which time is the last dimension in memory: states in lanes, one
// channel after another, with decays from tables. But for B and C nothing is transposed.
#pragma once

#include "native/parts.hpp"
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
  Real* unread;  // in the place of `out` where only states are wanted: to ask each time takes 1.07 of the time
  Real *D, *bias;
  int64_t bytes;

  ChannelScratch(const Problem&, void* base) {
    Scratch s{(char*)base};
    decays.take(s);
    s.take(SPAN * STATES, &B, &C);
    s.take((SPAN / CHUNK + 1) * BLOCK * STATES, &states);
    s.take(SPAN, &unread);
    s.take(BLOCK, &D, &bias);
    bytes = s.used;
  }

  Real* before(int64_t chunk) const { return states + chunk * BLOCK * STATES; }
  Real* now() const { return before(SPAN / CHUNK); }
};

// Whether a problem is one for this kernel and its backward.
static bool by_channel(const Problem& p) {
  return !p.complex && p.states == STATES && p.length >= SHORT && p.u.time == 1 &&
         p.delta.time == 1 && (!p.z.data || p.z.time == 1) && p.B.varies && p.C.varies;
}

static bool by_channel(const Problem& p, const Forward& f) {
  return by_channel(p) && (!f.out.data || f.out.time == 1);
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

  FUSEPORT_INLINED void prepare(Vector delta, Vector u, SomeSteps<F>& steps) const {
    tables.divide(delta, steps);
    store<F>(steps.drive, delta * u);
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

// What a channel reads and writes in a span.
template <class Stored>
struct Rows {
  const Stored *u, *delta, *z;
  Stored* out;
};

// The steps of a vector from `t` on through the states, and those of the next one up to them. What comes
// before states and after them are long chains of instructions that wait for each other: they go between
// the parts of a scan, in which a processor finds enough to do meanwhile. `part` and `next` say how many
// steps there are; past the last one δ̂ is zero, which leaves states as they are. Returns whence the decays
// of the next ones come.
template <class F, class Stored, bool SOFTPLUS, bool GATED, Source SOURCE, class Part>
FUSEPORT_INLINE Source scan_some(Channel<F>& channel, const SomeSteps<F>& now, SomeSteps<F>& soon,
                                 const typename F::Real* B, const typename F::Real* C,
                                 typename F::Vector bias, typename F::Vector D,
                                 const Rows<Stored>& rows, int64_t t, Part part, Part next) {
  using Vector = typename F::Vector;
  Vector delta = next.load(rows.delta + t + F::LANES) + bias;
  Vector gate = Vector{}, e = gate, gate_e = gate;
  const auto reduced = reduced_minus_magnitude<F>(delta);
  channel.template scan<SOURCE, 0>(now, B, C);
  if constexpr (SOFTPLUS) e = reduced.exp();
  if constexpr (GATED) gate = part.load(rows.z + t);
  const auto reduced_gate = reduced_minus_magnitude<F>(gate);
  channel.template scan<SOURCE, 1>(now, B, C);
  if constexpr (SOFTPLUS) delta = softplus_of<F>(delta, e);
  delta = next.chosen(delta, 0);
  if constexpr (GATED) gate_e = reduced_gate.exp();
  channel.template scan<SOURCE, 2>(now, B, C);
  channel.prepare(delta, next.load(rows.u + t + F::LANES), soon);
  if constexpr (GATED) gate *= logistic_of<F>(gate, gate_e);
  channel.template scan<SOURCE, 3>(now, B, C);

  Vector y = channel.y() + D * part.load(rows.u + t);
  if constexpr (GATED) y *= gate;
  part.store(y, rows.out + t);
  return channel.tables.source(delta, soon);
}

template <class F, class Stored, bool SOFTPLUS, bool GATED>
static void scan_rows(const ChannelScratch<F>& s, const Problem& p, const Unit& unit, int index,
                      int64_t count, const Rows<Stored>& rows, const Rows<Stored>& next_rows) {
  using Vector = typename F::Vector;
  constexpr int LANES = F::LANES;
  const Vector bias = splat<F>(s.bias[index]), D = splat<F>(s.D[index]);
  const auto part_at = [&](int64_t t) {
    const int64_t left = count - t;
    return Part<F>{(int)(left < 0 ? 0 : left < LANES ? left : LANES)};
  };
  Channel<F> channel(s, p, unit, index);
  SomeSteps<F> some[2];
  const Part<F> first = part_at(0);
  Vector delta = first.load(rows.delta) + bias;
  if constexpr (SOFTPLUS) delta = softplus<F>(delta);
  delta = first.chosen(delta, 0);
  channel.prepare(delta, first.load(rows.u), some[0]);
  Source source = channel.tables.source(delta, some[0]);
  for (int64_t t = 0; t < count; t += LANES) {
    if (t % CHUNK == 0) channel.save(s.before(t / CHUNK) + index * STATES);
    for (const Stored* row : {next_rows.u, next_rows.delta, (const Stored*)next_rows.out})
      __builtin_prefetch(row + t);
    if constexpr (GATED) __builtin_prefetch(next_rows.z + t);
    with_source(source, [&]<Source SOURCE>() __attribute__((always_inline)) {
      const auto scan = [&](auto part, auto next) __attribute__((always_inline)) {
        const int now = t / LANES % 2;
        return scan_some<F, Stored, SOFTPLUS, GATED, SOURCE>(
            channel, some[now], some[1 - now], s.B + t * STATES, s.C + t * STATES, bias, D, rows, t,
            part, next);
      };
      if (SOURCE != Source::EACH && count - t >= 2 * LANES) {
        source = scan(Whole<F>{}, Whole<F>{});
      } else {
        source = scan(part_at(t), part_at(t + LANES));
      }
    });
  }
  channel.save(s.now() + index * STATES);
}

template <class F, class Stored>
static void scan_span(const ChannelScratch<F>& s, const Problem& p, const Forward& f,
                      const Unit& unit, const Steps& steps, int channel) {
  const bool gated = p.z.data && f.out.data;
  const auto rows = [&](int channel) {
    const auto row = [&](const auto& q) {
      return first_of<const Stored>(q, unit, steps) + channel * q.channel;
    };
    Stored* out = (Stored*)(f.out.data ? (const void*)row(f.out) : s.unread);
    return Rows<Stored>{row(p.u), row(p.delta), gated ? row(p.z) : nullptr, out};
  };
  const auto run = [&]<bool SOFTPLUS, bool GATED>() {
    scan_rows<F, Stored, SOFTPLUS, GATED>(s, p, unit, channel, steps.count, rows(channel),
                                          rows(channel + 1));
  };
  if (p.softplus) {
    gated ? run.template operator()<true, true>() : run.template operator()<true, false>();
  } else {
    gated ? run.template operator()<false, true>() : run.template operator()<false, false>();
  }
}

template <class F, class Stored>
static void forward_by_channel(const Problem& p, const Forward& f, int64_t index, void* scratch) {
  using Real = typename F::Real;
  const Unit unit(p, index);
  const ChannelScratch<F> s(p, scratch);
  const auto save = [&](const Real* states, int64_t chunk) {
    load_block<F>(states, 1, STATES, STATES, BLOCK, s.decays.tile, BLOCK);
    Real* to = saved_states((Real*)f.chunk_states, p, unit, chunk);
    store_states<F>(s.decays.tile, STATES, unit, to, p.channels, 1);
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
