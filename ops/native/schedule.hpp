// Work handed out unit by unit, to the threads of whatever pool a host program has. It includes no
// host's header: parallel.hpp has torch's threads, ort.hpp those of ONNX Runtime.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace fuseport {

// How many of the available threads are worth waking for so many units, of so many steps of
// arithmetic together: waking one costs microseconds, and milliseconds where other programs keep
// the cores busy.
inline int64_t threads_for(int64_t available, int64_t units, int64_t steps) {
  constexpr int64_t WORTH_A_THREAD = 1 << 16;
  return std::max<int64_t>(1, std::min({available, units, steps / WORTH_A_THREAD}));
}

// Calls work(unit, slot) for each unit in [0, units). Each thread of a pool calls `run` once, with
// the queue's address; slot, below the number of such calls, is the caller's own. Which thread
// takes a unit is open, so a unit's result must depend on nothing else. `work` throws nothing.
template <class Work>
struct Queue {
  const Work& work;
  int64_t units;
  std::atomic<int64_t> next_unit{0}, next_slot{0};

  static void run(void* self) {
    Queue& queue = *static_cast<Queue*>(self);
    const int64_t slot = queue.next_slot++;
    for (int64_t unit; (unit = queue.next_unit++) < queue.units;) queue.work(unit, slot);
  }
};

// The first address from `base` on that is a multiple of 64.
inline char* aligned(char* base) {
  return base + (64 - reinterpret_cast<uintptr_t>(base) % 64) % 64;
}

// Calls run(unit, scratch) for all units on the host's threads; scratch is each thread's own, so many
// bytes, 64-aligned. `host` has threads_for(units, steps), parallel(units, threads, work), and
// scratch(bytes), whose result owns memory, with data() for its address.
template <class Host, class Run>
void for_each_unit(const Host& host, int64_t units, int64_t steps, int64_t scratch_bytes,
                   const Run& run) {
  const int64_t threads = host.threads_for(units, steps), stride = (scratch_bytes + 63) / 64 * 64;
  const auto buffer = host.scratch(threads * stride + 64);
  char* base = aligned(buffer.data());
  host.parallel(units, threads,
                [&](int64_t unit, int64_t slot) { run(unit, base + slot * stride); });
}

// The sum over batches of (b, count), in their order, rounded once.
template <class Real>
void sum_batches(const double* parts, int64_t batches, int64_t count, Real* total) {
  for (int64_t i = 0; i < count; ++i) {
    double sum = 0;
    for (int64_t b = 0; b < batches; ++b) sum += parts[b * count + i];
    total[i] = static_cast<Real>(sum);
  }
}

}  // namespace fuseport
