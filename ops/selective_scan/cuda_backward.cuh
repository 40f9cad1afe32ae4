// The backward pass on CUDA: chunks from the last to the first, the formulas at the top of
// reference.py. A thread finds the states before every K-th step of a chunk from those saved before
// it; then, K steps at a time from the last, all states and decays again, now kept in registers, and
// goes back through them. The adjoint of a complex state is here the conjugate of torch's.
#pragma once

#include "selective_scan/cuda_segments.cuh"

namespace fuseport::selective_scan::cuda {

// Sums over one block, which `sum_kernel` and `sum_blocks_kernel` add up in their order.
struct Parts {
  double *dA, *dB, *dC;         // (b, segments, d, N), of pairs where A is complex; not of a B or C
  double *dD, *ddelta_bias;     // that varies. (b, segments, d)
  void *blocks_dB, *blocks_dC;  // (b, blocks, N, row()) in the real type, of those that vary
};

template <class C>
struct BackwardShared {
  using Real = typename C::Real;
  static constexpr int REALS = C::GROUP * C::PARTS;
  Real *u, *delta, *dy, *ddrive, *ddelta;  // tiles; the last two are cotangents, of δ̂·u and of δ̂
  Real *y, *gate;                          // tiles, where there is a gate
  Real *B, *C_, *D, *bias, *zeros;
  Number<C>* borders;  // [K-th step][state][thread]: the states before it
  Real* sums[2];       // [warp][step][B or C][state]: sums over a warp's channels
  int64_t bytes;

  __host__ __device__ BackwardShared(char* base, bool gated) {
    Shared s{base};
    for (Real** tile : {&u, &delta, &dy, &ddrive, &ddelta}) *tile = s.template take<Real>(C::TILE);
    y = gated ? s.template take<Real>(C::TILE) : nullptr;
    gate = gated ? s.template take<Real>(C::TILE) : nullptr;
    B = s.template take<Real>(C::COEFFICIENTS);
    C_ = s.template take<Real>(C::COEFFICIENTS);
    D = s.template take<Real>(C::CHANNELS);
    bias = s.template take<Real>(C::CHANNELS);
    zeros = s.template take<Real>(C::WIDTH);
    borders = s.template take<Number<C>>(STEPS / K * C::S * C::THREADS);
    for (Real*& one : sums) one = s.template take<Real>(C::WARPS * K * 2 * REALS);
    bytes = s.used;
  }
};

// Shares of sums over channels, of a thread's state: [step][state] becomes sums over a warp's.
template <class C, int WHICH, int PART>
FUSEPORT_DEVICE void sum_channels(const Number<C> (&shares)[K][C::S], const Seat<C>& seat,
                                  typename C::Real* sums) {
  using Real = typename C::Real;
  constexpr int LANES = C::WARP_CHANNELS, EACH = LANES < K ? K / LANES : 1;
  constexpr int SAME = LANES < K ? 1 : LANES / K;
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32 / C::L;
#pragma unroll
  for (int i = 0; i < C::S; ++i) {
    Real v[K];
#pragma unroll
    for (int k = 0; k < K; ++k) v[k] = part_of<PART>(shares[k][i]);
    sum_over_lanes<LANES, C::L, K>(v);
    if (lane % SAME) continue;
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      const int k = lane / SAME * EACH + j;
      const int row = (warp * K + k) * 2 + WHICH;
      sums[row * BackwardShared<C>::REALS + seat.lane * C::WIDTH + i * C::PARTS + PART] = v[j];
    }
  }
}

// Adds up warps, in their order, and writes K steps of the block's part of dB and dC.
template <class C>
FUSEPORT_DEVICE void write_sums(const Problem& p, const Plan& plan, const Place& place,
                                const Steps& steps, int64_t group, int t, const Parts& parts,
                                const typename C::Real* sums) {
  using Real = typename C::Real;
  constexpr int REALS = BackwardShared<C>::REALS;
  for (int i = (int)threadIdx.x; i < 2 * REALS * K; i += C::THREADS) {
    const int k = i % K, number = i / K % REALS, which = i / K / REALS;
    const int64_t n = group * C::GROUP + number / C::PARTS;
    const bool varies = which ? p.C.varies : p.B.varies;
    if (!varies || t + k >= steps.count || n >= p.states) continue;
    Real sum = 0;
#pragma unroll
    for (int warp = 0; warp < C::WARPS; ++warp)
      sum += sums[((warp * K + k) * 2 + which) * REALS + number];
    const int64_t row = (place.batch * plan.blocks + place.block) * p.states + n;
    Real* to = (Real*)(which ? parts.blocks_dC : parts.blocks_dB);
    to[(row * p.length + steps.start + t + k) * C::PARTS + number % C::PARTS] = sum;
  }
}

// Adds sums over a chunk to those of the segment.
template <class C>
FUSEPORT_DEVICE void add_parts(const Number<C>* chunk, const Problem& p, const Place& place,
                               const Seat<C>& seat, int64_t part, bool first, double* total) {
  if (!seat.taken) return;
  const int64_t at = C::PARTS * seat.in_columns(p, place, part);
#pragma unroll
  for (int i = 0; i < C::S; ++i) {
    double* to = total + at + C::PARTS * i;
    to[0] = (first ? 0 : to[0]) + (double)part_of<0>(chunk[i]);
    if constexpr (C::COMPLEX) to[1] = (first ? 0 : to[1]) + (double)part_of<1>(chunk[i]);
  }
}

// A thread's states through K steps: forward, and back.
template <class C>
struct Walk {
  using Real = typename C::Real;
  Number<C> A[C::S], h[C::S], g[C::S];  // state and adjoint
  Rate<Real, C::COMPLEX> rate[C::S];
  Number<C> dA[C::S], dB[C::S], dC[C::S];  // sums over a chunk
  Number<C> before[K][C::S], decay[K][C::S];

  FUSEPORT_DEVICE void skip(const BackwardShared<C>& s, const Seat<C>& seat,
                            const Coefficients<C>& B, int t) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int at = (t + k) * C::ROW + seat.column();
      const Real delta = s.delta[at], drive = delta * s.u[at];
      Number<C> b[C::S];
      B.at(t + k, b);
#pragma unroll
      for (int i = 0; i < C::S; ++i) h[i] = rate[i].decay(delta) * h[i] + b[i] * drive;
    }
  }

  // What a thread's lanes share out, of step t + lane·(K/L) + j.
  FUSEPORT_DEVICE void add_to(typename C::Real* tile, const Seat<C>& seat, int t, Real* v) const {
    sum_over_lanes<C::L, 1, K>(v);
    constexpr int SUMS = K / C::L;
#pragma unroll
    for (int j = 0; j < SUMS; ++j)
      tile[(t + seat.lane * SUMS + j) * C::ROW + seat.channel] += v[j];
  }

  FUSEPORT_DEVICE void forth(const BackwardShared<C>& s, const Seat<C>& seat,
                             const Coefficients<C>& B, const Coefficients<C>& C_, int t,
                             bool gated) {
    Real y[K];
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int at = (t + k) * C::ROW + seat.column();
      const Real delta = s.delta[at], drive = delta * s.u[at];
      Number<C> b[C::S], c[C::S];
      B.at(t + k, b);
      C_.at(t + k, c);
      y[k] = 0;
#pragma unroll
      for (int i = 0; i < C::S; ++i) {
        decay[k][i] = rate[i].decay(delta);
        before[k][i] = h[i];
        h[i] = decay[k][i] * h[i] + b[i] * drive;
        if (gated) y[k] += READ_TWICE<C> * real_product(c[i], h[i]);
      }
    }
    if (gated) add_to(s.y, seat, t, y);
  }

  // Leaves the steps' shares of dC in `before` and of dB in `decay`. Steps past the last one, `end`,
  // are none: with an infinite state or rate their zeros would make NaN.
  FUSEPORT_DEVICE void back(const BackwardShared<C>& s, const Seat<C>& seat,
                            const Coefficients<C>& B, const Coefficients<C>& C_, int t, int end) {
    Real ddrive[K], ddelta[K];
#pragma unroll
    for (int k = K - 1; k >= 0; --k) {
      ddrive[k] = ddelta[k] = 0;
      if (t + k >= end) {
#pragma unroll
        for (int i = 0; i < C::S; ++i) before[k][i] = decay[k][i] = Number<C>{};
        continue;
      }
      const int at = (t + k) * C::ROW + seat.column();
      const Real delta = s.delta[at], drive = delta * s.u[at];
      const Real share = READ_TWICE<C> * s.dy[at];
      Number<C> b[C::S], c[C::S];
      B.at(t + k, b);
      C_.at(t + k, c);
#pragma unroll
      for (int i = 0; i < C::S; ++i) {
        g[i] = g[i] + c[i] * share;
        const Number<C> to_C = conjugate(h[i]) * share, to_B = conjugate(g[i]) * drive;
        ddrive[k] += real_product(g[i], b[i]);
        g[i] = g[i] * decay[k][i];
        const Number<C> dexponent = g[i] * before[k][i];
        dA[i] = dA[i] + conjugate(dexponent) * delta;
        ddelta[k] += real_product(dexponent, A[i]);
        h[i] = before[k][i];
        before[k][i] = to_C;
        decay[k][i] = to_B;
      }
    }
    add_to(s.ddrive, seat, t, ddrive);
    add_to(s.ddelta, seat, t, ddelta);
  }

  // The shares that `back` left, into the block's sums or, where B or C does not vary, the thread's.
  FUSEPORT_DEVICE void share(const Problem& p, const Seat<C>& seat, Real* sums) {
    if (p.C.varies) {
      sum_channels<C, 1, 0>(before, seat, sums);
      if constexpr (C::COMPLEX) sum_channels<C, 1, 1>(before, seat, sums);
    } else {
#pragma unroll
      for (int i = 0; i < K * C::S; ++i) dC[i % C::S] = dC[i % C::S] + before[i / C::S][i % C::S];
    }
    if (p.B.varies) {
      sum_channels<C, 0, 0>(decay, seat, sums);
      if constexpr (C::COMPLEX) sum_channels<C, 0, 1>(decay, seat, sums);
    } else {
#pragma unroll
      for (int i = 0; i < K * C::S; ++i) dB[i % C::S] = dB[i % C::S] + decay[i / C::S][i % C::S];
    }
  }
};

// A group of states through a chunk.
template <class C>
FUSEPORT_DEVICE void backward_group(const BackwardShared<C>& s, const Problem& p, const Plan& plan,
                                    const Gradients& k, const Parts& parts, const Place& place,
                                    int64_t chunk, int64_t group, Number<C>* adjoints) {
  const Steps steps(p, chunk);
  const Seat<C> seat(p, place, group);
  const int64_t saved = (p.length + CHUNK - 1) / CHUNK + 1;
  const int64_t segment = place.batch * plan.segments + place.segment;
  const bool gated = p.z.data != nullptr, first = chunk == place.end_chunk - 1;
  Walk<C> w;
  load_rates<C>(p, place, seat, w.A, w.rate);
  load_states<C>((const Number<C>*)k.chunk_states, p, place, seat, place.batch * saved + chunk,
                 w.h);
  load_states<C>(adjoints, p, place, seat, segment, w.g);
#pragma unroll
  for (int i = 0; i < C::S; ++i) w.dA[i] = w.dB[i] = w.dC[i] = Number<C>{};

  const Coefficients<C> B(p.B, s.B, s.zeros, seat), C_(p.C, s.C_, s.zeros, seat);
  const auto border = [&](int t, int i) -> Number<C>& {
    return s.borders[(t / K * C::S + i) * C::THREADS + (int)threadIdx.x];
  };
  for (int t = 0; t < steps.rounded; t += K) {
#pragma unroll
    for (int i = 0; i < C::S; ++i) border(t, i) = w.h[i];
    if (t + K < steps.rounded) w.skip(s, seat, B, t);
  }
  for (int t = steps.rounded - K; t >= 0; t -= K) {
#pragma unroll
    for (int i = 0; i < C::S; ++i) w.h[i] = border(t, i);
    w.forth(s, seat, B, C_, t, gated);
    w.back(s, seat, B, C_, t, steps.count);
    // Two in turn: no thread is more than one barrier ahead of those that still read the other.
    typename C::Real* sums = s.sums[t / K % 2];
    w.share(p, seat, sums);
    if (!p.B.varies && !p.C.varies) continue;
    __syncthreads();
    write_sums<C>(p, plan, place, steps, group, t, parts, sums);
  }
  store_states<C>(w.g, p, place, seat, segment, adjoints);
  add_parts<C>(w.dA, p, place, seat, segment, first, parts.dA);
  if (!p.B.varies) add_parts<C>(w.dB, p, place, seat, segment, first, parts.dB);
  if (!p.C.varies) add_parts<C>(w.dC, p, place, seat, segment, first, parts.dC);
}

// `adjoints`, (b, segments, N, d), hold the adjoints after each segment, and are overwritten.
template <class C>
__global__ void __launch_bounds__(C::THREADS)
    backward_kernel(Problem p, Plan plan, Gradients k, Parts parts, void* adjoints) {
  using Real = typename C::Real;
  FUSEPORT_SHARED(memory);
  const bool gated = p.z.data != nullptr;
  const BackwardShared<C> s(memory, gated);
  const int64_t groups = (p.states + C::GROUP - 1) / C::GROUP;
  const int channel = (int)threadIdx.x / C::L, lane = (int)threadIdx.x % C::L;

  for (int64_t unit = blockIdx.x; unit < units_of(p, plan); unit += gridDim.x) {
    const Place place(p, plan, unit);
    __syncthreads();
    for (Real* tile : {s.u, s.delta, s.dy, s.y, s.gate})
      if (tile) clear_rows<C>(tile, 0);
    load_channels<C>(p.D, place, s.D);
    load_channels<C>(p.delta_bias, place, s.bias);
    if (threadIdx.x < C::WIDTH) s.zeros[threadIdx.x] = 0;
    double dD = 0, dbias = 0;

    for (int64_t chunk = place.end_chunk - 1; chunk >= place.first_chunk; --chunk) {
      const Steps steps(p, chunk);
      __syncthreads();
      load_tile<C>(p, p.u, place, steps, s.u);
      load_tile<C>(p, p.delta, place, steps, s.delta);
      load_tile<C>(p, k.dout, place, steps, s.dy);
      clear_rows<C>(s.ddrive, 0);
      clear_rows<C>(s.ddelta, 0);
      if (gated) {
        load_tile<C>(p, p.z, place, steps, s.gate);
        clear_rows<C>(s.y, 0);
      }
      __syncthreads();
      step_sizes<C>(p, place, steps, s.bias, s.delta);
      if (gated) ungate<C>(place, steps, s.dy, s.gate);
      for (int64_t group = 0; group < groups; ++group) {
        __syncthreads();
        load_coefficients<C>(p, p.B, place, steps, group, s.B);
        load_coefficients<C>(p, p.C, place, steps, group, s.C_);
        __syncthreads();
        backward_group<C>(s, p, plan, k, parts, place, chunk, group, (Number<C>*)adjoints);
      }
      __syncthreads();
      Real chunk_dD = 0, chunk_dbias = 0;
      for (int t = lane; t < steps.count; t += C::L) {
        const int at = t * C::ROW + channel;
        const Real u = s.u[at], delta = s.delta[at], dy = s.dy[at], ddrive = s.ddrive[at];
        const Real slope = p.softplus ? softplus_slope(delta) : (Real)1;
        const Real ddelta = (u * ddrive + s.ddelta[at]) * slope;
        chunk_dD += dy * u;
        chunk_dbias += ddelta;
        s.ddelta[at] = ddelta;
        s.ddrive[at] = delta * ddrive + s.D[channel] * dy;
        if (gated) s.gate[at] *= s.y[at] + s.D[channel] * u;
      }
      dD += (double)chunk_dD;
      dbias += (double)chunk_dbias;
      __syncthreads();
      store_tile<C>(p, s.ddrive, place, steps, k.du);
      store_tile<C>(p, s.ddelta, place, steps, k.ddelta);
      if (gated) store_tile<C>(p, s.gate, place, steps, k.dz);
    }
    sum_over_lanes<C::L, 1, 1>(&dD);
    sum_over_lanes<C::L, 1, 1>(&dbias);
    if (lane == 0 && channel < place.channels) {
      const int64_t at = (place.batch * plan.segments + place.segment) * p.channels +
                         place.channel + channel;
      parts.dD[at] = dD;
      parts.ddelta_bias[at] = dbias;
    }
  }
}

}  // namespace fuseport::selective_scan::cuda
