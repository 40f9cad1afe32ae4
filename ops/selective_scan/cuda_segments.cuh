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
  Real *x, *delta, *gate, *coefficients, *bias, *zeros;
  int64_t bytes;

  __host__ __device__ SegmentShared(char* base, bool gated) {
    Shared s{base};
    x = s.template take<Real>(C::TILE);
    delta = s.template take<Real>(C::TILE);
    gate = gated ? s.template take<Real>(C::TILE) : nullptr;
    coefficients = s.template take<Real>(C::COEFFICIENTS);
    bias = s.template take<Real>(C::CHANNELS);
    zeros = s.template take<Real>(C::WIDTH);
    bytes = s.used;
  }
};

// The cotangent of y in a tile that holds that of out, and of the gate in one that holds z.
template <class C>
FUSEPORT_DEVICE void ungate(const Place& place, const Steps& steps, typename C::Real* dy,
                            typename C::Real* gate) {
  for_each_place<C>(place, steps, [&](int at, int) {
    const typename C::Real z = gate[at], dout = dy[at], sigma = logistic(z);
    dy[at] = dout * (z * sigma);
    gate[at] = dout * (sigma * (1 + z * (1 - sigma)));
  });
}

// From a state of zero, or backwards from an adjoint of zero, through a segment.
template <class C, bool BACKWARDS>
__global__ void __launch_bounds__(C::THREADS)
    segment_kernel(Problem p, Plan plan, Sequence dout, Ends ends) {
  using Real = typename C::Real;
  FUSEPORT_SHARED(memory);
  const bool gated = BACKWARDS && p.z.data != nullptr;
  const SegmentShared<C> s(memory, gated);
  const int64_t groups = (p.states + C::GROUP - 1) / C::GROUP;
  auto* const states = (Number<C>*)ends.states;

  for (int64_t unit = blockIdx.x; unit < units_of(p, plan); unit += gridDim.x) {
    const Place place(p, plan, unit);
    const int64_t part = place.batch * plan.segments + place.segment;
    __syncthreads();
    clear_rows<C>(s.x, 0);
    clear_rows<C>(s.delta, 0);
    if (gated) clear_rows<C>(s.gate, 0);
    load_channels<C>(p.delta_bias, place, s.bias);
    if (threadIdx.x < C::WIDTH) s.zeros[threadIdx.x] = 0;
    Number<C> h[C::S], A[C::S];
    Rate<Real, C::COMPLEX> rate[C::S];
    Real sum = 0;
    const int64_t chunks = place.end_chunk - place.first_chunk;
    for (int64_t i = 0; i < chunks; ++i) {
      const int64_t chunk = BACKWARDS ? place.end_chunk - 1 - i : place.first_chunk + i;
      const Steps steps(p, chunk);
      __syncthreads();
      load_tile<C>(p, BACKWARDS ? dout : p.u, place, steps, s.x);
      load_tile<C>(p, p.delta, place, steps, s.delta);
      if (gated) load_tile<C>(p, p.z, place, steps, s.gate);
      __syncthreads();
      step_sizes<C>(p, place, steps, s.bias, s.delta);
      if (gated) ungate<C>(place, steps, s.x, s.gate);
      for (int64_t group = 0; group < groups; ++group) {
        const Seat<C> seat(p, place, group);
        const Coefficient& k = BACKWARDS ? p.C : p.B;
        if (group > 0) __syncthreads();
        load_coefficients<C>(p, k, place, steps, group, s.coefficients);
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
#pragma unroll 4
        for (int j = 0; j < steps.count; ++j) {
          const int t = BACKWARDS ? steps.count - 1 - j : j, at = t * C::ROW + seat.column();
          const Real delta = s.delta[at];
          const Real x = BACKWARDS ? READ_TWICE<C> * s.x[at] : delta * s.x[at];
          if (group == 0) sum += delta;
          Number<C> row[C::S];
          coefficients.at(t, row);
#pragma unroll
          for (int n = 0; n < C::S; ++n) {
            const Number<C> a = rate[n].decay(delta);
            h[n] = BACKWARDS ? a * (h[n] + row[n] * x) : a * h[n] + row[n] * x;
          }
        }
        if (groups > 1 || i == chunks - 1) store_states<C>(h, p, place, seat, part, states);
      }
    }
    const Seat<C> seat(p, place, 0);
    if (seat.taken && seat.lane == 0)
      ((Real*)ends.steps)[part * p.channels + place.channel + seat.channel] = sum;
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
