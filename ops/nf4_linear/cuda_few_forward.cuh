// x·Wᵀ + bias for few rows of x. Scales multiply sums over a group, so that what tensor cores cut
// off is of short sums (native/cuda_apart.cuh).
#pragma once

#include "nf4_linear/cuda_few.cuh"

namespace fuseport::nf4_linear::cuda {

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
template <class Tiling_>
struct FewSums {
  using Tiling = Tiling_;
  using Stored = typename Tiling::Stored;
  using Parts = CodeParts<Stored>;
  // Values in a row that share a scale: four lanes have a row of them.
  static constexpr int GROUP = 64, OF_LANE = GROUP / 4, STEPS = GROUP / TILE;
  static constexpr int ACROSS = Tiling::ACROSS, DOWN = Tiling::DOWN;
  static constexpr int BLOCKS = 1;  // of a multiprocessor
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

// As many warps as there are registers for.
template <class Stored, int ACROSS, int DOWN>
using ForwardSums =
    FewSums<FewTiling<Stored, CodeParts<Stored>, ACROSS, DOWN,
                      (std::is_same_v<Stored, float> && ACROSS > 2) ? 12 : 16>>;

// Whether the kernel is for such a problem, wherever x is: groups are of one block, and in a row.
inline bool few_fit(const Problem& p) {
  return p.dtype != Dtype::float64 && p.rows > 0 && p.rows <= MOST_FEW && p.out >= 16 &&
         p.out <= MOST_COLUMNS && p.in > 0 && p.in <= MOST_SIDE && p.in % 64 == 0 &&
         p.block_shift >= 6 && (uintptr_t)p.packed % 8 == 0;
}

// In 16 bytes at a time.
inline bool in_vectors(const Problem& p, const nf4_linear::Rows& x) {
  return x.column_stride == 1 && (uintptr_t)x.data % 16 == 0 &&
         x.row_stride * (p.dtype == Dtype::float32 ? 4 : 2) % 16 == 0;
}

// Calls call(Sums*, m) with what is summed by, and with the product in parts.
template <class Call>
auto with_sums(const Problem& p, const Forward& f, const Call& call) {
  constexpr int64_t LEAST = 8;
  const Product m = product_of(p, f);
  return with_few_dtype(p, [&](auto stored) {
    using Stored = decltype(stored);
    using Wide = ForwardSums<Stored, 4, 2>;
    // Wide tiles read x less often, if they are enough for the GPU's multiprocessors, or nearly.
    const bool wide = p.out >= Wide::Tiling::COLUMNS &&
                      4 * few_units<typename Wide::Tiling>(p, m) >= 3 * multiprocessors();
    if (p.rows <= 8)
      return wide ? with_cut<ForwardSums<Stored, 4, 1>>(p, m, LEAST, call)
                  : with_cut<ForwardSums<Stored, 2, 1>>(p, m, LEAST, call);
    return wide ? with_cut<Wide>(p, m, LEAST, call)
                : with_cut<ForwardSums<Stored, 2, 2>>(p, m, LEAST, call);
  });
}

}  // namespace fuseport::nf4_linear::cuda
