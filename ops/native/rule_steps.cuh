// What the step-by-step kernels of delta rules share on CUDA. A block of threads has some columns of the
// state of one head, a thread a row of these. A Problem has sizes: batches, length, heads, keys, values.
#pragma once

#include "native/cuda_vectors.cuh"
#include "native/strided.hpp"

namespace fuseport::cuda {

constexpr int MOST_THREADS = 256;
constexpr int WALK_COLUMNS = 8;  // of a block's columns in a walk

// Whole warps.
template <class Problem>
int threads_of(const Problem& p) {
  const int64_t whole = (p.keys + 31) / 32 * 32;
  return (int)(whole < MOST_THREADS ? whole : MOST_THREADS);
}

template <class Problem>
FUSEPORT_INLINED int64_t blocks_of(const Problem& p, int columns) {
  return (p.values + columns - 1) / columns;
}

// The columns that a unit has.
struct Place {
  int64_t batch, head, block, first;
  int count;
  int64_t state;  // where they begin in (batch, H, K, V)

  template <class Problem>
  FUSEPORT_DEVICE Place(const Problem& p, int columns, int64_t unit) {
    const int64_t blocks = blocks_of(p, columns), both = quotient_of(unit, blocks);
    block = unit - both * blocks;
    batch = quotient_of(both, p.heads);
    head = both - batch * p.heads;
    first = block * columns;
    count = (int)(p.values - first < columns ? p.values - first : columns);
    state = both * p.keys * p.values + first;
  }

  // Where this head's numbers of a step begin in (batch, l, H, …), contiguous, of one for each head.
  template <class Problem>
  FUSEPORT_DEVICE int64_t row(const Problem& p, int64_t t) const {
    return (batch * p.length + t) * p.heads + head;
  }

  // Where its columns of the state before a chunk begin in (batch, H, chunks, K, V).
  template <class Problem>
  FUSEPORT_DEVICE int64_t chunk_state(const Problem& p, int64_t chunk) const {
    return ((batch * p.heads + head) * p.chunks() + chunk) * p.keys * p.values + first;
  }
};

template <class Number>
FUSEPORT_DEVICE const Number* at(const Strided& s, int64_t batch, int64_t t, int64_t head) {
  return (const Number*)s.data + batch * s.batch + t * s.step + head * s.head;
}

// exp(g). Far from 0 it is the square of exp(g/2): where the exponential is below the normal numbers,
// the unit for it gives 0.
template <class Value>
FUSEPORT_DEVICE Value exp_of_any(Value g) {
  const bool far = g < -80 || g > 80;
  const Value e = exp_of_minus_abs(far ? g / 2 : g), root = g > 0 ? (Value)1 / e : e;
  return far ? root * root : root;
}

// Sums v over the warps of a block, each into its row of `shared`: `total` adds those up. The memory of
// one call may be written again in the next but one.
template <int COUNT, class Value>
FUSEPORT_DEVICE void add_up(Value* v, Value* shared) {
  constexpr int ALIKE = 32 / COUNT;
  sum_over_lanes<32, 1, COUNT>(v);
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
  if (lane % ALIKE == 0) shared[warp * COUNT + lane / ALIKE] = v[0];
  __syncthreads();
}

template <int COUNT, class Value>
FUSEPORT_DEVICE Value total(const Value* shared, int i) {
  const int warps = (int)blockDim.x / 32;
  Value sum = shared[i];
  for (int warp = 1; warp < warps; ++warp) sum += shared[warp * COUNT + i];
  return sum;
}

// The first `count` of C numbers, `stride` apart: all are asked for before any is waited for.
template <int C, class Number, class Value>
FUSEPORT_DEVICE void load_columns(const Number* from, int64_t stride, int count, Value* to) {
  Number found[C];
#pragma unroll
  for (int c = 0; c < C; ++c) found[c] = c < count ? from[c * stride] : Number{};
#pragma unroll
  for (int c = 0; c < C; ++c) to[c] = to_real(found[c]);
}

// Chunks from `first` on, and their steps: what blocks of a backward leave takes no more memory than a
// segment's.
template <int64_t CHUNK>
struct Segment {
  static constexpr int64_t CHUNKS = 8;
  int64_t first, chunks, start, steps;

  template <class Problem>
  Segment(const Problem& p, int64_t index) {
    first = index * CHUNKS;
    chunks = p.chunks() - first < CHUNKS ? p.chunks() - first : CHUNKS;
    start = first * CHUNK;
    steps = p.length - start < CHUNKS * CHUNK ? p.length - start : CHUNKS * CHUNK;
  }
};

// The sum over `count` parts in a row, `stride` apart.
template <class Value>
FUSEPORT_DEVICE Value sum_of(const Value* parts, int64_t count, int64_t stride) {
  Value sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += parts[i * stride];
  return sum;
}

// Hands out parts of device memory, each aligned.
struct DeviceParts {
  void* base;
  int64_t bytes = 0;

  template <class... Value>
  void take(int64_t count, Value**... parts) {
    ((*parts = (Value*)((char*)base + bytes),
      bytes += (count * (int64_t)sizeof(Value) + 255) / 256 * 256), ...);
  }
};

}  // namespace fuseport::cuda
