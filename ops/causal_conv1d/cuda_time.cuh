// The convolution on CUDA where steps lie in a row: a thread has packs of V steps of one channel, all
// asked for at once, and gets the steps around a pack from its neighbours' registers.
//
// Packs are aligned in memory, wherever a row begins: with one that is not, the first pack of the row
// begins before it, and the first and the last one are moved number by number.
#pragma once

#include "causal_conv1d/cuda_taps.cuh"

namespace fuseport::causal_conv1d::cuda {

// Packs that hold BEFORE steps.
template <class Stored>
constexpr int AROUND = (BEFORE + VECTOR<Stored> - 1) / VECTOR<Stored>;
constexpr int PACKS = 4;  // of a thread, of one chunk, at most

// Where a thread works: a chunk of a row, which has the time of one channel of one batch entry. Steps
// are counted from the chunk's start, which is in the row but for a first pack that is not aligned.
template <class Stored>
struct Row {
  static constexpr int V = VECTOR<Stored>;
  int64_t batch, channel, chunk, start;
  int stride;     // steps from a thread's pack to its next one
  int low, high;  // the row's own steps are from `low` on, up to `high`, or are more than are needed
  int lane, lanes;
  bool there;

  FUSEPORT_DEVICE Row(const Problem& p, const Plan& plan, int64_t unit) {
    const int64_t nth = unit * (THREADS / plan.lanes) + (int)threadIdx.x / plan.lanes;
    const int64_t row = plan.chunks == 1 ? nth : quotient_of(nth, plan.chunks);
    chunk = nth - row * plan.chunks;
    batch = quotient_of(row, p.channels);
    channel = row - batch * p.channels;
    there = batch < p.batches;
    lanes = plan.lanes;
    lane = (int)threadIdx.x & (lanes - 1);  // they are a power of two
    stride = lanes * V;
    const auto begin = (uintptr_t)at<Stored>(p.x, batch, channel, 0) / sizeof(Stored);
    const int most = (PACKS + 1) * stride;
    start = chunk * PACKS * stride - (int64_t)(begin % V);
    low = start > most ? -most : (int)-start;
    high = !there ? low : p.length - start < most ? (int)(p.length - start) : most;
  }

  // Of the j-th pack, its first step; and whether a pack from a step on is of the chunk.
  FUSEPORT_DEVICE int step(int j) const { return j * stride + lane * V; }
  FUSEPORT_DEVICE bool in_chunk(int step) const { return step < high && step < PACKS * stride; }
  FUSEPORT_DEVICE bool in_row(int step) const { return step >= low && step < high; }
  FUSEPORT_DEVICE bool whole(int step) const { return step >= low && step + V <= high; }

  // Steps from `step` on; out of the row, zeros.
  FUSEPORT_DEVICE Pack<Stored, V> load(const Sequence& s, int step) const {
    const Stored* from = at<Stored>(s, batch, channel, start) + step;
    if (whole(step)) return *(const Pack<Stored, V>*)from;
    Pack<Stored, V> pack;
#pragma unroll
    for (int i = 0; i < V; ++i) pack.at[i] = in_row(step + i) ? from[i] : Stored{};
    return pack;
  }

  // Inputs; before the first step, initial states.
  FUSEPORT_DEVICE Pack<Stored, V> inputs(const Problem& p, int step) const {
    Pack<Stored, V> pack = load(p.x, step);
    if (step >= low) return pack;
    const int halo = (int)p.width - 1, state = step - low + halo;
    const Stored* states = at<Stored>(p.initial, batch, channel, state);
#pragma unroll
    for (int i = 0; i < V; ++i)
      if (state + i >= 0 && state + i < halo) pack.at[i] = states[i * p.initial.time];
    return pack;
  }

  FUSEPORT_DEVICE void store(const Real<Stored>* from, const MutableSequence& s, int step) const {
    Stored* to = at<Stored>(s, batch, channel, start) + step;
    Pack<Stored, V> pack;
#pragma unroll
    for (int i = 0; i < V; ++i) from_real(from[i], &pack.at[i]);
    if (whole(step)) {
      *(Pack<Stored, V>*)to = pack;
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i)
        if (in_row(step + i)) to[i] = pack.at[i];
    }
  }
};

// What goes into the activation at the last of the T steps from x on.
template <class Stored, bool FULL>
FUSEPORT_DEVICE Real<Stored> filtered_at(const Filter<Stored, 1, FULL>& filter,
                                         const Real<Stored>* x) {
  Real<Stored> y = filter.bias[0];
#pragma unroll
  for (int lag = BEFORE; lag >= 0; --lag)
    if (filter.has(lag)) y += filter.tap[lag][0] * x[BEFORE - lag];
  return y;
}

// Of a row of numbers, V of each lane, the `away`-th before a lane's first one. Its neighbour has it,
// or, of the first lanes, the last ones, in the pack before: `pack` and `previous` are of a lane.
template <class Stored>
FUSEPORT_DEVICE Real<Stored> number_before(const Row<Stored>& row, int away,
                                           const Real<Stored>* pack,
                                           const Real<Stored>* previous) {
  constexpr int V = VECTOR<Stored>;
  const int lanes = (away + V - 1) / V, i = lanes * V - away;
  const Real<Stored> mine = row.lane + lanes >= row.lanes ? previous[i] : pack[i];
  const int self = (int)threadIdx.x % 32, first = self - row.lane;
  return __shfl_sync(0xffffffffu, mine, first + ((row.lane - lanes) & (row.lanes - 1)));
}

// The same, from a lane's last number on: `next` is of the pack after.
template <class Stored>
FUSEPORT_DEVICE Real<Stored> number_after(const Row<Stored>& row, int away,
                                          const Real<Stored>* pack, const Real<Stored>* next) {
  constexpr int V = VECTOR<Stored>;
  const int lanes = (away + V - 1) / V, i = (away - 1) % V;
  const Real<Stored> mine = row.lane < lanes ? next[i] : pack[i];
  const int self = (int)threadIdx.x % 32, first = self - row.lane;
  return __shfl_sync(0xffffffffu, mine, first + ((row.lane + lanes) & (row.lanes - 1)));
}

// The inputs of a thread's packs, and of what lies before its row's first one.
template <class Stored>
struct Inputs {
  static constexpr int V = VECTOR<Stored>;
  Pack<Stored, V> packs[PACKS + 2] = {};  // the first is before the chunk, the last after it

  // `after`: whether the steps after the chunk are read, too.
  FUSEPORT_DEVICE Inputs(const Problem& p, const Row<Stored>& row, bool after) {
    if (row.there && row.lane + AROUND<Stored> >= row.lanes)
      packs[0] = row.inputs(p, row.step(-1));
#pragma unroll
    for (int j = 0; j < PACKS; ++j)
      if (row.in_chunk(row.step(j)))
        packs[j + 1] = j ? row.load(p.x, row.step(j)) : row.inputs(p, row.step(j));
    if (after && row.lane < AROUND<Stored> && row.in_row(row.step(PACKS)))
      packs[PACKS + 1] = row.load(p.x, row.step(PACKS));
  }

  // The j-th pack, and BEFORE steps before it.
  FUSEPORT_DEVICE void around(const Row<Stored>& row, int j,
                              Real<Stored> (&x)[BEFORE + V]) const {
    Real<Stored> previous[V];
    to_reals(packs[j], previous);
    to_reals(packs[j + 1], x + BEFORE);
#pragma unroll
    for (int away = 1; away <= BEFORE; ++away)
      x[BEFORE - away] = number_before(row, away, x + BEFORE, previous);
  }
};

template <class Stored, bool FULL>
__global__ void __launch_bounds__(THREADS, sizeof(Stored) == 8 ? 1 : 6)
    forward_time_kernel(Problem p, Plan plan, Forward f) {
  constexpr int V = VECTOR<Stored>;
  const int64_t rows = THREADS / plan.lanes;
  const int64_t units = (p.batches * p.channels * plan.chunks + rows - 1) / rows;
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const Row<Stored> row(p, plan, unit);
    const Inputs<Stored> inputs(p, row, false);
    const Filter<Stored, 1, FULL> filter(p, row.there ? row.channel : 0);
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
      if (j >= plan.packs) break;
      Real<Stored> x[BEFORE + V], y[V];
      inputs.around(row, j, x);
      if (!row.in_chunk(row.step(j))) continue;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        y[i] = filtered_at(filter, x + i);
        if (p.silu) y[i] *= logistic_of<Stored>(y[i]);
      }
      row.store(y, f.out, row.step(j));
    }
    // Last, for it waits for what it writes.
    if (row.there && row.chunk == 0 && row.lane < p.width - 1)
      write_final_state<Stored>(p, f, row.batch, row.channel, row.lane);
  }
}

// Adds the cotangents of final states to those of V inputs from a step on, which are in them.
template <class Stored>
FUSEPORT_DEVICE void add_final(const Problem& p, const Gradients& k, const Row<Stored>& row,
                               int step, Real<Stored>* dx) {
  const int64_t state = row.start + step - (p.length - (p.width - 1));
  if (state + VECTOR<Stored> <= 0) return;
#pragma unroll
  for (int i = 0; i < VECTOR<Stored>; ++i)
    if (state + i >= 0 && row.in_row(step + i))
      dx[i] += to_real(*at<Stored>(k.dfinal, row.batch, row.channel, state + i));
}

// The gradients of initial states, from the cotangents of the steps from the chunk's start on.
template <class Stored, bool FULL>
FUSEPORT_DEVICE void write_initial(const Problem& p, const Gradients& k, const Row<Stored>& row,
                                   const Filter<Stored, 1, FULL>& filter,
                                   const Real<Stored> (&dy)[VECTOR<Stored> + BEFORE]) {
  const int halo = (int)p.width - 1;
  Stored* const to = (Stored*)k.dinitial + (row.batch * p.channels + row.channel) * halo;
#pragma unroll
  for (int state = 0; state < BEFORE; ++state) {
    if (state >= halo) break;
    Real<Stored> dx = 0;
#pragma unroll
    for (int i = 0; i < VECTOR<Stored> + BEFORE; ++i) {
      const int lag = halo - state + i - row.low;
#pragma unroll
      for (int tap = 0; tap < T; ++tap)
        if (i >= row.low && lag == tap && filter.has(tap)) dx += filter.tap[tap][0] * dy[i];
    }
    if (const int64_t in_final = state - p.length; in_final >= 0)
      dx += to_real(*at<Stored>(k.dfinal, row.batch, row.channel, in_final));
    from_real(dx, to + state);
  }
}

// The lanes of a row add up their sums, and its first one writes them. Packs are gone through from
// the last one, after the chunk, of which only the cotangents are wanted.
template <class Stored, bool FULL>
__global__ void __launch_bounds__(THREADS, 4)
    backward_time_kernel(Problem p, Plan plan, Gradients k, Real<Stored>* parts) {
  using Number = Real<Stored>;
  constexpr int V = VECTOR<Stored>;
  const int64_t rows = THREADS / plan.lanes;
  const int64_t units = (p.batches * p.channels * plan.chunks + rows - 1) / rows;
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const Row<Stored> row(p, plan, unit);
    const Inputs<Stored> inputs(p, row, true);
    Pack<Stored, V> cotangents[PACKS + 1] = {};
#pragma unroll
    for (int j = 0; j <= PACKS; ++j)
      if (j < PACKS ? row.in_chunk(row.step(j))
                    : row.lane < AROUND<Stored> && row.in_row(row.step(j)))
        cotangents[j] = row.load(k.dout, row.step(j));
    const Filter<Stored, 1, FULL> filter(p, row.there ? row.channel : 0);
    Number sums[SUMS] = {}, next[V] = {};
#pragma unroll
    for (int j = PACKS; j >= 0; --j) {
      if (j > plan.packs) continue;
      const int step = row.step(j);
      Number x[BEFORE + V], dy[V + BEFORE], dx[V];
      inputs.around(row, j, x);
      to_reals(cotangents[j], dy);
      if (p.silu)
#pragma unroll
        for (int i = 0; i < V; ++i)
          dy[i] = before_silu<Stored>(dy[i], filtered_at(filter, x + i));
      const bool whole = row.whole(step);
      if (!whole)
#pragma unroll
        for (int i = 0; i < V; ++i)
          if (!row.in_row(step + i)) dy[i] = 0;
#pragma unroll
      for (int away = 1; away <= BEFORE; ++away)
        dy[V - 1 + away] = number_after(row, away, dy, next);
#pragma unroll
      for (int i = 0; i < V; ++i) next[i] = dy[i];
      if (j == 0 && row.there && row.chunk == 0 && row.lane == 0)
        write_initial(p, k, row, filter, dy);
      if (j == PACKS || !row.in_chunk(step)) continue;
      Number of_pack[SUMS] = {};  // apart: sums of sums are rounded less
#pragma unroll
      for (int i = 0; i < V; ++i) {
        dx[i] = 0;
#pragma unroll
        for (int lag = 0; lag < T; ++lag)
          if (filter.has(lag)) dx[i] += filter.tap[lag][0] * dy[i + lag];
        of_pack[T] += dy[i];
        if (!whole && !row.in_row(step + i)) continue;  // whose inputs may be infinite
#pragma unroll
        for (int lag = 0; lag < T; ++lag)
          if (filter.has(lag)) of_pack[lag] += dy[i] * x[BEFORE + i - lag];
      }
#pragma unroll
      for (int s = 0; s < SUMS; ++s) sums[s] += of_pack[s];
      add_final(p, k, row, step, dx);
      row.store(dx, k.dx, step);
    }
    for (int mask = plan.lanes / 2; mask > 0; mask /= 2)
#pragma unroll
      for (int s = 0; s < SUMS; ++s) sums[s] += shuffled(sums[s], mask);
    if (!row.there || row.lane > 0) continue;
    const int64_t part = row.batch * plan.chunks + row.chunk;
#pragma unroll
    for (int s = 0; s < SUMS; ++s)
      parts[(part * SUMS + s) * p.channels + row.channel] = sums[s];
  }
}

}  // namespace fuseport::causal_conv1d::cuda
