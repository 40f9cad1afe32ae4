// Tiles: one chunk of one unit's data as reals, [step][channel], whatever its dtype and strides.
// Channels past the end of a block are zero. Compiled once per instruction set.
#pragma once

#include "native/ahead.hpp"
#include "native/blocks.hpp"
#include "native/scratch.hpp"
#include "selective_scan/kernel.hpp"

namespace fuseport::selective_scan::FUSEPORT_ISA {

using namespace fuseport::FUSEPORT_ISA;

constexpr int TILE = CHUNK * BLOCK;

// What a unit covers.
struct Unit {
  int64_t batch, block;    // `block` counts from the first of the batch entry
  int64_t channel;         // the first
  int channels;            // 1 to BLOCK

  Unit(const Problem& p, int64_t unit) {
    batch = unit / p.blocks();
    block = unit % p.blocks();
    const int64_t within = block % p.blocks_per_span() * p.block();
    channel = block / p.blocks_per_span() * p.span + within;
    channels = (int)(p.span - within < p.block() ? p.span - within : p.block());
  }
};

// A chunk of time, or a part of it.
struct Steps {
  int64_t start;
  int count;

  Steps(const Problem& p, int64_t chunk) : Steps(p, chunk * CHUNK, CHUNK) {}

  Steps(const Problem& p, int64_t start, int64_t most) : start(start) {
    count = (int)(p.length - start < most ? p.length - start : most);
  }
};

// Where those of a unit begin, of its first step.
template <class Stored, class Sequence>
static Stored* first_of(const Sequence& s, const Unit& unit, const Steps& steps) {
  return (Stored*)s.data + unit.batch * s.batch + unit.channel * s.channel + steps.start * s.time;
}

template <class F, class Stored>
static void load_tile(const Sequence& s, const Unit& unit, const Steps& steps,
                      typename F::Real* tile) {
  if (unit.channels < BLOCK) memset(tile, 0, sizeof *tile * BLOCK * steps.count);
  load_block<F>(first_of<const Stored>(s, unit, steps), s.time, s.channel, steps.count,
                unit.channels, tile, BLOCK);
}

template <class F, class Stored>
static void store_tile(const typename F::Real* tile, const Unit& unit, const Steps& steps,
                       const MutableSequence& s) {
  store_block<F>(tile, BLOCK, steps.count, unit.channels, first_of<Stored>(s, unit, steps), s.time,
                 s.channel);
}

// A tile that will be read or written.
template <class Stored, class Sequence>
static void foresee_tile(const Sequence& s, const Unit& unit, const Steps& steps, Ahead* ahead) {
  const Stored* first = first_of<const Stored>(s, unit, steps);
  constexpr int64_t SIZE = sizeof(Stored);
  if (s.time == 1) {
    ahead->add(first, s.channel * SIZE, unit.channels, steps.count * SIZE);
  } else {
    ahead->add(first, s.time * SIZE, steps.count, unit.channels * SIZE);
  }
}

// How often a step of a chunk is visited where states are taken AT_ONCE at a time, and what is left of
// them one by one, of the channels of one vector after another.
template <class F, int AT_ONCE>
static int64_t visits(const Problem& p, int channels, int steps) {
  return (channels + F::LANES - 1) / F::LANES * steps * (p.states / AT_ONCE + p.states % AT_ONCE);
}

// B or C over a chunk: [state][step] if it varies, else [state][channel]; rows of CHUNK reals.
template <class F, class Stored>
static void load_coefficient(const Coefficient& k, int64_t states, const Unit& unit,
                             const Steps& steps, typename F::Real* tile) {
  static_assert(BLOCK <= CHUNK);
  if (k.varies) {
    const Stored* from = (const Stored*)k.data + unit.batch * k.batch +
                         unit.channel / k.channels * k.group + steps.start * k.time;
    load_block<F>(from, k.state, k.time, (int)states, steps.count, tile, CHUNK);
  } else {
    const Stored* from = (const Stored*)k.data + unit.channel * k.group;
    memset(tile, 0, sizeof *tile * CHUNK * states);
    load_block<F>(from, k.state, k.group, (int)states, unit.channels, tile, CHUNK);
  }
}

// Numbers per state and channel of one unit, as [state][channel]; and back.
template <class F>
static void load_states(const typename F::Real* from, int64_t state_stride, int64_t channel_stride,
                        int64_t states, const Unit& unit, typename F::Real* tile) {
  if (unit.channels < BLOCK) memset(tile, 0, sizeof *tile * BLOCK * states);
  load_block<F>(from, state_stride, channel_stride, (int)states, unit.channels, tile, BLOCK);
}

template <class F>
static void store_states(const typename F::Real* tile, int64_t states, const Unit& unit,
                         typename F::Real* to, int64_t state_stride, int64_t channel_stride) {
  store_block<F>(tile, BLOCK, (int)states, unit.channels, to, state_stride, channel_stride);
}

// Where the states of one unit are that are saved before a chunk: rows of d numbers.
template <class Real>
static Real* saved_states(Real* all, const Problem& p, const Unit& unit, int64_t chunk) {
  return all + (unit.batch * p.saved() + chunk) * p.states * p.channels + unit.channel;
}

// (d,) of one unit.
template <class Real>
static void load_channels(const void* from, const Unit& unit, Real* tile) {
  for (int c = 0; c < BLOCK; ++c)
    tile[c] = c < unit.channels ? ((const Real*)from)[unit.channel + c] : (Real)0;
}

// A of one unit, as [state][channel].
template <class F>
static void load_A(const Problem& p, const Unit& unit, typename F::Real* tile) {
  const auto* from = (const typename F::Real*)p.A + unit.channel * p.states;
  load_states<F>(from, 1, p.states, p.states, unit, tile);
}

// log2(e)·A of A in a tile, rounded once, so that exp(δ̂·A) = 2^(δ̂·that). And for each channel a limit
// of δ̂, so that powers are none that exp2_of_product does not take. Both bounds are far out: beyond
// them it takes states of one channel whose A are 2^40 apart to see that δ̂ is bounded. It is NaN where
// one of A is, and bounds nothing then.
template <class F>
static void to_exponents(int64_t states, typename F::Real* tile, typename F::Real* limit) {
  using Vector = typename F::Vector;
  using Real = typename F::Real;
  constexpr Real LARGE = sizeof(Real) == 4 ? (Real)0x1p40 : (Real)0x1p80;
  const Vector none = Vector{};
  for (int c = 0; c < BLOCK; c += F::LANES) {
    Vector largest = splat<F>(1), poison = none;
    for (int64_t n = 0; n < states; ++n) {
      Real scaled[F::LANES], *at = tile + n * BLOCK + c;
      for (int lane = 0; lane < F::LANES; ++lane)
        scaled[lane] = (Real)(F64::LOG2E * (double)at[lane]);
      const Vector exponent = bounded<F>(load<F>(scaled), splat<F>(LARGE));
      store<F>(at, exponent);
      largest = at_least<F>(largest, exponent < none ? -exponent : exponent);
      poison += exponent - exponent;
    }
    store<F>(limit + c, F::FAR / largest + poison);
  }
}

// Whether all powers of some steps are near: then exponentials need no bounds. With AVX-512 they have
// none in any case.
constexpr bool ALWAYS_NEAR = WIDTH == 64;

template <class F>
class Nearness {
  typename F::Integers far = {};

 public:
  // δ̂ at a step, before it is bounded, and the channels' limits.
  FUSEPORT_INLINED void add(typename F::Vector delta, typename F::Vector limit) {
    if constexpr (ALWAYS_NEAR) return;
    using Bits = typename F::Bits;
    const auto magnitude = (typename F::Vector)((Bits)delta & ~Bits{} >> 1);
    far |= ~(magnitude * (F::FAR / F::NEAR) <= limit);  // NaN is not near
  }

  FUSEPORT_INLINED bool all() const { return !any(far); }
};

// exp(δ̂·A), of a bounded δ̂ and of log2(e)·A.
template <class F, bool NEAR>
FUSEPORT_INLINE typename F::Vector decay(typename F::Vector delta, typename F::Vector exponent) {
  if constexpr (NEAR) return exp2_of_near_product<F>(delta, exponent);
  return exp2_of_product<F>(delta, exponent);
}

// B or C of some states at each step: a number for all channels, or one per channel for all steps.
template <class F, bool VARIES>
struct Row {
  const typename F::Real* row;
  typename F::Vector constant;

  FUSEPORT_INLINE Row at(const typename F::Real* tile, int64_t state, int first_channel) {
    const typename F::Real* row = tile + state * CHUNK;
    if constexpr (VARIES) {
      return Row{row, typename F::Vector{}};
    } else {
      return Row{row, load<F>(row + first_channel)};
    }
  }

  inline __attribute__((always_inline)) typename F::Vector operator[](int step) const {
    if constexpr (VARIES) {
      return splat<F>(row[step]);
    } else {
      return constant;
    }
  }
};

template <class... Number>
FUSEPORT_INLINE void clear(int64_t count, Number*... parts) {
  (memset(parts, 0, sizeof(Number) * count), ...);
}

}  // namespace fuseport::selective_scan::FUSEPORT_ISA
