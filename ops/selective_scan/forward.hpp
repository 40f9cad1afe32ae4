// The forward kernel: a slice of a chunk at a time, a few states at a time in registers, channels in lanes.
#pragma once

#include "selective_scan/squares.hpp"

namespace fuseport::selective_scan::FUSEPORT_ISA {

// Steps: with AVX-512 a chunk in two parts takes 0.98 of the time, with AVX2 1.06 of it.
constexpr int64_t SLICE = WIDTH == 64 ? CHUNK / 2 : CHUNK;
static_assert(CHUNK % SLICE == 0);

template <class F>
struct ForwardScratch {
  using Real = typename F::Real;
  Real *delta, *drive, *y;  // tiles; `delta` is δ̂, `drive` is δ̂·u
  Real *exponent, *state, *B, *C, *D, *bias, *limit;
  int64_t bytes;

  ForwardScratch(const Problem& p, void* base) {
    Scratch s{(char*)base};
    s.take(TILE, &delta, &drive, &y);
    s.take(p.states * BLOCK, &exponent, &state);
    s.take(p.states * CHUNK, &B, &C);
    s.take(BLOCK, &D, &bias, &limit);
    bytes = s.used;
  }
};

// STATES states from `n` on, of the channels of one vector, through a slice; with READ, adds their
// share to y. NEAR: all powers are, see Nearness.
template <class F, bool B_VARIES, bool C_VARIES, bool READ, bool NEAR, int STATES>
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
      h[i] = decay<F, NEAR>(delta, exponent[i]) * h[i] + drive * B[i][t];
      if constexpr (READ) y += C[i][t] * h[i];
    }
    if constexpr (READ) store<F>(ys + at, y);
  }
  for (int i = 0; i < STATES; ++i) store<F>(s.state + (n + i) * BLOCK + channel, h[i]);
  place = soon;
}

template <class F, bool B_VARIES, bool C_VARIES, bool READ, bool NEAR>
static void scan_slice(const ForwardScratch<F>& s, const Problem& p, int channels, int steps,
                       Ahead& ahead) {
  constexpr int STATES = 8;  // at a time: with A, h and the constants of exp, what registers hold
  ahead.share(visits<F, STATES>(p, channels, steps));
  Ahead::Place place = ahead.begin();
  for (int channel = 0; channel < channels; channel += F::LANES) {
    int64_t n = 0;
    for (; n + STATES <= p.states; n += STATES)
      scan_states<F, B_VARIES, C_VARIES, READ, NEAR, STATES>(s, n, channel, steps, ahead, place);
    for (; n < p.states; ++n)
      scan_states<F, B_VARIES, C_VARIES, READ, NEAR, 1>(s, n, channel, steps, ahead, place);
  }
}

template <class F, bool NEAR>
static auto scan_for(const Problem& p, bool read) {
  if (!read)
    return p.B.varies ? scan_slice<F, true, true, false, NEAR> : scan_slice<F, false, true, false, NEAR>;
  if (p.B.varies)
    return p.C.varies ? scan_slice<F, true, true, true, NEAR> : scan_slice<F, true, false, true, NEAR>;
  return p.C.varies ? scan_slice<F, false, true, true, NEAR> : scan_slice<F, false, false, true, NEAR>;
}

// Before the states: δ̂ and the drive. Whether all powers are near.
template <class F, class Stored, bool ACROSS, class Tiles>
static bool prepare_squares(const Tiles& s, const Problem& p, const Unit& unit, const Steps& steps) {
  using Vector = typename F::Vector;
  using Real = typename F::Real;
  constexpr int LANES = F::LANES, SIZE = Square<F, ACROSS>::SIZE, STRIDE = ACROSS ? LANES : BLOCK;
  alignas(64) Real us[SIZE], raws[SIZE], turned[2][SIZE];
  Nearness<F> nearness;
  each_square<F, ACROSS>(unit, steps, [&](const Square<F, ACROSS>& square) {
    const auto u = square.template rows<Stored>(p.u, us);
    const auto raw = square.template rows<Stored>(p.delta, raws);
    Real *deltas = ACROSS ? turned[0] : square.in(s.delta);
    Real *drives = ACROSS ? turned[1] : square.in(s.drive);
    const auto put = [&](int row, Vector delta) {
      const Vector limit = square.of_channel(s.limit, row);
      nearness.add(delta, limit);
      store<F>(deltas + row * STRIDE, bounded<F>(delta, limit));
      store<F>(drives + row * STRIDE, delta * u[row]);
    };
    const auto biased = [&](int row) { return raw[row] + square.of_channel(s.bias, row); };
    if (p.softplus) {
      for (int i = 0; i < LANES; ++i) put(i, softplus<F>(biased(i)));
    } else {
      for (int i = 0; i < LANES; ++i) put(i, biased(i));
    }
    if constexpr (ACROSS) {
      turn<F>(deltas, LANES, square.in(s.delta), BLOCK);
      turn<F>(drives, LANES, square.in(s.drive), BLOCK);
    }
  });
  clear(BLOCK * steps.count, s.y);
  return nearness.all();
}

template <class F, class Stored, class Tiles>
static bool prepare_scan(const Tiles& s, const Problem& p, const Unit& unit, const Steps& steps) {
  if (p.u.time == 1 && p.delta.time == 1)
    return prepare_squares<F, Stored, true>(s, p, unit, steps);
  return prepare_squares<F, Stored, false>(s, p, unit, steps);
}

// After them: D·u, the gate, and out.
template <class F, class Stored, bool ACROSS, class Tiles>
static void write_squares(const Tiles& s, const Problem& p, const Forward& f, const Unit& unit,
                          const Steps& steps) {
  using Vector = typename F::Vector;
  using Real = typename F::Real;
  constexpr int SIZE = Square<F, ACROSS>::SIZE;
  alignas(64) Real us[SIZE], zs[SIZE], outs[SIZE];
  each_square<F, ACROSS>(unit, steps, [&](const Square<F, ACROSS>& square) {
    const auto u = square.template rows<Stored>(p.u, us);
    const auto skipped = [&](int row, Vector y) __attribute__((always_inline)) {
      return y + square.of_channel(s.D, row) * u[row];
    };
    if (p.z.data) {
      const auto z = square.template rows<Stored>(p.z, zs);
      each_row<F, ACROSS>(square.in(s.y), BLOCK, [&](int row, Vector y) __attribute__((always_inline)) {
        store<F>(outs + row * F::LANES, skipped(row, y) * (z[row] * logistic<F>(z[row])));
      });
    } else {
      each_row<F, ACROSS>(square.in(s.y), BLOCK, [&](int row, Vector y) __attribute__((always_inline)) {
        store<F>(outs + row * F::LANES, skipped(row, y));
      });
    }
    square.template put<Stored>(outs, f.out);
  });
}

template <class F, class Stored, class Tiles>
static void write_out(const Tiles& s, const Problem& p, const Forward& f, const Unit& unit,
                      const Steps& steps) {
  if (f.out.time == 1) return write_squares<F, Stored, true>(s, p, f, unit, steps);
  write_squares<F, Stored, false>(s, p, f, unit, steps);
}

// What a slice reads and writes.
template <class Stored>
static void foresee_slice(const Problem& p, const Forward& f, const Unit& unit, const Steps& steps,
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
  const auto scan_near = scan_for<F, true>(p, read), scan_far = scan_for<F, ALWAYS_NEAR>(p, read);
  const auto save = [&](int64_t chunk) {
    Real* to = saved_states((Real*)f.chunk_states, p, unit, chunk);
    store_states<F>(s.state, p.states, unit, to, p.channels, 1);
  };
  load_A<F>(p, unit, s.exponent);
  to_exponents<F>(p.states, s.exponent, s.limit);
  load_channels(p.D, unit, s.D);
  load_channels(p.delta_bias, unit, s.bias);
  clear(p.states * BLOCK, s.state);

  for (int64_t start = 0; start < p.length; start += SLICE) {
    const Steps steps(p, start, SLICE);
    if (start % CHUNK == 0) save(start / CHUNK);
    const auto scan = prepare_scan<F, Stored>(s, p, unit, steps) ? scan_near : scan_far;
    load_coefficient<F, Stored>(p.B, p.states, unit, steps, s.B);
    if (read) load_coefficient<F, Stored>(p.C, p.states, unit, steps, s.C);
    Ahead ahead;
    if (start + SLICE < p.length)
      foresee_slice<Stored>(p, f, unit, Steps(p, start + SLICE, SLICE), &ahead);
    scan(s, p, unit.channels, steps.count, ahead);
    if (read) write_out<F, Stored>(s, p, f, unit, steps);
  }
  save(p.chunks());
  if (f.last_state) {
    Real* to = (Real*)f.last_state + (unit.batch * p.channels + unit.channel) * p.states;
    store_states<F>(s.state, p.states, unit, to, 1, p.states);
  }
}

}  // namespace fuseport::selective_scan::FUSEPORT_ISA
