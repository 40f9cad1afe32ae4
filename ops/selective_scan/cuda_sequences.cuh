// Sequences and coefficients on CUDA, between device memory and shared memory. A channel is one warp's
// alone: its lanes read OWN steps in a row of it each, as few packs as they lie in, and find a chunk
// of it in rows of shared memory, [channel][step].
#pragma once

#include "selective_scan/cuda_tiles.cuh"

namespace fuseport::selective_scan::cuda {

constexpr int OWN = 8;
static_assert(OWN == K);

template <class C>
constexpr int TURNS = STEPS / (OWN * C::L);  // until a thread has had its part of a chunk

// The bits of OWN numbers of any dtype that Real is for.
template <class Real>
struct Raw {
  static constexpr int WORDS = OWN * sizeof(Real) / 4;
  alignas(16) uint32_t words[WORDS];
};

// Calls move(Pack{}, i) for each pack of numbers from the i-th on, the largest that `at` allows.
template <class Stored, class Move>
FUSEPORT_DEVICE void for_own(const Stored* at, int64_t stride, int count, const Move& move) {
  constexpr int MOST = 16 / sizeof(Stored), HALF = MOST / 2;
  if (count == OWN && stride == 1 && (uintptr_t)at % 16 == 0) {
#pragma unroll
    for (int i = 0; i < OWN; i += MOST) move(Pack<Stored, MOST>{}, i);
  } else if (count == OWN && stride == 1 && (uintptr_t)at % 8 == 0) {
#pragma unroll
    for (int i = 0; i < OWN; i += HALF) move(Pack<Stored, HALF>{}, i);
  } else {
#pragma unroll
    for (int i = 0; i < OWN; ++i)
      if (i < count) move(Pack<Stored, 1>{}, i);
  }
}

// Reads the first `count` of OWN numbers `stride` apart; zeros are the others.
template <class C>
FUSEPORT_DEVICE void read_own(Dtype dtype, const void* from, int64_t offset, int64_t stride,
                              int count, Raw<typename C::Real>& raw) {
#pragma unroll
  for (int i = 0; i < Raw<typename C::Real>::WORDS; ++i) raw.words[i] = 0;
  with_stored_of<C>(dtype, [&](auto stored) {
    using Stored = decltype(stored);
    const Stored* at = (const Stored*)from + offset;
    for_own(at, stride, count, [&](auto pack, int i) {
      using Found = decltype(pack);
      if constexpr (sizeof(Found) >= 4) {
        const Found found = *(const Found*)(at + i * stride);
        constexpr int EACH = sizeof(Found) / 4;
#pragma unroll
        for (int j = 0; j < EACH; ++j)
          raw.words[i * (int)sizeof(Stored) / 4 + j] = ((const Pack<uint32_t, EACH>&)found).at[j];
      } else {
        raw.words[i / 2] |= (uint32_t)*(const uint16_t*)(at + i * stride) << (i % 2 * 16);
      }
    });
  });
}

template <class C, class Real>
FUSEPORT_DEVICE void numbers_of(Dtype dtype, const Raw<Real>& raw, Real (&v)[OWN]) {
  with_stored_of<C>(dtype, [&](auto stored) {
    using Stored = decltype(stored);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      if constexpr (sizeof(Stored) == 2) {
        v[i] = to_real(Stored{(uint16_t)(raw.words[i / 2] >> (i % 2 * 16))});
      } else {
        v[i] = ((const Pack<Real, OWN>&)raw).at[i];
      }
    }
  });
}

template <class C, class Real>
FUSEPORT_DEVICE void write_own(Dtype dtype, const Real (&v)[OWN], void* to, int64_t offset,
                               int64_t stride, int count) {
  with_stored_of<C>(dtype, [&](auto stored) {
    using Stored = decltype(stored);
    Stored* at = (Stored*)to + offset;
    for_own((const Stored*)at, stride, count, [&](auto pack, int i) {
      constexpr int COUNT = sizeof(pack) / sizeof(Stored);
#pragma unroll
      for (int j = 0; j < COUNT; ++j) from_real(v[i + j], &pack.at[j]);
      *(decltype(pack)*)(at + i * stride) = pack;
    });
  });
}

// Rows of a chunk in shared memory; channels are 4 banks apart.
template <class C>
struct SequenceRows {
  using Real = typename C::Real;
  static constexpr int ROW = STEPS + 16 / sizeof(Real), SIZE = C::CHANNELS * ROW;
};

// COUNT numbers of a row; `row` and COUNT are of whole packs, or COUNT is less than one.
template <int COUNT, class Real>
FUSEPORT_DEVICE void get(const Real* row, Real* v) {
  constexpr int PACK = COUNT < 16 / (int)sizeof(Real) ? COUNT : 16 / sizeof(Real);
#pragma unroll
  for (int i = 0; i < COUNT; i += PACK) {
    const auto pack = *(const Pack<Real, PACK>*)(row + i);
#pragma unroll
    for (int j = 0; j < PACK; ++j) v[i + j] = pack.at[j];
  }
}

template <int COUNT, class Real>
FUSEPORT_DEVICE void put(const Real* v, Real* row) {
  constexpr int PACK = COUNT < 16 / (int)sizeof(Real) ? COUNT : 16 / sizeof(Real);
#pragma unroll
  for (int i = 0; i < COUNT; i += PACK) {
    Pack<Real, PACK> pack;
#pragma unroll
    for (int j = 0; j < PACK; ++j) pack.at[j] = v[i + j];
    *(Pack<Real, PACK>*)(row + i) = pack;
  }
}

// A thread's part of the sequences of its channel.
template <class C>
struct Owner {
  using Real = typename C::Real;
  int channel = (int)threadIdx.x / C::L, lane = (int)threadIdx.x % C::L;
  bool there;
  int64_t batch, at;  // the channel, of all
  Dtype dtype;

  FUSEPORT_DEVICE Owner(const Problem& p, const Place& place)
      : there(channel < place.channels), batch(place.batch), at(place.channel + channel),
        dtype(p.dtype) {}
  // A number of the channel's; 0 past the block's channels.
  FUSEPORT_DEVICE Real number(const void* of_channels) const {
    return there ? ((const Real*)of_channels)[at] : (Real)0;
  }
  // The first of its steps in a turn, and how many of them there are.
  FUSEPORT_DEVICE int step(int turn) const { return (turn * C::L + lane) * OWN; }
  FUSEPORT_DEVICE int count(const Steps& steps, int turn) const {
    const int left = there ? steps.count - step(turn) : 0;
    return left < 0 ? 0 : left < OWN ? left : OWN;
  }
  template <class Any>
  FUSEPORT_DEVICE int64_t offset(const Any& s, const Steps& steps, int turn) const {
    return batch * s.batch + at * s.channel + (steps.start + step(turn)) * s.time;
  }
  FUSEPORT_DEVICE void read(const Sequence& s, const Steps& steps, int turn,
                            Raw<Real>& raw) const {
    read_own<C>(dtype, s.data, offset(s, steps, turn), s.time, count(steps, turn), raw);
  }
  FUSEPORT_DEVICE void numbers(const Raw<Real>& raw, Real (&v)[OWN]) const {
    numbers_of<C>(dtype, raw, v);
  }
  FUSEPORT_DEVICE void write(const Real (&v)[OWN], const Steps& steps, int turn,
                             const MutableSequence& s) const {
    write_own<C>(dtype, v, s.data, offset(s, steps, turn), s.time, count(steps, turn));
  }
  // δ̂ in the place of δ; 0 where there is no step.
  FUSEPORT_DEVICE void step_sizes(const Problem& p, const Steps& steps, int turn, Real bias,
                                  Real (&delta)[OWN]) const {
    const int of = count(steps, turn);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const Real raw = delta[i] + bias, size = p.softplus ? softplus(raw) : raw;
      delta[i] = i < of ? size : (Real)0;
    }
  }
};

// Where B or C that varies begins for a block's channels.
FUSEPORT_DEVICE int64_t first_of(const Coefficient& k, const Place& place) {
  return k.varies ? place.batch * k.batch + place.channel / k.channels * k.group : 0;
}

// B or C of a group of states over a chunk: [step][state] if it varies, with zeros past the last
// step, else [channel][state]. `first` is what first_of gives.
template <class C>
FUSEPORT_DEVICE void load_coefficients(const Problem& p, const Coefficient& k, int64_t first,
                                       const Place& place, const Steps& steps, int64_t group,
                                       typename C::Real* tile) {
  using Real = typename C::Real;
  const int64_t state = group * C::GROUP, left = p.states - state;
  const int states = (int)(left < C::GROUP ? left : C::GROUP);
  if (!k.varies) {
    const auto fill = [&](auto stored) {
      using Stored = decltype(stored);
      const Stored* from = (const Stored*)k.data;
      for (int i = (int)threadIdx.x; i < place.channels * states * C::PARTS; i += C::THREADS) {
        const int part = i % C::PARTS, n = i / C::PARTS % states, c = i / C::PARTS / states;
        const int64_t at = (place.channel + c) * k.group + (state + n) * k.state;
        tile[c * C::CHANNEL_ROW + n * C::PARTS + part] = to_real(from[C::PARTS * at + part]);
      }
    };
    // Those of a complex state are complex themselves.
    if constexpr (C::COMPLEX) {
      fill(Real{});
    } else {
      with_stored_of<C>(p.dtype, fill);
    }
    return;
  }
  const int64_t offset = first + state * k.state + C::PARTS * steps.start * k.time;
  for (int i = (int)threadIdx.x; i < C::COEFFICIENTS / OWN; i += C::THREADS) {
    const int n = i % C::GROUP, t = i / C::GROUP * OWN, after = C::PARTS * steps.count - t;
    Raw<Real> raw;
    read_own<C>(p.dtype, k.data, offset + n * k.state + t * k.time, k.time,
                n >= states || after < 0 ? 0 : after < OWN ? after : OWN, raw);
    Real v[OWN];
    numbers_of<C>(p.dtype, raw, v);
#pragma unroll
    for (int j = 0; j < OWN; ++j)
      tile[(t + j) / C::PARTS * C::STEP_ROW + n * C::PARTS + j % C::PARTS] = v[j];
  }
}

}  // namespace fuseport::selective_scan::cuda
