// The forward kernel: chunk by chunk, each read with the W-1 steps before it.
#pragma once

#include "causal_conv1d/tiles.hpp"

namespace fuseport::causal_conv1d::FUSEPORT_ISA {

// The last W-1 inputs: of the sequence of the last step, where sequences are packed.
template <class Stored>
static void write_final_states(const Problem& p, const Unit& unit, Stored* to) {
  const int64_t halo = p.width - 1;
  const int32_t* const seq_idx = unit.sequences(p);
  for (int c = 0; c < unit.channels; ++c)
    for (int64_t j = 0; j < halo; ++j) {
      const int64_t channel = unit.channel + c, t = p.length - halo + j;
      const Sequence& from = t < 0 ? p.initial : p.x;
      const bool there =
          !p.packed || (t >= 0 && counts(seq_idx, p.length - 1, p.length - 1 - t));
      Stored value{};
      if (there)
        value = ((const Stored*)from.data)[unit.batch * from.batch + channel * from.channel +
                                           (t < 0 ? t + halo : t) * from.time];
      to[(unit.batch * p.channels + channel) * halo + j] = value;
    }
}

template <class F, class Stored, bool TIME_LAST, int W, bool PACKED>
static void forward_unit(const Problem& p, const Forward& f, int64_t index, void* scratch) {
  using Vector = typename F::Vector;
  constexpr int64_t LANES = F::LANES;
  const Unit unit(p, index);
  const Scratch<F> s(p, scratch);
  memset(s.x, 0, s.tile_bytes);
  p.wide_weight ? load_weights<F, typename F::Real>(s, p, unit)
                : load_weights<F, Stored>(s, p, unit);
  Stored* const out =
      (Stored*)f.out.data + unit.batch * f.out.batch + unit.channel * f.out.channel;
  for (int64_t start = 0; start < p.length; start += p.chunk()) {
    const int64_t steps = p.length - start < p.chunk() ? p.length - start : p.chunk();
    load_inputs<F, Stored, TIME_LAST>(s, p, unit, start, steps);
    if constexpr (PACKED) load_masks(s, p, unit, start, steps);
    const int64_t groups = TIME_LAST ? unit.channels : (unit.channels + LANES - 1) / LANES;
    const int64_t positions = TIME_LAST ? (steps + LANES - 1) / LANES : steps;
    for (int64_t group = 0; group < groups; ++group) {
      const Taps<F, TIME_LAST, W> taps(s, group);
      Stored* const to = TIME_LAST ? out + group * f.out.channel + start
                                   : out + group * LANES + start * f.out.time;
      const int64_t pitch = TIME_LAST ? LANES : f.out.time;
      for (int64_t i = 0; i < positions; ++i) {
        Vector y = taps.template sum<PACKED>(i);
        if (p.silu) y *= logistic<F>(y);
        if constexpr (PACKED) y = taps.masked(y, 0, taps.step(i));
        put<F>(y, to + i * pitch,
               TIME_LAST ? steps - i * LANES : unit.channels - group * LANES);
      }
    }
  }
  write_final_states(p, unit, (Stored*)f.final_states);
}

}  // namespace fuseport::causal_conv1d::FUSEPORT_ISA
