// Chunks of numbers in shared memory, of bfloat16 or float16, and what tensor cores are given of them:
// parts that are bfloat16, of which a float16 is two, so that both are exact.
#pragma once

#include <type_traits>

#include "ssd_chunk_scan/cuda_steps.cuh"

namespace fuseport::ssd_chunk_scan::cuda {

constexpr int TILE = 16, TILES = T / TILE, COLUMNS = 64;  // columns of x
constexpr int PAD = 8;  // numbers between rows: eight rows of 16 bytes in a column are in all banks

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
    if (!(x - x == 0)) x = 0;
    if (!(y - y == 0)) y = 0;
  }
}

template <class Stored>
constexpr int PARTS = std::is_same_v<Stored, Half> ? 2 : 1;

// load_matrices, of numbers that become parts.
template <bool TRANSPOSED, class Stored>
FUSEPORT_DEVICE void load_parts(uint32_t (&to)[PARTS<Stored>][4], const Stored* row) {
  load_matrices<TRANSPOSED>(to[0], row);
  if constexpr (PARTS<Stored> > 1) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t parts[PARTS<Stored>];
      cut(lower<Stored>(to[0][i]), upper<Stored>(to[0][i]), parts);
#pragma unroll
      for (int part = 0; part < PARTS<Stored>; ++part) to[part][i] = parts[part];
    }
  }
}

// sum += a·b, of 16 × 16 and 16 × 16 in parts; the products of the smallest come first.
template <int OF_A, int OF_B>
FUSEPORT_DEVICE void add_products(float (&sum)[2][4], const uint32_t (&a)[OF_A][4],
                                  const uint32_t (&b)[OF_B][4]) {
#pragma unroll
  for (int i = OF_A - 1; i >= 0; --i)
#pragma unroll
    for (int j = OF_B - 1; j >= 0; --j) {
      add_product(sum[0], a[i], b[j][0], b[j][1]);
      add_product(sum[1], a[i], b[j][2], b[j][3]);
    }
}

// Brings the steps of a chunk into a tile of WIDTH columns, of which `columns` are there; zeros
// beyond. They are there after wait_for_copies and a barrier.
template <int WIDTH, class Stored>
FUSEPORT_DEVICE void bring(const Strided& s, int64_t batch, int64_t step, int64_t head,
                           int64_t first, int64_t steps, int64_t columns, Stored* to) {
  constexpr int COUNT = VECTOR<Stored>, PACKS = WIDTH / COUNT;
  const Stored* const from = (const Stored*)s.data + batch * s.batch + step * s.step +
                             head * s.head + first * s.column;
  const bool whole = s.column == 1 && s.step % COUNT == 0 && columns % COUNT == 0 &&
                     (uintptr_t)from % (sizeof(Stored) * COUNT) == 0;
  for (int i = (int)threadIdx.x; i < T * PACKS; i += (int)blockDim.x) {
    const int t = i / PACKS, n = i % PACKS * COUNT;
    Stored* const at = to + t * (WIDTH + PAD) + n;
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

// What all threads of a block read of a chunk's steps, for one head.
struct Factors {
  float step[T], total[T], rest[T], outer[T], w[T];
  int32_t begin[T];

  FUSEPORT_DEVICE Decays<float> decays() const { return {step, total, rest, begin}; }

  // By thread t < T, when all know what `take` has put there.
  FUSEPORT_DEVICE void find(int t) {
    const Decays<float> d = decays();
    outer[t] = d.outer(t);
    w[t] = d.remaining(t) * d.delta(t);
  }
};

// One step's of a thread, on their way from device memory.
struct Asked {
  float step = 0, total = 0, rest = 0;
  int32_t begin = 0;

  FUSEPORT_DEVICE void ask(const Problem& p, const Steps& s, int64_t chunk, int64_t h) {
    if (threadIdx.x >= T) return;
    const Decays<float> d(p, s, chunk, h);
    const int64_t at = threadIdx.x * p.heads;
    step = d.step[at];
    total = d.total[at];
    rest = d.rest[at];
    begin = d.begin[threadIdx.x];
  }
  FUSEPORT_DEVICE void put(Factors& f) const {
    if (threadIdx.x >= T) return;
    f.step[threadIdx.x] = step;
    f.total[threadIdx.x] = total;
    f.rest[threadIdx.x] = rest;
    f.begin[threadIdx.x] = begin;
  }
};

}  // namespace fuseport::ssd_chunk_scan::cuda
