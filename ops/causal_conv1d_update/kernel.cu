// The kernel for CUDA, for all dtypes; ops/cuda.py compiles this file with nvcc.
#include "causal_conv1d_update/cuda.hpp"
#include "native/cuda_vectors.cuh"

namespace fuseport::causal_conv1d_update::cuda {
namespace {

using namespace fuseport::cuda;

constexpr int THREADS = 128;

// i modulo n, not negative.
FUSEPORT_DEVICE int64_t wrapped(int64_t i, int64_t n) {
  const int64_t rest = i % n;
  return rest < 0 ? rest + n : rest;
}

// One channel of one batch entry.
template <class Stored>
struct Series {
  const Problem& p;
  int64_t batch, channel, first;  // the number of the first step

  FUSEPORT_DEVICE Series(const Problem& p, int64_t row) : p(p) {
    batch = quotient_of(row, p.channels);
    channel = row - batch * p.channels;
    first = p.circular ? p.seqlens[batch] : 0;
  }

  FUSEPORT_DEVICE Stored at(const Sequence& s, int64_t t) const {
    return ((const Stored*)s.data)[batch * s.batch + channel * s.channel + t * s.time];
  }

  // Inputs before the first are in the last slots, or in the ones before that of the first.
  FUSEPORT_DEVICE Stored input(int64_t t) const {
    if (t >= 0) return at(p.x, t);
    return at(p.state, p.circular ? wrapped(first + t, p.slots) : p.slots + t);
  }

  FUSEPORT_DEVICE Real<Stored> output(int64_t t) const {
    Real<Stored> y = real_or_stored<Stored>(p.bias, p.wide_weight, channel);
#pragma unroll 4
    for (int64_t k = 0; k < p.width; ++k)
      y += real_or_stored<Stored>(p.weight, p.wide_weight, channel * p.width + k) *
           to_real(input(t - (p.width - 1) + k));
    return p.silu ? y * logistic_of<Stored>(y) : y;
  }

  FUSEPORT_DEVICE Stored kept(int64_t slot) const {
    // The last step that is kept in this slot; a negative one is what the slot has already.
    int64_t t = slot + p.length - p.slots;
    if (p.circular) t = p.length - 1 - wrapped(first + p.length - 1 - slot, p.slots);
    if (t >= 0) return at(p.x, t);
    return at(p.state, p.circular ? slot : t + p.slots);
  }
};

template <class Stored>
__global__ void __launch_bounds__(THREADS) step_kernel(Problem p) {
  const int64_t each = p.length + p.slots, all = p.batches * p.channels * each;
  for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < all;
       i += gridDim.x * (int64_t)THREADS) {
    const int64_t row = quotient_of(i, each), j = i - row * each;
    const Series<Stored> series(p, row);
    if (j < p.length) {
      from_real(series.output(j), (Stored*)p.out + row * p.length + j);
    } else {
      ((Stored*)p.new_state)[row * p.slots + j - p.length] = series.kept(j - p.length);
    }
  }
}

}  // namespace

const char* step(const Problem& p, void* stream) {
  const int64_t all = p.batches * p.channels * (p.length + p.slots);
  if (all == 0) return nullptr;
  return with_dtype(p.dtype, [&](auto stored) {
    return launch(step_kernel<decltype(stored)>, (all + THREADS - 1) / THREADS, THREADS, 0, stream,
                  p);
  });
}

}  // namespace fuseport::causal_conv1d_update::cuda
