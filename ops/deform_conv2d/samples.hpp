// The samples of a tap: where those of a tile of outputs are, what they take of the copied input, and
// which channels of them belong to which group of the filter. Compiled once per instruction set.
#pragma once

#include "deform_conv2d/kernel.hpp"
#include "native/bilinear.hpp"
#include "native/blocks.hpp"
#include "native/parts.hpp"
#include "native/scratch.hpp"

namespace fuseport::deform_conv2d::FUSEPORT_ISA {

using namespace fuseport::FUSEPORT_ISA;

FUSEPORT_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// A tile of outputs: some in a row of those of an image, which is row by row.
struct Tile {
  int64_t first;
  int count;

  Tile(const Problem& p, int64_t number)
      : first(number * TILE), count((int)least(TILE, p.places() - first)) {}
};

// The samples of one tap and offset group for a tile of outputs, rows of scratch. Corner k of sample
// j is number k·TILE + j.
template <class F>
struct Samples {
  using Real = typename F::Real;
  using Vector = typename F::Vector;
  using Integers = typename F::Integers;
  using Index = decltype(Integers{}[0] + 0);
  static_assert(TILE % F::LANES == 0);

  int count;
  alignas(64) int64_t first_y[TILE], first_x[TILE];  // where the filter begins
  alignas(64) Real mask[TILE];                       // 1 where there is none
  alignas(64) Real share_x[TILE], share_y[TILE];     // of the right and the lower pixels
  alignas(64) Real share[4 * TILE];
  alignas(64) Index index[4 * TILE];  // rows of the table, also beyond `count`

  // The tile is that of all samples until the next one is.
  void set(const Problem& p, const Tile& tile) {
    count = tile.count;
    int64_t y = tile.first / p.columns, x = tile.first % p.columns;
    for (int j = 0; j < TILE; ++j) {
      first_y[j] = y * p.options.stride_h - p.options.padding_h;
      first_x[j] = x * p.options.stride_w - p.options.padding_w;
      if (++x == p.columns) {
        x = 0;
        ++y;
      }
    }
  }

  // Of tap `tap` of an offset group, those of all batch entries being numbered together.
  template <class Stored>
  void read(const Problem& p, const Tile& tile, int64_t group, int64_t tap) {
    const int64_t row = group * p.taps() + tap;
    const Stored* const down = (const Stored*)p.offset + 2 * row * p.places() + tile.first;
    const Stored* const across = down + p.places();
    const int64_t tap_y = tap / p.kernel_w * p.options.dilation_h;
    const int64_t tap_x = tap % p.kernel_w * p.options.dilation_w;
    const Vector width = splat<F>((Real)p.width), height = splat<F>((Real)p.height);
    const Integers columns = Integers{} + (Index)p.width, rows = Integers{} + (Index)p.height;
    const Integers outside = Integers{} + (Index)p.pixels();
    each_vector<F>(count, [&](int64_t j, const auto part) {
      Real ys[F::LANES], xs[F::LANES];
      for (int i = 0; i < F::LANES; ++i) {  // which a Real holds as exactly as it can
        ys[i] = (Real)(first_y[j + i] + tap_y);
        xs[i] = (Real)(first_x[j + i] + tap_x);
      }
      const auto sample = Bilinear<F>::at(load<F>(xs) + part.load(across + j),
                                          load<F>(ys) + part.load(down + j), width, height);
      store<F>(share_x + j, sample.share_x);
      store<F>(share_y + j, sample.share_y);
      for (int k = 0; k < 4; ++k) {
        const Integers row = sample.position(k, columns, rows, Integers{}, outside);
        memcpy(index + k * TILE + j, &row, sizeof row);
        store<F>(share + k * TILE + j, sample.share(k));
      }
      const Vector one = splat<F>(1);
      const Stored* const factors = (const Stored*)p.mask + row * p.places() + tile.first;
      store<F>(mask + j, p.mask ? part.load(factors + j) : one);
    });
  }

  // The samples, (count, columns), with their mask; `columns` are whole vectors of a row of `table`.
  void take(const Real* table, int64_t table_row, int columns, Real* to, int64_t stride) const {
    for (int j = 0; j < count; ++j, to += stride) {
      const Real* corner[4];
      Vector shares[4];
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        corner[k] = table + index[k * TILE + j] * table_row;
        shares[k] = splat<F>(share[k * TILE + j]);
      }
      const Vector factor = splat<F>(mask[j]);
      for (int c = 0; c < columns; c += F::LANES) {
        Vector sum = shares[0] * load<F>(corner[0] + c);
#pragma GCC unroll 4
        for (int k = 1; k < 4; ++k) sum += shares[k] * load<F>(corner[k] + c);
        store<F>(to + c, sum * factor);
      }
    }
  }
};

// Calls visit(group, channel, count) for each run of channels from `first` on that are of one group.
template <class Visit>
FUSEPORT_INLINE void each_run(const Problem& p, int64_t first, int64_t count, const Visit& visit) {
  const int64_t each = p.of_group(), last = first + count;
  for (int64_t channel = first; channel < last;) {
    const int64_t group = channel / each, end = least((group + 1) * each, last);
    visit(group, channel, (int)(end - channel));
    channel = end;
  }
}

// The copy of an offset group of a batch entry, those of all entries being numbered together.
template <class F>
FUSEPORT_INLINE typename F::Real* table_of(const Problem& p, const Shared& s, int64_t group) {
  return (typename F::Real*)s.table + group * p.table_rows() * p.table_row();
}

template <class F, class Stored>
static void copy_input_unit(const Problem& p, const Shared& s, int64_t unit) {
  using Real = typename F::Real;
  const int64_t units = p.times(p.table_rows(), PIXELS), group = unit / units;
  const int64_t first = unit % units * PIXELS, each = p.of_offset_group(), row = p.table_row();
  const int rows = (int)least(PIXELS, p.table_rows() - first);
  const int known = (int)least(rows, p.pixels() - first);
  Real* const table = table_of<F>(p, s, group) + first * row;
  if (row > each || known < rows) memset(table, 0, rows * row * sizeof(Real));
  load_block<F>((const Stored*)p.input + group * each * p.pixels() + first, 1, p.pixels(), known,
                (int)each, table, (int)row);
}

}  // namespace fuseport::deform_conv2d::FUSEPORT_ISA
