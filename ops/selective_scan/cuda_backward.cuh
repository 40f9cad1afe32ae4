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
  static constexpr int STEP_SUMS = 2 * REALS + 4, WARP_SUMS = K * STEP_SUMS;  // banks apart
  static constexpr int BORDERS = STEPS / K - 1;
  Real *u, *delta, *dy;       // rows of sequences
  Real *ddrive, *ddelta;      // and of the cotangents of δ̂·u and of δ̂
  Real *y, *gate;             // rows, where there is a gate
  Real *B, *C_, *zeros;       // tiles; a row
  Number<C>* borders;         // [K-th step][thread][state]: the states before it, but the first
  Real* sums;                 // twice [warp][step][B or C][state]: sums over a warp's channels
  int64_t bytes;

  __host__ __device__ BackwardShared(char* base, bool gated) {
    Shared s{base};
    u = s.template take<Real>(SequenceRows<C>::SIZE);
    delta = s.template take<Real>(SequenceRows<C>::SIZE);
    dy = s.template take<Real>(SequenceRows<C>::SIZE);
    ddrive = s.template take<Real>(SequenceRows<C>::SIZE);
    ddelta = s.template take<Real>(SequenceRows<C>::SIZE);
    B = s.template take<Real>(C::COEFFICIENTS);
    C_ = s.template take<Real>(C::COEFFICIENTS);
    zeros = s.template take<Real>(STEPS);
    borders = s.template take<Number<C>>(BORDERS * C::S * C::THREADS);
    sums = s.template take<Real>(2 * C::WARPS * WARP_SUMS);
    y = s.template take<Real>(gated ? SequenceRows<C>::SIZE : 0);
    gate = s.template take<Real>(gated ? SequenceRows<C>::SIZE : 0);
    bytes = s.used;
  }
};

// A thread's rows of a chunk; zeros where it has no state.
template <class C>
struct ChannelRows {
  using Real = typename C::Real;
  const Real *u, *delta, *dy;
  Real *ddrive, *ddelta, *y;

  FUSEPORT_DEVICE ChannelRows(const BackwardShared<C>& s, const Seat<C>& seat) {
    const int row = seat.channel * SequenceRows<C>::ROW;
    u = seat.taken ? s.u + row : s.zeros;
    delta = seat.taken ? s.delta + row : s.zeros;
    dy = seat.taken ? s.dy + row : s.zeros;
    ddrive = s.ddrive + row;
    ddelta = s.ddelta + row;
    y = s.y + row;
  }
};

// Shares of sums over channels, of a thread's state: [step][state] becomes sums over a warp's.
template <class C, int WHICH>
FUSEPORT_DEVICE void sum_channels(const Number<C> (&shares)[K][C::S], typename C::Real* sums) {
  using Real = typename C::Real;
  constexpr int LANES = C::WARP_CHANNELS, EACH = LANES < K ? K / LANES : 1;
  constexpr int SAME = LANES < K ? 1 : LANES / K;
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32 / C::L;
  Real all[EACH][C::WIDTH];
#pragma unroll
  for (int i = 0; i < C::WIDTH; ++i) {
    Real v[K];
#pragma unroll
    for (int k = 0; k < K; ++k)
      v[k] = i % C::PARTS ? part_of<1>(shares[k][i / C::PARTS])
                          : part_of<0>(shares[k][i / C::PARTS]);
    sum_over_lanes<LANES, C::L, K>(v);
#pragma unroll
    for (int j = 0; j < EACH; ++j) all[j][i] = v[j];
  }
  if (lane % SAME) return;
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    const int k = lane / SAME * EACH + j;
    Real* const row = sums + warp * BackwardShared<C>::WARP_SUMS +
                      k * BackwardShared<C>::STEP_SUMS + WHICH * BackwardShared<C>::REALS;
    put<C::WIDTH>(all[j], row + (int)threadIdx.x % C::L * C::WIDTH);
  }
}

// Adds up warps, in their order, and writes K steps of the block's part of dB and dC.
template <class C>
FUSEPORT_DEVICE void write_sums(const Problem& p, const Plan& plan, const Place& place,
                                const Steps& steps, int64_t group, int t, const Parts& parts,
                                const typename C::Real* sums) {
  using Real = typename C::Real;
  constexpr int REALS = BackwardShared<C>::REALS;
  const int64_t rows = (place.batch * plan.blocks + place.block) * p.states + group * C::GROUP;
  const auto write = [&](int i) {
    const int k = i % K, number = i / K, n = number / C::PARTS;
    if (t + k >= steps.count || group * C::GROUP + n >= p.states) return;
    const Real* from = sums + k * BackwardShared<C>::STEP_SUMS + number;
    Real sum_B = 0, sum_C = 0;
#pragma unroll
    for (int warp = 0; warp < C::WARPS; ++warp) {
      sum_B += from[warp * BackwardShared<C>::WARP_SUMS];
      sum_C += from[warp * BackwardShared<C>::WARP_SUMS + REALS];
    }
    const int64_t at =
        ((rows + n) * p.length + steps.start + t + k) * C::PARTS + number % C::PARTS;
    if (p.B.varies) ((Real*)parts.blocks_dB)[at] = sum_B;
    if (p.C.varies) ((Real*)parts.blocks_dC)[at] = sum_C;
  };
  if constexpr (REALS * K == C::THREADS) {
    write((int)threadIdx.x);
  } else {
    for (int i = (int)threadIdx.x; i < REALS * K; i += C::THREADS) write(i);
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

  FUSEPORT_DEVICE void skip(const ChannelRows<C>& rows, const Coefficients<C>& B, int t) {
    Real delta[K], u[K];
    get<K>(rows.delta + t, delta);
    get<K>(rows.u + t, u);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const Real drive = delta[k] * u[k];
      Number<C> b[C::S];
      B.at(t + k, b);
#pragma unroll
      for (int i = 0; i < C::S; ++i) h[i] = rate[i].decay(delta[k]) * h[i] + b[i] * drive;
    }
  }

  // Sums over a channel's lanes, each of which adds K/L steps to the row, or begins them.
  FUSEPORT_DEVICE static void add_to(Real* row, bool first, int t, Real* v) {
    sum_over_lanes<C::L, 1, K>(v);
    constexpr int SUMS = K / C::L;
    Real* const to = row + t + (int)threadIdx.x % C::L * SUMS;
#pragma unroll
    for (int j = 0; j < SUMS; ++j) v[j] += first ? (Real)0 : to[j];
    put<SUMS>(v, to);
  }

  template <bool GATED>
  FUSEPORT_DEVICE void forth(const ChannelRows<C>& rows, bool first, const Coefficients<C>& B,
                             const Coefficients<C>& C_, int t) {
    Real y[K], delta[K], u[K];
    get<K>(rows.delta + t, delta);
    get<K>(rows.u + t, u);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const Real drive = delta[k] * u[k];
      Number<C> b[C::S], c[C::S];
      B.at(t + k, b);
      if constexpr (GATED) C_.at(t + k, c);
      y[k] = 0;
#pragma unroll
      for (int i = 0; i < C::S; ++i) {
        decay[k][i] = rate[i].decay(delta[k]);
        before[k][i] = h[i];
        h[i] = decay[k][i] * h[i] + b[i] * drive;
        if constexpr (GATED) y[k] += READ_TWICE<C> * real_product(c[i], h[i]);
      }
    }
    if constexpr (GATED) add_to(rows.y, first, t, y);
  }

  // Leaves the steps' shares of dC in `before` and of dB in `decay`. Steps past the last one, `end`,
  // are none: with an infinite state or rate their zeros would make NaN.
  FUSEPORT_DEVICE void back(const ChannelRows<C>& rows, bool first, const Coefficients<C>& B,
                            const Coefficients<C>& C_, int t, int end) {
    Real ddrive[K], ddelta[K], delta[K], u[K], dy[K];
    get<K>(rows.delta + t, delta);
    get<K>(rows.u + t, u);
    get<K>(rows.dy + t, dy);
#pragma unroll
    for (int k = K - 1; k >= 0; --k) {
      ddrive[k] = ddelta[k] = 0;
      if (t + k >= end) {
#pragma unroll
        for (int i = 0; i < C::S; ++i) before[k][i] = decay[k][i] = Number<C>{};
        continue;
      }
      const Real drive = delta[k] * u[k], share = READ_TWICE<C> * dy[k];
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
        dA[i] = dA[i] + conjugate(dexponent) * delta[k];
        ddelta[k] += real_product(dexponent, A[i]);
        h[i] = before[k][i];
        before[k][i] = to_C;
        decay[k][i] = to_B;
      }
    }
    add_to(rows.ddrive, first, t, ddrive);
    add_to(rows.ddelta, first, t, ddelta);
  }

  // The shares that `back` left, into the block's sums or, where B or C does not vary, the thread's.
  FUSEPORT_DEVICE void share(const Problem& p, Real* sums) {
    if (p.C.varies) {
      sum_channels<C, 1>(before, sums);
    } else {
#pragma unroll
      for (int i = 0; i < K * C::S; ++i) dC[i % C::S] = dC[i % C::S] + before[i / C::S][i % C::S];
    }
    if (p.B.varies) {
      sum_channels<C, 0>(decay, sums);
    } else {
#pragma unroll
      for (int i = 0; i < K * C::S; ++i) dB[i % C::S] = dB[i % C::S] + decay[i / C::S][i % C::S];
    }
  }
};

// A group of states through a chunk. The walk keeps its rates and adjoints from chunk to chunk,
// unless there are several groups.
template <class C, bool GATED>
FUSEPORT_DEVICE void backward_group(Walk<C>& w, const BackwardShared<C>& s, const Problem& p,
                                    const Plan& plan, const Gradients& k, const Parts& parts,
                                    const Place& place, int64_t chunk, int64_t group,
                                    int64_t groups, Number<C>* adjoints) {
  const Steps steps(p, chunk);
  const Seat<C> seat(p, place, group);
  const ChannelRows<C> rows(s, seat);
  const int64_t saved = (p.length + CHUNK - 1) / CHUNK + 1;
  const int64_t segment = place.batch * plan.segments + place.segment;
  const bool last = chunk == place.end_chunk - 1;
  const auto state_at_start = [&] {
    load_states<C>((const Number<C>*)k.chunk_states, p, place, seat, place.batch * saved + chunk,
                   w.h);
  };
  if (groups > 1 || last) {
    load_rates<C>(p, place, seat, w.A, w.rate);
    load_states<C>(adjoints, p, place, seat, segment, w.g);
  }
#pragma unroll
  for (int i = 0; i < C::S; ++i) w.dA[i] = w.dB[i] = w.dC[i] = Number<C>{};

  const Coefficients<C> B(p.B, s.B, s.zeros, seat), C_(p.C, s.C_, s.zeros, seat);
  const auto border = [&](int t) {
    return s.borders + ((t / K - 1) * C::THREADS + (int)threadIdx.x) * C::S;
  };
  state_at_start();
  for (int t = 0; t + K < steps.rounded; t += K) {
    w.skip(rows, B, t);
    put<C::WIDTH>((const typename C::Real*)w.h, (typename C::Real*)border(t + K));
  }
  for (int t = steps.rounded - K; t >= 0; t -= K) {
    if (t > 0) get<C::WIDTH>((const typename C::Real*)border(t), (typename C::Real*)w.h);
    else state_at_start();
    w.template forth<GATED>(rows, group == 0, B, C_, t);
    w.back(rows, group == 0, B, C_, t, steps.count);
    // Two in turn: no thread is more than one barrier ahead of those that still read the other.
    typename C::Real* sums = s.sums + t / K % 2 * (C::WARPS * BackwardShared<C>::WARP_SUMS);
    w.share(p, sums);
    if (!p.B.varies && !p.C.varies) continue;
    __syncthreads();
    write_sums<C>(p, plan, place, steps, group, t, parts, sums);
  }
  if (groups > 1) store_states<C>(w.g, p, place, seat, segment, adjoints);
  add_parts<C>(w.dA, p, place, seat, segment, last, parts.dA);
  if (!p.B.varies) add_parts<C>(w.dB, p, place, seat, segment, last, parts.dB);
  if (!p.C.varies) add_parts<C>(w.dC, p, place, seat, segment, last, parts.dC);
}

// What no state adds to.
template <class C, bool GATED>
FUSEPORT_DEVICE void clear_results(const BackwardShared<C>& s, const Owner<C>& own) {
  const typename C::Real zeros[OWN] = {};
#pragma unroll
  for (int i = 0; i < TURNS<C>; ++i) {
    const int at = own.channel * SequenceRows<C>::ROW + own.step(i);
    put<OWN>(zeros, s.ddrive + at);
    put<OWN>(zeros, s.ddelta + at);
    if (GATED) put<OWN>(zeros, s.y + at);
  }
}

// The sequences of a chunk into shared memory, as a thread owns them.
template <class C, bool GATED>
FUSEPORT_DEVICE void begin_chunk(const BackwardShared<C>& s, const Problem& p,
                                 const Sequence& dout, const Owner<C>& own, const Steps& steps,
                                 typename C::Real bias) {
  using Real = typename C::Real;
  const int row = own.channel * SequenceRows<C>::ROW;
  Raw<Real> u[TURNS<C>], delta[TURNS<C>], dy[TURNS<C>], z[TURNS<C>];
#pragma unroll
  for (int i = 0; i < TURNS<C>; ++i) {
    own.read(p.u, steps, i, u[i]);
    own.read(p.delta, steps, i, delta[i]);
    own.read(dout, steps, i, dy[i]);
    if (GATED) own.read(p.z, steps, i, z[i]);
  }
#pragma unroll
  for (int i = 0; i < TURNS<C>; ++i) {
    const int at = row + own.step(i);
    Real v[OWN], gate[OWN];
    own.numbers(u[i], v);
    put<OWN>(v, s.u + at);
    own.numbers(delta[i], v);
    own.step_sizes(p, steps, i, bias, v);
    put<OWN>(v, s.delta + at);
    own.numbers(dy[i], v);
    if (GATED) {
      own.numbers(z[i], gate);
      ungate(v, gate);
      put<OWN>(gate, s.gate + at);
    }
    put<OWN>(v, s.dy + at);
  }
}

// Sums over a thread's steps.
struct StepSums {
  double dD = 0, dbias = 0;
};

// What comes back to the sequences of a chunk.
template <class C, bool GATED>
FUSEPORT_DEVICE void end_chunk(const BackwardShared<C>& s, const Problem& p, const Gradients& k,
                               const Owner<C>& own, const Steps& steps, typename C::Real D,
                               StepSums& sums) {
  using Real = typename C::Real;
  Real chunk_dD = 0, chunk_dbias = 0;
#pragma unroll
  for (int i = 0; i < TURNS<C>; ++i) {
    const int at = own.channel * SequenceRows<C>::ROW + own.step(i);
    Real u[OWN], delta[OWN], dy[OWN], ddrive[OWN], ddelta[OWN];
    get<OWN>(s.u + at, u);
    get<OWN>(s.delta + at, delta);
    get<OWN>(s.dy + at, dy);
    get<OWN>(s.ddrive + at, ddrive);
    get<OWN>(s.ddelta + at, ddelta);
    if (GATED) {
      Real gate[OWN], y[OWN];
      get<OWN>(s.gate + at, gate);
      get<OWN>(s.y + at, y);
#pragma unroll
      for (int j = 0; j < OWN; ++j) gate[j] *= y[j] + D * u[j];
      own.write(gate, steps, i, k.dz);
    }
    const int count = own.count(steps, i);
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
      const Real slope = p.softplus ? softplus_slope(delta[j]) : (Real)1;
      ddelta[j] = (u[j] * ddrive[j] + ddelta[j]) * slope;
      ddrive[j] = delta[j] * ddrive[j] + D * dy[j];
      if (j >= count) continue;  // whose rows may have any numbers
      chunk_dD += dy[j] * u[j];
      chunk_dbias += ddelta[j];
    }
    own.write(ddrive, steps, i, k.du);
    own.write(ddelta, steps, i, k.ddelta);
  }
  sums.dD += (double)chunk_dD;
  sums.dbias += (double)chunk_dbias;
}

// `adjoints`, (b, segments, N, d), hold the adjoints after each segment, and are overwritten.
template <class C, bool GATED>
__global__ void __launch_bounds__(C::THREADS, C::BACKWARD)
    backward_kernel(Problem p, Plan plan, Gradients k, Parts parts, void* adjoints) {
  using Real = typename C::Real;
  FUSEPORT_SHARED(memory);
  const BackwardShared<C> s(memory, GATED);
  const int64_t groups = (p.states + C::GROUP - 1) / C::GROUP;
  for (int i = (int)threadIdx.x; i < STEPS; i += C::THREADS) s.zeros[i] = 0;

  for (int64_t unit = blockIdx.x; unit < units_of(p, plan); unit += gridDim.x) {
    const Place place(p, plan, unit);
    const Owner<C> own(p, place);
    const Real D = own.number(p.D), bias = own.number(p.delta_bias);
    const int64_t B_at = first_of(p.B, place), C_at = first_of(p.C, place);
    StepSums sums;
    Walk<C> walk;
    for (int64_t chunk = place.end_chunk - 1; chunk >= place.first_chunk; --chunk) {
      const Steps steps(p, chunk);
      begin_chunk<C, GATED>(s, p, k.dout, own, steps, bias);
      if (groups == 0) clear_results<C, GATED>(s, own);
      for (int64_t group = 0; group < groups; ++group) {
        __syncthreads();  // nobody reads the B and C before
        load_coefficients<C>(p, p.B, B_at, place, steps, group, s.B);
        load_coefficients<C>(p, p.C, C_at, place, steps, group, s.C_);
        __syncthreads();
        backward_group<C, GATED>(walk, s, p, plan, k, parts, place, chunk, group, groups,
                          (Number<C>*)adjoints);
      }
      sync_warp();  // all of the channel is done with its rows
      end_chunk<C, GATED>(s, p, k, own, steps, D, sums);
    }
    sum_over_lanes<C::L, 1, 1>(&sums.dD);
    sum_over_lanes<C::L, 1, 1>(&sums.dbias);
    if (own.lane == 0 && own.there) {
      const int64_t at = (place.batch * plan.segments + place.segment) * p.channels + own.at;
      parts.dD[at] = sums.dD;
      parts.ddelta_bias[at] = sums.dbias;
    }
  }
}

}  // namespace fuseport::selective_scan::cuda
