// Products of a row of the second image with all rows of the first that are compared with it.
#pragma once

#include "correlation/rows.hpp"

namespace fuseport::correlation::FUSEPORT_ISA {

#if defined(__AVX512F__)
constexpr int ROWS = 4;
#else
constexpr int ROWS = 2;
#endif
constexpr int SHIFTS = 5;  // displacements that are summed up together, for ROWS rows

// A row of the first image, and the displacement that takes it to that of the second.
struct Meeting {
  int64_t displacement, place;
};

template <class F>
struct ForwardScratch {
  Meeting* meetings;
  int64_t* at;             // of each of the plan's displacements in a row of the second image
  Range* known;            // the places of each
  typename F::Real* tile;  // (meetings, displacements, lanes)
  int64_t bytes;

  ForwardScratch(const Plan& plan, void* base) {
    Scratch s{(char*)base};
    s.take(plan.down.patch, &meetings);
    s.take(plan.shifts.count(), &at);
    s.take(plan.shifts.count(), &known);
    s.take(plan.down.patch * plan.shifts.count() * F::LANES, &tile);
    bytes = s.used;
  }
};

// tile (RS, displacements, lanes) = products of the vectors that `first` and `second` point to, summed up
// over channels; or plus these.
template <class F, int RS, int JS>
static void add_products(const Plan& plan, const typename F::Real* const* first,
                         const typename F::Real* second, const int64_t* at, int64_t channels,
                         bool begins, typename F::Real* tile) {
  using Real = typename F::Real;
  using Vector = typename F::Vector;
  Vector sums[RS][JS] = {};
  const Real *rows[RS], *shifted[JS];
#pragma GCC unroll 4
  for (int r = 0; r < RS; ++r) rows[r] = first[r];
#pragma GCC unroll 8
  for (int j = 0; j < JS; ++j) shifted[j] = second + at[j];
  int64_t here = 0, there = 0;
  for (int64_t c = 0; c < channels; ++c, here += plan.row1, there += plan.row2) {
    Vector one[RS];
#pragma GCC unroll 4
    for (int r = 0; r < RS; ++r) one[r] = load<F>(rows[r] + here);
#pragma GCC unroll 8
    for (int j = 0; j < JS; ++j) {
      const Vector other = load<F>(shifted[j] + there);
#pragma GCC unroll 4
      for (int r = 0; r < RS; ++r) sums[r][j] += one[r] * other;
    }
  }
  const int64_t row = plan.shifts.count() * F::LANES;
#pragma GCC unroll 4
  for (int r = 0; r < RS; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < JS; ++j) {
      Real* const to = tile + r * row + j * F::LANES;
      store<F>(to, begins ? sums[r][j] : load<F>(to) + sums[r][j]);
    }
}

template <class F, int RS>
static void add_products(const Plan& plan, const typename F::Real* const* first,
                         const typename F::Real* second, const int64_t* at, int64_t channels,
                         bool begins, typename F::Real* tile) {
  int64_t left = plan.shifts.count();
  for (int64_t blocks = (left + SHIFTS - 1) / SHIFTS; blocks > 0; --blocks) {
    const int64_t count = (left + blocks - 1) / blocks;
#define FUSEPORT_CASE(n)                                                        \
  case n:                                                                       \
    add_products<F, RS, n>(plan, first, second, at, channels, begins, tile);    \
    break;
    switch (count) {
      FUSEPORT_CASE(1)
      FUSEPORT_CASE(2)
      FUSEPORT_CASE(3)
      FUSEPORT_CASE(4)
      FUSEPORT_CASE(5)
    }
#undef FUSEPORT_CASE
    left -= count;
    at += count;
    tile += count * F::LANES;
  }
}

// The tile of all meetings, for the outputs from column x on.
template <class F>
static void fill_tile(const Problem& p, const Plan& plan, const Shared& shared, int64_t batch,
                      int64_t row, int64_t x, int meetings, const ForwardScratch<F>& s) {
  using Real = typename F::Real;
  const Real* const second = row2_of<F>(p, plan, shared, batch, row) + x;
  int64_t begin = 0;
  do {  // once, too, where there are no channels
    const int64_t channels = least(CHUNK, p.channels - begin);
    for (int m = 0; m < meetings;) {
      const int count = meetings - m >= ROWS ? ROWS : meetings - m >= 2 ? 2 : 1;
      const Real* first[ROWS];
      for (int r = 0; r < count; ++r)
        first[r] = row1_of<F>(p, plan, shared, batch, s.meetings[m + r].place) + x - plan.begin1 +
                   begin * plan.row1;
      const auto add = count == ROWS ? add_products<F, ROWS>
                       : count == 2  ? add_products<F, 2>
                                     : add_products<F, 1>;
      add(plan, first, second + begin * plan.row2, s.at, channels, begin == 0,
          s.tile + m * plan.shifts.count() * F::LANES);
      m += count;
    }
    begin += channels;
  } while (begin < p.channels);
}

// A row of the second image; Target is what the products are stored as, of outputs or of a volume.
template <class F, class Target>
static void products_unit(const Problem& p, const Plan& plan, Target* out, const Shared& shared,
                          int64_t batch, int64_t row, void* scratch) {
  using Vector = typename F::Vector;
  using Integers = typename F::Integers;
  using Index = decltype(Integers{}[0] + 0);
  const ForwardScratch<F> s(plan, scratch);
  const Grid &down = plan.down, &across = plan.across;
  const int64_t width = across.count, plane = down.count * width;
  int meetings = 0;
  for (int64_t i = 0; i < down.patch; ++i) {
    const int64_t pixel = row - down.offset(i), place = down.place(pixel);
    if (place >= 0 && pixel >= 0 && pixel < down.size) s.meetings[meetings++] = {i, place};
  }
  for (int64_t j = 0; j < plan.shifts.count(); ++j) {
    s.at[j] = plan.at2(plan.shifts.first + j);
    s.known[j] = across.places(across.offset(plan.shifts.first + j));
  }
  Integers number{};
  for (int l = 0; l < F::LANES; ++l) number[l] = l;
  const Range known = plan.shifts.count() ? across.places(0) : Range{0, 0};
  for (int64_t x = known.first; x < known.last; x += F::LANES) {
    fill_tile<F>(p, plan, shared, batch, row, x, meetings, s);
    const auto* sums = s.tile;
    const int count = (int)least(F::LANES, known.last - x);
    for (int m = 0; m < meetings; ++m) {
      const int64_t first = (batch * down.patch + s.meetings[m].displacement) * across.patch;
      Target* const to = out + first * plane + s.meetings[m].place * width + x;
      for (int64_t j = plan.shifts.first; j < plan.shifts.last; ++j, sums += F::LANES) {
        const Range& r = s.known[j - plan.shifts.first];
        const Index begin = (Index)most(0, least(F::LANES, r.first - x));
        const Index end = (Index)most(0, least(F::LANES, r.last - x));
        const Vector sum =
            (number >= begin) & (number < end) ? load<F>(sums) : Vector{};
        if (count == F::LANES)
          Whole<F>{}.store(sum, to + j * plane);
        else
          Part<F>{count}.store(sum, to + j * plane);
      }
    }
  }
  for (int m = 0; m < meetings; ++m) {  // and what has no pair
    const int64_t first = (batch * down.patch + s.meetings[m].displacement) * across.patch;
    Target* to = out + first * plane + s.meetings[m].place * width;
    for (int64_t j = 0; j < across.patch; ++j, to += plane) {
      const Range r = plan.shifts.has(j) ? known : Range{0, 0};
      memset((void*)to, 0, r.first * sizeof(Target));
      memset((void*)(to + r.last), 0, (width - r.last) * sizeof(Target));
    }
  }
}

// What has no row of the second image, of one displacement of rows.
template <class Target>
static void clear_unit(const Plan& plan, Target* out, int64_t batch, int64_t i) {
  const int64_t width = plan.across.count, rows = plan.down.count;
  Range r = plan.down.places(plan.down.offset(i));
  if (r.last <= r.first) r = {0, 0};
  Target* to = out + (batch * plan.down.patch + i) * plan.across.patch * rows * width;
  for (int64_t j = 0; j < plan.across.patch; ++j, to += rows * width) {
    memset((void*)to, 0, r.first * width * sizeof(Target));
    memset((void*)(to + r.last * width), 0, (rows - r.last) * width * sizeof(Target));
  }
}

template <class F, class Target>
static void forward_unit(const Problem& p, const Plan& plan, Target* out, const Shared& shared,
                         int64_t unit, void* scratch) {
  const int64_t rows = p.batches * plan.down.size;
  if (unit < rows)
    products_unit<F>(p, plan, out, shared, unit / plan.down.size, unit % plan.down.size, scratch);
  else
    clear_unit(plan, out, (unit - rows) / plan.down.patch, (unit - rows) % plan.down.patch);
}

}  // namespace fuseport::correlation::FUSEPORT_ISA
