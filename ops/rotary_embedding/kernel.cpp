// The kernels for one instruction set, FUSEPORT_ISA; build.py compiles this file for each.
#include "rotary_embedding/kernel.hpp"

#include <utility>

#include "native/lanes.hpp"
#include "native/parts.hpp"

namespace fuseport::rotary_embedding::FUSEPORT_ISA {

using namespace fuseport::FUSEPORT_ISA;

namespace {

// The two numbers of each of some pairs.
template <class F>
struct Pairs {
  typename F::Vector a, b;
};

template <class F>
struct Both {
  Part<F> first, second;
};

// The numbers of some neighbouring pairs, in two vectors.
template <class F>
FUSEPORT_INLINE Both<F> twice(Part<F> part) {
  const int count = 2 * part.count;
  return {{count < F::LANES ? count : F::LANES}, {count > F::LANES ? count - F::LANES : 0}};
}

template <class F>
struct BothWhole {
  Whole<F> first, second;
};

template <class F>
FUSEPORT_INLINE BothWhole<F> twice(Whole<F>) {
  return {};
}

template <class F>
constexpr std::make_integer_sequence<int, F::LANES> LANE;

// Pairs i and on of a row, of which there are `pairs`.
template <class F, bool INTERLEAVED, class Some, class Stored>
FUSEPORT_INLINE Pairs<F> load_pairs(Some part, const Stored* row, int64_t i, int64_t pairs) {
  if constexpr (INTERLEAVED) {
    const auto both = twice<F>(part);
    const auto first = both.first.load(row + 2 * i);
    const auto second = both.second.load(row + 2 * i + F::LANES);
    return {unzip<F, 0>(first, second, LANE<F>), unzip<F, 1>(first, second, LANE<F>)};
  } else {
    return {part.load(row + i), part.load(row + pairs + i)};
  }
}

template <class F, bool INTERLEAVED, class Some, class Stored>
FUSEPORT_INLINE void store_pairs(Some part, Pairs<F> v, Stored* row, int64_t i, int64_t pairs) {
  if constexpr (INTERLEAVED) {
    const auto both = twice<F>(part);
    both.first.store(zip<F, 0>(v.a, v.b, LANE<F>), row + 2 * i);
    both.second.store(zip<F, F::LANES / 2>(v.a, v.b, LANE<F>), row + 2 * i + F::LANES);
  } else {
    part.store(v.a, row + i);
    part.store(v.b, row + pairs + i);
  }
}

// Of the positions of a unit, the first, and one beyond the last.
struct Range {
  int64_t begin, end;
};

FUSEPORT_INLINE Range range_of(const Problem& p, int64_t block) {
  const int64_t begin = block * p.positions_per_unit(), end = begin + p.positions_per_unit();
  return {begin, end < p.length ? end : p.length};
}

template <class Stored>
FUSEPORT_INLINE const Stored* row_of(const Heads& x, int64_t b, int64_t h, int64_t t) {
  return (const Stored*)x.data + b * x.batch_stride + h * x.head_stride + t * x.stride;
}

template <class Stored>
FUSEPORT_INLINE Stored* row_of(const Problem& p, void* contiguous, int64_t b, int64_t h, int64_t t) {
  return (Stored*)contiguous + ((b * p.heads + h) * p.length + t) * p.channels;
}

template <class Angle>
FUSEPORT_INLINE const Angle* row_of(const Table& table, int64_t b, int64_t t) {
  return (const Angle*)table.data + b * table.batch_stride + t * table.stride;
}

// Channels that belong to no pair.
template <class Stored>
FUSEPORT_INLINE void copy_rest(const Problem& p, const Stored* from, Stored* to) {
  if (p.channels > 2 * p.pairs)
    memcpy(to + 2 * p.pairs, from + 2 * p.pairs, sizeof *to * (p.channels - 2 * p.pairs));
}

template <class F, class Stored, class Angle, bool INTERLEAVED>
void forward_unit(const Problem& p, void* out, int64_t unit) {
  using Vector = typename F::Vector;
  const int64_t b = unit / p.blocks();
  const Range range = range_of(p, unit % p.blocks());
  for (int64_t h = 0; h < p.heads; ++h)
    for (int64_t t = range.begin; t < range.end; ++t) {
      const Stored* const x = row_of<Stored>(p.x, b, h, t);
      Stored* const to = row_of<Stored>(p, out, b, h, t);
      const Angle *const cos = row_of<Angle>(p.cos, b, t), *const sin = row_of<Angle>(p.sin, b, t);
      each_vector<F>(p.pairs, [&](int64_t i, auto part) {
        const Vector c = part.load(cos + i), s = part.load(sin + i);
        const Pairs<F> v = load_pairs<F, INTERLEAVED>(part, x, i, p.pairs);
        const Pairs<F> turned{v.a * c - v.b * s, v.b * c + v.a * s};
        store_pairs<F, INTERLEAVED>(part, turned, to, i, p.pairs);
      });
      copy_rest(p, x, to);
    }
}

// The gradients of one row's angles are added to `sums`, those of cosines first.
template <class F, class Stored, class Angle, bool INTERLEAVED>
FUSEPORT_INLINE void backward_row(const Problem& p, const Stored* x, const Stored* dout,
                                  const Angle* cos, const Angle* sin, Stored* dx, double* sums) {
  using Vector = typename F::Vector;
  each_vector<F>(p.pairs, [&](int64_t i, auto part) {
    const Vector c = part.load(cos + i), s = part.load(sin + i);
    const Pairs<F> v = load_pairs<F, INTERLEAVED>(part, x, i, p.pairs);
    const Pairs<F> d = load_pairs<F, INTERLEAVED>(part, dout, i, p.pairs);
    const Pairs<F> back{d.a * c + d.b * s, d.b * c - d.a * s};
    store_pairs<F, INTERLEAVED>(part, back, dx, i, p.pairs);
    part.add(d.a * v.a + d.b * v.b, sums + i);
    part.add(d.b * v.a - d.a * v.b, sums + p.pairs + i);
  });
  copy_rest(p, dout, dx);
}

template <class F, class Angle>
FUSEPORT_INLINE void store_sums(const double* sums, int64_t count, Angle* to) {
  for (int64_t i = 0; i < count; ++i) from_real((typename F::Real)sums[i], to + i);
}

template <class F, class Stored, class Angle, bool INTERLEAVED>
void backward_unit(const Problem& p, const Backward& g, int64_t unit, void* scratch) {
  const int64_t table = unit / p.blocks();  // 0 if there is one
  const Range range = range_of(p, unit % p.blocks());
  const int64_t begin = p.of_batch ? table : 0, end = p.of_batch ? table + 1 : p.batch;
  double* const sums = (double*)scratch;
  memset(sums, 0, sizeof *sums * 2 * p.pairs * (range.end - range.begin));
  for (int64_t b = begin; b < end; ++b)
    for (int64_t h = 0; h < p.heads; ++h)
      for (int64_t t = range.begin; t < range.end; ++t)
        backward_row<F, Stored, Angle, INTERLEAVED>(
            p, row_of<Stored>(p.x, b, h, t), row_of<Stored>(g.dout, b, h, t),
            row_of<Angle>(p.cos, b, t), row_of<Angle>(p.sin, b, t),
            row_of<Stored>(p, g.dx, b, h, t), sums + (t - range.begin) * 2 * p.pairs);
  for (int64_t t = range.begin; t < range.end; ++t) {
    const double* const of_position = sums + (t - range.begin) * 2 * p.pairs;
    const int64_t at = (table * p.length + t) * p.pairs;
    store_sums<F>(of_position, p.pairs, (Angle*)g.dcos + at);
    store_sums<F>(of_position + p.pairs, p.pairs, (Angle*)g.dsin + at);
  }
}

// The one of four that a problem is for.
template <class Run>
FUSEPORT_INLINE Run chosen(const Problem& p, Run plain, Run wide, Run neighbours,
                           Run wide_neighbours) {
  if (p.interleaved) return p.wide_angles ? wide_neighbours : neighbours;
  return p.wide_angles ? wide : plain;
}

template <class F, class Stored>
void forward_of(const Problem& p, void* out, int64_t unit) {
  using Real = typename F::Real;
  chosen(p, forward_unit<F, Stored, Stored, false>, forward_unit<F, Stored, Real, false>,
         forward_unit<F, Stored, Stored, true>, forward_unit<F, Stored, Real, true>)(p, out, unit);
}

template <class F, class Stored>
void backward_of(const Problem& p, const Backward& g, int64_t unit, void* scratch) {
  using Real = typename F::Real;
  chosen(p, backward_unit<F, Stored, Stored, false>, backward_unit<F, Stored, Real, false>,
         backward_unit<F, Stored, Stored, true>,
         backward_unit<F, Stored, Real, true>)(p, g, unit, scratch);
}

void forward(const Problem& p, void* out, int64_t unit) {
#define FUSEPORT_CALL(F, Stored) forward_of<F, Stored>(p, out, unit)
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

void backward(const Problem& p, const Backward& g, int64_t unit, void* scratch) {
#define FUSEPORT_CALL(F, Stored) backward_of<F, Stored>(p, g, unit, scratch)
  FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
}

}  // namespace

const Kernels table{forward, backward};

}  // namespace fuseport::rotary_embedding::FUSEPORT_ISA
