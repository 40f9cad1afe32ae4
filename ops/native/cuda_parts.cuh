// What tensor cores are given of numbers in shared memory: parts that are bfloat16, of which a float16
// is two and a float32 three, so that all are exact.
#pragma once

#include <type_traits>

#include "native/cuda_vectors.cuh"
#include "native/strided.hpp"

namespace fuseport::cuda {

constexpr int TILE = 16;

// Numbers between rows: eight rows of 16 bytes in a column are in all banks.
template <class Stored>
constexpr int PAD = VECTOR<Stored>;

// Of two numbers in 32 bits.
template <class Stored>
FUSEPORT_DEVICE float lower(uint32_t both) {
  return std::is_same_v<Stored, Half> ? half_to_float((uint16_t)both) : bits_to_float(both << 16);
}
template <class Stored>
FUSEPORT_DEVICE float upper(uint32_t both) {
  return std::is_same_v<Stored, Half> ? half_to_float((uint16_t)(both >> 16))
                                      : bits_to_float(both & 0xffff0000u);
}

// Two numbers, each as a sum of COUNT bfloat16, the largest first. What has no finite rest has none.
template <int COUNT>
FUSEPORT_DEVICE void cut(float x, float y, uint32_t (&parts)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    parts[i] = floats_to_bfloat16(x, y);
    x -= lower<BFloat16>(parts[i]);
    y -= upper<BFloat16>(parts[i]);
    if (i > 0) continue;  // the rest of a rest is finite
    if (!(fabsf(x) <= 0x1.fffffep127f)) x = 0;
    if (!(fabsf(y) <= 0x1.fffffep127f)) y = 0;
  }
}

template <class Stored>
constexpr int PARTS = std::is_same_v<Stored, float> ? 3 : std::is_same_v<Stored, Half> ? 2 : 1;

// Four matrices of 8 × 8 in a tile: two beside two, counted down or across, or all beside each other.
enum class Four { down, across, in_a_row };

// Where the i-th begins.
template <Four FOUR>
FUSEPORT_DEVICE int place_of(int i, int row) {
  const int low = i % 2 * 8, high = i / 2 * 8;
  return FOUR == Four::down ? low * row + high : FOUR == Four::across ? high * row + low : i * 8;
}

// load_matrices, of matrices in these places.
template <bool TRANSPOSED, Four FOUR, class Stored>
FUSEPORT_DEVICE void load_tiles(uint32_t (&to)[4], const Stored* tile, int row) {
  static_assert(sizeof(Stored) == 2);
  const int lane = (int)threadIdx.x % 32;
  load_matrices<TRANSPOSED>(to, tile + place_of<FOUR>(lane / 8, row) + lane % 8 * row);
}

// The same numbers as reals, of each matrix two.
template <bool TRANSPOSED, Four FOUR, class Stored>
FUSEPORT_DEVICE void load_pairs(float (&to)[4][2], const Stored* tile, int row) {
  if constexpr (std::is_same_v<Stored, float>) {
    const int lane = (int)threadIdx.x % 32, g = lane / 4, c = lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const at =
          tile + place_of<FOUR>(i, row) + (TRANSPOSED ? c * row + g : g * row + c);
      if constexpr (TRANSPOSED) {
        to[i][0] = at[0];
        to[i][1] = at[row];
      } else {
        const auto both = *(const Pack<float, 2>*)at;
        to[i][0] = both.at[0];
        to[i][1] = both.at[1];
      }
    }
  } else {
    uint32_t both[4];
    load_tiles<TRANSPOSED, FOUR>(both, tile, row);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[i][0] = lower<Stored>(both[i]);
      to[i][1] = upper<Stored>(both[i]);
    }
  }
}

// The same, as parts.
template <bool TRANSPOSED, Four FOUR, class Stored>
FUSEPORT_DEVICE void load_parts(uint32_t (&to)[PARTS<Stored>][4], const Stored* tile, int row) {
  if constexpr (PARTS<Stored> == 1) {
    load_tiles<TRANSPOSED, FOUR>(to[0], tile, row);
  } else {
    float pairs[4][2];
    load_pairs<TRANSPOSED, FOUR>(pairs, tile, row);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t parts[PARTS<Stored>];
      cut(pairs[i][0], pairs[i][1], parts);
#pragma unroll
      for (int part = 0; part < PARTS<Stored>; ++part) to[part][i] = parts[part];
    }
  }
}

// Products of parts that are less than a rounding of float32 are left out.
constexpr int MOST_PARTS = 3;

// sum += a·b, of 16 × 16 and 16 × 8, of which two of b's four matrices are made up, from `first` on.
template <int MOST = MOST_PARTS, int OF_A, int OF_B>
FUSEPORT_DEVICE void add_half(float (&sum)[4], const uint32_t (&a)[OF_A][4],
                              const uint32_t (&b)[OF_B][4], int first) {
#pragma unroll
  for (int i = OF_A - 1; i >= 0; --i)
#pragma unroll
    for (int j = OF_B - 1; j >= 0; --j)
      if (i + j < MOST) add_product(sum, a[i], b[j][first], b[j][first + 1]);
}

// sum += a·b, of 16 × 16 and 16 × 16 in parts; the products of the smallest come first.
template <int MOST = MOST_PARTS, int OF_A, int OF_B>
FUSEPORT_DEVICE void add_products(float (&sum)[2][4], const uint32_t (&a)[OF_A][4],
                                  const uint32_t (&b)[OF_B][4]) {
  add_half<MOST>(sum[0], a, b, 0);
  add_half<MOST>(sum[1], a, b, 2);
}

// Brings STEPS steps into a tile of WIDTH columns, of which `steps` and `columns` are there; zeros
// beyond. They can be read after wait_for_copies and a barrier.
template <int STEPS, int WIDTH, class Stored>
FUSEPORT_DEVICE void bring_steps(const Strided& s, int64_t batch, int64_t step, int64_t head,
                                 int64_t first, int64_t steps, int64_t columns, Stored* to) {
  constexpr int COUNT = VECTOR<Stored>, PACKS = WIDTH / COUNT;
  const Stored* const from = (const Stored*)s.data + batch * s.batch + step * s.step +
                             head * s.head + first * s.column;
  const bool whole = s.column == 1 && s.step % COUNT == 0 && columns % COUNT == 0 &&
                     (uintptr_t)from % (sizeof(Stored) * COUNT) == 0;
  for (int i = (int)threadIdx.x; i < STEPS * PACKS; i += (int)blockDim.x) {
    const int t = i / PACKS, n = i % PACKS * COUNT;
    Stored* const at = to + t * (WIDTH + PAD<Stored>) + n;
    const bool there = t < steps && n < columns;
    const Stored* const source = from + t * s.step + n * s.column;
    if (whole) {
      copy_later(at, there ? source : from, there);
    } else {
      const int64_t count = there ? columns - n : 0;
      *(Pack<Stored, COUNT>*)at =
          load_pack<COUNT>(source, s.column, (int)(count < COUNT ? count : COUNT), false);
    }
  }
}

}  // namespace fuseport::cuda
