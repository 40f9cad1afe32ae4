// The kernels for CUDA, for all dtypes; ops/cuda.py compiles this file with nvcc.
//
// Forward, the threads of a row read it once: each keeps the largest of its logits and the sum of
// exponentials under that, and two such pairs make one, in an order that shapes decide (Milakov and
// Gimelshein, "Online normalizer calculation for softmax", 2018).
#include <cfloat>
#include <cmath>
#include <type_traits>

#include "native/cuda_vectors.cuh"
#include "softmax_cross_entropy/cuda.hpp"

namespace fuseport::softmax_cross_entropy::cuda {
namespace {

using namespace fuseport::cuda;

constexpr int THREADS = 512;          // of a block
constexpr int64_t NARROW = 2048;      // classes of a row that one warp has
constexpr int64_t PACKS_AT_ONCE = 8;  // of a thread, backward: what is more is another block's

// exp(z), for z ≤ 0, as exactly as a number that is stored so can say.
template <class Stored>
FUSEPORT_DEVICE Real<Stored> exp_of_less(Real<Stored> z) {
  if constexpr (sizeof(Stored) == 2) {
    return exp2_of(z * 0x1.715476p0f);
  } else {
    return exp_of_minus_abs(z);
  }
}

template <class Real>
FUSEPORT_DEVICE Real larger(Real x, Real y) {
  return y > x || y != y ? y : x;  // NaN wins
}

// Calls pack(i) for each V numbers of a row from number i on that are aligned, and one(i) for each of
// the others, over `lanes` threads of which this is number `lane`.
template <int V, class Stored, class PackWork, class OneWork>
FUSEPORT_DEVICE void for_each(const Stored* row, int64_t count, int lane, int lanes,
                              const PackWork& pack, const OneWork& one) {
  const int64_t beyond = (int64_t)((uintptr_t)row / sizeof(Stored) % V);
  const int64_t lead = beyond == 0 ? 0 : V - beyond < count ? V - beyond : count;
  const int64_t packs = (count - lead) / V, last = lead + packs * V;
  for (int64_t i = lane; i < packs; i += lanes) pack(lead + i * V);
  for (int64_t i = lane; i < count - packs * V; i += lanes) one(i < lead ? i : last + i - lead);
}

// Of some logits: the largest, the sum of exponentials of what they are less that, and their sum.
template <class Stored>
struct Running {
  using Value = Real<Stored>;
  static constexpr Value LOWEST = sizeof(Value) == 8 ? (Value)-DBL_MAX : (Value)-FLT_MAX;
  Value largest = LOWEST;
  double total = 0, sum = 0;

  template <int V>
  FUSEPORT_DEVICE void add(const Value* x, bool smooth) {
    Value most = x[0], share = 0;
#pragma unroll
    for (int i = 1; i < V; ++i) most = larger(most, x[i]);
    most = larger(largest, most);
    if (most != largest) total *= (double)exp_of_less<Stored>(largest - most);
    largest = most;
#pragma unroll
    for (int i = 0; i < V; ++i) share += exp_of_less<Stored>(x[i] - most);
    total += (double)share;
    if (smooth)
#pragma unroll
      for (int i = 0; i < V; ++i) sum += (double)x[i];
  }

  FUSEPORT_DEVICE void merge(const Running& other) {
    const Value most = larger(largest, other.largest);
    total = total * (double)exp_of_less<Stored>(largest - most) +
            other.total * (double)exp_of_less<Stored>(other.largest - most);
    largest = most;
    sum += other.sum;
  }

  FUSEPORT_DEVICE Running of_other(int mask) const {
    return {shuffled(largest, mask), shuffled(total, mask), shuffled(sum, mask)};
  }
};

template <class Stored>
FUSEPORT_DEVICE void store_row(const Problem& p, const Forward& f, int64_t r,
                               const Running<Stored>& row) {
  using Value = Real<Stored>;
  // Where all logits are -Inf, none was above the lowest number.
  const bool none = row.total == 0;
  const double largest = none ? -INFINITY : (double)row.largest;
  const double total = none ? (double)NAN : row.total;
  const int64_t target = p.targets[r];
  double loss = 0;
  if (target != p.ignore_index) {
    const bool there = target >= 0 && target < p.classes;
    const Stored* const logits = (const Stored*)p.logits + r * p.stride;
    const Value chosen = there ? to_real(logits[target]) : (Value)NAN;
    double aim = (1 - p.label_smoothing) * ((double)chosen - largest);
    if (p.label_smoothing > 0)  // else classes ruled out by -Inf would count
      aim += p.label_smoothing * (row.sum / (double)p.classes - largest);
    loss = ::log(total) - aim;
  }
  ((Value*)f.losses)[r] = (Value)loss;
  ((Value*)f.largest)[r] = (Value)largest;
  ((Value*)f.total)[r] = (Value)total;
}

// LANES threads have a row: a warp, or a block.
template <class Stored, int LANES>
__global__ void __launch_bounds__(THREADS) forward_kernel(Problem p, Forward f) {
  constexpr int V = VECTOR<Stored>, ROWS = THREADS / LANES;
  FUSEPORT_SHARED(memory);
  auto* const warps = (Running<Stored>*)memory;
  const int lane = (int)threadIdx.x % LANES;
  const bool smooth = p.label_smoothing > 0;
  for (int64_t first = blockIdx.x * (int64_t)ROWS; first < p.rows;
       first += gridDim.x * (int64_t)ROWS) {
    const int64_t r = first + threadIdx.x / LANES;
    Running<Stored> mine;
    if (r < p.rows) {
      const Stored* const row = (const Stored*)p.logits + r * p.stride;
      for_each<V>(
          row, p.classes, lane, LANES,
          [&](int64_t i) {
            Real<Stored> x[V];
            load_at_once<V>(row + i, x);
            mine.template add<V>(x, smooth);
          },
          [&](int64_t i) {
            const Real<Stored> x = to_real(row[i]);
            mine.template add<1>(&x, smooth);
          });
    }
    for (int mask = 16; mask > 0; mask /= 2) mine.merge(mine.of_other(mask));
    if constexpr (LANES > 32) {
      __syncthreads();
      if (lane % 32 == 0) warps[lane / 32] = mine;
      __syncthreads();
      if (lane == 0)
        for (int i = 1; i < LANES / 32; ++i) mine.merge(warps[i]);
    }
    if (lane == 0 && r < p.rows) store_row<Stored>(p, f, r, mine);
  }
}

// What a block of threads has of a row at once, where LANES threads have one.
template <class Stored, int LANES>
constexpr int64_t SHARE = LANES * PACKS_AT_ONCE * VECTOR<Stored>;

template <class Stored, int LANES, int V>
__global__ void __launch_bounds__(THREADS) backward_kernel(Problem p, Backward b, int64_t shares) {
  using Value = Real<Stored>;
  constexpr int ROWS = THREADS / LANES;
  const int lane = (int)threadIdx.x % LANES;
  const Value smooth = (Value)(p.label_smoothing / (double)p.classes);
  const Value sharp = (Value)(1 - p.label_smoothing) + smooth;
  for (int64_t unit = blockIdx.x * (int64_t)ROWS + threadIdx.x / LANES; unit < p.rows * shares;
       unit += gridDim.x * (int64_t)ROWS) {
    const int64_t r = quotient_of(unit, shares), start = (unit - r * shares) * SHARE<Stored, LANES>;
    const int64_t left = p.classes - start;
    const int64_t count = left < SHARE<Stored, LANES> ? left : SHARE<Stored, LANES>;
    const int64_t target = p.targets[r];
    const bool ignored = target == p.ignore_index;
    const Value largest = ((const Value*)b.largest)[r], total = ((const Value*)b.total)[r];
    const bool there = target >= 0 && target < p.classes;
    const Value dloss = ignored || there ? ((const Value*)b.dlosses)[r] : (Value)NAN;
    const Stored* const row = (const Stored*)p.logits + r * p.stride + start;
    Stored* const to = (Stored*)b.dlogits + r * p.classes + start;
    const auto gradient = [&](Value x, int64_t i) -> Value {
      const Value aim = start + i == target ? sharp : smooth;
      return ignored ? 0 : dloss * (exp_of_less<Stored>(x - largest) / total - aim);
    };
    for_each<V>(
        row, count, lane, LANES,
        [&](int64_t i) {
          Value x[V];
          load_at_once<V>(row + i, x);
#pragma unroll
          for (int j = 0; j < V; ++j) x[j] = gradient(x[j], i + j);
          store_at_once<V>(x, to + i);
        },
        [&](int64_t i) { from_real(gradient(to_real(row[i]), i), to + i); });
  }
}

// Calls run(Stored{}, LANES) with how many threads have a row as an integral constant.
template <class Run>
const char* with_lanes(const Problem& p, const Run& run) {
  if (p.rows == 0) return nullptr;
  return with_dtype(p.dtype, [&](auto stored) {
    return p.classes <= NARROW ? run(stored, std::integral_constant<int, 32>{})
                               : run(stored, std::integral_constant<int, THREADS>{});
  });
}

}  // namespace

const char* forward(const Problem& p, const Forward& f, void* stream) {
  return with_lanes(p, [&](auto stored, auto lanes) {
    using Stored = decltype(stored);
    constexpr int LANES = decltype(lanes)::value, ROWS = THREADS / LANES;
    const int64_t shared = THREADS / 32 * (int64_t)sizeof(Running<Stored>);
    return launch(forward_kernel<Stored, LANES>, (p.rows + ROWS - 1) / ROWS, THREADS, shared, stream,
                  p, f);
  });
}

const char* backward(const Problem& p, const Backward& b, void* stream) {
  return with_lanes(p, [&](auto stored, auto lanes) {
    using Stored = decltype(stored);
    constexpr int LANES = decltype(lanes)::value, ROWS = THREADS / LANES, V = VECTOR<Stored>;
    const int64_t shares = (p.classes + SHARE<Stored, LANES> - 1) / SHARE<Stored, LANES>;
    const int64_t blocks = (p.rows * shares + ROWS - 1) / ROWS;
    // Each row of gradients has the logits' place among 16 bytes.
    const int64_t apart = (int64_t)((uintptr_t)p.logits - (uintptr_t)b.dlogits);
    const bool alike =
        apart % 16 == 0 && (p.rows == 1 || (p.stride - p.classes) * (int64_t)sizeof(Stored) % 16 == 0);
    return alike ? launch(backward_kernel<Stored, LANES, V>, blocks, THREADS, 0, stream, p, b, shares)
                 : launch(backward_kernel<Stored, LANES, 1>, blocks, THREADS, 0, stream, p, b, shares);
  });
}

}  // namespace fuseport::softmax_cross_entropy::cuda
