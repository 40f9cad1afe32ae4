// Products of matrices, x·w, a tile of the result at a time: in half types by tensor cores, in float32
// and float64 by fused multiply-adds. What a kernel brings into the tiles of x and w is its own.
#pragma once

#include <type_traits>

#include "native/cuda_vectors.cuh"

namespace fuseport::cuda {

constexpr int PRODUCT_WARP = 32;

// A block's tile of the result, SIDE × SIDE, and the step that it takes in the inner dimension.
template <class Stored_, int SIDE_, int STEP_, int THREADS_>
struct Tiling {
  using Stored = Stored_;
  static constexpr int SIDE = SIDE_, STEP = STEP_, THREADS = THREADS_;
  static constexpr int BLOCKS = 512 / THREADS;  // of a multiprocessor, at least
  static constexpr bool TENSOR_CORES = sizeof(Stored) == 2;
};

template <class Stored>
struct Tilings {
  using Large = Tiling<Stored, 128, 32, 256>;
  using Small = Tiling<Stored, 64, 64, 128>;
};
template <>
struct Tilings<float> {
  using Large = Tiling<float, 128, 16, 256>;
  using Small = Tiling<float, 64, 32, 256>;
};
template <>
struct Tilings<double> {
  using Large = Tiling<double, 64, 16, 256>;
  using Small = Large;
};

// In shared memory, twice: one is read while the other is written. Of w, rows are of the inner
// dimension, as PlainSums and products with BACK have them; in TensorSums' others they are of
// columns of the result. What is between rows spreads them over the banks.
template <class Tiling, bool BACK>
struct Tiles {
  using Stored = typename Tiling::Stored;
  static constexpr bool OF_COLUMNS = Tiling::TENSOR_CORES && !BACK;
  static constexpr int SIDE = Tiling::SIDE, STEP = Tiling::STEP, PAD = VECTOR<Stored>;
  static constexpr int X_ROW = STEP + PAD, W_ROW = (OF_COLUMNS ? STEP : SIDE) + PAD;
  static constexpr int W_ROWS = OF_COLUMNS ? SIDE : STEP;
  Stored x[2][SIDE * X_ROW], w[2][W_ROWS * W_ROW];

  static FUSEPORT_DEVICE int place(int inner, int column) {
    return OF_COLUMNS ? column * W_ROW + inner : inner * W_ROW + column;
  }
};

// (rows, columns) of numbers; strides in numbers. `whole` says that it is read in packs of 16 bytes.
template <class Stored>
struct Matrix {
  const Stored* data;
  int64_t rows, columns, row_stride, column_stride;
  bool whole;
};

// Brings ROWS × COLUMNS numbers of a matrix to rows of a tile that are TILE_ROW apart, zeros beyond.
// They are there after wait_for_copies and a barrier.
template <int ROWS, int COLUMNS, int TILE_ROW, class Stored>
FUSEPORT_DEVICE void bring(const Matrix<Stored>& m, int64_t row, int64_t column, Stored* to) {
  constexpr int V = VECTOR<Stored>, PACKS = COLUMNS / V;
  const Stored* const from = m.data + row * m.row_stride + column * m.column_stride;
  if (m.whole) {
#pragma unroll 1  // what is unrolled keeps addresses in registers, of which none is left
    for (int i = (int)threadIdx.x; i < ROWS * PACKS; i += (int)blockDim.x) {
      const int r = i / PACKS, c = i % PACKS * V;
      const bool there = row + r < m.rows && column + c < m.columns;
      copy_later(to + r * TILE_ROW + c, there ? from + r * m.row_stride + c : m.data, there);
    }
    return;
  }
  const bool rows_first = m.row_stride == 1;  // lanes in a row read what is in a row
#pragma unroll 1
  for (int i = (int)threadIdx.x; i < ROWS * COLUMNS; i += (int)blockDim.x) {
    const int r = rows_first ? i % ROWS : i / COLUMNS, c = rows_first ? i / ROWS : i % COLUMNS;
    const bool there = row + r < m.rows && column + c < m.columns;
    to[r * TILE_ROW + c] = there ? from[r * m.row_stride + c * m.column_stride] : Stored{};
  }
}

// What a thread has of a tile of the result, on tensor cores: a warp has 32 columns.
template <class Tiling, bool BACK>
struct TensorSums {
  using Stored = typename Tiling::Stored;
  using Tiles = cuda::Tiles<Tiling, BACK>;
  static constexpr int TILE = 16, ACROSS = Tiling::SIDE / 32;
  static constexpr int DOWN = Tiling::SIDE * ACROSS * PRODUCT_WARP / Tiling::THREADS / TILE;
  static constexpr int WIDTH = 2;  // numbers in a row

  const int row = (int)threadIdx.x / PRODUCT_WARP / ACROSS * DOWN * TILE;
  const int column = (int)threadIdx.x / PRODUCT_WARP % ACROSS * 32;
  const bool needed;
  float sums[DOWN][4][4] = {};

  // So many rows and columns of the tile are there.
  FUSEPORT_DEVICE TensorSums(int64_t rows, int64_t columns)
      : needed(row < rows && column < columns) {}

  FUSEPORT_DEVICE void add(const Stored* x, const Stored* w) {
    if (!needed) return;
#pragma unroll
    for (int k = 0; k < Tiling::STEP; k += TILE) {
      uint32_t of_w[2][4];
#pragma unroll
      for (int j = 0; j < 2; ++j)
        load_matrices<BACK>(of_w[j], row_of<!BACK>(w + Tiles::place(k, column + j * TILE),
                                                   Tiles::W_ROW));
#pragma unroll
      for (int i = 0; i < DOWN; ++i) {
        uint32_t of_x[4];
        load_matrices<false>(of_x, row_of<false>(x + (row + i * TILE) * Tiles::X_ROW + k,
                                                 Tiles::X_ROW));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t(&b)[4] = of_w[j / 2];
          if constexpr (std::is_same_v<Stored, Half>)
            add_half_product(sums[i][j], of_x, b[j % 2 * 2], b[j % 2 * 2 + 1]);
          else
            add_product(sums[i][j], of_x, b[j % 2 * 2], b[j % 2 * 2 + 1]);
        }
      }
    }
  }

  // Calls put(row, column, numbers) for WIDTH numbers each time.
  template <class Put>
  FUSEPORT_DEVICE void each(const Put& put) const {
    const int lane = (int)threadIdx.x % PRODUCT_WARP;
#pragma unroll
    for (int i = 0; i < DOWN; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          put(row + i * TILE + half * 8 + lane / 4, column + j * 8 + lane % 4 * 2,
              sums[i][j] + half * 2);
  }
};

// The same by multiply-adds: threads are 16 × 16, and have every sixteenth row, and of columns
// every sixteenth group of WIDTH.
template <class Tiling, bool BACK>
struct PlainSums {
  using Stored = typename Tiling::Stored;  // which is what it is computed in
  using Tiles = cuda::Tiles<Tiling, BACK>;
  static constexpr int WIDTH = VECTOR<Stored>, DOWN = Tiling::SIDE / 16, GROUPS = DOWN / WIDTH;
  static_assert(Tiling::THREADS == 256 && GROUPS * WIDTH == DOWN);
  // Numbers of x's rows at once, and how often: as many as there are registers for.
  static constexpr int DEEP = WIDTH / 2, UNROLLED = DOWN > 4 ? 1 : 4;

  const int row = (int)threadIdx.x / 16, column = (int)threadIdx.x % 16 * WIDTH;
  Stored sums[DOWN][DOWN] = {};

  FUSEPORT_DEVICE PlainSums(int64_t, int64_t) {}

  FUSEPORT_DEVICE void add(const Stored* x, const Stored* w) {
#pragma unroll UNROLLED
    for (int k = 0; k < Tiling::STEP; k += DEEP) {
      Pack<Stored, DEEP> of_x[DOWN];
#pragma unroll
      for (int i = 0; i < DOWN; ++i)
        of_x[i] = *(const Pack<Stored, DEEP>*)(x + (row + i * 16) * Tiles::X_ROW + k);
#pragma unroll
      for (int next = 0; next < DEEP; ++next)
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
          const auto of_w = *(const Pack<Stored, WIDTH>*)(w + Tiles::place(k + next, column +
                                                                          group * 16 * WIDTH));
#pragma unroll
          for (int i = 0; i < DOWN; ++i)
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
              Stored& sum = sums[i][group * WIDTH + j];
              sum = fma_of(of_x[i].at[next], of_w.at[j], sum);
            }
        }
    }
  }

  template <class Put>
  FUSEPORT_DEVICE void each(const Put& put) const {
#pragma unroll
    for (int i = 0; i < DOWN; ++i)
#pragma unroll
      for (int group = 0; group < GROUPS; ++group)
        put(row + i * 16, column + group * 16 * WIDTH, sums[i] + group * WIDTH);
  }
};

template <class Tiling, bool BACK>
using SumsOf = std::conditional_t<Tiling::TENSOR_CORES, TensorSums<Tiling, BACK>,
                                  PlainSums<Tiling, BACK>>;

template <class Tiling>
int64_t tiles_of(int64_t rows, int64_t columns) {
  return (rows + Tiling::SIDE - 1) / Tiling::SIDE * ((columns + Tiling::SIDE - 1) / Tiling::SIDE);
}

// Large tiles bring less, if they are enough for the GPU's multiprocessors, or nearly.
template <class Stored>
bool in_large_tiles(int64_t rows, int64_t columns) {
  using Large = typename Tilings<Stored>::Large;
  return rows > Tilings<Stored>::Small::SIDE &&
         4 * tiles_of<Large>(rows, columns) >= 3 * multiprocessors();
}

}  // namespace fuseport::cuda
