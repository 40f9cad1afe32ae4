// The forward kernel: a chunk at a time, a few states at a time in registers, channels in lanes.
#pragma once

#include "selective_scan/tiles.hpp"

namespace fuseport::selective_scan::FUSEPORT_ISA {

template <class F>
struct ForwardScratch {
  using Real = typename F::Real;
  Real *u, *delta, *drive, *y, *gate;  // tiles; `delta` becomes δ̂, `drive` is δ̂·u
  Real *A, *state, *B, *C, *D, *bias;
  int64_t bytes;

  ForwardScratch(const Problem& p, void* base) {
    Scratch s{(char*)base};
    s.take(TILE, &u, &delta, &drive, &y, &gate);
    s.take(p.states * BLOCK, &A, &state);
    s.take(p.states * CHUNK, &B, &C);
    s.take(BLOCK, &D, &bias);
    bytes = s.used;
  }
};

// STATES states from `n` on, of the channels of one vector, through a chunk; adds their share to y.
template <class F, bool B_VARIES, bool C_VARIES, int STATES>
static void scan_states(const ForwardScratch<F>& s, int64_t n, int channel, int steps) {
  using Vector = typename F::Vector;
  Vector A[STATES], h[STATES];
  Row<F, B_VARIES> B[STATES];
  Row<F, C_VARIES> C[STATES];
  for (int i = 0; i < STATES; ++i) {
    A[i] = load<F>(s.A + (n + i) * BLOCK + channel);
    h[i] = load<F>(s.state + (n + i) * BLOCK + channel);
    B[i] = Row<F, B_VARIES>::at(s.B, n + i, channel);
    C[i] = Row<F, C_VARIES>::at(s.C, n + i, channel);
  }
  for (int t = 0; t < steps; ++t) {
    const int at = t * BLOCK + channel;
    const Vector delta = load<F>(s.delta + at), drive = load<F>(s.drive + at);
    Vector y = load<F>(s.y + at);
    for (int i = 0; i < STATES; ++i) {
      h[i] = exp<F>(delta * A[i]) * h[i] + drive * B[i][t];
      y += C[i][t] * h[i];
    }
    store<F>(s.y + at, y);
  }
  for (int i = 0; i < STATES; ++i) store<F>(s.state + (n + i) * BLOCK + channel, h[i]);
}

template <class F, bool B_VARIES, bool C_VARIES>
static void scan_chunk(const ForwardScratch<F>& s, const Problem& p, int channels, int steps) {
  for (int channel = 0; channel < channels; channel += F::LANES) {
    int64_t n = 0;
    for (; n + 4 <= p.states; n += 4)
      scan_states<F, B_VARIES, C_VARIES, 4>(s, n, channel, steps);
    for (; n < p.states; ++n) scan_states<F, B_VARIES, C_VARIES, 1>(s, n, channel, steps);
  }
}

template <class F, class Stored>
static void forward_unit(const Problem& p, const Forward& f, int64_t index, void* scratch) {
  using Real = typename F::Real;
  const Unit unit(p, index);
  const ForwardScratch<F> s(p, scratch);
  load_states((const Real*)p.A + unit.channel * p.states, p.states, unit, s.A);
  load_channels(p.D, unit, s.D);
  load_channels(p.delta_bias, unit, s.bias);
  clear(p.states * BLOCK, s.state);

  for (int64_t chunk = 0; chunk < p.chunks(); ++chunk) {
    const Steps steps(p, chunk);
    store_states(s.state, p.states, unit, saved_states((Real*)f.chunk_states, p, unit, chunk));
    load_tile<Stored>(p.u, unit, steps, s.u);
    load_tile<Stored>(p.delta, unit, steps, s.delta);
    load_coefficient<Stored>(p.B, p.states, unit, steps, s.B);
    load_coefficient<Stored>(p.C, p.states, unit, steps, s.C);
    for (int t = 0; t < steps.count; ++t)
      for (int c = 0; c < BLOCK; c += F::LANES) {
        const int at = t * BLOCK + c;
        typename F::Vector delta = load<F>(s.delta + at) + load<F>(s.bias + c);
        if (p.softplus) delta = softplus<F>(delta);
        store<F>(s.delta + at, delta);
        store<F>(s.drive + at, delta * load<F>(s.u + at));
      }
    clear(BLOCK * steps.count, s.y);

    auto scan = p.B.varies ? (p.C.varies ? scan_chunk<F, true, true> : scan_chunk<F, true, false>)
                           : (p.C.varies ? scan_chunk<F, false, true> : scan_chunk<F, false, false>);
    scan(s, p, unit.channels, steps.count);

    if (p.z.data) load_tile<Stored>(p.z, unit, steps, s.gate);
    for (int t = 0; t < steps.count; ++t)
      for (int c = 0; c < BLOCK; c += F::LANES) {
        const int at = t * BLOCK + c;
        typename F::Vector out = load<F>(s.y + at) + load<F>(s.D + c) * load<F>(s.u + at);
        if (p.z.data) {
          const typename F::Vector z = load<F>(s.gate + at);
          out *= z * logistic<F>(z);
        }
        store<F>(s.y + at, out);
      }
    store_tile<Stored>(s.y, unit, steps, f.out);
  }
  const int64_t row = unit.batch * p.channels + unit.channel;
  store_states(s.state, p.states, unit, (Real*)f.last_state + row * p.states);
  store_states(s.state, p.states, unit, saved_states((Real*)f.chunk_states, p, unit, p.chunks()));
}

}  // namespace fuseport::selective_scan::FUSEPORT_ISA
