// The kernels for CUDA, for all dtypes; ops/cuda.py compiles this file with nvcc.
//
// A thread has some pairs of one position, its column, whose angles stay in registers, and takes heads
// in turn. Backward, the threads of a column add up the gradients of its angles in shared memory, and
// a second kernel what parts of the heads have left, where there are parts: both in a fixed order.
#include <type_traits>

#include "native/cuda_vectors.cuh"
#include "rotary_embedding/cuda.hpp"

namespace fuseport::rotary_embedding::cuda {
namespace {

using namespace fuseport::cuda;

constexpr int COLUMNS = 32, TURNS = 8, THREADS = COLUMNS * TURNS;  // of a block
constexpr int AT_ONCE = 2, BACK_AT_ONCE = 1;  // heads that a thread loads: four packs of each row

// All that a grid shares. Blocks of the same columns follow each other, each with a part of the heads.
struct Grid {
  int64_t positions;  // of all tables
  int64_t packs;      // of pairs of a position
  int64_t rest;       // packs of its channels that belong to no pair
  int64_t heads;      // that share an angle
  int64_t columns, parts, blocks;

  // With packs of v numbers, and `at_once` heads that a thread loads: no more parts than give each
  // thread so many, nor than `most`.
  Grid(const Problem& p, int v, int at_once, int64_t most)
      : positions((p.of_batch ? p.batch : 1) * p.length),
        packs(p.pairs / v),
        rest((p.channels - 2 * p.pairs) / v),
        heads((p.of_batch ? 1 : p.batch) * p.heads),
        columns(positions * (packs + rest)) {
    const int64_t worth = (heads + TURNS * at_once - 1) / (TURNS * at_once);
    parts = worth < most ? worth : most;
    if (parts < 1) parts = 1;
    blocks = (columns + COLUMNS - 1) / COLUMNS * parts;
  }
};

// Where a thread is: in a block of columns, and in the heads.
template <int V>
struct Place {
  bool there, pairs;  // pairs: or channels that belong to none
  int64_t position, table, t, first;  // the first pair, or channel
  int64_t part;

  FUSEPORT_DEVICE Place(const Problem& p, const Grid& g, int64_t block) {
    const int64_t of_columns = quotient_of(block, g.parts), width = g.packs + g.rest;
    const int64_t column = of_columns * COLUMNS + threadIdx.x % COLUMNS;
    part = block - of_columns * g.parts;
    there = column < g.columns;
    position = there ? quotient_of(column, width) : 0;
    table = quotient_of(position, p.length);
    t = position - table * p.length;
    const int64_t pack = column - position * width;
    pairs = pack < g.packs;
    first = pairs ? pack * V : 2 * p.pairs + (pack - g.packs) * V;
  }

  // The first head of this thread; from head to head.
  FUSEPORT_DEVICE int64_t begin() const { return part * TURNS + threadIdx.x / COLUMNS; }
};

// Where a row of some head begins.
template <class Stored>
FUSEPORT_DEVICE const Stored* row_of(const Heads& x, int64_t b, int64_t h, int64_t t) {
  return (const Stored*)x.data + b * x.batch_stride + h * x.head_stride + t * x.stride;
}

template <class Stored>
FUSEPORT_DEVICE Stored* row_of(const Problem& p, void* contiguous, int64_t b, int64_t h,
                               int64_t t) {
  return (Stored*)contiguous + ((b * p.heads + h) * p.length + t) * p.channels;
}

// The numbers of V pairs, or of V channels and nothing, as they lie in memory.
template <class Stored, int V>
struct Numbers {
  Pack<Stored, V> at[2];

  FUSEPORT_DEVICE void load(const Problem& p, const Place<V>& place, const Stored* row) {
    if (!place.pairs) {
      at[0] = pack_at<V>(row + place.first);
    } else if (p.interleaved) {
      at[0] = pack_at<V>(row + 2 * place.first);
      at[1] = pack_at<V>(row + 2 * place.first + V);
    } else {
      at[0] = pack_at<V>(row + place.first);
      at[1] = pack_at<V>(row + p.pairs + place.first);
    }
  }

  FUSEPORT_DEVICE void store(const Problem& p, const Place<V>& place, Stored* row) const {
    if (!place.pairs) {
      put_pack(at[0], row + place.first);
    } else if (p.interleaved) {
      put_pack(at[0], row + 2 * place.first);
      put_pack(at[1], row + 2 * place.first + V);
    } else {
      put_pack(at[0], row + place.first);
      put_pack(at[1], row + p.pairs + place.first);
    }
  }

  // The two numbers of each pair.
  FUSEPORT_DEVICE void get(const Problem& p, Real<Stored>* a, Real<Stored>* b) const {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const int first = 2 * i, second = first + 1;
      const Stored neighbour_a = at[first / V].at[first % V], half_a = at[0].at[i];
      const Stored neighbour_b = at[second / V].at[second % V], half_b = at[1].at[i];
      a[i] = to_real(p.interleaved ? neighbour_a : half_a);
      b[i] = to_real(p.interleaved ? neighbour_b : half_b);
    }
  }

  FUSEPORT_DEVICE void set(const Problem& p, const Real<Stored>* a, const Real<Stored>* b) {
#pragma unroll
    for (int i = 0; i < 2 * V; ++i) {
      const Real<Stored> neighbour = i % 2 ? b[i / 2] : a[i / 2], half = i < V ? a[i] : b[i - V];
      from_real(p.interleaved ? neighbour : half, &at[i / V].at[i % V]);
    }
  }
};

template <int V, class Stored>
FUSEPORT_DEVICE void load_angles(const Problem& p, const Table& table, const Place<V>& place,
                                 Real<Stored>* to) {
  const int64_t at = place.table * table.batch_stride + place.t * table.stride + place.first;
  if (p.wide_angles) {
    load_at_once<V>((const Real<Stored>*)table.data + at, to);
  } else {
    load_at_once<V>((const Stored*)table.data + at, to);
  }
}

// Calls work(b, h, which) for this thread's heads, AT of them at a time, of which those that are not
// there are left out; before it load(b, h, which), and the loads of all come first.
template <int AT, int V, class Load, class Work>
FUSEPORT_DEVICE void for_each_head(const Problem& p, const Grid& g, const Place<V>& place,
                                   const Load& load, const Work& work) {
  const int64_t step = g.parts * TURNS;
  const auto at = [&](int64_t head, int which, const auto& call) {
    if (head >= g.heads) return;
    const int64_t b = p.of_batch ? place.table : quotient_of(head, p.heads);
    call(b, p.of_batch ? head : head - b * p.heads, which);
  };
  for (int64_t head = place.begin(); head < g.heads; head += step * AT) {
#pragma unroll
    for (int i = 0; i < AT; ++i) at(head + i * step, i, load);
#pragma unroll
    for (int i = 0; i < AT; ++i) at(head + i * step, i, work);
  }
}

template <class Stored, int V>
__global__ void __launch_bounds__(THREADS, 2) forward_kernel(Problem p, Grid g, void* out) {
  using Value = Real<Stored>;
  for (int64_t block = blockIdx.x; block < g.blocks; block += gridDim.x) {
    const Place<V> place(p, g, block);
    if (!place.there) continue;
    Value cos[V], sin[V];
    if (place.pairs) {
      load_angles<V, Stored>(p, p.cos, place, cos);
      load_angles<V, Stored>(p, p.sin, place, sin);
    }
    Numbers<Stored, V> x[AT_ONCE];
    for_each_head<AT_ONCE>(
        p, g, place,
        [&](int64_t b, int64_t h, int i) {
          x[i].load(p, place, row_of<Stored>(p.x, b, h, place.t));
        },
        [&](int64_t batch, int64_t h, int i) {
          if (place.pairs) {
            Value a[V], b[V];
            x[i].get(p, a, b);
#pragma unroll
            for (int j = 0; j < V; ++j) {
              const Value first = a[j], second = b[j];
              a[j] = first * cos[j] - second * sin[j];
              b[j] = second * cos[j] + first * sin[j];
            }
            x[i].set(p, a, b);
          }
          x[i].store(p, place, row_of<Stored>(p, out, batch, h, place.t));
        });
  }
}

// Stores a gradient of angle i of all tables.
template <class Stored>
FUSEPORT_DEVICE void store_angle(const Problem& p, Real<Stored> value, void* to, int64_t i) {
  if (p.wide_angles) {
    ((Real<Stored>*)to)[i] = value;
  } else {
    from_real(value, (Stored*)to + i);
  }
}

// What a block's threads of one column have, each 2·V numbers, summed up; each gets some of the sums,
// which it stores: of a part, (parts, 2, positions, pairs), or as they are.
template <class Stored, int V>
FUSEPORT_DEVICE void store_sums(const Problem& p, const Grid& g, const Backward& to,
                                const Place<V>& place, Real<Stored>* sums, Real<Stored>* shared,
                                Real<Stored>* parts) {
  const int column = (int)threadIdx.x % COLUMNS, turn = (int)threadIdx.x / COLUMNS;
#pragma unroll
  for (int i = 0; i < 2 * V; ++i) shared[(turn * 2 * V + i) * COLUMNS + column] = sums[i];
  __syncthreads();
  if (place.there && place.pairs)
    for (int i = turn; i < 2 * V; i += TURNS) {
      Real<Stored> sum = 0;
#pragma unroll
      for (int j = 0; j < TURNS; ++j) sum += shared[(j * 2 * V + i) * COLUMNS + column];
      const int64_t angle = place.position * p.pairs + place.first + i % V;
      if (g.parts == 1) {
        store_angle<Stored>(p, sum, i < V ? to.dcos : to.dsin, angle);
      } else {
        parts[(place.part * 2 + i / V) * g.positions * p.pairs + angle] = sum;
      }
    }
  __syncthreads();
}

template <class Stored, int V>
__global__ void __launch_bounds__(THREADS, 2)
    backward_kernel(Problem p, Grid g, Backward to, Real<Stored>* parts) {
  FUSEPORT_SHARED(memory);
  using Value = Real<Stored>;
  for (int64_t block = blockIdx.x; block < g.blocks; block += gridDim.x) {
    const Place<V> place(p, g, block);
    Value cos[V], sin[V], sums[2 * V];
#pragma unroll
    for (int i = 0; i < 2 * V; ++i) sums[i] = 0;
    if (place.there && place.pairs) {
      load_angles<V, Stored>(p, p.cos, place, cos);
      load_angles<V, Stored>(p, p.sin, place, sin);
    }
    Numbers<Stored, V> x[BACK_AT_ONCE], d[BACK_AT_ONCE];
    if (place.there)
      for_each_head<BACK_AT_ONCE>(
          p, g, place,
          [&](int64_t b, int64_t h, int i) {
            d[i].load(p, place, row_of<Stored>(to.dout, b, h, place.t));
            if (place.pairs) x[i].load(p, place, row_of<Stored>(p.x, b, h, place.t));
          },
          [&](int64_t batch, int64_t h, int i) {
            if (place.pairs) {
              Value a[V], b[V], da[V], db[V];
              x[i].get(p, a, b);
              d[i].get(p, da, db);
#pragma unroll
              for (int j = 0; j < V; ++j) {
                const Value first = da[j], second = db[j];
                sums[j] += first * a[j] + second * b[j];
                sums[V + j] += second * a[j] - first * b[j];
                da[j] = first * cos[j] + second * sin[j];
                db[j] = second * cos[j] - first * sin[j];
              }
              d[i].set(p, da, db);
            }
            d[i].store(p, place, row_of<Stored>(p, to.dx, batch, h, place.t));
          });
    store_sums<Stored, V>(p, g, to, place, sums, (Value*)memory, parts);
  }
}

template <class Stored>
__global__ void __launch_bounds__(PART_THREADS)
    sum_kernel(Problem p, const Real<Stored>* from, int64_t parts, int64_t angles, Backward to) {
  FUSEPORT_SHARED(memory);
  sum_parts(from, parts, 2 * angles, (double*)memory, [&](int64_t i, double sum) {
    const bool of_cos = i < angles;
    store_angle<Stored>(p, (Real<Stored>)sum, of_cos ? to.dcos : to.dsin, of_cos ? i : i - angles);
  });
}

template <int V, class Stored>
bool aligned_heads(const Problem& p, const Heads& x) {
  return aligned<V, Stored>(x.data, p.batch > 1 ? x.batch_stride : 0,
                            p.heads > 1 ? x.head_stride : 0, p.length > 1 ? x.stride : 0);
}

template <int V, class Stored>
bool aligned_table(const Problem& p, const Table& table) {
  const int64_t batch = p.batch > 1 ? table.batch_stride : 0, row = p.length > 1 ? table.stride : 0;
  return p.wide_angles ? aligned<V, Real<Stored>>(table.data, batch, row)
                       : aligned<V, Stored>(table.data, batch, row);
}

// Calls run(Stored{}, V) with how many pairs can be moved at once as an integral constant.
template <class Run, class... Other>
const char* with_packs(const Problem& p, const Run& run, const Other&... heads) {
  return with_dtype(p.dtype, [&](auto stored) {
    using Stored = decltype(stored);
    constexpr int V = VECTOR<Stored>;
    const bool whole = p.pairs % V == 0 && p.channels % V == 0 &&
                       (aligned_heads<V, Stored>(p, heads) && ...) &&
                       aligned_table<V, Stored>(p, p.cos) && aligned_table<V, Stored>(p, p.sin);
    return whole ? run(stored, std::integral_constant<int, V>{})
                 : run(stored, std::integral_constant<int, 1>{});
  });
}

Grid forward_grid(const Problem& p, int v) { return Grid(p, v, AT_ONCE, 1 << 20); }

// Parts cost a pass of their own here: no more than keep the device busy.
Grid backward_grid(const Problem& p, int v) {
  constexpr int64_t BUSY = 8;  // blocks of a multiprocessor
  const int64_t whole = Grid(p, v, BACK_AT_ONCE, 1).blocks, wanted = BUSY * multiprocessors();
  return Grid(p, v, BACK_AT_ONCE, whole > 0 ? (wanted + whole - 1) / whole : 1);
}

}  // namespace

const char* forward(const Problem& p, void* out, void* stream) {
  if (p.batch * p.heads * p.length * p.channels == 0) return nullptr;
  const auto run = [&](auto stored, auto v) {
    constexpr int V = decltype(v)::value;
    const Grid g = forward_grid(p, V);
    return launch(forward_kernel<decltype(stored), V>, g.blocks, THREADS, 0, stream, p, g, out);
  };
  return with_packs(p, run, p.x);
}

int64_t scratch_bytes(const Problem& p, const Backward& to) {
  int64_t bytes = 0;
  with_packs(
      p,
      [&](auto stored, auto v) -> const char* {
        const Grid g = backward_grid(p, decltype(v)::value);
        if (g.parts > 1)
          bytes = g.parts * 2 * g.positions * p.pairs * (int64_t)sizeof(Real<decltype(stored)>);
        return nullptr;
      },
      p.x, to.dout);
  return bytes;
}

const char* backward(const Problem& p, const Backward& to, void* scratch, void* stream) {
  const auto run = [&](auto stored, auto v) -> const char* {
    using Stored = decltype(stored);
    constexpr int V = decltype(v)::value;
    const Grid g = backward_grid(p, V);
    if (g.columns == 0) return nullptr;
    auto* const parts = (Real<Stored>*)scratch;
    const int64_t shared = THREADS * 2 * V * (int64_t)sizeof(Real<Stored>);
    const char* error = launch(backward_kernel<Stored, V>, g.blocks, THREADS, shared, stream, p, g,
                               to, parts);
    const int64_t angles = g.positions * p.pairs;
    if (error || g.parts == 1 || angles == 0) return error;
    return launch(sum_kernel<Stored>, part_blocks(2 * angles), PART_THREADS, PART_SHARED, stream, p,
                  (const Real<Stored>*)parts, g.parts, angles, to);
  };
  return with_packs(p, run, p.x, to.dout);
}

}  // namespace fuseport::rotary_embedding::cuda
