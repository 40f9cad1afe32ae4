// The walk over chunks on CUDA, forth: products on tensor cores, and the state in registers.
//
// A block has up to 64 columns of one head, a warp 16 of these, with all of their rows of the
// state: it is transposed, a first operand as it was added up; so are errors, whose columns are
// steps. Tensor cores multiply bfloat16, as which k and q are exact, of float16 as two parts and of
// float32 as three; what is computed is cut into three, and into two for an out of 16 bits. Their
// sums are not rounded but cut off; so those of a chunk are made apart, and then added to the state,
// and of float32 those of all other products in pieces (cuda_apart.cuh).
#pragma once

#include "gated_delta_rule/cuda_chunks.cuh"

namespace fuseport::gated_delta_rule::cuda {

constexpr int MOST_COLUMNS = 64, MOST_WALK = MOST_COLUMNS / TILE * 32;  // threads

template <class Stored, int N>
struct WalkTiles {
  static constexpr int ROW = N + PAD<Stored>, V_ROW = MOST_COLUMNS + PAD<Stored>;
  Prepared prepared;
  Stored K[T * ROW], Q[T * ROW], V[T * V_ROW];
};

// Of steps in tiles of 16, a lane has of each eight two, c and c + 1, in columns g and g + 8.
using Sums = float[TILES][2][4];

// A tile of such sums as a first operand.
FUSEPORT_DEVICE void cut_tile(const float (&sums)[2][4], uint32_t (&to)[3][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t parts[3];
    cut(sums[i / 2][i % 2 * 2], sums[i / 2][i % 2 * 2 + 1], parts);
#pragma unroll
    for (int part = 0; part < 3; ++part) to[part][i] = parts[part];
  }
}

// Calls visit(sum, step) for all numbers of a lane.
template <class Visit>
FUSEPORT_DEVICE void each_step(Sums& sums, const Visit& visit) {
  const int c = (int)threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int n = 0; n < 8; ++n)
      visit(sums[i][n / 4][n % 4], i * TILE + n / 4 * 8 + c + n % 2);
}

// sums += from·mᵀ, where m is lower triangular; MOST: as of add_products.
template <class Stored, int MOST>
FUSEPORT_DEVICE void add_steps(Sums& sums, const Sums& from, const float (*m)[TILE_SIZE]) {
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
    uint32_t of_steps[3][4];
    cut_tile(from[j], of_steps);
#pragma unroll
    for (int i = j; i < TILES; ++i) {
      uint32_t of_m[3][4];
      load_parts<false, Four::across>(of_m, m[tile_of(i, j)], TILE_ROW);
      add_apart<Stored, MOST>(sums[i], of_steps, of_m);
    }
  }
}

// Writes steps of a tile in shared memory to out, from a block's first column on.
template <class Stored>
FUSEPORT_DEVICE void write_steps(const Problem& p, const Stored* tile, int row, int64_t batch,
                                 int64_t start, int64_t head, int64_t first, int columns,
                                 Stored* out) {
  constexpr int COUNT = VECTOR<Stored>;
  const int packs = (columns + COUNT - 1) / COUNT;
  const bool aligned = p.values % COUNT == 0 && (uintptr_t)out % 16 == 0;
  for (int i = (int)threadIdx.x; i < T * packs; i += (int)blockDim.x) {
    const int t = i / packs, n = i % packs * COUNT;
    if (start + t >= p.length) continue;
    const Stored* const from = tile + t * row + n;
    const int64_t step = (batch * p.length + start + t) * p.heads + head;
    Stored* const to = out + step * p.values + first + n;
    if (aligned && n + COUNT <= columns) {
      *(Pack<Stored, COUNT>*)to = *(const Pack<Stored, COUNT>*)from;
      continue;
    }
    for (int j = 0; j < COUNT && n + j < columns; ++j) to[j] = from[j];
  }
}

// Calls visit(number, at) for all numbers of a state that a lane has, of columns from `beside` on,
// with their places in (K, V) from the block's first column on.
template <int N, class Visit>
FUSEPORT_DEVICE void each_of_state(const Problem& p, const Place& place, int beside,
                                   float (&state)[N / TILE][2][4], const Visit& visit) {
  const int lane = (int)threadIdx.x % 32, g = lane / 4, c = lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < N / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = beside + g + i / 2 * 8, k = j * 8 + c + i % 2;
      if (column < place.count && k < p.keys)
        visit(state[j / 2][j % 2][i], k * p.values + column);
    }
}

// For a backward, in the place of out: the states before each chunk, (b, H, chunks of T, K, V), and
// the errors, (b, l, H, V).
struct Kept {
  float *states = nullptr, *errors = nullptr;
};

FUSEPORT_INLINED int64_t chunks_of(const Problem& p) { return (p.length + T - 1) / T; }

// N: keys, at most. From `start` on, which may be the final state, too.
template <class Stored, int N>
__global__ void __launch_bounds__(MOST_WALK)
    chunks_kernel(Problem p, Span span, const Prepared* all, const float* start, Forward f,
                  Kept kept) {
  using Tiles = WalkTiles<Stored, N>;
  constexpr int COUNT = PARTS<Stored>, OF_OUT = std::is_same_v<Stored, float> ? 3 : 2;
  constexpr int ROW = Tiles::ROW, V_ROW = Tiles::V_ROW;
  FUSEPORT_SHARED(memory);
  Tiles& tiles = *(Tiles*)memory;
  const int lane = (int)threadIdx.x % 32, beside = (int)threadIdx.x / 32 * TILE;
  const int g = lane / 4;
  const int width = (int)blockDim.x / 32 * TILE;
  const int64_t units = p.batches * p.heads * blocks_of(p, width), all_chunks = chunks_of(p);
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const Place place(p, width, unit);
    const Prepared* const prepared = all + (place.batch * p.heads + place.head) * span.count;
    const auto bring_first = [&](int64_t i) {
      const int64_t from = (span.first + i) * T, steps = p.length - from;
      bring_steps<T, N>(p.k, place.batch, from, place.group, 0, steps, p.keys, tiles.K);
      bring_steps<T, MOST_COLUMNS>(p.v, place.batch, from, place.head, place.first, steps,
                                   place.count, tiles.V);
    };
    const auto bring_rest = [&](int64_t i) {
      const int64_t from = (span.first + i) * T, steps = p.length - from;
      bring_steps<T, N>(p.q, place.batch, from, place.group, 0, steps, p.keys, tiles.Q);
      bring_part(prepared[i], tiles.prepared);
    };
    float state[N / TILE][2][4] = {};
    const auto each = [&](const auto& visit) { each_of_state<N>(p, place, beside, state, visit); };
    each([&](float& s, int64_t at) { s = start[place.state + at]; });
    __syncthreads();  // the unit before has read all
    bring_first(0);
    bring_rest(0);
    for (int64_t chunk = 0; chunk < span.count; ++chunk) {
      const Prepared& of = tiles.prepared;
      const int64_t from = (span.first + chunk) * T;
      if (kept.states) {
        const int64_t unit = (place.batch * p.heads + place.head) * all_chunks + span.first + chunk;
        float* const to = kept.states + unit * p.keys * p.values + place.first;
        each([&](float s, int64_t at) { to[at] = s; });
      }
      wait_for_copies();
      __syncthreads();
      Sums rest = {}, out = {};
#pragma unroll
      for (int k = 0; k < N / TILE; ++k) {
        uint32_t of_state[3][4];
        cut_tile(state[k], of_state);
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
          uint32_t keys[COUNT][4], queries[COUNT][4];
          load_parts<false, Four::across>(keys, tiles.K + (i * ROW + k) * TILE, ROW);
          add_apart<Stored>(rest[i], of_state, keys);
          if (kept.states) continue;
          load_parts<false, Four::across>(queries, tiles.Q + (i * ROW + k) * TILE, ROW);
          add_apart<Stored, OF_OUT>(out[i], of_state, queries);
        }
      }
      each_step(rest, [&](float& sum, int t) { sum *= -of.outer[t]; });
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        float values[4][2];
        load_pairs<true, Four::across>(values, tiles.V + i * TILE * V_ROW + beside, V_ROW);
#pragma unroll
        for (int n = 0; n < 8; ++n) rest[i][n / 4][n % 4] += values[n / 2][n % 2];
      }
      Sums updates = {};
      add_steps<Stored, 3>(updates, rest, of.N);
      int n = 0;
      if (kept.states) {
        each_step(updates, [&](float& sum, int t) {
          const int column = beside + g + n++ / 2 % 2 * 8;
          if (column < place.count && from + t < p.length)
            kept.errors[place.row(p, from + t) * p.values + place.first + column] = sum;
        });
      }
      each_step(updates, [&](float& sum, int t) { sum *= of.rate[t]; });
      if (!kept.states) {
        const float scale = (float)p.scale;
        each_step(out, [&](float& sum, int t) { sum *= scale * of.outer[t]; });
        add_steps<Stored, OF_OUT>(out, updates, of.P);
        each_step(out, [&](float& sum, int t) {  // of v, a warp has read its columns
          from_real(sum, tiles.V + t * V_ROW + beside + g + n++ / 2 % 2 * 8);
        });
      }
      each_step(updates, [&](float& sum, int t) { sum *= of.rest[t]; });
      const float kept_by[2] = {of.kept[0], of.kept[1]};
      const bool more = chunk + 1 < span.count;
      __syncthreads();
      if (more) bring_rest(chunk + 1);
      if (!kept.states)
        write_steps(p, tiles.V, V_ROW, place.batch, from, place.head, place.first, place.count,
                    (Stored*)f.out);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        constexpr int SOME = TILES / 2;
        uint32_t weighted[SOME][3][4];
#pragma unroll
        for (int i = 0; i < SOME; ++i) cut_tile(updates[half * SOME + i], weighted[i]);
#pragma unroll
        for (int k = 0; k < N / TILE; ++k) {
          float added[2][4] = {};
#pragma unroll
          for (int i = 0; i < SOME; ++i) {
            uint32_t keys[COUNT][4];
            load_parts<true, Four::down>(keys, tiles.K + ((half * SOME + i) * ROW + k) * TILE, ROW);
            add_products(added, weighted[i], keys);
          }
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            float& of_state = state[k][i / 4][i % 4];
            of_state = kept_by[half] * of_state + added[i / 4][i % 4];
          }
        }
      }
      if (!more) continue;
      __syncthreads();  // all of K and out has been read
      bring_first(chunk + 1);
    }
    float* const end = (float*)f.final_state;
    each([&](float s, int64_t at) { end[place.state + at] = s; });
  }
}

// Calls run(Stored{}, N) with room for so many keys as an integral constant.
template <class Run>
auto with_keys(const Problem& p, const Run& run) {
  const auto stored_so = [&](auto stored) {
    if (p.keys <= 64) return run(stored, std::integral_constant<int, 64>{});
    return run(stored, std::integral_constant<int, 128>{});
  };
  if (p.dtype == Dtype::float32) return stored_so(float{});
  return p.dtype == Dtype::float16 ? stored_so(Half{}) : stored_so(BFloat16{});
}

// Whether a walk is of chunks: a decay of each key channel would have products of their own.
inline bool in_chunks(const Problem& p) {
  if (p.dtype == Dtype::float64 || p.channels || p.keys > 128 || p.length < T) return false;
  return with_keys(p, [](auto stored, auto keys) {
    using Stored = decltype(stored);
    constexpr int64_t OF_CHUNK = sizeof(ChunkTiles<Stored, decltype(keys)::value>);
    constexpr int64_t OF_WALK = sizeof(WalkTiles<Stored, decltype(keys)::value>);
    return (OF_CHUNK > OF_WALK ? OF_CHUNK : OF_WALK) <= most_shared();
  });
}

// Chunks that are prepared at once: about as many as keep a GPU busy, in tens of megabytes.
inline int64_t chunks_at_once(const Problem& p) {
  constexpr int64_t LEAST = 4;
  const int64_t enough = 16 * (int64_t)multiprocessors();
  const int64_t all = chunks_of(p), each = enough / (p.batches * p.heads);
  const int64_t wanted = each < LEAST ? LEAST : each;
  return wanted < all ? wanted : all;
}

inline int64_t chunks_scratch(const Problem& p) {
  return p.batches * p.heads * chunks_at_once(p) * (int64_t)sizeof(Prepared);
}

// Threads of a walk's blocks: half as many columns where else some multiprocessors would have none.
inline int walk_threads(const Problem& p) {
  const bool few = p.batches * p.heads * blocks_of(p, MOST_COLUMNS) < multiprocessors();
  return few ? MOST_WALK / 2 : MOST_WALK;
}

inline int64_t walk_blocks(const Problem& p) {
  return p.batches * p.heads * blocks_of(p, walk_threads(p) / 32 * TILE);
}

// The chunks that are taken together, of which chunk `first` is the first.
inline Span span_from(const Problem& p, int64_t first) {
  const int64_t left = chunks_of(p) - first, at_once = chunks_at_once(p);
  return {first, left < at_once ? left : at_once};
}

template <class Stored, int N>
const char* prepare(const Problem& p, const Span& span, Prepared* to, void* stream) {
  return launch(prepare_kernel<Stored, N>, p.batches * p.heads * span.count, CHUNK_THREADS,
                sizeof(ChunkTiles<Stored, N>), stream, p, span, to);
}

// Leaves in `scratch` what is prepared of the last span.
template <class Stored, int N>
const char* run_chunks(const Problem& p, const Forward& to, const Kept& kept, Prepared* scratch,
                       void* stream) {
  for (int64_t first = 0; first < chunks_of(p); first += chunks_at_once(p)) {
    const Span span = span_from(p, first);
    if (auto e = prepare<Stored, N>(p, span, scratch, stream)) return e;
    const auto* const start = (const float*)(first == 0 ? p.initial_state : to.final_state);
    if (auto e = launch(chunks_kernel<Stored, N>, walk_blocks(p), walk_threads(p),
                        sizeof(WalkTiles<Stored, N>), stream, p, span, (const Prepared*)scratch,
                        start, to, kept))
      return e;
  }
  return nullptr;
}

}  // namespace fuseport::gated_delta_rule::cuda
