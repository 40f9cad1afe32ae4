// Products of matrices in batches, in float32 and float64, for hosts that have none of their own. What
// is added up is so in the order of the inner dimension.
#pragma once

#include "ssd_chunk_scan/cuda_steps.cuh"

namespace fuseport::ssd_chunk_scan::cuda {

// A block has a square of the result, a thread 8 × 4 numbers of it: rows from 4·r and 32 + 4·r on.
constexpr int SQUARE = 64, INNER = 16, PRODUCT_THREADS = 128;
constexpr int LINE = SQUARE + 4;  // of a tile in shared memory, an inner index each
constexpr int MINE = SQUARE * INNER / PRODUCT_THREADS;  // numbers of a tile that a thread brings

// A tile of (inner, across), of which each thread brings MINE numbers.
template <class Real>
struct Side {
  const Real* data;  // the first that this thread brings, were the tile at 0 of the inner dimension
  int64_t inner_left, left, inner_stride, step;  // how many there are from that on; in numbers
  int index, offset, more, further;              // of it in the tile, and from one to the next
  Real held[MINE];

  // Lanes in a row read what is in a row.
  FUSEPORT_DEVICE Side(const void* from, int64_t batch, int64_t inner, int64_t across,
                       bool inner_first, int64_t first)
      : inner_stride(inner_first ? across : 1),
        index((int)threadIdx.x / (inner_first ? SQUARE : 1) % INNER),
        offset(inner_first ? (int)threadIdx.x % SQUARE : (int)threadIdx.x / INNER),
        more(inner_first ? PRODUCT_THREADS / SQUARE : 0),
        further(inner_first ? 0 : PRODUCT_THREADS / INNER) {
    const int64_t stride = inner_first ? 1 : inner;
    inner_left = inner - index;
    left = across - first - offset;
    step = more * inner_stride + further * stride;
    data = (const Real*)from + batch * inner * across + index * inner_stride +
           (first + offset) * stride;
  }

  FUSEPORT_DEVICE void fetch(int64_t k) {
    const Real* at = data + k * inner_stride;
#pragma unroll
    for (int i = 0; i < MINE; ++i, at += step)
      held[i] = k + i * more < inner_left && i * further < left ? *at : (Real)0;
  }
  FUSEPORT_DEVICE void put(Real* tile) const {
    Real* to = tile + index * LINE + offset;
#pragma unroll
    for (int i = 0; i < MINE; ++i) to[i * (more * LINE + further)] = held[i];
  }
};

// Four numbers in a row of a tile, from a multiple of 4 on.
template <class Real>
FUSEPORT_DEVICE void load_four(const Real* from, Real* to) {
  constexpr int V = VECTOR<Real>;
#pragma unroll
  for (int i = 0; i < 4; i += V) {
    const auto pack = *(const Pack<Real, V>*)(from + i);
#pragma unroll
    for (int j = 0; j < V; ++j) to[i + j] = pack.at[j];
  }
}

template <class Real>
__global__ void __launch_bounds__(PRODUCT_THREADS, 16 / sizeof(Real)) multiply_kernel(Product m) {
  FUSEPORT_SHARED(memory);
  Real* const a_tile = (Real*)memory;
  Real* const b_tile = a_tile + INNER * LINE;
  const int64_t down = (m.rows + SQUARE - 1) / SQUARE, across = (m.columns + SQUARE - 1) / SQUARE;
  const int row = (int)threadIdx.x / 16 * 4, column = (int)threadIdx.x % 16 * 4;
  for (int64_t unit = blockIdx.x; unit < m.batches * down * across; unit += gridDim.x) {
    const int64_t batch = unit / (down * across), tile = unit % (down * across);
    const int64_t top = tile / across * SQUARE, left = tile % across * SQUARE;
    Side<Real> a(m.a, batch, m.inner, m.rows, m.a_transposed, top);
    Side<Real> b(m.b, batch, m.inner, m.columns, !m.b_transposed, left);
    Real sums[8][4] = {};
    a.fetch(0);
    b.fetch(0);
    for (int64_t k = 0; k < m.inner; k += INNER) {
      __syncthreads();
      a.put(a_tile);
      b.put(b_tile);
      __syncthreads();
      if (k + INNER < m.inner) {  // on their way while these are multiplied
        a.fetch(k + INNER);
        b.fetch(k + INNER);
      }
#pragma unroll
      for (int i = 0; i < INNER; ++i) {
        Real of_a[8], of_b[4];
        load_four(a_tile + i * LINE + row, of_a);
        load_four(a_tile + i * LINE + SQUARE / 2 + row, of_a + 4);
        load_four(b_tile + i * LINE + column, of_b);
#pragma unroll
        for (int r = 0; r < 8; ++r)
#pragma unroll
          for (int c = 0; c < 4; ++c) sums[r][c] += of_a[r] * of_b[c];
      }
    }
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const int64_t y = top + row + r % 4 + r / 4 * (SQUARE / 2);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int64_t x = left + column + c;
        if (y >= m.rows || x >= m.columns) continue;
        Real* const to = (Real*)m.to + (batch * m.rows + y) * m.columns + x;
        *to = m.add ? *to + sums[r][c] : sums[r][c];
      }
    }
  }
}

template <class Real>
const char* run_multiply(const Product& m, void* stream) {
  const int64_t tiles = ((m.rows + SQUARE - 1) / SQUARE) * ((m.columns + SQUARE - 1) / SQUARE);
  if (m.batches * tiles == 0) return nullptr;
  return launch(multiply_kernel<Real>, m.batches * tiles, PRODUCT_THREADS,
                2 * INNER * LINE * sizeof(Real), stream, m);
}

}  // namespace fuseport::ssd_chunk_scan::cuda
