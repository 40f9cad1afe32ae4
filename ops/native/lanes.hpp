// Numbers that change their lanes: interleaved, transposed, added up across a vector. Compiled once per
// instruction set, as vector.hpp is.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "native/vector.hpp"

namespace fuseport::FUSEPORT_ISA {

// Lanes of a and b in turn, from lane START of each on.
template <class F, int START, int... I>
FUSEPORT_INLINE typename F::Vector zip(typename F::Vector a, typename F::Vector b,
                                       std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (I % 2 * F::LANES + START + I / 2)...);
#else
  return __builtin_shuffle(a, b, typename F::Integers{(I % 2 * F::LANES + START + I / 2)...});
#endif
}

// Every second lane of a and then of b, from lane START on: what undoes zip.
template <class F, int START, int... I>
FUSEPORT_INLINE typename F::Vector unzip(typename F::Vector a, typename F::Vector b,
                                         std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (2 * I + START)...);
#else
  return __builtin_shuffle(a, b, typename F::Integers{(2 * I + START)...});
#endif
}

// In each 128 bits, which hold four numbers: SIZE of a's and of b's in turn, from number START on.
template <class F, int SIZE, int START, int... I>
FUSEPORT_INLINE typename F::Vector zip_quarters(typename F::Vector a, typename F::Vector b,
                                                std::integer_sequence<int, I...>) {
#define FUSEPORT_LANE(i) \
  ((i) / SIZE % 2 * F::LANES + (i) / 4 * 4 + START + (i) % 4 / (2 * SIZE) * SIZE + (i) % SIZE)
#if defined(__clang__)
  return __builtin_shufflevector(a, b, FUSEPORT_LANE(I)...);
#else
  return __builtin_shuffle(a, b, typename F::Integers{FUSEPORT_LANE(I)...});
#endif
#undef FUSEPORT_LANE
}

// Every second 128 bits of a and then of b, from those number START on.
template <class F, int START, int... I>
FUSEPORT_INLINE typename F::Vector every_second_quarter(typename F::Vector a, typename F::Vector b,
                                                        std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (I / 4 * 8 + START * 4 + I % 4)...);
#else
  return __builtin_shuffle(a, b, typename F::Integers{(I / 4 * 8 + START * 4 + I % 4)...});
#endif
}

// Rows become columns: as many perfect shuffles of the rows as an index of them has bits.
template <class F>
FUSEPORT_INLINE void transpose(typename F::Vector (&rows)[F::LANES]) {
  constexpr int HALF = F::LANES / 2;
  constexpr std::make_integer_sequence<int, F::LANES> lanes;
#pragma GCC unroll 4
  for (int stage = 1; stage < F::LANES; stage *= 2) {
    typename F::Vector mixed[F::LANES];
#pragma GCC unroll 8
    for (int i = 0; i < HALF; ++i) {
      mixed[2 * i] = zip<F, 0>(rows[i], rows[i + HALF], lanes);
      mixed[2 * i + 1] = zip<F, HALF>(rows[i], rows[i + HALF], lanes);
    }
#pragma GCC unroll 16
    for (int i = 0; i < F::LANES; ++i) rows[i] = mixed[i];
  }
}

// The same of the 4×4 numbers in each 128 bits of four rows.
template <class F>
FUSEPORT_INLINE void transpose_quarters(typename F::Vector (&rows)[4]) {
  constexpr std::make_integer_sequence<int, F::LANES> lanes;
  typename F::Vector mixed[4];
#pragma GCC unroll 2
  for (int i = 0; i < 4; i += 2) {
    mixed[i] = zip_quarters<F, 1, 0>(rows[i], rows[i + 1], lanes);
    mixed[i + 1] = zip_quarters<F, 1, 2>(rows[i], rows[i + 1], lanes);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    rows[2 * i] = zip_quarters<F, 2, 0>(mixed[i], mixed[i + 2], lanes);
    rows[2 * i + 1] = zip_quarters<F, 2, 2>(mixed[i], mixed[i + 2], lanes);
  }
}

// Half a vector from each of two places.
template <class F>
FUSEPORT_INLINE typename F::Vector load_halves(const typename F::Real* first,
                                               const typename F::Real* second) {
#if defined(__AVX512F__)
  const __m512d low = _mm512_castpd256_pd512(_mm256_loadu_pd((const double*)first));
  return (typename F::Vector)_mm512_insertf64x4(low, _mm256_loadu_pd((const double*)second), 1);
#elif defined(__AVX2__)
  const __m256d low = _mm256_castpd128_pd256(_mm_loadu_pd((const double*)first));
  return (typename F::Vector)_mm256_insertf128_pd(low, _mm_loadu_pd((const double*)second), 1);
#else
  typename F::Vector v;
  memcpy(&v, first, sizeof v / 2);
  memcpy((char*)&v + sizeof v / 2, second, sizeof v / 2);
  return v;
#endif
}

// How many columns of rows in memory come at a time: more would not fit into the registers beside other work.
template <class F>
constexpr int COLUMNS = sizeof(typename F::Real) == 4 && F::LANES > 4 ? F::LANES / 2 : F::LANES;

// From rows of memory, `stride` numbers apart, their first columns. Shuffles are what limits a
// transposition, and to load half a vector into its place is none.
template <class F>
FUSEPORT_INLINE void load_some_columns(const typename F::Real* from, int64_t stride,
                                       typename F::Vector (&columns)[COLUMNS<F>]) {
  constexpr std::make_integer_sequence<int, F::LANES> lanes;
  if constexpr (sizeof(typename F::Real) == 4 && F::LANES == 16) {
    typename F::Vector upper[4], lower[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const typename F::Real* row = from + i * stride;
      upper[i] = load_halves<F>(row, row + 4 * stride);
      lower[i] = load_halves<F>(row + 8 * stride, row + 12 * stride);
    }
    transpose_quarters<F>(upper);
    transpose_quarters<F>(lower);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      columns[i] = every_second_quarter<F, 0>(upper[i], lower[i], lanes);
      columns[i + 4] = every_second_quarter<F, 1>(upper[i], lower[i], lanes);
    }
  } else if constexpr (sizeof(typename F::Real) == 4 && F::LANES == 8) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const typename F::Real* row = from + i * stride;
      columns[i] = load_halves<F>(row, row + 4 * stride);
    }
    transpose_quarters<F>(columns);
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < F::LANES; ++i) columns[i] = load<F>(from + i * stride);
    transpose<F>(columns);
  }
}

// All of them.
template <class F>
FUSEPORT_INLINE void load_columns(const typename F::Real* from, int64_t stride,
                                  typename F::Vector (&columns)[F::LANES]) {
#pragma GCC unroll 2
  for (int c = 0; c < F::LANES; c += COLUMNS<F>) {
    typename F::Vector some[COLUMNS<F>];
    load_some_columns<F>(from + c, stride, some);
#pragma GCC unroll 16
    for (int i = 0; i < COLUMNS<F>; ++i) columns[c + i] = some[i];
  }
}

// Sums of the lanes of each row, in part: lane i, lane i + ROWS and so on add up to that of rows[i].
template <class F, int ROWS>
FUSEPORT_INLINE typename F::Vector partial_sums(typename F::Vector (&rows)[ROWS]) {
  static_assert(ROWS <= F::LANES && (ROWS & (ROWS - 1)) == 0);
  constexpr std::make_integer_sequence<int, F::LANES> lanes;
#pragma GCC unroll 4
  for (int half = ROWS / 2; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i)
      rows[i] = zip<F, 0>(rows[i], rows[i + half], lanes) +
                zip<F, F::LANES / 2>(rows[i], rows[i + half], lanes);
  return rows[0];
}

// Of four rows of floats, the sums within each 128 bits, where row i's is number i. These shuffles take a
// cycle, those across 128 bits three.
template <class F>
FUSEPORT_INLINE typename F::Vector sums_within_quarters(const typename F::Vector (&rows)[4]) {
  constexpr std::make_integer_sequence<int, F::LANES> lanes;
  typename F::Vector two[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    two[i] = zip_quarters<F, 1, 0>(rows[2 * i], rows[2 * i + 1], lanes) +
             zip_quarters<F, 1, 2>(rows[2 * i], rows[2 * i + 1], lanes);
  return zip_quarters<F, 2, 0>(two[0], two[1], lanes) +
         zip_quarters<F, 2, 2>(two[0], two[1], lanes);
}

// Of those of all rows, four at a time, the whole sums: in lane i that of row i.
template <class F>
FUSEPORT_INLINE typename F::Vector sums_of_quarters(typename F::Vector (&fours)[F::LANES / 4]) {
  constexpr std::make_integer_sequence<int, F::LANES> lanes;
#pragma GCC unroll 2
  for (int half = F::LANES / 8; half > 0; half /= 2)
#pragma GCC unroll 2
    for (int i = 0; i < half; ++i)
      fours[i] = every_second_quarter<F, 0>(fours[2 * i], fours[2 * i + 1], lanes) +
                 every_second_quarter<F, 1>(fours[2 * i], fours[2 * i + 1], lanes);
  return fours[0];
}

// In lane i the sum of the lanes of rows[i].
template <class F>
FUSEPORT_INLINE typename F::Vector sums_of_lanes(typename F::Vector (&rows)[F::LANES]) {
  if constexpr (sizeof(typename F::Real) == 4) {
    typename F::Vector fours[F::LANES / 4];
#pragma GCC unroll 4
    for (int i = 0; i < F::LANES; i += 4)
      fours[i / 4] = sums_within_quarters<F>({rows[i], rows[i + 1], rows[i + 2], rows[i + 3]});
    return sums_of_quarters<F>(fours);
  } else {
    return partial_sums<F, F::LANES>(rows);
  }
}

}  // namespace fuseport::FUSEPORT_ISA
