// The convolution on CUDA where steps lie in a row: a thread has packs of V steps of one channel, all
// asked for at once, and gets the steps around a pack from its neighbours' registers.
//
// Packs are aligned in memory, wherever a row begins: with one that is not, the first pack of the row
// begins before it, and the first and the last one are moved number by number.
#pragma once

#include "causal_conv1d/cuda_taps.cuh"

namespace fuseport::causal_conv1d::cuda {

// Steps of a pack: 16 bytes of them, but more than lie BEFORE one.
template <class Stored>
constexpr int STEPS = VECTOR<Stored> < T ? T : VECTOR<Stored>;
constexpr int PACKS = 4;  // of a thread that are asked for before the first is used

// Where a thread works: a chunk of a row, which has the time of one channel of one batch entry. Steps
// are counted from the chunk's start, which is in the row but for a first pack that is not aligned.
template <class Stored>
struct Row {
  static constexpr int V = STEPS<Stored>;
  using Held = Words<Stored, V>;
  uint32_t batch, channel, chunk;
  int64_t start;
  int stride;     // steps from a thread's pack to its next one
  int low, high;  // the row's own steps are from `low` on, up to `high`, or are more than are needed
  int lane, lanes, first;  // `first` is the row's first lane in the warp
  int packs;               // of a thread; as many in all rows of a warp
  bool there;

  FUSEPORT_DEVICE Row(const Problem& p, const Plan& plan, uint32_t unit) {
    const auto chunks = (uint32_t)plan.chunks;
    const uint32_t nth = unit * (uint32_t)plan.rows + row_of(plan), row = nth / chunks;
    chunk = nth - row * chunks;
    batch = row / (uint32_t)p.channels;
    channel = row - batch * (uint32_t)p.channels;
    there = batch < p.batches;
    lanes = plan.lanes;
    lane = (int)threadIdx.x & (lanes - 1);  // they are a power of two
    first = (int)threadIdx.x % 32 - lane;
    stride = lanes * V;
    const auto begin = (uintptr_t)at<Stored>(p.x, batch, channel, 0) / sizeof(Stored);
    const int steps = plan.packs * stride, most = steps + stride;
    start = (int64_t)chunk * steps - (int64_t)(begin % V);
    low = start > most ? -most : (int)-start;
    high = !there ? low : p.length - start < most ? (int)(p.length - start) : most;
    packs = plan.packs;
    if (lanes == 32 && high < steps) packs = (high + 32 * V - 1) / (32 * V);
  }

  // Of the j-th pack, its first step; and which steps are of the row.
  FUSEPORT_DEVICE int step(int j) const { return j * stride + lane * V; }
  FUSEPORT_DEVICE bool in_row(int step) const { return step >= low && step < high; }
  FUSEPORT_DEVICE bool whole(int step) const { return step >= low && step + V <= high; }

  // The chunk's first step of a sequence.
  FUSEPORT_DEVICE const Stored* of(const Sequence& s) const {
    return at<Stored>(s, batch, channel, start);
  }
  FUSEPORT_DEVICE Stored* of(const MutableSequence& s) const {
    return at<Stored>(s, batch, channel, start);
  }

  // Whether all of the warp's packs from the first-th on, PACKS of each thread, are of its rows.
  FUSEPORT_DEVICE bool all_whole(int first) const {
    return __all_sync(0xffffffffu, whole(step(first)) && whole(step(first + PACKS - 1)));
  }

  // Steps from `step` on; out of the row, zeros.
  template <bool WHOLE>
  FUSEPORT_DEVICE Held load(const Stored* sequence, int step) const {
    const Stored* from = sequence + step;
    if (WHOLE || whole(step)) return load_words<V>(from);
    if (step >= high) return {};
    Pack<Stored, V> pack;
#pragma unroll
    for (int i = 0; i < V; ++i) pack.at[i] = in_row(step + i) ? from[i] : Stored{};
    return words_of(pack);
  }

  // The same of inputs, but before the first one initial states.
  template <bool WHOLE>
  FUSEPORT_DEVICE Held inputs(const Problem& p, const Stored* x, int step) const {
    if (WHOLE || whole(step)) return load_words<V>(x + step);
    const int state = step - low + (int)p.width - 1;
    const Stored* const states = at<Stored>(p.initial, batch, channel, state);
    Pack<Stored, V> pack;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const Stored* const from = step + i >= low ? x + step + i : states + i * p.initial.time;
      pack.at[i] = there && step + i < high && state + i >= 0 ? *from : Stored{};
    }
    return words_of(pack);
  }

  template <bool WHOLE>
  FUSEPORT_DEVICE void store(const Real<Stored>* from, Stored* sequence, int step) const {
    Stored* to = sequence + step;
#pragma unroll
    for (int i = 0; i < V; i += VECTOR<Stored>)
      if (WHOLE || whole(step)) store_vector(from + i, to + i);
#pragma unroll
    for (int i = 0; i < V; ++i)
      if (!WHOLE && !whole(step) && in_row(step + i)) from_real(from[i], to + i);
  }

  // What the lane before gives, or the one after. The row's first and last lane are neighbours: for
  // those, the number is of the pack `before` or after.
  template <class Number>
  FUSEPORT_DEVICE Number from_before(Number mine, Number before) const {
    const Number given = lane == lanes - 1 ? before : mine;
    return __shfl_sync(0xffffffffu, given, first + ((lane - 1) & (lanes - 1)));
  }
  template <class Number>
  FUSEPORT_DEVICE Number from_after(Number mine, Number after) const {
    const Number given = lane == 0 ? after : mine;
    return __shfl_sync(0xffffffffu, given, first + ((lane + 1) & (lanes - 1)));
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

// The inputs of some packs of a thread, and of what lies before its row's first one.
template <class Stored>
struct Inputs {
  static constexpr int V = STEPS<Stored>;
  Words<Stored, V> packs[PACKS + 1];  // the first is before the others: the last lane has it

  // From the first-th pack on.
  template <bool WHOLE>
  FUSEPORT_DEVICE void load(const Problem& p, const Row<Stored>& row, const Stored* x, int first) {
#pragma unroll
    for (int j = PACKS - 1; j > 0; --j)
      packs[j + 1] = row.template load<WHOLE>(x, row.step(first + j));
    packs[1] = row.template inputs<WHOLE>(p, x, row.step(first));
  }

  FUSEPORT_DEVICE void load_before(const Problem& p, const Row<Stored>& row, const Stored* x,
                                   int first) {
    packs[0] = {};
    if (row.lane == row.lanes - 1)
      packs[0] = row.template inputs<false>(p, x, first * row.stride - V);
  }

  // The j-th pack, and, of the V steps before it, the last BEFORE.
  FUSEPORT_DEVICE void around(const Row<Stored>& row, int j, Real<Stored> (&x)[2 * V]) const {
    constexpr int COUNT = sizeof(Words<Stored, V>) / 4, WANTED = (BEFORE * sizeof(Stored) + 3) / 4;
    Words<Stored, V> before = {};
#pragma unroll
    for (int i = COUNT - WANTED; i < COUNT; ++i)
      before.at[i] = row.from_before(packs[j + 1].at[i], packs[j].at[i]);
    to_reals<Stored>(before, x);
    to_reals<Stored>(packs[j + 1], x + V);
  }
};

// From the first-th pack of each thread on, PACKS of them; WHOLE says that all are, and there.
template <bool WHOLE, class Stored, bool FULL>
FUSEPORT_DEVICE void forward_packs(const Problem& p, const Row<Stored>& row, int first,
                                   const Stored* from, Stored* to, Inputs<Stored>& inputs,
                                   Filter<Stored, 1, FULL>& filter) {
  constexpr int V = STEPS<Stored>;
  inputs.template load<WHOLE>(p, row, from, first);
  if (first == 0) {
    inputs.load_before(p, row, from, first);
    filter = Filter<Stored, 1, FULL>(p, row.there ? row.channel : 0);
  }
#pragma unroll
  for (int j = 0; j < PACKS; ++j) {
    if (!WHOLE && first + j >= row.packs) break;
    Real<Stored> x[2 * V], y[V];
    inputs.around(row, j, x);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      y[i] = filtered_at(filter, x + V - BEFORE + i);
      if (p.silu) y[i] *= logistic_of<Stored>(y[i]);
    }
    row.template store<WHOLE>(y, to, row.step(first + j));
  }
  inputs.packs[0] = inputs.packs[PACKS];
}

template <class Stored, bool FULL>
__global__ void __launch_bounds__(THREADS, sizeof(Stored) == 4 ? 6 : sizeof(Stored) == 2 ? 5 : 4)
    forward_time_kernel(Problem p, Plan plan, Forward f) {
  for (uint32_t unit = blockIdx.x; unit < (uint32_t)plan.units; unit += gridDim.x) {
    const Row<Stored> row(p, plan, unit);
    const Stored* const from = row.of(p.x);
    Stored* const to = row.of(f.out);
    Inputs<Stored> inputs;
    Filter<Stored, 1, FULL> filter;
    for (int first = 0; first < row.packs; first += PACKS)
      if (row.all_whole(first)) forward_packs<true>(p, row, first, from, to, inputs, filter);
      else forward_packs<false>(p, row, first, from, to, inputs, filter);
    // Last, for it waits for what it writes; and in the last chunk, which has asked for it before.
    if (row.lane < p.width - 1 && row.chunk + 1 == plan.chunks && row.there)
      write_final_state<Stored>(p, f, row.batch, row.channel, row.lane);
  }
}

// The cotangent of an input, from those of what goes into the activation from its step on. Those
// before `dy` count as zeros.
template <class Stored, bool FULL>
FUSEPORT_DEVICE Real<Stored> gathered_at(const Filter<Stored, 1, FULL>& filter,
                                         const Real<Stored>* dy, int step) {
  Real<Stored> dx = 0;
#pragma unroll
  for (int lag = 0; lag < T; ++lag)
    if (filter.has(lag) && step + lag >= 0) dx += filter.tap[lag][0] * dy[step + lag];
  return dx;
}

// The gradients of initial states, from the cotangents of the steps from the chunk's start on.
template <class Stored, bool FULL>
FUSEPORT_DEVICE void write_initial(const Problem& p, const Gradients& k, const Row<Stored>& row,
                                   const Filter<Stored, 1, FULL>& filter,
                                   const Real<Stored> (&dy)[STEPS<Stored> + BEFORE]) {
  const int halo = FULL ? BEFORE : (int)p.width - 1;
  Stored* const to = (Stored*)k.dinitial + ((int64_t)row.batch * p.channels + row.channel) * halo;
  Real<Stored> own[BEFORE] = {};  // of the row's first steps
#pragma unroll
  for (int t = 0; t < BEFORE; ++t)
#pragma unroll
    for (int i = t; i < STEPS<Stored> + t; ++i)
      own[t] += row.low == i - t ? dy[i] : 0;
#pragma unroll
  for (int state = 0; state < BEFORE; ++state) {
    if (state >= halo) break;
    Real<Stored> dx = 0;
#pragma unroll
    for (int t = 0; t < BEFORE; ++t)
#pragma unroll
      for (int lag = t + 1; lag < T; ++lag)
        if (halo - state == lag - t && filter.has(lag)) dx += filter.tap[lag][0] * own[t];
    if (const int64_t in_final = state - p.length; in_final >= 0)
      dx += to_real(*at<Stored>(k.dfinal, row.batch, row.channel, in_final));
    from_real(dx, to + state);
  }
}

// The cotangent of what goes into the activation at one step, which BEFORE others of the row
// precede.
template <class Stored, bool FULL>
FUSEPORT_DEVICE Real<Stored> cotangent_at(const Problem& p, const Filter<Stored, 1, FULL>& filter,
                                          const Stored* x, const Stored* dout) {
  Real<Stored> around[T];
#pragma unroll
  for (int i = 0; i < T; ++i) around[i] = to_real(x[i - BEFORE]);
  const Real<Stored> dy = to_real(*dout);
  return p.silu ? before_silu<Stored>(dy, filtered_at(filter, around)) : dy;
}

// What a row's backward pass has from one pack to the one before.
template <class Stored, bool FULL>
struct Carried {
  Filter<Stored, 1, FULL> filter;
  Real<Stored> sums[SUMS] = {};
  Real<Stored> next[BEFORE];   // the cotangents of what goes into the activation after a pack
  Real<Stored> final[BEFORE];  // those of the final states

  // With the steps after the chunk, of which each of the first lanes has one.
  FUSEPORT_DEVICE void load(const Problem& p, const Gradients& k, const Row<Stored>& row,
                            const Stored* x, const Stored* dout) {
    filter = Filter<Stored, 1, FULL>(p, row.there ? row.channel : 0);
    const Stored* const states = at<Stored>(k.dfinal, row.batch, row.channel, 0);
#pragma unroll
    for (int i = 0; i < BEFORE; ++i)
      final[i] = row.there && i < p.width - 1 ? to_real(states[i * k.dfinal.time]) : 0;
    const int step = row.packs * row.stride + row.lane;
    Real<Stored> after = 0;
    if (row.lane < BEFORE && row.in_row(step))
      after = cotangent_at(p, filter, x + step, dout + step);
#pragma unroll
    for (int i = 0; i < BEFORE; ++i) next[i] = __shfl_sync(0xffffffffu, after, row.first + i);
  }

  // Adds the cotangents of final states to those of V inputs from a step on, which are in them.
  FUSEPORT_DEVICE void add_final(const Problem& p, const Row<Stored>& row, int step,
                                 Real<Stored>* dx) const {
    const int state = step - row.high + (int)p.width - 1;
    if (state + STEPS<Stored> <= 0) return;
#pragma unroll
    for (int i = 0; i < STEPS<Stored>; ++i)
#pragma unroll
      for (int j = 0; j < BEFORE; ++j)
        dx[i] += state == j - i ? final[j] : 0;
  }
};

// From the first-th pack of each thread on, PACKS of them, from the last one; WHOLE says that all
// are, and there.
template <bool WHOLE, class Stored, bool FULL>
FUSEPORT_DEVICE void backward_packs(const Problem& p, const Gradients& k, const Row<Stored>& row,
                                    int first, const Stored* of_x, const Stored* of_dout,
                                    Stored* of_dx, Carried<Stored, FULL>& carried) {
  constexpr int V = STEPS<Stored>;
  Inputs<Stored> inputs;
  Words<Stored, V> cotangents[PACKS];
  inputs.template load<WHOLE>(p, row, of_x, first);
#pragma unroll
  for (int j = 0; j < PACKS; ++j)
    cotangents[j] = row.template load<WHOLE>(of_dout, row.step(first + j));
  inputs.load_before(p, row, of_x, first);
  if (first + PACKS >= row.packs) carried.load(p, k, row, of_x, of_dout);
  const Filter<Stored, 1, FULL>& filter = carried.filter;
#pragma unroll
  for (int j = PACKS - 1; j >= 0; --j) {
    if (!WHOLE && first + j >= row.packs) continue;
    const int step = row.step(first + j);
    Real<Stored> x[2 * V], dy[V + BEFORE], dx[V];
    inputs.around(row, j, x);
    to_reals<Stored>(cotangents[j], dy);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if (p.silu) dy[i] = before_silu<Stored>(dy[i], filtered_at(filter, x + V - BEFORE + i));
      if (!WHOLE && !row.in_row(step + i)) dy[i] = 0;
    }
#pragma unroll
    for (int i = 0; i < BEFORE; ++i) {
      dy[V + i] = row.from_after(dy[i], carried.next[i]);
      carried.next[i] = dy[i];
    }
    if (j == 0 && step == 0 && row.there && row.chunk == 0)
      write_initial(p, k, row, filter, dy);
#pragma unroll
    for (int i = 0; i < V; ++i) dx[i] = gathered_at(filter, dy, i);
    carried.add_final(p, row, step, dx);
    row.template store<WHOLE>(dx, of_dx, step);
    Real<Stored> of_pack[SUMS] = {};  // apart: sums of sums are rounded less
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if (!WHOLE && !row.in_row(step + i)) continue;  // whose inputs may be infinite
#pragma unroll
      for (int lag = 0; lag < T; ++lag)
        if (filter.has(lag)) of_pack[lag] += dy[i] * x[V + i - lag];
      of_pack[T] += dy[i];
    }
#pragma unroll
    for (int s = 0; s < SUMS; ++s) carried.sums[s] += of_pack[s];
  }
}

// The lanes of a row add up their sums, and its first one writes them.
template <class Stored, bool FULL>
__global__ void __launch_bounds__(THREADS, sizeof(Stored) == 8 ? 2 : 4)
    backward_time_kernel(Problem p, Plan plan, Gradients k, Real<Stored>* parts) {
  for (uint32_t unit = blockIdx.x; unit < (uint32_t)plan.units; unit += gridDim.x) {
    const Row<Stored> row(p, plan, unit);
    const Stored *const x = row.of(p.x), *const dout = row.of(k.dout);
    Stored* const dx = row.of(k.dx);
    Carried<Stored, FULL> carried;
    for (int first = (row.packs - 1) / PACKS * PACKS; first >= 0; first -= PACKS)
      if (row.all_whole(first)) backward_packs<true>(p, k, row, first, x, dout, dx, carried);
      else backward_packs<false>(p, k, row, first, x, dout, dx, carried);
    Real<Stored>(&sums)[SUMS] = carried.sums;
    for (int mask = row.lanes / 2; mask > 0; mask /= 2)
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
