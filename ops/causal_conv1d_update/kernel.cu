// The kernel for CUDA, for all dtypes; ops/cuda.py compiles this file with nvcc.
#include "causal_conv1d_update/cuda.hpp"
#include "native/cuda_vectors.cuh"

namespace fuseport::causal_conv1d_update::cuda {
namespace {

using namespace fuseport::cuda;

constexpr int THREADS = 128;
constexpr int PIECE = 4;  // steps and slots of a thread, and what it asks for at once of a filter

struct Plan {
  bool weights = false, slots = false;  // whether PIECE numbers of them can be moved at once
  int64_t pieces = 0;                   // of a channel of a batch entry
};

// i modulo n, not negative.
FUSEPORT_DEVICE int64_t wrapped(int64_t i, int64_t n) {
  const int64_t up = i < 0 ? -1 - i : i, rest = up - quotient_of(up, n) * n;
  return i < 0 ? n - 1 - rest : rest;
}

// One channel of one batch entry.
template <class Stored, class Weight, bool CIRCULAR>
struct Series {
  using Value = Real<Stored>;
  const Problem& p;
  const Stored *x, *state;
  const Weight* weight;
  Value bias;
  int64_t first = 0, last = 0;  // slots of the first step and of the last, if it is circular

  FUSEPORT_DEVICE Series(const Problem& p, int64_t row) : p(p) {
    const int64_t batch = quotient_of(row, p.channels), channel = row - batch * p.channels;
    x = (const Stored*)p.x.data + batch * p.x.batch + channel * p.x.channel;
    state = (const Stored*)p.state.data + batch * p.state.batch + channel * p.state.channel;
    weight = (const Weight*)p.weight + channel * p.width;
    bias = to_real(((const Weight*)p.bias)[channel]);
    if constexpr (CIRCULAR) {
      first = wrapped(p.seqlens[batch], p.slots);
      last = wrapped(first + p.length - 1, p.slots);
    }
  }

  FUSEPORT_DEVICE Stored at(int64_t t, int64_t slot) const {
    return *(t >= 0 ? x + t * p.x.time : state + slot * p.state.time);
  }

  // Inputs before the first are in the last slots, or in the ones before that of the first.
  FUSEPORT_DEVICE Stored input(int64_t t) const {
    const int64_t slot = (CIRCULAR ? first : p.slots) + t;
    return at(t, CIRCULAR && slot < 0 ? slot + p.slots : slot);
  }

  // What comes of the last step that is kept in a slot; a negative one is there already.
  FUSEPORT_DEVICE Stored kept(int64_t slot) const {
    if constexpr (!CIRCULAR) return at(slot + p.length - p.slots, slot + p.length);
    const int64_t before = last - slot;
    return at(p.length - 1 - (before < 0 ? before + p.slots : before), slot);
  }

  FUSEPORT_DEVICE Value output(int64_t t, bool packs) const {
    Value y = bias;
    for (int64_t k = 0; k < p.width; k += PIECE) {
      const int count = (int)(p.width - k < PIECE ? p.width - k : PIECE);
      const auto weights = load_pack<PIECE>(weight + k, 1, count, packs);
      Pack<Stored, PIECE> inputs;
#pragma unroll
      for (int i = 0; i < PIECE; ++i)
        if (i < count) inputs.at[i] = input(t - (p.width - 1) + k + i);
#pragma unroll
      for (int i = 0; i < PIECE; ++i)
        if (i < count) y += to_real(weights.at[i]) * to_real(inputs.at[i]);
    }
    return p.silu ? y * logistic_of<Stored>(y) : y;
  }
};

// The sizes of nearly all steps, a token and a filter of WIDTH, with a state of SLOTS; any, if that
// is 0. Where they are known, little is left but to read numbers and to write them.
constexpr int WIDTH = 4;

template <class Stored, class Weight, bool CIRCULAR, int SLOTS>
__global__ void __launch_bounds__(THREADS) step_kernel(Problem p, Plan plan) {
  if constexpr (SLOTS > 0) {
    p.length = plan.pieces = 1;
    p.width = WIDTH;
    p.slots = SLOTS;
  }
  const int64_t all = p.batches * p.channels * plan.pieces;
  for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < all;
       i += gridDim.x * (int64_t)THREADS) {
    const int64_t row = quotient_of(i, plan.pieces), start = (i - row * plan.pieces) * PIECE;
    const Series<Stored, Weight, CIRCULAR> series(p, row);
    Pack<Stored, PIECE> kept;
#pragma unroll
    for (int j = 0; j < PIECE; ++j)
      if (start + j < p.slots) kept.at[j] = series.kept(start + j);
    for (int64_t t = start; t < start + PIECE && t < p.length; ++t)
      from_real(series.output(t, plan.weights), (Stored*)p.out + row * p.length + t);
    Stored* const slots = (Stored*)p.new_state + row * p.slots + start;
    if (plan.slots) {
      if (start < p.slots) *(Pack<Stored, PIECE>*)slots = kept;
    } else {
#pragma unroll
      for (int j = 0; j < PIECE; ++j)
        if (start + j < p.slots) slots[j] = kept.at[j];
    }
  }
}

template <class Stored, class Weight>
const char* run(const Problem& p, void* stream) {
  const int64_t longest = p.length < p.slots ? p.slots : p.length;
  Plan plan;
  plan.weights = aligned<PIECE, Weight>(p.weight, p.width);
  plan.slots = aligned<PIECE, Stored>(p.new_state, p.slots);
  plan.pieces = (longest + PIECE - 1) / PIECE;
  const int64_t blocks = (p.batches * p.channels * plan.pieces + THREADS - 1) / THREADS;
  if (blocks == 0) return nullptr;
  auto* kernel = step_kernel<Stored, Weight, false, 0>;
  if (p.circular) {
    kernel = step_kernel<Stored, Weight, true, 0>;
  } else if (p.length == 1 && p.width == WIDTH && p.slots == WIDTH) {
    kernel = step_kernel<Stored, Weight, false, WIDTH>;
  } else if (p.length == 1 && p.width == WIDTH && p.slots == WIDTH - 1) {
    kernel = step_kernel<Stored, Weight, false, WIDTH - 1>;
  }
  return launch(kernel, blocks, THREADS, 0, stream, p, plan);
}

}  // namespace

const char* step(const Problem& p, void* stream) {
  return with_dtype(p.dtype, [&](auto stored) {
    using Stored = decltype(stored);
    return p.wide_weight ? run<Stored, Real<Stored>>(p, stream) : run<Stored, Stored>(p, stream);
  });
}

}  // namespace fuseport::causal_conv1d_update::cuda
