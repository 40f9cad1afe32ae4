// The passes of the selective scan on CUDA: which kernels, in what order, for which problem.
#pragma once

#include "selective_scan/cuda.hpp"
#include "selective_scan/cuda_backward.cuh"
#include "selective_scan/cuda_forward.cuh"
#include "selective_scan/cuda_segments.cuh"
#include "selective_scan/cuda_sums.cuh"

namespace fuseport::selective_scan::cuda {

constexpr int SUM_THREADS = 256;

// Calls call(Config{}) with what suits the problem: as many states of a thread as divide their
// number, so that none of a thread's are missing. The forward pass has few, for more threads; the
// backward pass, which adds up over states and channels, more.
template <class Real, bool BACKWARDS, class Call>
const char* with_config(const Problem& p, const Call& call) {
  if constexpr (sizeof(Real) == 8) {
    if (p.complex) return call(Config<Real, true, 1, 4>{});
    return p.states % 2 ? call(Config<Real, false, 1, 4>{}) : call(Config<Real, false, 2, 4>{});
  } else {
    if (p.complex)
      return p.states % 2 ? call(Config<Real, true, 1, 4>{}) : call(Config<Real, true, 2, 4>{});
    if (p.states == 1) return call(Config<Real, false, 1, 1>{});
    if (p.states % 2) return call(Config<Real, false, 1, 4>{});
    if (BACKWARDS && p.states % 4) return call(Config<Real, false, 2, 4>{});
    constexpr int S = BACKWARDS ? 4 : 2, L = BACKWARDS ? 4 : 8;
    switch (p.dtype) {
      case Dtype::float16: return call(Config<Real, false, S, L, Half>{});
      case Dtype::bfloat16: return call(Config<Real, false, S, L, BFloat16>{});
      default: return call(Config<Real, false, S, L, float>{});
    }
  }
}

// Hands out parts of a pass's scratch.
struct Scratch {
  char* base;
  int64_t used = 0;

  void* take(int64_t bytes) {
    void* part = base + used;
    used += (bytes + 15) / 16 * 16;
    return part;
  }
};

struct Sizes {
  int64_t real, number, parts;  // bytes, and b·segments

  Sizes(const Problem& p, const Plan& plan)
      : real(p.dtype == Dtype::float64 ? 8 : 4),
        number(p.complex ? 2 * real : real),
        parts(p.batches * plan.segments) {}
};

struct ForwardParts {
  Ends ends;
  int64_t bytes;

  ForwardParts(const Problem& p, const Plan& plan, void* base) {
    Scratch s{(char*)base};
    const Sizes sizes(p, plan);
    if (plan.segments > 1) {
      ends.states = s.take(sizes.parts * p.states * p.channels * sizes.number);
      ends.steps = s.take(sizes.parts * p.channels * sizes.real);
    }
    bytes = s.used;
  }
};

struct BackwardParts {
  Ends ends;
  Parts parts;
  int64_t bytes;

  BackwardParts(const Problem& p, const Plan& plan, void* base) {
    Scratch s{(char*)base};
    const Sizes sizes(p, plan);
    const int64_t pairs = sizes.parts * p.channels * p.states * (p.complex ? 2 : 1);
    const int64_t rows = p.batches * plan.blocks * p.states * p.row();
    ends.states = s.take(sizes.parts * p.states * p.channels * sizes.number);
    ends.steps = s.take(sizes.parts * p.channels * sizes.real);
    parts.dA = (double*)s.take(pairs * 8);
    parts.dB = (double*)s.take(p.B.varies ? 0 : pairs * 8);
    parts.dC = (double*)s.take(p.C.varies ? 0 : pairs * 8);
    parts.dD = (double*)s.take(sizes.parts * p.channels * 8);
    parts.ddelta_bias = (double*)s.take(sizes.parts * p.channels * 8);
    parts.blocks_dB = s.take(p.B.varies ? rows * sizes.real : 0);
    parts.blocks_dC = s.take(p.C.varies ? rows * sizes.real : 0);
    bytes = s.used;
  }
};

template <bool BACKWARDS>
Plan plan_of(const Problem& p, int multiprocessors) {
  // Time is cut where blocks are FEW for a multiprocessor, since a segment's first pass takes the
  // exponentials once more; then into so many that all have as much to do, WANTED.
  constexpr int64_t WANTED = 8, FEW = 2, MOST = 64;
  Plan plan;
  const auto channels = [&](auto config) -> const char* {
    plan.channels = decltype(config)::CHANNELS;
    return nullptr;
  };
  if (p.dtype == Dtype::float64) with_config<double, BACKWARDS>(p, channels);
  else with_config<float, BACKWARDS>(p, channels);
  plan.blocks_per_span = (p.span + plan.channels - 1) / plan.channels;
  plan.blocks = p.channels / p.span * plan.blocks_per_span;
  const int64_t blocks = p.batches * plan.blocks, chunks = p.chunks();
  int64_t segments = 1;
  if (blocks > 0 && blocks < FEW * multiprocessors)
    segments = (WANTED * multiprocessors + blocks - 1) / blocks;
  segments = segments < MOST ? segments : MOST;
  segments = segments < chunks ? segments : chunks;
  if (segments < 1) segments = 1;
  plan.chunks_per_segment = (chunks + segments - 1) / segments;
  if (segments > 1)
    plan.segments = (chunks + plan.chunks_per_segment - 1) / plan.chunks_per_segment;
  return plan;
}

// What each segment starts from, in ends.states.
template <class C, bool BACKWARDS>
const char* find_ends(const Problem& p, const Plan& plan, const Sequence& dout, const Ends& ends,
                      const void* initial, void* stream) {
  if (plan.segments > 1) {
    if (const char* error = launch(segment_kernel<C, BACKWARDS>, units_of(p, plan), C::THREADS,
                                   SegmentShared<C>(nullptr).bytes, stream, p, plan, dout, ends))
      return error;
  }
  const int64_t all = p.batches * p.channels * p.states;
  if (all == 0) return nullptr;
  return launch(carry_kernel<C, BACKWARDS>, (all + SUM_THREADS - 1) / SUM_THREADS, SUM_THREADS, 0,
                stream, p, plan, ends, initial);
}

template <class Real>
const char* run_forward(const Problem& p, const Plan& plan, const Forward& f, void* scratch,
                        void* stream) {
  if (units_of(p, plan) == 0) return nullptr;
  const ForwardParts parts(p, plan, scratch);
  return with_config<Real, false>(p, [&](auto config) -> const char* {
    using C = decltype(config);
    const char* error = nullptr;
    if (plan.segments > 1)
      error = find_ends<C, false>(p, plan, Sequence{}, parts.ends, nullptr, stream);
    if (error) return error;
    return launch(forward_kernel<C>, units_of(p, plan), C::THREADS,
                  ForwardShared<C>(nullptr).bytes, stream, p, plan, f,
                  (const void*)parts.ends.states);
  });
}

inline const char* sum(const double* from, int64_t parts, int64_t count, Dtype dtype, void* total,
                       void* stream) {
  if (count == 0) return nullptr;
  const auto kernel = dtype == Dtype::float64 ? sum_kernel<double> : sum_kernel<float>;
  return launch(kernel, (count + SUM_THREADS - 1) / SUM_THREADS, SUM_THREADS, 0, stream, from,
                parts, count, dtype, total);
}

// dB or dC, from the parts of blocks if it varies, else from those of segments.
template <class Real>
const char* sum_coefficient(const Problem& p, const Plan& plan, const Coefficient& k,
                            const double* parts, const void* blocks, void* total, void* stream) {
  const Dtype real = sizeof(Real) == 8 ? Dtype::float64 : Dtype::float32;
  if (!k.varies)
    return sum(parts, p.batches * plan.segments, p.channels * p.states * (p.complex ? 2 : 1),
               p.complex ? real : p.dtype, total, stream);
  if (p.channels == 0) return nullptr;
  const int64_t groups = p.channels / k.channels, count = p.states * p.row();
  const int64_t all = p.batches * groups * count;
  if (all == 0) return nullptr;
  return launch(sum_blocks_kernel<Real>, (all + SUM_THREADS - 1) / SUM_THREADS, SUM_THREADS, 0,
                stream, (const Real*)blocks, p.batches, groups, plan.blocks / groups, count,
                p.dtype, total);
}

template <class Real>
const char* run_backward(const Problem& p, const Plan& plan, const Gradients& k, void* scratch,
                         void* stream) {
  const BackwardParts at(p, plan, scratch);
  const Dtype real = sizeof(Real) == 8 ? Dtype::float64 : Dtype::float32;
  const int64_t segments = p.batches * plan.segments, pairs = p.channels * p.states;
  const char* error = nullptr;
  // Without steps there are no parts of blocks, and of segments those of none.
  const bool any = units_of(p, plan) > 0 && p.length > 0;
  if (any)
    error = with_config<Real, true>(p, [&](auto config) -> const char* {
      using C = decltype(config);
      if (const char* failed =
              find_ends<C, true>(p, plan, k.dout, at.ends, k.dlast_state, stream))
        return failed;
      const bool gated = p.z.data != nullptr;
      return launch(gated ? backward_kernel<C, true> : backward_kernel<C, false>,
                    units_of(p, plan), C::THREADS, BackwardShared<C>(nullptr, gated).bytes, stream,
                    p, plan, k, at.parts, at.ends.states);
    });
  const int64_t parts = any ? segments : 0;
  if (!error)
    error = sum(at.parts.dA, parts, pairs * (p.complex ? 2 : 1), real, k.dA, stream);
  if (!error) error = sum(at.parts.dD, parts, p.channels, real, k.dD, stream);
  if (!error) error = sum(at.parts.ddelta_bias, parts, p.channels, real, k.ddelta_bias, stream);
  Plan summed = plan;
  if (!any) summed.segments = 0;
  if (!error)
    error = sum_coefficient<Real>(p, summed, p.B, at.parts.dB, at.parts.blocks_dB, k.dB, stream);
  if (!error)
    error = sum_coefficient<Real>(p, summed, p.C, at.parts.dC, at.parts.blocks_dC, k.dC, stream);
  return error;
}

}  // namespace fuseport::selective_scan::cuda
