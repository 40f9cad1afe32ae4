// x·Wᵀ + bias for few rows of x, on tensor cores: an index of the weight is decoded once for
// sixteen rows, straight into the registers that they multiply from. What takes long is to read
// and decode the weight; so all warps of a block have the same columns of the result, and of the
// inner dimension groups in turn. What they found is added up in their order.
//
// A weight is a value of the code times its block's scale. Tensor cores are given the code alone,
// in parts, and scales multiply sums over a group: W is not rounded to the dtype of x, but the
// code beside bfloat16 to 16 bits, and what tensor cores cut off is of short sums
// (native/cuda_apart.cuh).
#pragma once

#include "nf4_linear/cuda_code.cuh"
#include "nf4_linear/cuda_products.cuh"

namespace fuseport::nf4_linear::cuda {

constexpr int GROUP = 64;  // values in a row that share a scale
constexpr int OF_LANE = GROUP / 4, STEPS = GROUP / TILE;  // four lanes have a row of a group

// Columns and rows of the result that a block has at once, and its shared memory.
template <class Stored_, int ACROSS_, int DOWN_>
struct FewTiling {
  using Stored = Stored_;
  static constexpr int ACROSS = ACROSS_, DOWN = DOWN_;  // tiles of eight
  static constexpr int COLUMNS = ACROSS * 8, ROWS = DOWN * 8;
  // As many as there are registers for.
  static constexpr int WARPS = std::is_same_v<Stored, float> && ACROSS > 2 ? 12 : 16;
  static constexpr int THREADS = WARPS * WARP;
  static constexpr int LINE = COLUMNS + 4, OF_WARP = ROWS * LINE;  // spread over the banks
  static constexpr int SHARED = CodeParts<Stored>::BYTES + WARPS * OF_WARP * (int)sizeof(float);
};

template <class Stored>
FUSEPORT_DEVICE void add_code(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<Stored, Half>) add_half_product(sum, a, b[0], b[1]);
  else add_product(sum, a, b[0], b[1]);
}

// What lane 4·g + c has: of the weight row g of each tile of eight columns, of x row g of each
// tile of eight rows; of a group in all of them numbers 16·c to 16·c + 15. What order tensor cores
// have the inner dimension in does not matter, if it is that of both operands.
//
// Of a first operand's sixteen rows, the upper eight are first parts of the code, the lower eight
// the second ones of the same values: as registers come from the table.
template <class Tiling>
struct FewSums {
  using Stored = typename Tiling::Stored;
  using Parts = CodeParts<Stored>;
  static constexpr int ACROSS = Tiling::ACROSS, DOWN = Tiling::DOWN;
  static constexpr bool WIDE = std::is_same_v<Stored, float>;
  static constexpr int OF_X = WIDE ? 3 : 1;
  static constexpr int TURNS = WIDE ? 2 : 1;  // that a group takes: half the indices in each

  const Problem& p;
  const uint8_t* packed;  // of the first row, from the lane's numbers on
  int64_t scale;          // the first row's first group
  const Stored* x[DOWN];
  const uint32_t eight;  // groups in as many rows of the weight
  float sums[ACROSS][DOWN][2] = {};  // of columns g, and rows 2·c and 2·c + 1

  // Indices that are not decoded yet, and their scales.
  struct Asked {
    Pack<uint32_t, 2> words[ACROSS];
    float scales[ACROSS];
  };

  // Rows of x that are not there are others: what is found of them is not needed.
  FUSEPORT_DEVICE FewSums(const Problem& p, const nf4_linear::Rows& rows, int64_t column,
                          uint32_t row)
      : p(p), eight(8 * (uint32_t)(p.in / GROUP)) {
    const int lane = (int)threadIdx.x % WARP, g = lane / 4, c = lane % 4;
    packed = p.packed + (column + g) * (p.in / 2) + c * OF_LANE / 2;
    scale = (column + g) * (p.in / GROUP);
#pragma unroll
    for (int n = 0; n < DOWN; ++n) {
      const uint32_t wanted = row + n * 8 + g, last = (uint32_t)p.rows - 1;
      const int64_t r = wanted < last ? wanted : last;
      x[n] = (const Stored*)rows.data + r * rows.row_stride + c * OF_LANE;
    }
  }

  FUSEPORT_DEVICE Asked ask(uint32_t group) const {
    Asked asked;
#pragma unroll
    for (int i = 0; i < ACROSS; ++i) {
      const uint32_t place = i * eight + group;
      asked.words[i] = *(const Pack<uint32_t, 2>*)(packed + place * (uint64_t)(GROUP / 2));
      asked.scales[i] = ((const float*)p.absmax)[(scale + place) >> (p.block_shift - 6)];
    }
    return asked;
  }

  FUSEPORT_DEVICE void add(const Parts& code, Asked asked, uint32_t group) {
#pragma unroll 1  // there are no registers for all of it at once
    for (int turn = 0; turn < TURNS; ++turn) {
      add_steps(code, asked, group * GROUP + turn * (OF_LANE / TURNS));
#pragma unroll
      for (int i = 0; i < ACROSS; ++i) asked.words[i].at[0] = asked.words[i].at[1];
    }
  }

  // To (ROWS, LINE).
  FUSEPORT_DEVICE void store(float* to) const {
    const int lane = (int)threadIdx.x % WARP, g = lane / 4, c = lane % 4;
#pragma unroll
    for (int i = 0; i < ACROSS; ++i)
#pragma unroll
      for (int n = 0; n < DOWN; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          to[(n * 8 + c * 2 + j) * Tiling::LINE + i * 8 + g] = sums[i][n][j];
  }

 private:
  // The steps of a turn, of which the lane's numbers of x begin at `place`. Of float32, tensor
  // cores add up no more than a step, but of the smallest parts: what they cut off is more than
  // rounding.
  FUSEPORT_DEVICE void add_steps(const Parts& code, const Asked& asked, uint32_t place) {
    constexpr int VECTORS = OF_LANE / TURNS / VECTOR<Stored>, WORDS = VECTORS * 4;
    uint32_t words[DOWN][WORDS];
#pragma unroll
    for (int n = 0; n < DOWN; ++n)
#pragma unroll
      for (int v = 0; v < VECTORS; ++v)
        load_words(x[n] + place + v * VECTOR<Stored>, *(uint32_t(*)[4])(words[n] + v * 4));
    float own[ACROSS][DOWN][4] = {}, thirds[ACROSS / 2][DOWN][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS / TURNS; ++step) {
      uint32_t of_x[DOWN][OF_X][2];
#pragma unroll
      for (int n = 0; n < DOWN; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) parts_of_x(words[n], step * 2 + i, of_x[n], i);
      const auto word_of = [&](int i, int byte) { return asked.words[i].at[byte / 4]; };
#pragma unroll
      for (int i = 0; i < ACROSS; ++i) {
        uint32_t of_w[4];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int byte = step * 2 + j;
          code.look_up(word_of(i, byte), byte % 4, of_w + j * 2);
        }
#pragma unroll
        for (int n = 0; n < DOWN; ++n) {
#pragma unroll
          for (int part = OF_X - 1; part >= 0; --part)
            add_code<Stored>(own[i][n], of_w, of_x[n][part]);
          if constexpr (WIDE) take(own[i][n], asked.scales[i], sums[i][n]);
        }
      }
      if constexpr (WIDE)
#pragma unroll
        for (int i = 0; i < ACROSS; i += 2) {
          uint32_t of_w[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int byte = step * 2 + j / 2;
            of_w[j] = code.look_up_third(word_of(i + j % 2, byte), byte % 4);
          }
#pragma unroll
          for (int n = 0; n < DOWN; ++n) add_code<Stored>(thirds[i / 2][n], of_w, of_x[n][0]);
        }
    }
#pragma unroll
    for (int i = 0; i < ACROSS; ++i)
#pragma unroll
      for (int n = 0; n < DOWN; ++n) {
        if constexpr (!WIDE) take(own[i][n], asked.scales[i], sums[i][n]);
        if constexpr (WIDE)
#pragma unroll
          for (int j = 0; j < 2; ++j)
            sums[i][n][j] =
                fma_of(thirds[i / 2][n][i % 2 * 2 + j], asked.scales[i], sums[i][n][j]);
      }
  }

  // Adds what tensor cores found of both parts, and leaves nothing.
  static FUSEPORT_DEVICE void take(float (&own)[4], float scale, float (&sums)[2]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      sums[j] = fma_of(own[j], scale, fma_of(own[j + 2], scale, sums[j]));
      own[j] = own[j + 2] = 0;
    }
  }

  // Of the pair of numbers `at`.
  template <int WORDS>
  static FUSEPORT_DEVICE void parts_of_x(const uint32_t (&words)[WORDS], int at,
                                         uint32_t (&to)[OF_X][2], int i) {
    if constexpr (WIDE) {
      uint32_t parts[OF_X];
      fuseport::cuda::cut(bits_to_float(words[at * 2]), bits_to_float(words[at * 2 + 1]), parts);
#pragma unroll
      for (int part = 0; part < OF_X; ++part) to[part][i] = parts[part];
    } else {
      to[0][i] = words[at];
    }
  }
};

// Tiles of rows of the same columns follow each other: the weight is in L2 for the second. The last
// columns are as many as the others, some of them another block's, too.
template <class Tiling>
__global__ void __launch_bounds__(Tiling::THREADS, 1) few_kernel(Problem p, Product m) {
  using Stored = typename Tiling::Stored;
  using Parts = CodeParts<Stored>;
  constexpr int COLUMNS = Tiling::COLUMNS, ROWS = Tiling::ROWS, WARPS = Tiling::WARPS;
  FUSEPORT_SHARED(memory);
  float* const found = (float*)(memory + Parts::BYTES);
  const Parts code(memory);
  const uint32_t warp = threadIdx.x / WARP, columns = (uint32_t)m.columns, rows = (uint32_t)p.rows;
  const uint32_t down = (rows + ROWS - 1) / ROWS, across = (columns + COLUMNS - 1) / COLUMNS;
  for (uint32_t unit = blockIdx.x; unit < down * across * m.parts; unit += gridDim.x) {
    const uint32_t line = unit / down, row = unit % down * ROWS;
    const uint32_t part = line / across, own = line % across * COLUMNS;
    const uint32_t column = own + COLUMNS <= columns ? own : columns - COLUMNS;
    const auto groups = (uint32_t)(p.in / GROUP), span = (uint32_t)(m.span / GROUP);
    const uint32_t first = part * span, end = first + span;
    const uint32_t last = end < groups ? end : groups;
    FewSums<Tiling> sums(p, m.x, column, row);
    typename FewSums<Tiling>::Asked next;
    if (first + warp < last) next = sums.ask(first + warp);
    if (unit == blockIdx.x) Parts::make(memory, (uint32_t*)found);  // memory takes longer
    for (uint32_t group = first + warp; group < last; group += WARPS) {
      const auto asked = next;
      if (group + WARPS < last) next = sums.ask(group + WARPS);
      sums.add(code, asked, group);
    }
    __syncthreads();  // the unit before has been read
    sums.store(found + warp * Tiling::OF_WARP);
    __syncthreads();
    for (int i = (int)threadIdx.x; i < ROWS * COLUMNS; i += Tiling::THREADS) {
      const uint32_t r = row + i / COLUMNS, c = column + i % COLUMNS;
      if (r >= rows || c < own) continue;
      const float* const from = found + i / COLUMNS * Tiling::LINE + i % COLUMNS;
      float sum = from[0];
#pragma unroll
      for (int w = 1; w < WARPS; ++w) sum += from[w * Tiling::OF_WARP];
      const int64_t at = (int64_t)(part * rows + r) * columns + c;
      if (m.parts > 1) ((float*)m.sums)[at] = sum;
      else finish<1, Stored>(m, &sum, at, c, 1, false);
    }
  }
}

template <class Tiling>
int64_t few_units(const Problem& p) {
  return (p.rows + Tiling::ROWS - 1) / Tiling::ROWS *
         ((p.out + Tiling::COLUMNS - 1) / Tiling::COLUMNS);
}

constexpr int64_t MOST_IN = 1 << 24, MOST_OUT = 1 << 30;  // some indices are of 32 bits

// Whether the kernel is for such a problem, wherever x is: groups are of one block, and in a row.
inline bool few_fit(const Problem& p) {
  return p.dtype != Dtype::float64 && p.rows > 0 && p.rows <= MOST_FEW && p.out >= 16 &&
         p.out <= MOST_OUT && p.in > 0 && p.in <= MOST_IN && p.in % GROUP == 0 &&
         p.block_shift >= 6 && (uintptr_t)p.packed % 8 == 0;
}

// And for such an x, in 16 bytes at a time.
inline bool few_fit(const Problem& p, const nf4_linear::Rows& x) {
  return few_fit(p) && x.column_stride == 1 && (uintptr_t)x.data % 16 == 0 &&
         x.row_stride * (p.dtype == Dtype::float32 ? 4 : 2) % 16 == 0;
}

// Calls call(Tiling{}, m), with the parts set. Parts are of eight groups for a warp at the least:
// two launches take longer than what fewer would gain.
template <class Call>
const char* with_few_tiling(const Problem& p, Product m, const Call& call) {
  const auto with = [&](auto tiling) {
    using Tiling = decltype(tiling);
    constexpr int64_t LEAST = Tiling::WARPS * 8;
    const int64_t groups = p.in / GROUP, fitting = multiprocessors() / few_units<Tiling>(p);
    const int64_t most = fitting < groups / LEAST ? fitting : groups / LEAST;
    const int64_t span = most > 1 ? (groups + most - 1) / most : groups;
    m.span = span * GROUP;
    m.parts = (groups + span - 1) / span;
    return call(tiling, m);
  };
  const auto of = [&](auto stored) {
    using Stored = decltype(stored);
    using Wide = FewTiling<Stored, 4, 2>;
    // Wide tiles read x less often, if they are enough for the GPU's multiprocessors, or nearly.
    const bool wide = p.out >= Wide::COLUMNS && 4 * few_units<Wide>(p) >= 3 * multiprocessors();
    if (p.rows <= 8)
      return wide ? with(FewTiling<Stored, 4, 1>{}) : with(FewTiling<Stored, 2, 1>{});
    return wide ? with(Wide{}) : with(FewTiling<Stored, 2, 2>{});
  };
  if (p.dtype == Dtype::float16) return of(Half{});
  return p.dtype == Dtype::bfloat16 ? of(BFloat16{}) : of(float{});
}

inline int64_t few_scratch(const Problem& p) {
  int64_t bytes = 0;
  with_few_tiling(p, product_of(p, Forward{}), [&](auto, const Product& m) -> const char* {
    if (m.parts > 1) bytes = m.parts * p.rows * m.columns * (int64_t)sizeof(float);
    return nullptr;
  });
  return bytes;
}

inline const char* run_few(const Problem& p, const Forward& f, void* scratch, void* stream) {
  return with_few_tiling(p, product_of(p, f), [&](auto tiling, Product m) {
    using Tiling = decltype(tiling);
    m.sums = scratch;
    const int64_t units = few_units<Tiling>(p) * m.parts, most = multiprocessors();
    const char* const error = launch(few_kernel<Tiling>, units < most ? units : most,
                                     Tiling::THREADS, Tiling::SHARED, stream, p, m);
    if (error || m.parts == 1) return error;
    return run_add_parts<typename Tiling::Stored>(p, m, stream);
  });
}

}  // namespace fuseport::nf4_linear::cuda
