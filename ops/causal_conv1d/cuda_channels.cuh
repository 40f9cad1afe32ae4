// The convolution on CUDA where channels lie in a row: a thread has V of them, and goes through some
// steps with the inputs before in registers.
#pragma once

#include "causal_conv1d/cuda_taps.cuh"

namespace fuseport::causal_conv1d::cuda {

constexpr int AT_ONCE = 4;  // steps whose inputs are asked for before the first is used

// Where a thread works: V channels, and a chunk of the time of a batch entry.
template <class Stored>
struct Lane {
  static constexpr int V = CHANNELS<Stored>;
  int64_t channel, batch = 0, start = 0, end = 0;
  bool there;

  FUSEPORT_DEVICE Lane(const Problem& p, const Plan& plan, int64_t column)
      : channel((column * plan.lanes + (int)threadIdx.x % plan.lanes) * V),
        there(channel < p.channels) {}

  // The chunks of all batch entries are counted in turn.
  FUSEPORT_DEVICE void go_to(const Problem& p, const Plan& plan, int64_t nth) {
    batch = quotient_of(nth, plan.chunks);
    start = (nth - batch * plan.chunks) * plan.steps;
    end = start + plan.steps < p.length ? start + plan.steps : p.length;
  }

  FUSEPORT_DEVICE Pack<Stored, V> load(const Sequence& s, int64_t t) const {
    return *(const Pack<Stored, V>*)at<Stored>(s, batch, channel, t);
  }

  FUSEPORT_DEVICE void store(const Real<Stored>* from, const MutableSequence& s, int64_t t) const {
    Pack<Stored, V> pack;
#pragma unroll
    for (int i = 0; i < V; ++i) from_real(from[i], &pack.at[i]);
    *(Pack<Stored, V>*)at<Stored>(s, batch, channel, t) = pack;
  }

  // Inputs before the chunk, to where the first step of it shifts them from.
  FUSEPORT_DEVICE void load_before(const Problem& p, Real<Stored> (&x)[T][V]) const {
#pragma unroll
    for (int j = 1; j < T; ++j) {
      Pack<Stored, V> pack;
      if (const int64_t t = start - T + j; t >= 0) {
        pack = load(p.x, t);
      } else {
#pragma unroll
        for (int i = 0; i < V; ++i) pack.at[i] = input_before<Stored>(p, batch, channel + i, t);
      }
      to_reals(pack, x[j]);
    }
  }
};

// The sequences of the last T steps; where none are packed, all are one.
struct Sequences {
  int32_t of[T] = {};

  FUSEPORT_DEVICE Sequences(const Problem& p, int64_t batch, int64_t start) {
    if (!p.packed) return;
#pragma unroll
    for (int j = 1; j < T; ++j) of[j] = sequence_at(p, batch, start - T + j);
  }

  FUSEPORT_DEVICE void go_to(const Problem& p, int64_t batch, int64_t t) {
    if (!p.packed) return;
#pragma unroll
    for (int j = 0; j < BEFORE; ++j) of[j] = of[j + 1];
    of[BEFORE] = sequence_at(p, batch, t);
  }

  FUSEPORT_DEVICE bool padding(int j) const { return of[j] < 0; }
  FUSEPORT_DEVICE bool differ(int j, int k) const { return of[j] != of[k]; }
};

// Numbers of the last T steps: the newest comes last.
template <int V, class Number>
FUSEPORT_DEVICE void shift(Number (&x)[T][V]) {
#pragma unroll
  for (int j = 0; j < BEFORE; ++j)
#pragma unroll
    for (int i = 0; i < V; ++i) x[j][i] = x[j + 1][i];
}

// What goes into the activation.
template <class Stored, int V>
FUSEPORT_DEVICE void filtered(const Filter<Stored, V>& filter, const Real<Stored> (&x)[T][V],
                              const Sequences& sequences, Real<Stored> (&y)[V]) {
#pragma unroll
  for (int i = 0; i < V; ++i) y[i] = filter.bias[i];
#pragma unroll
  for (int lag = BEFORE; lag >= 0; --lag) {
    if (lag >= filter.width || sequences.differ(BEFORE - lag, BEFORE)) continue;
#pragma unroll
    for (int i = 0; i < V; ++i) y[i] += filter.tap[lag][i] * x[BEFORE - lag][i];
  }
}

template <class Stored>
__global__ void __launch_bounds__(THREADS)
    forward_channels_kernel(Problem p, Plan plan, Forward f) {
  constexpr int V = CHANNELS<Stored>;
  const int64_t rows = THREADS / plan.lanes, all = p.batches * plan.chunks;
  const int64_t units = (all + rows - 1) / rows * plan.columns;
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int64_t group = quotient_of(unit, plan.columns);
    const int64_t nth = group * rows + (int)threadIdx.x / plan.lanes;
    Lane<Stored> lane(p, plan, unit - group * plan.columns);
    if (!lane.there || nth >= all) continue;
    lane.go_to(p, plan, nth);
    const Filter<Stored, V> filter(p, lane.channel);
    Real<Stored> x[T][V];
    lane.load_before(p, x);
    Sequences sequences(p, lane.batch, lane.start);
    for (int64_t t = lane.start; t < lane.end; t += AT_ONCE) {
      Pack<Stored, V> packs[AT_ONCE];
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j)
        if (t + j < lane.end) packs[j] = lane.load(p.x, t + j);
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        if (t + j >= lane.end) break;
        shift(x);
        to_reals(packs[j], x[BEFORE]);
        sequences.go_to(p, lane.batch, t + j);
        Real<Stored> y[V];
        filtered(filter, x, sequences, y);
#pragma unroll
        for (int i = 0; i < V; ++i) {
          if (p.silu) y[i] *= logistic_of<Stored>(y[i]);
          if (sequences.padding(BEFORE)) y[i] = 0;
        }
        lane.store(y, f.out, t + j);
      }
    }
    if (lane.end == p.length)
      for (int i = 0; i < V; ++i) write_final_states<Stored>(p, f, lane.batch, lane.channel + i);
  }
}

// From the cotangents of outputs to those of what goes into the activation, and their sums.
template <class Stored, int V>
FUSEPORT_DEVICE void step_back(const Problem& p, const Filter<Stored, V>& filter,
                               const Real<Stored> (&x)[T][V], const Sequences& sequences,
                               bool summed, Real<Stored> (&dy)[V], Real<Stored> (&sums)[SUMS][V]) {
  if (p.silu) {
    Real<Stored> y[V];
    filtered(filter, x, sequences, y);
#pragma unroll
    for (int i = 0; i < V; ++i) dy[i] = before_silu<Stored>(dy[i], y[i]);
  }
  if (!summed) return;
#pragma unroll
  for (int lag = 0; lag < T; ++lag) {
    if (lag >= filter.width || sequences.differ(BEFORE - lag, BEFORE)) continue;
#pragma unroll
    for (int i = 0; i < V; ++i) sums[lag][i] += dy[i] * x[BEFORE - lag][i];
  }
#pragma unroll
  for (int i = 0; i < V; ++i) sums[T][i] += dy[i];
}

// The gradients of the inputs at the first step of those that `dy` and `sequences` are of.
template <class Stored, int V>
FUSEPORT_DEVICE void gathered(const Filter<Stored, V>& filter, const Real<Stored> (&dy)[T][V],
                              const Sequences& sequences, Real<Stored> (&dx)[V]) {
#pragma unroll
  for (int i = 0; i < V; ++i) dx[i] = 0;
#pragma unroll
  for (int lag = 0; lag < T; ++lag) {
    if (lag >= filter.width || sequences.padding(0) || sequences.differ(0, lag)) continue;
#pragma unroll
    for (int i = 0; i < V; ++i) dx[i] += filter.tap[lag][i] * dy[lag][i];
  }
}

// A block's threads have the same channels, `lanes` next to each other, and their sums over chunks
// are added up in shared memory, in the order of their rows.
template <class Stored>
__global__ void __launch_bounds__(THREADS, 3)
    backward_channels_kernel(Problem p, Plan plan, Gradients k, Real<Stored>* parts) {
  using Number = Real<Stored>;
  constexpr int V = CHANNELS<Stored>, AHEAD = sizeof(Stored) == 2 ? AT_ONCE : AT_ONCE / 2;
  FUSEPORT_SHARED(memory);
  Number* const shared = (Number*)memory;  // [SUMS][row][lane][V]
  const int64_t rows = THREADS / plan.lanes, all = p.batches * plan.chunks;
  const int64_t units = plan.parts * plan.columns;
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int64_t part = quotient_of(unit, plan.columns);
    Lane<Stored> lane(p, plan, unit - part * plan.columns);
    const Filter<Stored, V> filter(p, lane.there ? lane.channel : 0);
    Number sums[SUMS][V] = {};
    const int64_t first = part * rows + (int)threadIdx.x / plan.lanes;
    for (int64_t nth = first; lane.there && nth < all; nth += plan.parts * rows) {
      lane.go_to(p, plan, nth);
      Number x[T][V], dy[T][V] = {};  // of the last T steps
      lane.load_before(p, x);
      Sequences sequences(p, lane.batch, lane.start);
      // The steps after the chunk too: what they say of the inputs in it.
      const int64_t end = lane.end + BEFORE;
      for (int64_t t = lane.start; t < end; t += AHEAD) {
        Pack<Stored, V> inputs[AHEAD], cotangents[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; ++j)
          if (t + j < end && t + j < p.length) {
            inputs[j] = lane.load(p.x, t + j);
            cotangents[j] = lane.load(k.dout, t + j);
          }
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
          if (t + j >= end) break;
          shift(x);
          shift(dy);
          sequences.go_to(p, lane.batch, t + j);
          if (t + j < p.length && !sequences.padding(BEFORE)) {
            to_reals(inputs[j], x[BEFORE]);
            to_reals(cotangents[j], dy[BEFORE]);
            step_back(p, filter, x, sequences, t + j < lane.end, dy[BEFORE], sums);
          } else {
#pragma unroll
            for (int i = 0; i < V; ++i) x[BEFORE][i] = dy[BEFORE][i] = 0;
          }
          // All that the input BEFORE steps ago is in has been seen.
          if (t + j - BEFORE < lane.start) continue;
          Number dx[V];
          gathered(filter, dy, sequences, dx);
          lane.store(dx, k.dx, t + j - BEFORE);
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < SUMS; ++s)
#pragma unroll
      for (int i = 0; i < V; ++i) shared[(s * THREADS + (int)threadIdx.x) * V + i] = sums[s][i];
    __syncthreads();
    if ((int)threadIdx.x >= plan.lanes || !lane.there) continue;
#pragma unroll
    for (int s = 0; s < SUMS; ++s) {
      for (int row = 1; row < rows; ++row)
#pragma unroll
        for (int i = 0; i < V; ++i)
          sums[s][i] += shared[(s * THREADS + row * plan.lanes + (int)threadIdx.x) * V + i];
#pragma unroll
      for (int i = 0; i < V; ++i)
        parts[(part * SUMS + s) * p.channels + lane.channel + i] = sums[s][i];
    }
  }
}

}  // namespace fuseport::causal_conv1d::cuda
