// The backward kernel: chunks from the last to the first, so that the cotangents of W-1 later steps
// are at hand. What went into the activation is computed again. The formulas are at the top of
// reference.py.
#pragma once

#include "causal_conv1d/tiles.hpp"

namespace fuseport::causal_conv1d::FUSEPORT_ISA {

// The inputs that lanes past the last step hold are none of the problem's: out of the sum too.
template <bool PACKED, class F, bool TIME_LAST, int W>
FUSEPORT_INLINE typename F::Vector product(const Taps<F, TIME_LAST, W>& taps,
                                           typename F::Vector dy, int k, int64_t position,
                                           int64_t steps) {
  typename F::Vector x = load<F>(taps.s.x + taps.at(position) + k * taps.pitch());
  if constexpr (TIME_LAST)
    if (steps - position * F::LANES < F::LANES)
      x = first_lanes<F>(x, (int)(steps - position * F::LANES));
  typename F::Vector value = dy * x;
  if constexpr (PACKED) value = taps.masked(value, taps.width - 1 - k, taps.step(position));
  return value;
}

// Turns the tile of dout into the cotangents of what goes into the activation, and sums for the
// weights and the bias.
template <class F, bool TIME_LAST, int W, bool PACKED>
static void through_activation(const Scratch<F>& s, const Problem& p, const Unit& unit,
                               int64_t steps) {
  using Vector = typename F::Vector;
  using Real = typename F::Real;
  constexpr int64_t LANES = F::LANES;
  const int64_t groups = TIME_LAST ? unit.channels : (unit.channels + LANES - 1) / LANES;
  const int64_t positions = TIME_LAST ? (steps + LANES - 1) / LANES : steps;
  const auto add = [&](double* total, int64_t group, Vector v) {
    Real lanes[LANES];
    store<F>(lanes, v);
    if constexpr (TIME_LAST) {
      double sum = 0;
      for (int i = 0; i < LANES; ++i) sum += (double)lanes[i];
      total[group] += sum;
    } else {
      for (int i = 0; i < LANES; ++i) total[group * LANES + i] += (double)lanes[i];
    }
  };
  for (int64_t group = 0; group < groups; ++group) {
    const Taps<F, TIME_LAST, W> taps(s, group);
    Vector dbias = Vector{}, dweight[W ? W : 1] = {};
    for (int64_t i = 0; i < positions; ++i) {
      Real* const at = s.dy + taps.at(i);
      Vector dy = load<F>(at);
      if (p.silu) {
        const Vector y = taps.template sum<PACKED>(i), sigma = logistic<F>(y);
        dy *= sigma * ((Real)1 + y * ((Real)1 - sigma));
      }
      if constexpr (PACKED) dy = taps.masked(dy, 0, taps.step(i));
      // Past the last step of all: zeros, and in no sum.
      if constexpr (TIME_LAST)
        if (steps - i * LANES < LANES) dy = first_lanes<F>(dy, (int)(steps - i * LANES));
      store<F>(at, dy);
      dbias += dy;
      if constexpr (W > 0) {
#pragma GCC unroll 4
        for (int k = 0; k < W; ++k) dweight[k] += product<PACKED>(taps, dy, k, i, steps);
      }
    }
    add(s.dbias, group, dbias);
    for (int k = 0; k < taps.width; ++k) {
      if constexpr (W == 0) {
        dweight[0] = Vector{};
        for (int64_t i = 0; i < positions; ++i)
          dweight[0] += product<PACKED>(taps, load<F>(s.dy + taps.at(i)), k, i, steps);
      }
      add(s.dweight + k * s.block, group, dweight[W ? k : 0]);
    }
  }
}

template <class Stored>
FUSEPORT_INLINE auto dfinal_at(const Problem& p, const Backward& k, const Unit& unit, int c,
                               int64_t j) {
  return to_real(((const Stored*)k.dfinal.data)[unit.batch * k.dfinal.batch +
                                                (unit.channel + c) * k.dfinal.channel +
                                                j * k.dfinal.time]);
}

template <class F, class Stored, bool TIME_LAST, int W, bool PACKED>
static void write_dx(const Scratch<F>& s, const Problem& p, const Backward& k, const Unit& unit,
                     int64_t start, int64_t steps) {
  using Vector = typename F::Vector;
  using Real = typename F::Real;
  constexpr int64_t LANES = F::LANES;
  Stored* const dx = (Stored*)k.dx.data + unit.batch * k.dx.batch + unit.channel * k.dx.channel;
  const int64_t groups = TIME_LAST ? unit.channels : (unit.channels + LANES - 1) / LANES;
  const int64_t positions = TIME_LAST ? (steps + LANES - 1) / LANES : steps;
  for (int64_t group = 0; group < groups; ++group) {
    const Taps<F, TIME_LAST, W> taps(s, group);
    Stored* const to = TIME_LAST ? dx + group * k.dx.channel + start
                                 : dx + group * LANES + start * k.dx.time;
    const int64_t pitch = TIME_LAST ? LANES : k.dx.time;
    for (int64_t i = 0; i < positions; ++i) {
      const Real* from = s.dy + taps.at(i);
      Vector total = Vector{};
#pragma GCC unroll 4
      for (int lag = 0; lag < taps.width; ++lag) {
        Vector part = taps.weight(taps.width - 1 - lag) * load<F>(from + lag * taps.pitch());
        if constexpr (PACKED) part = taps.masked(part, lag, taps.step(i) + lag);
        total += part;
      }
      put<F>(total, to + i * pitch, TIME_LAST ? steps - i * LANES : unit.channels - group * LANES);
    }
  }

  // The last W-1 inputs are in the final states too: computed once more, and rounded once.
  const int32_t* const seq_idx = unit.sequences(p);
  int64_t t = p.length - s.halo > start ? p.length - s.halo : start;
  for (; t < start + steps; ++t) {
    if (PACKED && !counts(seq_idx, p.length - 1, p.length - 1 - t)) continue;
    for (int c = 0; c < unit.channels; ++c) {
      Real total = 0;
      for (int64_t lag = 0; lag <= s.halo; ++lag) {
        const int64_t step = t - start + lag;
        if (PACKED && !s.mask[lag * s.mask_row + step]) continue;
        total += s.weight[(s.halo - lag) * s.block + c] *
                 s.dy[TIME_LAST ? c * s.row + step : step * s.row + c];
      }
      total += dfinal_at<Stored>(p, k, unit, c, t - (p.length - s.halo));
      from_real(total, dx + c * k.dx.channel + t * k.dx.time);
    }
  }
}

// From the first chunk's tile.
template <class F, class Stored, bool TIME_LAST>
static void write_dinitial(const Scratch<F>& s, const Problem& p, const Backward& k,
                           const Unit& unit) {
  using Real = typename F::Real;
  for (int c = 0; c < unit.channels; ++c)
    for (int64_t j = 0; j < s.halo; ++j) {
      Real total = 0;
      for (int64_t tap = 0; tap <= j; ++tap) {
        const int64_t step = j - tap;
        total += s.weight[tap * s.block + c] *
                 s.dy[TIME_LAST ? c * s.row + step : step * s.row + c];
      }
      if (j >= p.length) total += dfinal_at<Stored>(p, k, unit, c, j - p.length);
      const int64_t row = unit.batch * p.channels + unit.channel + c;
      from_real(total, (Stored*)k.dinitial + row * s.halo + j);
    }
}

template <class F, class Stored, bool TIME_LAST, int W, bool PACKED>
static void backward_unit(const Problem& p, const Backward& k, int64_t index, void* scratch) {
  const Unit unit(p, index);
  const Scratch<F> s(p, scratch);
  memset(s.x, 0, s.tile_bytes);
  memset(s.dy, 0, s.tile_bytes);
  memset(s.dweight, 0, p.width * s.block * 8);
  memset(s.dbias, 0, s.block * 8);
  p.wide_weight ? load_weights<F, typename F::Real>(s, p, unit)
                : load_weights<F, Stored>(s, p, unit);
  const int64_t chunks = (p.length + p.chunk() - 1) / p.chunk();
  for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
    const int64_t start = chunk * p.chunk();
    const int64_t steps = p.length - start < p.chunk() ? p.length - start : p.chunk();
    if (chunk < chunks - 1) move_steps<F, TIME_LAST>(p, s.dy, s.row, steps, s.halo, false);
    load_inputs<F, Stored, TIME_LAST>(s, p, unit, start, steps);
    load_steps<F, Stored, TIME_LAST>(k.dout, unit, start, steps, s.dy, s.row, 0);
    if constexpr (PACKED) load_masks(s, p, unit, start, steps + s.halo);
    through_activation<F, TIME_LAST, W, PACKED>(s, p, unit, steps);
    write_dx<F, Stored, TIME_LAST, W, PACKED>(s, p, k, unit, start, steps);
  }
  if (!PACKED) write_dinitial<F, Stored, TIME_LAST>(s, p, k, unit);
  for (int c = 0; c < unit.channels; ++c) {
    const int64_t row = unit.batch * p.channels + unit.channel + c;
    k.bias_parts[row] = s.dbias[c];
    for (int64_t tap = 0; tap < p.width; ++tap)
      k.weight_parts[row * p.width + tap] = s.dweight[tap * s.block + c];
  }
}

// The sum over batch entries of (b, count), in their order, rounded to Real and then to Stored.
template <class Real, class Stored>
static void sum_batches(const double* parts, int64_t batches, int64_t count, void* total) {
  for (int64_t i = 0; i < count; ++i) {
    double sum = 0;
    for (int64_t b = 0; b < batches; ++b) sum += parts[b * count + i];
    from_real((Real)sum, (Stored*)total + i);
  }
}

template <class Real, class Stored>
static void finish_as(const Problem& p, const Backward& k) {
  const int64_t d = p.channels;
  sum_batches<Real, Stored>(k.weight_parts, p.batches, d * p.width, k.dweight);
  sum_batches<Real, Stored>(k.bias_parts, p.batches, d, k.dbias);
}

}  // namespace fuseport::causal_conv1d::FUSEPORT_ISA
