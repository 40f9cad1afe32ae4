// The kernels for CUDA, for all dtypes; ops/cuda.py compiles this file with nvcc.
#include <type_traits>

#include "native/cuda_vectors.cuh"
#include "swiglu/cuda.hpp"

namespace fuseport::swiglu::cuda {
namespace {

using namespace fuseport::cuda;

constexpr int THREADS = 256;

// Calls work(row, channel) for each V channels, over all threads of a grid.
template <int V, class Work>
FUSEPORT_DEVICE void for_each(const Problem& p, const Work& work) {
  const int64_t packs = p.channels / V;
  for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < p.rows * packs;
       i += gridDim.x * (int64_t)THREADS) {
    const int64_t row = quotient_of(i, packs);
    work(row, (i - row * packs) * V);
  }
}

template <int V, class Stored>
FUSEPORT_DEVICE void load(const Rows& rows, int64_t row, int64_t channel, Real<Stored>* to) {
  load_at_once<V>((const Stored*)rows.data + row * rows.stride + channel, to);
}

template <int V, class Stored>
FUSEPORT_DEVICE void store(const Real<Stored>* from, const MutableRows& rows, int64_t row,
                           int64_t channel) {
  store_at_once<V>(from, (Stored*)rows.data + row * rows.stride + channel);
}

template <class Stored, int V>
__global__ void __launch_bounds__(THREADS) forward_kernel(Problem p, MutableRows out) {
  using Real = cuda::Real<Stored>;
  for_each<V>(p, [&](int64_t row, int64_t channel) {
    Real g[V], u[V];
    load<V, Stored>(p.gate, row, channel, g);
    load<V, Stored>(p.up, row, channel, u);
#pragma unroll
    for (int i = 0; i < V; ++i) g[i] = g[i] * logistic_of<Stored>(g[i]) * u[i];
    store<V, Stored>(g, out, row, channel);
  });
}

template <class Stored, int V>
__global__ void __launch_bounds__(THREADS) backward_kernel(Problem p, Backward b) {
  using Real = cuda::Real<Stored>;
  for_each<V>(p, [&](int64_t row, int64_t channel) {
    Real g[V], u[V], dy[V];
    load<V, Stored>(p.gate, row, channel, g);
    load<V, Stored>(p.up, row, channel, u);
    load<V, Stored>(b.dout, row, channel, dy);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const Real s = logistic_of<Stored>(g[i]), silu = g[i] * s;
      g[i] = dy[i] * u[i] * (s * (1 + g[i] * (1 - s)));
      u[i] = dy[i] * silu;
    }
    store<V, Stored>(g, b.dgate, row, channel);
    store<V, Stored>(u, b.dup, row, channel);
  });
}

// Calls run(Stored{}, V) with how many channels can be moved at once as an integral constant.
template <class Run, class... All>
const char* with_packs(const Problem& p, const Run& run, const All&... all) {
  if (p.rows * p.channels == 0) return nullptr;
  return with_dtype(p.dtype, [&](auto stored) {
    using Stored = decltype(stored);
    constexpr int V = VECTOR<Stored>;
    const bool whole =
        p.channels % V == 0 && (aligned<V, Stored>(all.data, p.rows > 1 ? all.stride : 0) && ...);
    return whole ? run(stored, std::integral_constant<int, V>{})
                 : run(stored, std::integral_constant<int, 1>{});
  });
}

inline int64_t blocks(const Problem& p, int v) {
  const int64_t count = p.rows * (p.channels / v), most = 32 * (int64_t)multiprocessors();
  const int64_t all = (count + THREADS - 1) / THREADS;
  return all < most ? all : most;
}

}  // namespace

const char* forward(const Problem& p, const MutableRows& out, void* stream) {
  const auto run = [&](auto stored, auto v) {
    constexpr int V = decltype(v)::value;
    return launch(forward_kernel<decltype(stored), V>, blocks(p, V), THREADS, 0, stream, p, out);
  };
  return with_packs(p, run, p.gate, p.up, out);
}

const char* backward(const Problem& p, const Backward& b, void* stream) {
  const auto run = [&](auto stored, auto v) {
    constexpr int V = decltype(v)::value;
    return launch(backward_kernel<decltype(stored), V>, blocks(p, V), THREADS, 0, stream, p, b);
  };
  return with_packs(p, run, p.gate, p.up, b.dout, b.dgate, b.dup);
}

}  // namespace fuseport::swiglu::cuda
