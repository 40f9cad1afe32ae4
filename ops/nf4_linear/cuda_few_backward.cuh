// dout·W for few rows of dout. A block's scale is of the inner dimension here: it multiplies dout,
// whose products are given to tensor cores in parts.
#pragma once

#include "nf4_linear/cuda_few_forward.cuh"

namespace fuseport::nf4_linear::cuda {

// What lane 4·g + c has: of a group of sixteen rows of the weight those from 4·c on, and of each
// eight columns, from 8·g on, one in each of eight tiles; of dout row g of each tile of eight
// rows. Bytes for the table are made of two rows of the weight.
template <class Tiling_>
struct BackSums {
  using Tiling = Tiling_;
  using Stored = typename Tiling::Stored;
  using Parts = typename Tiling::Parts;
  static constexpr int GROUP = 16, OF_LANE = 4, ACROSS = Tiling::ACROSS, DOWN = Tiling::DOWN;
  static_assert(ACROSS == 8);
  static constexpr int BLOCKS = 2;  // of a multiprocessor
  static constexpr bool WIDE = std::is_same_v<Stored, float>;
  static constexpr int OF_X = WIDE ? 3 : 2;

  const Problem& p;
  const uint8_t* packed;  // of the first row, from the lane's columns on
  int64_t scale;          // the first row's block of 64
  const Stored* x[DOWN];
  float sums[ACROSS][DOWN][WIDE ? 2 : 4] = {};  // of columns g, rows 2·c and 2·c + 1

  // Indices that are not decoded yet, and their scales.
  struct Asked {
    uint32_t words[OF_LANE];
    float scales[OF_LANE];
  };

  FUSEPORT_DEVICE BackSums(const Problem& p, const nf4_linear::Rows& rows, int64_t column,
                           uint32_t row)
      : p(p) {
    const int lane = (int)threadIdx.x % WARP, g = lane / 4, c = lane % 4;
    packed = p.packed + c * OF_LANE * (p.in / 2) + column / 2 + g * 4;
    scale = c * OF_LANE * (p.in / 64) + column / 64;
#pragma unroll
    for (int n = 0; n < DOWN; ++n) {
      const uint32_t wanted = row + n * 8 + g, last = (uint32_t)p.rows - 1;
      const int64_t r = wanted < last ? wanted : last;
      x[n] = (const Stored*)rows.data + r * rows.row_stride + c * OF_LANE;
    }
  }

  FUSEPORT_DEVICE Asked ask(uint32_t group) const {
    Asked asked;
    const auto half = (uint32_t)p.in / 2, blocks = (uint32_t)p.in / 64;
    const uint8_t* const from = packed + group * (uint64_t)(GROUP * half);
    const int64_t first = scale + group * (uint64_t)(GROUP * blocks);
#pragma unroll
    for (int i = 0; i < OF_LANE; ++i) {
      asked.words[i] = *(const uint32_t*)(from + i * half);
      asked.scales[i] = ((const float*)p.absmax)[(first + i * blocks) >> (p.block_shift - 6)];
    }
    return asked;
  }

  FUSEPORT_DEVICE void add(const Parts& code, const Asked& asked, uint32_t group) {
    uint32_t of_x[DOWN][OF_X][2];
#pragma unroll
    for (int n = 0; n < DOWN; ++n) {
      const auto numbers = *(const Pack<Stored, OF_LANE>*)(x[n] + group * GROUP);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t parts[OF_X];
        fuseport::cuda::cut(to_real(numbers.at[i * 2]) * asked.scales[i * 2],
                            to_real(numbers.at[i * 2 + 1]) * asked.scales[i * 2 + 1], parts);
#pragma unroll
        for (int part = 0; part < OF_X; ++part) of_x[n][part][i] = parts[part];
      }
    }
    // Of each two rows of the weight, columns that are even, and odd.
    constexpr uint32_t LOW = 0x0f0f0f0fu;
    uint32_t bytes[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t one = asked.words[i * 2], two = asked.words[i * 2 + 1];
      bytes[0][i] = (one & ~LOW) | (two >> 4 & LOW);
      bytes[1][i] = (one << 4 & ~LOW) | (two & LOW);
    }
#pragma unroll
    for (int j = 0; j < ACROSS; ++j) {
      uint32_t of_w[4];
      code.look_up(bytes[j % 2][0], j / 2, of_w);
      code.look_up(bytes[j % 2][1], j / 2, of_w + 2);
#pragma unroll
      for (int n = 0; n < DOWN; ++n) {
        if constexpr (WIDE) {
          float own[4] = {};
          add_parts(own, of_w, of_x[n]);
          sums[j][n][0] += own[0] + own[2];
          sums[j][n][1] += own[1] + own[3];
        } else {
          add_parts(sums[j][n], of_w, of_x[n]);
        }
      }
    }
    if constexpr (WIDE)
#pragma unroll
      for (int j = 0; j < ACROSS; j += 2) {
        const uint32_t of_w[4] = {
            code.look_up_third(bytes[0][0], j / 2), code.look_up_third(bytes[1][0], j / 2),
            code.look_up_third(bytes[0][1], j / 2), code.look_up_third(bytes[1][1], j / 2)};
#pragma unroll
        for (int n = 0; n < DOWN; ++n) {
          float own[4] = {};
          add_product(own, of_w, of_x[n][0][0], of_x[n][0][1]);
#pragma unroll
          for (int k = 0; k < 4; ++k) sums[j + k / 2][n][k % 2] += own[k];
        }
      }
  }

  // To (ROWS, LINE).
  FUSEPORT_DEVICE void store(float* to) const {
    const int lane = (int)threadIdx.x % WARP, g = lane / 4, c = lane % 4;
#pragma unroll
    for (int j = 0; j < ACROSS; ++j)
#pragma unroll
      for (int n = 0; n < DOWN; ++n)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float sum = sums[j][n][k];
          if constexpr (!WIDE) sum += sums[j][n][k + 2];
          to[(n * 8 + c * 2 + k) * Tiling::LINE + g * 8 + j] = sum;
        }
  }

 private:
  static FUSEPORT_DEVICE void add_parts(float (&sum)[4], const uint32_t (&a)[4],
                                        const uint32_t (&b)[OF_X][2]) {
#pragma unroll
    for (int part = OF_X - 1; part >= 0; --part) add_product(sum, a, b[part][0], b[part][1]);
  }
};

// Numbers of 16 bits times scales are cut into bfloat16, as those of float32 are.
template <class Stored>
using PartsOfBack = CodeParts<std::conditional_t<std::is_same_v<Stored, float>, float, BFloat16>>;

// Whether the kernel is for such a problem, wherever dout is.
inline bool few_fit_back(const Problem& p) {
  return few_fit(p) && p.out % 16 == 0;
}

// Calls call(Sums*, m) with what is summed by, and with the product in parts.
template <class Call>
auto with_sums(const Problem& p, const Backward& b, const Call& call) {
  constexpr int64_t LEAST = 4;
  constexpr int WARPS = 8;
  const Product m = product_of(p, b);
  return with_few_dtype(p, [&](auto stored) {
    using Stored = decltype(stored);
    using Parts = PartsOfBack<Stored>;
    return p.rows <= 8
               ? with_cut<BackSums<FewTiling<Stored, Parts, 8, 1, WARPS>>>(p, m, LEAST, call)
               : with_cut<BackSums<FewTiling<Stored, Parts, 8, 2, WARPS>>>(p, m, LEAST, call);
  });
}

// Of a forward or a backward pass.
template <class Pass>
int64_t few_scratch(const Problem& p, const Pass& pass) {
  return with_sums(p, pass, [&](auto*, const Product& m) { return scratch_of(p, m); });
}

template <class Pass>
const char* run_few(const Problem& p, const Pass& pass, void* scratch, void* stream) {
  return with_sums(p, pass, [&](auto* sums, Product m) {
    m.sums = scratch;
    return launch_few<std::remove_pointer_t<decltype(sums)>>(p, m, stream);
  });
}

}  // namespace fuseport::nf4_linear::cuda
