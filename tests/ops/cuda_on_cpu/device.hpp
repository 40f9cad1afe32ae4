// A CPU in the place of a GPU, for tests: the names of ops/native/cuda_device.cuh and what kernels use
// of CUDA's language. device.cpp runs blocks one after the other, and a block's threads as fibers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define FUSEPORT_SHARED(name) char* const name = ::fuseport::cuda::on_cpu::shared_memory()

struct Index {
  unsigned x = 0;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;

namespace fuseport::cuda {

namespace on_cpu {

char* shared_memory();
void barrier();
uint64_t exchange(uint64_t mine, int mask);
// What all lanes of the warp give, `size` bytes each, in their order; until they meet again.
const void* gather(const void* mine, int size);
void copy_later(void* to, const void* from, bool there);
void wait_for_copies();
void expect_aligned(const void* at, int64_t bytes);  // or it is an error, as on a GPU
const char* run(int64_t blocks, int threads, int64_t shared, const std::function<void()>& body);
int multiprocessors();
int64_t most_shared();
int64_t sort_scratch(int64_t count);
const char* sort(int32_t* (&keys)[2], int32_t* (&values)[2], int64_t count, int bits,
                 void* scratch, int64_t bytes);

}  // namespace on_cpu

template <class... Parameters, class... Arguments>
const char* launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int64_t shared,
                   void*, const Arguments&... arguments) {
  return on_cpu::run(blocks, threads, shared, [&] { kernel(arguments...); });
}

inline const char* set_to_zero(void* data, int64_t bytes, void*) {
  std::memset(data, 0, (size_t)bytes);
  return nullptr;
}

inline const char* copied(const void* from, void* to, int64_t bytes, void*) {
  std::memcpy(to, from, (size_t)bytes);
  return nullptr;
}

inline int multiprocessors() { return on_cpu::multiprocessors(); }
inline int64_t most_shared() { return on_cpu::most_shared(); }

// Those of ops/native/cuda_sort.cuh.
inline const char* sort_scratch(int64_t count, int, int64_t* bytes) {
  *bytes = on_cpu::sort_scratch(count);
  return nullptr;
}

inline const char* sort_pairs(int32_t* (&keys)[2], int32_t* (&values)[2], int64_t count, int bits,
                              void* scratch, int64_t bytes, void*) {
  return on_cpu::sort(keys, values, count, bits, scratch, bytes);
}

template <int COUNT>
void store_words(const uint32_t (&words)[COUNT], void* to) {
  static_assert(COUNT == 1 || COUNT == 2 || COUNT == 4);
  on_cpu::expect_aligned(to, sizeof words);
  std::memcpy(to, words, sizeof words);
}

inline void load_words(const void* from, uint32_t (&words)[4]) {
  on_cpu::expect_aligned(from, sizeof words);
  std::memcpy(words, from, sizeof words);
}

inline void sync_warp() { on_cpu::exchange(0, 1); }

inline float bits_to_float(uint32_t x) {
  float y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

inline uint32_t float_to_bits(float x) {
  uint32_t y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

inline float half_to_float(uint16_t x) {
  _Float16 y;
  std::memcpy(&y, &x, sizeof y);
  return (float)y;
}

inline uint16_t float_to_half(float x) {
  const _Float16 y = (_Float16)x;
  uint16_t bits;
  std::memcpy(&bits, &y, sizeof bits);
  return bits;
}

inline uint16_t float_to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) return 0x7fff;
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline uint32_t floats_to_bfloat16(float x, float y) {
  return float_to_bfloat16(x) | (uint32_t)float_to_bfloat16(y) << 16;
}

inline float exp2_of(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0 : y;
}
inline double exp2_of(double x) { return std::exp2(x); }
inline double exp_of(double x) { return std::exp(x); }
inline double log1p_of(double x) { return std::log1p(x); }
inline float expm1_of(float x) { return std::expm1(x); }
inline double expm1_of(double x) { return std::expm1(x); }
inline float fma_of(float x, float y, float z) { return std::fma(x, y, z); }
inline double fma_of(double x, double y, double z) { return std::fma(x, y, z); }
inline float rounded_product(float x, float y) {
  volatile const float product = x * y;
  return product;
}
inline double rounded_product(double x, double y) {
  volatile const double product = x * y;
  return product;
}
inline float nearest(float x) { return std::rint(x); }
inline double nearest(double x) { return std::rint(x); }
inline float quotient(float x, float y) { return x / y; }
inline double quotient(double x, double y) { return x / y; }

template <class Real>
void sine_and_cosine_of_pi(Real x, Real* sine, Real* cosine) {
  constexpr long double PI = 3.14159265358979323846264338327950288L;
  const long double angle = PI * (long double)(x - 2 * std::rint(x / 2));
  *sine = (Real)std::sin(angle);
  *cosine = (Real)std::cos(angle);
}

inline float of_bfloat16(uint16_t x) { return bits_to_float((uint32_t)x << 16); }

// The sum as tensor cores of compute capability 9.0 make it: of each number what is there beside the
// largest, to two bits more than a float has; and of their sum a float, not rounded but cut off, too.
template <size_t COUNT>
float cut_off_sum(const double (&numbers)[COUNT]) {
  constexpr int BITS = 23 + 2;
  double largest = 0, plain = 0;
  for (const double number : numbers) {
    largest = std::max(largest, std::abs(number));
    plain += number;
  }
  if (largest == 0 || !std::isfinite(plain)) return (float)plain;
  const int exponent = std::ilogb(largest);
  const double before = std::ldexp(1.0, BITS - exponent), after = std::ldexp(1.0, exponent - BITS);
  int64_t sum = 0;
  for (const double number : numbers) sum += (int64_t)(number * before);
  const double exact = (double)sum * after;
  const auto rounded = (float)exact;
  const bool up = std::abs((double)rounded) > std::abs(exact) && std::isfinite(rounded);
  return up ? std::nextafter(rounded, 0.0f) : rounded;
}

// `number` makes a float of sixteen bits.
inline void add_product_of(float (*number)(uint16_t), float (&sum)[4], const uint32_t (&a)[4],
                           uint32_t b, uint32_t b_next) {
  struct Mine {
    uint16_t a[4][2], b[2][2];
  } mine;
  const uint32_t both[2] = {b, b_next};
  std::memcpy(mine.a, a, sizeof mine.a);
  std::memcpy(mine.b, both, sizeof mine.b);
  const Mine* const all = (const Mine*)on_cpu::gather(&mine, sizeof mine);
  const int lane = (int)(threadIdx.x % 32);
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    double terms[17];
    terms[16] = sum[i];
    for (int k = 0; k < 16; ++k) {
      const int holder = k % 8 / 2, upper = k / 8;
      terms[k] = (double)number(all[row % 8 * 4 + holder].a[row / 8 + 2 * upper][k % 2]) *
                 (double)number(all[column * 4 + holder].b[upper][k % 2]);
    }
    sum[i] = cut_off_sum(terms);
  }
}

inline void add_product(float (&sum)[4], const uint32_t (&a)[4], uint32_t b, uint32_t b_next) {
  add_product_of(of_bfloat16, sum, a, b, b_next);
}
inline void add_half_product(float (&sum)[4], const uint32_t (&a)[4], uint32_t b,
                             uint32_t b_next) {
  add_product_of(half_to_float, sum, a, b, b_next);
}

template <bool TRANSPOSED>
void load_matrices(uint32_t (&to)[4], const void* row) {
  using Row = uint16_t[8];
  const Row* const rows = (const Row*)on_cpu::gather(row, sizeof(Row));
  const int g = (int)(threadIdx.x % 32) / 4, c = (int)threadIdx.x % 4;
  for (int i = 0; i < 4; ++i) {
    const Row* const matrix = rows + 8 * i;
    const uint32_t low = TRANSPOSED ? matrix[2 * c][g] : matrix[g][2 * c];
    const uint32_t high = TRANSPOSED ? matrix[2 * c + 1][g] : matrix[g][2 * c + 1];
    to[i] = low | high << 16;
  }
}

inline void copy_later(void* to, const void* from, bool there) {
  on_cpu::copy_later(to, from, there);
}
inline void wait_for_copies() { on_cpu::wait_for_copies(); }

}  // namespace fuseport::cuda

inline void __syncthreads() { fuseport::cuda::on_cpu::barrier(); }

// Of all lanes of a warp.
template <class Number>
Number __shfl_sync(unsigned, Number x, int lane) {
  return ((const Number*)fuseport::cuda::on_cpu::gather(&x, sizeof x))[lane];
}

inline int __all_sync(unsigned, int x) {
  const int* const all = (const int*)fuseport::cuda::on_cpu::gather(&x, sizeof x);
  return std::all_of(all, all + 32, [](int y) { return y != 0; });
}

template <class Number>
Number __shfl_xor_sync(unsigned, Number x, int mask) {
  static_assert(sizeof(Number) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &x, sizeof x);
  bits = fuseport::cuda::on_cpu::exchange(bits, mask);
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
