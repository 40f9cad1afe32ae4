// How many exponentials a second one thread computes, over a buffer that stays in its first-level
// cache: the floor under the time of a scan. Compiled once per instruction set, as the kernels are.
#include <chrono>

#include "native/vector.hpp"

namespace fuseport::FUSEPORT_ISA {

// FOLDED: 2^(x·c), as the scan has it, where log2(e) is folded into A; else exp(x).
template <bool FOLDED>
double rate(long repeats) {
  constexpr int COUNT = 2048, LANES = F32::LANES, AT_ONCE = 4;
  alignas(64) float x[COUNT], y[COUNT];
  for (int i = 0; i < COUNT; ++i) x[i] = -0.01f * (float)(i % 1000);
  const F32::Vector c = splat<F32>(1.25f);
  const auto begin = std::chrono::steady_clock::now();
  for (long r = 0; r < repeats; ++r) {
    for (int i = 0; i < COUNT; i += AT_ONCE * LANES) {
      F32::Vector v[AT_ONCE];
#pragma GCC unroll 4
      for (int j = 0; j < AT_ONCE; ++j) {
        const F32::Vector at = load<F32>(x + i + j * LANES);
        v[j] = FOLDED ? exp2_of_product<F32>(at, c) : exp<F32>(at);
      }
#pragma GCC unroll 4
      for (int j = 0; j < AT_ONCE; ++j) store<F32>(y + i + j * LANES, v[j]);
    }
    asm volatile("" ::"r"(x), "r"(y) : "memory");  // all of y is wanted, each time anew
  }
  const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
  return (double)COUNT * (double)repeats / passed.count();
}

}  // namespace fuseport::FUSEPORT_ISA

extern "C" __attribute__((visibility("default"))) double exponentials_per_second(int folded, long repeats) {
  using namespace fuseport::FUSEPORT_ISA;
  return folded ? rate<true>(repeats) : rate<false>(repeats);
}
