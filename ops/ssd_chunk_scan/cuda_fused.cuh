// The forward pass in bfloat16 in one kernel: products of matrices on tensor cores, the state in
// registers, nothing written but out and the last states; names are those of reference.py.
//
// A block has 64 columns of one head's x, and walks over the chunks of a segment; each of its warps
// has the state of 16 columns, as that to which tensor cores add. They multiply bfloat16, as which
// x, B and C are exact; what is not is cut into parts: M and the state into two, which suffices
// for out, and w·x into three, which makes states as exact as float32 does. The sums of tensor
// cores are not rounded but cut off; so those of a chunk are made apart, and then added to the state.
#pragma once

#include "ssd_chunk_scan/cuda_steps.cuh"

namespace fuseport::ssd_chunk_scan::cuda {

constexpr int TILE = 16, WARPS = 4, COLUMNS = TILE * WARPS, TILES = T / TILE;
constexpr int FUSED_THREADS = WARPS * WARP;
constexpr int PAD = 8;  // numbers between rows: eight rows of 16 bytes in a column are in all banks

FUSEPORT_DEVICE float lower(uint32_t both) { return bits_to_float(both << 16); }
FUSEPORT_DEVICE float upper(uint32_t both) { return bits_to_float(both & 0xffff0000u); }

// Two numbers, each as a sum of COUNT bfloat16, the largest first. What has no finite rest has none.
template <int COUNT>
FUSEPORT_DEVICE void cut(float x, float y, uint32_t (&parts)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    parts[i] = floats_to_bfloat16(x, y);
    x -= lower(parts[i]);
    y -= upper(parts[i]);
    if (!(x - x == 0)) x = 0;
    if (!(y - y == 0)) y = 0;
  }
}

// The address of this lane's row of four matrices of 8 × 8 that make up one of 16 × 16 in shared
// memory. Registers 0 and 1 get its upper and lower left of a first operand; or, if ACROSS, the left
// and right of its upper half: a second operand's, or a first's if it is transposed.
template <bool ACROSS>
FUSEPORT_DEVICE const BFloat16* row_of(const BFloat16* tile, int row) {
  const int lane = (int)threadIdx.x % WARP, half = lane / 16 * 8, other = lane / 8 % 2 * 8;
  return tile + (lane % 8 + (ACROSS ? half : other)) * row + (ACROSS ? other : half);
}

// Brings the steps of a chunk into a tile of WIDTH columns, of which `columns` are there; zeros
// beyond. They are there after wait_for_copies and a barrier.
template <int WIDTH>
FUSEPORT_DEVICE void bring(const Strided& s, int64_t batch, int64_t step, int64_t head,
                           int64_t first, int64_t steps, int64_t columns, BFloat16* to) {
  constexpr int COUNT = VECTOR<BFloat16>, PACKS = WIDTH / COUNT;
  const BFloat16* const from = (const BFloat16*)s.data + batch * s.batch + step * s.step +
                               head * s.head + first * s.column;
  const bool whole = s.column == 1 && s.step % COUNT == 0 && columns % COUNT == 0 &&
                     (uintptr_t)from % (sizeof(BFloat16) * COUNT) == 0;
  for (int i = (int)threadIdx.x; i < T * PACKS; i += FUSED_THREADS) {
    const int t = i / PACKS, n = i % PACKS * COUNT;
    BFloat16* const at = to + t * (WIDTH + PAD) + n;
    const bool there = t < steps && n < columns;
    const BFloat16* const source = from + t * s.step + n * s.column;
    if (whole) {
      copy_later(at, there ? source : from, there);
    } else {
      const int64_t count = there ? columns - n : 0;
      *(Pack<BFloat16, COUNT>*)at =
          load_pack<COUNT>(source, s.column, (int)(count < COUNT ? count : COUNT), false);
    }
  }
}

// Of one step, in two columns from q on: y with D·x, and with the gate.
FUSEPORT_DEVICE void finish_pair(const Problem& p, const Forward& f, int64_t batch, int64_t step,
                                 int64_t h, int64_t q, const BFloat16* x, const float* y) {
  if (step >= p.length || q >= p.width) return;
  const int count = q + 1 < p.width ? 2 : 1;
  const float* const D = (const float*)p.D + h * p.width + q;
  float out[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) out[i] = i < count ? y[i] + D[i] * to_real(x[i]) : 0.0f;
  if (p.z.data) {
    const BFloat16* const at = (const BFloat16*)p.z.data + batch * p.z.batch + step * p.z.step +
                               h * p.z.head + q * p.z.column;
    const bool whole = count == 2 && p.z.column == 1 && (uintptr_t)at % 4 == 0;
    const auto z = load_pack<2>(at, p.z.column, count, whole);
#pragma unroll
    for (int i = 0; i < 2; ++i) out[i] *= to_real(z.at[i]) * logistic(to_real(z.at[i]));
  }
  const int64_t at = ((batch * p.length + step) * p.heads + h) * p.width + q;
  store_pack<2>(out, (BFloat16*)f.out + at, 1, count, at % 2 == 0 && count == 2);
}

// What all threads of a block read of a chunk's steps, for one head.
struct Factors {
  float step[T], total[T], rest[T], outer[T], w[T];
  int32_t begin[T];
};

// Tiles in shared memory. A chunk's are used while the next's are on their way, but for C, which is
// free before the states are added to.
template <int N>
struct FusedTiles {
  static constexpr int ROW = N + PAD, X_ROW = COLUMNS + PAD, M_ROW = T + PAD;
  BFloat16 C[T * ROW], B[2][T * ROW], x[2][T * X_ROW], M[2][T * M_ROW];
  Factors factors[2];
};

// `OUT`: from the states before the segments, out and what is after the last; else what each segment
// but the last adds to the state. N: states, at most.
template <int N, bool OUT>
__global__ void __launch_bounds__(FUSED_THREADS, 2)
    fused_kernel(Problem p, Steps s, Segments segments, Forward f) {
  using Tiles = FusedTiles<N>;
  FUSEPORT_SHARED(memory);
  Tiles& tiles = *(Tiles*)memory;
  const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
  const int g = lane / 4, c = lane % 4 * 2;  // of a fragment: the first row, and the first column
  const int64_t chunks = chunks_of(p), blocks = (p.width + COLUMNS - 1) / COLUMNS;
  const int64_t count = OUT ? segments.count : segments.count - 1;
  for (int64_t unit = blockIdx.x; unit < p.batches * count * p.heads * blocks;
       unit += gridDim.x) {
    const int64_t head = unit / blocks, column = unit % blocks * COLUMNS;
    const int64_t h = head % p.heads, segment = head / p.heads % count;
    const int64_t batch = head / p.heads / count, group = h / (p.heads / p.groups);
    const int64_t first = segment * segments.span;
    const int64_t last = first + segments.span < chunks ? first + segments.span : chunks;

    const auto bring_C = [&](int64_t chunk) {
      bring<N>(p.C, batch, chunk * T, group, 0, p.length - chunk * T, p.states, tiles.C);
    };
    const auto bring_rest = [&](int64_t chunk) {
      const int64_t steps = p.length - chunk * T;
      bring<N>(p.B, batch, chunk * T, group, 0, steps, p.states, tiles.B[chunk % 2]);
      bring<COLUMNS>(p.x, batch, chunk * T, h, column, steps, p.width - column,
                     tiles.x[chunk % 2]);
    };
    // One step's of a thread, on their way while the chunk before is computed.
    float step = 0, total = 0, rest = 0;
    int32_t begin = 0;
    const auto ask_for_factors = [&](int64_t chunk) {
      if (threadIdx.x >= T) return;
      const Decays<float> d(p, s, batch * chunks + chunk, h);
      const int64_t at = threadIdx.x * p.heads;
      step = d.step[at];
      total = d.total[at];
      rest = d.rest[at];
      begin = d.begin[threadIdx.x];
    };

    // Rows of the state are columns of x: of 16 a lane has rows g and g + 8, in each eight columns
    // two in a row.
    const auto each_of_state = [&](const auto& visit) {
#pragma unroll
      for (int j = 0; j < N / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int64_t q = column + warp * TILE + g + i / 2 * 8, n = j * 8 + c + i % 2;
          if (q < p.width && n < p.states) visit(j, i, q * p.states + n);
        }
    };
    const int64_t size = p.width * p.states;
    const int64_t own = (batch * p.heads + h) * size;  // of initial_states and of final_states
    const int64_t own_segment = ((batch * segments.count + segment) * p.heads + h) * size;
    float state[N / 8][4] = {};
    if (OUT) {
      const float* const before = segments.count > 1 ? (const float*)f.states + own_segment
                                                     : (const float*)p.initial_states + own;
      each_of_state([&](int j, int i, int64_t at) { state[j][i] = before[at]; });
    }

    __syncthreads();  // the unit before has read all
    ask_for_factors(first);
    if (OUT) bring_C(first);
    bring_rest(first);
    for (int64_t chunk = first; chunk < last; ++chunk) {
      BFloat16* const B = tiles.B[chunk % 2];
      BFloat16* const x = tiles.x[chunk % 2] + warp * TILE;
      Factors& factors = tiles.factors[chunk % 2];
      const Decays<float> d(factors.step, factors.total, factors.rest, factors.begin);
      if (threadIdx.x < T) {
        factors.step[threadIdx.x] = step;
        factors.total[threadIdx.x] = total;
        factors.rest[threadIdx.x] = rest;
        factors.begin[threadIdx.x] = begin;
      }
      wait_for_copies();
      __syncthreads();
      if (threadIdx.x < T) {
        const int t = (int)threadIdx.x;
        factors.outer[t] = d.outer(t);
        factors.w[t] = d.remaining(t) * d.delta(t);
      }
      if (chunk + 1 < last) {
        ask_for_factors(chunk + 1);
        bring_rest(chunk + 1);
      }

      if (OUT) {
        // M, in tiles on and below the diagonal, in turn by all warps.
        for (int tile = warp; tile < TILES * (TILES + 1) / 2; tile += WARPS) {
          const int i = tile < 1 ? 0 : tile < 3 ? 1 : tile < 6 ? 2 : 3, j = tile - i * (i + 1) / 2;
          static_assert(TILES == 4);
          float CB[2][4] = {};
#pragma unroll
          for (int k = 0; k < N; k += TILE) {
            uint32_t of_C[4], of_B[4];
            load_matrices<false>(of_C, row_of<false>(tiles.C + i * TILE * Tiles::ROW + k, Tiles::ROW));
            load_matrices<false>(of_B, row_of<true>(B + j * TILE * Tiles::ROW + k, Tiles::ROW));
            add_product(CB[0], of_C, of_B[0], of_B[1]);
            add_product(CB[1], of_C, of_B[2], of_B[3]);
          }
#pragma unroll
          for (int half = 0; half < 4; ++half) {
            const int t = i * TILE + g + half % 2 * 8, from = j * TILE + c + half / 2 * 8;
            float mixed[2];
#pragma unroll
            for (int k = 0; k < 2; ++k)
              mixed[k] = from + k > t ? 0.0f
                                      : CB[half / 2][half % 2 * 2 + k] * d.between(from + k, t) *
                                            d.delta(from + k);
            uint32_t parts[2];
            cut(mixed[0], mixed[1], parts);
#pragma unroll
            for (int k = 0; k < 2; ++k) *(uint32_t*)(tiles.M[k] + t * Tiles::M_ROW + from) = parts[k];
          }
        }
        __syncthreads();

        float y[TILES][2][4] = {};
#pragma unroll
        for (int k = 0; k < N / TILE; ++k) {
          uint32_t parts[2][2][2];  // of the columns of x from 0 and 8 on, of the states from 0 and 8 on
#pragma unroll
          for (int i = 0; i < 4; ++i)
            cut(state[2 * k + i % 2][i / 2 * 2], state[2 * k + i % 2][i / 2 * 2 + 1],
                parts[i / 2][i % 2]);
#pragma unroll
          for (int i = 0; i < TILES; ++i) {
            uint32_t of_C[4];
            load_matrices<false>(
                of_C, row_of<false>(tiles.C + i * TILE * Tiles::ROW + k * TILE, Tiles::ROW));
#pragma unroll
            for (int part = 1; part >= 0; --part)
#pragma unroll
              for (int j = 0; j < 2; ++j)
                add_product(y[i][j], of_C, parts[j][0][part], parts[j][1][part]);
          }
        }
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
          for (int j = 0; j < 8; ++j) y[i][j / 4][j % 4] *= factors.outer[i * TILE + g + j % 4 / 2 * 8];
#pragma unroll
        for (int k = 0; k < TILES; ++k) {
          uint32_t of_x[4];
          load_matrices<true>(of_x, row_of<false>(x + k * TILE * Tiles::X_ROW, Tiles::X_ROW));
#pragma unroll
          for (int i = k; i < TILES; ++i)
#pragma unroll
            for (int part = 1; part >= 0; --part) {
              uint32_t of_M[4];
              load_matrices<false>(
                  of_M, row_of<false>(tiles.M[part] + i * TILE * Tiles::M_ROW + k * TILE, Tiles::M_ROW));
              add_product(y[i][0], of_M, of_x[0], of_x[1]);
              add_product(y[i][1], of_M, of_x[2], of_x[3]);
            }
        }
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
          for (int half = 0; half < 4; ++half) {
            const int t = i * TILE + g + half % 2 * 8, q = c + half / 2 * 8;
            const float* const of_y = y[i][half / 2] + half % 2 * 2;
            finish_pair(p, f, batch, chunk * T + t, h, column + warp * TILE + q,
                        x + t * Tiles::X_ROW + q, of_y);
          }
        __syncthreads();
        if (chunk + 1 < last) bring_C(chunk + 1);
      }

      // h_next = exp(c_T) h + Σ_s w_s x_s B_sᵀ
      uint32_t weighted[TILES][3][4];
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        uint32_t of_x[4];
        load_matrices<true>(of_x, row_of<true>(x + i * TILE * Tiles::X_ROW, Tiles::X_ROW));
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float* const w = factors.w + i * TILE + c + k / 2 * 8;
          uint32_t parts[3];
          cut(lower(of_x[k]) * w[0], upper(of_x[k]) * w[1], parts);
#pragma unroll
          for (int part = 0; part < 3; ++part) weighted[i][part][k] = parts[part];
        }
      }
      const float kept = factors.outer[T - 1];
#pragma unroll
      for (int k = 0; k < N / TILE; ++k) {
        float added[2][4] = {};
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
          uint32_t of_B[4];
          load_matrices<true>(of_B, row_of<false>(B + i * TILE * Tiles::ROW + k * TILE, Tiles::ROW));
#pragma unroll
          for (int part = 2; part >= 0; --part) {
            add_product(added[0], weighted[i][part], of_B[0], of_B[1]);
            add_product(added[1], weighted[i][part], of_B[2], of_B[3]);
          }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float& of_state = state[2 * k + i / 4][i % 4];
          of_state = kept * of_state + added[i / 4][i % 4];
        }
      }
    }
    if (OUT && segment + 1 < segments.count) continue;
    float* const after = OUT ? (float*)f.final_states + own : (float*)f.states + own_segment;
    each_of_state([&](int j, int i, int64_t at) { after[at] = state[j][i]; });
  }
}

}  // namespace fuseport::ssd_chunk_scan::cuda
