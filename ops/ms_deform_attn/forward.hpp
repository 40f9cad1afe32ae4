// The forward kernel: sums over the pixels of a query and head, some vectors of channels at a time.
#pragma once

#include "ms_deform_attn/samples.hpp"

namespace fuseport::ms_deform_attn::FUSEPORT_ISA {

// The first `count` numbers of a row, as a vector; no memory beyond them is read.
template <class F, class Stored>
FUSEPORT_INLINE typename F::Vector load_some(const Stored* from, int64_t count) {
  if (count >= F::LANES) return load_reals<F>(from);
  Stored part[F::LANES] = {};
  for (int64_t i = 0; i < count; ++i) part[i] = from[i];
  return load_reals<F>(part);
}

template <class F, class Stored>
FUSEPORT_INLINE void store_some(typename F::Vector v, Stored* to, int64_t count) {
  if (count >= F::LANES) return store_reals<F>(v, to);
  Stored part[F::LANES];
  store_reals<F>(v, part);
  for (int64_t i = 0; i < count; ++i) to[i] = part[i];
}

// VECTORS of them, or, if SOME, the last `count` channels. Each of a sample's four pixels has a sum
// of its own, so that the processor need not wait for one before it adds to the next.
template <class F, class Stored, int VECTORS, bool SOME>
FUSEPORT_INLINE void sum_pixels(const Samples<F>& s, const Stored* value, int64_t stride,
                                const Stored* nothing, int64_t count, Stored* to) {
  using Vector = typename F::Vector;
  Vector sums[4][VECTORS] = {};
  for (int64_t j = 0; j < s.n; ++j) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const int64_t position = s.index[k * s.n + j];
      const Stored* const from = position < 0 ? nothing : value + position * stride;
      const Vector share = splat<F>(s.share[k * s.n + j]);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v)
        sums[k][v] += share * (SOME ? load_some<F>(from, count)
                                    : load_reals<F>(from + v * F::LANES));
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < VECTORS; ++v) {
    const Vector sum = (sums[0][v] + sums[1][v]) + (sums[2][v] + sums[3][v]);
    SOME ? store_some<F>(sum, to, count) : store_reals<F>(sum, to + v * F::LANES);
  }
}

template <class F, class Stored>
static int64_t forward_bytes(const Problem& p) {
  return whole(Samples<F>::bytes(p), 64) + p.channels * (int64_t)sizeof(Stored);
}

template <class F, class Stored, class Point>
static void forward_unit(const Problem& p, const Forward& f, int64_t unit, void* scratch) {
  constexpr int64_t LANES = F::LANES;
  const Samples<F> samples(p, scratch);
  Stored* const nothing = (Stored*)((char*)scratch + whole(Samples<F>::bytes(p), 64));
  memset(nothing, 0, p.channels * sizeof(Stored));
  const int64_t pair = unit / p.blocks(), batch = pair / p.heads, head = pair % p.heads;
  const int64_t begin = unit % p.blocks() * QUERIES, stride = p.heads * p.channels;
  const int64_t end = begin + QUERIES < p.queries ? begin + QUERIES : p.queries;
  const Stored* const value =
      (const Stored*)p.value + batch * p.positions * stride + head * p.channels;
  for (int64_t q = begin; q < end; ++q) {
    const int64_t number = (batch * p.queries + q) * p.heads + head;
    samples.template read<Point>(p, number);
    Stored* const out = (Stored*)f.out + number * p.channels;
    int64_t c = 0;
    for (; c + 4 * LANES <= p.channels; c += 4 * LANES)
      sum_pixels<F, Stored, 4, false>(samples, value + c, stride, nothing, 0, out + c);
    for (; c + 2 * LANES <= p.channels; c += 2 * LANES)
      sum_pixels<F, Stored, 2, false>(samples, value + c, stride, nothing, 0, out + c);
    for (; c < p.channels; c += LANES)
      sum_pixels<F, Stored, 1, true>(samples, value + c, stride, nothing, p.channels - c, out + c);
  }
}

}  // namespace fuseport::ms_deform_attn::FUSEPORT_ISA
