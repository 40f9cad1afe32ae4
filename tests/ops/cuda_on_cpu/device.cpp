// Runs a launch on the CPU. Between two barriers warps run one after the other, and between shuffles
// the threads of one, in an order that tests choose: what depends on the order lacks a barrier. Shared
// memory starts as NaN, with guards around it. What a GPU would hang on, or leave undefined, is an error.
#include "cuda_on_cpu/device.hpp"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace fuseport::cuda::on_cpu {
namespace {

constexpr int WARP = 32, MOST_THREADS = 1024;
constexpr int64_t STACK = 128 * 1024, GUARD = 256;
constexpr int MOST_GIVEN = 32;  // bytes of a thread that a warp gathers
constexpr unsigned char POISON = 0xff;  // of floats and doubles: NaN

enum class State { ready, barrier, shuffle, gather, done };

struct Copy {
  void* to;
  const void* from;  // null: zeros
};

struct Fiber {
  ucontext_t context;
  jmp_buf place;
  bool started = false;
  State state = State::ready;
  uint64_t value = 0;
  int mask = 0;
  const void* given = nullptr;
  int size = 0;
  std::vector<Copy> copies;
  std::unique_ptr<char[]> stack{new char[STACK]};
};

std::vector<Fiber> fibers(MOST_THREADS);
std::vector<unsigned char> memory;
unsigned char gathered[MOST_THREADS / WARP][WARP * MOST_GIVEN];
const std::function<void()>* body = nullptr;
jmp_buf scheduler;
Fiber* current = nullptr;
std::string error;
int order = 0, processors = 1;
int64_t shared_bytes = 99 * 1024;
std::mt19937 random;

void enter() {
  (*body)();
  current->state = State::done;
  _longjmp(scheduler, 1);
}

__attribute__((noinline)) void leave(State state) {
  current->state = state;
  if (_setjmp(current->place) == 0) _longjmp(scheduler, 1);
}

__attribute__((noinline)) void resume(Fiber& fiber, int thread) {
  current = &fiber;
  threadIdx.x = (unsigned)thread;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.place, 1);
  fiber.started = true;
  setcontext(&fiber.context);
}

// 0: ascending; 1: descending; else some order, another one each time.
std::vector<int64_t> in_order(int64_t count) {
  std::vector<int64_t> all((size_t)count);
  std::iota(all.begin(), all.end(), 0);
  if (order == 1) std::reverse(all.begin(), all.end());
  if (order > 1) std::shuffle(all.begin(), all.end(), random);
  return all;
}

// Whether all threads of a warp wait in this state; an error if only some do.
bool all_wait(int first, State state) {
  int waiting = 0;
  for (int i = 0; i < WARP; ++i) waiting += fibers[first + i].state == state;
  if (waiting > 0 && waiting < WARP) error = "not all threads of a warp shuffle";
  return waiting == WARP;
}

// Lets the threads of a warp go on that all wait for each other's numbers.
bool exchanged(int first) {
  if (all_wait(first, State::gather)) {
    for (int i = 0; i < WARP; ++i) {
      Fiber& fiber = fibers[first + i];
      std::memcpy(gathered[first / WARP] + i * fiber.size, fiber.given, (size_t)fiber.size);
      fiber.state = State::ready;
    }
    return true;
  }
  if (!all_wait(first, State::shuffle)) return false;
  uint64_t values[WARP];
  for (int i = 0; i < WARP; ++i) {
    if (fibers[first + i].mask != fibers[first].mask) error = "threads shuffle with other masks";
    values[i] = fibers[first + i].value;
  }
  for (int i = 0; i < WARP; ++i) {
    fibers[first + i].value = values[i ^ fibers[first].mask];
    fibers[first + i].state = State::ready;
  }
  return true;
}

void run_block(int threads) {
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.started = false;
    fiber.state = State::ready;
    fiber.copies.clear();
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
  while (error.empty()) {
    // A warp goes as far as the next barrier before another does.
    for (const int64_t warp : in_order(threads / WARP)) {
      const int first = (int)warp * WARP;
      do {
        for (const int64_t lane : in_order(WARP))
          if (Fiber& fiber = fibers[first + lane]; fiber.state == State::ready)
            resume(fiber, first + (int)lane);
      } while (exchanged(first) && error.empty());
    }
    const auto count = [&](State state) {
      return std::count_if(fibers.begin(), fibers.begin() + threads,
                           [&](const Fiber& f) { return f.state == state; });
    };
    if (count(State::done) == threads) return;
    if (count(State::barrier) < threads) {
      if (error.empty()) error = "some threads wait at a barrier, and others have ended";
      return;
    }
    for (int i = 0; i < threads; ++i) fibers[i].state = State::ready;
  }
}

}  // namespace

char* shared_memory() { return (char*)memory.data() + GUARD; }

void barrier() { leave(State::barrier); }

uint64_t exchange(uint64_t mine, int mask) {
  current->value = mine;
  current->mask = mask;
  leave(State::shuffle);
  return current->value;
}

const void* gather(const void* mine, int size) {
  if (size > MOST_GIVEN) error = "a warp gathers more than there is room for";
  current->given = mine;
  current->size = size;
  const int warp = (int)threadIdx.x / WARP;
  leave(State::gather);
  return gathered[warp];
}

void copy_later(void* to, const void* from, bool there) {
  if (((uintptr_t)to | (uintptr_t)from) % 16 != 0) error = "a copy that is not aligned";
  current->copies.push_back({to, there ? from : nullptr});
}

void expect_aligned(const void* at, int64_t bytes) {
  if ((uintptr_t)at % (size_t)bytes != 0) error = "numbers moved at once that are not aligned";
}

void wait_for_copies() {
  for (const Copy& copy : current->copies) {
    if (copy.from) std::memcpy(copy.to, copy.from, 16);
    if (!copy.from) std::memset(copy.to, 0, 16);
  }
  current->copies.clear();
}

int multiprocessors() { return processors; }

int64_t most_shared() { return shared_bytes; }

int64_t sort_scratch(int64_t count) { return 1 + count / 8; }

// As CUB does it, eight bits in a pass, from one array to the other; what it may leave behind in
// the scratch memory and the other array is there before it reads.
const char* sort(int32_t* (&keys)[2], int32_t* (&values)[2], int64_t count, int bits,
                 void* scratch, int64_t bytes) {
  if (count < 1 || bits < 1 || bits > 31) return "a sort of nothing, or by no bits";
  if (bytes < sort_scratch(count)) return "too little scratch memory for a sort";
  const auto size = (size_t)count * sizeof(int32_t);
  std::memset(scratch, POISON, (size_t)bytes);
  std::memset(keys[1], POISON, size);
  std::memset(values[1], POISON, size);
  const std::vector<int32_t> k(keys[0], keys[0] + count), v(values[0], values[0] + count);
  std::vector<int64_t> all((size_t)count);
  std::iota(all.begin(), all.end(), 0);
  const int32_t mask = (int32_t)((1u << bits) - 1);
  std::stable_sort(all.begin(), all.end(),
                   [&](int64_t i, int64_t j) { return (k[i] & mask) < (k[j] & mask); });
  if ((bits + 7) / 8 % 2 != 0) {
    std::memset(keys[0], POISON, size);
    std::memset(values[0], POISON, size);
    std::swap(keys[0], keys[1]);
    std::swap(values[0], values[1]);
  }
  for (int64_t i = 0; i < count; ++i) {
    keys[0][i] = k[all[i]];
    values[0][i] = v[all[i]];
  }
  if (keys[0][0] < 0 || !std::is_sorted(keys[0], keys[0] + count))
    return "keys are not in order that are sorted by so many bits";
  return nullptr;
}

const char* run(int64_t blocks, int threads, int64_t shared, const std::function<void()>& kernel) {
  error.clear();
  if (blocks < 1 || threads < 1 || threads > MOST_THREADS || threads % WARP != 0)
    return "invalid configuration argument";
  if (shared > shared_bytes) return "more shared memory than some GPUs have";
  body = &kernel;
  blockDim.x = (unsigned)threads;
  // A grid of fewer blocks than asked for is right as well: blocks take turns.
  gridDim.x = (unsigned)(order > 1 && blocks > 2 ? blocks - 1 : blocks);
  memory.assign((size_t)(shared + 2 * GUARD), POISON);
  for (const int64_t block : in_order(gridDim.x)) {
    std::fill(memory.begin(), memory.end(), POISON);
    blockIdx.x = (unsigned)block;
    run_block(threads);
    const auto poison = [](unsigned char x) { return x == POISON; };
    if (!std::all_of(memory.begin(), memory.begin() + GUARD, poison) ||
        !std::all_of(memory.end() - GUARD, memory.end(), poison))
      error = "a write beyond shared memory";
    if (!error.empty()) return error.c_str();
  }
  return nullptr;
}

}  // namespace fuseport::cuda::on_cpu

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void cuda_on_cpu_order(int order) {
  fuseport::cuda::on_cpu::order = order;
  fuseport::cuda::on_cpu::random.seed((unsigned)order);
}

EXPORTED void cuda_on_cpu_multiprocessors(int count) {
  fuseport::cuda::on_cpu::processors = count;
}

EXPORTED void cuda_on_cpu_shared_memory(int64_t bytes) {
  fuseport::cuda::on_cpu::shared_bytes = bytes;
}
