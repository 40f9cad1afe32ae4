// What the passes of the scan share on CUDA: numbers of a state, where a block and a thread work, and
// a thread's B and C of a chunk.
#pragma once

#include <type_traits>

#include "native/cuda.cuh"
#include "selective_scan/cuda.hpp"

namespace fuseport::selective_scan::cuda {

using namespace fuseport::cuda;

constexpr int STEPS = (int)CHUNK;
constexpr int K = 8;  // steps that a thread has in registers at once
static_assert(STEPS % K == 0);

// S states of a thread, in L lanes: a channel's states are done S·L at a time, in groups. Registers
// are so few that a multiprocessor has room for FORWARD and BACKWARD blocks. Stored is what sequences
// and coefficients are stored in, or void for any that Real is for: most of a kernel is what reads
// and writes them, and what is not there is not fetched either.
template <class Real_, bool COMPLEX_, int S_, int L_, class Stored_ = void>
struct Config {
  using Real = Real_;
  using Stored = Stored_;
  static constexpr bool COMPLEX = COMPLEX_;
  static constexpr int S = S_, L = L_, PARTS = COMPLEX ? 2 : 1, GROUP = S * L;
  static constexpr int CHANNELS = (L > 4 ? 64 : 128) / sizeof(Real), THREADS = CHANNELS * L;
  static_assert(THREADS % 32 == 0);
  static constexpr int WARPS = THREADS / 32, WARP_CHANNELS = 32 / L;
  static constexpr bool SMALL = sizeof(Real) == 4 && !COMPLEX;
  static constexpr int FORWARD = !SMALL ? 1 : L > 4 ? 6 : 4, BACKWARD = SMALL ? 3 : 1;
  static constexpr int WIDTH = S * PARTS;  // reals of a thread's states
  // Rows of B and C that vary are steps, of others channels, which are apart by another bank.
  static constexpr int STEP_ROW = GROUP * PARTS, CHANNEL_ROW = STEP_ROW + (L > 1 ? WIDTH : 0);
  static constexpr int COEFFICIENTS = STEPS * STEP_ROW;
  static_assert(CHANNELS * CHANNEL_ROW <= COEFFICIENTS);
};

// Calls call(Stored{}) with what numbers are stored in.
template <class C, class Call>
FUSEPORT_DEVICE void with_stored_of(Dtype dtype, const Call& call) {
  if constexpr (std::is_void_v<typename C::Stored>) {
    with_stored<typename C::Real>(dtype, call);
  } else {
    call(typename C::Stored{});
  }
}

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
// channels, or beyond the states, read a row of zeros, so that no Inf or NaN of others comes in.
template <class C>
struct Seat {
  int channel = (int)threadIdx.x / C::L, lane = (int)threadIdx.x % C::L;
  int64_t state = 0;  // the first
  bool taken = false;

  FUSEPORT_DEVICE Seat(const Problem& p, const Place& place, int64_t group) {
    state = group * C::GROUP + lane * C::S;  // S divides the number of states
    taken = channel < place.channels && state < p.states;
  }
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

// A thread's numbers of B or C at each step.
template <class C>
struct Coefficients {
  const typename C::Real* first;
  int step;

  // `zeros` are as many as a thread has.
  FUSEPORT_DEVICE Coefficients(const Coefficient& k, const typename C::Real* tile,
                               const typename C::Real* zeros, const Seat<C>& seat) {
    const int row = k.varies ? 0 : seat.channel;
    first = seat.taken ? tile + row * C::CHANNEL_ROW + seat.lane * C::WIDTH : zeros;
    step = seat.taken && k.varies ? C::STEP_ROW : 0;
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
