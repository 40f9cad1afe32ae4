// Squares of a tile, of as many steps and channels as a vector has lanes: what is computed of each number
// alone is computed in rows as memory has them, so that fewer tiles are transposed. Compiled once per
// instruction set.
#pragma once

#include "selective_scan/tiles.hpp"

namespace fuseport::selective_scan::FUSEPORT_ISA {

// From step `time` and channel `channel` of a tile on: a channel in each row, with ACROSS, or a step.
template <class F, bool ACROSS>
struct Square {
  using Real = typename F::Real;
  using Vector = typename F::Vector;
  static constexpr int LANES = F::LANES, SIZE = LANES * LANES;

  const Unit& unit;
  const Steps& steps;
  int time, channel;

  // Where they begin, and how far they are apart.
  struct Rows {
    const Real* first;
    int64_t stride;

    FUSEPORT_INLINED Vector operator[](int row) const { return load<F>(first + row * stride); }
  };

  // Of a sequence: in memory, if they lie there as they are wanted, or else in `copy`, of SIZE; zero
  // past the last channel and step, of which nothing is stored. Here and in `put`, whole rows are taken
  // without a call of what takes any block: 0.94 of the time of a scan in bfloat16.
  template <class Stored>
  FUSEPORT_INLINED Rows rows(const Sequence& s, Real* copy) const {
    const Stored* first = at<const Stored>(s);
    const int64_t rows = ACROSS ? s.channel : s.time, lanes = ACROSS ? s.time : s.channel;
    if (whole() && lanes == 1) {
      if constexpr (sizeof(Stored) == sizeof(Real)) return {(const Real*)first, rows};
#pragma GCC unroll 4
      for (int i = 0; i < LANES; ++i)
        store<F>(copy + i * LANES, load_reals<F>(first + i * rows));
    } else {
      if (!whole()) memset(copy, 0, sizeof *copy * SIZE);
      load_block<F>(first, rows, lanes, in_rows(), in_lanes(), copy, LANES);
    }
    return {copy, LANES};
  }

  // Rows in memory, LANES apart, become those of a sequence.
  template <class Stored>
  FUSEPORT_INLINED void put(const Real* rows, const MutableSequence& s) const {
    Stored* first = at<Stored>(s);
    const int64_t stride = ACROSS ? s.channel : s.time, lanes = ACROSS ? s.time : s.channel;
    if (whole() && lanes == 1) {
#pragma GCC unroll 4
      for (int i = 0; i < LANES; ++i)
        store_reals<F>(load<F>(rows + i * LANES), first + i * stride);
    } else {
      store_block<F>(rows, LANES, in_rows(), in_lanes(), first, stride, lanes);
    }
  }

  // A number of each channel, in the lanes of a row.
  FUSEPORT_INLINED Vector of_channel(const Real* numbers, int row) const {
    return ACROSS ? splat<F>(numbers[channel + row]) : load<F>(numbers + channel);
  }

  // Where the square is in a tile.
  FUSEPORT_INLINED Real* in(Real* tile) const { return tile + time * BLOCK + channel; }

 private:
  template <class Stored, class Sequence>
  FUSEPORT_INLINED Stored* at(const Sequence& s) const {
    return first_of<Stored>(s, unit, steps) + time * s.time + channel * s.channel;
  }

  FUSEPORT_INLINED bool whole() const { return channels() == LANES && times() == LANES; }
  FUSEPORT_INLINED int channels() const { return most(unit.channels - channel); }
  FUSEPORT_INLINED int times() const { return most(steps.count - time); }
  FUSEPORT_INLINED int in_rows() const { return ACROSS ? channels() : times(); }
  FUSEPORT_INLINED int in_lanes() const { return ACROSS ? times() : channels(); }
  FUSEPORT_INLINED static int most(int count) { return count < LANES ? count : LANES; }
};

// Rows in memory, `stride` apart, as columns there.
template <class F>
FUSEPORT_INLINE void turn(const typename F::Real* from, int64_t stride, typename F::Real* to,
                          int64_t to_stride) {
  typename F::Vector columns[F::LANES];
  load_columns<F>(from, stride, columns);
#pragma GCC unroll 16
  for (int i = 0; i < F::LANES; ++i) store<F>(to + i * to_stride, columns[i]);
}

// Calls `work` with the index of each row that is computed with, and the row: with TURNED, rows in memory,
// `stride` apart, are columns of what is computed with.
template <class F, bool TURNED, class Work>
FUSEPORT_INLINE void each_row(const typename F::Real* from, int64_t stride, const Work& work) {
  if constexpr (TURNED) {
    for (int c = 0; c < F::LANES; c += COLUMNS<F>) {
      typename F::Vector columns[COLUMNS<F>];
      load_some_columns<F>(from + c, stride, columns);
#pragma GCC unroll 16
      for (int i = 0; i < COLUMNS<F>; ++i) work(c + i, columns[i]);
    }
  } else {
    for (int i = 0; i < F::LANES; ++i) work(i, load<F>(from + i * stride));
  }
}

// Calls `work` for each square of a tile, in the order of memory.
template <class F, bool ACROSS, class Work>
FUSEPORT_INLINE void each_square(const Unit& unit, const Steps& steps, const Work& work) {
  for (int row = 0; row < (ACROSS ? unit.channels : steps.count); row += F::LANES)
    for (int lane = 0; lane < (ACROSS ? steps.count : unit.channels); lane += F::LANES)
      work(Square<F, ACROSS>{unit, steps, ACROSS ? lane : row, ACROSS ? row : lane});
}

}  // namespace fuseport::selective_scan::FUSEPORT_ISA
