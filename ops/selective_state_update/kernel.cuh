// The state update on CUDA.
#pragma once

#include "native/cuda_vectors.cuh"
#include "selective_state_update/cuda.hpp"

namespace fuseport::selective_state_update::cuda {

using namespace fuseport::cuda;

constexpr int THREADS = 128;

// Channels of a thread, whose states are asked for before the first is used.
template <class Stored>
constexpr int CHANNELS = sizeof(Stored) == 8 ? 2 : 4;

struct Plan {
  bool packs = false;      // whether packs can be moved at once
  bool one_A = false;      // whether a channel has one A for all of its states
  int lanes = 1;           // threads that share the states of a channel
  int64_t rounds = 0;      // packs of a thread for each channel
  int64_t blocks = 0;      // of a head's channels
};

template <class Stored>
FUSEPORT_DEVICE const Stored* at(const Strided& s, int64_t batch, int64_t head, int64_t channel) {
  return (const Stored*)s.data + batch * s.batch + head * s.head + channel * s.channel;
}

// V states of a thread: whole packs where they are aligned; else numbers that lie LANES apart, so that
// threads in a row read numbers in a row.
template <class Stored, int V>
struct Seat {
  int64_t first, step, states;
  bool packs;

  FUSEPORT_DEVICE Seat(const Problem& p, const Plan& plan, int lane, int64_t round)
      : first(plan.packs ? (round * plan.lanes + lane) * V : round * plan.lanes * V + lane),
        step(plan.packs ? 1 : plan.lanes),
        states(p.states),
        packs(plan.packs) {}

  FUSEPORT_DEVICE bool any() const { return first < states; }
  FUSEPORT_DEVICE bool has(int i) const { return first + i * step < states; }

  template <class Other>
  FUSEPORT_DEVICE Pack<Other, V> load(const Other* from, int64_t stride) const {
    if (packs) return *(const Pack<Other, V>*)(from + first);
    Pack<Other, V> pack;
#pragma unroll
    for (int i = 0; i < V; ++i)
      pack.at[i] = has(i) ? from[(first + i * step) * stride] : Other{};
    return pack;
  }

  FUSEPORT_DEVICE void store(const Pack<Stored, V>& pack, Stored* to) const {
    if (packs) {
      *(Pack<Stored, V>*)(to + first) = pack;
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i)
        if (has(i)) to[first + i * step] = pack.at[i];
    }
  }
};

// What a channel's states share.
template <class Stored>
struct Step {
  using Value = Real<Stored>;
  Value exponent, inflow;  // of exp(δ·A), as one of two; δ·x

  FUSEPORT_DEVICE Step(const Problem& p, int64_t batch, int64_t head, int64_t channel) {
    const Value raw = to_real(*at<Stored>(p.dt, batch, head, channel)) +
                      *at<Value>(p.dt_bias, 0, head, channel);
    const Value step = p.softplus ? softplus(raw) : raw;
    exponent = step * (Value)0x1.71547652b82fep0;
    inflow = step * to_real(*at<Stored>(p.x, batch, head, channel));
  }
};

// Of a block, some rows of `lanes` threads have each some channels of one head.
template <class Stored, class StateStored>
__global__ void __launch_bounds__(THREADS) update_kernel(Problem p, Plan plan) {
  using Value = Real<Stored>;
  constexpr int V = VECTOR<StateStored>, COUNT = CHANNELS<Stored>;
  const int lane = (int)threadIdx.x % plan.lanes, row = (int)threadIdx.x / plan.lanes;
  const int rows = THREADS / plan.lanes;
  const int64_t units = p.batches * p.heads * plan.blocks;
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int64_t both = quotient_of(unit, plan.blocks), block = unit - both * plan.blocks;
    const int64_t batch = quotient_of(both, p.heads), head = both - batch * p.heads;
    const int64_t group = quotient_of(head, p.heads_per_group);
    // Rows take channels in turn, so that their outputs lie in a row.
    const int64_t channel = block * rows * COUNT + row;
    Value sums[COUNT] = {};
    for (int64_t round = 0; round < plan.rounds; ++round) {
      const Seat<StateStored, V> seat(p, plan, lane, round);
      if (!seat.any()) break;
      Pack<StateStored, V> states[COUNT];
#pragma unroll
      for (int j = 0; j < COUNT; ++j)
        if (const int64_t c = channel + j * rows; c < p.channels)
          states[j] = seat.load(at<StateStored>(p.state, batch, head, c), p.state.state);
      const Pack<Stored, V> B = seat.load(at<Stored>(p.B, batch, group, 0), p.B.state);
      const Pack<Stored, V> C = seat.load(at<Stored>(p.C, batch, group, 0), p.C.state);
#pragma unroll
      for (int j = 0; j < COUNT; ++j) {
        const int64_t c = channel + j * rows;
        if (c >= p.channels) break;
        const Step<Stored> step(p, batch, head, c);
        const Value* const rates = at<Value>(p.A, 0, head, c);
        Pack<Value, V> A;
        Value decay = 0;
        if (plan.one_A) {
          decay = exp2_of(step.exponent * *rates);
        } else {
          A = seat.load(rates, p.A.state);
        }
#pragma unroll
        for (int i = 0; i < V; ++i) {
          if (!plan.one_A) decay = exp2_of(step.exponent * A.at[i]);
          const Value now = decay * to_real(states[j].at[i]) + step.inflow * to_real(B.at[i]);
          from_real(now, &states[j].at[i]);
          if (plan.packs || seat.has(i)) sums[j] += now * to_real(C.at[i]);
        }
        seat.store(states[j], (StateStored*)p.new_state + (both * p.channels + c) * p.states);
      }
    }
    for (int mask = plan.lanes / 2; mask > 0; mask /= 2)
#pragma unroll
      for (int j = 0; j < COUNT; ++j) sums[j] += shuffled(sums[j], mask);
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
      const int64_t c = channel + j * rows;
      if (c >= p.channels || lane != j % plan.lanes) continue;
      Value y = sums[j] + *at<Value>(p.D, 0, head, c) * to_real(*at<Stored>(p.x, batch, head, c));
      if (p.z.data) {
        const Value z = to_real(*at<Stored>(p.z, batch, head, c));
        y *= z * logistic_of<Stored>(z);
      }
      from_real(y, (Stored*)p.out + both * p.channels + c);
    }
  }
}

template <class Stored, class StateStored>
Plan plan_of(const Problem& p) {
  constexpr int V = VECTOR<StateStored>;
  Plan plan;
  plan.one_A = p.A.state == 0;
  const auto packed = [&]<class Number>(const Strided& s, Number) {
    return s.state == 1 && aligned<V, Number>(s.data, s.batch, s.head, s.channel);
  };
  plan.packs = p.states % V == 0 && packed(p.state, StateStored{}) && packed(p.B, Stored{}) &&
               packed(p.C, Stored{}) && (plan.one_A || packed(p.A, Real<Stored>{}));
  const int64_t packs = (p.states + V - 1) / V;
  while (plan.lanes < 32 && plan.lanes < packs) plan.lanes *= 2;
  plan.rounds = (packs + plan.lanes - 1) / plan.lanes;
  const int64_t channels = THREADS / plan.lanes * CHANNELS<Stored>;
  plan.blocks = (p.channels + channels - 1) / channels;
  return plan;
}

template <class Stored, class StateStored>
const char* run(const Problem& p, void* stream) {
  const Plan plan = plan_of<Stored, StateStored>(p);
  return launch(update_kernel<Stored, StateStored>, p.batches * p.heads * plan.blocks, THREADS, 0,
                stream, p, plan);
}

}  // namespace fuseport::selective_state_update::cuda
