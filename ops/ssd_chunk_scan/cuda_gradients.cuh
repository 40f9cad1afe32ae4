// The backward pass between the walks: all gradients of a chunk in one kernel, products on tensor
// cores. Names are those of reference.py; g is the cotangent of the state after the chunk.
//
// A block has some heads of a group, in turn, of one chunk, and sums up their dB and dC, which each of
// its warps has in registers: of each 64 states 16, and of the chunk half of the steps. It takes 64
// columns of a head at a time: what belongs to its steps is a sum over all of them. Operands are
// bfloat16; M and Q are cut into two parts where the gradients that they make have 16 bits, and h, g
// and the dy of a gate into three, since those of A and of dt's bias, which are float32, are sums of
// theirs.
#pragma once

#include <type_traits>

#include "ssd_chunk_scan/cuda_backward.cuh"
#include "ssd_chunk_scan/cuda_operands.cuh"

namespace fuseport::ssd_chunk_scan::cuda {

// Tiles in shared memory. CUT: whether B, C, M and Q are cut once, for which float32 may find no room,
// and of 256 states finds none; x and dy always are. OfDy: dout's type, or float32 where dy is
// another's gradient.
template <class Stored, class OfDy, int N, bool CUT>
struct GradientTiles {
  Operand<Stored, N, CUT> B, C;
  Operand<Stored, COLUMNS, true> x;
  Operand<OfDy, COLUMNS, true> dy;
  union {
    StateParts state;             // h or g of some states
    Mixed<Stored, CUT> mixed[2];  // M and Q, later
  };
  Factors factors;
  // Sums of K without its diagonal, of eight columns or a tile's rows; as for row_excess.
  double rows[T / 8][T], columns[TILES][T];
  float diagonal[T];
  float dw[4][T], read[4][T];               // of 16 of each 64 states
  double scratch[STEPS_SCRATCH], dots[THREADS / WARP];
  float D[COLUMNS], raw[T];  // dt with its bias
};

// More than 99 KiB no block of a GPU for desktops can have.
static_assert(sizeof(GradientTiles<BFloat16, BFloat16, 128, true>) <= 99 * 1024);

// Of a multiprocessor: where shared memory has room for one, it has twice the registers.
template <class Stored, int N>
constexpr int GRADIENT_BLOCKS = std::is_same_v<Stored, float> || N > 128 ? 1 : 2;

// N: states, at most. b.dB and b.dC are sums over the heads of a block.
template <class Stored, class OfDy, int N, bool CUT>
__global__ void __launch_bounds__(THREADS, GRADIENT_BLOCKS<Stored, N>)
    gradients_kernel(Problem p, Steps s, int64_t together, Backward b) {
  using Tiles = GradientTiles<Stored, OfDy, N, CUT>;
  using Mixed = cuda::Mixed<Stored, CUT>;
  constexpr int COUNT = PARTS<Stored>, OF_M = Mixed::COUNT, HALVES = N / HALF;
  constexpr bool AHEAD = GRADIENT_BLOCKS<Stored, N> == 1;  // what is read next is asked for early
  FUSEPORT_SHARED(memory);
  Tiles& tiles = *(Tiles*)memory;
  Mixed &M = tiles.mixed[0], &Q = tiles.mixed[1];
  const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
  const int g = lane / 4, c = lane % 4 * 2;  // of a fragment: the first row, and the first column
  const int of_states = warp % 4 * TILE, of_steps = warp / 4 * 2;  // dB's and dC's: tiles of steps
  const int of_x = warp / 4 * 32, own = warp % 4;                  // dx's: 32 columns, a tile of steps
  const int64_t chunks = chunks_of(p), heads = p.heads / p.groups;
  const int64_t parts = (heads + together - 1) / together, size = p.width * p.states;
  for (int64_t unit = blockIdx.x; unit < p.batches * chunks * p.groups * parts;
       unit += gridDim.x) {
    const int64_t of_group = unit / parts, chunk = of_group / p.groups, group = of_group % p.groups;
    const int64_t batch = chunk / chunks, step = chunk % chunks * T;
    const int64_t first = group * heads + unit % parts * together;
    const int64_t beyond = first + together < (group + 1) * heads ? first + together
                                                                  : (group + 1) * heads;
    __syncthreads();  // the unit before has read all
    tiles.B.template bring<THREADS>(p.B, batch, step, group, 0, p.length - step, p.states);
    tiles.C.template bring<THREADS>(p.C, batch, step, group, 0, p.length - step, p.states);
    float dB[HALVES][2][2][4] = {}, dC[HALVES][2][2][4] = {};
    int left = 0, next = 0;  // columns of a head
    for (int64_t h = first; h < beyond; h += next == 0, left = next) {
      const int64_t head = chunk * p.heads + h;
      const int columns = (int)p.width - left;
      next = columns > COLUMNS ? left + COLUMNS : 0;
      // To a sum over the columns of a head.
      const auto add = [&](auto& sum, auto value) { sum = left == 0 ? value : sum + value; };
      Asked asked;
      asked.ask(p, s, chunk, h);
      const int of_thread = (int)threadIdx.x % COLUMNS, share = (int)threadIdx.x / COLUMNS;
      float raw = 0, D = 0;
      if (share == 0 && step + of_thread < p.length)
        raw = raw_step<Stored>(p, batch, step + of_thread, h);
      if (share == 1 && of_thread < columns)
        D = ((const float*)p.D)[h * p.width + left + of_thread];
      Share<THREADS> of_x_asked, dy_asked;
      tiles.x.ask(of_x_asked, p.x, batch, step, h, left, p.length - step, columns);
      tiles.dy.ask(dy_asked, b.dout, batch, step, h, left, p.length - step, columns);
      __syncthreads();  // what was before has been read
      tiles.x.put(of_x_asked, p.x, batch, step, h, left, p.length - step, columns);
      tiles.dy.put(dy_asked, b.dout, batch, step, h, left, p.length - step, columns);
      asked.put(tiles.factors);
      if (share == 0) tiles.raw[of_thread] = raw;
      if (share == 1) tiles.D[of_thread] = D;
      const float* const of_g = (const float*)b.dstates + head * size + left * p.states;
      const float* const of_h = (const float*)b.forward.states + head * size + left * p.states;
      Share<THREADS> g_asked, h_asked;
      const auto ask = [&](Share<THREADS>& to, const float* from, int half) {
        to.ask(from + half * HALF, p.states, 1, columns, p.states - half * HALF);
      };
      if (AHEAD) ask(g_asked, of_g, 0);
      wait_for_copies();
      __syncthreads();
      const Factors& factors = tiles.factors;
      const Decays<float> d = factors.decays();
      if (threadIdx.x < T) tiles.factors.find((int)threadIdx.x);
      // Eight lanes beside each other have the same two columns.
      constexpr int BESIDE = THREADS / COLUMNS * 2;
      const int q_of_D = (int)threadIdx.x / BESIDE * 2;
      double dD[2] = {};
#pragma unroll
      for (int i = 0; i < T / BESIDE; ++i) {
        float dy[2], x[2];
        tiles.dy.pair(i * BESIDE + (int)threadIdx.x % BESIDE, q_of_D, dy);
        tiles.x.pair(i * BESIDE + (int)threadIdx.x % BESIDE, q_of_D, x);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          if constexpr (sizeof(OfDy) == 2) dD[k] += (double)(dy[k] * x[k]);  // which is exact
          else dD[k] += (double)dy[k] * (double)x[k];
        }
      }
      sum_over_lanes<BESIDE, 1, 2>(dD);
      if (const int q = q_of_D + (int)threadIdx.x % BESIDE / (BESIDE / 2);
          threadIdx.x % (BESIDE / 2) == 0 && q < columns)
        b.dD[head * p.width + left + q] = dD[0];

      // What goes through the states: w_s g B_s and exp(c_t) hᵀ dy_t, and their like for B.
      float dx[2][2][4] = {};
      double dot = 0;
      const auto through = [&](const auto& rows, const auto& others, const float* factor, int half,
                               float (&sum)[2][2][4], float(*of_step)[T]) {
        float product[2][2][4] = {};
#pragma unroll
        for (int k = 0; k < COLUMNS; k += TILE) {
          uint32_t cuts[3][4];
#pragma unroll
          for (int part = 0; part < 3; ++part)
            load_tiles<true, Four::down>(cuts[part], tiles.state[part] + k * STATE_ROW + of_states,
                                         STATE_ROW);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            uint32_t mine[std::remove_cvref_t<decltype(rows)>::COUNT][4];
            rows.template load<false, Four::down>(mine, (of_steps + i) * TILE, k);
            add_products(product[i], mine, cuts);
          }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int row = (of_steps + i) * TILE + g + j * 8, n = half * HALF + of_states + c;
            const float by = factor[row];
            float with_other = 0;
#pragma unroll
            for (int k = 0; k < 2; ++k) {
              float other[2];
              others.pair(row, n + k * 8, other);
#pragma unroll
              for (int m = 0; m < 2; ++m) {
                with_other += product[i][k][j * 2 + m] * other[m];
                sum[i][k][j * 2 + m] += by * product[i][k][j * 2 + m];
              }
            }
            sum_over_lanes<4, 1, 1>(&with_other);
            float& all = of_step[warp % 4][row];
            if (lane % 4 == 0 && half == 0) add(all, with_other);
            if (lane % 4 == 0 && half > 0) all += with_other;
          }
      };
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        if (!AHEAD) ask(g_asked, of_g, half);
        __syncthreads();
        g_asked.template put<STATE_ROW>(tiles.state);
        __syncthreads();
        if (AHEAD) ask(h_asked, of_h, half);
#pragma unroll
        for (int k = 0; k < HALF; k += TILE) {
          uint32_t of_B[COUNT][4], cuts[OF_M][4];
          tiles.B.template load<false, Four::down>(of_B, own * TILE, half * HALF + k);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int part = 0; part < OF_M; ++part)
              load_tiles<false, Four::across>(
                  cuts[part], tiles.state[part] + (of_x + j * TILE) * STATE_ROW + k, STATE_ROW);
            add_products(dx[j], of_B, cuts);
          }
        }
        through(tiles.x, tiles.B, factors.w, half, dB[half], tiles.dw);

        if (!AHEAD) ask(h_asked, of_h, half);
        if (!AHEAD) ask(g_asked, of_g, half);  // for which there are no registers
        dot += h_asked.dot(g_asked);
        __syncthreads();
        h_asked.template put<STATE_ROW>(tiles.state);
        __syncthreads();
        if (AHEAD && half + 1 < HALVES) ask(g_asked, of_g, half + 1);
        through(tiles.dy, tiles.C, factors.outer, half, dC[half], tiles.read);
      }
      dot = over_warp(dot);
      if (lane == 0) add(tiles.dots[warp], dot);
      __syncthreads();

      // M, Q and the sums of K, in tiles of eight columns on and below the diagonal.
      for (int tile = warp; tile < TILES * (TILES + 1); tile += THREADS / WARP) {
        const int i = tile < 2 ? 0 : tile < 6 ? 1 : tile < 12 ? 2 : 3, j = tile - i * (i + 1);
        static_assert(TILES == 4);
        float CB[4] = {}, dM[4] = {};
        const auto product = [&](float (&sum)[4], const auto& a, const auto& b, int k) {
          uint32_t of_a[std::remove_cvref_t<decltype(a)>::COUNT][4], of_b[COUNT][4];
          b.template load<false, Four::in_a_row>(of_b, j * 8, k);
#pragma unroll
          for (int next = 0; next < 2; ++next) {
            a.template load<false, Four::down>(of_a, i * TILE, k + next * TILE);
            add_half_apart<Stored>(sum, of_a, of_b, 2 * next);
          }
        };
#pragma unroll
        for (int k = 0; k < N; k += 2 * TILE) product(CB, tiles.C, tiles.B, k);
#pragma unroll
        for (int k = 0; k < COLUMNS; k += 2 * TILE) product(dM, tiles.dy, tiles.x, k);
        double of_row[2] = {}, of_column[2] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int t = i * TILE + g + half * 8, from = j * 8 + c;
          float of_M[2], of_Q[2];
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const float L = d.between(from + k, t), delta = d.delta(from + k);
            const float of_CB = CB[half * 2 + k] * L, of_dM = dM[half * 2 + k];
            const bool later = from + k > t;
            const float K = later ? 0.0f : of_dM * of_CB;
            of_M[k] = later ? 0.0f : of_CB * delta;
            of_Q[k] = later ? 0.0f : of_dM * L * delta;
            if (j / 2 == i && from + k == t) add(tiles.diagonal[t], K);
            const double past = from + k < t ? (double)K : 0;
            of_row[half] += past * (double)delta;
            of_column[k] += past;
          }
          M.put(t, from, of_M);
          Q.put(t, from, of_Q);
        }
        // Some lanes get the sum of one row or column, and others that of the other.
        sum_over_lanes<4, 1, 2>(of_row);
        sum_over_lanes<8, 4, 2>(of_column);
        if (lane % 2 == 0) add(tiles.rows[j][i * TILE + g + lane % 4 / 2 * 8], of_row[0]);
        if (g % 4 == 0) add(tiles.columns[i][j * 8 + c + g / 4], of_column[0]);
      }
      __syncthreads();

      // dx_s = Σ_t M_ts dy_t + w_s g B_s, with D dy_s.
#pragma unroll
      for (int j = 0; j < 16; ++j) dx[j / 8][j / 4 % 2][j % 4] *= factors.w[own * TILE + g + j % 4 / 2 * 8];
      for (int k = own; k < TILES; ++k)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          uint32_t of_dy[PARTS<OfDy>][4], of_M[OF_M][4];
          tiles.dy.template load<true, Four::down>(of_dy, k * TILE, of_x + j * TILE);
          M.template load<true>(of_M, k, own);
          add_products(dx[j], of_M, of_dy);
        }
      const int64_t stride = p.heads * p.width;
      int64_t at = (batch * p.length + step + own * TILE + g) * stride;
      at += h * p.width + left + of_x + c;
      const bool even = at % 2 == 0 && stride % 2 == 0;
#pragma unroll
      for (int j = 0; j < 2; ++j, at += 8 * stride)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int t = own * TILE + g + j * 8, q = of_x + k * 8 + c;
          const int count = step + t >= p.length || q >= columns ? 0 : q + 1 < columns ? 2 : 1;
          const auto of_D = *(const Pack<float, 2>*)(tiles.D + q);
          float both[2], dy[2];
          tiles.dy.pair(t, q, dy);
#pragma unroll
          for (int m = 0; m < 2; ++m) both[m] = dx[k / 2][k % 2][j * 2 + m] + of_D.at[m] * dy[m];
          store_pack<2>(both, (Stored*)b.dx + at + k * 8, 1, count, even && count == 2);
        }

      // dB_s = Σ_t Q_ts C_t and dC_t = Σ_s Q_ts B_s, beside what went through the states.
      const auto within = [&](auto transposed, int i, int k, const auto& others, auto& sum) {
        constexpr bool TRANSPOSED = decltype(transposed)::value;
        const int row = of_steps + i;
        uint32_t of_Q[OF_M][4], of_other[COUNT][4];
        Q.template load<TRANSPOSED>(of_Q, TRANSPOSED ? k : row, TRANSPOSED ? row : k);
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
          others.template load<true, Four::down>(of_other, k * TILE, half * HALF + of_states);
          add_products(sum[half][i], of_Q, of_other);
        }
      };
#pragma unroll
      for (int i = 0; i < 2; ++i)
        for (int k = 0; k < TILES; ++k) {
          if (k >= of_steps + i) within(std::true_type{}, i, k, tiles.C, dB);
          if (k <= of_steps + i) within(std::false_type{}, i, k, tiles.B, dC);
        }

      if (next > 0) continue;
      const int t = (int)threadIdx.x % T;
      double row = 0, column = 0;
      float dw = 0, read = 0;
      for (int i = 0; i < 2 * (t / TILE + 1); ++i) row += tiles.rows[i][t];
      for (int i = t / TILE; i < TILES; ++i) column += tiles.columns[i][t];
#pragma unroll
      for (int i = 0; i < 4; ++i) dw += tiles.dw[i][t];
#pragma unroll
      for (int i = 0; i < 4; ++i) read += tiles.read[i][t];
      dot = 0;
      for (int i = 0; i < THREADS / WARP; ++i) dot += tiles.dots[i];
      finish_steps<Stored>(p, b, d, batch, step, head, h, row - (double)d.delta(t) * column,
                           (float)(column + (double)tiles.diagonal[t]), factors.outer[t] * read, dw,
                           dot, tiles.raw[t], tiles.scratch);
    }
    const auto store = [&](const float (&sum)[HALVES][2][2][4], void* to) {
#pragma unroll
      for (int i = 0; i < HALVES * 8; ++i) {
        const int half = i / 8, row = (of_steps + i / 4 % 2) * TILE + g + i / 2 % 2 * 8;
        const int n = half * HALF + of_states + i % 2 * 8 + c;
        const float* const two = sum[half][i / 4 % 2][i % 2] + i / 2 % 2 * 2;
        const int64_t left = p.states - n;
        store_pack<2>(two, (float*)to + (unit * T + row) * p.states + n, 1,
                      left < 2 ? (int)left : 2, left > 1 && p.states % 2 == 0);
      }
    };
    store(dB, b.dB);
    store(dC, b.dC);
  }
}

}  // namespace fuseport::ssd_chunk_scan::cuda
