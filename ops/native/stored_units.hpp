// Products with tiles of a decoded weight, each tile small enough for a cache. Compiled once per
// instruction set.
//
// A `Weight` is made of a problem and of room(problem) floats. It has decode<F>(row, column, count,
// to), `column` being a multiple of 64; and with AVX-512, where in_registers(), for MOST rows of x at
// the most, TURN, see stored_few.hpp, and dot<COUNT>(row, x, x_stride, sums): the lanes of the
// products of a row with COUNT rows of x, arranged.
#pragma once

#include <cstring>

#include "native/blocks.hpp"
#include "native/stored_few.hpp"
#include "native/stored_weight.hpp"

namespace fuseport::stored::FUSEPORT_ISA {

using namespace fuseport::FUSEPORT_ISA;


constexpr int DEPTH = 128;  // rows of a tile
constexpr int SUMMED = 64;  // of a sum in registers: errors of longer ones would grow with the depth
constexpr int ROWS = 4;     // of a block of registers
#if defined(__AVX512F__)
constexpr int VECTORS = 4;
#else
constexpr int VECTORS = 2;
#endif

FUSEPORT_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// A number of columns, rounded up to whole vectors.
template <class F>
FUSEPORT_INLINE int whole(int64_t columns) {
  return (int)((columns + F::LANES - 1) / F::LANES * F::LANES);
}

// A unit's own memory: a tile of the weight, rows of the left matrix, sums.
template <class Real>
struct Scratch {
  Real *tile, *panel, *sums;
  float* room;  // of a Weight
  int64_t bytes;

  Scratch(const Sizes& p, int64_t of_weight, void* base) {
    char* at = (char*)base;
    const auto take = [&](int64_t count) {
      Real* here = (Real*)at;
      at += (count * (int64_t)sizeof(Real) + 63) / 64 * 64;
      return here;
    };
    room = (float*)at;
    at += (of_weight * (int64_t)sizeof(float) + 63) / 64 * 64;
    tile = take(DEPTH * STRIP);
    panel = take(p.rows <= DECODING ? 8 * (p.in + DEPTH) : ROWS * DEPTH);
    sums = take(least(p.rows, CHUNK) * STRIP);
    bytes = at - (char*)base;
  }
};

// sums (COUNT, STRIP) += panel (COUNT, depth) · tile (depth, STRIP), VECTORS_ vectors of columns.
template <class F, int COUNT, int VECTORS_>
FUSEPORT_INLINE void product_block(const typename F::Real* panel, const typename F::Real* tile,
                                   int depth, typename F::Real* sums) {
  using Vector = typename F::Vector;
  Vector sum[COUNT][VECTORS_] = {};
  for (int k = 0; k < depth; ++k) {
    Vector right[VECTORS_];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS_; ++v) right[v] = load<F>(tile + k * STRIP + v * F::LANES);
#pragma GCC unroll 4
    for (int r = 0; r < COUNT; ++r) {
      const Vector left = splat<F>(panel[r * DEPTH + k]);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS_; ++v) sum[r][v] = left * right[v] + sum[r][v];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < COUNT; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS_; ++v) {
      typename F::Real* to = sums + r * STRIP + v * F::LANES;
      store<F>(to, load<F>(to) + sum[r][v]);
    }
}

template <class F, int COUNT>
static void product_rows(const typename F::Real* panel, const typename F::Real* tile, int depth,
                         int columns, typename F::Real* sums) {
  for (; depth > 0; panel += SUMMED, tile += SUMMED * STRIP, depth -= SUMMED) {
    const int part = depth < SUMMED ? depth : SUMMED;
    int c = 0;
    for (; c + VECTORS * F::LANES <= columns; c += VECTORS * F::LANES)
      product_block<F, COUNT, VECTORS>(panel, tile + c, part, sums + c);
    for (; c < columns; c += F::LANES) product_block<F, COUNT, 1>(panel, tile + c, part, sums + c);
  }
}

template <class F>
static void product(const typename F::Real* panel, const typename F::Real* tile, int count,
                    int depth, int columns, typename F::Real* sums) {
  switch (count) {
    case 1:
      return product_rows<F, 1>(panel, tile, depth, columns, sums);
    case 2:
      return product_rows<F, 2>(panel, tile, depth, columns, sums);
    case 3:
      return product_rows<F, 3>(panel, tile, depth, columns, sums);
    default:
      return product_rows<F, ROWS>(panel, tile, depth, columns, sums);
  }
}

template <class F, class Stored>
FUSEPORT_INLINE void load_rows(const Rows& rows, int64_t row, int64_t column, int count,
                               int columns, typename F::Real* to, int stride) {
  const Stored* from =
      (const Stored*)rows.data + row * rows.row_stride + column * rows.column_stride;
  load_block<F>(from, rows.row_stride, rows.column_stride, count, columns, to, stride);
}

// A tile (depth, columns) of W, from (row, column) on. Columns up to whole vectors are zero.
template <class F, class Weight>
static void tile_of(const Weight& weight, int64_t row, int64_t column, int depth, int columns,
                    typename F::Real* tile) {
  for (int k = 0; k < depth; ++k) {
    typename F::Real* to = tile + k * STRIP;
    weight.template decode<F>(row + k, column, columns, to);
    for (int c = columns; c < whole<F>(columns); ++c) to[c] = 0;
  }
}

// A tile (depth, columns) of Wᵀ, from (row, column) on.
template <class F, class Weight>
static void transposed_tile_of(const Weight& weight, int64_t row, int64_t column, int depth,
                               int columns, typename F::Real* tile) {
  using Real = typename F::Real;
  constexpr int LANES = F::LANES;
  alignas(64) Real lines[LANES * DEPTH];
  for (int c = 0; c < columns; c += LANES) {
    for (int i = 0; i < LANES; ++i) {
      Real* line = lines + i * DEPTH;
      if (c + i < columns) {
        weight.template decode<F>(column + c + i, row, depth, line);
      } else {
        memset(line, 0, sizeof *line * DEPTH);
      }
    }
    for (int k = 0; k < depth; k += LANES) {
      typename F::Vector block[LANES];
      load_columns<F>(lines + k, DEPTH, block);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) store<F>(tile + (k + i) * STRIP + c, block[i]);
    }
  }
}

// A strip of left · W, or left · Wᵀ, as sums (rows of the chunk, STRIP).
template <class F, class Weight, class Stored, bool TRANSPOSED>
static void strip_of(const Weight& weight, const Sizes& p, const Rows& left, int64_t first,
                     int rows, int64_t column, int columns, const Scratch<typename F::Real>& s) {
  using Real = typename F::Real;
  const int64_t all = TRANSPOSED ? p.in : p.out;
  memset(s.sums, 0, sizeof(Real) * rows * STRIP);
  for (int64_t at = 0; at < all; at += DEPTH) {
    const int depth = (int)least(DEPTH, all - at);
    if constexpr (TRANSPOSED) {
      transposed_tile_of<F>(weight, at, column, depth, columns, s.tile);
    } else {
      tile_of<F>(weight, at, column, depth, columns, s.tile);
    }
    for (int r = 0; r < rows; r += ROWS) {
      const int count = (int)least(ROWS, rows - r);
      load_rows<F, Stored>(left, first + r, at, count, depth, s.panel, DEPTH);
      product<F>(s.panel, s.tile, count, depth, whole<F>(columns), s.sums + r * STRIP);
    }
  }
}

// The same of x · Wᵀ for a few rows: each row of the weight is decoded and used at once. As many
// rows of it as lanes end in one vector of sums.
template <class F, class Weight, class Stored>
static void strip_of_few(const Weight& weight, const Sizes& p, const Rows& x, int rows,
                         int64_t column, int columns, const Scratch<typename F::Real>& s) {
  using Vector = typename F::Vector;
  constexpr int LANES = F::LANES, CHAINS = 4;
  constexpr int64_t LINE = DEPTH * STRIP;  // values that a tile holds
  const int64_t stride = p.in > DEPTH ? p.in + DEPTH : DEPTH;
  memset(s.sums, 0, sizeof(typename F::Real) * rows * STRIP);
  for (int r = 0; r < rows; ++r) {
    typename F::Real* to = s.panel + r * stride;
    load_rows<F, Stored>(x, r, 0, 1, (int)p.in, to, 0);
    memset(to + p.in, 0, sizeof *to * (stride - p.in < DEPTH ? stride - p.in : DEPTH));
  }
  for (int64_t at = 0; at < p.in; at += LINE) {
    const int64_t depth = least(LINE, p.in - at);
    for (int c = 0; c < columns; c += LANES) {
      Vector sums[FEW][LANES] = {};
      for (int i = 0; i < LANES && c + i < columns; ++i) {
        weight.template decode<F>(column + c + i, at, depth, s.tile);
        int64_t padded = depth;
        for (; padded % (CHAINS * LANES); ++padded) s.tile[padded] = 0;
        for (int r = 0; r < rows; ++r) {
          const typename F::Real* left = s.panel + r * stride + at;
          Vector chains[CHAINS] = {};
          for (int64_t k = 0; k < padded; k += CHAINS * LANES)
#pragma GCC unroll 4
            for (int j = 0; j < CHAINS; ++j)
              chains[j] += load<F>(left + k + j * LANES) * load<F>(s.tile + k + j * LANES);
          sums[r][i] = (chains[0] + chains[1]) + (chains[2] + chains[3]);
        }
      }
      for (int r = 0; r < rows; ++r) {
        typename F::Real* to = s.sums + r * STRIP + c;
        store<F>(to, load<F>(to) + sums_of_lanes<F>(sums[r]));
      }
    }
  }
}

template <class F, class Weight>
FUSEPORT_INLINE bool decodes_in_registers(const Weight& weight, const Sizes& p) {
#if defined(__AVX512F__)
  return sizeof(typename F::Real) == 4 && p.rows <= Weight::MOST && p.in > 0 &&
         weight.in_registers();
#else
  return false;
#endif
}

template <class F, class Weight, class Stored, class Problem>
static void forward_unit(const Problem& p, const Forward& f, int64_t unit, void* base) {
  using Real = typename F::Real;
  const Scratch<Real> s(p, Weight::room(p), base);
  const Weight weight(p, s.room);
  const int64_t first = unit % p.chunks() * CHUNK, column = unit / p.chunks() * STRIP;
  const int rows = (int)least(CHUNK, p.rows - first), columns = (int)least(STRIP, p.out - column);
  if (decodes_in_registers<F>(weight, p)) {
#if defined(__AVX512F__)
    if constexpr (sizeof(Real) == 4)
      strip_of_decoding<Weight, Stored>(weight, p, f.x, column, columns, s.panel, s.sums, STRIP);
#endif
  } else if (p.rows <= FEW) {
    strip_of_few<F, Weight, Stored>(weight, p, f.x, rows, column, columns, s);
  } else {
    strip_of<F, Weight, Stored, true>(weight, p, f.x, first, rows, column, columns, s);
  }
  load_block<F>((const Stored*)f.bias + column, 0, 1, 1, columns, s.panel, 0);
  for (int r = 0; r < rows; ++r) {
    Real* sums = s.sums + r * STRIP;
    for (int c = 0; c < columns; ++c) sums[c] += s.panel[c];
  }
  store_block<F>(s.sums, STRIP, rows, columns, (Stored*)f.out + first * p.out + column, p.out, 1);
}

template <class F, class Weight, class Stored, class Problem>
static void backward_unit(const Problem& p, const Backward& b, int64_t unit, void* base) {
  const Scratch<typename F::Real> s(p, Weight::room(p), base);
  const Weight weight(p, s.room);
  const int64_t first = unit % p.chunks() * CHUNK, column = unit / p.chunks() * STRIP;
  const int rows = (int)least(CHUNK, p.rows - first), columns = (int)least(STRIP, p.in - column);
  strip_of<F, Weight, Stored, false>(weight, p, b.dout, first, rows, column, columns, s);
  store_block<F>(s.sums, STRIP, rows, columns, (Stored*)b.dx + first * p.in + column, p.in, 1);
}

template <class F, class Weight, class Stored, class Problem>
static void sum_unit(const Problem& p, const Backward& b, int64_t unit, void* base) {
  const Scratch<typename F::Real> s(p, Weight::room(p), base);
  const int64_t column = unit * STRIP;
  const int columns = (int)least(STRIP, p.out - column);
  double sums[STRIP] = {};
  for (int64_t row = 0; row < p.rows; row += DEPTH) {
    const int count = (int)least(DEPTH, p.rows - row);
    load_rows<F, Stored>(b.dout, row, column, count, columns, s.tile, STRIP);
    for (int r = 0; r < count; ++r)
      for (int c = 0; c < columns; ++c) sums[c] += (double)s.tile[r * STRIP + c];
  }
  for (int c = 0; c < columns; ++c)
    from_real((typename F::Real)sums[c], (Stored*)b.dbias + column + c);
}

// The functions of an op's `Kernels`.
template <class Weight, class Problem>
struct Units {
  static int64_t scratch_bytes(const Problem& p) {
    return p.dtype == Dtype::float64 ? Scratch<double>(p, Weight::room(p), nullptr).bytes
                                     : Scratch<float>(p, Weight::room(p), nullptr).bytes;
  }

  static void forward(const Problem& p, const Forward& f, int64_t unit, void* scratch) {
#define FUSEPORT_CALL(F, Stored) forward_unit<F, Weight, Stored>(p, f, unit, scratch)
    FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
  }

  static void backward(const Problem& p, const Backward& b, int64_t unit, void* scratch) {
#define FUSEPORT_CALL(F, Stored) backward_unit<F, Weight, Stored>(p, b, unit, scratch)
    FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
  }

  static void sum_rows(const Problem& p, const Backward& b, int64_t unit, void* scratch) {
#define FUSEPORT_CALL(F, Stored) sum_unit<F, Weight, Stored>(p, b, unit, scratch)
    FUSEPORT_DISPATCH(p.dtype, FUSEPORT_CALL)
#undef FUSEPORT_CALL
  }
};

}  // namespace fuseport::stored::FUSEPORT_ISA
