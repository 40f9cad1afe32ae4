// The forward kernel: a chunk at a time, a few states at a time in registers, channels in lanes.
#pragma once

#include "selective_scan/tiles.hpp"

namespace fuseport::selective_scan::FUSEPORT_ISA {

template <class F>
struct ForwardScratch {
  using Real = typename F::Real;
  Real *u, *delta, *drive, *y, *gate;  // tiles; `delta` becomes δ̂, `drive` is δ̂·u
  Real *exponent, *state, *B, *C, *D, *bias, *limit;
  int64_t bytes;

  ForwardScratch(const Problem& p, void* base) {
    Scratch s{(char*)base};
    s.take(TILE, &u, &delta, &drive, &y, &gate);
    s.take(p.states * BLOCK, &exponent, &state);
    s.take(p.states * CHUNK, &B, &C);
    s.take(BLOCK, &D, &bias, &limit);
    bytes = s.used;
  }
};

// STATES states from `n` on, of the channels of one vector, through a chunk; with READ, adds their
// share to y.
template <class F, bool B_VARIES, bool C_VARIES, bool READ, int STATES>
static void scan_states(const ForwardScratch<F>& s, int64_t n, int channel, int steps,
                        const Ahead& ahead, Ahead::Place& place) {
  using Vector = typename F::Vector;
  using Real = typename F::Real;
  const Real *deltas = s.delta + channel, *drives = s.drive + channel;
  Real* ys = s.y + channel;
  Vector exponent[STATES], h[STATES];
  Row<F, B_VARIES> B[STATES];
  Row<F, C_VARIES> C[STATES];
  for (int i = 0; i < STATES; ++i) {
    exponent[i] = load<F>(s.exponent + (n + i) * BLOCK + channel);
    h[i] = load<F>(s.state + (n + i) * BLOCK + channel);
    B[i] = Row<F, B_VARIES>::at(s.B, n + i, channel);
    C[i] = Row<F, C_VARIES>::at(s.C, n + i, channel);
  }
  Ahead::Place soon = place;
  for (int t = 0; t < steps; ++t) {
    const int at = t * BLOCK;
    const Vector delta = load<F>(deltas + at), drive = load<F>(drives + at);
    ahead.some(soon);
    Vector y = READ ? load<F>(ys + at) : Vector{};
#pragma GCC unroll 8
    for (int i = 0; i < STATES; ++i) {
      h[i] = exp2_of_product<F>(delta, exponent[i]) * h[i] + drive * B[i][t];
      if constexpr (READ) y += C[i][t] * h[i];
    }
    if constexpr (READ) store<F>(ys + at, y);
  }
  for (int i = 0; i < STATES; ++i) store<F>(s.state + (n + i) * BLOCK + channel, h[i]);
  place = soon;
}

template <class F, bool B_VARIES, bool C_VARIES, bool READ>
static void scan_chunk(const ForwardScratch<F>& s, const Problem& p, int channels, int steps,
                       Ahead& ahead) {
  constexpr int STATES = 8;  // at a time: with A, h and the constants of exp, what registers hold
  ahead.share(visits<F, STATES>(p, channels, steps));
  Ahead::Place place = ahead.begin();
  for (int channel = 0; channel < channels; channel += F::LANES) {
    int64_t n = 0;
    for (; n + STATES <= p.states; n += STATES)
      scan_states<F, B_VARIES, C_VARIES, READ, STATES>(s, n, channel, steps, ahead, place);
    for (; n < p.states; ++n)
      scan_states<F, B_VARIES, C_VARIES, READ, 1>(s, n, channel, steps, ahead, place);
  }
}

template <class F>
static auto scan_for(const Problem& p, bool read) {
  if (!read) return p.B.varies ? scan_chunk<F, true, true, false> : scan_chunk<F, false, true, false>;
  if (p.B.varies)
    return p.C.varies ? scan_chunk<F, true, true, true> : scan_chunk<F, true, false, true>;
  return p.C.varies ? scan_chunk<F, false, true, true> : scan_chunk<F, false, false, true>;
}

// Before the states: δ̂, the drive, and D·u.
template <class F, class Stored, class Tiles>
static void prepare_scan(const Tiles& s, const Problem& p, const Unit& unit, const Steps& steps) {
  using Vector = typename F::Vector;
  load_tile<F, Stored>(p.u, unit, steps, s.u);
  load_tile<F, Stored>(p.delta, unit, steps, s.delta);
  for (int t = 0; t < steps.count; ++t)
    for (int c = 0; c < unit.channels; c += F::LANES) {
      const int at = t * BLOCK + c;
      const Vector u = load<F>(s.u + at);
      Vector delta = load<F>(s.delta + at) + load<F>(s.bias + c);
      if (p.softplus) delta = softplus<F>(delta);
      store<F>(s.delta + at, bounded<F>(delta, load<F>(s.limit + c)));
      store<F>(s.drive + at, delta * u);
      store<F>(s.y + at, load<F>(s.D + c) * u);
    }
}

// After them: the gate, and the chunk of out.
template <class F, class Stored, class Tiles>
static void write_out(const Tiles& s, const Problem& p, const Forward& f, const Unit& unit,
                      const Steps& steps) {
  using Vector = typename F::Vector;
  if (p.z.data) {
    load_tile<F, Stored>(p.z, unit, steps, s.gate);
    for (int t = 0; t < steps.count; ++t)
      for (int c = 0; c < unit.channels; c += F::LANES) {
        const int at = t * BLOCK + c;
        const Vector z = load<F>(s.gate + at);
        store<F>(s.y + at, load<F>(s.y + at) * (z * logistic<F>(z)));
      }
  }
  store_tile<F, Stored>(s.y, unit, steps, f.out);
}

// What a chunk reads and writes.
template <class Stored>
static void foresee_chunk(const Problem& p, const Forward& f, const Unit& unit, const Steps& steps,
                          Ahead* ahead) {
  for (const Sequence& s : {p.u, p.delta}) foresee_tile<Stored>(s, unit, steps, ahead);
  if (p.z.data) foresee_tile<Stored>(p.z, unit, steps, ahead);
  if (f.out.data) foresee_tile<Stored>(f.out, unit, steps, ahead);
}

template <class F, class Stored>
static void forward_unit(const Problem& p, const Forward& f, int64_t index, void* scratch) {
  using Real = typename F::Real;
  const Unit unit(p, index);
  const ForwardScratch<F> s(p, scratch);
  const bool read = f.out.data != nullptr;
  const auto scan = scan_for<F>(p, read);
  const auto save = [&](int64_t chunk) {
    Real* to = saved_states((Real*)f.chunk_states, p, unit, chunk);
    store_states<F>(s.state, p.states, unit, to, p.channels, 1);
  };
  load_A<F>(p, unit, s.exponent);
  to_exponents<F>(p.states, s.exponent, s.limit);
  load_channels(p.D, unit, s.D);
  load_channels(p.delta_bias, unit, s.bias);
  clear(p.states * BLOCK, s.state);

  for (int64_t chunk = 0; chunk < p.chunks(); ++chunk) {
    const Steps steps(p, chunk);
    save(chunk);
    prepare_scan<F, Stored>(s, p, unit, steps);
    load_coefficient<F, Stored>(p.B, p.states, unit, steps, s.B);
    if (read) load_coefficient<F, Stored>(p.C, p.states, unit, steps, s.C);
    Ahead ahead;
    if (chunk + 1 < p.chunks()) foresee_chunk<Stored>(p, f, unit, Steps(p, chunk + 1), &ahead);
    scan(s, p, unit.channels, steps.count, ahead);
    if (!read) continue;
    write_out<F, Stored>(s, p, f, unit, steps);
  }
  save(p.chunks());
  if (f.last_state) {
    Real* to = (Real*)f.last_state + (unit.batch * p.channels + unit.channel) * p.states;
    store_states<F>(s.state, p.states, unit, to, 1, p.states);
  }
}

}  // namespace fuseport::selective_scan::FUSEPORT_ISA
