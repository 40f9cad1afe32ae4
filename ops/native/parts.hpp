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

}  // namespace fuseport::FUSEPORT_ISA
