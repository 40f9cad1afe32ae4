// The forward pass of the chunked scan on CUDA, between its products.
#pragma once

#include "ssd_chunk_scan/cuda_steps.cuh"

namespace fuseport::ssd_chunk_scan::cuda {

template <class Stored, int V>
__global__ void __launch_bounds__(THREADS, BLOCKS) spread_kernel(Problem p, Steps s, Forward f) {
  using Real = cuda::Real<Stored>;
  for_each(p.batches * chunks_of(p) * T * p.heads * (p.width / V), [&](int64_t i) {
    const Place<V> at(p, i);
    const Decays<Real> d(p, s, at.chunk, at.h);
    const Real w = d.remaining(at.t) * d.delta(at.t);
    Real x[V] = {}, weighted[V];
    if (at.there(p)) at.template load<Stored>(p.x, x);
#pragma unroll
    for (int k = 0; k < V; ++k) weighted[k] = x[k] * w;
    put<V>(x, f.x, at.by_heads(p));
    put<V>(weighted, f.weighted, at.by_groups(p));
  });
}

// B or C.
template <class Stored>
__global__ void __launch_bounds__(THREADS, BLOCKS) spread_groups_kernel(Problem p, Strided from, void* to) {
  const int64_t chunks = chunks_of(p);
  for_each(p.batches * chunks * p.groups * T * p.states, [&](int64_t i) {
    const int64_t row = quotient_of(i, p.states), n = i - row * p.states;
    const int64_t t = row % T, group = row / T % p.groups, chunk = row / T / p.groups;
    const int64_t batch = chunk / chunks, step = chunk % chunks * T + t;
    const Stored* const data = (const Stored*)from.data + batch * from.batch + step * from.step +
                               group * from.head + n * from.column;
    ((Real<Stored>*)to)[i] = step < p.length ? to_real(*data) : (Real<Stored>)0;
  });
}

// From what each segment adds to the state, that before each segment, in its place; of a walk back, to
// its cotangent, and that after each. What the last adds is read only if what comes then is asked for.
template <class Real, bool BACK>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    carry_kernel(Problem p, Steps s, Segments segments, Walk walk) {
  const int64_t size = p.width * p.states, chunks = chunks_of(p);
  for_each(p.batches * p.heads * size, [&](int64_t i) {
    const int64_t batch = i / size / p.heads, h = i / size % p.heads;
    Real state = ((const Real*)walk.start)[i];
    for (int64_t k = 0; k < segments.count; ++k) {
      const int64_t segment = BACK ? segments.count - 1 - k : k, first = segment * segments.span;
      const int64_t of_batch = batch * segments.count + segment;
      Real* const at = (Real*)walk.segments + (of_batch * p.heads + h) * size + i % size;
      const bool unread = k + 1 == segments.count && !walk.end;
      const Real added = unread ? (Real)0 : *at;
      *at = state;
      if (unread) break;
      Real kept = 1;
      for (int64_t c = first; c < first + segments.span && c < chunks; ++c)
        kept *= Decays<Real>(p, s, batch * chunks + c, h).outer(T - 1);
      state = kept * state + added;
    }
    if (walk.end) ((Real*)walk.end)[i] = state;
  });
}

// Four steps in a row of each step's.
template <class Real>
__global__ void __launch_bounds__(THREADS, BLOCKS) mix_kernel(Problem p, Steps s, Forward f) {
  constexpr int V = 4, PACKS = T * T / V;
  for_each(p.batches * chunks_of(p) * p.heads * PACKS, [&](int64_t i) {
    const int64_t head = i / PACKS, chunk = quotient_of(head, p.heads);
    const int64_t h = head - chunk * p.heads;
    const int64_t group = chunk * p.groups + quotient_of(h, quotient_of(p.heads, p.groups));
    const int at = (int)(i % PACKS) * V, t = at / T, first = at % T;
    const Decays<Real> d(p, s, chunk, h);
    Real M[V] = {};
    if (first <= t) {
      const auto CB = reals<V, Real>(f.CB, group * T * T + at);
#pragma unroll
      for (int k = 0; k < V; ++k)
        M[k] = first + k > t ? (Real)0 : CB.at[k] * d.between(first + k, t) * d.delta(first + k);
    }
    put<V>(M, f.M, i * V);
  });
}

// y before the gate.
template <class Stored, int V>
FUSEPORT_DEVICE void outputs(const Problem& p, const Steps& s, const Forward& f,
                             const Place<V>& at, Real<Stored>* y) {
  using Real = cuda::Real<Stored>;
  const auto within = reals<V, Real>(f.within, at.by_heads(p));
  const auto across = reals<V, Real>(f.across, at.by_groups(p));
  const Real outer = Decays<Real>(p, s, at.chunk, at.h).outer(at.t);
  const Real* const D = (const Real*)p.D + at.h * p.width + at.q;
  Real x[V];
  at.template load<Stored>(p.x, x);
#pragma unroll
  for (int k = 0; k < V; ++k) y[k] = within.at[k] + outer * across.at[k] + D[k] * x[k];
}

template <class Stored, int V>
__global__ void __launch_bounds__(THREADS, BLOCKS) finish_kernel(Problem p, Steps s, Forward f) {
  using Real = cuda::Real<Stored>;
  for_each(p.batches * chunks_of(p) * T * p.heads * (p.width / V), [&](int64_t i) {
    const Place<V> at(p, i);
    if (!at.there(p)) return;
    Real y[V], z[V];
    outputs<Stored>(p, s, f, at, y);
    if (p.z.data) {
      at.template load<Stored>(p.z, z);
#pragma unroll
      for (int k = 0; k < V; ++k) y[k] *= z[k] * logistic(z[k]);
    }
    store_at_once<V>(y, (Stored*)f.out + at.flat(p));
  });
}

}  // namespace fuseport::ssd_chunk_scan::cuda
