// The rule on CUDA, forward: a walk through time, which the backward takes too. What is read of a step is
// the same for all threads, or lies in a row for them.
#pragma once

#include "dplr_delta_rule/cuda.hpp"
#include "native/rule_steps.cuh"

namespace fuseport::dplr_delta_rule::cuda {

using namespace fuseport::cuda;

// A step's numbers of one row of the state.
template <class Value>
struct Row {
  Value q, k, a, b, decay;
};

template <class Stored>
FUSEPORT_DEVICE Real<Stored> number_of(const Strided& s, const Place& place, int64_t t, int64_t k) {
  return to_real(at<Stored>(s, place.batch, t, place.head)[k * s.column]);
}

template <class Stored>
FUSEPORT_DEVICE Row<Real<Stored>> row_of(const Problem& p, const Place& place, int64_t t,
                                         int64_t k) {
  using Value = Real<Stored>;
  return {number_of<Stored>(p.q, place, t, k) * (Value)p.scale,
          number_of<Stored>(p.k, place, t, k),
          number_of<Stored>(p.a, place, t, k),
          number_of<Stored>(p.b, place, t, k),
          exp_of_any(number_of<Value>(p.log_decay, place, t, k))};
}

template <int C, class Stored, class Value>
FUSEPORT_DEVICE void load_values(const Strided& s, const Place& place, int64_t t, Value* to) {
  const Stored* const from = at<Stored>(s, place.batch, t, place.head) + place.first * s.column;
  load_columns<C>(from, s.column, place.count, to);
}

// What a walk writes: outputs, or for a backward the states before all chunks and what steps read.
struct Walk {
  void* out = nullptr;      // (n, l, H, V), in `dtype`
  void* running = nullptr;  // (n, H, K, V), real: the last state, and all before where rows are many
  void* states = nullptr;   // (n, H, chunks, K, V), real
  void* reads = nullptr;    // (n, l, H, V), real
};

// REGISTERS: there is a thread for each row. BACKWARD: what is written is what a backward needs. A step
// decays the state, writes to it, and reads it for q and for the step that follows.
template <class Stored, bool REGISTERS, bool BACKWARD>
__global__ void __launch_bounds__(MOST_THREADS) walk_kernel(Problem p, Walk w) {
  using Value = Real<Stored>;
  constexpr int C = WALK_COLUMNS, COUNT = BACKWARD ? C : 2 * C;
  FUSEPORT_SHARED(memory);
  const int threads = (int)blockDim.x, size = threads / 32 * COUNT;
  const int64_t units = p.batches * p.heads * blocks_of(p, C);
  int turn = 0;
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const Place place(p, C, unit);
    const Value* const initial = (const Value*)p.initial_state + place.state;
    Value* const running = (Value*)w.running + place.state;
    Value own[C] = {}, sums[COUNT] = {};
    const auto keep = [&](int64_t chunk, int64_t k, int c, Value s) {
      ((Value*)w.states + place.chunk_state(p, chunk))[k * p.values + c] = s;
    };
    const auto put = [&](int64_t k, int c, Value s) {
      if constexpr (REGISTERS) own[c] = s;
      else running[k * p.values + c] = s;
    };
    const auto write = [&](int64_t t, const Value* shared) {
      if ((int)threadIdx.x >= place.count) return;
      Stored* const out = (Stored*)w.out + place.row(p, t) * p.values + place.first;
      from_real(total<COUNT>(shared, C + (int)threadIdx.x), out + threadIdx.x);
    };

    for (int64_t k = threadIdx.x; k < p.keys; k += threads) {
      const Value reading = number_of<Stored>(p.a, place, 0, k);
#pragma unroll
      for (int c = 0; c < C; ++c) {
        if (c >= place.count) continue;
        const Value s = initial[k * p.values + c];
        if (BACKWARD) keep(0, k, c, s);
        put(k, c, s);
        sums[c] += reading * s;
      }
    }
    for (int64_t t = 0; t < p.length; ++t) {
      Value* const shared = (Value*)memory + turn * size;
      turn ^= 1;
      add_up<COUNT>(sums, shared);
      if (!BACKWARD && t > 0) write(t - 1, shared);
      Value values[C], reads[C];
      load_values<C, Stored>(p.v, place, t, values);
#pragma unroll
      for (int c = 0; c < C; ++c) {
        reads[c] = 0;
        if (c >= place.count) continue;
        reads[c] = total<COUNT>(shared, c);
        if (BACKWARD && (int)threadIdx.x == c)
          ((Value*)w.reads)[place.row(p, t) * p.values + place.first + c] = reads[c];
      }
#pragma unroll
      for (int i = 0; i < COUNT; ++i) sums[i] = 0;
      const bool last = t + 1 == p.length, kept = BACKWARD && !last && (t + 1) % CHUNK == 0;
      for (int64_t k = threadIdx.x; k < p.keys; k += threads) {
        const Row<Value> row = row_of<Stored>(p, place, t, k);
        const Value next = last ? (Value)0 : number_of<Stored>(p.a, place, t + 1, k);
#pragma unroll
        for (int c = 0; c < C; ++c) {
          if (c >= place.count) continue;
          Value s = (REGISTERS ? own[c] : running[k * p.values + c]) * row.decay;
          s += row.k * values[c];
          s += row.b * reads[c];
          if (kept) keep((t + 1) / CHUNK, k, c, s);
          if constexpr (!BACKWARD) sums[C + c] += row.q * s;
          put(k, c, s);
          sums[c] += next * s;
        }
      }
    }
    if constexpr (!BACKWARD) {
      Value* const shared = (Value*)memory + turn * size;
      turn ^= 1;
      add_up<COUNT>(sums, shared);
      write(p.length - 1, shared);
      if constexpr (REGISTERS) {
        const int64_t k = threadIdx.x;
#pragma unroll
        for (int c = 0; c < C; ++c)
          if (k < p.keys && c < place.count) running[k * p.values + c] = own[c];
      }
    }
  }
}

template <class Stored, bool BACKWARD>
const char* run_walk(const Problem& p, const Walk& walk, void* stream) {
  const int threads = threads_of(p);
  const int64_t units = p.batches * p.heads * blocks_of(p, WALK_COLUMNS);
  const int64_t shared = 2 * threads / 32 * 2 * WALK_COLUMNS * (int64_t)sizeof(Real<Stored>);
  if (p.keys <= threads)
    return launch(walk_kernel<Stored, true, BACKWARD>, units, threads, shared, stream, p, walk);
  return launch(walk_kernel<Stored, false, BACKWARD>, units, threads, shared, stream, p, walk);
}

}  // namespace fuseport::dplr_delta_rule::cuda
