// The passes of the chunked scan on CUDA: which kernels, over how many numbers.
#pragma once

#include <type_traits>

#include "ssd_chunk_scan/cuda_gradients.cuh"
#include "ssd_chunk_scan/cuda_products.cuh"
#include "ssd_chunk_scan/cuda_walk.cuh"

namespace fuseport::ssd_chunk_scan::cuda {

// A kernel over `count` numbers, which may be none.
template <class Kernel, class... Arguments>
const char* over(int64_t count, Kernel kernel, void* stream, const Arguments&... arguments) {
  if (count == 0) return nullptr;
  const int64_t blocks = (count + THREADS - 1) / THREADS, most = 32 * (int64_t)multiprocessors();
  return launch(kernel, blocks < most ? blocks : most, THREADS, 0, stream, arguments...);
}

inline int64_t heads_of(const Problem& p) { return p.batches * p.chunks() * p.heads; }

constexpr int TOGETHER = 4;  // numbers of a thread, where they can be moved at once

template <class Stored>
bool movable(const Strided& s) {
  return !s.data || (s.column == 1 && aligned<TOGETHER, Stored>(s.data, s.batch, s.step, s.head));
}

// Calls call(Stored{}, V, count of packs of V numbers) with V as an integral constant.
template <class Call>
const char* with_packs(const Problem& p, const Strided& dout, const Call& call) {
  return with_dtype(p.dtype, [&](auto stored) -> const char* {
    using Stored = decltype(stored);
    const int64_t rows = heads_of(p) * T;
    if (p.width % TOGETHER == 0 && movable<Stored>(p.x) && movable<Stored>(p.z) &&
        movable<Stored>(dout))
      return call(stored, std::integral_constant<int, TOGETHER>{}, rows * (p.width / TOGETHER));
    return call(stored, std::integral_constant<int, 1>{}, rows * p.width);
  });
}

inline const char* run_spread(const Problem& p, const Steps& s, const Forward& f, void* stream) {
  return with_packs(p, {}, [&](auto stored, auto v, int64_t packs) -> const char* {
    using Stored = decltype(stored);
    const int64_t count = p.batches * p.chunks() * p.groups * T * p.states;
    if (auto e = over(packs, spread_kernel<Stored, decltype(v)::value>, stream, p, s, f)) return e;
    if (auto e = over(count, spread_groups_kernel<Stored>, stream, p, p.B, f.B)) return e;
    return over(count, spread_groups_kernel<Stored>, stream, p, p.C, f.C);
  });
}

inline const char* run_finish(const Problem& p, const Steps& s, const Forward& f, void* stream) {
  return with_packs(p, {}, [&](auto stored, auto v, int64_t packs) {
    return over(packs, finish_kernel<decltype(stored), decltype(v)::value>, stream, p, s, f);
  });
}

constexpr int MOST_STATES = 256;  // states, for which registers suffice

inline int64_t blocks_of(const Problem& p, int64_t segments) {
  return p.batches * segments * p.heads * ((p.width + COLUMNS - 1) / COLUMNS);
}

// As many as make two blocks for each multiprocessor, where else some would have none: the states of
// a segment are made twice.
inline Segments segments_of(const Problem& p) {
  constexpr int64_t LEAST = 4;  // chunks
  const int64_t chunks = p.chunks(), most = chunks / LEAST, all = multiprocessors();
  const int64_t units = blocks_of(p, 1);
  int64_t count = units < all ? (2 * all + units - 1) / units : 1;
  count = count > most ? most : count;
  count = count < 1 ? 1 : count;
  const int64_t span = (chunks + count - 1) / count;
  return {span, (chunks + span - 1) / span};
}

// Calls run(Stored{}, N) with room for so many states as an integral constant.
template <class Run>
const char* with_states(const Problem& p, const Run& run) {
  const auto stored_so = [&](auto stored) {
    if (p.states <= 64) return run(stored, std::integral_constant<int, 64>{});
    if (p.states <= 128) return run(stored, std::integral_constant<int, 128>{});
    return run(stored, std::integral_constant<int, MOST_STATES>{});
  };
  if (p.dtype == Dtype::float32) return stored_so(float{});
  return p.dtype == Dtype::float16 ? stored_so(Half{}) : stored_so(BFloat16{});
}

// The same with the type of dy, which a gate makes real: run(Stored{}, OfDy{}, N).
template <class Run>
const char* with_dy(const Problem& p, const Run& run) {
  return with_states(p, [&](auto stored, auto states) {
    return p.z.data ? run(stored, float{}, states) : run(stored, stored, states);
  });
}

template <Walks WALKS, bool BACK>
const char* run_walk(const Problem& p, const Steps& s, const Segments& segments, const Walk& walk,
                     void* stream) {
  constexpr bool OUT = WALKS == Walks::gate || WALKS == Walks::out;
  const auto with_blocks = [&](auto stored, auto of_x, auto states) {
    using Stored = decltype(stored);
    using OfX = decltype(of_x);
    constexpr int N = decltype(states)::value;
    const int64_t shares = (p.states + N - 1) / N;
    const int64_t blocks = blocks_of(p, segments.count - (WALKS == Walks::add_up)) * shares;
    return launch(walk_kernel<Stored, OfX, N, WALKS, BACK>, blocks, WALK_THREADS<N>,
                  sizeof(WalkTiles<Stored, OfX, N, OUT>), stream, p, s, segments, shares, walk);
  };
  const auto run = [&](auto stored, auto of_x, auto states) {
    if constexpr (OUT) {
      return with_blocks(stored, of_x, states);
    } else {
      // A block's warps wait more than they work: as many blocks as there is room for at once.
      constexpr int64_t AT_ONCE = WALK_BLOCKS<decltype(stored), 64, WALKS>;
      const int64_t halves = blocks_of(p, segments.count) * ((p.states + 63) / 64);
      if (halves <= AT_ONCE * multiprocessors())
        return with_blocks(stored, of_x, std::integral_constant<int, 64>{});
      return with_blocks(stored, of_x,
                         std::integral_constant<int, OWN<decltype(states)::value>>{});
    }
  };
  if constexpr (BACK) return with_dy(p, run);
  else return with_states(p, [&](auto stored, auto n) { return run(stored, stored, n); });
}

// Of a group, whose dB and dC a block sums up: fewer where blocks would be too few.
inline int64_t heads_together(const Problem& p) {
  constexpr int64_t MOST = 8;
  const int64_t enough = 4 * (int64_t)multiprocessors(), heads = p.heads_per_group();
  const int64_t wanted = p.batches * p.chunks() * p.heads / enough;
  const int64_t most = heads < MOST ? heads : MOST;
  return wanted < 1 ? 1 : wanted < most ? wanted : most;
}

// Whether a block can have so much shared memory.
inline bool walks_fit(const Problem& p) {
  int64_t bytes = 0;
  with_states(p, [&](auto stored, auto states) -> const char* {
    using Stored = decltype(stored);
    bytes = sizeof(WalkTiles<Stored, Stored, decltype(states)::value, true>);
    return nullptr;
  });
  return bytes <= most_shared();
}

// Calls run(Stored{}, OfDy{}, N, CUT) with what gradients are made with: cut once, if there is room.
template <class Run>
const char* with_gradients(const Problem& p, const Run& run) {
  return with_dy(p, [&](auto stored, auto of_dy, auto states) -> const char* {
    using Stored = decltype(stored);
    constexpr int N = decltype(states)::value;
    if constexpr (!std::is_same_v<Stored, float>) {
      return run(stored, of_dy, states, std::true_type{});
    } else {
      if constexpr (N <= 128)
        if (sizeof(GradientTiles<Stored, decltype(of_dy), N, true>) <= (size_t)most_shared())
          return run(stored, of_dy, states, std::true_type{});
      return run(stored, of_dy, states, std::false_type{});
    }
  });
}
inline bool gradients_fit(const Problem& p) {
  int64_t bytes = 0, of_walk = 0;
  with_gradients(p, [&](auto stored, auto of_dy, auto states, auto cut) -> const char* {
    using Stored = decltype(stored);
    using OfDy = decltype(of_dy);
    constexpr int N = decltype(states)::value;
    bytes = sizeof(GradientTiles<Stored, OfDy, N, decltype(cut)::value>);
    of_walk = sizeof(WalkTiles<Stored, OfDy, OWN<N>, false>);
    return nullptr;
  });
  return (bytes > of_walk ? bytes : of_walk) <= most_shared();
}

inline const char* run_gradients(const Problem& p, const Steps& s, const Backward& b,
                                 void* stream) {
  return with_gradients(p, [&](auto stored, auto of_dy, auto states, auto cut) {
    using Stored = decltype(stored);
    using OfDy = decltype(of_dy);
    constexpr int N = decltype(states)::value;
    constexpr bool CUT = decltype(cut)::value;
    const int64_t units = p.batches * p.chunks() * p.groups * sums_of_heads(p);
    return launch(gradients_kernel<Stored, OfDy, N, CUT>, units, THREADS,
                  sizeof(GradientTiles<Stored, OfDy, N, CUT>), stream, p, s, heads_together(p), b);
  });
}

inline const char* run_carry(const Problem& p, const Steps& s, const Segments& segments,
                             const Walk& walk, void* stream) {
  const auto run = [&](auto real, auto back) {
    return over(p.batches * p.heads * p.width * p.states,
                carry_kernel<decltype(real), decltype(back)::value>, stream, p, s, segments, walk);
  };
  const auto with_real = [&](auto back) {
    return p.dtype == Dtype::float64 ? run(double{}, back) : run(float{}, back);
  };
  return walk.back ? with_real(std::true_type{}) : with_real(std::false_type{});
}

inline const char* run_spread_back(const Problem& p, const Steps& s, const Backward& b,
                                   void* stream) {
  return with_packs(p, b.dout, [&](auto stored, auto v, int64_t packs) -> const char* {
    using Stored = decltype(stored);
    constexpr int V = decltype(v)::value;
    if (auto e = over(packs, spread_back_kernel<Stored, V>, stream, p, s, b)) return e;
    return over(heads_of(p) * p.width, skip_kernel<Real<Stored>>, stream, p, b);
  });
}

inline const char* run_mix_back(const Problem& p, const Steps& s, const Backward& b, void* stream) {
  const int64_t units = p.batches * p.chunks() * p.groups * parts(p);
  const auto run = [&](auto real) {
    using Real = decltype(real);
    return launch(mix_back_kernel<Real>, units, THREADS, (T * ROW + T) * sizeof(Real), stream, p, s,
                  b);
  };
  return p.dtype == Dtype::float64 ? run(double{}) : run(float{});
}

inline const char* run_finish_back(const Problem& p, const Steps& s, const Backward& b,
                                   void* stream) {
  return with_packs(p, {}, [&](auto stored, auto v, int64_t packs) -> const char* {
    using Stored = decltype(stored);
    constexpr int V = decltype(v)::value;
    const int64_t shared =
        (THREADS / WARP + STEPS_SCRATCH) * sizeof(double) + 2 * T * sizeof(Real<Stored>);
    if (auto e = launch(steps_back_kernel<Stored>, heads_of(p), THREADS, shared, stream, p, s, b))
      return e;
    return over(packs, finish_back_kernel<Stored, V>, stream, p, s, b);
  });
}

}  // namespace fuseport::ssd_chunk_scan::cuda
