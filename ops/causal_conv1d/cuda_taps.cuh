// What the kernels of the causal convolution on CUDA share: taps of a filter that is held in
// registers, states before the first step and after the last one, sequences.
#pragma once

#include "causal_conv1d/cuda.hpp"
#include "native/cuda_vectors.cuh"

namespace fuseport::causal_conv1d::cuda {

using namespace fuseport::cuda;

constexpr int T = 4;           // taps of the widest filter that is held in registers
constexpr int BEFORE = T - 1;  // steps before the one that is computed
constexpr int THREADS = 128;

// Channels of a thread where they lie in a row: rows of 8 bytes are aligned in most projections that
// are split, and gradients of the weights have to be in registers too.
template <class Stored>
constexpr int CHANNELS = sizeof(Stored) == 8 ? 2 : 4;
constexpr int SUMS = T + 1;  // of gradients: those of the taps by their lag, and of the bias

// Of a thread, the row in its block: their number is known, and `lanes` need not be divided by.
FUSEPORT_DEVICE uint32_t row_of(const Plan& plan) {
  return threadIdx.x * (uint32_t)plan.rows / THREADS;
}

// The sequence that step t of a batch entry is of; -1, as padding is, where there is no such step.
FUSEPORT_DEVICE int32_t sequence_at(const Problem& p, int64_t batch, int64_t t) {
  return t >= 0 && t < p.length ? p.seq_idx[batch * p.length + t] : -1;
}

template <class Stored>
FUSEPORT_DEVICE const Stored* at(const Sequence& s, int64_t batch, int64_t channel, int64_t t) {
  return (const Stored*)s.data + batch * s.batch + channel * s.channel + t * s.time;
}

template <class Stored>
FUSEPORT_DEVICE Stored* at(const MutableSequence& s, int64_t batch, int64_t channel, int64_t t) {
  return (Stored*)s.data + batch * s.batch + channel * s.channel + t * s.time;
}

// Whether step t is in the final states, of packed sequences: it is of the last step's.
FUSEPORT_DEVICE bool in_last(const Problem& p, int64_t batch, int64_t t) {
  const int32_t last = sequence_at(p, batch, p.length - 1);
  return last >= 0 && sequence_at(p, batch, t) == last;
}

// A pack as it is held until it is used. Numbers of 16 bits would be taken apart as soon as they
// are there: each load would be waited for before the next is asked for.
template <class Stored, int V>
using Words = Pack<uint32_t, V * (int)sizeof(Stored) / 4>;

// Of V numbers that are aligned in memory. The compiler has to be told so, or it moves bytes.
template <int V, class Stored>
FUSEPORT_DEVICE Words<Stored, V> load_words(const Stored* from) {
  Words<Stored, V> words;
  memcpy(&words, __builtin_assume_aligned(from, sizeof words), sizeof words);
  return words;
}

template <class Stored, int V>
FUSEPORT_DEVICE Words<Stored, V> words_of(const Pack<Stored, V>& pack) {
  Words<Stored, V> words;
  memcpy(&words, &pack, sizeof words);
  return words;
}

template <class Stored, int WORDS>
FUSEPORT_DEVICE void to_reals(const Pack<uint32_t, WORDS>& words, Real<Stored>* to) {
  if constexpr (sizeof(Stored) == 2) {
#pragma unroll
    for (int i = 0; i < 2 * WORDS; ++i)
      to[i] = to_real(Stored{(uint16_t)(words.at[i / 2] >> i % 2 * 16)});
  } else {
    memcpy(to, &words, sizeof words);
  }
}

// The cotangent of what goes into the activation, y, from that of what comes out.
template <class Stored>
FUSEPORT_DEVICE Real<Stored> before_silu(Real<Stored> dy, Real<Stored> y) {
  const Real<Stored> sigma = logistic_of<Stored>(y);
  return dy * (sigma * (1 + y * (1 - sigma)));
}

// Weights of V channels by lag: lag 0 is the last tap. Those that the filter has not are zero, and
// are not used, for zero times infinity is none. FULL says that it has all of them.
template <class Stored, int V, bool FULL>
struct Filter {
  Real<Stored> tap[T][V], bias[V];
  int width;

  Filter() = default;
  FUSEPORT_DEVICE bool has(int lag) const { return FULL || lag < width; }

  FUSEPORT_DEVICE Filter(const Problem& p, int64_t channel) : width((int)p.width) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const int64_t c = channel + i;
      bias[i] = real_or_stored<Stored>(p.bias, p.wide_weight, c);
#pragma unroll
      for (int lag = 0; lag < T; ++lag)
        tap[lag][i] = has(lag) ? real_or_stored<Stored>(p.weight, p.wide_weight,
                                                        c * width + width - 1 - lag)
                               : Real<Stored>(0);
    }
  }
};

// An input at a step before the first: an initial state, or zero.
template <class Stored>
FUSEPORT_DEVICE Stored input_before(const Problem& p, int64_t batch, int64_t channel, int64_t t) {
  const int64_t state = t + p.width - 1;
  return state >= 0 && !p.packed ? *at<Stored>(p.initial, batch, channel, state) : Stored{};
}

// The j-th of the last W-1 inputs of a channel; of packed sequences, those of the last step's.
template <class Stored>
FUSEPORT_DEVICE void write_final_state(const Problem& p, const Forward& f, int64_t batch,
                                       int64_t channel, int64_t j) {
  const int64_t halo = p.width - 1, t = p.length - halo + j;
  Stored x{};
  if (t < 0) {
    x = input_before<Stored>(p, batch, channel, t);
  } else if (!p.packed || in_last(p, batch, t)) {
    x = *at<Stored>(p.x, batch, channel, t);
  }
  ((Stored*)f.final_states)[(batch * p.channels + channel) * halo + j] = x;
}

}  // namespace fuseport::causal_conv1d::cuda
