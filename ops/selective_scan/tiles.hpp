// Tiles: one chunk of one unit's data as reals, [step][channel], whatever its dtype and strides.
// Channels past the end of a block are zero. Compiled once per instruction set.
#pragma once

#include "native/storage.hpp"
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
    const int64_t within = block % p.blocks_per_span() * BLOCK;
    channel = block / p.blocks_per_span() * p.span + within;
    channels = (int)(p.span - within < BLOCK ? p.span - within : BLOCK);
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

template <class Stored, class Real>
static void load_tile(const Sequence& s, const Unit& unit, const Steps& steps, Real* tile) {
  const Stored* from = (const Stored*)s.data + unit.batch * s.batch + unit.channel * s.channel +
                       steps.start * s.time;
  if (unit.channels < BLOCK) memset(tile, 0, sizeof(Real) * BLOCK * steps.count);
  if (s.channel == 1) {
    for (int t = 0; t < steps.count; ++t)
      for (int c = 0; c < unit.channels; ++c)
        tile[t * BLOCK + c] = to_real(from[t * s.time + c]);
  } else {
    for (int c = 0; c < unit.channels; ++c)
      for (int t = 0; t < steps.count; ++t)
        tile[t * BLOCK + c] = to_real(from[c * s.channel + t * s.time]);
  }
}

template <class Stored, class Real>
static void store_tile(const Real* tile, const Unit& unit, const Steps& steps,
                       const MutableSequence& s) {
  Stored* to = (Stored*)s.data + unit.batch * s.batch + unit.channel * s.channel +
               steps.start * s.time;
  if (s.channel == 1) {
    for (int t = 0; t < steps.count; ++t)
      for (int c = 0; c < unit.channels; ++c) from_real(tile[t * BLOCK + c], to + t * s.time + c);
  } else {
    for (int c = 0; c < unit.channels; ++c)
      for (int t = 0; t < steps.count; ++t)
        from_real(tile[t * BLOCK + c], to + c * s.channel + t * s.time);
  }
}

// B or C over a chunk: [state][step] if it varies, else [state][channel]; rows of CHUNK reals.
template <class Stored, class Real>
static void load_coefficient(const Coefficient& k, int64_t states, const Unit& unit,
                             const Steps& steps, Real* tile) {
  static_assert(BLOCK <= CHUNK);
  if (k.varies) {
    const Stored* from = (const Stored*)k.data + unit.batch * k.batch +
                         unit.channel / k.channels * k.group + steps.start * k.time;
    for (int64_t n = 0; n < states; ++n)
      for (int t = 0; t < steps.count; ++t)
        tile[n * CHUNK + t] = to_real(from[n * k.state + t * k.time]);
  } else {
    const Stored* from = (const Stored*)k.data + unit.channel * k.group;
    memset(tile, 0, sizeof(Real) * CHUNK * states);
    for (int64_t n = 0; n < states; ++n)
      for (int c = 0; c < unit.channels; ++c)
        tile[n * CHUNK + c] = to_real(from[n * k.state + c * k.group]);
  }
}

// (d, N) of one unit, rows of N in memory, as [state][channel]; and back.
template <class From, class Real>
static void load_states(const From* from, int64_t states, const Unit& unit, Real* tile) {
  memset(tile, 0, sizeof(Real) * BLOCK * states);
  for (int c = 0; c < unit.channels; ++c)
    for (int64_t n = 0; n < states; ++n) tile[n * BLOCK + c] = from[c * states + n];
}

template <class Real, class To>
static void store_states(const Real* tile, int64_t states, const Unit& unit, To* to) {
  for (int c = 0; c < unit.channels; ++c)
    for (int64_t n = 0; n < states; ++n) to[c * states + n] = tile[n * BLOCK + c];
}

// Where the states of one unit are that are saved before a chunk.
template <class Real>
static Real* saved_states(Real* all, const Problem& p, const Unit& unit, int64_t chunk) {
  return all + ((unit.batch * p.saved() + chunk) * p.channels + unit.channel) * p.states;
}

// (d,) of one unit.
template <class Real>
static void load_channels(const void* from, const Unit& unit, Real* tile) {
  for (int c = 0; c < BLOCK; ++c)
    tile[c] = c < unit.channels ? ((const Real*)from)[unit.channel + c] : (Real)0;
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
