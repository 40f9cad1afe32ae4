// Work shared among torch's own threads.
//
// `at::parallel_for` is a template over `#pragma omp`: compiled here, it would bring a second OpenMP
// runtime, with threads of its own, beside the one in torch's wheel (whose soname is mangled), or
// with clang need symbols that GCC's runtime lacks. GOMP_parallel is the call that the pragma
// becomes; GCC's and LLVM's runtimes both have it, and the dynamic linker finds it in the one that
// libtorch_cpu has loaded. A torch without either runs the work on the calling thread.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) __attribute__((weak));

namespace fuseport {

// How many threads are worth waking for so many units, of so many steps of arithmetic together:
// waking one costs microseconds, and milliseconds where other programs keep the cores busy.
inline int64_t threads_for(int64_t units, int64_t steps) {
  constexpr int64_t WORTH_A_THREAD = 1 << 16;
  if (!GOMP_parallel || at::in_parallel_region()) return 1;
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), steps / WORTH_A_THREAD);
  return std::max<int64_t>(1, std::min(threads, units));
}

// Calls work(unit, slot) for each unit in [0, units); slot, below `threads`, is the caller's own.
// Which thread takes a unit is open, so a unit's result must depend on nothing else. No exceptions.
template <class Work>
void parallel(int64_t units, int64_t threads, const Work& work) {
  struct Shared {
    const Work& work;
    int64_t units;
    std::atomic<int64_t> next_unit{0}, next_slot{0};

    static void run(void* self) {
      Shared& shared = *static_cast<Shared*>(self);
      const int64_t slot = shared.next_slot++;
      for (int64_t unit; (unit = shared.next_unit++) < shared.units;) shared.work(unit, slot);
    }
  } shared{work, units};
  if (threads == 1) {
    Shared::run(&shared);
  } else {
    GOMP_parallel(&Shared::run, &shared, static_cast<unsigned>(threads), 0);
  }
}

}  // namespace fuseport
