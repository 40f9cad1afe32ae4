// Gradients of a chunk's queries, keys, decays and rates on CUDA, on tensor cores, of all chunks at
// once: what walks have left of each is the state S before it, the cotangent D of the one after it,
// errors e_t, and w_t, the gradients of values. With d_ts = exp(c_t - c_s), of c and T as in
// cuda_chunks.cuh:
//
//     A_ts = scale·d_ts dout_t·e_s for s ≤ t         C_ts = d_ts w_t·e_s for s < t
//     x_t = scale·exp(c_t) S dout_t       y_t = exp(c_T - c_t) D e_t       z_t = exp(c_t) S w_t
//     dq_t = x_t + Σ A_ts β_s k_s
//     dk_t = β_t y_t - z_t + β_t (Σ A_st q_s - Σ C_st k_s) - Σ C_ts β_s k_s
//     F_ts = A_ts q_t·k_s - C_ts k_t·k_s             dβ_t = k_t·y_t + Σ F_st
//     dg_t = exp(c_T) Σ S∘D + Σ_{s ≥ t} (q_s·x_s - k_s·z_s) + Σ_{s < t} β_s k_s·y_s
//            + Σ_{r < t ≤ s} F_sr β_r
//
// Each term of the last has all of its decays, and none is a difference of sums of others: where steps
// forget, dg is far less than q_t·dq_t and v_t·dv_t, whose sums would give it, too.
#pragma once

#include "gated_delta_rule/cuda_chunks_back.cuh"

namespace fuseport::gated_delta_rule::cuda {

constexpr int GRADIENT_WARPS = 2 * TILES, GRADIENT_THREADS = GRADIENT_WARPS * 32;
constexpr int AT_ONCE = 32;  // columns of values

template <class Stored, int N>
struct GradientTiles {
  static constexpr int ROW = N + PAD<Stored>, REAL_ROW = AT_ONCE + PAD<float>;
  static constexpr int DOUT_ROW = AT_ONCE + PAD<Stored>;
  struct Columns {
    float state[N * REAL_ROW], dstate[N * REAL_ROW], errors[T * REAL_ROW], dvalues[T * REAL_ROW];
    Stored dout[T * DOUT_ROW];
  };
  struct Pairs {
    float A[BELOW][TILE_SIZE], C[BELOW][TILE_SIZE], F[BELOW][TILE_SIZE];
  };
  Stored K[T * ROW], Q[T * ROW];
  union {
    Columns columns;
    Pairs pairs;  // later
  };
  Factors factors;
  float dots[3][2][T];  // q_t·x_t, k_t·y_t and k_t·z_t, of half of the keys each
  double of_states[GRADIENT_WARPS];
};

// More than 99 KiB no block of a GPU for desktops can have.
static_assert(sizeof(GradientTiles<BFloat16, 128>) <= 99 * 1024);

// Of a tile on or below the diagonal, in their order, the row.
FUSEPORT_DEVICE int row_of_tile(int tile) { return tile < 1 ? 0 : tile < 3 ? 1 : tile < 6 ? 2 : 3; }

// Calls visit(n, row, column) for each number n of 8 that a lane has of a tile of 16 × 16.
template <class Visit>
FUSEPORT_DEVICE void each_of_tile(const Visit& visit) {
  const int lane = (int)threadIdx.x % 32, g = lane / 4, c = lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < 8; ++n) visit(n, g + n / 2 % 2 * 8, c + n / 4 * 8 + n % 2);
}

// A and C, in the place of sums of products, times rates; and F.
template <class Stored, int N>
FUSEPORT_DEVICE void find_pairs(float scale, GradientTiles<Stored, N>& tiles) {
  constexpr int COUNT = PARTS<Stored>, ROW = GradientTiles<Stored, N>::ROW;
  const Factors& of = tiles.factors;
  for (int tile = (int)threadIdx.x / 32; tile < BELOW; tile += GRADIENT_WARPS) {
    const int i = row_of_tile(tile), j = tile - tile_of(i, 0);
    float of_queries[2][4] = {}, of_keys[2][4] = {};
#pragma unroll
    for (int k = 0; k < N; k += TILE) {
      uint32_t left[COUNT][4], right[COUNT][4];
      load_parts<false, Four::across>(right, tiles.K + j * TILE * ROW + k, ROW);
      load_parts<false, Four::down>(left, tiles.Q + i * TILE * ROW + k, ROW);
      add_apart<float>(of_queries, left, right);
      load_parts<false, Four::down>(left, tiles.K + i * TILE * ROW + k, ROW);
      add_apart<float>(of_keys, left, right);
    }
    each_of_tile([&](int n, int row, int column) {
      const int t = i * TILE + row, s = j * TILE + column, at = row * TILE_ROW + column;
      float &a = tiles.pairs.A[tile][at], &c = tiles.pairs.C[tile][at];
      const float decay = s <= t ? of.decay(s, t) : 0.0f;
      const float of_a = s <= t ? scale * decay * a : 0.0f, of_c = s < t ? decay * c : 0.0f;
      tiles.pairs.F[tile][at] = of_a * of_queries[n / 4][n % 4] - of_c * of_keys[n / 4][n % 4];
      a = of_a * of.rate[s];
      c = of_c * of.rate[s];
    });
  }
}

// dβ, and what is before and after of a step's F, for its thread; all threads of a block call it.
template <class Stored, int N>
FUSEPORT_DEVICE void write_factors(const Problem& p, const Backward& to, int64_t row, int64_t steps,
                                   GradientTiles<Stored, N>& tiles) {
  const Factors& of = tiles.factors;
  const int t = (int)threadIdx.x, i = t / TILE, down = t % TILE;
  const bool mine = t < T;
  auto& F = tiles.pairs.F;
  const auto dot = [&](int what, int step) {
    return (double)tiles.dots[what][0][step] + (double)tiles.dots[what][1][step];
  };
  if (mine) {
    double sum = dot(1, t);
    for (int s = t; s < T; ++s) sum += (double)F[tile_of(s / TILE, i)][s % TILE * TILE_ROW + down];
    if (t < steps) ((float*)to.dbeta)[row + t * p.heads] = (float)sum;
  }
  __syncthreads();
  if (mine) {  // sums over what is before each column
    double sum = 0;
    for (int s = 0; s <= t; ++s) {
      float& f = F[tile_of(i, s / TILE)][down * TILE_ROW + s % TILE];
      const double own = (double)f * (double)of.rate[s];
      f = (float)sum;
      sum += own;
    }
  }
  __syncthreads();
  if (!mine || t >= steps) return;
  double sum = 0;
  for (int warp = 0; warp < GRADIENT_WARPS; ++warp) sum += tiles.of_states[warp];
  sum *= (double)of.kept[2];
  for (int s = t; s < T; ++s)
    sum += dot(0, s) - dot(2, s) + (double)F[tile_of(s / TILE, i)][s % TILE * TILE_ROW + down];
  for (int s = 0; s < t; ++s) sum += (double)of.rate[s] * dot(1, s);
  ((float*)to.dg)[row + t * p.heads] = (float)sum;
}

// Parts of dq and dk, of each head, (b, H, span of steps, K).
struct Parts {
  float *dq, *dk;
};

// N: keys, at most. A warp has 16 steps, and half of the keys.
template <class Stored, int N>
__global__ void __launch_bounds__(GRADIENT_THREADS)
    gradients_kernel(Problem p, Span span, const Prepared* all, Kept kept, Left left, Backward to,
                     Parts parts) {
  using Tiles = GradientTiles<Stored, N>;
  constexpr int COUNT = PARTS<Stored>, OF_GRADIENT = std::is_same_v<Stored, float> ? 3 : 2;
  constexpr int ROW = Tiles::ROW, REAL_ROW = Tiles::REAL_ROW, DOUT_ROW = Tiles::DOUT_ROW;
  constexpr int OF_KEYS = N / 2 / TILE, TURNS = (2 * BELOW + GRADIENT_WARPS - 1) / GRADIENT_WARPS;
  FUSEPORT_SHARED(memory);
  Tiles& tiles = *(Tiles*)memory;
  const Factors& of = tiles.factors;
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, own = warp % TILES;
  const int half = warp / TILES, first_key = half * (N / 2);
  const int64_t of_head = p.values, of_step = p.heads * p.values, of_batch = p.length * of_step;
  const Strided errors{kept.errors, of_batch, of_step, of_head, 1};
  const Strided dvalues{left.dvalues, of_batch, of_step, of_head, 1};
  for (int64_t unit = blockIdx.x; unit < p.batches * p.heads * span.count; unit += gridDim.x) {
    const int64_t both = quotient_of(unit, span.count), batch = quotient_of(both, p.heads);
    const int64_t head = both - batch * p.heads, group = quotient_of(head, p.heads_per_group());
    const int64_t chunk = span.first + unit - both * span.count;
    const int64_t start = chunk * T, steps = p.length - start, size = p.keys * p.values;
    const Strided state{kept.states + (both * chunks_of(p) + chunk) * size, 0, p.values, 0, 1};
    const Strided dstate{left.dstates + unit * size, 0, p.values, 0, 1};
    __syncthreads();  // the unit before has been read
    bring_steps<T, N>(p.k, batch, start, group, 0, steps, p.keys, tiles.K);
    bring_steps<T, N>(p.q, batch, start, group, 0, steps, p.keys, tiles.Q);
    bring_part<Factors>(all[unit], tiles.factors);

    float x[OF_KEYS][2][4] = {}, y[OF_KEYS][2][4] = {}, z[OF_KEYS][2][4] = {};
    float products[TURNS][2][4] = {};
    double of_states = 0;
    auto& columns = tiles.columns;
    for (int64_t first = 0; first < p.values; first += AT_ONCE) {
      const int64_t count = p.values - first;
      if (first > 0) __syncthreads();  // the columns before have been read
      bring_steps<N, AT_ONCE>(state, 0, 0, 0, first, p.keys, count, columns.state);
      bring_steps<N, AT_ONCE>(dstate, 0, 0, 0, first, p.keys, count, columns.dstate);
      bring_steps<T, AT_ONCE>(errors, batch, start, head, first, steps, count, columns.errors);
      bring_steps<T, AT_ONCE>(dvalues, batch, start, head, first, steps, count, columns.dvalues);
      bring_steps<T, AT_ONCE>(to.dout, batch, start, head, first, steps, count, columns.dout);
      wait_for_copies();
      __syncthreads();
      for (int i = (int)threadIdx.x; i < N * AT_ONCE; i += GRADIENT_THREADS) {
        const int at = i / AT_ONCE * REAL_ROW + i % AT_ONCE;
        of_states += (double)columns.state[at] * (double)columns.dstate[at];
      }
#pragma unroll 1
      for (int v = 0; v < AT_ONCE; v += TILE) {
        const int row = own * TILE;
        uint32_t of_out[COUNT][4], of_steps[3][4], some[3][4];
        load_parts<false, Four::down>(of_steps, columns.errors + row * REAL_ROW + v, REAL_ROW);
#pragma unroll
        for (int k = 0; k < OF_KEYS; ++k) {
          const float* const right = columns.dstate + (first_key + k * TILE) * REAL_ROW + v;
          load_parts<false, Four::across>(some, right, REAL_ROW);
          add_apart<float>(y[k], of_steps, some);
        }
        load_parts<false, Four::down>(of_out, columns.dout + row * DOUT_ROW + v, DOUT_ROW);
        load_parts<false, Four::down>(of_steps, columns.dvalues + row * REAL_ROW + v, REAL_ROW);
#pragma unroll
        for (int k = 0; k < OF_KEYS; ++k) {
          const float* const right = columns.state + (first_key + k * TILE) * REAL_ROW + v;
          load_parts<false, Four::across>(some, right, REAL_ROW);
          add_apart<float>(x[k], of_out, some);
          add_apart<float>(z[k], of_steps, some);
        }
#pragma unroll
        for (int n = 0; n < TURNS; ++n) {
          const int turn = warp + n * GRADIENT_WARPS, tile = turn % BELOW, i = row_of_tile(tile);
          if (turn >= 2 * BELOW) continue;
          const float* const right = columns.errors + (tile - tile_of(i, 0)) * TILE * REAL_ROW + v;
          load_parts<false, Four::across>(some, right, REAL_ROW);
          if (turn < BELOW) {
            load_parts<false, Four::down>(of_out, columns.dout + i * TILE * DOUT_ROW + v, DOUT_ROW);
            add_apart<float>(products[n], of_out, some);
          } else {
            const float* const values = columns.dvalues + i * TILE * REAL_ROW + v;
            load_parts<false, Four::down>(of_steps, values, REAL_ROW);
            add_apart<float>(products[n], of_steps, some);
          }
        }
      }
    }
    for (int mask = 16; mask > 0; mask /= 2) of_states += shuffled(of_states, mask);
    if (lane == 0) tiles.of_states[warp] = of_states;
    __syncthreads();
#pragma unroll
    for (int n = 0; n < TURNS; ++n) {
      const int turn = warp + n * GRADIENT_WARPS;
      if (turn >= 2 * BELOW) continue;
      float* const tile = turn < BELOW ? tiles.pairs.A[turn] : tiles.pairs.C[turn - BELOW];
      each_of_tile([&](int i, int row, int column) {
        tile[row * TILE_ROW + column] = products[n][i / 4][i % 4];
      });
    }

    // x, y and z have all of their factors from here on.
    const float scale = (float)p.scale;
    float dots[3][2] = {};
#pragma unroll
    for (int k = 0; k < OF_KEYS; ++k)
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int t = own * TILE + lane / 4 + n / 2 % 2 * 8;
        const int at = t * ROW + first_key + k * TILE + lane % 4 * 2 + n / 4 * 8 + n % 2;
        float &of_x = x[k][n / 4][n % 4], &of_y = y[k][n / 4][n % 4], &of_z = z[k][n / 4][n % 4];
        of_x *= scale * of.outer[t];
        of_y *= of.left[t];
        of_z *= of.outer[t];
        const float key = to_real(tiles.K[at]);
        dots[0][n / 2 % 2] += to_real(tiles.Q[at]) * of_x;
        dots[1][n / 2 % 2] += key * of_y;
        dots[2][n / 2 % 2] += key * of_z;
        of_z = of.rate[t] * of_y - of_z;
      }
#pragma unroll
    for (int what = 0; what < 3; ++what)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        sum_over_lanes<4, 1, 1>(dots[what] + n);
        if (lane % 4 == 0) tiles.dots[what][half][own * TILE + lane / 4 + n * 8] = dots[what][n];
      }
    __syncthreads();
    find_pairs(scale, tiles);
    __syncthreads();
    write_factors(p, to, (batch * p.length + start) * p.heads + head, steps, tiles);

    // x becomes dq, and z, which is what dk has of states, dk but for what is of C.
    float of_C[OF_KEYS][2][4] = {};
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
      const bool down = j <= own, up = j >= own;
      const int tile = down ? tile_of(own, j) : tile_of(j, own);
      uint32_t of_a[3][4], of_c[3][4], keys[COUNT][4], queries[COUNT][4];
      if (down) load_parts<false, Four::down>(of_a, tiles.pairs.A[tile], TILE_ROW);
#pragma unroll
      for (int k = 0; k < OF_KEYS; ++k) {
        if (!down) break;
        load_parts<true, Four::down>(keys, tiles.K + j * TILE * ROW + first_key + k * TILE, ROW);
        add_apart<Stored, OF_GRADIENT>(x[k], of_a, keys);
      }
      if (down) load_parts<false, Four::down>(of_c, tiles.pairs.C[tile], TILE_ROW);
#pragma unroll
      for (int k = 0; k < OF_KEYS; ++k) {
        if (!down) break;
        load_parts<true, Four::down>(keys, tiles.K + j * TILE * ROW + first_key + k * TILE, ROW);
        add_apart<Stored, OF_GRADIENT>(of_C[k], of_c, keys);
      }
      if (up) {
        load_parts<true, Four::across>(of_a, tiles.pairs.A[tile], TILE_ROW);
        load_parts<true, Four::across>(of_c, tiles.pairs.C[tile], TILE_ROW);
      }
#pragma unroll
      for (int k = 0; k < OF_KEYS; ++k) {
        if (!up) break;
        const int at = j * TILE * ROW + first_key + k * TILE;
        load_parts<true, Four::down>(queries, tiles.Q + at, ROW);
        add_apart<Stored, OF_GRADIENT>(z[k], of_a, queries);
        load_parts<true, Four::down>(keys, tiles.K + at, ROW);
        add_apart<Stored, OF_GRADIENT>(of_C[k], of_c, keys);
      }
    }
#pragma unroll
    for (int k = 0; k < OF_KEYS; ++k)
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int t = own * TILE + lane / 4 + n / 2 % 2 * 8;
        const int key = first_key + k * TILE + lane % 4 * 2 + n / 4 * 8 + n % 2;
        if (t >= steps || key >= p.keys) continue;
        const int64_t at = (unit * T + t) * p.keys + key;
        parts.dq[at] = x[k][n / 4][n % 4];
        parts.dk[at] = z[k][n / 4][n % 4] - of_C[k][n / 4][n % 4];
      }
  }
}

}  // namespace fuseport::gated_delta_rule::cuda
