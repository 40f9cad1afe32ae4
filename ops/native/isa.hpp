// Which instruction sets kernels are compiled for, and which of them this machine has.
#pragma once

#include <cstdlib>
#include <cstring>

// One namespace per instruction set holds a kernel's functions; build.py has the same list.
#if defined(__x86_64__)
#define FUSEPORT_FOR_EACH_ISA(DO) DO(baseline) DO(avx2) DO(avx512)
#else
#define FUSEPORT_FOR_EACH_ISA(DO) DO(baseline)
#endif

// Inlined always: a copy that is compiled for one instruction set must not serve another. On a GPU, too.
#if defined(__CUDACC__)
#define FUSEPORT_INLINED __host__ __device__ __forceinline__
#else
#define FUSEPORT_INLINED inline __attribute__((always_inline))
#endif

namespace fuseport {

enum class Isa { baseline, avx2, avx512 };

// The best that the machine has, or a lesser one that the environment variable FUSEPORT_ISA names:
// so that tests can run all of them, and two machines can be made to give the same bits.
inline Isa chosen_isa() {
#if defined(__x86_64__)
  const char* limit = std::getenv("FUSEPORT_ISA");
  if (limit && std::strcmp(limit, "baseline") == 0) return Isa::baseline;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw");
  if (avx512 && !(limit && std::strcmp(limit, "avx2") == 0)) return Isa::avx512;
  if (avx2) return Isa::avx2;
#endif
  return Isa::baseline;
}

}  // namespace fuseport

#define FUSEPORT_DECLARE_TABLE(isa) \
  namespace isa {                   \
  extern const Kernels table;       \
  }
#define FUSEPORT_CHOOSE_TABLE(isa) \
  if (chosen == Isa::isa) return isa::table;

// In an op's namespace, where `Kernels` are the functions that kernel.cpp defines for one instruction
// set, as `table`: kernels(), which are those for the best instruction set of this machine.
#define FUSEPORT_CHOOSE_KERNELS()                  \
  FUSEPORT_FOR_EACH_ISA(FUSEPORT_DECLARE_TABLE)    \
  inline const Kernels& kernels() {                \
    static const Isa chosen = chosen_isa();        \
    FUSEPORT_FOR_EACH_ISA(FUSEPORT_CHOOSE_TABLE)   \
    return baseline::table;                        \
  }
