// Linear layers whose weight is stored, on CUDA: the product of few rows, of any shape, and the decoding
// of a part of the weight for products of torch's. cuda_stored_products.cuh has those of more rows.
//
// An op's `Weight<Real>` is made by all threads of a block, which wait, of a problem and of BYTES of
// shared memory. It has one(row, column), the value there; and, from a column on that is a multiple of
// RUN, RUN values in a row: what ask(row, column) returns, decode(asked, to) makes numbers of. That
// may be asked for where in_runs(p, column, columns) of a part of the weight.
#pragma once

#include "native/cuda_vectors.cuh"
#include "native/stored_weight.hpp"

namespace fuseport::stored::cuda {

using namespace fuseport::cuda;

constexpr int WARP = 32, THREADS = 128, WARPS = THREADS / WARP;
constexpr int RUN = 16;  // values that are decoded together, with one scale
constexpr int COLUMNS = 2;  // of the result, of a warp: they share what is read of x

// RUN numbers of a row.
template <class Stored>
FUSEPORT_DEVICE void load_run(const Stored* from, Real<Stored>* to) {
  constexpr int V = VECTOR<Stored>;
#pragma unroll
  for (int i = 0; i < RUN; i += V) load_vector(from + i, to + i);
}

// A warp for COLUMNS of the result and ROWS rows; its lanes go through the row of x.
template <template <class> class Weight, class Stored, int ROWS, bool RUNS, class Problem>
__global__ void __launch_bounds__(THREADS) forward_kernel(Problem p, Forward f) {
  using Real = fuseport::cuda::Real<Stored>;
  FUSEPORT_SHARED(memory);
  const Weight<Real> weight(p, memory);
  constexpr int SUMS = ROWS * COLUMNS, STEP = RUNS ? RUN : 1;
  const int lane = (int)threadIdx.x % WARP;
  const int64_t across = (p.out + COLUMNS - 1) / COLUMNS, down = (p.rows + ROWS - 1) / ROWS;
  for (int64_t unit = blockIdx.x * (int64_t)WARPS + threadIdx.x / WARP; unit < across * down;
       unit += gridDim.x * (int64_t)WARPS) {
    const int64_t column = unit % across * COLUMNS, row = unit / across * ROWS;
    Real sums[SUMS] = {};
    for (int64_t k = lane * STEP; k < p.in; k += WARP * STEP) {
      Real w[COLUMNS][STEP];
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        const int64_t own = column + c < p.out ? column + c : column;
        if constexpr (RUNS) weight.decode(weight.ask(own, k), w[c]);
        else w[c][0] = weight.one(own, k);
      }
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        if (row + r >= p.rows) break;
        const Stored* const x = (const Stored*)f.x.data + (row + r) * f.x.row_stride;
        Real numbers[STEP];
        if constexpr (RUNS) load_run(x + k, numbers);
        else numbers[0] = to_real(x[k * f.x.column_stride]);
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
          for (int i = 0; i < STEP; ++i) sums[r * COLUMNS + c] += numbers[i] * w[c][i];
      }
    }
    sum_over_lanes<WARP, 1, SUMS>(sums);
    constexpr int SHARING = WARP / SUMS;  // lanes that have the same sum
    const int64_t r = row + lane / SHARING / COLUMNS, c = column + lane / SHARING % COLUMNS;
    if (lane % SHARING == 0 && r < p.rows && c < p.out)
      from_real(sums[0] + to_real(((const Stored*)f.bias)[c]), (Stored*)f.out + r * p.out + c);
  }
}

template <template <class> class Weight, class Stored, bool RUNS, class Problem>
__global__ void __launch_bounds__(THREADS) decode_kernel(Problem p, Tile tile, Stored* to) {
  using Real = fuseport::cuda::Real<Stored>;
  FUSEPORT_SHARED(memory);
  const Weight<Real> weight(p, memory);
  constexpr int STEP = RUNS ? RUN : 1;
  const int64_t count = tile.rows * tile.columns;
  for (int64_t i = (blockIdx.x * (int64_t)THREADS + threadIdx.x) * STEP; i < count;
       i += gridDim.x * (int64_t)THREADS * STEP) {
    const int64_t row = quotient_of(i, tile.columns);
    const int64_t own = tile.row + row, column = tile.column + (i - row * tile.columns);
    if constexpr (RUNS) {
      constexpr int V = VECTOR<Stored>;
      Real values[RUN];
      weight.decode(weight.ask(own, column), values);
#pragma unroll
      for (int j = 0; j < RUN; j += V) store_vector(values + j, to + i + j);
    } else {
      from_real(weight.one(own, column), to + i);
    }
  }
}

template <template <class> class Weight, class Stored, int ROWS, class Problem>
const char* launch_forward(const Problem& p, const Forward& f, void* stream) {
  const int64_t units = (p.out + COLUMNS - 1) / COLUMNS * ((p.rows + ROWS - 1) / ROWS);
  const bool runs = Weight<Real<Stored>>::in_runs(p, 0, p.in) && f.x.column_stride == 1 &&
                    aligned<VECTOR<Stored>, Stored>(f.x.data, f.x.row_stride);
  const auto kernel = runs ? forward_kernel<Weight, Stored, ROWS, true, Problem>
                           : forward_kernel<Weight, Stored, ROWS, false, Problem>;
  return launch(kernel, (units + WARPS - 1) / WARPS, THREADS, Weight<Real<Stored>>::BYTES, stream,
                p, f);
}

template <template <class> class Weight, class Problem>
const char* run_forward(const Problem& p, const Forward& f, void* stream) {
  if (p.rows == 0 || p.out == 0) return nullptr;
  return with_dtype(p.dtype, [&](auto stored) {
    using Stored = decltype(stored);
    if (p.rows == 1) return launch_forward<Weight, Stored, 1>(p, f, stream);
    return p.rows <= 4 ? launch_forward<Weight, Stored, 4>(p, f, stream)
                       : launch_forward<Weight, Stored, 8>(p, f, stream);
  });
}

template <template <class> class Weight, class Problem>
const char* run_decode(const Problem& p, const Tile& tile, void* to, void* stream) {
  const int64_t count = tile.rows * tile.columns;
  if (count == 0) return nullptr;
  return with_dtype(p.dtype, [&](auto stored) {
    using Stored = decltype(stored);
    using Own = Weight<Real<Stored>>;
    const bool runs = Own::in_runs(p, tile.column, tile.columns);
    const int64_t threads = runs ? count / RUN : count;
    const auto kernel = runs ? decode_kernel<Weight, Stored, true, Problem>
                             : decode_kernel<Weight, Stored, false, Problem>;
    return launch(kernel, (threads + THREADS - 1) / THREADS, THREADS, Own::BYTES, stream, p, tile,
                  (Stored*)to);
  });
}

}  // namespace fuseport::stored::cuda
