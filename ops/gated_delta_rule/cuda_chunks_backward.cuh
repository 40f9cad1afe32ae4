// A backward in chunks on CUDA: its memory, and its kernels in their order.
#pragma once

#include "gated_delta_rule/cuda_gradients.cuh"

namespace fuseport::gated_delta_rule::cuda {

// dq and dk of a span, from parts of all heads of a group.
template <class Stored>
__global__ void __launch_bounds__(GRADIENT_THREADS)
    join_kernel(Problem p, Span span, Parts parts, Backward to) {
  const int64_t size = p.heads_per_group(), start = span.first * T;
  const int64_t of_head = span.count * T * p.keys;
  const int64_t steps = p.length - start < span.count * T ? p.length - start : span.count * T;
  const int64_t of_step = p.groups * p.keys;
  for (int64_t i = blockIdx.x * (int64_t)GRADIENT_THREADS + threadIdx.x;
       i < p.batches * steps * of_step; i += gridDim.x * (int64_t)GRADIENT_THREADS) {
    const int64_t row = quotient_of(i, of_step), batch = quotient_of(row, steps);
    const int64_t rest = i - row * of_step, group = quotient_of(rest, p.keys);
    const int64_t t = row - batch * steps, k = rest - group * p.keys;
    const int64_t from = (batch * p.heads + group * size) * of_head + t * p.keys + k;
    float dq = 0, dk = 0;
    for (int64_t head = 0; head < size; ++head) {
      dq += parts.dq[from + head * of_head];
      dk += parts.dk[from + head * of_head];
    }
    const int64_t at = (batch * p.length + start + t) * of_step + rest;
    from_real(dq, (Stored*)to.dq + at);
    from_real(dk, (Stored*)to.dk + at);
  }
}

// Whether a backward is of chunks, too. Steps of few keys erase all of a state again and again: what is
// left of its cotangent a walk of steps multiplies up, and one of chunks has to subtract.
inline bool back_in_chunks(const Problem& p) {
  constexpr int64_t LEAST_KEYS = 8;
  return p.keys >= LEAST_KEYS && in_chunks(p) && with_keys(p, [](auto stored, auto keys) {
    using Tiles = GradientTiles<decltype(stored), decltype(keys)::value>;
    return (int64_t)sizeof(Tiles) <= most_shared();
  });
}

// Memory of the passes' own.
struct ChunksScratch {
  Kept kept;
  Left left;
  Parts parts;
  float* last;  // (b, H, K, V), the final state
  Prepared* prepared;
  int64_t bytes = 0;

  ChunksScratch(const Problem& p, void* base) {
    const int64_t heads = p.batches * p.heads, at_once = chunks_at_once(p);
    const int64_t state = p.keys * p.values, steps = heads * p.length * p.values;
    take(base, heads * chunks_of(p) * state, &kept.states);
    take(base, steps, &kept.errors);
    take(base, heads * at_once * state, &left.dstates);
    take(base, p.dtype == Dtype::float32 ? 0 : steps, &left.dvalues);
    for (float** part : {&parts.dq, &parts.dk}) take(base, heads * at_once * T * p.keys, part);
    take(base, heads * state, &last);
    take(base, heads * at_once, &prepared);
  }

 private:
  template <class Part>
  void take(void* base, int64_t count, Part** part) {
    *part = (Part*)((char*)base + bytes);
    bytes += (count * (int64_t)sizeof(Part) + 255) / 256 * 256;
  }
};

// A walk forth that keeps states and errors, and of each span, from the last on, a walk back, and
// gradients of its chunks.
inline const char* run_backward_in_chunks(const Problem& p, const Backward& to,
                                          const ChunksScratch& s, void* stream) {
  Left left = s.left;
  if (p.dtype == Dtype::float32) left.dvalues = (float*)to.dv;
  return with_keys(p, [&](auto stored, auto keys) -> const char* {
    using Stored = decltype(stored);
    constexpr int N = decltype(keys)::value;
    if (auto e = run_chunks<Stored, N>(p, {nullptr, s.last}, s.kept, s.prepared, stream)) return e;
    const int64_t at_once = chunks_at_once(p), last = (chunks_of(p) - 1) / at_once * at_once;
    for (int64_t first = last; first >= 0; first -= at_once) {
      const Span span = span_from(p, first);
      if (first != last)
        if (auto e = prepare<Stored, N>(p, span, s.prepared, stream)) return e;
      if (auto e = run_chunks_back<Stored, N>(p, span, s.prepared, to, left, stream)) return e;
      if (auto e = launch(gradients_kernel<Stored, N>, p.batches * p.heads * span.count,
                          GRADIENT_THREADS, sizeof(GradientTiles<Stored, N>), stream, p, span,
                          (const Prepared*)s.prepared, s.kept, left, to, s.parts))
        return e;
      const int64_t numbers = p.batches * span.count * T * p.groups * p.keys;
      if (auto e = launch(join_kernel<Stored>, (numbers + GRADIENT_THREADS - 1) / GRADIENT_THREADS,
                          GRADIENT_THREADS, 0, stream, p, span, s.parts, to))
        return e;
    }
    return nullptr;
  });
}

}  // namespace fuseport::gated_delta_rule::cuda
