// The layer on CUDA. Values are looked up in a table in shared memory, of which each has a bank of its
// own: no lanes wait for each other. Here are the product of few rows, of any shape, and the decoding
// of a part of the weight for products of torch's; cuda_few.cuh has the product of few rows as
// layers mostly are, cuda_products.cuh those of more rows.
#pragma once

#include "native/cuda_vectors.cuh"
#include "nf4_linear/code.hpp"
#include "nf4_linear/cuda.hpp"

namespace fuseport::nf4_linear::cuda {

using namespace fuseport::cuda;

constexpr int WARP = 32, THREADS = 128, WARPS = THREADS / WARP;
constexpr int RUN = 16;  // values that are decoded together: of one block, since those have no fewer
constexpr int COLUMNS = 2;  // of the result, of a warp: they share what is read of x

__device__ constexpr float VALUES[][16] = FUSEPORT_CODES;

template <class Real>
struct Code {
  Real* at;

  // All threads of a block call it, and wait.
  FUSEPORT_DEVICE Code(const Problem& p, char* memory) : at((Real*)memory) {
    if (threadIdx.x < 16) at[threadIdx.x] = VALUES[p.quant_type][threadIdx.x];
    __syncthreads();
  }

  // The value at a place in the flattened weight.
  FUSEPORT_DEVICE Real one(const Problem& p, int64_t place) const {
    const int byte = p.packed[place >> 1], index = place & 1 ? byte & 15 : byte >> 4;
    return at[index] * ((const Real*)p.absmax)[place >> p.block_shift];
  }

  // RUN values that are not decoded yet.
  struct Asked {
    Pack<uint8_t, RUN / 2> bytes;
    Real scale;
  };

  // From a multiple of RUN on; packed is aligned to their eight bytes.
  static FUSEPORT_DEVICE Asked ask(const Problem& p, int64_t place) {
    return {*(const Pack<uint8_t, RUN / 2>*)(p.packed + (place >> 1)),
            ((const Real*)p.absmax)[place >> p.block_shift]};
  }

  FUSEPORT_DEVICE void decode(const Asked& asked, Real* to) const {
#pragma unroll
    for (int i = 0; i < RUN; ++i) {
      const int byte = asked.bytes.at[i / 2];
      to[i] = at[i & 1 ? byte & 15 : byte >> 4] * asked.scale;
    }
  }

  FUSEPORT_DEVICE void run(const Problem& p, int64_t place, Real* to) const {
    decode(ask(p, place), to);
  }
};

inline bool in_runs(const Problem& p, int64_t column, int64_t columns) {
  return p.in % RUN == 0 && column % RUN == 0 && columns % RUN == 0 &&
         (uintptr_t)p.packed % (RUN / 2) == 0;
}

// RUN numbers of a row.
template <class Stored>
FUSEPORT_DEVICE void load_run(const Stored* from, Real<Stored>* to) {
  constexpr int V = VECTOR<Stored>;
#pragma unroll
  for (int i = 0; i < RUN; i += V) load_vector(from + i, to + i);
}

// A warp for COLUMNS of the result and ROWS rows; its lanes go through the row of x.
template <class Stored, int ROWS, bool RUNS>
__global__ void __launch_bounds__(THREADS) forward_kernel(Problem p, Forward f) {
  using Real = cuda::Real<Stored>;
  FUSEPORT_SHARED(memory);
  const Code<Real> code(p, memory);
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
        const int64_t place = (column + c < p.out ? column + c : column) * p.in + k;
        if constexpr (RUNS) code.run(p, place, w[c]);
        else w[c][0] = code.one(p, place);
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

template <class Stored, bool RUNS>
__global__ void __launch_bounds__(THREADS) decode_kernel(Problem p, Tile tile, Stored* to) {
  using Real = cuda::Real<Stored>;
  FUSEPORT_SHARED(memory);
  const Code<Real> code(p, memory);
  constexpr int STEP = RUNS ? RUN : 1;
  const int64_t count = tile.rows * tile.columns;
  for (int64_t i = (blockIdx.x * (int64_t)THREADS + threadIdx.x) * STEP; i < count;
       i += gridDim.x * (int64_t)THREADS * STEP) {
    const int64_t row = quotient_of(i, tile.columns);
    const int64_t place = (tile.row + row) * p.in + tile.column + (i - row * tile.columns);
    if constexpr (RUNS) {
      constexpr int V = VECTOR<Stored>;
      Real values[RUN];
      code.run(p, place, values);
#pragma unroll
      for (int j = 0; j < RUN; j += V) store_vector(values + j, to + i + j);
    } else {
      from_real(code.one(p, place), to + i);
    }
  }
}

template <class Stored, int ROWS>
const char* launch_forward(const Problem& p, const Forward& f, void* stream) {
  const int64_t units = (p.out + COLUMNS - 1) / COLUMNS * ((p.rows + ROWS - 1) / ROWS);
  const bool runs = in_runs(p, 0, p.in) && f.x.column_stride == 1 &&
                    aligned<VECTOR<Stored>, Stored>(f.x.data, f.x.row_stride);
  const auto kernel = runs ? forward_kernel<Stored, ROWS, true> : forward_kernel<Stored, ROWS, false>;
  return launch(kernel, (units + WARPS - 1) / WARPS, THREADS, 16 * sizeof(Real<Stored>), stream, p,
                f);
}

inline const char* run_forward(const Problem& p, const Forward& f, void* stream) {
  if (p.rows == 0 || p.out == 0) return nullptr;
  return with_dtype(p.dtype, [&](auto stored) {
    using Stored = decltype(stored);
    if (p.rows == 1) return launch_forward<Stored, 1>(p, f, stream);
    return p.rows <= 4 ? launch_forward<Stored, 4>(p, f, stream)
                       : launch_forward<Stored, 8>(p, f, stream);
  });
}

inline const char* run_decode(const Problem& p, const Tile& tile, void* to, void* stream) {
  const int64_t count = tile.rows * tile.columns;
  if (count == 0) return nullptr;
  return with_dtype(p.dtype, [&](auto stored) {
    using Stored = decltype(stored);
    const bool runs = in_runs(p, tile.column, tile.columns);
    const int64_t threads = runs ? count / RUN : count;
    const auto kernel = runs ? decode_kernel<Stored, true> : decode_kernel<Stored, false>;
    return launch(kernel, (threads + THREADS - 1) / THREADS, THREADS, 16 * sizeof(Real<Stored>),
                  stream, p, tile, (Stored*)to);
  });
}

}  // namespace fuseport::nf4_linear::cuda
