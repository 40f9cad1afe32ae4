// Forward: one unit is a batch entry and a head. Compiled once per instruction set.
#pragma once

#include "ssd_chunk_scan/chunk.hpp"

namespace fuseport::ssd_chunk_scan::FUSEPORT_ISA {

template <class F>
struct ForwardScratch {
  using Real = typename F::Real;
  Real *state, *x, *weighted, *y, *z, *M, *D;
  Decays<F>* decays;
  Scratch scratch;
  OwnPrepared<F> prepared;
  int64_t bytes;

  ForwardScratch(const Problem& p, void* base) : scratch{(char*)base}, prepared(p, scratch) {
    const int64_t width = padded<F>(p.width);
    scratch.take(p.states * width, &state);
    scratch.take(CHUNK * width, &x, &weighted, &y, &z);
    scratch.take(CHUNK * CHUNK, &M);
    scratch.take(width, &D);
    scratch.take(1, &decays);
    bytes = scratch.used;
  }
};

template <class F, class Stored>
static void forward_unit(const Problem& p, const Forward& to, int64_t unit, void* scratch) {
  using Vector = typename F::Vector;
  const ForwardScratch<F> s(p, scratch);
  const int64_t batch = unit / p.heads, head = unit % p.heads;
  const int64_t group = head / p.heads_per_group(), width = padded<F>(p.width);
  load_state<F>(p, p.initial_states, batch, head, s.state);
  load_D<F>(p, head, s.D);
  for (int64_t chunk = 0; chunk < p.chunks(); ++chunk) {
    const Steps steps(p, chunk);
    const Prepared<F> of = s.prepared.template of<Stored>(p, batch, chunk, group);
    s.decays->template load<Stored>(p, batch, head, steps);
    load_steps<F, Stored>(p.x, batch, head, steps, p.width, width, s.x);
    if (p.z.data) load_steps<F, Stored>(p.z, batch, head, steps, p.width, width, s.z);
    outputs<F>(p, *s.decays, of, steps, s.x, s.state, s.M, s.y);
    for (int t = 0; t < steps.count; ++t) {
      for (int64_t i = 0; i < width; i += F::LANES) {
        const int64_t at = t * width + i;
        Vector y = load<F>(s.y + at) + load<F>(s.D + i) * load<F>(s.x + at);
        if (p.z.data) {
          const Vector z = load<F>(s.z + at);
          y = y * (z * logistic<F>(z));
        }
        store<F>(s.y + at, y);
      }
    }
    store_steps<F, Stored>(p, s.y, batch, head, steps, to.out);
    advance<F>(p, *s.decays, of, steps, s.x, s.weighted, s.state);
  }
  store_state<F>(p, s.state, batch, head, to.final_states);
}

}  // namespace fuseport::ssd_chunk_scan::FUSEPORT_ISA
