// Segments of time on CUDA: what each adds to the state, or backwards to the adjoint, and from what
// each then starts. Both passes make two kernels: `segment_kernel`, one block for each segment, and
// `carry_kernel`, which goes through the segments of each state in turn.
#pragma once

#include "selective_scan/cuda_forward.cuh"

namespace fuseport::selective_scan::cuda {

// Where those of segments are, in a pass's scratch.
struct Ends {
  void* states = nullptr;  // (b, segments, N, d), in the state's type
  void* steps = nullptr;   // (b, segments, d), in its real type: the sums of δ̂
};

template <class C>
struct SegmentShared {
  using Real = typename C::Real;
  Real *x, *delta, *coefficients, *zeros;
  int64_t bytes;

  __host__ __device__ explicit SegmentShared(char* base) {
    Shared s{base};
    x = s.template take<Real>(SequenceRows<C>::SIZE);
    delta = s.template take<Real>(SequenceRows<C>::SIZE);
    coefficients = s.template take<Real>(C::COEFFICIENTS);
    zeros = s.template take<Real>(STEPS);
    bytes = s.used;
  }
};

// The cotangent of y in the place of that of out, and of the gate in the place of z.
template <class Real>
FUSEPORT_DEVICE void ungate(Real (&dy)[OWN], Real (&z)[OWN]) {
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const Real dout = dy[i], sigma = logistic(z[i]);
    dy[i] = dout * (z[i] * sigma);
    z[i] = dout * (sigma * (1 + z[i] * (1 - sigma)));
  }
}

// From a state of zero, or backwards from an adjoint of zero, through a segment.
template <class C, bool BACKWARDS>
__global__ void __launch_bounds__(C::THREADS, C::FORWARD)
    segment_kernel(Problem p, Plan plan, Sequence dout, Ends ends) {
  using Real = typename C::Real;
  FUSEPORT_SHARED(memory);
  const bool gated = BACKWARDS && p.z.data != nullptr;
  const SegmentShared<C> s(memory);
  const int64_t groups = (p.states + C::GROUP - 1) / C::GROUP;
  auto* const states = (Number<C>*)ends.states;
  for (int i = (int)threadIdx.x; i < STEPS; i += C::THREADS) s.zeros[i] = 0;

  for (int64_t unit = blockIdx.x; unit < units_of(p, plan); unit += gridDim.x) {
    const Place place(p, plan, unit);
    const Owner<C> own(p, place);
    const Coefficient& k = BACKWARDS ? p.C : p.B;
    const int64_t first = first_of(k, place);
    const int64_t part = place.batch * plan.segments + place.segment;
    const Real bias = own.number(p.delta_bias);
    Real* const x_row = s.x + own.channel * SequenceRows<C>::ROW;
    Real* const delta_row = s.delta + own.channel * SequenceRows<C>::ROW;
    Number<C> h[C::S], A[C::S];
    Rate<Real, C::COMPLEX> rate[C::S];
    Real sum = 0;
    const int64_t chunks = place.end_chunk - place.first_chunk;
    for (int64_t i = 0; i < chunks; ++i) {
      const int64_t chunk = BACKWARDS ? place.end_chunk - 1 - i : place.first_chunk + i;
      const Steps steps(p, chunk);
      {
        Raw<Real> x[TURNS<C>], delta[TURNS<C>], z[TURNS<C>];
#pragma unroll
        for (int j = 0; j < TURNS<C>; ++j) {
          own.read(BACKWARDS ? dout : p.u, steps, j, x[j]);
          own.read(p.delta, steps, j, delta[j]);
          if (gated) own.read(p.z, steps, j, z[j]);
        }
#pragma unroll
        for (int j = 0; j < TURNS<C>; ++j) {
          Real of_x[OWN], sizes[OWN], gate[OWN];
          own.numbers(x[j], of_x);
          own.numbers(delta[j], sizes);
          own.step_sizes(p, steps, j, bias, sizes);
          if (gated) {
            own.numbers(z[j], gate);
            ungate(of_x, gate);
          }
#pragma unroll
          for (int m = 0; m < OWN; ++m) sum += sizes[m];
          put<OWN>(of_x, x_row + own.step(j));
          put<OWN>(sizes, delta_row + own.step(j));
        }
      }
      for (int64_t group = 0; group < groups; ++group) {
        const Seat<C> seat(p, place, group);
        __syncthreads();
        load_coefficients<C>(p, k, first, place, steps, group, s.coefficients);
        if (groups > 1 || i == 0) {
          load_rates<C>(p, place, seat, A, rate);
          if (i == 0) {
#pragma unroll
            for (int j = 0; j < C::S; ++j) h[j] = Number<C>{};
          } else {
            load_states<C>(states, p, place, seat, part, h);
          }
        }
        __syncthreads();
        const Coefficients<C> coefficients(k, s.coefficients, s.zeros, seat);
        const Real* const of_delta = seat.taken ? delta_row : s.zeros;
        const Real* const of_x = seat.taken ? x_row : s.zeros;
        for (int j = 0; j < steps.rounded; j += K) {
          const int t = BACKWARDS ? steps.rounded - K - j : j;
          Real delta[K], x[K];
          get<K>(of_delta + t, delta);
          get<K>(of_x + t, x);
#pragma unroll
          for (int m = 0; m < K; ++m) {
            const int step = BACKWARDS ? K - 1 - m : m;
            const Real drive = BACKWARDS ? READ_TWICE<C> * x[step] : delta[step] * x[step];
            Number<C> row[C::S];
            coefficients.at(t + step, row);
#pragma unroll
            for (int n = 0; n < C::S; ++n) {
              const Number<C> a = rate[n].decay(delta[step]);
              h[n] = BACKWARDS ? a * (h[n] + row[n] * drive) : a * h[n] + row[n] * drive;
            }
          }
        }
        if (groups > 1 || i == chunks - 1) store_states<C>(h, p, place, seat, part, states);
      }
      sync_warp();  // all of the channel is done with its rows
    }
    Real all[1] = {sum};
    sum_over_lanes<C::L, 1, 1>(all);
    if (own.there && own.lane == 0)
      ((Real*)ends.steps)[part * p.channels + place.channel + own.channel] = all[0];
  }
}

// Replaces what each segment adds by what it starts from: the first, or backwards the last one, from
// `initial`, (b, d, N), or zero.
template <class C, bool BACKWARDS>
__global__ void __launch_bounds__(256)
    carry_kernel(Problem p, Plan plan, Ends ends, const void* initial) {
  using Real = typename C::Real;
  const int64_t all = p.batches * p.states * p.channels;
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < all;
       i += gridDim.x * (int64_t)blockDim.x) {
    const int64_t c = i % p.channels, n = i / p.channels % p.states;
    const int64_t batch = i / p.channels / p.states, column = c * p.states + n;
    const Rate<Real, C::COMPLEX> rate(((const Number<C>*)p.A)[column]);
    Number<C> h{};
    if (initial)
      h = conjugate(((const Number<C>*)initial)[batch * p.channels * p.states + column]);
    for (int64_t j = 0; j < plan.segments; ++j) {
      const int64_t part =
          batch * plan.segments + (BACKWARDS ? plan.segments - 1 - j : j);
      Number<C>* at = (Number<C>*)ends.states + (part * p.states + n) * p.channels + c;
      const Number<C> added = *at;
      *at = h;
      h = rate.decay(((const Real*)ends.steps)[part * p.channels + c]) * h + added;
    }
  }
}

}  // namespace fuseport::selective_scan::cuda
