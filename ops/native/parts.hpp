// Numbers in a row of any dtype, a vector at a time, and the last of them, which are fewer than lanes.
// Compiled once per instruction set.
#pragma once

#include "native/storage.hpp"

namespace fuseport::FUSEPORT_ISA {

// A whole vector of numbers.
template <class F>
struct Whole {
  template <class Stored>
  FUSEPORT_INLINE typename F::Vector load(const Stored* from) {
    return load_reals<F>(from);
  }
  template <class Stored>
  FUSEPORT_INLINE void store(typename F::Vector v, Stored* to) {
    store_reals<F>(v, to);
  }
  // v itself: where numbers are left out, `other` stands for them.
  FUSEPORT_INLINE typename F::Vector chosen(typename F::Vector v, typename F::Real) { return v; }
  FUSEPORT_INLINE void add(typename F::Vector v, double* to) {
    typename F::Wide sums;
    memcpy(&sums, to, sizeof sums);
    sums += __builtin_convertvector(v, typename F::Wide);
    memcpy(to, &sums, sizeof sums);
  }
};

// The first `count` of a vector's numbers, which may be none or all; zeros in the others.
template <class F>
struct Part {
  int count;

  template <class Stored>
  inline __attribute__((always_inline)) typename F::Vector load(const Stored* from) const {
    Stored numbers[F::LANES] = {};
    memcpy(numbers, from, count * sizeof *from);
    return load_reals<F>(numbers);
  }
  template <class Stored>
  inline __attribute__((always_inline)) void store(typename F::Vector v, Stored* to) const {
    Stored numbers[F::LANES];
    store_reals<F>(v, numbers);
    memcpy(to, numbers, count * sizeof *to);
  }
  inline __attribute__((always_inline)) typename F::Vector chosen(typename F::Vector v,
                                                                  typename F::Real other) const {
    return first_or<F>(v, count, other);
  }
  inline __attribute__((always_inline)) void add(typename F::Vector v, double* to) const {
    for (int i = 0; i < count; ++i) to[i] += (double)v[i];
  }
};

// Calls work(i, part) for each vector of so many numbers, the first of which is number i.
template <class F, class Work>
FUSEPORT_INLINE void each_vector(int64_t count, const Work& work) {
  int64_t i = 0;
  for (; i + F::LANES <= count; i += F::LANES) work(i, Whole<F>{});
  if (i < count) work(i, Part<F>{(int)(count - i)});
}

// The sum over so many numbers of term(i, part), in an order that their count decides.
template <class F, class Term>
FUSEPORT_INLINE typename F::Real summed(int64_t count, const Term& term) {
  constexpr int LANES = F::LANES, CHAINS = 4;
  typename F::Vector sums[CHAINS] = {};
  int64_t i = 0;
  for (; i + CHAINS * LANES <= count; i += CHAINS * LANES)
#pragma GCC unroll 4
    for (int j = 0; j < CHAINS; ++j) sums[j] += term(i + j * LANES, Whole<F>{});
  for (; i + LANES <= count; i += LANES) sums[0] += term(i, Whole<F>{});
  if (i < count) sums[1] += term(i, Part<F>{(int)(count - i)});
  typename F::Real lanes[LANES];
  store<F>(lanes, (sums[0] + sums[1]) + (sums[2] + sums[3]));
#pragma GCC unroll 4
  for (int half = LANES / 2; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  return lanes[0];
}

}  // namespace fuseport::FUSEPORT_ISA
