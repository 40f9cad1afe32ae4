// What the kernels of the correlation take and give, over raw pointers: the interface between
// kernel.cpp, compiled once per instruction set, and its bindings.
//
// Images are copied first, as rows of reals with margins of zeros, those of all channels of an image's
// row one after another. A vector is of places next to each other; each product of a displacement is
// then a load at another address. Work is cut into units that depend on nothing of each other, as shapes
// alone decide: bits do not depend on threads.
//
// - Forward, a unit is a row of the second image: with each row of the first that it is compared with.
//   Some rows of that and some displacements are summed up in registers at once, over channels.
// - Backward, it is two rows of an image that see the same rows of the other, and a block of channels,
//   which are summed up in registers over displacements. No gradient is added to from two units.
//
// Where windows have more than one pixel, the same is done for windows of one at each pixel, into a volume
// of reals, whose windows are summed up then; backward, cotangents are spread over windows first.
#pragma once

#include <cstdint>

#include "correlation/grid.hpp"
#include "native/dtype.hpp"
#include "native/isa.hpp"
#include "native/schedule.hpp"

namespace fuseport::correlation {

constexpr int64_t CHANNELS = 128;  // of a unit of the backward
constexpr int64_t CHUNK = 64;      // channels that are summed up before rows of others are read
constexpr int64_t A_STEP = 16;     // products that take as long as a step of `threads_for`

// All tensors are contiguous, and fit each other as geometry.hpp checks it.
struct Problem {
  Dtype dtype = Dtype::float32;
  int64_t batches = 0, channels = 0;
  Axis down, across;
  const void* input1 = nullptr;  // (b, c, H, W)
  const void* input2 = nullptr;

  // Inlined always: a copy that is compiled for one instruction set must not serve another.
  FUSEPORT_INLINED bool windows() const { return down.kernel > 1 || across.kernel > 1; }
  FUSEPORT_INLINED int64_t pixels() const { return down.size * across.size; }
  FUSEPORT_INLINED int64_t displacements() const { return down.patch * across.patch; }
  FUSEPORT_INLINED int64_t real_bytes() const { return dtype == Dtype::float64 ? 8 : 4; }
};

// How images are copied and work is cut.
struct Plan {
  Grid down, across;      // of what is compared: of outputs, or where there are windows, of pixels
  Range shifts;           // displacements of columns that have a pair of pixels at all
  int64_t period, slots;  // columns that displacement j takes are those of j + period, moved
  int64_t first, last;    // how far these are from an output, in strides
  int64_t part, row2;     // of the second image: the sizes of one slot, and of all
  int64_t begin1, row1;   // of the first: the place that its copy begins at, and the size
  Pairs pairs;            // of rows that are differentiated together

  // Without a gradient, nothing reads before the first place of a copied row.
  Plan(const Problem& p, bool gradient)
      : down(p.down, p.windows()),
        across(p.across, p.windows()),
        shifts(across.shifts()),
        pairs(down) {
    constexpr int64_t VECTOR = 16;
    period = across.stride / common_divisor(across.stride, across.step);
    slots = shifts.count() < period ? shifts.count() : period;
    first = slots ? strides_to(shifts.first) : 0;
    last = slots ? strides_to(shifts.last - 1) : 0;
    part = last - first + across.count + VECTOR;
    row2 = slots * part;
    const int64_t columns = across.size / across.stride + 1;
    begin1 = gradient && last > 0 ? -last : 0;
    int64_t end = across.count;
    if (gradient && end < columns - first) end = columns - first;
    row1 = end - begin1 + VECTOR;
  }

  // What displacement j takes for the output of column x is column (x + strides_to(j))·stride +
  // phase(j) of the second image, number x + at2(j) of a copied row.
  FUSEPORT_INLINED int64_t strides_to(int64_t j) const {
    return floor_div(across.offset(j) - across.padding, across.stride);
  }
  FUSEPORT_INLINED int64_t phase(int64_t j) const {
    return across.offset(j) - across.padding - across.stride * strides_to(j);
  }
  FUSEPORT_INLINED int64_t slot(int64_t j) const { return (j - shifts.first) % period; }
  FUSEPORT_INLINED int64_t at2(int64_t j) const { return slot(j) * part + strides_to(j) - first; }
};

// Memories that units share: copies of the two images, and a volume, (b, ph, pw, H, W), of products or
// of their cotangents, where there are windows.
struct Shared {
  char *first = nullptr, *second = nullptr, *volume = nullptr;
};

struct Forward {
  void* out = nullptr;  // (b, ph, pw, oh, ow)
};

struct Backward {
  const void* dout = nullptr;  // (b, ph, pw, oh, ow)
  void* dinput1 = nullptr;     // (b, c, H, W)
  void* dinput2 = nullptr;
};

// The kernels for one instruction set.
struct Kernels {
  int64_t (*forward_scratch)(const Problem&, const Plan&);  // bytes, to be 64-aligned
  int64_t (*backward_scratch)(const Problem&, const Plan&);
  int64_t (*window_scratch)(const Problem&);
  void (*copy)(const Problem&, const Plan&, const Shared&, int64_t unit);
  void (*forward)(const Problem&, const Plan&, const Forward&, const Shared&, int64_t unit,
                  void* scratch);
  void (*sum_windows)(const Problem&, const Forward&, const Shared&, int64_t unit, void* scratch);
  void (*spread)(const Problem&, const Backward&, const Shared&, int64_t unit, void* scratch);
  void (*backward)(const Problem&, const Plan&, const Backward&, const Shared&, int64_t unit,
                   void* scratch);
};

FUSEPORT_CHOOSE_KERNELS()

// The memory of a pass, and its parts.
template <class Host>
struct Memory {
  decltype(static_cast<const Host*>(nullptr)->scratch(0)) bytes;
  Shared shared;

  Memory(const Host& host, const Problem& p, const Plan& plan)
      : bytes(host.scratch(first(p, plan) + second(p, plan) + volume(p) + 64)) {
    shared.first = aligned(bytes.data());
    shared.second = shared.first + first(p, plan);
    shared.volume = shared.second + second(p, plan);
  }

  static int64_t lines(int64_t numbers, const Problem& p) {
    return (numbers * p.real_bytes() + 63) / 64 * 64;
  }
  static int64_t first(const Problem& p, const Plan& plan) {
    return lines(p.batches * plan.down.count * p.channels * plan.row1, p);
  }
  static int64_t second(const Problem& p, const Plan& plan) {
    return lines(p.batches * plan.down.size * p.channels * plan.row2, p);
  }
  static int64_t volume(const Problem& p) {
    return p.windows() ? lines(p.batches * p.displacements() * p.pixels(), p) : 0;
  }
};

template <class Host>
void copy(const Host& host, const Problem& p, const Plan& plan, const Shared& shared) {
  const int64_t numbers = p.batches * p.channels * (plan.row1 + plan.row2) * plan.down.size;
  for_each_unit(host, p.batches * (plan.down.count + plan.down.size), numbers / A_STEP, 0,
                [&](int64_t unit, void*) { kernels().copy(p, plan, shared, unit); });
}

inline int64_t products(const Problem& p, const Plan& plan) {
  return p.batches * plan.down.count * plan.across.count * p.displacements() * (p.channels + 4);
}

// What it takes to sum up all windows, or to spread cotangents over them.
inline int64_t window_steps(const Problem& p) {
  const int64_t taps = p.down.kernel + p.across.kernel;
  return p.batches * p.displacements() * p.pixels() * taps / 4;
}

// Runs all units on the threads of `host`, which is as for `for_each_unit`.
template <class Host>
void run(const Host& host, const Problem& p, const Forward& f) {
  const Kernels& k = kernels();
  const Plan plan(p, false);
  const Memory memory(host, p, plan);
  const Shared& shared = memory.shared;
  copy(host, p, plan, shared);
  for_each_unit(host, p.batches * (plan.down.size + plan.down.patch), products(p, plan) / A_STEP,
                k.forward_scratch(p, plan), [&](int64_t unit, void* scratch) {
                  k.forward(p, plan, f, shared, unit, scratch);
                });
  if (p.windows())
    for_each_unit(host, p.batches * p.displacements(), window_steps(p), k.window_scratch(p),
                  [&](int64_t unit, void* scratch) {
                    k.sum_windows(p, f, shared, unit, scratch);
                  });
}

template <class Host>
void run(const Host& host, const Problem& p, const Backward& b) {
  const Kernels& k = kernels();
  const Plan plan(p, true);
  const Memory memory(host, p, plan);
  const Shared& shared = memory.shared;
  copy(host, p, plan, shared);
  if (p.windows())
    for_each_unit(host, p.batches * p.displacements(), window_steps(p), k.window_scratch(p),
                  [&](int64_t unit, void* scratch) { k.spread(p, b, shared, unit, scratch); });
  const int64_t blocks = (p.channels + CHANNELS - 1) / CHANNELS;
  for_each_unit(host, 2 * p.batches * plan.pairs.count() * blocks, 2 * products(p, plan) / A_STEP,
                k.backward_scratch(p, plan), [&](int64_t unit, void* scratch) {
                  k.backward(p, plan, b, shared, unit, scratch);
                });
}

}  // namespace fuseport::correlation
