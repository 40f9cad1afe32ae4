// Operands in shared memory: as they are stored, and cut into parts by each warp that loads them; or, of
// float32, cut once, when they are brought: what all warps load is then not cut by all. What is cut so
// is on its way in registers, and other numbers by copies.
#pragma once

#include "ssd_chunk_scan/cuda_lanes.cuh"

namespace fuseport::ssd_chunk_scan::cuda {

constexpr int HALF = 64;  // states that are at once in shared memory
constexpr int STATE_ROW = HALF + PAD<BFloat16>;
using StateParts = BFloat16[3][COLUMNS * STATE_ROW];

// A thread's share of 64 × 64 numbers, among so many threads: four in a row of some rows. All are asked
// for before the first is waited for.
template <int THREADS>
struct Share {
  static constexpr int COUNT = 4, ACROSS = HALF / COUNT, DOWN = THREADS / ACROSS, EACH = T / DOWN;
  Pack<float, COUNT> packs[EACH];

  // Of numbers that are `row` and `column` apart, of which so many are there; zeros beyond.
  FUSEPORT_DEVICE void ask(const float* from, int64_t row, int64_t column, int64_t rows,
                           int64_t columns) {
    const int y = (int)threadIdx.x / ACROSS, x = (int)threadIdx.x % ACROSS * COUNT;
    const int64_t left = columns - x;
    const int count = left < 0 ? 0 : left < COUNT ? (int)left : COUNT;
    const float* at = from + y * row + x * column;
    if (column == 1 && row % COUNT == 0 && columns % COUNT == 0 &&
        (uintptr_t)from % sizeof packs[0] == 0) {
#pragma unroll
      for (int i = 0; i < EACH; ++i, at += DOWN * row)
        packs[i] = count > 0 && y + i * DOWN < rows ? *(const Pack<float, COUNT>*)at
                                                    : Pack<float, COUNT>{};
      return;
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i, at += DOWN * row)
      packs[i] = load_pack<COUNT>(at, column, y + i * DOWN < rows ? count : 0, false);
  }

  // Of what is like x, columns from `first` on.
  FUSEPORT_DEVICE void ask(const Strided& s, int64_t batch, int64_t step, int64_t head,
                           int64_t first, int64_t steps, int64_t columns) {
    ask((const float*)s.data + batch * s.batch + step * s.step + head * s.head + first * s.column,
        s.step, s.column, steps, columns);
  }

  // As parts, to rows that are ROW apart.
  template <int ROW, int SIZE>
  FUSEPORT_DEVICE void put(BFloat16 (&to)[3][SIZE], int first = 0) const {
    const int y = (int)threadIdx.x / ACROSS, x = first + (int)threadIdx.x % ACROSS * COUNT;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      uint32_t parts[2][3];
#pragma unroll
      for (int k = 0; k < 2; ++k) cut(packs[i].at[2 * k], packs[i].at[2 * k + 1], parts[k]);
#pragma unroll
      for (int part = 0; part < 3; ++part)
        *(Pack<uint32_t, 2>*)(to[part] + (y + i * DOWN) * ROW + x) = {parts[0][part],
                                                                     parts[1][part]};
    }
  }

  // The sum of products with another's.
  FUSEPORT_DEVICE double dot(const Share& other) const {
    double sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      float products[COUNT];
#pragma unroll
      for (int k = 0; k < COUNT; ++k) products[k] = packs[i].at[k] * other.packs[i].at[k];
      sum += (double)((products[0] + products[1]) + (products[2] + products[3]));
    }
    return sum;
  }
};

// A chunk's steps of WIDTH columns, cut by those that load them.
template <class Stored, int WIDTH, bool CUT>
struct Operand {
  static constexpr int COUNT = PARTS<Stored>, ROW = WIDTH + PAD<Stored>;
  Stored numbers[T * ROW];

  template <int THREADS>
  FUSEPORT_DEVICE void ask(Share<THREADS>&, const Strided&, int64_t, int64_t, int64_t, int64_t, int64_t,
                           int64_t) const {}
  // What was asked for can be read after wait_for_copies and a barrier.
  template <int THREADS>
  FUSEPORT_DEVICE void put(const Share<THREADS>&, const Strided& s, int64_t batch, int64_t step,
                           int64_t head, int64_t first, int64_t steps, int64_t columns) {
    bring_steps<T, WIDTH>(s, batch, step, head, first, steps, columns, numbers);
  }
  template <int THREADS>
  FUSEPORT_DEVICE void bring(const Strided& s, int64_t batch, int64_t step, int64_t head,
                             int64_t first, int64_t steps, int64_t columns) {
    bring_steps<T, WIDTH>(s, batch, step, head, first, steps, columns, numbers);
  }
  template <bool TRANSPOSED, Four FOUR>
  FUSEPORT_DEVICE void load(uint32_t (&to)[COUNT][4], int t, int column) const {
    load_parts<TRANSPOSED, FOUR>(to, numbers + t * ROW + column, ROW);
  }
  // Two in a row, from an even column on.
  FUSEPORT_DEVICE void pair(int t, int column, float (&to)[2]) const {
    (*(const Pair<Stored>*)(numbers + t * ROW + column)).get(to);
  }
};

// Cut when they are brought.
template <int WIDTH>
struct Operand<float, WIDTH, true> {
  static constexpr int COUNT = PARTS<float>, ROW = WIDTH + PAD<BFloat16>;
  BFloat16 parts[COUNT][T * ROW];

  template <int THREADS>
  FUSEPORT_DEVICE void ask(Share<THREADS>& share, const Strided& s, int64_t batch, int64_t step,
                           int64_t head, int64_t first, int64_t steps, int64_t columns) const {
    share.ask(s, batch, step, head, first, steps, columns);
  }
  template <int THREADS>
  FUSEPORT_DEVICE void put(const Share<THREADS>& share, const Strided&, int64_t, int64_t, int64_t, int64_t,
                           int64_t, int64_t) {
    static_assert(WIDTH == HALF);
    share.template put<ROW>(parts);
  }
  template <int THREADS>
  FUSEPORT_DEVICE void bring(const Strided& s, int64_t batch, int64_t step, int64_t head,
                             int64_t first, int64_t steps, int64_t columns) {
#pragma unroll
    for (int n = 0; n < WIDTH; n += HALF) {
      Share<THREADS> share;
      share.ask(s, batch, step, head, first + n, steps, columns - n);
      share.template put<ROW>(parts, n);
    }
  }
  template <bool TRANSPOSED, Four FOUR>
  FUSEPORT_DEVICE void load(uint32_t (&to)[COUNT][4], int t, int column) const {
#pragma unroll
    for (int part = 0; part < COUNT; ++part)
      load_tiles<TRANSPOSED, FOUR>(to[part], parts[part] + t * ROW + column, ROW);
  }
  FUSEPORT_DEVICE void pair(int t, int column, float (&to)[2]) const {
    float sums[2] = {};
#pragma unroll
    for (int part = COUNT - 1; part >= 0; --part) {  // each is exact
      const uint32_t both = *(const uint32_t*)(parts[part] + t * ROW + column);
      sums[0] += lower<BFloat16>(both);
      sums[1] += upper<BFloat16>(both);
    }
    to[0] = sums[0];
    to[1] = sums[1];
  }
};

}  // namespace fuseport::ssd_chunk_scan::cuda
