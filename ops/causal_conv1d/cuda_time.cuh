// The convolution on CUDA where steps lie in a row: a thread has packs of V steps of one channel, and
// reads those around a pack too, which its neighbours have brought into the cache.
//
// Packs are aligned in memory, wherever a row begins: with one that is not, the first pack of the row
// begins before it, and the first and the last one are moved number by number.
#pragma once

#include "causal_conv1d/cuda_taps.cuh"

namespace fuseport::causal_conv1d::cuda {

// Packs that hold BEFORE steps.
template <class Stored>
constexpr int AROUND = (BEFORE + VECTOR<Stored> - 1) / VECTOR<Stored>;
constexpr int PACKS = 8;        // of a thread, of one chunk
constexpr int PACKS_AHEAD = 2;  // that are asked for before the first is used

// Where a thread works: a chunk of a row, which has the time of one channel of one batch entry.
template <class Stored>
struct Row {
  static constexpr int V = VECTOR<Stored>;
  int64_t batch, channel, chunk, first, end, stride;  // steps from pack to pack
  bool there;

  FUSEPORT_DEVICE Row(const Problem& p, const Plan& plan, int64_t unit) {
    const int64_t nth = unit * (THREADS / plan.lanes) + (int)threadIdx.x / plan.lanes;
    const int64_t row = quotient_of(nth, plan.chunks);
    chunk = nth - row * plan.chunks;
    batch = quotient_of(row, p.channels);
    channel = row - batch * p.channels;
    there = batch < p.batches;
    const auto begin = (uintptr_t)at<Stored>(p.x, batch, channel, 0) / sizeof(Stored);
    stride = (int64_t)plan.lanes * V;
    const int64_t start = chunk * PACKS * stride - (int64_t)(begin % V);
    first = start + (int)threadIdx.x % plan.lanes * V;
    end = start + PACKS * stride < p.length ? start + PACKS * stride : p.length;
    if (!there) end = first;
  }

  // Steps t and on; out of the row, zeros.
  FUSEPORT_DEVICE Pack<Stored, V> load(const Problem& p, const Sequence& s, int64_t t) const {
    const Stored* from = at<Stored>(s, batch, channel, t);
    if (t >= 0 && t + V <= p.length) return *(const Pack<Stored, V>*)from;
    Pack<Stored, V> pack;
#pragma unroll
    for (int i = 0; i < V; ++i)
      pack.at[i] = t + i >= 0 && t + i < p.length ? from[i] : Stored{};
    return pack;
  }

  // Inputs; before the first step, initial states.
  FUSEPORT_DEVICE Pack<Stored, V> inputs(const Problem& p, int64_t t) const {
    Pack<Stored, V> pack = load(p, p.x, t);
    if (t >= 0) return pack;
    const Stored* states = at<Stored>(p.initial, batch, channel, t + p.width - 1);
#pragma unroll
    for (int i = 0; i < V; ++i)
      if (t + i < 0 && t + i > -p.width) pack.at[i] = states[i * p.initial.time];
    return pack;
  }

  FUSEPORT_DEVICE void store(const Problem& p, const Real<Stored>* from, const MutableSequence& s,
                             int64_t t) const {
    Stored* to = at<Stored>(s, batch, channel, t);
    Pack<Stored, V> pack;
#pragma unroll
    for (int i = 0; i < V; ++i) from_real(from[i], &pack.at[i]);
    if (t >= 0 && t + V <= p.length) {
      *(Pack<Stored, V>*)to = pack;
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i)
        if (t + i >= 0 && t + i < p.length) to[i] = pack.at[i];
    }
  }
};

// What goes into the activation at the last of the T steps from x on.
template <class Stored>
FUSEPORT_DEVICE Real<Stored> filtered_at(const Filter<Stored, 1>& filter, const Real<Stored>* x) {
  Real<Stored> y = filter.bias[0];
#pragma unroll
  for (int lag = BEFORE; lag >= 0; --lag)
    if (lag < filter.width) y += filter.tap[lag][0] * x[BEFORE - lag];
  return y;
}

template <class Stored>
__global__ void __launch_bounds__(THREADS) forward_time_kernel(Problem p, Plan plan, Forward f) {
  constexpr int V = VECTOR<Stored>, A = AROUND<Stored>;
  const int64_t rows = THREADS / plan.lanes;
  const int64_t units = (p.batches * p.channels * plan.chunks + rows - 1) / rows;
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const Row<Stored> row(p, plan, unit);
    if (!row.there) continue;
    const Filter<Stored, 1> filter(p, row.channel);
    for (int64_t first = row.first; first < row.end; first += PACKS_AHEAD * row.stride) {
      Pack<Stored, V> packs[PACKS_AHEAD][A + 1];
#pragma unroll
      for (int j = 0; j < PACKS_AHEAD; ++j)
        if (const int64_t t = first + j * row.stride; t < row.end)
#pragma unroll
          for (int a = 0; a <= A; ++a) packs[j][a] = row.inputs(p, t + (a - A) * V);
#pragma unroll
      for (int j = 0; j < PACKS_AHEAD; ++j) {
        const int64_t t = first + j * row.stride;
        if (t >= row.end) break;
        Real<Stored> x[(A + 1) * V], y[V];
#pragma unroll
        for (int a = 0; a <= A; ++a) to_reals(packs[j][a], x + a * V);
#pragma unroll
        for (int i = 0; i < V; ++i) {
          y[i] = filtered_at(filter, x + A * V - BEFORE + i);
          if (p.silu) y[i] *= logistic_of<Stored>(y[i]);
        }
        row.store(p, y, f.out, t);
      }
    }
    if (row.chunk == 0 && (int)threadIdx.x % plan.lanes == 0)
      write_final_states<Stored>(p, f, row.batch, row.channel);
  }
}

// The lanes of a row add up their sums, and its first one writes them.
template <class Stored>
__global__ void __launch_bounds__(THREADS)
    backward_time_kernel(Problem p, Plan plan, Gradients k, Real<Stored>* parts) {
  using Number = Real<Stored>;
  constexpr int V = VECTOR<Stored>, A = AROUND<Stored>, COUNT = V + BEFORE;
  const int64_t rows = THREADS / plan.lanes;
  const int64_t units = (p.batches * p.channels * plan.chunks + rows - 1) / rows;
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const Row<Stored> row(p, plan, unit);
    const Filter<Stored, 1> filter(p, row.channel);
    Number sums[SUMS] = {};
    for (int64_t t = row.first; t < row.end; t += row.stride) {
      Number x[(2 * A + 1) * V], dout[(A + 1) * V], dy[COUNT], dx[V];
#pragma unroll
      for (int a = 0; a <= 2 * A; ++a) to_reals(row.inputs(p, t + (a - A) * V), x + a * V);
#pragma unroll
      for (int a = 0; a <= A; ++a) to_reals(row.load(p, k.dout, t + a * V), dout + a * V);
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        dy[i] = dout[i];
        if (p.silu)
          dy[i] = before_silu<Stored>(dout[i], filtered_at(filter, x + A * V - BEFORE + i));
        if (t + i < 0 || t + i >= p.length) dy[i] = 0;
        if (i >= V || t + i < 0 || t + i >= p.length) continue;
#pragma unroll
        for (int lag = 0; lag < T; ++lag)
          if (lag < filter.width) sums[lag] += dy[i] * x[A * V + i - lag];
        sums[T] += dy[i];
      }
#pragma unroll
      for (int i = 0; i < V; ++i) {
        dx[i] = 0;
#pragma unroll
        for (int lag = 0; lag < T; ++lag)
          if (lag < filter.width) dx[i] += filter.tap[lag][0] * dy[i + lag];
      }
      row.store(p, dx, k.dx, t);
    }
    for (int mask = plan.lanes / 2; mask > 0; mask /= 2)
#pragma unroll
      for (int s = 0; s < SUMS; ++s) sums[s] += shuffled(sums[s], mask);
    if (!row.there || (int)threadIdx.x % plan.lanes > 0) continue;
    const int64_t part = row.batch * plan.chunks + row.chunk;
#pragma unroll
    for (int s = 0; s < SUMS; ++s)
      parts[(part * SUMS + s) * p.channels + row.channel] = sums[s];
  }
}

}  // namespace fuseport::causal_conv1d::cuda
