// The state update on CUDA.
#pragma once

#include "native/cuda_vectors.cuh"
#include "selective_state_update/cuda.hpp"

namespace fuseport::selective_state_update::cuda {

using namespace fuseport::cuda;

constexpr int THREADS = 128;

// LANES threads share the states of a channel. Each has COUNT packs of V of a tile, which mostly is
// all of the states; fewer, where registers hold an A for each, too. A pack is of states in a row
// where those can be moved at once; else of some that are LANES apart, so that threads in a row read
// numbers in a row.
template <int V_, bool PACKS_, bool ONE_A_>
struct Tile {
  static constexpr int V = V_, LANES = ONE_A_ ? 4 : 2, MOST = (ONE_A_ ? 32 : 8) / V;
  static constexpr bool PACKS = PACKS_, ONE_A = ONE_A_;
  static constexpr int COUNT = !PACKS ? 1 : MOST < 8 ? MOST : 8, STATES = COUNT * LANES * V;
  static constexpr int STEP = PACKS ? 1 : LANES, LANE = PACKS ? V : 1;

  // Where number i of pack k is, from the thread's first on.
  FUSEPORT_DEVICE static constexpr int place(int k, int i) { return k * LANES * V + i * STEP; }
};

// Those of a thread that are among the `count` from its first on.
template <class T, class Stored>
FUSEPORT_DEVICE Pack<Stored, T::V> load(const Stored* from, int64_t stride, int k, int count) {
  Pack<Stored, T::V> pack;
  if constexpr (T::PACKS) {
    if (T::place(k, 0) < count) pack = *(const Pack<Stored, T::V>*)(from + T::place(k, 0));
  } else {
#pragma unroll
    for (int i = 0; i < T::V; ++i)
      pack.at[i] = T::place(k, i) < count ? from[T::place(k, i) * stride] : Stored{};
  }
  return pack;
}

template <class T, class Stored>
FUSEPORT_DEVICE void store(const Pack<Stored, T::V>& pack, Stored* to, int k, int count) {
  if constexpr (T::PACKS) {
    if (T::place(k, 0) < count) *(Pack<Stored, T::V>*)(to + T::place(k, 0)) = pack;
  } else {
#pragma unroll
    for (int i = 0; i < T::V; ++i)
      if (T::place(k, i) < count) to[T::place(k, i)] = pack.at[i];
  }
}

template <class Stored>
FUSEPORT_DEVICE const Stored* at(const Strided& s, int64_t batch, int64_t head, int64_t channel) {
  return (const Stored*)s.data + batch * s.batch + head * s.head + channel * s.channel;
}

// A block has channels of one head.
template <class Stored, class StateStored, class T>
__global__ void __launch_bounds__(THREADS) update_kernel(Problem p, int64_t blocks) {
  using Value = Real<Stored>;
  constexpr int V = T::V, COUNT = T::COUNT, CHANNELS = THREADS / T::LANES;
  const int lane = (int)threadIdx.x % T::LANES, first = lane * T::LANE;
  for (int64_t unit = blockIdx.x; unit < p.batches * p.heads * blocks; unit += gridDim.x) {
    const int64_t both = quotient_of(unit, blocks), batch = quotient_of(both, p.heads);
    const int64_t head = both - batch * p.heads, group = quotient_of(head, p.heads_per_group);
    const int64_t own = (unit - both * blocks) * CHANNELS + threadIdx.x / T::LANES;
    const bool there = own < p.channels;
    const int64_t channel = there ? own : 0, to = both * p.channels + channel;
    const auto* state = at<StateStored>(p.state, batch, head, channel) + first * p.state.state;
    const auto* rates = at<Value>(p.A, 0, head, channel) + first * p.A.state;
    const auto* inputs = at<Stored>(p.B, batch, group, 0) + first * p.B.state;
    const auto* outputs = at<Stored>(p.C, batch, group, 0) + first * p.C.state;
    auto* new_state = (StateStored*)p.new_state + to * p.states + first;
    const Stored* const x = at<Stored>(p.x, batch, head, channel);
    const Stored* const dt = at<Stored>(p.dt, batch, head, channel);
    const Value* const dt_bias = at<Value>(p.dt_bias, 0, head, channel);
    const Value D = *at<Value>(p.D, 0, head, channel);
    const Stored skipped = *x;
    const Stored z = p.z.data ? *at<Stored>(p.z, batch, head, channel) : Stored{};
    Value sum = 0;
    for (int64_t start = 0; start < p.states; start += T::STATES) {
      const int64_t left = there ? p.states - start - first : 0;
      const int count = (int)(left < T::STATES ? left : T::STATES);
      Pack<StateStored, V> states[COUNT];
      Pack<Stored, V> B[COUNT], C[COUNT];
      Pack<Value, V> A[COUNT];
#pragma unroll
      for (int k = 0; k < COUNT; ++k) {
        states[k] = load<T>(state, p.state.state, k, count);
        if (!T::ONE_A) A[k] = load<T>(rates, p.A.state, k, count);
        B[k] = load<T>(inputs, p.B.state, k, count);
        C[k] = load<T>(outputs, p.C.state, k, count);
      }
      // No load passes this: all of the tile is asked for before what states share is waited for.
      sync_warp();
      const Value raw = to_real(*dt) + *dt_bias, positive = softplus(raw);
      const Value step = p.softplus ? positive : raw, inflow = step * to_real(*x);
      const Value exponent = step * (Value)0x1.71547652b82fep0;  // of exp(δ·A), as one of two
      Value decay = T::ONE_A ? exp2_of(exponent * *rates) : 0;
#pragma unroll
      for (int k = 0; k < COUNT; ++k) {
#pragma unroll
        for (int i = 0; i < V; ++i) {
          if (!T::ONE_A) decay = exp2_of(exponent * A[k].at[i]);
          const Value now = decay * to_real(states[k].at[i]) + inflow * to_real(B[k].at[i]);
          from_real(now, &states[k].at[i]);
          if (T::place(k, i) < count) sum += now * to_real(C[k].at[i]);
        }
        store<T>(states[k], new_state, k, count);
      }
      state += T::STATES * p.state.state;
      rates += T::STATES * p.A.state;
      inputs += T::STATES * p.B.state;
      outputs += T::STATES * p.C.state;
      new_state += T::STATES;
    }
#pragma unroll
    for (int mask = T::LANES / 2; mask > 0; mask /= 2) sum += shuffled(sum, mask);
    if (!there || lane > 0) continue;
    const Value y = sum + D * to_real(skipped), gate = to_real(z);
    from_real(p.z.data ? y * (gate * logistic_of<Stored>(gate)) : y, (Stored*)p.out + to);
  }
}

template <class Stored, class StateStored, bool PACKS, bool ONE_A>
const char* run_as(const Problem& p, void* stream) {
  using T = Tile<VECTOR<StateStored>, PACKS, ONE_A>;
  constexpr int CHANNELS = THREADS / T::LANES;
  const int64_t blocks = (p.channels + CHANNELS - 1) / CHANNELS;
  return launch(update_kernel<Stored, StateStored, T>, p.batches * p.heads * blocks, THREADS, 0,
                stream, p, blocks);
}

template <class Stored, class StateStored>
const char* run(const Problem& p, void* stream) {
  constexpr int V = VECTOR<StateStored>;
  const bool one_A = p.A.state == 0;
  const auto packed = [&]<class Number>(const Strided& s, Number) {
    return s.state == 1 && aligned<V, Number>(s.data, s.batch, s.head, s.channel);
  };
  const bool packs = p.states % V == 0 && packed(p.state, StateStored{}) && packed(p.B, Stored{}) &&
                     packed(p.C, Stored{}) && (one_A || packed(p.A, Real<Stored>{}));
  if (packs)
    return one_A ? run_as<Stored, StateStored, true, true>(p, stream)
                 : run_as<Stored, StateStored, true, false>(p, stream);
  return one_A ? run_as<Stored, StateStored, false, true>(p, stream)
               : run_as<Stored, StateStored, false, false>(p, stream);
}

}  // namespace fuseport::selective_state_update::cuda
