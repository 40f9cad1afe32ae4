// Gradients of rows of an image: sums over displacements of cotangents times rows of the other.
#pragma once

#include "correlation/rows.hpp"

namespace fuseport::correlation::FUSEPORT_ISA {

#if defined(__AVX512F__)
constexpr int TOGETHER = 8;  // channels that are summed up in registers, for two rows
#else
constexpr int TOGETHER = 4;
#endif
constexpr int64_t TERMS = 32;  // of a sum in registers: errors of longer ones would grow with it

// A row of the other image, and by which displacements the rows of a pair see it; -1 for not at all.
struct Sight {
  int64_t row, displacement[2];
};

template <class F>
struct BackwardScratch {
  using Real = typename F::Real;
  Sight* sights;
  // Displacements of columns: what they take of a row of the other image, where lane 0 is of their
  // output, and the places of these.
  int64_t *shifts, *at, *begins;
  Range* known;
  Real* cotangents;      // of an output's vector for each sight, displacement and row of the pair
  Real* sums;            // (2, TOGETHER, lanes)
  int64_t bytes;

  BackwardScratch(const Plan& plan, void* base) {
    Scratch s{(char*)base};
    const int64_t shifts_ = plan.shifts.count();
    s.take(2 * plan.down.patch, &sights);
    s.take(shifts_, &shifts, &at, &begins);
    s.take(shifts_, &known);
    s.take(2 * plan.down.patch * shifts_ * F::LANES, &cotangents);
    s.take(2 * TOGETHER * F::LANES, &sums);
    bytes = s.used;
  }
};

// One of the images, as a gradient of it is summed up.
template <class F>
struct Side {
  const Problem& p;
  const Plan& plan;
  const Shared& shared;
  bool second;

  const typename F::Real* other(int64_t batch, int64_t row) const {
    return second ? row1_of<F>(p, plan, shared, batch, row)
                  : row2_of<F>(p, plan, shared, batch, row);
  }
  int64_t stride() const { return second ? plan.row1 : plan.row2; }
};

// sums (RS, CS, lanes) += cotangents (rows, shifts, RS, lanes) times rows of the other image.
template <class F, int RS, int CS>
static void add_terms(const Side<F>& side, int64_t batch, int64_t channel, int64_t x,
                      const Sight* sights, int64_t rows, const int64_t* at, int64_t shifts,
                      const typename F::Real* cotangents, typename F::Real* sums,
                      int64_t sums_row) {
  using Real = typename F::Real;
  using Vector = typename F::Vector;
  const int64_t stride = side.stride();
  Vector kept[RS][CS] = {};
  int64_t terms = 0;
  const auto put = [&] {
#pragma GCC unroll 2
    for (int r = 0; r < RS; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < CS; ++c) {
        Real* const to = sums + r * sums_row + c * F::LANES;
        store<F>(to, load<F>(to) + kept[r][c]);
        kept[r][c] = Vector{};
      }
    terms = 0;
  };
  for (int64_t row = 0; row < rows; ++row) {
    const Real* const other = side.other(batch, sights[row].row) + channel * stride + x;
    for (int64_t first = 0; first < shifts; first += TERMS) {
      const int64_t last = least(shifts, first + TERMS);
      for (int64_t j = first; j < last; ++j, cotangents += RS * F::LANES) {
        const Real* from = other + at[j];
        Vector g[RS];
#pragma GCC unroll 2
        for (int r = 0; r < RS; ++r) g[r] = load<F>(cotangents + r * F::LANES);
#pragma GCC unroll 8
        for (int c = 0; c < CS; ++c) {
          const Vector v = load<F>(from + c * stride);
#pragma GCC unroll 2
          for (int r = 0; r < RS; ++r) kept[r][c] += g[r] * v;
        }
      }
      terms += last - first;
      if (terms >= TERMS) put();
    }
  }
  if (terms) put();
}

// Lanes x … of a row of cotangents, zeros outside of a range.
template <class F, class Source>
FUSEPORT_INLINE typename F::Vector lanes_of(const Source* row, int64_t x, const Range& r) {
  if (x >= r.first && x + F::LANES <= r.last) return load_reals<F>(row + x);
  typename F::Real lanes[F::LANES] = {};
  const int64_t last = least(F::LANES, r.last - x);
  for (int64_t i = most(0, r.first - x); i < last; ++i) lanes[i] = to_real(row[x + i]);
  return load<F>(lanes);
}

// The rows of the pair, and which of the others each sees: those both see, and those one sees alone.
struct Pair {
  int64_t batch, row[2];
  int rows;
  int64_t both, alone[2];  // how many sights, one after another
};

template <class F>
static Pair see(const Side<F>& side, int64_t batch, int64_t number, Sight* sights) {
  const Plan& plan = side.plan;
  const Grid& down = plan.down;
  Pair pair{batch, {plan.pairs.row(number), 0}, 1, 0, {0, 0}};
  pair.row[1] = pair.row[0] + plan.pairs.step;
  if (plan.pairs.step && pair.row[1] < down.size) pair.rows = 2;
  const int64_t apart = plan.pairs.step / down.step;  // in displacements
  // Of two rows of the first image, both or none are at a stride; but one may be before the first place.
  const bool together =
      pair.rows == 2 &&
      (side.second || (down.place(pair.row[0]) >= 0 && down.place(pair.row[1]) >= 0));
  const auto visit = [&](int r, int64_t i, const auto& take) {
    const int64_t row = side.second ? pair.row[r] - down.offset(i) : pair.row[r] + down.offset(i);
    if (row < 0 || row >= down.size) return;
    // The place of the row of the first image.
    const int64_t place = down.place(side.second ? row : pair.row[r]);
    if (place < 0) return;
    const int64_t j = !together ? -1 : i + ((r == 0) == side.second ? apart : -apart);
    take(side.second ? place : row, j >= 0 && j < down.patch ? j : -1);
  };
  Sight* next = sights;
  for (int64_t i = 0; i < down.patch; ++i)
    visit(0, i, [&](int64_t row, int64_t j) {
      if (j >= 0) *next++ = {row, {i, j}};
    });
  pair.both = next - sights;
  for (int r = 0; r < pair.rows; ++r) {
    const Sight* const begin = next;
    for (int64_t i = 0; i < down.patch; ++i)
      visit(r, i, [&](int64_t row, int64_t j) {
        if (j < 0) *next++ = {row, {i, i}};
      });
    pair.alone[r] = next - begin;
  }
  return pair;
}

// Vectors of cotangents, from lane x on, of sights of RS rows of the pair, the first of them `from`.
template <class F, int RS, class Source>
static typename F::Real* read_cotangents(const Side<F>& side, const Pair& pair, int from,
                                         const BackwardScratch<F>& s, const Source* dout,
                                         int64_t x, const Sight* sights, int64_t count,
                                         int64_t shifts, typename F::Real* to) {
  const Plan& plan = side.plan;
  const Grid &down = plan.down, &across = plan.across;
  const int64_t plane = down.count * across.count;
  for (int64_t k = 0; k < count; ++k) {
    const Source* rows[RS];
    for (int r = 0; r < RS; ++r) {
      const int64_t i = sights[k].displacement[r];
      const int64_t place = side.second ? down.place(pair.row[from + r] - down.offset(i))
                                        : down.place(pair.row[from + r]);
      rows[r] = dout + (pair.batch * down.patch + i) * across.patch * plane + place * across.count;
    }
    for (int64_t j = 0; j < shifts; ++j)
      for (int r = 0; r < RS; ++r, to += F::LANES)
        store<F>(to, lanes_of<F>(rows[r] + s.shifts[j] * plane, x + s.begins[j], s.known[j]));
  }
  return to;
}

// All channels from `channel` on, from lane x on: the sums of rows, stored by put(row, channel, vector).
template <class F, class Source, class Put>
static void sum_lanes(const Side<F>& side, const Pair& pair, const BackwardScratch<F>& s,
                      const Source* dout, int64_t x, int64_t shifts, int64_t channel,
                      int64_t channels, const Put& put) {
  using Real = typename F::Real;
  constexpr int64_t ROW = TOGETHER * F::LANES;
  const Sight *const first = s.sights + pair.both, *const second = first + pair.alone[0];
  Real* const of_first = read_cotangents<F, 2>(side, pair, 0, s, dout, x, s.sights, pair.both,
                                               shifts, s.cotangents);
  Real* const of_second =
      read_cotangents<F, 1>(side, pair, 0, s, dout, x, first, pair.alone[0], shifts, of_first);
  read_cotangents<F, 1>(side, pair, 1, s, dout, x, second, pair.alone[1], shifts, of_second);
  for (int64_t c = 0; c < channels;) {
    const bool whole = channels - c >= TOGETHER;
    memset(s.sums, 0, 2 * ROW * sizeof(Real));
    const auto two = whole ? add_terms<F, 2, TOGETHER> : add_terms<F, 2, 1>;
    const auto one = whole ? add_terms<F, 1, TOGETHER> : add_terms<F, 1, 1>;
    two(side, pair.batch, channel + c, x, s.sights, pair.both, s.at, shifts, s.cotangents, s.sums,
        ROW);
    one(side, pair.batch, channel + c, x, first, pair.alone[0], s.at, shifts, of_first, s.sums,
        ROW);
    one(side, pair.batch, channel + c, x, second, pair.alone[1], s.at, shifts, of_second,
        s.sums + ROW, ROW);
    const int count = whole ? TOGETHER : 1;
    for (int r = 0; r < pair.rows; ++r)
      for (int i = 0; i < count; ++i)
        put(r, channel + c + i, load<F>(s.sums + r * ROW + i * F::LANES));
    c += count;
  }
}

// Stores `count` numbers of a vector, `stride` apart.
template <class F, class Stored>
FUSEPORT_INLINE void store_lanes(typename F::Vector v, int64_t count, Stored* to, int64_t stride) {
  if (stride == 1) {
    if (count == F::LANES)
      Whole<F>{}.store(v, to);
    else
      Part<F>{(int)count}.store(v, to);
    return;
  }
  typename F::Real lanes[F::LANES];
  store<F>(lanes, v);
  for (int64_t i = 0; i < count; ++i) from_real(lanes[i], to + i * stride);
}

template <class F, class Stored, class Source>
static void gradient_unit(const Side<F>& side, Stored* gradient, const Source* dout, int64_t batch,
                          int64_t number, int64_t channel, void* scratch) {
  const Problem& p = side.p;
  const Plan& plan = side.plan;
  const Grid& across = plan.across;
  const BackwardScratch<F> s(plan, scratch);
  const Pair pair = see(side, batch, number, s.sights);
  const int64_t channels = least(CHANNELS, p.channels - channel), width = p.across.size;
  const auto row = [&](int r, int64_t c) {
    return gradient + ((batch * p.channels + c) * p.down.size + pair.row[r]) * width;
  };
  for (int r = 0; r < pair.rows; ++r)
    for (int64_t c = channel; c < channel + channels; ++c)
      memset((void*)row(r, c), 0, width * sizeof(Stored));
  if (pair.both + pair.alone[0] + pair.alone[1] == 0 || !plan.slots) return;
  // Lanes are places of the first image, or every so many columns of the second.
  const int64_t slots = side.second ? plan.slots : 1;
  for (int64_t slot = 0; slot < slots; ++slot) {
    int64_t shifts = 0;
    for (int64_t j = plan.shifts.first + slot; j < plan.shifts.last;
         j += side.second ? plan.period : 1) {
      s.shifts[shifts] = j;
      s.begins[shifts] = side.second ? -plan.strides_to(j) : 0;
      s.at[shifts] = side.second ? s.begins[shifts] - plan.begin1 : plan.at2(j);
      s.known[shifts++] = across.places(across.offset(j));
    }
    const int64_t phase =
        side.second ? plan.phase(plan.shifts.first + slot) : -across.padding;
    const Range lanes =
        side.second ? Range{0, floor_div(width - 1 - phase, across.stride) + 1} : across.places(0);
    for (int64_t x = lanes.first; x < lanes.last; x += F::LANES) {
      const int64_t count = least(F::LANES, lanes.last - x);
      sum_lanes<F>(side, pair, s, dout, x, shifts, channel, channels,
                   [&](int r, int64_t c, typename F::Vector sums) {
                     store_lanes<F>(sums, count, row(r, c) + x * across.stride + phase,
                                    across.stride);
                   });
    }
  }
  if (side.second || !p.windows()) return;
  for (int r = 0; r < pair.rows; ++r) {  // pixels in no window
    const bool covered = p.down.covered(pair.row[r]);
    for (int64_t x = 0; x < width; ++x)
      if (!covered || !p.across.covered(x))
        for (int64_t c = channel; c < channel + channels; ++c)
          memset((void*)(row(r, c) + x), 0, sizeof(Stored));
  }
}

template <class F, class Stored, class Source>
static void backward_unit(const Problem& p, const Plan& plan, const Backward& b,
                          const Source* dout, const Shared& shared, int64_t unit, void* scratch) {
  const int64_t blocks = (p.channels + CHANNELS - 1) / CHANNELS;
  const int64_t block = unit % blocks, pair = unit / blocks % plan.pairs.count();
  const int64_t image = unit / blocks / plan.pairs.count();
  const bool second = image >= p.batches;
  gradient_unit<F, Stored>(Side<F>{p, plan, shared, second},
                           (Stored*)(second ? b.dinput2 : b.dinput1), dout, image % p.batches,
                           pair, block * CHANNELS, scratch);
}

}  // namespace fuseport::correlation::FUSEPORT_ISA
