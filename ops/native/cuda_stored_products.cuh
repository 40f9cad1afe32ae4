// Products of many rows with a stored weight, or with its transpose, and sums over rows. Of it a
// block decodes a tile at a time into shared memory, in the dtype of x, while tensor cores, or in
// float32 and float64 fused multiply-adds, are at the tile before.
//
// Where tiles of the result are fewer than a GPU could work at, the inner dimension is cut into
// parts, whose sums are added up in their order. How many there are depends on shapes and on the
// GPU; bits on nothing else.
#pragma once

#include "native/cuda_products.cuh"
#include "native/cuda_stored.cuh"

namespace fuseport::stored::cuda {

// x·Wᵀ + bias, or dout·W. `x` stands for dout, too.
struct Product {
  Rows x;                      // (rows, inner)
  const void* bias = nullptr;  // null: none
  void* to = nullptr;          // (rows, columns)
  int64_t inner = 0, columns = 0;
  int64_t parts = 1, span = 0;  // of the inner dimension
  void* sums = nullptr;         // (parts, rows, columns), Reals, unless there is one part
  bool whole = false, runs = false;  // whether x is read in packs, and the weight in runs
};

// What a thread decodes of a tile of the weight: asked for before the product with the tile before,
// decoded after it.
template <class Weight, class Tiling, bool BACK>
struct Decoder {
  using Stored = typename Tiling::Stored;
  using Real = fuseport::cuda::Real<Stored>;
  using Tiles = fuseport::cuda::Tiles<Tiling, BACK>;
  static constexpr int SIDE = Tiling::SIDE, STEP = Tiling::STEP;
  static_assert(STEP % RUN == 0 && SIDE % RUN == 0);
  static constexpr int RUNS = SIDE * STEP / RUN;
  static constexpr int OWN = (RUNS + Tiling::THREADS - 1) / Tiling::THREADS;

  const Weight& weight;
  const Product& m;
  const int64_t column;
  typename Weight::Asked asked[OWN];

  FUSEPORT_DEVICE Decoder(const Weight& weight, const Product& m, int64_t column)
      : weight(weight), m(m), column(column) {}

  FUSEPORT_DEVICE void ask(int64_t inner) {
    if (!m.runs) return;
    for_own([&](int j, int k, int c) {
      const bool there = inner + k < m.inner && column + c < m.columns;
      if (there) asked[j] = weight.ask(row_of(inner + k, c), column_of(inner + k, c));
      else asked[j] = {};
    });
  }

  FUSEPORT_DEVICE void decode(int64_t inner, Stored* to) const {
    if (!m.runs) return decode_each(inner, to);
    for_own([&](int j, int k, int c) {
      Real values[RUN];
      weight.decode(asked[j], values);
      if constexpr (BACK || Tiles::OF_COLUMNS) {
        constexpr int V = VECTOR<Stored>;
#pragma unroll
        for (int i = 0; i < RUN; i += V)
          store_pack<V>(values + i, to + Tiles::place(k, c) + i, 1, V, true);
      } else {
#pragma unroll
        for (int i = 0; i < RUN; ++i) from_real(values[i], to + Tiles::place(k + i, c));
      }
    });
  }

 private:
  // Runs go along the weight's rows. Lanes in a row take runs in a row; or columns, where what is
  // in a run is not in a row of the tile.
  template <class Visit>
  static FUSEPORT_DEVICE void for_own(const Visit& visit) {
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
      const int i = j * Tiling::THREADS + (int)threadIdx.x;
      if (i >= RUNS) break;
      if constexpr (BACK) visit(j, i / (SIDE / RUN), i % (SIDE / RUN) * RUN);
      else if constexpr (Tiles::OF_COLUMNS) visit(j, i % (STEP / RUN) * RUN, i / (STEP / RUN));
      else visit(j, i / SIDE * RUN, i % SIDE);
    }
  }

  // Of the weight; `c` counts from this tile's first column of the result.
  FUSEPORT_DEVICE int64_t row_of(int64_t inner, int c) const { return BACK ? inner : column + c; }
  FUSEPORT_DEVICE int64_t column_of(int64_t inner, int c) const {
    return BACK ? column + c : inner;
  }

  FUSEPORT_DEVICE void decode_each(int64_t inner, Stored* to) const {
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < SIDE * STEP; i += Tiling::THREADS) {
      const int k = BACK ? i / SIDE : i % STEP, c = BACK ? i % SIDE : i / STEP;
      const bool there = inner + k < m.inner && column + c < m.columns;
      from_real(there ? weight.one(row_of(inner + k, c), column_of(inner + k, c)) : Real(0),
                to + Tiles::place(k, c));
    }
  }
};

// COUNT numbers of the result's row, from `column` on, of which `count` are there.
template <int COUNT, class Stored>
FUSEPORT_DEVICE void finish(const Product& m, const Real<Stored>* sums, int64_t at, int64_t column,
                            int count, bool whole) {
  Real<Stored> values[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    values[i] = sums[i];
    if (m.bias && i < count) values[i] += to_real(((const Stored*)m.bias)[column + i]);
  }
  store_line<COUNT>(values, (Stored*)m.to + at, count, whole);
}

// Tiles of the result in a row share x, and the packed weight is in L2 for the rows of them below.
template <template <class> class Weight, class Tiling, bool BACK, class Problem>
__global__ void __launch_bounds__(Tiling::THREADS, Tiling::BLOCKS)
    product_kernel(Problem p, Product m) {
  using Stored = typename Tiling::Stored;
  using Real = fuseport::cuda::Real<Stored>;
  using Tiles = fuseport::cuda::Tiles<Tiling, BACK>;
  using Sums = SumsOf<Tiling, BACK>;
  constexpr int SIDE = Tiling::SIDE, STEP = Tiling::STEP, WIDTH = Sums::WIDTH;
  const auto turn_of = [](int64_t k) { return (int)(k / STEP % 2); };  // of two tiles
  FUSEPORT_SHARED(memory);
  const Weight<Real> weight(p, memory);
  Tiles& tiles = *(Tiles*)(memory + Weight<Real>::BYTES);
  const Matrix<Stored> x{(const Stored*)m.x.data, p.rows, m.inner, m.x.row_stride,
                         m.x.column_stride, m.whole};
  const int64_t across = (m.columns + SIDE - 1) / SIDE, down = (p.rows + SIDE - 1) / SIDE;
  for (int64_t unit = blockIdx.x; unit < across * down * m.parts; unit += gridDim.x) {
    const int64_t line = unit / across, part = line / down;
    const int64_t column = unit % across * SIDE, row = line % down * SIDE;
    const int64_t first = part * m.span, end = first + m.span;
    const int64_t last = end < m.inner ? end : m.inner;
    Sums sums(p.rows - row, m.columns - column);
    Decoder<Weight<Real>, Tiling, BACK> decoder(weight, m, column);
    __syncthreads();  // the unit before has read all
    if (first < last) {
      const int turn = turn_of(first);
      bring<SIDE, STEP, Tiles::X_ROW>(x, row, first, tiles.x[turn]);
      decoder.ask(first);
      decoder.decode(first, tiles.w[turn]);
    }
    for (int64_t k = first; k < last; k += STEP) {
      const int turn = turn_of(k), other = turn ^ 1;
      wait_for_copies();
      __syncthreads();
      const int64_t next = k + STEP;
      if (next < last) {
        bring<SIDE, STEP, Tiles::X_ROW>(x, row, next, tiles.x[other]);
        decoder.ask(next);
      }
      sums.add(tiles.x[turn], tiles.w[turn]);
      if (next < last) decoder.decode(next, tiles.w[other]);
    }
    sums.each([&](int r, int c, const Real* numbers) {
      const int64_t left = m.columns - column - c;
      if (row + r >= p.rows || left <= 0) return;
      const int count = left < WIDTH ? (int)left : WIDTH;
      const int64_t at = (part * p.rows + row + r) * m.columns + column + c;
      const bool whole = count == WIDTH && at % WIDTH == 0;
      if (m.parts > 1) store_line<WIDTH>(numbers, (Real*)m.sums + at, count, whole);
      else finish<WIDTH, Stored>(m, numbers, at, column + c, count, whole);
    });
  }
}

template <class Stored>
__global__ void __launch_bounds__(THREADS) add_parts_kernel(Product m, int64_t count) {
  for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < count;
       i += gridDim.x * (int64_t)THREADS) {
    const Real<Stored>* const sums = (const Real<Stored>*)m.sums + i;
    Real<Stored> sum = sums[0];
    for (int64_t part = 1; part < m.parts; ++part) sum += sums[part * count];
    finish<1, Stored>(m, &sum, i, i - quotient_of(i, m.columns) * m.columns, 1, false);
  }
}

template <class Stored>
__global__ void __launch_bounds__(PART_THREADS) sum_rows_kernel(Sizes p, Backward b) {
  FUSEPORT_SHARED(memory);
  const Stored* const dout = (const Stored*)b.dout.data;
  sum_columns(
      p.rows, p.out, (double*)memory,
      [&](int64_t row, int64_t i) {
        return to_real(dout[row * b.dout.row_stride + i * b.dout.column_stride]);
      },
      [&](int64_t i, double sum) { from_real((Real<Stored>)sum, (Stored*)b.dbias + i); });
}

// Sets parts and span: two blocks for a multiprocessor, of some steps each.
template <class Tiling>
void cut(Product& m, int64_t rows) {
  constexpr int64_t STEPS = 4, STEP = Tiling::STEP;
  const int64_t steps = (m.inner + STEP - 1) / STEP;
  const int64_t fitting = 2 * multiprocessors() / tiles_of<Tiling>(rows, m.columns);
  const int64_t most = fitting < steps / STEPS ? fitting : steps / STEPS;
  m.span = most > 1 ? (steps + most - 1) / most * STEP : steps * STEP;
  m.parts = most > 1 ? (m.inner + m.span - 1) / m.span : 1;
}

inline Product product_of(const Sizes& p, const Forward& f) {
  return {.x = f.x, .bias = f.bias, .to = f.out, .inner = p.in, .columns = p.out};
}
inline Product product_of(const Sizes& p, const Backward& b) {
  return {.x = b.dout, .to = b.dx, .inner = p.out, .columns = p.in};
}

// Calls call(Tiling{}, m), with the parts set, for a result that is not empty.
template <class Call>
const char* with_tiling(const Sizes& p, Product m, const Call& call) {
  if (p.rows == 0 || m.columns == 0) return nullptr;
  return with_dtype(p.dtype, [&](auto stored) {
    using All = Tilings<decltype(stored)>;
    const auto with = [&](auto tiling) {
      cut<decltype(tiling)>(m, p.rows);
      return call(tiling, m);
    };
    return in_large_tiles<decltype(stored)>(p.rows, m.columns) ? with(typename All::Large{})
                                                               : with(typename All::Small{});
  });
}

// Bytes of memory that run_product wants.
inline int64_t product_scratch(const Sizes& p, const Product& product) {
  int64_t bytes = 0;
  with_tiling(p, product, [&](auto tiling, const Product& m) -> const char* {
    using Stored = typename decltype(tiling)::Stored;
    if (m.parts > 1) bytes = m.parts * p.rows * m.columns * (int64_t)sizeof(Real<Stored>);
    return nullptr;
  });
  return bytes;
}

// Adds up what is in m.sums.
template <class Stored>
const char* run_add_parts(const Sizes& p, const Product& m, void* stream) {
  const int64_t count = p.rows * m.columns;
  return launch(add_parts_kernel<Stored>, (count + THREADS - 1) / THREADS, THREADS, 0, stream, m,
                count);
}

template <template <class> class Weight, bool BACK, class Problem>
const char* run_product(const Problem& p, const Product& product, void* scratch, void* stream) {
  return with_tiling(p, product, [&](auto tiling, Product m) {
    using Tiling = decltype(tiling);
    using Stored = typename Tiling::Stored;
    m.sums = scratch;
    m.whole = m.x.column_stride == 1 &&
              aligned<VECTOR<Stored>, Stored>(m.x.data, m.x.row_stride, m.inner);
    m.runs = Weight<Real<Stored>>::in_runs(p, 0, p.in);
    const int64_t shared = Weight<Real<Stored>>::BYTES + sizeof(Tiles<Tiling, BACK>);
    const char* const error =
        launch(product_kernel<Weight, Tiling, BACK, Problem>,
               tiles_of<Tiling>(p.rows, m.columns) * m.parts, Tiling::THREADS, shared, stream, p, m);
    return error || m.parts == 1 ? error : run_add_parts<Stored>(p, m, stream);
  });
}

inline const char* run_sum_rows(const Sizes& p, const Backward& b, void* stream) {
  if (p.out == 0) return nullptr;
  return with_dtype(p.dtype, [&](auto stored) {
    return launch(sum_rows_kernel<decltype(stored)>, part_blocks(p.out), PART_THREADS, PART_SHARED,
                  stream, p, b);
  });
}

}  // namespace fuseport::stored::cuda
