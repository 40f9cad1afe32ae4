// The samples of one query and head: which pixels they take, and how much of each.
#pragma once

#include "ms_deform_attn/kernel.hpp"
#include "native/bilinear.hpp"
#include "native/storage.hpp"

namespace fuseport::ms_deform_attn::FUSEPORT_ISA {

using namespace fuseport::FUSEPORT_ISA;

FUSEPORT_INLINE int64_t whole(int64_t count, int64_t lanes) {
  return (count + lanes - 1) / lanes * lanes;
}

// Rows of scratch. Pixel k = 2·below + right of sample j is number k·n + j of the 4n.
template <class F>
struct Samples {
  using Real = typename F::Real;
  using Vector = typename F::Vector;
  using Integers = typename F::Integers;
  using Index = decltype(Integers{}[0] + 0);
  static constexpr int64_t LANES = F::LANES;

  int64_t n, padded, pixels;          // samples; up to whole vectors; pixels up to whole vectors
  Real *widths, *heights;             // of each sample's level
  Real *xs, *ys, *weights;            // what was given, then in units of pixels
  Real *share_x, *share_y;            // of the right and the lower pixels
  Real *share;                        // weight of each pixel, of which its sample's is a factor
  Real *dots;                         // (pixels,), backward
  Index *columns, *rows, *begins;     // of each sample's level, and its first position
  Index *lefts, *tops;                // of the upper left pixel
  Index* index;                       // positions of pixels, -1 for those outside

  static int64_t bytes(const Problem& p) {
    const int64_t padded = whole(p.samples(), LANES), pixels = whole(4 * p.samples(), LANES);
    return (12 * (padded + LANES) + 3 * (pixels + LANES)) * (int64_t)sizeof(Real);
  }

  Samples(const Problem& p, void* scratch)
      : n(p.samples()), padded(whole(n, LANES)), pixels(whole(4 * n, LANES)) {
    char* at = (char*)scratch;
    const auto take = [&](int64_t count) {
      char* const taken = at;
      at += (count + LANES) * sizeof(Real);
      return taken;
    };
    Real** const reals[] = {&widths, &heights, &xs, &ys, &weights, &share_x, &share_y};
    for (Real** row : reals) *row = (Real*)take(padded);
    Index** const integers[] = {&columns, &rows, &begins, &lefts, &tops};
    for (Index** row : integers) *row = (Index*)take(padded);
    share = (Real*)take(pixels);
    dots = (Real*)take(pixels);
    index = (Index*)take(pixels);
    memset(scratch, 0, at - (char*)scratch);
    for (int64_t level = 0; level < p.levels; ++level)
      for (int64_t i = level * p.points; i < (level + 1) * p.points; ++i) {
        heights[i] = (Real)p.shapes[2 * level];
        widths[i] = (Real)p.shapes[2 * level + 1];
        rows[i] = (Index)p.shapes[2 * level];
        columns[i] = (Index)p.shapes[2 * level + 1];
        begins[i] = (Index)p.starts[level];
      }
  }

  static inline __attribute__((always_inline)) Integers integers(const Index* from) {
    Integers v;
    memcpy(&v, from, sizeof v);
    return v;
  }

  // Of a query and head, numbered together.
  template <class Stored>
  inline __attribute__((always_inline)) void read(const Problem& p, int64_t number) const;
};

template <class F>
template <class Stored>
void Samples<F>::read(const Problem& p, int64_t number) const {
  const Stored* const location = (const Stored*)p.locations + number * 2 * n;
  const Stored* const weight = (const Stored*)p.weights + number * n;
  for (int64_t j = 0; j < n; ++j) {
    xs[j] = to_real(location[2 * j]) * widths[j];
    ys[j] = to_real(location[2 * j + 1]) * heights[j];
    weights[j] = to_real(weight[j]);
  }
  // The products are rounded before 1/2 is taken off, as plain torch does it: without that the
  // compiler would fuse the two, and samples at the centres of pixels have another pixel beside.
  asm volatile("" ::: "memory");
  for (int64_t j = 0; j < padded; j += LANES) {
    const Vector x = load<F>(xs + j) - (Real)0.5, y = load<F>(ys + j) - (Real)0.5;
    const auto sample = Bilinear<F>::at(x, y, load<F>(widths + j), load<F>(heights + j));
    store<F>(share_x + j, sample.share_x);
    store<F>(share_y + j, sample.share_y);
    memcpy(lefts + j, &sample.left, sizeof sample.left);
    memcpy(tops + j, &sample.top, sizeof sample.top);
  }
  for (int k = 0; k < 4; ++k) {
    for (int64_t j = 0; j < padded; j += LANES) {  // what is written beyond n, the next k or nobody wants
      const Bilinear<F> sample{load<F>(share_x + j), load<F>(share_y + j), integers(lefts + j),
                               integers(tops + j)};
      const Integers position = sample.position(k, integers(columns + j), integers(rows + j),
                                                integers(begins + j), Integers{} - 1);
      memcpy(index + k * n + j, &position, sizeof position);
      store<F>(share + k * n + j, load<F>(weights + j) * sample.share(k));
    }
  }
  for (int64_t m = 4 * n; m < pixels; ++m) {
    index[m] = -1;
    share[m] = 0;
  }
}

}  // namespace fuseport::ms_deform_attn::FUSEPORT_ISA
