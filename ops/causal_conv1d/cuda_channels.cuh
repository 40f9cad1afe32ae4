// The convolution on CUDA where channels lie in a row: a thread has V of them, and goes through some
// steps with the inputs before in registers.
#pragma once

#include "causal_conv1d/cuda_taps.cuh"

namespace fuseport::causal_conv1d::cuda {

// Steps whose inputs are asked for before the first is used.
template <class Stored>
constexpr int AT_ONCE = sizeof(Stored) == 2 ? 8 : 4;

// Where a thread works: V channels, and a chunk of the time of a batch entry.
template <class Stored>
struct Lane {
  static constexpr int V = CHANNELS<Stored>;
  int64_t channel, batch = 0, start = 0, end = 0;
  bool there;

  FUSEPORT_DEVICE Lane(const Problem& p, const Plan& plan, int64_t column)
      : channel((column * plan.lanes + ((int)threadIdx.x & (plan.lanes - 1))) * V),
        there(channel < p.channels) {}

  // The chunks of all batch entries are counted in turn.
  FUSEPORT_DEVICE void go_to(const Problem& p, const Plan& plan, int64_t nth) {
    batch = quotient_of(nth, plan.chunks);
    start = (nth - batch * plan.chunks) * plan.steps;
    end = start + plan.steps < p.length ? start + plan.steps : p.length;
  }

  // Its numbers at the chunk's first step.
  FUSEPORT_DEVICE const Stored* first(const Sequence& s) const {
    return at<Stored>(s, batch, channel, start);
  }
  FUSEPORT_DEVICE Stored* first(const MutableSequence& s) const {
    return at<Stored>(s, batch, channel, start);
  }
  FUSEPORT_DEVICE static Words<Stored, V> load(const Stored* from) {
    return load_words<V>(from);
  }
  FUSEPORT_DEVICE static void store(const Real<Stored>* from, Stored* to) {
    Pack<Stored, V> pack;
#pragma unroll
    for (int i = 0; i < V; ++i) from_real(from[i], &pack.at[i]);
    *(Pack<Stored, V>*)to = pack;
  }

  // Adds the cotangents of the final states that inputs at step t are in.
  FUSEPORT_DEVICE void add_final(const Problem& p, const Gradients& k, int64_t t,
                                 Real<Stored> (&dx)[V]) const {
    if (t >= p.length || (p.packed && !in_last(p, batch, t))) return;
    const int64_t state = t - (p.length - (p.width - 1));
#pragma unroll
    for (int i = 0; i < V; ++i) dx[i] += to_real(*at<Stored>(k.dfinal, batch, channel + i, state));
  }

  // The gradients of the initial states at step t < 0.
  FUSEPORT_DEVICE void store_initial(const Problem& p, const Real<Stored> (&dx)[V],
                                     const Gradients& k, int64_t t) const {
    const int64_t halo = p.width - 1;
    Stored* const to = (Stored*)k.dinitial + (batch * p.channels + channel) * halo + t + halo;
#pragma unroll
    for (int i = 0; i < V; ++i) from_real(dx[i], to + i * halo);
  }

  // Inputs before the chunk, to where the first step of it shifts them from.
  FUSEPORT_DEVICE void load_before(const Problem& p, Real<Stored> (&x)[T][V]) const {
#pragma unroll
    for (int j = 1; j < T; ++j) {
      Words<Stored, V> words;
      if (const int64_t t = start - T + j; t >= 0) {
        words = load(at<Stored>(p.x, batch, channel, t));
      } else {
        Pack<Stored, V> pack;
#pragma unroll
        for (int i = 0; i < V; ++i) pack.at[i] = input_before<Stored>(p, batch, channel + i, t);
        words = words_of(pack);
      }
      to_reals<Stored>(words, x[j]);
    }
  }
};

// The sequences of the last T steps; where none are packed, all are one.
template <bool PACKED>
struct Sequences {
  int32_t of[T] = {};

  FUSEPORT_DEVICE Sequences(const Problem& p, int64_t batch, int64_t start) {
    if constexpr (PACKED)
#pragma unroll
      for (int j = 1; j < T; ++j) of[j] = sequence_at(p, batch, start - T + j);
  }

  FUSEPORT_DEVICE void go_to(const Problem& p, int64_t batch, int64_t t) {
    if constexpr (PACKED) {
#pragma unroll
      for (int j = 0; j < BEFORE; ++j) of[j] = of[j + 1];
      of[BEFORE] = sequence_at(p, batch, t);
    }
  }

  FUSEPORT_DEVICE bool padding(int j) const { return PACKED && of[j] < 0; }
  FUSEPORT_DEVICE bool differ(int j, int k) const { return PACKED && of[j] != of[k]; }
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
template <class Stored, int V, bool FULL, class Sequences>
FUSEPORT_DEVICE void filtered(const Filter<Stored, V, FULL>& filter, const Real<Stored> (&x)[T][V],
                              const Sequences& sequences, Real<Stored> (&y)[V]) {
#pragma unroll
  for (int i = 0; i < V; ++i) y[i] = filter.bias[i];
#pragma unroll
  for (int lag = BEFORE; lag >= 0; --lag) {
    if (!filter.has(lag) || sequences.differ(BEFORE - lag, BEFORE)) continue;
#pragma unroll
    for (int i = 0; i < V; ++i) y[i] += filter.tap[lag][i] * x[BEFORE - lag][i];
  }
}

template <class Stored, bool PACKED, bool FULL>
__global__ void __launch_bounds__(THREADS, sizeof(Stored) == 8 ? 1 : sizeof(Stored) == 4 ? 5 : 4)
    forward_channels_kernel(Problem p, Plan plan, Forward f) {
  constexpr int V = CHANNELS<Stored>, AHEAD = AT_ONCE<Stored>;
  const int64_t all = p.batches * plan.chunks;
  for (int64_t unit = blockIdx.x; unit < plan.units; unit += gridDim.x) {
    const int64_t group = quotient_of(unit, plan.columns);
    const int64_t nth = group * plan.rows + row_of(plan);
    Lane<Stored> lane(p, plan, unit - group * plan.columns);
    if (!lane.there || nth >= all) continue;
    lane.go_to(p, plan, nth);
    const Filter<Stored, V, FULL> filter(p, lane.channel);
    Real<Stored> x[T][V];
    lane.load_before(p, x);
    Sequences<PACKED> sequences(p, lane.batch, lane.start);
    const int count = (int)(lane.end - lane.start);
    const Stored* from = lane.first(p.x);
    Stored* to = lane.first(f.out);
    for (int t = 0; t < count; t += AHEAD) {
      Words<Stored, V> packs[AHEAD];
#pragma unroll
      for (int j = 0; j < AHEAD; ++j)
        if (t + j < count) packs[j] = lane.load(from + j * p.x.time);
#pragma unroll
      for (int j = 0; j < AHEAD; ++j) {
        if (t + j >= count) break;
        shift(x);
        to_reals<Stored>(packs[j], x[BEFORE]);
        sequences.go_to(p, lane.batch, lane.start + t + j);
        Real<Stored> y[V];
        filtered(filter, x, sequences, y);
#pragma unroll
        for (int i = 0; i < V; ++i) {
          if (p.silu) y[i] *= logistic_of<Stored>(y[i]);
          if (sequences.padding(BEFORE)) y[i] = 0;
        }
        lane.store(y, to + j * f.out.time);
      }
      from += AHEAD * p.x.time;
      to += AHEAD * f.out.time;
    }
    if (lane.end == p.length)
#pragma unroll
      for (int i = 0; i < V; ++i)
#pragma unroll
        for (int j = 0; j < BEFORE; ++j)
          if (j < p.width - 1) write_final_state<Stored>(p, f, lane.batch, lane.channel + i, j);
  }
}

// From the cotangents of outputs to those of what goes into the activation, and their sums.
template <class Stored, int V, bool FULL, class Sequences>
FUSEPORT_DEVICE void step_back(const Problem& p, const Filter<Stored, V, FULL>& filter,
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
    if (!filter.has(lag) || sequences.differ(BEFORE - lag, BEFORE)) continue;
#pragma unroll
    for (int i = 0; i < V; ++i) sums[lag][i] += dy[i] * x[BEFORE - lag][i];
  }
#pragma unroll
  for (int i = 0; i < V; ++i) sums[T][i] += dy[i];
}

// The gradients of the inputs at the first step of those that `dy` and `sequences` are of.
template <class Stored, int V, bool FULL, class Sequences>
FUSEPORT_DEVICE void gathered(const Filter<Stored, V, FULL>& filter, const Real<Stored> (&dy)[T][V],
                              const Sequences& sequences, Real<Stored> (&dx)[V]) {
#pragma unroll
  for (int i = 0; i < V; ++i) dx[i] = 0;
#pragma unroll
  for (int lag = 0; lag < T; ++lag) {
    if (!filter.has(lag) || sequences.padding(0) || sequences.differ(0, lag)) continue;
#pragma unroll
    for (int i = 0; i < V; ++i) dx[i] += filter.tap[lag][i] * dy[lag][i];
  }
}

// A block's threads have the same channels, `lanes` next to each other, and their sums over chunks
// are added up in shared memory, in the order of their rows.
template <class Stored, bool PACKED, bool FULL>
__global__ void __launch_bounds__(THREADS, sizeof(Stored) == 8 ? 1 : 3)
    backward_channels_kernel(Problem p, Plan plan, Gradients k, Real<Stored>* parts) {
  using Number = Real<Stored>;
  constexpr int V = CHANNELS<Stored>, AHEAD = AT_ONCE<Stored> / 2;
  FUSEPORT_SHARED(memory);
  Number* const shared = (Number*)memory;  // [SUMS][row][lane][V]
  const int64_t rows = plan.rows, all = p.batches * plan.chunks;
  const int64_t units = plan.parts * plan.columns;
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int64_t part = quotient_of(unit, plan.columns);
    Lane<Stored> lane(p, plan, unit - part * plan.columns);
    const Filter<Stored, V, FULL> filter(p, lane.there ? lane.channel : 0);
    Number sums[SUMS][V] = {};
    const int64_t first = part * rows + row_of(plan);
    for (int64_t nth = first; lane.there && nth < all; nth += plan.parts * rows) {
      lane.go_to(p, plan, nth);
      Number x[T][V], dy[T][V] = {};  // of the last T steps
      lane.load_before(p, x);
      Sequences<PACKED> sequences(p, lane.batch, lane.start);
      // The steps after the chunk too: what they say of the inputs in it.
      const int steps = (int)(lane.end - lane.start), count = steps + BEFORE;
      const int there = p.length - lane.start < count ? (int)(p.length - lane.start) : count;
      const Stored *of_x = lane.first(p.x), *of_dout = lane.first(k.dout);
      Stored* of_dx = lane.first(k.dx) - BEFORE * k.dx.time;
      for (int t = 0; t < count; t += AHEAD) {
        Words<Stored, V> inputs[AHEAD], cotangents[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; ++j)
          if (t + j < there) {
            inputs[j] = lane.load(of_x + j * p.x.time);
            cotangents[j] = lane.load(of_dout + j * k.dout.time);
          }
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
          if (t + j >= count) break;
          shift(x);
          shift(dy);
          sequences.go_to(p, lane.batch, lane.start + t + j);
          if (t + j < there && !sequences.padding(BEFORE)) {
            to_reals<Stored>(inputs[j], x[BEFORE]);
            to_reals<Stored>(cotangents[j], dy[BEFORE]);
            step_back(p, filter, x, sequences, t + j < steps, dy[BEFORE], sums);
          } else {
#pragma unroll
            for (int i = 0; i < V; ++i) x[BEFORE][i] = dy[BEFORE][i] = 0;
          }
          // All that the input BEFORE steps ago is in has been seen.
          const int64_t of = lane.start + t + j - BEFORE;
          if (t + j < BEFORE && (lane.start > 0 || PACKED || of <= -p.width)) continue;
          Number dx[V];
          gathered(filter, dy, sequences, dx);
          if (of >= p.length - (p.width - 1)) lane.add_final(p, k, of, dx);
          if (of >= 0) lane.store(dx, of_dx + j * k.dx.time);
          else lane.store_initial(p, dx, k, of);
        }
        of_x += AHEAD * p.x.time;
        of_dout += AHEAD * k.dout.time;
        of_dx += AHEAD * k.dx.time;
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
