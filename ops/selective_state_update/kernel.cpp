// The kernel for one instruction set, FUSEPORT_ISA; build.py compiles this file for each.
#include "selective_state_update/kernel.hpp"

#include "native/blocks.hpp"

namespace fuseport::selective_state_update::FUSEPORT_ISA {

using namespace fuseport::FUSEPORT_ISA;

namespace {

// States of a channel, up to whole vectors.
template <class F>
FUSEPORT_INLINE int64_t padded(const Problem& p) {
  return (p.states + F::LANES - 1) / F::LANES * F::LANES;
}

// Rows of as many channels as a vector has lanes: states and A; then B, C and four rows of channels.
template <class F>
static int64_t bytes(const Problem& p) {
  return (int64_t)sizeof(typename F::Real) * ((2 * F::LANES + 2) * padded<F>(p) + 4 * BLOCK);
}

int64_t scratch(const Problem& p) {
  return p.dtype == Dtype::float64 ? bytes<F64>(p) : bytes<F32>(p);
}

template <class F, class Stored>
FUSEPORT_INLINE void load_channels(const Strided& s, int64_t batch, int64_t head, int64_t channel,
                                   int count, typename F::Real* row) {
  const Stored* from =
      (const Stored*)s.data + batch * s.batch + head * s.head + channel * s.channel;
  memset(row, 0, sizeof *row * BLOCK);
  load_block<F>(from, 0, s.channel, 1, count, row, BLOCK);
}

template <class F, class Stored, class StateStored>
static void update_unit(const Problem& p, int64_t unit, void* scratch) {
  using Real = typename F::Real;
  using Vector = typename F::Vector;
  constexpr int LANES = F::LANES;
  const int64_t batch = unit / p.blocks() / p.heads, head = unit / p.blocks() % p.heads;
  const int64_t channel = unit % p.blocks() * BLOCK, group = head / p.heads_per_group;
  const int count = (int)(p.channels - channel < BLOCK ? p.channels - channel : BLOCK);
  const int states = (int)p.states, row = (int)padded<F>(p);
  Real* h = (Real*)scratch;
  Real* A = h + LANES * row;
  Real* B = A + LANES * row;
  Real* C = B + row;
  Real* x = C + row;
  Real* step = x + BLOCK;
  Real* skip = step + BLOCK;
  Real* gate = skip + BLOCK;
  memset(scratch, 0, sizeof(Real) * (2 * LANES + 2) * row);

  load_channels<F, Stored>(p.x, batch, head, channel, count, x);
  load_channels<F, Real>(p.D, 0, head, channel, count, skip);
  load_channels<F, Stored>(p.dt, batch, head, channel, count, step);
  load_channels<F, Real>(p.dt_bias, 0, head, channel, count, gate);
  for (int c = 0; c < count; c += LANES) {
    Vector s = load<F>(step + c) + load<F>(gate + c);
    if (p.softplus) s = softplus<F>(s);
    store<F>(step + c, s);
  }
  if (p.z.data) load_channels<F, Stored>(p.z, batch, head, channel, count, gate);
  const Stored* from_B = (const Stored*)p.B.data + batch * p.B.batch + group * p.B.head;
  const Stored* from_C = (const Stored*)p.C.data + batch * p.C.batch + group * p.C.head;
  load_block<F>(from_B, 0, p.B.state, 1, states, B, row);
  load_block<F>(from_C, 0, p.C.state, 1, states, C, row);

  const bool one_A = p.A.state == 0;  // for all states of a channel
  const int64_t first = (batch * p.heads + head) * p.channels + channel;
  Stored* out = (Stored*)p.out + first;
  for (int c = 0; c < count; c += LANES) {
    const int rows = count - c < LANES ? count - c : LANES;
    const StateStored* from = (const StateStored*)p.state.data + batch * p.state.batch +
                              head * p.state.head + (channel + c) * p.state.channel;
    const Real* from_A =
        (const Real*)p.A.data + head * p.A.head + (channel + c) * p.A.channel;
    load_block<F>(from, p.state.channel, p.state.state, rows, states, h, row);
    Real decays[LANES] = {};
    if (one_A) {
      for (int r = 0; r < rows; ++r) decays[r] = states ? from_A[r * p.A.channel] : (Real)0;
      store<F>(decays, exp<F>(load<F>(decays) * load<F>(step + c)));
    } else {
      load_block<F>(from_A, p.A.channel, p.A.state, rows, states, A, row);
    }
    Vector sums[LANES];
    for (int r = 0; r < LANES; ++r) {
      const Vector s = splat<F>(step[c + r]), inflow = s * splat<F>(x[c + r]);
      const Vector one = splat<F>(decays[r]);
      Vector sum{};
      for (int n = 0; n < row; n += LANES) {
        const Vector decay = one_A ? one : exp<F>(s * load<F>(A + r * row + n));
        const Vector now = decay * load<F>(h + r * row + n) + inflow * load<F>(B + n);
        store<F>(h + r * row + n, now);
        sum += first_lanes<F>(now * load<F>(C + n), states - n);
      }
      sums[r] = sum;
    }
    Vector y = sums_of_lanes<F>(sums) + load<F>(skip + c) * load<F>(x + c);
    if (p.z.data) {
      const Vector z = load<F>(gate + c);
      y = y * z * logistic<F>(z);
    }
    Real ys[LANES];
    store<F>(ys, y);
    for (int r = 0; r < rows; ++r) from_real(ys[r], out + c + r);
    store_block<F>(h, row, rows, states, (StateStored*)p.new_state + (first + c) * p.states,
                   p.states, 1);
  }
}

void update(const Problem& p, int64_t unit, void* scratch) {
#define FUSEPORT_CALL(F, Stored)                                                        \
  return p.wide_state ? update_unit<F, Stored, typename F::Real>(p, unit, scratch)      \
                      : update_unit<F, Stored, Stored>(p, unit, scratch)
  switch (p.dtype) {
    case Dtype::float16:
      FUSEPORT_CALL(F32, Half);
    case Dtype::bfloat16:
      FUSEPORT_CALL(F32, BFloat16);
    case Dtype::float32:
      return update_unit<F32, float, float>(p, unit, scratch);
    case Dtype::float64:
      return update_unit<F64, double, double>(p, unit, scratch);
  }
#undef FUSEPORT_CALL
}

}  // namespace

const Kernels table{scratch, update};

}  // namespace fuseport::selective_state_update::FUSEPORT_ISA
