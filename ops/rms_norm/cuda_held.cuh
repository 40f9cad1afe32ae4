// Norms on CUDA where registers hold a group of channels, and packs of 16 bytes are aligned.
#pragma once

#include "rms_norm/cuda_rows.cuh"

namespace fuseport::rms_norm::cuda {

constexpr int PACKS = 4;  // of a thread
constexpr int MOST_LANES = 512;

// A thread's packs of a group: pack k is at channel (k·lanes + lane)·V.
template <class Stored>
struct Seat {
  static constexpr int V = VECTOR<Stored>;
  int lanes, lane, slot, slots, packs;

  FUSEPORT_DEVICE Seat(const Problem& p, const Plan& plan)
      : lanes(plan.lanes),
        lane((int)threadIdx.x & (plan.lanes - 1)),
        slot((int)threadIdx.x >> plan.lane_bits),
        slots(plan.threads >> plan.lane_bits),
        packs((int)(p.group / V)) {}

  FUSEPORT_DEVICE bool has(int k) const { return k * lanes + lane < packs; }
  FUSEPORT_DEVICE int channel(int k) const { return (k * lanes + lane) * V; }

  // Those of a row, from the group's first number on.
  FUSEPORT_DEVICE void load(const void* data, int64_t begin, bool there,
                            Pack<Stored, V> (&packs)[PACKS]) const {
    const Stored* const from = (const Stored*)data + begin;
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
      if (there && has(k)) packs[k] = *(const Pack<Stored, V>*)(from + channel(k));
  }

  FUSEPORT_DEVICE void weights(const Problem& p, int64_t begin, int k, Real<Stored> (&w)[V]) const {
    if (p.weight_dtype == p.dtype) {
      const Stored* const from = (const Stored*)p.weight + begin;
      const auto pack = *(const Pack<Stored, V>*)(from + channel(k));
      to_reals(pack, w);
    } else {
      const Real<Stored>* const from = (const Real<Stored>*)p.weight + begin;
      const auto pack = *(const Pack<Real<Stored>, V>*)(from + channel(k));
      to_reals(pack, w);
    }
  }

  FUSEPORT_DEVICE void store(const Real<Stored>* from, void* to, int64_t begin, int k) const {
    store_vector(from, ((Stored*)to + begin) + channel(k));
  }
};

// A gate is made once: where it comes first, registers hold what is normalised, not x and z.
template <class Stored, Mode MODE>
__global__ void __launch_bounds__(MOST_LANES) forward_kernel(Problem p, Plan plan, Forward f) {
  using Value = Real<Stored>;
  constexpr int V = VECTOR<Stored>;
  constexpr bool GATED = MODE != Mode::plain;
  FUSEPORT_SHARED(memory);
  const Seat<Stored> seat(p, plan);
  const int64_t all = p.rows * plan.groups;
  for (int64_t first = blockIdx.x * (int64_t)seat.slots; first < all;
       first += gridDim.x * (int64_t)seat.slots) {
    const int64_t nth = first + seat.slot;
    const int64_t row = plan.groups == 1 ? nth : quotient_of(nth, plan.groups);
    const int64_t begin = (nth - row * plan.groups) * p.group;
    const bool there = nth < all;
    Pack<Stored, V> x[PACKS], z[PACKS];
    seat.load(p.x.data, begin_of(p, p.x, row) + begin, there, x);
    if (GATED) seat.load(p.z.data, begin_of(p, p.z, row) + begin, there, z);
    Value v[PACKS][V], squares = 0;
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
      if (there && seat.has(k))
#pragma unroll
        for (int i = 0; i < V; ++i) {
          v[k][i] = to_real(x[k].at[i]);
          if (MODE == Mode::gate_first) v[k][i] *= Gate<Stored>(to_real(z[k].at[i])).silu;
          squares += v[k][i] * v[k][i];
        }
    squares = sum_over_threads(squares, plan.lanes, (Value*)memory);
    const Value rstd = inverse_root(squares / (Value)p.group + (Value)p.eps);
    if (!there) continue;
    if (seat.lane == 0) ((Value*)f.rstd)[nth] = rstd;
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
      if (seat.has(k)) {
        Value weight[V], y[V];
        seat.weights(p, begin, k, weight);
#pragma unroll
        for (int i = 0; i < V; ++i) {
          const Value x_or_v = MODE == Mode::gate_first ? v[k][i] : to_real(x[k].at[i]);
          y[i] = x_or_v * rstd * weight[i];
          if (MODE == Mode::norm_first) y[i] *= Gate<Stored>(to_real(z[k].at[i])).silu;
        }
        seat.store(y, f.out, row * p.channels + begin, k);
      }
  }
}

// A block has one group of channels, and its slots every so many rows.
template <class Stored, bool GATED>
__global__ void __launch_bounds__(MOST_LANES)
    backward_kernel(Problem p, Plan plan, Gradients b, Real<Stored>* parts) {
  using Value = Real<Stored>;
  constexpr int V = VECTOR<Stored>;
  FUSEPORT_SHARED(memory);
  const Seat<Stored> seat(p, plan);
  const int64_t groups = plan.groups;
  for (int64_t unit = blockIdx.x; unit < plan.parts * groups; unit += gridDim.x) {
    const int64_t part = quotient_of(unit, groups), group = unit - part * groups;
    const int64_t begin = group * p.group;
    Value sums[PACKS][V] = {};
    for (int64_t first = part * seat.slots; first < p.rows; first += plan.parts * seat.slots) {
      const int64_t row = first + seat.slot;
      const bool there = row < p.rows;
      Pack<Stored, V> x[PACKS], dy[PACKS], z[PACKS];
      seat.load(p.x.data, begin_of(p, p.x, row) + begin, there, x);
      seat.load(b.dout.data, begin_of(p, b.dout, row) + begin, there, dy);
      if (GATED) seat.load(p.z.data, begin_of(p, p.z, row) + begin, there, z);
      const Value rstd = there ? ((const Value*)b.rstd)[row * groups + group] : 0;
      Value sum = 0;
#pragma unroll
      for (int k = 0; k < PACKS; ++k)
        if (there && seat.has(k)) {
          Value weight[V];
          seat.weights(p, begin, k, weight);
#pragma unroll
          for (int i = 0; i < V; ++i) {
            const Value gate = GATED ? to_real(z[k].at[i]) : 0;
            sum += Number<Stored, GATED>(p, to_real(x[k].at[i]), gate, weight[i])
                       .product(to_real(dy[k].at[i]));
          }
        }
      sum = sum_over_threads(sum, plan.lanes, (Value*)memory);
      const Value mean = sum * rstd / (Value)p.group;
      if (!there) continue;
#pragma unroll
      for (int k = 0; k < PACKS; ++k)
        if (seat.has(k)) {
          Value weight[V], dx[V], dz[V];
          seat.weights(p, begin, k, weight);
#pragma unroll
          for (int i = 0; i < V; ++i) {
            const Value gate = GATED ? to_real(z[k].at[i]) : 0;
            sums[k][i] += Number<Stored, GATED>(p, to_real(x[k].at[i]), gate, weight[i])
                              .back(to_real(dy[k].at[i]), rstd, mean, dx + i, dz + i);
          }
          seat.store(dx, b.dx, row * p.channels + begin, k);
          if (GATED) seat.store(dz, b.dz, row * p.channels + begin, k);
        }
    }
    // Slots in their order.
    Value* const shared = (Value*)memory;
#pragma unroll
    for (int k = 0; k < PACKS; ++k) {
      if (seat.slots > 1) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < V; ++i) shared[(int)threadIdx.x * V + i] = sums[k][i];
        __syncthreads();
      }
      if (seat.slot > 0 || !seat.has(k)) continue;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        Value sum = sums[k][i];
        for (int slot = 1; slot < seat.slots; ++slot)
          sum += shared[(slot * seat.lanes + seat.lane) * V + i];
        parts[part * p.channels + begin + seat.channel(k) + i] = sum;
      }
    }
  }
}

}  // namespace fuseport::rms_norm::cuda
