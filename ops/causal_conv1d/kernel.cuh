// The passes of the causal convolution on CUDA: which kernels, in what order, for which problem.
#pragma once

#include "causal_conv1d/cuda.hpp"
#include "causal_conv1d/cuda_channels.cuh"
#include "causal_conv1d/cuda_plain.cuh"
#include "causal_conv1d/cuda_time.cuh"

namespace fuseport::causal_conv1d::cuda {

// Threads of a multiprocessor that are enough to keep memory busy.
constexpr int64_t BUSY = 1024;

inline int64_t blocks_for(int64_t count, int64_t threads) { return (count + threads - 1) / threads; }

// Whether packs can be moved at once. Along time that asks less than alignment: that packs which
// begin at 16 bytes in one sequence do so in the others.
template <class Stored>
bool in_packs(const Problem& p, const Sequence& s) {
  if (!p.time_last) {
    constexpr int V = CHANNELS<Stored>;
    return s.channel == 1 && p.channels % V == 0 &&
           aligned<V, Stored>(s.data, p.batches > 1 ? s.batch : 0, p.length > 1 ? s.time : 0);
  }
  constexpr int V = STEPS<Stored>;
  const auto begin = [](const void* data) { return (int64_t)((uintptr_t)data / sizeof(Stored)); };
  const auto same = [](int64_t a, int64_t b) { return (a - b) % V == 0; };
  return s.time == 1 && p.x.time == 1 && same(begin(s.data), begin(p.x.data)) &&
         (p.batches == 1 || same(s.batch, p.x.batch)) &&
         (p.channels == 1 || same(s.channel, p.x.channel));
}

inline Sequence read_only(const MutableSequence& s) { return {s.data, s.batch, s.channel, s.time}; }

template <class Stored, class... Sequences>
Plan plan_of(const Problem& p, const Sequences&... sequences) {
  // Fewer steps of a thread than these, and those before the first are much of what it reads.
  constexpr int64_t FEWEST = 16, MOST = 64;
  Plan plan;
  if (p.width > T || (p.packed && p.time_last) || !(in_packs<Stored>(p, sequences) && ...)) {
    plan.plain = true;
    return plan;
  }
  if (p.time_last) {
    constexpr int V = STEPS<Stored>;
    // A row that does not begin where a pack may has a part of a pack more.
    const bool even = aligned<V, Stored>(p.x.data, p.batches > 1 ? p.x.batch : 0,
                                         p.channels > 1 ? p.x.channel : 0);
    const int64_t steps = p.length + (even && p.length > 0 ? 0 : V - 1);
    plan.lanes = steps >= 128 * V ? 32 : 8;
    plan.rows = THREADS / plan.lanes;
    // What a thread begins with is as much as some of its packs: it has many where threads are.
    constexpr int MOST_PACKS = 16;
    const int64_t series = p.batches * p.channels, stride = plan.lanes * V;
    plan.packs = MOST_PACKS;
    while (plan.packs > PACKS && series * plan.lanes * blocks_for(steps, plan.packs * stride) <
                                     2 * BUSY * multiprocessors())
      plan.packs /= 2;
    plan.chunks = blocks_for(steps, plan.packs * stride);
    plan.parts = p.batches * plan.chunks;
    if (plan.chunks == 1) plan.packs = (int)blocks_for(steps, stride);
    const int64_t all = series * plan.chunks;
    plan.units = blocks_for(all, plan.rows);
    plan.plain = all > INT32_MAX;  // which are counted in 32 bits
    return plan;
  }
  const int64_t packs = p.channels / CHANNELS<Stored>, busy = BUSY * multiprocessors();
  plan.lanes = packs >= 32 ? 32 : 8;
  plan.rows = THREADS / plan.lanes;
  plan.columns = blocks_for(packs, plan.lanes);
  plan.steps = MOST;
  while (plan.steps > FEWEST && packs * p.batches * blocks_for(p.length, plan.steps) < busy)
    plan.steps /= 2;
  plan.chunks = p.length > 0 ? blocks_for(p.length, plan.steps) : 1;
  // Each part is a row of sums in memory: no more of them than keep the device busy.
  const int64_t all = blocks_for(p.batches * plan.chunks, plan.rows);
  const int64_t wanted = plan.columns ? blocks_for(busy, THREADS * plan.columns) : 1;
  plan.parts = all < wanted ? all : wanted;
  plan.units = all * plan.columns;
  return plan;
}

template <class Stored>
const char* run_forward(const Problem& p, const Plan& plan, const Forward& f, void* stream) {
  const int64_t series = p.batches * p.channels;
  if (series == 0) return nullptr;
  if (plan.plain)
    return launch(forward_plain_kernel<Real<Stored>>,
                  blocks_for(series * (p.length > 0 ? p.length : 1), PLAIN_THREADS), PLAIN_THREADS,
                  0, stream, p, f);
  if (p.time_last)
    return launch(p.width == T ? forward_time_kernel<Stored, true>
                               : forward_time_kernel<Stored, false>,
                  plan.units, THREADS, 0, stream, p, plan, f);
  return launch(p.packed       ? forward_channels_kernel<Stored, true, false>
                : p.width == T ? forward_channels_kernel<Stored, false, true>
                               : forward_channels_kernel<Stored, false, false>,
                plan.units, THREADS, 0, stream, p, plan, f);
}

template <class Number>
const char* run_plain_backward(const Problem& p, const Gradients& k, Number* dy, void* stream) {
  const int64_t count = p.batches * p.channels * p.length;
  const char* error = nullptr;
  if (count > 0)
    error = launch(cotangents_kernel<Number>, blocks_for(count, PLAIN_THREADS), PLAIN_THREADS, 0,
                   stream, p, k, dy);
  if (!error && count > 0)
    error = launch(inputs_kernel<Number>, blocks_for(count, PLAIN_THREADS), PLAIN_THREADS, 0,
                   stream, p, k, (const Number*)dy);
  if (error) return error;
  return launch(weights_kernel<Number>, p.channels * (p.width + 1), PLAIN_THREADS,
                PLAIN_THREADS * 8, stream, p, k, (const Number*)dy);
}

template <class Stored>
const char* run_backward(const Problem& p, const Plan& plan, const Gradients& k, void* scratch,
                         void* stream) {
  using Number = Real<Stored>;
  const int64_t series = p.batches * p.channels;
  auto* const parts = (Number*)scratch;
  if (p.channels == 0) return nullptr;
  const char* error = nullptr;
  if (plan.plain) {
    error = run_plain_backward(p, k, parts, stream);
  } else {
    if (series > 0 && p.time_last)
      error = launch(p.width == T ? backward_time_kernel<Stored, true>
                                  : backward_time_kernel<Stored, false>,
                     plan.units, THREADS, 0, stream, p, plan, k, parts);
    else if (series > 0)
      error = launch(p.packed       ? backward_channels_kernel<Stored, true, false>
                     : p.width == T ? backward_channels_kernel<Stored, false, true>
                                    : backward_channels_kernel<Stored, false, false>,
                     plan.parts * plan.columns, THREADS,
                     SUMS * THREADS * CHANNELS<Stored> * (int64_t)sizeof(Number), stream, p, plan,
                     k, parts);
    if (!error)
      error = launch(sum_weights_kernel<Number>, part_blocks(SUMS * p.channels), PART_THREADS,
                     PART_SHARED, stream, p, k, (const Number*)parts, plan.parts);
  }
  // The other kernels write these themselves.
  const int64_t states = plan.plain ? series * (p.width - 1) * 2 : 0;
  if (error || states == 0) return error;
  return launch(states_kernel<Number>, blocks_for(states, PLAIN_THREADS), PLAIN_THREADS, 0, stream,
                p, k);
}

}  // namespace fuseport::causal_conv1d::cuda
