// Work shared among torch's own threads.
//
// `at::parallel_for` is a template over `#pragma omp`: compiled here, it would bring a second OpenMP
// runtime, with threads of its own, beside the one in torch's wheel (whose soname is mangled), or
// with clang need symbols that GCC's runtime lacks. GOMP_parallel is the call that the pragma
// becomes; GCC's and LLVM's runtimes both have it, and the dynamic linker finds it in the one that
// libtorch_cpu has loaded. A torch without either runs the work on the calling thread.
#pragma once

#include <ATen/Parallel.h>

#include <cstdint>

#include "native/schedule.hpp"

extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) __attribute__((weak));

namespace fuseport {

// How many threads are worth waking for so many units, of so many steps of arithmetic together.
inline int64_t threads_for(int64_t units, int64_t steps) {
  if (!GOMP_parallel || at::in_parallel_region()) return 1;
  return threads_for(at::get_num_threads(), units, steps);
}

// Calls work(unit, slot) for each unit in [0, units); see Queue. slot is below `threads`.
template <class Work>
void parallel(int64_t units, int64_t threads, const Work& work) {
  Queue<Work> queue{work, units};
  if (threads == 1) {
    Queue<Work>::run(&queue);
  } else {
    GOMP_parallel(&Queue<Work>::run, &queue, static_cast<unsigned>(threads), 0);
  }
}

}  // namespace fuseport
