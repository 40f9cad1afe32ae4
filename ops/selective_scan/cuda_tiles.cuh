// What the passes of the scan share on CUDA: numbers of a state, where a block and a thread work, and
// tiles of a chunk in shared memory.
#pragma once

#include "native/cuda.cuh"
#include "selective_scan/cuda.hpp"

namespace fuseport::selective_scan::cuda {

using namespace fuseport::cuda;

constexpr int STEPS = (int)CHUNK;
constexpr int K = 8;  // steps that a thread has in registers at once
static_assert(STEPS % K == 0);

// S states of a thread, in L lanes: a channel's states are done S·L at a time, in groups.
template <class Real_, bool COMPLEX_, int S_, int L_>
struct Config {
  using Real = Real_;
  static constexpr bool COMPLEX = COMPLEX_;
  static constexpr int S = S_, L = L_, PARTS = COMPLEX ? 2 : 1, GROUP = S * L;
  static constexpr int CHANNELS = 128 / sizeof(Real), THREADS = CHANNELS * L;
  static_assert(THREADS % 32 == 0);
  static constexpr int WARPS = THREADS / 32, WARP_CHANNELS = 32 / L;
  static constexpr int ROW = CHANNELS + 1, TILE = STEPS * ROW;  // a last column of zeros
  static constexpr int WIDTH = S * PARTS;                       // reals of a thread's states
  static constexpr int COEFFICIENT_ROW = GROUP * PARTS + (L > 1 ? WIDTH : 0);
  static constexpr int COEFFICIENTS = STEPS * COEFFICIENT_ROW;
  static_assert(CHANNELS <= STEPS);
};

// A number of the state, real or complex.
template <class Real, bool COMPLEX>
struct NumberOf {
  using type = Real;
};
template <class Real>
struct NumberOf<Real, true> {
  using type = Complex<Real>;
};
template <class C>
using Number = typename NumberOf<typename C::Real, C::COMPLEX>::type;

FUSEPORT_DEVICE float real_part(float x) { return x; }
FUSEPORT_DEVICE double real_part(double x) { return x; }
FUSEPORT_DEVICE float conjugate(float x) { return x; }
FUSEPORT_DEVICE double conjugate(double x) { return x; }
template <int PART, class Real>
FUSEPORT_DEVICE Real part_of(Real x) {
  return x;
}
template <int PART, class Real>
FUSEPORT_DEVICE Real part_of(Complex<Real> x) {
  return PART ? x.im : x.re;
}
template <class Real>
FUSEPORT_DEVICE Real real_part(Complex<Real> x) {
  return x.re;
}
template <class Real>
FUSEPORT_DEVICE Complex<Real> conjugate(Complex<Real> x) {
  return {x.re, -x.im};
}
template <class Real>
FUSEPORT_DEVICE Complex<Real> operator*(Complex<Real> x, Complex<Real> y) {
  return {x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re};
}
template <class Real>
FUSEPORT_DEVICE Complex<Real> operator*(Complex<Real> x, Real y) {
  return {x.re * y, x.im * y};
}
template <class Real>
FUSEPORT_DEVICE Complex<Real> operator+(Complex<Real> x, Complex<Real> y) {
  return {x.re + y.re, x.im + y.im};
}
// The real part of a product, of real numbers the product.
template <class Real>
FUSEPORT_DEVICE Real real_product(Real x, Real y) {
  return x * y;
}
template <class Real>
FUSEPORT_DEVICE Real real_product(Complex<Real> x, Complex<Real> y) {
  return x.re * y.re - x.im * y.im;
}
template <class Real>
FUSEPORT_DEVICE Complex<double> widened(Complex<Real> x) {
  return {(double)x.re, (double)x.im};
}
FUSEPORT_DEVICE double widened(float x) { return x; }
FUSEPORT_DEVICE double widened(double x) { return x; }

// y = 2·Re(…) for a complex state.
template <class C>
constexpr int READ_TWICE = C::COMPLEX ? 2 : 1;

// What exp(δ̂·A) takes: 2^(δ̂·exponent), turned by δ̂·(turns + turns_low) for a complex A.
template <class Real, bool COMPLEX>
struct Rate {
  Real exponent;

  FUSEPORT_DEVICE explicit Rate(Real A) : exponent(bounded((Real)(0x1.71547652b82fep0 * A))) {}
  FUSEPORT_DEVICE Rate() : exponent(0) {}
  FUSEPORT_DEVICE Real decay(Real delta) const { return exp2_of(delta * exponent); }
};

template <class Real>
struct Rate<Real, true> {
  Real exponent, turns, turns_low;

  FUSEPORT_DEVICE explicit Rate(Complex<Real> A)
      : exponent(bounded((Real)(0x1.71547652b82fep0 * A.re))) {
    constexpr double TURN = 0x1.45f306dc9c883p-3, TURN_LOW = -0x0.5ac07b1505c16p-55;  // 1/2π
    const double im = A.im, whole = im * TURN;
    turns = (Real)whole;
    turns_low = (Real)((whole - (double)turns) + fma_of(im, TURN_LOW, fma_of(im, TURN, -whole)));
  }
  FUSEPORT_DEVICE Rate() : exponent(0), turns(0), turns_low(0) {}
  FUSEPORT_DEVICE Complex<Real> decay(Real delta) const {
    const Real whole = nearest(delta * turns);
    const Real share = fma_of(delta, turns, -whole) + delta * turns_low;
    Real sine, cosine;
    sine_and_cosine_of_pi(2 * share, &sine, &cosine);
    const Real modulus = exp2_of(delta * exponent);
    return {modulus * cosine, modulus * sine};
  }
};

// Blocks of threads.
__host__ __device__ inline int64_t units_of(const Problem& p, const Plan& plan) {
  return p.batches * plan.blocks * plan.segments;
}

// What a block does.
struct Place {
  int64_t batch, block, segment;  // `block` counts from the first of the batch entry
  int64_t channel;                // the first
  int channels;
  int64_t first_chunk, end_chunk;

  FUSEPORT_DEVICE Place(const Problem& p, const Plan& plan, int64_t unit) {
    segment = unit % plan.segments;
    block = unit / plan.segments % plan.blocks;
    batch = unit / plan.segments / plan.blocks;
    const int64_t within = block % plan.blocks_per_span * plan.channels;
    channel = block / plan.blocks_per_span * p.span + within;
    channels = (int)(p.span - within < plan.channels ? p.span - within : plan.channels);
    const int64_t chunks = (p.length + CHUNK - 1) / CHUNK;
    first_chunk = segment * plan.chunks_per_segment;
    end_chunk = first_chunk + plan.chunks_per_segment;
    end_chunk = end_chunk < chunks ? end_chunk : chunks;
  }
};

// A chunk of time.
struct Steps {
  int64_t start;
  int count, rounded;  // the latter to a multiple of K: tiles have zeros there

  FUSEPORT_DEVICE Steps(const Problem& p, int64_t chunk) {
    start = chunk * CHUNK;
    count = (int)(p.length - start < CHUNK ? p.length - start : CHUNK);
    rounded = (count + K - 1) / K * K;
  }
};

// Where a thread works: a channel of the block and some of its states. Threads beyond the block's
// channels, or beyond the states, find zeros in a tile's last column and in the row of zeros, so
// that no Inf or NaN of others comes in.
template <class C>
struct Seat {
  int channel = (int)threadIdx.x / C::L, lane = (int)threadIdx.x % C::L;
  int64_t state = 0;  // the first
  bool taken = false;

  FUSEPORT_DEVICE Seat(const Problem& p, const Place& place, int64_t group) {
    state = group * C::GROUP + lane * C::S;  // S divides the number of states
    taken = channel < place.channels && state < p.states;
  }
  FUSEPORT_DEVICE int column() const { return taken ? channel : C::CHANNELS; }
  // Of the first state, among (parts, N, d) and among (parts, d, N).
  FUSEPORT_DEVICE int64_t in_rows(const Problem& p, const Place& place, int64_t part) const {
    return (part * p.states + state) * p.channels + place.channel + channel;
  }
  FUSEPORT_DEVICE int64_t in_columns(const Problem& p, const Place& place, int64_t part) const {
    return (part * p.channels + place.channel + channel) * p.states + state;
  }
};

template <class C>
FUSEPORT_DEVICE void load_rates(const Problem& p, const Place& place, const Seat<C>& seat,
                                Number<C>* A, Rate<typename C::Real, C::COMPLEX>* rate) {
#pragma unroll
  for (int i = 0; i < C::S; ++i) {
    A[i] = seat.taken ? ((const Number<C>*)p.A)[seat.in_columns(p, place, 0) + i] : Number<C>{};
    rate[i] = Rate<typename C::Real, C::COMPLEX>(A[i]);
  }
}

// Hands out parts of shared memory, each aligned to 16 bytes.
struct Shared {
  char* base;
  int64_t used = 0;

  template <class Real>
  __host__ __device__ Real* take(int64_t count) {
    Real* part = (Real*)(base + used);
    used += (count * (int64_t)sizeof(Real) + 15) / 16 * 16;
    return part;
  }
};

// Zeros in a tile: all of it, or the rows from `first` on.
template <class C>
FUSEPORT_DEVICE void clear_rows(typename C::Real* tile, int first) {
  for (int i = first * C::ROW + (int)threadIdx.x; i < C::TILE; i += C::THREADS) tile[i] = 0;
}

// A chunk of a sequence and its tile, whichever of its dimensions lies in a row.
template <class C, class Any>
FUSEPORT_DEVICE Rows rows_of(const Any& s, const Place& place, const Steps& steps) {
  if (s.time == 1 || s.channel != 1)
    return {s.channel, s.time, place.channels, steps.count, 1, C::ROW, false};
  return {s.time, s.channel, steps.count, place.channels, C::ROW, 1, false};
}

template <class Any>
FUSEPORT_DEVICE int64_t offset_of(const Any& s, const Place& place, const Steps& steps) {
  return place.batch * s.batch + place.channel * s.channel + steps.start * s.time;
}

// Reads a chunk of a sequence, as [step][channel].
template <class C>
FUSEPORT_DEVICE void load_tile(const Problem& p, const Sequence& s, const Place& place,
                               const Steps& steps, typename C::Real* tile) {
  if (steps.count < STEPS) clear_rows<C>(tile, steps.count);
  load_rows<typename C::Real, 1>(p.dtype, s.data, offset_of(s, place, steps),
                                 rows_of<C>(s, place, steps), tile);
}

template <class C>
FUSEPORT_DEVICE void store_tile(const Problem& p, const typename C::Real* tile, const Place& place,
                                const Steps& steps, const MutableSequence& s) {
  store_rows<typename C::Real>(p.dtype, s.data, offset_of(s, place, steps),
                               rows_of<C>(s, place, steps), tile);
}

// Calls change(at, c) for each place of a tile that has a step and a channel c, once.
template <class C, class Change>
FUSEPORT_DEVICE void for_each_place(const Place& place, const Steps& steps, const Change& change) {
  const int c = (int)threadIdx.x % C::CHANNELS;
  if (c >= place.channels) return;
  for (int t = (int)threadIdx.x / C::CHANNELS; t < steps.count; t += C::L)
    change(t * C::ROW + c, c);
}

// δ̂, in a tile that holds δ.
template <class C>
FUSEPORT_DEVICE void step_sizes(const Problem& p, const Place& place, const Steps& steps,
                                const typename C::Real* bias, typename C::Real* tile) {
  for_each_place<C>(place, steps, [&](int at, int c) {
    const typename C::Real raw = tile[at] + bias[c];
    tile[at] = p.softplus ? softplus(raw) : raw;
  });
}

// (d,) of a block; zeros past its channels.
template <class C>
FUSEPORT_DEVICE void load_channels(const void* from, const Place& place, typename C::Real* to) {
  for (int c = (int)threadIdx.x; c < C::CHANNELS; c += C::THREADS)
    to[c] = c < place.channels ? ((const typename C::Real*)from)[place.channel + c] : 0;
}

// B or C of a group of states over a chunk: [step][state] if it varies, else [channel][state].
template <class C>
FUSEPORT_DEVICE void load_coefficients(const Problem& p, const Coefficient& k, const Place& place,
                                       const Steps& steps, int64_t group,
                                       typename C::Real* tile) {
  using Real = typename C::Real;
  const int64_t first = group * C::GROUP, left = p.states - first;
  const int states = (int)(left < C::GROUP ? left : C::GROUP);
  if (!k.varies) {
    const auto fill = [&](auto stored) {
      using Stored = decltype(stored);
      const Stored* from = (const Stored*)k.data;
      for (int i = (int)threadIdx.x; i < place.channels * states * C::PARTS; i += C::THREADS) {
        const int part = i % C::PARTS, n = i / C::PARTS % states, c = i / C::PARTS / states;
        const int64_t at = (place.channel + c) * k.group + (first + n) * k.state;
        tile[c * C::COEFFICIENT_ROW + n * C::PARTS + part] = to_real(from[C::PARTS * at + part]);
      }
    };
    // Those of a complex state are complex themselves.
    if constexpr (C::COMPLEX) {
      fill(Real{});
    } else {
      with_stored<Real>(p.dtype, fill);
    }
    return;
  }
  if (steps.count < STEPS)
    for (int i = steps.count * C::COEFFICIENT_ROW + (int)threadIdx.x; i < C::COEFFICIENTS;
         i += C::THREADS)
      tile[i] = 0;
  const int64_t offset = place.batch * k.batch + place.channel / k.channels * k.group +
                         first * k.state + C::PARTS * steps.start * k.time;
  const Rows rows{k.state, k.time, states, C::PARTS * steps.count, C::PARTS, C::COEFFICIENT_ROW,
                  true};
  load_rows<Real, C::PARTS>(p.dtype, k.data, offset, rows, tile);
}

// A thread's numbers of B or C at each step.
template <class C>
struct Coefficients {
  const typename C::Real* first;
  int step;

  // `zeros` are as many as a thread has.
  FUSEPORT_DEVICE Coefficients(const Coefficient& k, const typename C::Real* tile,
                               const typename C::Real* zeros, const Seat<C>& seat) {
    const int row = k.varies ? 0 : seat.channel;
    first = seat.taken ? tile + row * C::COEFFICIENT_ROW + seat.lane * C::WIDTH : zeros;
    step = seat.taken && k.varies ? C::COEFFICIENT_ROW : 0;
  }

  FUSEPORT_DEVICE void at(int t, Number<C>* numbers) const {
    using Real = typename C::Real;
    constexpr int COUNT = C::WIDTH * sizeof(Real) > 16 ? 16 / sizeof(Real) : C::WIDTH;
    alignas(16) Real reals[C::WIDTH];
#pragma unroll
    for (int i = 0; i < C::WIDTH; i += COUNT)
      *(Pack<Real, COUNT>*)(reals + i) = *(const Pack<Real, COUNT>*)(first + t * step + i);
#pragma unroll
    for (int i = 0; i < C::S; ++i) {
      if constexpr (C::COMPLEX) {
        numbers[i] = {reals[2 * i], reals[2 * i + 1]};
      } else {
        numbers[i] = reals[i];
      }
    }
  }
};

}  // namespace fuseport::selective_scan::cuda
