// The forward pass on CUDA. A thread goes through time with its states in registers; B, C and the
// sequences of a chunk are in shared memory, read once for all states and channels of the block.
#pragma once

#include "selective_scan/cuda_tiles.cuh"

namespace fuseport::selective_scan::cuda {

template <class C>
struct ForwardShared {
  using Real = typename C::Real;
  Real *u, *delta, *y, *gate, *B, *C_, *D, *bias, *zeros;
  int64_t bytes;

  __host__ __device__ ForwardShared(char* base, bool gated) {
    Shared s{base};
    u = s.template take<Real>(C::TILE);
    delta = s.template take<Real>(C::TILE);
    y = s.template take<Real>(C::TILE);
    gate = gated ? s.template take<Real>(C::TILE) : nullptr;
    B = s.template take<Real>(C::COEFFICIENTS);
    C_ = s.template take<Real>(C::COEFFICIENTS);
    D = s.template take<Real>(C::CHANNELS);
    bias = s.template take<Real>(C::CHANNELS);
    zeros = s.template take<Real>(C::WIDTH);
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

// K steps of a thread's states from `t` on; what C reads of them is summed over lanes into y.
template <class C>
FUSEPORT_DEVICE void scan_steps(const ForwardShared<C>& s, const Seat<C>& seat,
                                const Rate<typename C::Real, C::COMPLEX>* rate,
                                const Coefficients<C>& B, const Coefficients<C>& C_, int t,
                                Number<C>* h) {
  using Real = typename C::Real;
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
      h[i] = rate[i].decay(delta) * h[i] + b[i] * drive;
      y[k] += real_product(c[i], h[i]);
    }
  }
  sum_over_lanes<C::L, 1, K>(y);
  constexpr int SUMS = K / C::L;
  static_assert(SUMS > 0);
  if (seat.channel < C::CHANNELS)
#pragma unroll
    for (int j = 0; j < SUMS; ++j)
      s.y[(t + seat.lane * SUMS + j) * C::ROW + seat.channel] += READ_TWICE<C> * y[j];
}

// What a segment starts from is in `starts`, (b, segments, N, d), where there are several.
template <class C>
__global__ void __launch_bounds__(C::THREADS)
    forward_kernel(Problem p, Plan plan, Forward f, const void* starts) {
  using Real = typename C::Real;
  FUSEPORT_SHARED(memory);
  const bool gated = p.z.data != nullptr;
  const ForwardShared<C> s(memory, gated);
  const int64_t groups = (p.states + C::GROUP - 1) / C::GROUP;
  const int64_t saved = (p.length + CHUNK - 1) / CHUNK + 1;
  auto* const chunk_states = (Number<C>*)f.chunk_states;

  for (int64_t unit = blockIdx.x; unit < units_of(p, plan); unit += gridDim.x) {
    const Place place(p, plan, unit);
    __syncthreads();
    for (Real* tile : {s.u, s.delta, s.y}) clear_rows<C>(tile, 0);
    load_channels<C>(p.D, place, s.D);
    load_channels<C>(p.delta_bias, place, s.bias);
    if (threadIdx.x < C::WIDTH) s.zeros[threadIdx.x] = 0;

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
      __syncthreads();
      load_tile<C>(p, p.u, place, steps, s.u);
      load_tile<C>(p, p.delta, place, steps, s.delta);
      if (gated) load_tile<C>(p, p.z, place, steps, s.gate);
      clear_rows<C>(s.y, 0);
      __syncthreads();
      step_sizes<C>(p, place, steps, s.bias, s.delta);
      for (int64_t group = 0; group < groups; ++group) {
        const Seat<C> seat(p, place, group);
        if (group > 0) __syncthreads();
        load_coefficients<C>(p, p.B, place, steps, group, s.B);
        load_coefficients<C>(p, p.C, place, steps, group, s.C_);
        if (groups > 1 || chunk == place.first_chunk) {
          load_rates<C>(p, place, seat, A, rate);
          load_states<C>(chunk_states, p, place, seat, place.batch * saved + chunk, h);
        }
        __syncthreads();
        const Coefficients<C> B(p.B, s.B, s.zeros, seat), C_(p.C, s.C_, s.zeros, seat);
        for (int t = 0; t < steps.rounded; t += K) scan_steps<C>(s, seat, rate, B, C_, t, h);
        // The border to the next segment is that one's, from which it starts.
        if (chunk + 1 < place.end_chunk)
          store_states<C>(h, p, place, seat, place.batch * saved + chunk + 1, chunk_states);
        else if (chunk + 2 == saved)
          finish(seat);
      }
      __syncthreads();
      for_each_place<C>(place, steps, [&](int at, int c) {
        const Real y = s.y[at] + s.D[c] * s.u[at];
        s.y[at] = gated ? y * (s.gate[at] * logistic(s.gate[at])) : y;
      });
      __syncthreads();
      store_tile<C>(p, s.y, place, steps, f.out);
    }
  }
}

}  // namespace fuseport::selective_scan::cuda
