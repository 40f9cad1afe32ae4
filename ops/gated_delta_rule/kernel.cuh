// The gated delta rule on CUDA, forward: a walk through time, which the backward takes too. What is
// read of a step is the same for all threads, or lies in a row for them.
#pragma once

#include "gated_delta_rule/cuda.hpp"
#include "native/rule_steps.cuh"

namespace fuseport::gated_delta_rule::cuda {

using namespace fuseport::cuda;

struct Place : fuseport::cuda::Place {
  int64_t group;

  FUSEPORT_DEVICE Place(const Problem& p, int columns, int64_t unit)
      : fuseport::cuda::Place(p, columns, unit), group(quotient_of(head, p.heads_per_group())) {}
};

// exp(g) of a step, for a key channel.
template <class Value>
FUSEPORT_DEVICE Value decay_of(const Problem& p, const Place& place, int64_t t, int64_t k) {
  return exp_of_any(at<Value>(p.g, place.batch, t, place.head)[p.channels ? k * p.g.column : 0]);
}

template <class Stored>
FUSEPORT_DEVICE Real<Stored> key_of(const Problem& p, const Place& place, int64_t t, int64_t k) {
  return to_real(at<Stored>(p.k, place.batch, t, place.group)[k * p.k.column]);
}

template <class Stored>
FUSEPORT_DEVICE Real<Stored> query_of(const Problem& p, const Place& place, int64_t t, int64_t k) {
  return to_real(at<Stored>(p.q, place.batch, t, place.group)[k * p.q.column]) *
         (Real<Stored>)p.scale;
}

template <class Value>
FUSEPORT_DEVICE Value rate_of(const Problem& p, const Place& place, int64_t t) {
  return *at<Value>(p.beta, place.batch, t, place.head);
}

// What a walk writes: outputs, or for a backward the states before all chunks and the errors, v less
// what its key stood for.
struct Walk {
  void* out = nullptr;      // (b, l, H, V), in `dtype`
  void* running = nullptr;  // (b, H, K, V), real: the last state, and all before where rows are many
  void* states = nullptr;   // (b, H, chunks, K, V), real
  void* errors = nullptr;   // (b, l, H, V), real
};

// REGISTERS: there is a thread for each row. BACKWARD: what is written is what a backward needs. A step
// writes its update, reads the state, decays it for the step that follows, and reads that for its key.
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
      const Value decay = decay_of<Value>(p, place, 0, k), next = key_of<Stored>(p, place, 0, k);
#pragma unroll
      for (int c = 0; c < C; ++c) {
        if (c >= place.count) continue;
        const Value s = initial[k * p.values + c];
        if (BACKWARD) keep(0, k, c, s);
        put(k, c, s * decay);
        sums[c] += next * (s * decay);
      }
    }
    for (int64_t t = 0; t < p.length; ++t) {
      Value* const shared = (Value*)memory + turn * size;
      turn ^= 1;
      add_up<COUNT>(sums, shared);
      if (!BACKWARD && t > 0) write(t - 1, shared);
      const Stored* const v =
          at<Stored>(p.v, place.batch, t, place.head) + place.first * p.v.column;
      const Value rate = rate_of<Value>(p, place, t);
      Value updates[C], values[C];
      load_columns<C>(v, p.v.column, place.count, values);
#pragma unroll
      for (int c = 0; c < C; ++c) {
        updates[c] = 0;
        if (c >= place.count) continue;
        const Value error = values[c] - total<COUNT>(shared, c);
        if (BACKWARD && (int)threadIdx.x == c)
          ((Value*)w.errors)[place.row(p, t) * p.values + place.first + c] = error;
        updates[c] = rate * error;
      }
#pragma unroll
      for (int i = 0; i < COUNT; ++i) sums[i] = 0;
      const bool last = t + 1 == p.length, kept = BACKWARD && !last && (t + 1) % CHUNK == 0;
      for (int64_t k = threadIdx.x; k < p.keys; k += threads) {
        const Value key = key_of<Stored>(p, place, t, k);
        const Value query = BACKWARD ? (Value)0 : query_of<Stored>(p, place, t, k);
        const Value decay = last ? (Value)1 : decay_of<Value>(p, place, t + 1, k);
        const Value next = last ? (Value)0 : key_of<Stored>(p, place, t + 1, k);
#pragma unroll
        for (int c = 0; c < C; ++c) {
          if (c >= place.count) continue;
          Value s = REGISTERS ? own[c] : running[k * p.values + c];
          s += key * updates[c];
          if (kept) keep((t + 1) / CHUNK, k, c, s);
          if constexpr (!BACKWARD) sums[C + c] += query * s;
          s *= decay;
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

}  // namespace fuseport::gated_delta_rule::cuda
