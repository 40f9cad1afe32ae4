// The forward pass on CUDA. A thread goes through time with its states in registers; B and C of a
// chunk are in shared memory, read once for all channels of the block.
#pragma once

#include "selective_scan/cuda_sequences.cuh"

namespace fuseport::selective_scan::cuda {

template <class C>
struct ForwardShared {
  using Real = typename C::Real;
  Real *u, *delta, *y, *B, *C_, *zeros;  // rows of sequences; tiles; a row
  int64_t bytes;

  __host__ __device__ explicit ForwardShared(char* base) {
    Shared s{base};
    u = s.template take<Real>(SequenceRows<C>::SIZE);
    delta = s.template take<Real>(SequenceRows<C>::SIZE);
    y = s.template take<Real>(SequenceRows<C>::SIZE);
    B = s.template take<Real>(C::COEFFICIENTS);
    C_ = s.template take<Real>(C::COEFFICIENTS);
    zeros = s.template take<Real>(STEPS);
    bytes = s.used;
  }
};

// States of a thread, kept in (parts, N, d).
template <class C>
FUSEPORT_DEVICE void load_states(const Number<C>* from, const Problem& p, const Place& place,
                                 const Seat<C>& seat, int64_t part, Number<C>* h) {
  const int64_t at = seat.in_rows(p, place, part);
#pragma unroll
  for (int i = 0; i < C::S; ++i) h[i] = seat.taken ? from[at + i * p.channels] : Number<C>{};
}

template <class C>
FUSEPORT_DEVICE void store_states(const Number<C>* h, const Problem& p, const Place& place,
                                  const Seat<C>& seat, int64_t part, Number<C>* to) {
  if (!seat.taken) return;
  const int64_t at = seat.in_rows(p, place, part);
#pragma unroll
  for (int i = 0; i < C::S; ++i) to[at + i * p.channels] = h[i];
}

// K steps of a thread's states from `t` on; what C reads of them is summed over lanes into y, which
// the first group of states begins.
template <class C>
FUSEPORT_DEVICE void scan_steps(const typename C::Real* delta_row, const typename C::Real* u_row,
                                typename C::Real* y_row, bool first,
                                const Rate<typename C::Real, C::COMPLEX>* rate,
                                const Coefficients<C>& B, const Coefficients<C>& C_, int t,
                                Number<C>* h) {
  using Real = typename C::Real;
  Real y[K], delta[K], u[K];
  get<K>(delta_row + t, delta);
  get<K>(u_row + t, u);
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const Real drive = delta[k] * u[k];
    Number<C> b[C::S], c[C::S];
    B.at(t + k, b);
    C_.at(t + k, c);
    y[k] = 0;
#pragma unroll
    for (int i = 0; i < C::S; ++i) {
      h[i] = rate[i].decay(delta[k]) * h[i] + b[i] * drive;
      y[k] += real_product(c[i], h[i]);
    }
  }
  sum_over_lanes<C::L, 1, K>(y);
  constexpr int SUMS = K / C::L;
  static_assert(SUMS > 0);
  Real* const to = y_row + t + (int)threadIdx.x % C::L * SUMS;
  Real sums[SUMS];
#pragma unroll
  for (int j = 0; j < SUMS; ++j) sums[j] = READ_TWICE<C> * y[j] + (first ? (Real)0 : to[j]);
  put<SUMS>(sums, to);
}

// What a segment starts from is in `starts`, (b, segments, N, d), where there are several.
template <class C>
__global__ void __launch_bounds__(C::THREADS, C::FORWARD)
    forward_kernel(Problem p, Plan plan, Forward f, const void* starts) {
  using Real = typename C::Real;
  FUSEPORT_SHARED(memory);
  const bool gated = p.z.data != nullptr;
  const ForwardShared<C> s(memory);
  const int64_t groups = (p.states + C::GROUP - 1) / C::GROUP;
  const int64_t saved = (p.length + CHUNK - 1) / CHUNK + 1;
  auto* const chunk_states = (Number<C>*)f.chunk_states;
  for (int i = (int)threadIdx.x; i < STEPS; i += C::THREADS) s.zeros[i] = 0;

  for (int64_t unit = blockIdx.x; unit < units_of(p, plan); unit += gridDim.x) {
    const Place place(p, plan, unit);
    const Owner<C> own(p, place);
    const Real D = own.number(p.D), bias = own.number(p.delta_bias);
    const int64_t B_at = first_of(p.B, place), C_at = first_of(p.C, place);
    Real* const u_row = s.u + own.channel * SequenceRows<C>::ROW;
    Real* const delta_row = s.delta + own.channel * SequenceRows<C>::ROW;
    Real* const y_row = s.y + own.channel * SequenceRows<C>::ROW;

    // A thread's own, from chunk to chunk; with several groups, in chunk_states in between.
    Number<C> h[C::S], A[C::S];
    Rate<Real, C::COMPLEX> rate[C::S];
    const auto finish = [&](const Seat<C>& seat) {
      store_states<C>(h, p, place, seat, place.batch * saved + saved - 1, chunk_states);
      if (!seat.taken) return;
      Number<C>* last = (Number<C>*)f.last_state + seat.in_columns(p, place, place.batch);
#pragma unroll
      for (int i = 0; i < C::S; ++i) last[i] = h[i];
    };
    for (int64_t group = 0; group < groups; ++group) {
      const Seat<C> seat(p, place, group);
      if (starts) {
        load_states<C>((const Number<C>*)starts, p, place, seat,
                       place.batch * plan.segments + place.segment, h);
      } else {
#pragma unroll
        for (int i = 0; i < C::S; ++i) h[i] = Number<C>{};
      }
      if (saved == 1) finish(seat);
      else store_states<C>(h, p, place, seat, place.batch * saved + place.first_chunk, chunk_states);
    }

    for (int64_t chunk = place.first_chunk; chunk < place.end_chunk; ++chunk) {
      const Steps steps(p, chunk);
      {
        Raw<Real> u[TURNS<C>], delta[TURNS<C>];  // all are read before any is waited for
#pragma unroll
        for (int i = 0; i < TURNS<C>; ++i) {
          own.read(p.u, steps, i, u[i]);
          own.read(p.delta, steps, i, delta[i]);
        }
#pragma unroll
        for (int i = 0; i < TURNS<C>; ++i) {
          Real v[OWN];
          own.numbers(u[i], v);
          put<OWN>(v, u_row + own.step(i));
          own.numbers(delta[i], v);
          own.step_sizes(p, steps, i, bias, v);
          put<OWN>(v, delta_row + own.step(i));
        }
      }
      for (int64_t group = 0; group < groups; ++group) {
        const Seat<C> seat(p, place, group);
        __syncthreads();  // nobody reads the B and C before
        load_coefficients<C>(p, p.B, B_at, place, steps, group, s.B);
        load_coefficients<C>(p, p.C, C_at, place, steps, group, s.C_);
        if (groups > 1 || chunk == place.first_chunk) {
          load_rates<C>(p, place, seat, A, rate);
          load_states<C>(chunk_states, p, place, seat, place.batch * saved + chunk, h);
        }
        __syncthreads();
        const Coefficients<C> B(p.B, s.B, s.zeros, seat), C_(p.C, s.C_, s.zeros, seat);
        const Real* const of_delta = seat.taken ? delta_row : s.zeros;
        const Real* const of_u = seat.taken ? u_row : s.zeros;
        for (int t = 0; t < steps.rounded; t += K)
          scan_steps<C>(of_delta, of_u, y_row, group == 0, rate, B, C_, t, h);
        // The border to the next segment is that one's, from which it starts.
        if (chunk + 1 < place.end_chunk)
          store_states<C>(h, p, place, seat, place.batch * saved + chunk + 1, chunk_states);
        else if (chunk + 2 == saved)
          finish(seat);
      }
      sync_warp();  // all of the channel is done with its rows
      Raw<Real> z[TURNS<C>];
      if (gated)
#pragma unroll
        for (int i = 0; i < TURNS<C>; ++i) own.read(p.z, steps, i, z[i]);
#pragma unroll
      for (int i = 0; i < TURNS<C>; ++i) {
        Real y[OWN], u[OWN];
        if (groups > 0) {
          get<OWN>(y_row + own.step(i), y);
        } else {
#pragma unroll
          for (int j = 0; j < OWN; ++j) y[j] = 0;
        }
        get<OWN>(u_row + own.step(i), u);
#pragma unroll
        for (int j = 0; j < OWN; ++j) y[j] += D * u[j];
        if (gated) {
          own.numbers(z[i], u);
#pragma unroll
          for (int j = 0; j < OWN; ++j) y[j] *= u[j] * logistic(u[j]);
        }
        own.write(y, steps, i, f.out);
      }
    }
  }
}

}  // namespace fuseport::selective_scan::cuda
