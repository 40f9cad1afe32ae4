// The walk over the chunks, products on tensor cores and the state in registers: the whole forward
// pass in one kernel; or, for the backward pass, the states, with what a gate makes of dout, and their
// cotangents by a walk back. Names are those of reference.py.
//
// A block has 64 columns of one head's x, and walks over the chunks of a segment; each of its warps
// has up to 128 states of 16 columns, as that to which tensor cores add. Of more states, twice as many
// warps have half each, and add up their y. Tensor cores multiply bfloat16, as which x, B and C are
// exact, of float16 as two parts and of float32 as three; what is not is cut: M and the state into two,
// which suffices for an out of 16 bits, and w·x into three, which makes states as exact as float32
// does. Their sums are not rounded but cut off; so those of a chunk are made apart, and then added to
// the state; and of float32 the long ones, C·B and C·h, in pieces (cuda_apart.cuh).
#pragma once

#include "ssd_chunk_scan/cuda_operands.cuh"

namespace fuseport::ssd_chunk_scan::cuda {

// Of N states: how many a warp has, and how many warps have the states of the same columns.
template <int N>
constexpr int OWN = N < 128 ? N : 128;
template <int N>
constexpr int SHARES = N / OWN<N>;
constexpr int ACROSS = COLUMNS / TILE;  // warps, beside each other
template <int N>
constexpr int WALK_THREADS = ACROSS * SHARES<N> * WARP;

// Tiles in shared memory. A chunk's are used while the next's are on their way, but for C, which is
// free before the states are added to; of float32 there is room for one chunk's. OfX: x's type, or
// dy's. C and M are there if OUT; if not, there is room for B's parts.
template <class Stored, class OfX, int N, bool OUT>
struct WalkTiles {
  static constexpr int ROW = N + PAD<Stored>, X_ROW = COLUMNS + PAD<OfX>;
  static constexpr int AT_ONCE = std::is_same_v<Stored, float> ? 1 : 2;  // chunks
  Stored C[OUT ? T * ROW : VECTOR<Stored>];
  Operand<Stored, N, !OUT> B[AT_ONCE];
  OfX x[AT_ONCE][T * X_ROW];
  std::conditional_t<OUT, Mixed<Stored>, char> M;
  Factors factors[2];
};

// More than 99 KiB no block of a GPU for desktops can have: more states have products there.
static_assert(sizeof(WalkTiles<float, float, 128, true>) <= 99 * 1024);

enum class Walks {
  add_up,  // what each segment adds to the state, but the one that comes last
  keep,    // the state before each chunk
  gate,    // the same, and dy and dz
  out,     // out
};

// Of a multiprocessor, for as many registers as there are.
template <class Stored, int N, Walks WALKS>
constexpr int WALK_BLOCKS = WALKS == Walks::gate || WALKS == Walks::out ? 2 / SHARES<N>
                            : std::is_same_v<Stored, float>             ? 2
                                                                        : 3;

// N: states, at most; of more, blocks have `shares`, if there is no out. `BACK`: the state's cotangent;
// dy is in x's place, C in B's, exp(c_t) in w_t's.
template <class Stored, class OfX, int N, Walks WALKS, bool BACK>
__global__ void __launch_bounds__(WALK_THREADS<N>, WALK_BLOCKS<Stored, N, WALKS>)
    walk_kernel(Problem p, Steps s, Segments segments, int64_t shares, Walk walk) {
  constexpr bool GATE = WALKS == Walks::gate, ADD_UP = WALKS == Walks::add_up;
  constexpr bool OUT = WALKS == Walks::out || GATE;
  static_assert(!(OUT && BACK) && (BACK || std::is_same_v<Stored, OfX>));
  using Tiles = WalkTiles<Stored, OfX, N, OUT>;
  // Each warp cuts float32's C, but once: it has a column of M's tiles, for which is as well what it
  // loads of C for y.
  constexpr bool BY_COLUMNS = std::is_same_v<Stored, float> && SHARES<N> == 1;
  static_assert(ACROSS == TILES);
  constexpr int COUNT = PARTS<Stored>, OF_M = Mixed<Stored>::COUNT, AT_ONCE = Tiles::AT_ONCE;
  FUSEPORT_SHARED(memory);
  Tiles& tiles = *(Tiles*)memory;
  const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
  const int beside = warp % ACROSS * TILE;  // a warp's first column, and its first state
  const int mine = SHARES<N> > 1 ? warp / ACROSS * OWN<N> : 0;
  const int g = lane / 4, c = lane % 4 * 2;  // of a fragment: the first row, and the first column
  const int64_t chunks = chunks_of(p), blocks = (p.width + COLUMNS - 1) / COLUMNS * shares;
  const int64_t count = segments.count - ADD_UP;
  for (int64_t unit = blockIdx.x; unit < p.batches * count * p.heads * blocks;
       unit += gridDim.x) {
    const int64_t head = unit / blocks, column = unit % blocks / shares * COLUMNS;
    const int64_t states = unit % shares * N;  // the first of a block
    const int64_t h = head % p.heads, turn = head / p.heads % count;
    const int64_t segment = BACK ? segments.count - 1 - turn : turn;
    const int64_t batch = head / p.heads / count, group = h / (p.heads / p.groups);
    const int64_t first = segment * segments.span;
    const int64_t last = first + segments.span < chunks ? first + segments.span : chunks;

    const auto bring_C = [&](int64_t chunk) {
      bring<N>(p.C, batch, chunk * T, group, 0, p.length - chunk * T, p.states, tiles.C);
    };
    const auto bring_rest = [&](int64_t chunk) {
      const int64_t steps = p.length - chunk * T;
      tiles.B[chunk % AT_ONCE].template bring<WALK_THREADS<N>>(
          BACK ? p.C : p.B, batch, chunk * T, group, states, steps, p.states - states);
      bring<COLUMNS>(BACK ? walk.dout : p.x, batch, chunk * T, h, column, steps, p.width - column,
                     tiles.x[chunk % AT_ONCE]);
    };
    const StatePart part(p, column + beside + g, states + mine + c);
    const int64_t size = p.width * p.states;
    const int64_t own = (batch * p.heads + h) * size;
    const int64_t of_segment = ((batch * segments.count + segment) * p.heads + h) * size;
    float state[OWN<N> / 8][4] = {};
    if (!ADD_UP) {
      const float* const start = segments.count > 1 ? (const float*)walk.segments + of_segment
                                                    : (const float*)walk.start + own;
      part.load(start, state);
    }

    constexpr int64_t FORTH = BACK ? -1 : 1;
    const int64_t from = BACK ? last - 1 : first, beyond = BACK ? first - 1 : last;
    Asked asked;
    __syncthreads();  // the unit before has read all
    asked.ask(p, s, batch * chunks + from, h);
    if (OUT) bring_C(from);
    bring_rest(from);
    for (int64_t chunk = from; chunk != beyond; chunk += FORTH) {
      if (WALKS == Walks::keep || GATE) {
        part.store(state, (float*)walk.kept + ((batch * chunks + chunk) * p.heads + h) * size);
      }
      const auto& B = tiles.B[chunk % AT_ONCE];
      const OfX* const x = tiles.x[chunk % AT_ONCE] + beside;
      Factors& factors = tiles.factors[chunk % 2];
      const Decays<float> d = factors.decays();
      asked.put(factors);
      wait_for_copies();
      __syncthreads();
      if (threadIdx.x < T) factors.find((int)threadIdx.x);
      const int64_t next = chunk + FORTH;
      if (next != beyond) {
        asked.ask(p, s, batch * chunks + next, h);
        if (AT_ONCE > 1) bring_rest(next);
      }
      if (!OUT) __syncthreads();  // of factors

      if constexpr (OUT) {
        // A tile of M, from C·Bᵀ.
        const auto mix = [&](int i, int j, const float (&CB)[2][4]) {
#pragma unroll
          for (int half = 0; half < 4; ++half) {
            const int t = i * TILE + g + half % 2 * 8, from = j * TILE + c + half / 2 * 8;
            float mixed[2];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
              const float of_CB = CB[half / 2][half % 2 * 2 + k];
              const float of_M = of_CB * d.between(from + k, t) * d.delta(from + k);
              mixed[k] = from + k > t ? 0.0f : of_M;
            }
            tiles.M.put(t, from, mixed);
          }
        };
        // In tiles on and below the diagonal, in turn by all warps.
        for (int tile = warp; !BY_COLUMNS && tile < BELOW; tile += ACROSS * SHARES<N>) {
          const int i = tile < 1 ? 0 : tile < 3 ? 1 : tile < 6 ? 2 : 3, j = tile - i * (i + 1) / 2;
          static_assert(TILES == 4);
          float CB[2][4] = {};
#pragma unroll
          for (int k = 0; k < N; k += TILE) {
            uint32_t of_C[COUNT][4], of_B[COUNT][4];
            load_parts<false, Four::down>(of_C, tiles.C + i * TILE * Tiles::ROW + k, Tiles::ROW);
            B.template load<false, Four::across>(of_B, j * TILE, k);
            add_apart<Stored>(CB, of_C, of_B);
          }
          mix(i, j, CB);
        }
        if (!BY_COLUMNS) __syncthreads();

        float y[TILES][2][4] = {}, of_column[BY_COLUMNS ? TILES : 1][2][4] = {};
#pragma unroll
        for (int k = 0; k < OWN<N> / TILE; ++k) {
          uint32_t of_state[OF_M][4];  // of the columns of x from 0 and from 8 on, of 8 states each
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            uint32_t parts[OF_M];
            cut(state[2 * k + i % 2][i / 2 * 2], state[2 * k + i % 2][i / 2 * 2 + 1], parts);
#pragma unroll
            for (int part = 0; part < OF_M; ++part) of_state[part][i] = parts[part];
          }
          uint32_t of_B[COUNT][4];
          if constexpr (BY_COLUMNS)
            B.template load<false, Four::across>(of_B, warp * TILE, k * TILE);
#pragma unroll
          for (int i = 0; i < TILES; ++i) {
            uint32_t of_C[COUNT][4];
            load_parts<false, Four::down>(of_C, tiles.C + mine + (i * Tiles::ROW + k) * TILE,
                                          Tiles::ROW);
            add_apart<Stored>(y[i], of_C, of_state);
            if constexpr (BY_COLUMNS)
              if (i >= warp) add_apart<Stored>(of_column[i], of_C, of_B);
          }
        }
        if constexpr (BY_COLUMNS) {
#pragma unroll
          for (int i = 0; i < TILES; ++i)
            if (i >= warp) mix(i, warp, of_column[i]);
          __syncthreads();
        }
        const LanePairs pairs(p, batch, chunk * T + g, h, column + beside + c);
        LanePairs::Pairs<Stored> of_z = {}, of_dout = {};
        if (mine == 0 && (GATE || p.z.data)) pairs.ask<Stored>(p.z, of_z);
        if (mine == 0 && GATE) pairs.ask<Stored>(walk.dout, of_dout);
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
          for (int j = 0; j < 8; ++j) y[i][j / 4][j % 4] *= factors.outer[i * TILE + g + j % 4 / 2 * 8];
#pragma unroll
        for (int k = 0; k < TILES; ++k) {
          if (mine > 0) break;
          uint32_t of_x[PARTS<OfX>][4];
          load_parts<true, Four::down>(of_x, x + k * TILE * Tiles::X_ROW, Tiles::X_ROW);
#pragma unroll
          for (int i = k; i < TILES; ++i) {
            uint32_t of_M[OF_M][4];
            tiles.M.template load<false>(of_M, i, k);
            add_products(y[i], of_M, of_x);
          }
        }
        if constexpr (SHARES<N> > 1) {
          // The others' y, in C's place.
          float* const others = (float*)tiles.C + beside / TILE * WARP + lane;
          __syncthreads();
#pragma unroll
          for (int i = 0; i < TILES * 8; ++i)
            if (mine > 0) others[i * ACROSS * WARP] = y[i / 8][i / 4 % 2][i % 4];
          __syncthreads();
#pragma unroll
          for (int i = 0; i < TILES * 8; ++i)
            if (mine == 0) y[i / 8][i / 4 % 2][i % 4] += others[i * ACROSS * WARP];
        }
        if (mine == 0)
          finish_pairs<GATE, Stored>(p, walk, pairs, x + g * Tiles::X_ROW + c, Tiles::X_ROW, of_z,
                                     of_dout, y);
        __syncthreads();
        if (next != beyond) bring_C(next);
      }

      // h_next = exp(c_T) h + Σ_s w_s x_s B_sᵀ, or dh = exp(c_T) g + Σ_t exp(c_t) dy_t C_tᵀ
      uint32_t weighted[TILES][3][4];
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        float pairs[4][2];
        load_pairs<true, Four::across>(pairs, x + i * TILE * Tiles::X_ROW, Tiles::X_ROW);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float* const w = (BACK ? factors.outer : factors.w) + i * TILE + c + k / 2 * 8;
          uint32_t parts[3];
          cut(pairs[k][0] * w[0], pairs[k][1] * w[1], parts);
#pragma unroll
          for (int part = 0; part < 3; ++part) weighted[i][part][k] = parts[part];
        }
      }
      const float kept = factors.outer[T - 1];
#pragma unroll
      for (int k = 0; k < OWN<N> / TILE; ++k) {
        float added[2][4] = {};
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
          uint32_t of_B[COUNT][4];
          B.template load<true, Four::down>(of_B, i * TILE, mine + k * TILE);
          add_products(added, weighted[i], of_B);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float& of_state = state[2 * k + i / 4][i % 4];
          of_state = kept * of_state + added[i / 4][i % 4];
        }
      }
      if (AT_ONCE > 1 || next == beyond) continue;
      __syncthreads();  // all of the chunk has been read
      bring_rest(next);
    }
    if (ADD_UP) {
      part.store(state, (float*)walk.segments + of_segment);
    } else if (walk.end && segment == (BACK ? 0 : segments.count - 1)) {
      part.store(state, (float*)walk.end + own);
    }
  }
}

}  // namespace fuseport::ssd_chunk_scan::cuda
