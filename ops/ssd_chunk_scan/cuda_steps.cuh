// What the kernels of the chunked scan share on CUDA: places in tensors, step sizes and decays.
#pragma once

#include "native/cuda_vectors.cuh"
#include "ssd_chunk_scan/cuda.hpp"

namespace fuseport::ssd_chunk_scan::cuda {

using namespace fuseport::cuda;

constexpr int THREADS = 256, WARP = 32, T = (int)CHUNK;
constexpr int BLOCKS = 2;  // of a multiprocessor, at least: with more, registers would be spilled

FUSEPORT_DEVICE int64_t chunks_of(const Problem& p) { return (p.length + T - 1) / T; }

template <class Real>
FUSEPORT_DEVICE Real exp_of_any(Real x) {
  const Real e = exp_of_minus_abs(x), inverse = quotient((Real)1, e);
  return x > 0 ? inverse : e;
}

// Calls work(i) for i in [0, count), over all threads of a grid.
template <class Work>
FUSEPORT_DEVICE void for_each(int64_t count, const Work& work) {
  for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < count;
       i += gridDim.x * (int64_t)THREADS)
    work(i);
}

// V numbers in a row of x, or of what is like it: columns from q on of head h in step t of a chunk,
// which is counted over all batch entries.
template <int V>
struct Place {
  int64_t chunk, h, q, batch, step;
  int t;

  // Number i of such packs of (b, c, T, H, P).
  FUSEPORT_DEVICE Place(const Problem& p, int64_t i) {
    const int64_t packs = p.width / V, rest = quotient_of(i, packs);
    q = (i - rest * packs) * V;
    const int64_t row = quotient_of(rest, p.heads), chunks = chunks_of(p);
    h = rest - row * p.heads;
    chunk = row / T;
    t = (int)(row % T);
    batch = quotient_of(chunk, chunks);
    step = (chunk - batch * chunks) * T + t;
  }
  FUSEPORT_DEVICE bool there(const Problem& p) const { return step < p.length; }
  FUSEPORT_DEVICE int64_t by_heads(const Problem& p) const {
    return ((chunk * p.heads + h) * T + t) * p.width + q;
  }
  FUSEPORT_DEVICE int64_t by_groups(const Problem& p) const {
    const int64_t heads = quotient_of(p.heads, p.groups), group = quotient_of(h, heads);
    return (((chunk * p.groups + group) * T + t) * heads + h - group * heads) * p.width + q;
  }
  // In (b, l, H, P), contiguous.
  FUSEPORT_DEVICE int64_t flat(const Problem& p) const {
    return ((batch * p.length + step) * p.heads + h) * p.width + q;
  }
  template <class Stored>
  FUSEPORT_DEVICE void load(const Strided& s, Real<Stored>* to) const {
    const Stored* const at =
        (const Stored*)s.data + batch * s.batch + step * s.step + h * s.head + q * s.column;
    to_reals<V>(load_pack<V>(at, s.column, V, V > 1), to);
  }
};

template <int V, class Real>
FUSEPORT_DEVICE Pack<Real, V> reals(const void* from, int64_t at) {
  return *(const Pack<Real, V>*)((const Real*)from + at);
}

template <int V, class Real>
FUSEPORT_DEVICE void put(const Real* from, void* to, int64_t at) {
  Pack<Real, V> pack;
#pragma unroll
  for (int i = 0; i < V; ++i) pack.at[i] = from[i];
  *(Pack<Real, V>*)((Real*)to + at) = pack;
}

// The factors of a chunk's steps for one head.
template <class Real>
struct Decays {
  const Real *step, *total, *rest;
  const int32_t* begin;
  int64_t heads;

  FUSEPORT_DEVICE Decays(const Problem& p, const Steps& s, int64_t chunk, int64_t h)
      : step((const Real*)s.step + chunk * T * p.heads + h),
        total((const Real*)s.total + chunk * T * p.heads + h),
        rest((const Real*)s.rest + chunk * T * p.heads + h),
        begin(s.begin + chunk * T),
        heads(p.heads) {}

  FUSEPORT_DEVICE Decays(const Real* step, const Real* total, const Real* rest,
                         const int32_t* begin)
      : step(step), total(total), rest(rest), begin(begin), heads(1) {}

  FUSEPORT_DEVICE Real delta(int t) const { return step[t * heads]; }
  // L of reference.py, without what is later than t; where it is 0 it is computed as well, since lanes
  // of a warp differ in that.
  FUSEPORT_DEVICE Real between(int s, int t) const {
    const int64_t to = t * heads, from = s * heads;
    const Real L = exp_of_any((total[to] - total[from]) + (rest[to] - rest[from]));
    return s > t || begin[t] > s ? (Real)0 : L;
  }
  // exp(c_t), of the state before the chunk.
  FUSEPORT_DEVICE Real outer(int t) const {
    return begin[t] < 0 ? exp_of_any(total[t * heads]) : (Real)0;
  }
  // exp(c_T - c_s).
  FUSEPORT_DEVICE Real remaining(int s) const { return between(s, T - 1); }
};

// δ without its bounds.
template <class Real>
FUSEPORT_DEVICE Real smooth(const Problem& p, Real raw) {
  return p.softplus ? softplus(raw) : raw;
}

// dt with its bias; 0 of given decays.
template <class Stored>
FUSEPORT_DEVICE Real<Stored> raw_step(const Problem& p, int64_t batch, int64_t step, int64_t h) {
  if (p.log_decay.data) return 0;
  const int64_t at = batch * p.dt.batch + step * p.dt.step + h * p.dt.head;
  return to_real(((const Stored*)p.dt.data)[at]) + ((const Real<Stored>*)p.dt_bias)[h];
}

// δ and δ·A; of given decays, 1 and what is given.
template <class Real>
struct Exponent {
  Real delta;
  double value;
};

template <class Stored>
FUSEPORT_DEVICE Exponent<Real<Stored>> exponent(const Problem& p, int64_t batch, int64_t step,
                                                int64_t h) {
  using Real = cuda::Real<Stored>;
  if (p.log_decay.data) {
    const Strided& from = p.log_decay;
    const int64_t at = batch * from.batch + step * from.step + h * from.head;
    const double value = (double)((const Real*)from.data)[at];
    return {(Real)1, value < LEAST_LOG_DECAY ? LEAST_LOG_DECAY : value};
  }
  const Real low = ((const Real*)p.dt_limit)[0], high = ((const Real*)p.dt_limit)[1];
  Real delta = smooth(p, raw_step<Stored>(p, batch, step, h));
  delta = delta < low ? low : delta;
  delta = delta > high ? high : delta;
  return {delta, (double)delta * (double)((const Real*)p.A)[h]};
}

template <class Stored>
__global__ void __launch_bounds__(THREADS, BLOCKS) steps_kernel(Problem p, Steps s) {
  using Real = cuda::Real<Stored>;
  const int64_t chunks = chunks_of(p);
  for_each(p.batches * chunks * p.heads, [&](int64_t i) {
    const int64_t chunk = i / p.heads, h = i % p.heads, batch = chunk / chunks;
    double total = 0;
    int32_t begin = -1;
#pragma unroll 8
    for (int t = 0; t < T; ++t) {
      const int64_t step = chunk % chunks * T + t, at = (chunk * T + t) * p.heads + h;
      Exponent<Real> of{};
      if (step < p.length) of = exponent<Stored>(p, batch, step, h);
      total += of.value;
      const Real rest = (Real)(total - (double)(Real)total);
      ((Real*)s.step)[at] = of.delta;
      ((Real*)s.total)[at] = (Real)total;
      ((Real*)s.rest)[at] = rest == rest ? rest : (Real)0;
      if (h > 0) continue;
      const int32_t* const numbers = p.seq_idx + batch * p.length;
      if (step > 0 && step < p.length && numbers[step] != numbers[step - 1]) begin = t;
      s.begin[chunk * T + t] = begin;
    }
  });
}

}  // namespace fuseport::ssd_chunk_scan::cuda
