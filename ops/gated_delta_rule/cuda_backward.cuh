// The gated delta rule on CUDA, backward, step by step: a walk that keeps the states before all
// chunks, one back through time, by the formulas of reference.py, and sums of what blocks left. The
// last two take a segment of time after the other, so that what blocks leave takes no more memory than
// a segment's.
#pragma once

#include "gated_delta_rule/kernel.cuh"

namespace fuseport::gated_delta_rule::cuda {

constexpr int BACK_COLUMNS = 32;  // of a block's columns in the walk back
constexpr int SUM_THREADS = 128;

using Segment = fuseport::cuda::Segment<CHUNK>;

// Memory of the passes' own, all of it real.
template <class Value>
struct BackwardScratch {
  Value *states, *running, *errors;  // as a walk writes them
  Value* decayed;                    // of each unit (32, columns, K): states before a step's update
  Value *dq, *dk, *dg;               // parts: (b, steps of a segment, H, blocks of columns, K)
  Value* dbeta;                      // parts: (b, steps of a segment, H, blocks of columns)
  int64_t bytes;

  BackwardScratch(const Problem& p, void* base) {
    const int64_t heads = p.batches * p.heads, blocks = blocks_of(p, BACK_COLUMNS);
    const int64_t state = p.keys * p.values, steps = heads * Segment(p, 0).steps;
    DeviceParts parts{base};
    parts.take(heads * p.chunks() * state, &states);
    parts.take(heads * state, &running);
    parts.take(heads * p.length * p.values, &errors);
    parts.take(heads * blocks * CHUNK * BACK_COLUMNS * p.keys, &decayed);
    parts.take(steps * blocks * p.keys, &dq, &dk, &dg);
    parts.take(steps * blocks, &dbeta);
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
      Value* const decayed = s.decayed + unit * CHUNK * C * p.keys;  // each thread reads its own
      for (int64_t k = threadIdx.x; k < p.keys; k += threads) {
        Value state[C] = {};
#pragma unroll
        for (int c = 0; c < C; ++c)
          if (c < place.count)
            state[c] = s.states[place.chunk_state(p, chunk) + k * p.values + c];
        for (int i = 0; i < steps; ++i) {
          const int64_t t = start + i;
          const Value decay = decay_of<Value>(p, place, t, k);
          const Value key = key_of<Stored>(p, place, t, k) * rate_of<Value>(p, place, t);
          Value errors[C];
          load_columns<C>(s.errors + place.row(p, t) * p.values + place.first, 1, place.count,
                          errors);
#pragma unroll
          for (int c = 0; c < C; ++c) {
            if (c >= place.count) continue;
            state[c] *= decay;
            decayed[(i * C + c) * p.keys + k] = state[c];
            state[c] += key * errors[c];
          }
        }
      }

      for (int i = steps - 1; i >= 0; --i) {
        const int64_t t = start + i;
        const Stored* const dout =
            at<Stored>(to.dout, place.batch, t, place.head) + place.first * to.dout.column;
        const Value rate = rate_of<Value>(p, place, t);
        Value sums[C] = {}, couts[C], errors[C];
        load_columns<C>(dout, to.dout.column, place.count, couts);
        load_columns<C>(s.errors + place.row(p, t) * p.values + place.first, 1, place.count,
                        errors);
        for (int64_t k = threadIdx.x; k < p.keys; k += threads) {
          const Value query = query_of<Stored>(p, place, t, k);
          const Value key = key_of<Stored>(p, place, t, k);
#pragma unroll
          for (int c = 0; c < C; ++c) {
            if (c >= place.count) continue;
            const Value d = get(k, c) + query * couts[c];
            put(k, c, d);
            sums[c] += key * d;
          }
        }
        Value* const shared = (Value*)memory + turn * (threads / 32 * C);
        turn ^= 1;
        add_up<C>(sums, shared);
        Value dbeta = 0;
#pragma unroll
        for (int c = 0; c < C; ++c) {
          sums[c] = 0;
          if (c >= place.count) continue;
          const Value dupdate = total<C>(shared, c);
          dbeta += dupdate * errors[c];
          sums[c] = rate * dupdate;  // dv
          if ((int)threadIdx.x == c)
            from_real(sums[c], (Stored*)to.dv + place.row(p, t) * p.values + place.first + c);
        }
        const int64_t step = place.batch * segment.steps + t - segment.start;
        const int64_t part = (step * p.heads + place.head) * blocks + place.block;
        if (threadIdx.x == 0) s.dbeta[part] = dbeta;
        for (int64_t k = threadIdx.x; k < p.keys; k += threads) {
          const Value key = key_of<Stored>(p, place, t, k);
          const Value decay = decay_of<Value>(p, place, t, k);
          Value dq = 0, dk = 0, dg = 0, states[C];
          load_columns<C>(decayed + i * C * p.keys + k, p.keys, place.count, states);
#pragma unroll
          for (int c = 0; c < C; ++c) {
            if (c >= place.count) continue;
            const Value state = states[c], update = rate * errors[c];
            const Value d = get(k, c), earlier = d - key * sums[c];
            dq += (state + key * update) * couts[c];
            dk += d * update - state * sums[c];
            dg += state * earlier;
            put(k, c, earlier * decay);
          }
          s.dq[part * p.keys + k] = dq;
          s.dk[part * p.keys + k] = dk;
          s.dg[part * p.keys + k] = dg;
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

// A block has steps of a segment in turn; a warp, of a decay that is a head's, heads in turn.
template <class Stored>
__global__ void __launch_bounds__(SUM_THREADS)
    sum_kernel(Problem p, Backward to, BackwardScratch<Real<Stored>> s, Segment segment) {
  using Value = Real<Stored>;
  const int64_t blocks = blocks_of(p, BACK_COLUMNS), size = p.heads_per_group();
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
  for (int64_t step = blockIdx.x; step < p.batches * segment.steps; step += gridDim.x) {
    const int64_t batch = quotient_of(step, segment.steps);
    const int64_t row = batch * p.length + segment.start + step - batch * segment.steps;
    const int64_t first = step * p.heads, to_first = row * p.heads;
    for (int64_t i = threadIdx.x; i < p.groups * p.keys; i += SUM_THREADS) {
      const int64_t group = quotient_of(i, p.keys), k = i - group * p.keys;
      const int64_t from = (first + group * size) * blocks * p.keys + k;
      const Value dq = sum_of(s.dq + from, size * blocks, p.keys) * (Value)p.scale;
      from_real(dq, (Stored*)to.dq + row * p.groups * p.keys + i);
      from_real(sum_of(s.dk + from, size * blocks, p.keys),
                (Stored*)to.dk + row * p.groups * p.keys + i);
    }
    for (int64_t head = threadIdx.x; head < p.heads; head += SUM_THREADS)
      ((Value*)to.dbeta)[to_first + head] = sum_of(s.dbeta + (first + head) * blocks, blocks, 1);
    if (p.channels) {
      for (int64_t i = threadIdx.x; i < p.heads * p.keys; i += SUM_THREADS) {
        const int64_t head = quotient_of(i, p.keys), k = i - head * p.keys;
        ((Value*)to.dg)[to_first * p.keys + i] =
            sum_of(s.dg + (first + head) * blocks * p.keys + k, blocks, p.keys);
      }
      continue;
    }
    for (int64_t head = warp; head < p.heads; head += SUM_THREADS / 32) {
      Value sum = 0;
      for (int64_t i = lane; i < blocks * p.keys; i += 32)
        sum += s.dg[(first + head) * blocks * p.keys + i];
      for (int mask = 16; mask > 0; mask /= 2) sum += shuffled(sum, mask);
      if (lane == 0) ((Value*)to.dg)[to_first + head] = sum;
    }
  }
}

template <class Stored>
const char* run_back(const Problem& p, const Backward& to, const BackwardScratch<Real<Stored>>& s,
                     void* stream) {
  const int threads = threads_of(p);
  const int64_t units = p.batches * p.heads * blocks_of(p, BACK_COLUMNS);
  const int64_t shared = 2 * threads / 32 * BACK_COLUMNS * (int64_t)sizeof(Real<Stored>);
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
  walk.errors = s.errors;
  if (const char* error = run_walk<Stored, true>(p, walk, stream)) return error;
  return run_back<Stored>(p, to, s, stream);
}

}  // namespace fuseport::gated_delta_rule::cuda
