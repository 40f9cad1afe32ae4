// Decays of one channel's 16 states, in lanes, looked up: half the instructions of an exponential.
//
// exp(δ̂·A) = 2^(j·step·c) · exp(rest·A), where c = log2(e)·A, step is a power of two for which step·|c| is
// at most 1/16, j = nearest(δ̂/step), and rest = δ̂ - j·step, without error. The first factor is a row of
// one table, or the product of rows of two; for the second, |rest·A| ≤ ln(2)/32, of which a polynomial of
// degree 3 is enough. Steps of about one length take one row time after time, and what it is off by would
// add up in states that last: rows of the fine table have what their rounding left, too, and the
// polynomial is not Taylor's, but has x^4/24 as well as one may between -m and m, (m²·x² - m⁴/8) / 24.
#pragma once

#include "selective_scan/tiles.hpp"

namespace fuseport::selective_scan::FUSEPORT_ISA {

constexpr int STATES = 16;
constexpr int FINE = 64, COARSE = 64;  // rows of the tables: of j % FINE, and of j / FINE
constexpr int ROW = 2 * STATES;        // of the fine table: powers, and what is left of them
constexpr int TABLES = FINE * ROW + COARSE * STATES;

// Whether vectors of such reals are long enough, and floats.
template <class F>
constexpr bool BY_CHANNEL = WIDTH >= 32 && sizeof(typename F::Real) == 4;

// How decays come: from one table, from two, or each by its own exponential.
enum class Source { FINE, BOTH, EACH };

// Calls `work` with the source as an argument of its template.
template <class Work>
FUSEPORT_INLINE void with_source(Source source, const Work& work) {
  if (source == Source::BOTH) return work.template operator()<Source::BOTH>();
  if (source == Source::FINE) return work.template operator()<Source::FINE>();
  work.template operator()<Source::EACH>();
}

// Of all channels of a unit.
template <class F>
struct DecayScratch {
  using Real = typename F::Real;
  Real* tables;     // [channel][row][state], fine before coarse; of fine rows also what rounding left
  uint32_t* known;  // of each channel, how many j are in the tables
  Real *exponent, *limit;  // [channel][state] and [channel]: see to_exponents
  Real* tile;

  void take(Scratch& s) {
    s.take(BLOCK * TABLES, &tables);
    s.take(BLOCK, &known);
    s.take(BLOCK * STATES, &exponent, &tile);
    s.take(BLOCK, &limit);
  }

  void begin(const Problem& p, const Unit& unit) const {
    load_A<F>(p, unit, tile);
    to_exponents<F>(STATES, tile, limit);
    load_block<F>(tile, 1, BLOCK, BLOCK, STATES, exponent, STATES);
    clear(BLOCK, known);
  }
};

// δ̂ of as many steps as a vector has lanes, in parts.
template <class F>
struct DividedSteps {
  alignas(64) typename F::Real rest[F::LANES];  // δ̂ itself where no table serves
  uint32_t index[F::LANES];                     // j
};

// Of one channel. It is passed by value to what is not inlined, or else registers would not hold it.
template <class F>
class Tables {
  using Vector = typename F::Vector;
  using Real = typename F::Real;
  using Bits = typename F::Bits;
  static constexpr int LANES = F::LANES, VECTORS = STATES / LANES;
  static constexpr Real STEEP = (Real)0x1p30;  // the largest |c| that has tables: A³ is finite

  Real *fine, *coarse;
  const Real* exponent;
  uint32_t* known;
  Real limit;
  Vector step, per;                                        // `per` is 1 / step
  Vector first[VECTORS], second[VECTORS], third[VECTORS];  // coefficients

 public:
  FUSEPORT_INLINED Tables(const DecayScratch<F>& s, const Problem& p, const Unit& unit, int channel)
      : fine(s.tables + channel * TABLES), coarse(fine + FINE * ROW),
        exponent(s.exponent + channel * STATES), known(s.known + channel), limit(s.limit[channel]) {
    // FAR / limit is the largest |c|, or 1; without the mantissa, a power of two.
    const Bits mantissa = ~Bits{} >> (32 - F::MANTISSA);
    step = (Vector)((Bits)splat<F>(limit) & ~mantissa) * (Real)(1 / F::FAR / 16);
    per = (Real)1 / step;
    const Real* A = (const Real*)p.A + (unit.channel + channel) * STATES;
    for (int v = 0; v < VECTORS; ++v) {
      first[v] = load<F>(A + v * LANES);
      const Vector square = first[v] * first[v];
      second[v] = square * ((Real)0.5 + square * (step * step) * (Real)(1.0 / 96));  // m = step·A/2
      third[v] = first[v] * square * (Real)(1.0 / 6);
    }
  }

  FUSEPORT_INLINED void divide(Vector delta, DividedSteps<F>& parts) const {
    const Vector shifted = delta * per + F::ROUND;
    const Bits index = (Bits)shifted - (Bits)splat<F>(F::ROUND);
    memcpy(parts.index, &index, sizeof index);
    store<F>(parts.rest, delta - (shifted - F::ROUND) * step);
  }

  // To be asked of δ̂ that was divided, before its decays are.
  FUSEPORT_INLINED Source source(Vector delta, DividedSteps<F>& parts) const {
    Bits index;
    memcpy(&index, parts.index, sizeof index);
    const uint32_t there = *known;
    if (any(index >= Bits{} + there)) [[unlikely]] return grown(*this, index, delta, parts.rest);
    return there > FINE ? Source::BOTH : Source::FINE;
  }

  // A decay of the states of a vector at one step.
  template <Source SOURCE>
  FUSEPORT_INLINED Vector decay(Vector rest, uint32_t j, int v) const {
    const int at = v * LANES;
    if constexpr (SOURCE == Source::EACH) return exp2_of_product<F>(rest, load<F>(exponent + at));
    const Real* row = fine + j % FINE * ROW + at;
    Vector a = load<F>(row);
    if constexpr (SOURCE == Source::BOTH) a *= load<F>(coarse + j / FINE * STATES + at);
    return a + a * (((third[v] * rest + second[v]) * rest + first[v]) * rest + load<F>(row + STATES));
  }

 private:
  // Where some j is not in the tables: they grow, unless it lies beyond them, as that of a negative δ̂
  // and of NaN does, or A is too large.
  __attribute__((noinline)) static Source grown(Tables tables, Bits index, Vector delta,
                                                Real* rest) {
    uint32_t last = 0;
    for (int i = 0; i < LANES; ++i) last = index[i] > last ? index[i] : last;
    if (last >= FINE * COARSE || !(tables.limit >= F::FAR / STEEP)) {
      store<F>(rest, bounded<F>(delta, splat<F>(tables.limit)));
      return Source::EACH;
    }
    const uint32_t known = *tables.known, rows = last / FINE + 1;
    tables.refine(known < FINE ? known : FINE, last < FINE ? last + 1 : FINE);
    *tables.known = rows > 1 ? rows * FINE : last + 1;
    if (rows == 1) return Source::FINE;
    const Vector size = tables.step * (Real)FINE;
    for (uint32_t row = known > FINE ? known / FINE : 0; row < rows; ++row)
      for (int at = 0; at < STATES; at += LANES)
        store<F>(tables.coarse + row * STATES + at,
                 exp2_of_product<F>(size * (Real)(int)row, load<F>(tables.exponent + at)));
    return Source::BOTH;
  }

  // Rows of the fine table from one on up to another: each is the one before times the second.
  void refine(uint32_t from, uint32_t to) const {
    if (from >= to) return;
    for (int v = 0; v < VECTORS; ++v) {
      double c[LANES], exact[LANES];
      Real rounded[LANES], rest[LANES];
      for (int i = 0; i < LANES; ++i) c[i] = F64::LOG2E * (double)step[i] * (double)first[v][i];
      for (int i = 0; i < LANES; i += F64::LANES)
        store<F64>(exact + i, exp2_of_product<F64>(splat<F64>(1), load<F64>(c + i)));
      for (int i = 0; i < LANES; ++i) {
        rounded[i] = (Real)exact[i];
        rest[i] = (Real)(exact[i] - (double)rounded[i]);
      }
      const Vector factor = load<F>(rounded), inverse = (Real)1 / factor;
      const Vector left_of_factor = load<F>(rest) * inverse;
      Real* row = fine + from * ROW + v * LANES;
      Vector power = splat<F>(1), square = first[v] * step * first[v] * step;
      Vector left = square * square * (Real)(-1.0 / 3072);  // -m⁴/8 / 24
      if (from > 0) power = load<F>(row - ROW), left = load<F>(row - ROW + STATES);
      Vector per_power = (Real)1 / power;
      for (uint32_t j = from; j < to; ++j, row += ROW) {
        if (j > 0) {
          const Vector product = power * factor;
          const Vector lost = sum_of_product<F>(power, factor, -product);
          per_power *= inverse;
          left += left_of_factor + lost * per_power;
          power = product;
        }
        store<F>(row, power);
        store<F>(row + STATES, left);
      }
    }
  }
};

// B or C over some steps, as [step][state], `stride` apart.
template <class F, class Stored>
static void load_by_step(const Coefficient& k, const Unit& unit, const Steps& steps,
                         typename F::Real* tile, int stride) {
  const Stored* from = (const Stored*)k.data + unit.batch * k.batch +
                       unit.channel / k.channels * k.group + steps.start * k.time;
  load_block<F>(from, k.time, k.state, steps.count, STATES, tile, stride);
}

}  // namespace fuseport::selective_scan::FUSEPORT_ISA
