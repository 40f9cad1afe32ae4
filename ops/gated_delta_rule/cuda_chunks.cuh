// Chunks of steps on CUDA as products of matrices, on tensor cores: what is known of each before
// its state is. Its T steps t and s, of one head, have the names of reference.py; S is the state
// before them, and c_t = g_1 + … + g_t:
//
//     L_ts = exp(c_t - c_s) k_t·k_s for s < t       P_ts = scale·exp(c_t - c_s) q_t·k_s for s ≤ t
//     N = (1 + L diag(β))⁻¹                         E = N (V - diag(exp(c)) K S), of errors e_t
//     out = scale·diag(exp(c)) Q S + P diag(β) E    S_T = exp(c_T) S + Σ exp(c_T - c_t) k_t u_tᵀ
//
// The last is made for one half of the steps after the other, so that tensor cores add up little.
// This is the WY form of Yang et al. (arXiv 2412.06464), with the inverse on errors and not on
// keys: what is subtracted from v is then one number.
#pragma once

#include "gated_delta_rule/kernel.cuh"
#include "native/cuda_apart.cuh"

namespace fuseport::gated_delta_rule::cuda {

constexpr int T = 64, TILES = T / TILE, HALF = T / 2;
constexpr int BELOW = TILES * (TILES + 1) / 2;  // tiles on and below the diagonal
constexpr int TILE_ROW = TILE + PAD<float>, TILE_SIZE = TILE * TILE_ROW;
constexpr int CHUNK_WARPS = 4, CHUNK_THREADS = CHUNK_WARPS * 32;
static_assert(CHUNK_WARPS == TILES);

FUSEPORT_DEVICE int tile_of(int i, int j) { return i * (i + 1) / 2 + j; }

// Chunks of T steps, from `first` on; those that are taken together have scratch for each head.
struct Span {
  int64_t first, count;
};

// What is left for the walks, of a chunk and a head: matrices in tiles, and of steps their factors.
struct alignas(16) Matrices {
  float N[BELOW][TILE_SIZE], P[BELOW][TILE_SIZE];
};
struct alignas(16) Factors {
  // exp(c_t), exp(c_h - c_t) for the last step h of the half that t is in, exp(c_T - c_t), and β_t.
  float outer[T], rest[T], left[T], rate[T];
  float total[T], lost[T];  // c_t is their sum
  float kept[4];            // exp(c_h) of the first half, exp(c_T - c_h), and exp(c_T)

  FUSEPORT_DEVICE float decay(int from, int to) const {  // exp(c_to - c_from)
    return exp_of_any(total[to] - total[from] + (lost[to] - lost[from]));
  }
};
struct Prepared : Matrices, Factors {};
static_assert(sizeof(Prepared) == sizeof(Matrices) + sizeof(Factors));

// Copies what a chunk has of one kind, by all threads.
template <class Part>
FUSEPORT_DEVICE void bring_part(const Part& from, Part& to) {
  static_assert(sizeof(Part) % 16 == 0);
  for (int i = (int)threadIdx.x; i < (int)sizeof(Part) / 16; i += (int)blockDim.x)
    copy_later((char*)&to + i * 16, (const char*)&from + i * 16, true);
}

template <class Stored, int N>
struct ChunkTiles {
  static constexpr int ROW = N + PAD<Stored>;
  Stored K[T * ROW], Q[T * ROW];
  Prepared prepared;
  float g[T];
  static_assert(sizeof(K) + sizeof(Q) >= sizeof(prepared.N));
};

// So far from 0 the exponential is 0 or Inf, and sums stay finite.
FUSEPORT_DEVICE float decay_within(float g) {
  constexpr float MOST = 1e6f;
  return g < -MOST ? -MOST : g > MOST ? MOST : g;
}

// L diag(β), in N's place, and P, in tiles that warps take in turn.
template <class Stored, int N>
FUSEPORT_DEVICE void find_products(float scale, ChunkTiles<Stored, N>& tiles) {
  constexpr int COUNT = PARTS<Stored>, ROW = ChunkTiles<Stored, N>::ROW;
  const int lane = (int)threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
  for (int turn = (int)threadIdx.x / 32; turn < 2 * BELOW; turn += CHUNK_WARPS) {
    const bool of_keys = turn < BELOW;
    const int tile = of_keys ? turn : turn - BELOW;
    const int i = tile < 1 ? 0 : tile < 3 ? 1 : tile < 6 ? 2 : 3, j = tile - i * (i + 1) / 2;
    const Stored* const left = (of_keys ? tiles.K : tiles.Q) + i * TILE * ROW;
    float sums[2][4] = {};
#pragma unroll
    for (int k = 0; k < N; k += TILE) {
      uint32_t a[COUNT][4], b[COUNT][4];
      load_parts<false, Four::down>(a, left + k, ROW);
      load_parts<false, Four::across>(b, tiles.K + j * TILE * ROW + k, ROW);
      add_apart<Stored>(sums, a, b);
    }
    float* const to = of_keys ? tiles.prepared.N[tile] : tiles.prepared.P[tile];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int down = row + n / 2 % 2 * 8, across = column + n / 4 * 8 + n % 2;
      const int t = i * TILE + down, s = j * TILE + across;
      const float factor = of_keys ? tiles.prepared.rate[s] : scale;
      const bool there = of_keys ? s < t : s <= t;
      to[down * TILE_ROW + across] =
          there ? tiles.prepared.decay(s, t) * sums[n / 4][n % 4] * factor : 0.0f;
    }
  }
}

// The inverse of 1 + B, where B is strictly lower triangular: a warp each has a tile of the
// diagonal; those below are of all threads. Sums are double: where keys repeat, most of the inverse
// is what is left of numbers of about 1 that cancel.
FUSEPORT_DEVICE void invert(const float (*B)[TILE_SIZE], float (*to)[TILE_SIZE]) {
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
  if (lane < TILE) {
    const int tile = tile_of(warp, warp);
    double x[TILE];
#pragma unroll
    for (int t = 0; t < TILE; ++t) {
      x[t] = t == lane ? 1.0 : 0.0;
#pragma unroll
      for (int s = 0; s < t; ++s) x[t] -= B[tile][t * TILE_ROW + s] * x[s];
      to[tile][t * TILE_ROW + lane] = (float)x[t];
    }
  }
  constexpr int SQUARE = TILE * TILE, MOST = (TILES - 1) * SQUARE / CHUNK_THREADS;
  for (int below = 1; below < TILES; ++below) {
    const int count = (TILES - below) * SQUARE;
    __syncthreads();
    for (int e = (int)threadIdx.x; e < count; e += CHUNK_THREADS) {
      const int j = e / SQUARE, i = j + below, t = e % SQUARE / TILE, s = e % TILE;
      double sum = 0;
      for (int k = j; k < i; ++k) {
        const float* const left = B[tile_of(i, k)] + t * TILE_ROW;
        const float* const right = to[tile_of(k, j)] + s;
#pragma unroll
        for (int r = 0; r < TILE; ++r) sum += (double)left[r] * right[r * TILE_ROW];
      }
      to[tile_of(i, j)][t * TILE_ROW + s] = (float)sum;
    }
    __syncthreads();
    double own[MOST];
#pragma unroll
    for (int n = 0; n < MOST; ++n) {
      const int e = (int)threadIdx.x + n * CHUNK_THREADS;
      if (e >= count) continue;
      const int j = e / SQUARE, i = j + below, t = e % SQUARE / TILE, s = e % TILE;
      const float* const left = to[tile_of(i, i)] + t * TILE_ROW;
      const float* const right = to[tile_of(i, j)] + s;
      own[n] = 0;
      for (int r = 0; r <= t; ++r) own[n] -= (double)left[r] * right[r * TILE_ROW];
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < MOST; ++n) {
      const int e = (int)threadIdx.x + n * CHUNK_THREADS;
      if (e >= count) continue;
      const int j = e / SQUARE, t = e % SQUARE / TILE, s = e % TILE;
      to[tile_of(j + below, j)][t * TILE_ROW + s] = own[n];
    }
  }
  __syncthreads();
}

// N: keys, at most. Writes (b, H, span).
template <class Stored, int N>
__global__ void __launch_bounds__(CHUNK_THREADS)
    prepare_kernel(Problem p, Span span, Prepared* all) {
  using Tiles = ChunkTiles<Stored, N>;
  FUSEPORT_SHARED(memory);
  Tiles& tiles = *(Tiles*)memory;
  const int t = (int)threadIdx.x;
  for (int64_t unit = blockIdx.x; unit < p.batches * p.heads * span.count; unit += gridDim.x) {
    const int64_t both = quotient_of(unit, span.count), batch = quotient_of(both, p.heads);
    const int64_t head = both - batch * p.heads, group = quotient_of(head, p.heads_per_group());
    const int64_t start = (span.first + unit - both * span.count) * T, steps = p.length - start;
    __syncthreads();  // the unit before has been read
    bring_steps<T, N>(p.k, batch, start, group, 0, steps, p.keys, tiles.K);
    bring_steps<T, N>(p.q, batch, start, group, 0, steps, p.keys, tiles.Q);
    if (t < T) {
      const bool there = t < steps;
      tiles.g[t] = there ? decay_within(*at<float>(p.g, batch, start + t, head)) : 0.0f;
      tiles.prepared.rate[t] = there ? *at<float>(p.beta, batch, start + t, head) : 0.0f;
    }
    __syncthreads();
    if (t < T) {
      double sum = 0;
      for (int s = 0; s <= t; ++s) sum += (double)tiles.g[s];
      tiles.prepared.total[t] = (float)sum;
      tiles.prepared.lost[t] = (float)(sum - (double)tiles.prepared.total[t]);
    }
    wait_for_copies();
    __syncthreads();
    if (t < T) {
      Factors& of = tiles.prepared;
      of.outer[t] = exp_of_any(of.total[t]);
      of.rest[t] = of.decay(t, t < HALF ? HALF - 1 : T - 1);
      of.left[t] = of.decay(t, T - 1);
      if (t == HALF - 1) {
        of.kept[0] = of.outer[t];
        of.kept[1] = of.left[t];
        of.kept[2] = exp_of_any(of.total[T - 1]);
        of.kept[3] = 0;
      }
    }
    find_products(float(p.scale), tiles);
    __syncthreads();
    auto* const inverse = (float(*)[TILE_SIZE])memory;  // in the place of K and Q
    invert(tiles.prepared.N, inverse);
    using Numbers = Pack<float, 4>;
    constexpr int OF_N = (int)sizeof(tiles.prepared.N) / 16, OF_ALL = (int)sizeof(Prepared) / 16;
    auto* const to = (Numbers*)(all + unit);
    for (int i = t; i < OF_ALL; i += CHUNK_THREADS)
      to[i] = i < OF_N ? ((const Numbers*)memory)[i] : ((const Numbers*)&tiles.prepared)[i];
  }
}

}  // namespace fuseport::gated_delta_rule::cuda
