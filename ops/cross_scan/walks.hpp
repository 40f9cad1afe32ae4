// Walks over an image, written and summed through tiles that are transposed in registers. Compiled
// once per instruction set.
#pragma once

#include "cross_scan/problem.hpp"
#include "native/lanes.hpp"
#include "native/storage.hpp"

namespace fuseport::cross_scan::FUSEPORT_ISA {

using namespace fuseport::FUSEPORT_ISA;

// Bits that are moved and not computed with, in the form that vector.hpp shuffles; of the short ones
// as many as it can transpose, half a register.
template <class Number>
struct Moved {
  using Real = Number;
  static constexpr int BYTES = sizeof(Number) == 2 ? WIDTH / 2 : WIDTH;
  typedef Number Vector __attribute__((vector_size(BYTES)));
  using Integers = Vector;
  static constexpr int LANES = BYTES / (int)sizeof(Number);
};

template <class F, int... I>
FUSEPORT_INLINE typename F::Vector backwards(typename F::Vector v,
                                             std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(v, v, (F::LANES - 1 - I)...);
#else
  return __builtin_shuffle(v, typename F::Integers{(F::LANES - 1 - I)...});
#endif
}

template <class F>
FUSEPORT_INLINE typename F::Vector backwards(typename F::Vector v) {
  return backwards<F>(v, std::make_integer_sequence<int, F::LANES>{});
}

// Calls work(plane's batch, its channel, first row, end) for what a unit has.
template <class Work>
FUSEPORT_INLINE void each_plane(const Problem& p, int64_t unit, const Work& work) {
  const int64_t strips = p.strips(), rows = p.rows_per_unit();
  const int64_t row = unit % strips * rows, end = row + rows < p.height ? row + rows : p.height;
  const int64_t first = unit / strips * p.planes_per_unit();
  for (int64_t i = first; i < first + p.planes_per_unit() && i < p.planes(); ++i)
    work(i / p.channels, i % p.channels, row, end);
}

// One row as it is, and backwards from before `back` on.
template <class F, class Number>
FUSEPORT_INLINE void walk_row(const Number* from, int64_t width, Number* ahead, Number* back) {
  int64_t w = 0;
  for (; w + F::LANES <= width; w += F::LANES) {
    const typename F::Vector v = load<F>(from + w);
    store<F>(ahead + w, v);
    store<F>(back - w - F::LANES, backwards<F>(v));
  }
  for (; w < width; ++w) {
    ahead[w] = from[w];
    back[-w - 1] = from[w];
  }
}

template <class Number>
static void scan_unit(const Problem& p, const Scan& s, int64_t unit) {
  using F = Moved<Number>;
  constexpr int LANES = F::LANES;
  const int64_t pixels = p.pixels(), walk = p.channels * pixels, height = p.height;
  each_plane(p, unit, [&](int64_t batch, int64_t channel, int64_t row, int64_t end) {
    const Number* x = (const Number*)s.x + batch * s.batch_stride + channel * s.channel_stride;
    Number* by_rows = (Number*)s.out + batch * 4 * walk + channel * pixels;
    Number* by_columns = by_rows + walk;
    Number *rows_end = by_rows + 2 * walk + pixels, *columns_end = rows_end + walk;
    for (int64_t h = row; h < end; ++h)
      walk_row<F>(x + h * s.row_stride, p.width, by_rows + h * p.width, rows_end - h * p.width);

    const auto put = [&](int64_t h, int64_t w) {
      const Number number = x[h * s.row_stride + w];
      by_columns[w * height + h] = number;
      columns_end[-(w * height + h) - 1] = number;
    };
    int64_t h = row;
    for (; h + LANES <= end; h += LANES) {
      int64_t w = 0;
      for (; w + LANES <= p.width; w += LANES) {
        typename F::Vector block[LANES];
        load_columns<F>(x + h * s.row_stride + w, s.row_stride, block);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i) {
          const int64_t at = (w + i) * height + h;
          store<F>(by_columns + at, block[i]);
          store<F>(columns_end - at - LANES, backwards<F>(block[i]));
        }
      }
      for (; w < p.width; ++w)
        for (int i = 0; i < LANES; ++i) put(h + i, w);
    }
    for (int64_t w = 0; w < p.width; ++w)
      for (int64_t i = h; i < end; ++i) put(i, w);
  });
}

// The four walks at one pixel are added as two by rows, two by columns, and both sums.
template <class F, class Stored>
static void merge_unit(const Problem& p, const Merge& m, int64_t unit) {
  using Vector = typename F::Vector;
  using Real = typename F::Real;
  constexpr int LANES = F::LANES;
  const int64_t pixels = p.pixels(), height = p.height, width = p.width;
  each_plane(p, unit, [&](int64_t batch, int64_t channel, int64_t row, int64_t end) {
    const Stored* by_rows =
        (const Stored*)m.ys + batch * m.batch_stride + channel * m.channel_stride;
    const Stored* by_columns = by_rows + m.walk_stride;
    const Stored* rows_end = by_rows + 2 * m.walk_stride + pixels;
    const Stored* columns_end = rows_end + m.walk_stride;
    Stored* out = (Stored*)m.out + (batch * p.channels + channel) * pixels;
    const auto pair = [](const Stored* ahead, const Stored* back, int64_t at) {
      return load_reals<F>(ahead + at) + backwards<F>(load_reals<F>(back - at - F::LANES));
    };
    const auto sum = [&](int64_t h, int64_t w) {
      const int64_t at = h * width + w, turned = w * height + h;
      const Real rows = to_real(by_rows[at]) + to_real(rows_end[-at - 1]);
      const Real columns = to_real(by_columns[turned]) + to_real(columns_end[-turned - 1]);
      from_real(rows + columns, out + at);
    };
    int64_t h = row;
    for (; h + LANES <= end; h += LANES) {
      int64_t w = 0;
      for (; w + LANES <= width; w += LANES) {
        Vector block[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i)
          block[i] = pair(by_columns, columns_end, (w + i) * height + h);
        transpose<F>(block);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i) {
          const int64_t at = (h + i) * width + w;
          store_reals<F>(pair(by_rows, rows_end, at) + block[i], out + at);
        }
      }
      for (int i = 0; i < LANES; ++i)
        for (int64_t c = w; c < width; ++c) sum(h + i, c);
    }
    for (; h < end; ++h)
      for (int64_t w = 0; w < width; ++w) sum(h, w);
  });
}

static void scan_any(const Problem& p, const Scan& s, int64_t unit) {
  switch (p.dtype) {
    case Dtype::float16:
    case Dtype::bfloat16:
      return scan_unit<uint16_t>(p, s, unit);
    case Dtype::float32:
      return scan_unit<uint32_t>(p, s, unit);
    case Dtype::float64:
      return scan_unit<uint64_t>(p, s, unit);
  }
}

static void merge_any(const Problem& p, const Merge& m, int64_t unit) {
#define FUSEPORT_CALL(F, Stored) merge_unit<F, Stored>(p, m, unit)
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

}  // namespace fuseport::cross_scan::FUSEPORT_ISA
