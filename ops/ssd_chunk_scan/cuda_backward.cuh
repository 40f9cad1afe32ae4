// The backward pass of the chunked scan on CUDA, between its products; names are those of reference.py.
#pragma once

#include "ssd_chunk_scan/cuda_forward.cuh"

namespace fuseport::ssd_chunk_scan::cuda {

template <class Stored, int V>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    spread_back_kernel(Problem p, Steps s, Backward b) {
  using Real = cuda::Real<Stored>;
  for_each(p.batches * chunks_of(p) * T * p.heads * (p.width / V), [&](int64_t i) {
    const Place<V> at(p, i);
    Real dy[V] = {}, dy_outer[V];
    if (at.there(p)) at.template load<Stored>(b.dout, dy);
    if (at.there(p) && p.z.data) {
      Real y[V], z[V], dz[V];
      outputs<Stored>(p, s, b.forward, at, y);
      at.template load<Stored>(p.z, z);
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const Real share = logistic(z[k]);
        dz[k] = dy[k] * y[k] * share * (1 + z[k] * (1 - share));
        dy[k] *= z[k] * share;
      }
      store_at_once<V>(dz, (Stored*)b.dz + at.flat(p));
    }
    const Real outer = Decays<Real>(p, s, at.chunk, at.h).outer(at.t);
#pragma unroll
    for (int k = 0; k < V; ++k) dy_outer[k] = outer * dy[k];
    put<V>(dy, b.dy, at.by_heads(p));
    put<V>(dy_outer, b.dy_outer, at.by_groups(p));
  });
}

// dD of each chunk.
template <class Real>
__global__ void __launch_bounds__(THREADS, BLOCKS) skip_kernel(Problem p, Backward b) {
  for_each(p.batches * chunks_of(p) * p.heads * p.width, [&](int64_t i) {
    const int64_t first = i / p.width * T * p.width + i % p.width;
    double sum = 0;
    for (int t = 0; t < T; ++t) {
      const int64_t at = first + t * p.width;
      sum += (double)((const Real*)b.dy)[at] * (double)((const Real*)b.forward.x)[at];
    }
    b.dD[i] = sum;
  });
}

constexpr int ROW = T + 1;  // of a tile in shared memory: rows and columns meet each bank once

// A block has some heads of a group of one chunk. It writes M over dM, the sum of their Q, and what
// K is in rows and columns.
template <class Real>
__global__ void __launch_bounds__(THREADS, BLOCKS) mix_back_kernel(Problem p, Steps s, Backward b) {
  FUSEPORT_SHARED(memory);
  Real* const K = (Real*)memory;
  Real* const delta = K + T * ROW;
  constexpr int EACH = T * T / THREADS;
  const int64_t heads = p.heads / p.groups, parts = (heads + HEADS - 1) / HEADS;
  const int64_t units = p.batches * chunks_of(p) * p.groups * parts;
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int64_t of_group = unit / parts, first = unit % parts * HEADS;
    const int64_t chunk = of_group / p.groups, group = of_group % p.groups;
    const Real* const CB = (const Real*)b.forward.CB + of_group * T * T;
    Real Q[EACH] = {};
    for (int64_t in_group = first; in_group < first + HEADS && in_group < heads; ++in_group) {
      const int64_t h = group * heads + in_group, head = chunk * p.heads + h;
      const Decays<Real> d(p, s, chunk, h);
      __syncthreads();
      if (threadIdx.x < T) delta[threadIdx.x] = d.delta((int)threadIdx.x);
      __syncthreads();
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        const int at = (int)threadIdx.x + j * THREADS, t = at / T, from = at % T;
        Real* const dM = (Real*)b.dM + head * T * T + at;
        Real product = 0, mixed = 0;
        if (from <= t) {
          const Real L = d.between(from, t);
          product = *dM * CB[at] * L;
          mixed = CB[at] * L * delta[from];
          Q[j] += *dM * L * delta[from];
        }
        K[t * ROW + from] = product;
        *dM = mixed;
      }
      __syncthreads();
      if (threadIdx.x < T) {
        const int t = (int)threadIdx.x;
        double row = 0, column = 0;
        for (int k = 0; k < T; ++k) {
          row += k < t ? (double)K[t * ROW + k] * (double)delta[k] : 0;
          column += k > t ? (double)K[k * ROW + t] : 0;
        }
        b.row_excess[head * T + t] = row - (double)delta[t] * column;
        ((Real*)b.column_sums)[head * T + t] = (Real)(column + (double)K[t * ROW + t]);
      }
    }
#pragma unroll
    for (int j = 0; j < EACH; ++j)
      ((Real*)b.Q)[unit * T * T + (int)threadIdx.x + j * THREADS] = Q[j];
  }
}

template <class Real>
FUSEPORT_DEVICE Real over_warp(Real x) {
  sum_over_lanes<WARP, 1, 1>(&x);
  return x;
}

constexpr int STEPS_SCRATCH = 8;  // doubles

// Of this lane and all after it.
FUSEPORT_DEVICE double sum_from_lane(double x) {
  const int lane = (int)threadIdx.x % WARP;
#pragma unroll
  for (int i = 1; i < WARP; i *= 2) {
    const double after = __shfl_sync(0xffffffffu, x, (lane + i) % WARP);
    if (lane + i < WARP) x += after;
  }
  return x;
}

// Gradients of δ, A and the bias, or of given decays, of one head of one chunk. Thread t < T of a block gives the excess
// of K's row t, the sum of its column, exp(c_t)·dy_tᵀ h C_t, dw_t and dt with its bias; all give Σ g h,
// and which step of which batch entry the chunk begins with.
template <class Stored>
FUSEPORT_DEVICE void finish_steps(const Problem& p, const Backward& b,
                                  const Decays<Real<Stored>>& d, int64_t batch, int64_t first,
                                  int64_t head, int64_t h, double excess, Real<Stored> column,
                                  Real<Stored> read, Real<Stored> dw, double dot,
                                  Real<Stored> raw, double* scratch) {
  using Real = cuda::Real<Stored>;
  static_assert(T == 2 * WARP);
  const int t = (int)threadIdx.x;
  const int64_t step = first + t;
  double *const of_warps = scratch, *const sums = scratch + 4;
  Real remaining = 0;
  double sum = 0;
  if (t < T) {
    remaining = d.remaining(t);
    const Real raised = remaining * d.delta(t) * dw;
    const double all = over_warp((double)raised);
    sum = sum_from_lane(excess + (double)read - (double)raised);  // of dc, from t on
    if (t % WARP == 0) of_warps[t / WARP * 2] = sum;
    if (t % WARP == 0) of_warps[t / WARP * 2 + 1] = all;
  }
  __syncthreads();
  if (t < T) {
    if (t < WARP) sum += of_warps[2];
    sum += dot * (double)d.outer(T - 1) + (of_warps[1] + of_warps[3]);  // of c_T, beside dc
    Real gradient = 0;
    const int64_t at = (batch * p.length + step) * p.heads + h;
    if (step < p.length && p.log_decay.data) {
      ((Real*)b.dlog_decay)[at] = (Real)sum;
    } else if (step < p.length) {
      gradient = column + remaining * dw + ((const Real*)p.A)[h] * (Real)sum;
      const Real delta = smooth(p, raw);
      const Real low = ((const Real*)p.dt_limit)[0], high = ((const Real*)p.dt_limit)[1];
      if (!(delta >= low && delta <= high)) gradient = 0;
      if (p.softplus && !(raw > 20)) gradient *= logistic(raw);
      from_real(gradient, (Stored*)b.ddt + at);
    }
    const double dA = over_warp(sum * (double)d.delta(t)), dbias = over_warp((double)gradient);
    if (t % WARP == 0) sums[t / WARP * 2] = dA;
    if (t % WARP == 0) sums[t / WARP * 2 + 1] = dbias;
  }
  __syncthreads();
  if (t == 0) b.dA[head] = sums[0] + sums[2];
  if (t == 0) b.ddt_bias[head] = sums[1] + sums[3];
}

// A block has one head of one chunk: sums for the gradients of its steps.
template <class Stored>
__global__ void __launch_bounds__(THREADS, BLOCKS) steps_back_kernel(Problem p, Steps s, Backward b) {
  using Real = cuda::Real<Stored>;
  constexpr int WARPS = THREADS / WARP;
  FUSEPORT_SHARED(memory);
  double *const parts = (double*)memory, *const scratch = parts + WARPS;  // of g·h, by warps
  Real *const read = (Real*)(scratch + STEPS_SCRATCH), *const dw = read + T;
  const int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
  const int64_t size = p.width * p.states;
  for (int64_t head = blockIdx.x; head < p.batches * chunks_of(p) * p.heads; head += gridDim.x) {
    const int64_t chunk = head / p.heads, h = head % p.heads;
    __syncthreads();
    for (int t = warp; t < T; t += WARPS) {
      Real of_read = 0, of_x = 0;
      for (int64_t q = lane; q < p.width; q += WARP) {
        const Place<1> at(p, ((chunk * T + t) * p.heads + h) * p.width + q);
        const int64_t by_groups = at.by_groups(p);
        of_read += ((const Real*)b.dy_outer)[by_groups] *
                   ((const Real*)b.forward.across)[by_groups];
        of_x += ((const Real*)b.forward.x)[at.by_heads(p)] * ((const Real*)b.gB)[by_groups];
      }
      of_read = over_warp(of_read);
      of_x = over_warp(of_x);
      if (lane == 0) read[t] = of_read;
      if (lane == 0) dw[t] = of_x;
    }
    double dot = 0;
    for (int64_t i = threadIdx.x; i < size; i += THREADS)
      dot += (double)(((const Real*)b.dstates)[head * size + i] *
                      ((const Real*)b.forward.states)[head * size + i]);
    dot = over_warp(dot);
    if (lane == 0) parts[warp] = dot;
    __syncthreads();
    dot = 0;
    for (int i = 0; i < WARPS; ++i) dot += parts[i];
    const int t = (int)threadIdx.x % T;
    const int64_t batch = chunk / chunks_of(p), first = chunk % chunks_of(p) * T, at = head * T + t;
    const Real raw = first + t < p.length ? raw_step<Stored>(p, batch, first + t, h) : (Real)0;
    finish_steps<Stored>(p, b, Decays<Real>(p, s, chunk, h), batch, first, head, h,
                         b.row_excess[at], ((const Real*)b.column_sums)[at], read[t], dw[t], dot,
                         raw, scratch);
  }
}

template <class Stored, int V>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    finish_back_kernel(Problem p, Steps s, Backward b) {
  using Real = cuda::Real<Stored>;
  for_each(p.batches * chunks_of(p) * T * p.heads * (p.width / V), [&](int64_t i) {
    const Place<V> at(p, i);
    if (!at.there(p)) return;
    const Decays<Real> d(p, s, at.chunk, at.h);
    const auto within = reals<V, Real>(b.dx_within, at.by_heads(p));
    const auto dy = reals<V, Real>(b.dy, at.by_heads(p));
    const auto gB = reals<V, Real>(b.gB, at.by_groups(p));
    const Real w = d.remaining(at.t) * d.delta(at.t);
    const Real* const D = (const Real*)p.D + at.h * p.width + at.q;
    Real dx[V];
#pragma unroll
    for (int k = 0; k < V; ++k) dx[k] = within.at[k] + w * gB.at[k] + D[k] * dy.at[k];
    store_at_once<V>(dx, (Stored*)b.dx + at.flat(p));
  });
}

template <class Real>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    sum_of_Q_kernel(Problem p, Backward b, void* to) {
  constexpr int64_t SIZE = T * T;
  const int64_t heads = p.heads / p.groups, parts = (heads + HEADS - 1) / HEADS;
  for_each(p.batches * chunks_of(p) * p.groups * SIZE, [&](int64_t i) {
    const Real* const from = (const Real*)b.Q + i / SIZE * parts * SIZE + i % SIZE;
    Real sum = 0;
    for (int64_t part = 0; part < parts; ++part) sum += from[part * SIZE];
    ((Real*)to)[i] = sum;
  });
}

template <class Stored>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    join_kernel(Problem p, const void* of_chunks, int64_t parts, void* to) {
  using Real = cuda::Real<Stored>;
  const int64_t size = T * p.states, chunks = chunks_of(p);
  for_each(p.batches * p.length * p.groups * p.states, [&](int64_t i) {
    const int64_t row = quotient_of(i, p.states), n = i - row * p.states;
    const int64_t at = quotient_of(row, p.groups), group = row - at * p.groups;
    const int64_t batch = quotient_of(at, p.length), step = at - batch * p.length;
    const int64_t of_group = (batch * chunks + step / T) * p.groups + group;
    const Real* const from =
        (const Real*)of_chunks + of_group * parts * size + step % T * p.states + n;
    Real sum = 0;
    for (int64_t part = 0; part < parts; ++part) sum += from[part * size];
    from_real(sum, (Stored*)to + i);
  });
}

template <class Real>
__global__ void __launch_bounds__(PART_THREADS)
    sum_of_chunks_kernel(const double* from, int64_t chunks, int64_t count, void* to) {
  FUSEPORT_SHARED(memory);
  sum_parts(from, chunks, count, (double*)memory,
            [&](int64_t i, double sum) { ((Real*)to)[i] = (Real)sum; });
}

}  // namespace fuseport::ssd_chunk_scan::cuda
