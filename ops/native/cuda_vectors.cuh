// What kernels that are bound by memory are written with: a dtype's types, numbers in a row moved 16
// bytes at a time, and sums over what blocks left, in their order; where tensor cores find them.
#pragma once

#include <cstring>

#include "native/cuda.cuh"

namespace fuseport::cuda {

// What numbers are computed in.
template <class Stored>
struct RealOf {
  using type = float;
};
template <>
struct RealOf<double> {
  using type = double;
};
template <class Stored>
using Real = typename RealOf<Stored>::type;

template <class Stored>
constexpr int VECTOR = 16 / (int)sizeof(Stored);  // numbers of 16 bytes

// Calls call(Stored{}) with the type that numbers of `dtype` are stored in; on the host.
template <class Call>
const char* with_dtype(Dtype dtype, const Call& call) {
  if (dtype == Dtype::float64) return call(double{});
  if (dtype == Dtype::float16) return call(Half{});
  if (dtype == Dtype::bfloat16) return call(BFloat16{});
  return call(float{});
}

// Number i of those at `from`, which are Reals or Stored.
template <class Stored>
FUSEPORT_DEVICE Real<Stored> real_or_stored(const void* from, bool real, int64_t i) {
  return real ? ((const Real<Stored>*)from)[i] : to_real(((const Stored*)from)[i]);
}

// n / by, in 32 bits where they suffice: a division in 64 takes a hundred instructions.
FUSEPORT_DEVICE int64_t quotient_of(int64_t n, int64_t by) {
  return ((n | by) >> 32) == 0 ? (int64_t)((uint32_t)n / (uint32_t)by) : n / by;
}

template <int COUNT, class Stored>
FUSEPORT_DEVICE void to_reals(const Pack<Stored, COUNT>& pack, Real<Stored>* to) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) to[i] = to_real(pack.at[i]);
}

// Numbers that are `stride` apart, of which the first `count` are there; the others are zero. `whole`
// says that all are, next to each other and aligned.
template <int COUNT, class Stored>
FUSEPORT_DEVICE Pack<Stored, COUNT> load_pack(const Stored* from, int64_t stride, int count,
                                              bool whole) {
  if (whole) return *(const Pack<Stored, COUNT>*)from;
  Pack<Stored, COUNT> pack;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) pack.at[i] = i < count ? from[i * stride] : Stored{};
  return pack;
}

template <int COUNT, class Stored>
FUSEPORT_DEVICE void store_pack(const Real<Stored>* from, Stored* to, int64_t stride, int count,
                                bool whole) {
  Pack<Stored, COUNT> pack;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    from_real(from[i], &pack.at[i]);
    if (!whole && i < count) to[i * stride] = pack.at[i];
  }
  if (whole) *(Pack<Stored, COUNT>*)to = pack;
}

// COUNT numbers, loaded 16 bytes at once if they have these; they are aligned, and the kernel does not
// write them. Of a Pack's own copy the compiler may make a load for each number.
template <int COUNT, class Stored>
FUSEPORT_DEVICE Pack<Stored, COUNT> pack_at(const Stored* from) {
  Pack<Stored, COUNT> pack;
  if constexpr (sizeof pack % 16 == 0) {
    uint32_t words[sizeof pack / 16][4];
#pragma unroll
    for (int i = 0; i < (int)(sizeof pack / 16); ++i) load_words((const char*)from + i * 16, words[i]);
    memcpy(&pack, words, sizeof words);
  } else {
    pack = *(const Pack<Stored, COUNT>*)from;
  }
  return pack;
}

template <int COUNT, class Stored>
FUSEPORT_DEVICE void load_at_once(const Stored* from, Real<Stored>* to) {
  to_reals(pack_at<COUNT>(from), to);
}

template <class Stored>
FUSEPORT_DEVICE void load_vector(const Stored* from, Real<Stored>* to) {
  load_at_once<VECTOR<Stored>>(from, to);
}

// Stores COUNT numbers at once to device memory, which are aligned. Of a Pack's assignment the
// compiler may make several stores.
template <int COUNT, class Stored>
FUSEPORT_DEVICE void put_pack(const Pack<Stored, COUNT>& pack, Stored* to) {
  constexpr int BYTES = sizeof pack < 16 ? sizeof pack : 16;  // at once
  if constexpr (BYTES % 4 == 0) {
    uint32_t words[sizeof pack / BYTES][BYTES / 4];
    memcpy(words, &pack, sizeof words);
#pragma unroll
    for (int i = 0; i < (int)sizeof pack / BYTES; ++i) store_words(words[i], (char*)to + i * BYTES);
  } else {
    *(Pack<Stored, COUNT>*)to = pack;
  }
}

template <int COUNT, class Stored>
FUSEPORT_DEVICE void store_at_once(const Real<Stored>* from, Stored* to) {
  Pack<Stored, COUNT> pack;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) from_real(from[i], &pack.at[i]);
  put_pack(pack, to);
}

// The same of 16 bytes.
template <class Stored>
FUSEPORT_DEVICE void store_vector(const Real<Stored>* from, Stored* to) {
  store_at_once<VECTOR<Stored>>(from, to);
}

// The same where `whole` says so; else the first `count` numbers one by one. Of store_pack the
// compiler makes the latter for both.
template <int COUNT, class Stored>
FUSEPORT_DEVICE void store_line(const Real<Stored>* from, Stored* to, int count, bool whole) {
  if (whole) store_at_once<COUNT>(from, to);
  else store_pack<COUNT>(from, to, 1, count, false);
}

// Whether packs of COUNT numbers can be moved at once from `data` on, at multiples of each stride.
template <int COUNT, class Stored, class... Strides>
bool aligned(const void* data, Strides... strides) {
  return (uintptr_t)data % (sizeof(Stored) * COUNT) == 0 && ((strides % COUNT == 0) && ...);
}

// The address of this lane's row of four matrices of 8 × 8 that make up one of 16 × 16 in shared
// memory. Registers 0 and 1 get its upper and lower left of a first operand; or, if ACROSS, the left
// and right of its upper half: a second operand's, or a first's if it is transposed.
template <bool ACROSS, class Stored>
FUSEPORT_DEVICE const Stored* row_of(const Stored* tile, int row) {
  const int lane = (int)threadIdx.x % 32, half = lane / 16 * 8, other = lane / 8 % 2 * 8;
  return tile + (lane % 8 + (ACROSS ? half : other)) * row + (ACROSS ? other : half);
}

// 1 / (1 + exp(-x)) as exactly as a number that is stored so can say.
template <class Stored>
FUSEPORT_DEVICE Real<Stored> logistic_of(Real<Stored> x) {
  if constexpr (sizeof(Stored) == 2) {
    return quotient(1.0f, 1.0f + exp2_of(x * -0x1.715476p0f));
  } else {
    return logistic(x);
  }
}

// Sums over parts: a block has 32 of `count` columns, and in 16 rows the parts in turn.
constexpr int PART_COLUMNS = 32, PART_ROWS = 16, PART_THREADS = PART_COLUMNS * PART_ROWS;
constexpr int PART_SHARED = PART_THREADS * (int)sizeof(double);

inline int64_t part_blocks(int64_t count) { return (count + PART_COLUMNS - 1) / PART_COLUMNS; }

// Calls put(i, sum) for each of `count` columns i, with the sum of get(part, i) over the parts,
// made in an order that their number decides. All threads of PART_THREADS call it, with PART_SHARED
// bytes of memory.
template <class Get, class Put>
FUSEPORT_DEVICE void sum_columns(int64_t parts, int64_t count, double* shared, const Get& get,
                                 const Put& put) {
  constexpr int AT_ONCE = 8;  // parts that are asked for before the first is added
  using Part = decltype(get(parts, count));
  const int column = (int)threadIdx.x % PART_COLUMNS, row = (int)threadIdx.x / PART_COLUMNS;
  for (int64_t first = blockIdx.x * (int64_t)PART_COLUMNS; first < count;
       first += gridDim.x * (int64_t)PART_COLUMNS) {
    const int64_t i = first + column;
    double sum = 0;
    if (i < count)
      for (int64_t part = row; part < parts; part += PART_ROWS * AT_ONCE) {
        Part some[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
          const int64_t at = part + j * PART_ROWS;
          some[j] = at < parts ? get(at, i) : Part(0);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) sum += (double)some[j];
      }
    __syncthreads();
    shared[threadIdx.x] = sum;
    __syncthreads();
    if (row > 0 || i >= count) continue;
    for (int j = 1; j < PART_ROWS; ++j) sum += shared[j * PART_COLUMNS + column];
    put(i, sum);
  }
}

// The same of parts that are (parts, count).
template <class Part, class Put>
FUSEPORT_DEVICE void sum_parts(const Part* from, int64_t parts, int64_t count, double* shared,
                               const Put& put) {
  sum_columns(
      parts, count, shared, [&](int64_t part, int64_t i) { return from[part * count + i]; }, put);
}

}  // namespace fuseport::cuda
