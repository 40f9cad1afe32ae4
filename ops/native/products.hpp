// Products of small matrices of reals, in blocks of registers. Compiled once per instruction set.
#pragma once

#include "native/vector.hpp"

namespace fuseport::FUSEPORT_ISA {

// A matrix with any two strides, whose numbers are read one by one.
template <class Real>
struct Left {
  const Real* data;
  int64_t row, depth;
};

// Where the left matrix is zero: nowhere, for depth > row, or for depth < row.
enum class Zeros { none, above, below };

// c = keep·c + scale_i·(a·b): rows × columns, columns being whole vectors. keep = 0 does not read c;
// scale may be null, for ones.
template <class F>
struct Product {
  using Real = typename F::Real;
  Left<Real> a;
  const Real* b;
  int64_t b_stride;
  Real* c;
  int64_t c_stride;
  int rows, columns, depth;
  Real keep = 0;
  const Real* scale = nullptr;
};

constexpr int PRODUCT_ROWS = 4;  // of a block of registers
constexpr int PRODUCT_DEPTH = 32;  // of a sum in registers: errors of longer ones would grow with it
#if defined(__AVX512F__)
constexpr int PRODUCT_VECTORS = 4;
#else
constexpr int PRODUCT_VECTORS = 2;
#endif

template <class F, int ROWS, int VECTORS>
FUSEPORT_INLINE void product_block(const Product<F>& p, int row, int column, int from, int to,
                                   typename F::Real keep) {
  using Real = typename F::Real;
  using Vector = typename F::Vector;
  Vector sums[ROWS][VECTORS] = {};
  const Real* a = p.a.data + row * p.a.row + from * p.a.depth;
  const Real* b = p.b + from * p.b_stride + column;
  for (int k = from; k < to; ++k, a += p.a.depth, b += p.b_stride) {
    Vector right[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) right[v] = load<F>(b + v * F::LANES);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const Vector left = splat<F>(a[r * p.a.row]);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) sums[r][v] = left * right[v] + sums[r][v];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
    Real* c = p.c + (row + r) * p.c_stride + column;
    const Vector scale = splat<F>(p.scale ? p.scale[row + r] : (Real)1);
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      const Vector sum = sums[r][v] * scale;
      const Vector all = keep == 0 ? sum : load<F>(c + v * F::LANES) * keep + sum;
      store<F>(c + v * F::LANES, all);
    }
  }
}

template <class F, int ROWS>
FUSEPORT_INLINE void product_rows(const Product<F>& p, int row, Zeros zeros, int columns) {
  const int past = row + ROWS < p.depth ? row + ROWS : p.depth;
  const int from = zeros == Zeros::below ? (row < p.depth ? row : p.depth) : 0;
  const int to = zeros == Zeros::above ? past : p.depth;
  int begin = from;
  do {  // once, too, where there is nothing to sum up
    const int end = to - begin > PRODUCT_DEPTH ? begin + PRODUCT_DEPTH : to;
    const typename F::Real keep = begin == from ? p.keep : 1;
    int c = 0;
    for (; c + PRODUCT_VECTORS * F::LANES <= columns; c += PRODUCT_VECTORS * F::LANES)
      product_block<F, ROWS, PRODUCT_VECTORS>(p, row, c, begin, end, keep);
    for (; c < columns; c += F::LANES) product_block<F, ROWS, 1>(p, row, c, begin, end, keep);
    begin = end;
  } while (begin < to);
}

// The product; with `lower`, only what is not above the diagonal, and some more of it.
template <class F>
static void multiply(const Product<F>& p, Zeros zeros = Zeros::none, bool lower = false) {
  int row = 0;
  const auto columns = [&](int end) {
    const int whole = (end + F::LANES - 1) / F::LANES * F::LANES;
    return lower && whole < p.columns ? whole : p.columns;
  };
  for (; row + PRODUCT_ROWS <= p.rows; row += PRODUCT_ROWS)
    product_rows<F, PRODUCT_ROWS>(p, row, zeros, columns(row + PRODUCT_ROWS));
  for (; row < p.rows; ++row) product_rows<F, 1>(p, row, zeros, columns(row + 1));
}

}  // namespace fuseport::FUSEPORT_ISA
