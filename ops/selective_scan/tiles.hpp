// Tiles: one chunk of one unit's data as reals, [step][channel], whatever its dtype and strides.
// Channels past the end of a block are zero. Compiled once per instruction set.
#pragma once

#include "native/blocks.hpp"
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

// A chunk of time.
struct Steps {
  int64_t start;
  int count;

  Steps(const Problem& p, int64_t chunk) {
    start = chunk * CHUNK;
    count = (int)(p.length - start < CHUNK ? p.length - start : CHUNK);
  }
};

template <class F, class Stored>
static void load_tile(const Sequence& s, const Unit& unit, const Steps& steps,
                      typename F::Real* tile) {
  const Stored* from = (const Stored*)s.data + unit.batch * s.batch + unit.channel * s.channel +
                       steps.start * s.time;
  if (unit.channels < BLOCK) memset(tile, 0, sizeof *tile * BLOCK * steps.count);
  load_block<F>(from, s.time, s.channel, steps.count, unit.channels, tile, BLOCK);
}

template <class F, class Stored>
static void store_tile(const typename F::Real* tile, const Unit& unit, const Steps& steps,
                       const MutableSequence& s) {
  Stored* to = (Stored*)s.data + unit.batch * s.batch + unit.channel * s.channel +
               steps.start * s.time;
  store_block<F>(tile, BLOCK, steps.count, unit.channels, to, s.time, s.channel);
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

// log2(e)·A of A in a tile, rounded once, so that exp(δ̂·A) = 2^(δ̂·that).
template <class F>
static void to_exponents(int64_t count, typename F::Real* tile) {
  using Real = typename F::Real;
  for (int64_t i = 0; i < count; i += F::LANES) {
    Real scaled[F::LANES];
    for (int lane = 0; lane < F::LANES; ++lane)
      scaled[lane] = (Real)(F64::LOG2E * (double)tile[i + lane]);
    store<F>(tile + i, bounded<F>(load<F>(scaled)));
  }
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

// Hands out parts of a scratch buffer, each on a cache line of its own.
struct Scratch {
  char* base;
  int64_t used = 0;

  // `count` numbers for each of `parts`, which are addresses of pointers.
  template <class... Number>
  void take(int64_t count, Number**... parts) {
    ((*parts = (Number*)(base + used),
      used += (count * (int64_t)sizeof(Number) + 63) / 64 * 64), ...);
  }
};

template <class... Number>
FUSEPORT_INLINE void clear(int64_t count, Number*... parts) {
  (memset(parts, 0, sizeof(Number) * count), ...);
}

}  // namespace fuseport::selective_scan::FUSEPORT_ISA
