// The kernel for one instruction set, FUSEPORT_ISA; build.py compiles this file for each. Vectors
// go along channels: the state and a step of x are as short along time as these are long.
#include "causal_conv1d_update/kernel.hpp"

#include "native/blocks.hpp"

namespace fuseport::causal_conv1d_update::FUSEPORT_ISA {

using namespace fuseport::FUSEPORT_ISA;

namespace {

// Rows of BLOCK channels: weights by tap, the bias, the last W inputs in turn, an output.
template <class F>
struct Scratch {
  using Real = typename F::Real;
  Real *weight, *bias, *window, *out;
  int64_t bytes;

  Scratch(const Problem& p, void* base) {
    weight = (Real*)base;
    bias = weight + p.width * BLOCK;
    window = bias + BLOCK;
    out = window + p.width * BLOCK;
    bytes = (2 * p.width + 2) * BLOCK * (int64_t)sizeof(Real);
  }
};

// i modulo n, not negative.
FUSEPORT_INLINE int64_t wrapped(int64_t i, int64_t n) {
  const int64_t rest = i % n;
  return rest < 0 ? rest + n : rest;
}

template <class F, class Stored>
static void step_unit(const Problem& p, int64_t unit, void* scratch) {
  using Vector = typename F::Vector;
  using Real = typename F::Real;
  const Scratch<F> s(p, scratch);
  const int64_t batch = unit / p.blocks(), channel = unit % p.blocks() * BLOCK;
  const int channels = (int)(p.channels - channel < BLOCK ? p.channels - channel : BLOCK);
  const int64_t row = batch * p.channels + channel, halo = p.width - 1;
  const int64_t first = p.circular ? p.seqlens[batch] : 0;  // the first step's number
  const auto at = [&](const Sequence& of, int64_t t) {
    return (const Stored*)of.data + batch * of.batch + channel * of.channel + t * of.time;
  };
  // Inputs before the first are in the last slots, or in the ones before that of the first.
  const auto before = [&](int64_t t) {
    return at(p.state, p.circular ? wrapped(first + t, p.slots) : p.slots + t);
  };
  const auto load_weights = [&]<class Weight>(const Weight*) {
    load_block<F>((const Weight*)p.weight + channel * p.width, 1, p.width, (int)p.width, channels,
                  s.weight, BLOCK);
    load_block<F>((const Weight*)p.bias + channel, 1, 1, 1, channels, s.bias, BLOCK);
  };
  memset(s.weight, 0, s.bytes);
  p.wide_weight ? load_weights((const Real*)nullptr) : load_weights((const Stored*)nullptr);

  for (int64_t t = -halo; t < p.length; ++t) {
    Real* const now = s.window + wrapped(t, p.width) * BLOCK;
    if (t < 0) {
      load_block<F>(before(t), 0, p.state.channel, 1, channels, now, BLOCK);
      continue;
    }
    load_block<F>(at(p.x, t), 0, p.x.channel, 1, channels, now, BLOCK);
    for (int c = 0; c < channels; c += F::LANES) {
      Vector y = load<F>(s.bias + c);
      for (int64_t k = 0; k < p.width; ++k)
        y += load<F>(s.weight + k * BLOCK + c) *
             load<F>(s.window + wrapped(t - halo + k, p.width) * BLOCK + c);
      if (p.silu) y *= logistic<F>(y);
      store<F>(s.out + c, y);
    }
    store_block<F>(s.out, BLOCK, 1, channels, (Stored*)p.out + row * p.length + t, 0, p.length);
  }

  for (int64_t slot = 0; slot < p.slots; ++slot) {
    // The last step that is kept in this slot; a negative one is what the slot has already.
    int64_t t = slot + p.length - p.slots;
    if (p.circular) t = p.length - 1 - wrapped(first + p.length - 1 - slot, p.slots);
    const Sequence& of = t < 0 ? p.state : p.x;
    const Stored* from = at(of, t >= 0 ? t : p.circular ? slot : t + p.slots);
    Stored* to = (Stored*)p.new_state + row * p.slots + slot;
    for (int c = 0; c < channels; ++c) to[c * p.slots] = from[c * of.channel];
  }
}

int64_t scratch_bytes(const Problem& p) {
  return p.dtype == Dtype::float64 ? Scratch<F64>(p, nullptr).bytes
                                   : Scratch<F32>(p, nullptr).bytes;
}

void step(const Problem& p, int64_t unit, void* scratch) {
  switch (p.dtype) {
    case Dtype::float16:
      return step_unit<F32, Half>(p, unit, scratch);
    case Dtype::bfloat16:
      return step_unit<F32, BFloat16>(p, unit, scratch);
    case Dtype::float32:
      return step_unit<F32, float>(p, unit, scratch);
    case Dtype::float64:
      return step_unit<F64, double>(p, unit, scratch);
  }
}

}  // namespace

const Kernels table{scratch_bytes, step};

}  // namespace fuseport::causal_conv1d_update::FUSEPORT_ISA
