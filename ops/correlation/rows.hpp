// The copies of the images, and windows of a volume. Compiled once per instruction set.
#pragma once

#include "correlation/kernel.hpp"
#include "native/parts.hpp"
#include "native/scratch.hpp"

namespace fuseport::correlation::FUSEPORT_ISA {

using namespace fuseport::FUSEPORT_ISA;

FUSEPORT_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
FUSEPORT_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// A row of the copy of an image: that of its first channel.
template <class F>
FUSEPORT_INLINE typename F::Real* row1_of(const Problem& p, const Plan& plan, const Shared& s,
                                          int64_t batch, int64_t place) {
  return (typename F::Real*)s.first +
         (batch * plan.down.count + place) * p.channels * plan.row1;
}

template <class F>
FUSEPORT_INLINE typename F::Real* row2_of(const Problem& p, const Plan& plan, const Shared& s,
                                          int64_t batch, int64_t row) {
  return (typename F::Real*)s.second + (batch * plan.down.size + row) * p.channels * plan.row2;
}

// Numbers `from[(begin + i)·stride + phase]` for i below `count`, zeros where that is outside of
// [0, size).
template <class F, class Stored>
FUSEPORT_INLINE void copy_row(const Stored* from, int64_t size, int64_t begin, int64_t stride,
                              int64_t phase, int64_t count, typename F::Real* to) {
  const int64_t first = most(0, least(count, -floor_div(phase, stride) - begin));
  const int64_t last = most(first, least(count, floor_div(size - 1 - phase, stride) + 1 - begin));
  memset(to, 0, first * sizeof *to);
  if (stride == 1) {
    from += begin + phase + first;
    each_vector<F>(last - first, [&](int64_t i, const auto part) {
      part.store(part.load(from + i), to + first + i);
    });
  } else {
    for (int64_t i = first; i < last; ++i) to[i] = to_real(from[(begin + i) * stride + phase]);
  }
  memset(to + last, 0, (count - last) * sizeof *to);
}

// A row of the first image, of all channels, whose pixels in no window are zeros; or of the second.
template <class F, class Stored>
static void copy_unit(const Problem& p, const Plan& plan, const Shared& s, int64_t unit) {
  const int64_t width = p.across.size, firsts = p.batches * plan.down.count;
  if (unit < firsts) {
    const int64_t batch = unit / plan.down.count, place = unit % plan.down.count;
    const int64_t row = place * plan.down.stride - plan.down.padding;
    if (row < 0 || row >= p.down.size) return;
    auto* to = row1_of<F>(p, plan, s, batch, place);
    const auto* from = (const Stored*)p.input1 + batch * p.channels * p.pixels() + row * width;
    const bool covered = !p.windows() || p.down.covered(row);
    for (int64_t c = 0; c < p.channels; ++c, to += plan.row1, from += p.pixels()) {
      if (!covered) {
        memset(to, 0, plan.row1 * sizeof *to);
        continue;
      }
      // Up to the last place, which another pixel may follow.
      const int64_t size = (plan.across.count - 1) * plan.across.stride - plan.across.padding + 1;
      copy_row<F>(from, least(width, size), plan.begin1, plan.across.stride,
                  -plan.across.padding, plan.row1, to);
      // And from the first on.
      for (int64_t x = plan.begin1; x < 0; ++x) to[x - plan.begin1] = 0;
    }
    if (p.windows() && covered)
      for (int64_t x = 0; x < width; ++x)
        if (!p.across.covered(x)) {
          auto* const column = row1_of<F>(p, plan, s, batch, place) + x - plan.begin1;
          for (int64_t c = 0; c < p.channels; ++c) column[c * plan.row1] = 0;
        }
  } else {
    const int64_t batch = (unit - firsts) / p.down.size, row = (unit - firsts) % p.down.size;
    auto* to = row2_of<F>(p, plan, s, batch, row);
    const auto* from = (const Stored*)p.input2 + batch * p.channels * p.pixels() + row * width;
    for (int64_t c = 0; c < p.channels; ++c, to += plan.row2, from += p.pixels())
      for (int64_t slot = 0; slot < plan.slots; ++slot)
        copy_row<F>(from, width, plan.first, plan.across.stride,
                    plan.phase(plan.shifts.first + slot), plan.part, to + slot * plan.part);
  }
}

// One displacement of a batch entry: the sums of its volume over windows.
template <class F, class Stored>
static void sum_windows_unit(const Problem& p, const Forward& f, const Shared& s, int64_t unit,
                             void* scratch) {
  using Real = typename F::Real;
  const Axis &down = p.down, &across = p.across;
  const Real* const volume = (const Real*)s.volume + unit * p.pixels();
  Stored* out = (Stored*)f.out + unit * down.outputs * across.outputs;
  Scratch memory{(char*)scratch};
  Real *row, *sums;
  memory.take(across.size, &row);
  memory.take(across.outputs, &sums);
  for (int64_t y = 0; y < down.outputs; ++y, out += across.outputs) {
    memset(row, 0, across.size * sizeof(Real));
    memset(sums, 0, across.outputs * sizeof(Real));
    for (int64_t tap = 0; tap < down.kernel; ++tap) {
      const int64_t at = y * down.stride - down.padding + tap * down.dilation;
      if (at < 0 || at >= down.size) continue;
      each_vector<F>(across.size, [&](int64_t x, const auto part) {
        part.store(part.load(row + x) + part.load(volume + at * across.size + x), row + x);
      });
    }
    for (int64_t tap = 0; tap < across.kernel; ++tap) {
      const Range seen = across.seen_by(tap);
      const int64_t begin = tap * across.dilation - across.padding;
      for (int64_t x = seen.first; x < seen.last; ++x) sums[x] += row[x * across.stride + begin];
    }
    each_vector<F>(across.outputs,
                   [&](int64_t x, const auto part) { part.store(part.load(sums + x), out + x); });
  }
}

// And what cotangents of outputs are for the pixels of windows.
template <class F, class Stored>
static void spread_unit(const Problem& p, const Backward& b, const Shared& s, int64_t unit,
                        void* scratch) {
  using Real = typename F::Real;
  const Axis &down = p.down, &across = p.across;
  Real* const volume = (Real*)s.volume + unit * p.pixels();
  const Stored* dout = (const Stored*)b.dout + unit * down.outputs * across.outputs;
  Real* const row = (Real*)scratch;
  memset(volume, 0, p.pixels() * sizeof(Real));
  for (int64_t y = 0; y < down.outputs; ++y, dout += across.outputs) {
    memset(row, 0, across.size * sizeof(Real));
    for (int64_t tap = 0; tap < across.kernel; ++tap) {
      const Range seen = across.seen_by(tap);
      const int64_t begin = tap * across.dilation - across.padding;
      for (int64_t x = seen.first; x < seen.last; ++x)
        row[x * across.stride + begin] += to_real(dout[x]);
    }
    for (int64_t tap = 0; tap < down.kernel; ++tap) {
      const int64_t at = y * down.stride - down.padding + tap * down.dilation;
      if (at < 0 || at >= down.size) continue;
      Real* const to = volume + at * across.size;
      each_vector<F>(across.size, [&](int64_t x, const auto part) {
        part.store(part.load(to + x) + part.load(row + x), to + x);
      });
    }
  }
}

template <class F>
static int64_t window_bytes(const Problem& p) {
  return (p.across.size + p.across.outputs) * (int64_t)sizeof(typename F::Real) + 128;
}

}  // namespace fuseport::correlation::FUSEPORT_ISA
