// The rule on CUDA, backward: a walk that keeps the states before all chunks, one back through time, by
// the formulas of reference.py, and sums of what blocks left. The last two take a segment of time after
// the other, so that what blocks leave takes no more memory than a segment's.
#pragma once

#include "dplr_delta_rule/kernel.cuh"

namespace fuseport::dplr_delta_rule::cuda {

constexpr int BACK_COLUMNS = 16;  // of a block's columns in the walk back
constexpr int SUM_THREADS = 128;

using Segment = fuseport::cuda::Segment<CHUNK>;

// Memory of the passes' own, all of it real.
template <class Value>
struct BackwardScratch {
  Value *states, *running, *reads;        // as a walk writes them
  Value* before;                          // of each unit (32, columns, K): states before steps
  Value *dq, *dk, *da, *db, *dlog_decay;  // parts: (n, steps of a segment, H, blocks of columns, K)
  int64_t bytes;

  BackwardScratch(const Problem& p, void* base) {
    const int64_t heads = p.batches * p.heads, blocks = blocks_of(p, BACK_COLUMNS);
    const int64_t state = p.keys * p.values, steps = heads * Segment(p, 0).steps;
    DeviceParts parts{base};
    parts.take(heads * p.chunks() * state, &states);
    parts.take(heads * state, &running);
    parts.take(heads * p.length * p.values, &reads);
    parts.take(heads * blocks * CHUNK * BACK_COLUMNS * p.keys, &before);
    parts.take(steps * blocks * p.keys, &dq, &dk, &da, &db, &dlog_decay);
    bytes = parts.bytes;
  }
};

template <class Stored, bool REGISTERS>
__global__ void __launch_bounds__(MOST_THREADS)
    back_kernel(Problem p, Backward to, BackwardScratch<Real<Stored>> s, Segment segment) {
  using Value = Real<Stored>;
  constexpr int C = BACK_COLUMNS;
  FUSEPORT_SHARED(memory);
  const int threads = (int)blockDim.x;
  const int64_t blocks = blocks_of(p, C), units = p.batches * p.heads * blocks;
  int turn = 0;
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const Place place(p, C, unit);
    // Of the cotangent of the state, a row, or where rows are many its memory; between segments, too.
    Value* const all = (Value*)to.dinitial_state + place.state;
    const Value* const later = segment.first + segment.chunks == p.chunks()
                                   ? (const Value*)to.dfinal_state + place.state
                                   : all;
    Value own[C] = {};
    const auto get = [&](int64_t k, int c) {
      return REGISTERS ? own[c] : all[k * p.values + c];
    };
    const auto put = [&](int64_t k, int c, Value d) {
      if constexpr (REGISTERS) own[c] = d;
      else all[k * p.values + c] = d;
    };
    for (int64_t k = threadIdx.x; k < p.keys; k += threads)
#pragma unroll
      for (int c = 0; c < C; ++c)
        if (c < place.count) put(k, c, later[k * p.values + c]);

    for (int64_t chunk = segment.first + segment.chunks - 1; chunk >= segment.first; --chunk) {
      const int64_t start = chunk * CHUNK;
      const int steps = (int)(p.length - start < CHUNK ? p.length - start : CHUNK);
      Value* const before = s.before + unit * CHUNK * C * p.keys;  // each thread reads its own
      const auto load_reads = [&](int64_t t, Value* to) {
        load_columns<C>(s.reads + place.row(p, t) * p.values + place.first, 1, place.count, to);
      };
      for (int64_t k = threadIdx.x; k < p.keys; k += threads) {
        Value state[C] = {};
#pragma unroll
        for (int c = 0; c < C; ++c)
          if (c < place.count)
            state[c] = s.states[place.chunk_state(p, chunk) + k * p.values + c];
        for (int i = 0; i < steps; ++i) {
          const Row<Value> row = row_of<Stored>(p, place, start + i, k);
          Value values[C], reads[C];
          load_values<C, Stored>(p.v, place, start + i, values);
          load_reads(start + i, reads);
#pragma unroll
          for (int c = 0; c < C; ++c) {
            if (c >= place.count) continue;
            before[(i * C + c) * p.keys + k] = state[c];
            state[c] *= row.decay;
            state[c] += row.k * values[c];
            state[c] += row.b * reads[c];
          }
        }
      }

      for (int i = steps - 1; i >= 0; --i) {
        const int64_t t = start + i;
        Value couts[C], values[C], reads[C];
        load_values<C, Stored>(to.dout, place, t, couts);
        load_values<C, Stored>(p.v, place, t, values);
        load_reads(t, reads);
        Value sums[2 * C] = {};  // cotangents of what was read, and of values
        for (int64_t k = threadIdx.x; k < p.keys; k += threads) {
          const Row<Value> row = row_of<Stored>(p, place, t, k);
#pragma unroll
          for (int c = 0; c < C; ++c) {
            if (c >= place.count) continue;
            const Value d = get(k, c) + row.q * couts[c];
            put(k, c, d);
            sums[c] += row.b * d;
            sums[C + c] += row.k * d;
          }
        }
        Value* const shared = (Value*)memory + turn * (threads / 32 * 2 * C);
        turn ^= 1;
        add_up<2 * C>(sums, shared);
        Value dreads[C];
#pragma unroll
        for (int c = 0; c < C; ++c) {
          dreads[c] = 0;
          if (c >= place.count) continue;
          dreads[c] = total<2 * C>(shared, c);
          if ((int)threadIdx.x == c)
            from_real(total<2 * C>(shared, C + c),
                      (Stored*)to.dv + place.row(p, t) * p.values + place.first + c);
        }
        const int64_t step = place.batch * segment.steps + t - segment.start;
        const int64_t part = (step * p.heads + place.head) * blocks + place.block;
        for (int64_t k = threadIdx.x; k < p.keys; k += threads) {
          const Row<Value> row = row_of<Stored>(p, place, t, k);
          Value dq = 0, dk = 0, da = 0, db = 0, ddecay = 0, states[C];
          load_columns<C>(before + i * C * p.keys + k, p.keys, place.count, states);
#pragma unroll
          for (int c = 0; c < C; ++c) {
            if (c >= place.count) continue;
            const Value state = states[c], d = get(k, c);
            Value after = state * row.decay;
            after += row.k * values[c];
            after += row.b * reads[c];
            dq += after * couts[c];
            dk += d * values[c];
            da += state * dreads[c];
            db += d * reads[c];
            ddecay += state * d;
            put(k, c, d * row.decay + row.a * dreads[c]);
          }
          const int64_t at = part * p.keys + k;
          s.dq[at] = dq;
          s.dk[at] = dk;
          s.da[at] = da;
          s.db[at] = db;
          s.dlog_decay[at] = ddecay * row.decay;
        }
      }
    }
    if constexpr (REGISTERS) {
      const int64_t k = threadIdx.x;
#pragma unroll
      for (int c = 0; c < C; ++c)
        if (k < p.keys && c < place.count) all[k * p.values + c] = own[c];
    }
  }
}

// A block has steps of a segment in turn.
template <class Stored>
__global__ void __launch_bounds__(SUM_THREADS)
    sum_kernel(Problem p, Backward to, BackwardScratch<Real<Stored>> s, Segment segment) {
  using Value = Real<Stored>;
  const int64_t blocks = blocks_of(p, BACK_COLUMNS), keys = p.heads * p.keys;
  for (int64_t step = blockIdx.x; step < p.batches * segment.steps; step += gridDim.x) {
    const int64_t batch = quotient_of(step, segment.steps);
    const int64_t row = batch * p.length + segment.start + step - batch * segment.steps;
    for (int64_t i = threadIdx.x; i < keys; i += SUM_THREADS) {
      const int64_t head = quotient_of(i, p.keys), k = i - head * p.keys;
      const int64_t from = (step * p.heads + head) * blocks * p.keys + k, at = row * keys + i;
      from_real(sum_of(s.dq + from, blocks, p.keys) * (Value)p.scale, (Stored*)to.dq + at);
      from_real(sum_of(s.dk + from, blocks, p.keys), (Stored*)to.dk + at);
      from_real(sum_of(s.da + from, blocks, p.keys), (Stored*)to.da + at);
      from_real(sum_of(s.db + from, blocks, p.keys), (Stored*)to.db + at);
      ((Value*)to.dlog_decay)[at] = sum_of(s.dlog_decay + from, blocks, p.keys);
    }
  }
}

template <class Stored>
const char* run_back(const Problem& p, const Backward& to, const BackwardScratch<Real<Stored>>& s,
                     void* stream) {
  const int threads = threads_of(p);
  const int64_t units = p.batches * p.heads * blocks_of(p, BACK_COLUMNS);
  const int64_t shared = 2 * threads / 32 * 2 * BACK_COLUMNS * (int64_t)sizeof(Real<Stored>);
  for (int64_t index = (p.chunks() - 1) / Segment::CHUNKS; index >= 0; --index) {
    const Segment segment(p, index);
    const auto back =
        p.keys <= threads ? back_kernel<Stored, true> : back_kernel<Stored, false>;
    if (const char* error = launch(back, units, threads, shared, stream, p, to, s, segment))
      return error;
    const int64_t steps = p.batches * segment.steps;
    if (const char* error =
            launch(sum_kernel<Stored>, steps, SUM_THREADS, 0, stream, p, to, s, segment))
      return error;
  }
  return nullptr;
}

template <class Stored>
const char* run_backward(const Problem& p, const Backward& to,
                         const BackwardScratch<Real<Stored>>& s, void* stream) {
  Walk walk;
  walk.running = s.running;
  walk.states = s.states;
  walk.reads = s.reads;
  if (const char* error = run_walk<Stored, true>(p, walk, stream)) return error;
  return run_back<Stored>(p, to, s, stream);
}

}  // namespace fuseport::dplr_delta_rule::cuda
