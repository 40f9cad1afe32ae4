// What the kernels of the selective scan take and give, over raw pointers: the interface between
// kernel.cpp, compiled once per instruction set, and its bindings.
//
// Work is cut into units that depend on nothing of each other: one batch entry and a block of
// channels that share a group of B and one of C. A unit's arithmetic does not depend on which thread
// runs it, nor on how many there are, and what sums over units does so in their order; hence bits do
// not depend on threads.
#pragma once

#include <cstdint>

#include "native/dtype.hpp"
#include "native/isa.hpp"

namespace fuseport::selective_scan {

constexpr int64_t CHUNK = 64;  // steps between saved states: shapes.py has the same number
constexpr int64_t BLOCK = 32;  // channels of a unit, at most
constexpr int64_t MANY = 512;  // channels of all batch entries that are enough for whole blocks

// Elements of (b, d, l), in the problem's dtype; strides in elements, any value. Where A is complex,
// the state's type below is complex too: pairs of a real and an imaginary part, of the real type.
struct Sequence {
  const void* data = nullptr;
  int64_t batch = 0, channel = 0, time = 0;
};

struct MutableSequence {
  void* data = nullptr;
  int64_t batch = 0, channel = 0, time = 0;
};

// B or C. It varies over time, with one (N, l) for each `channels` channels in a row, or it does
// not, and is (d, N): then `group` is the stride of channels. Where A is complex, B that varies is
// (N, 2l) of reals, a real and an imaginary part in turn; else its elements are of the state's type.
struct Coefficient {
  const void* data = nullptr;
  bool varies = true;
  int64_t channels = 1;
  int64_t batch = 0, group = 0, state = 0, time = 0;
};

struct Problem {
  Dtype dtype = Dtype::float32;  // of sequences and coefficients; the state is double for float64
  bool complex = false;          // whether A is, and with it the state
  int64_t batches = 0, channels = 0, length = 0, states = 0;
  int64_t span = 1;  // channels in a row that share a group of B and one of C; not 0
  bool softplus = false;
  Sequence u, delta, z;           // z.data is null where there is no gate
  const void* A = nullptr;        // (d, N), contiguous, in the state's type
  const void* D = nullptr;        // (d,), contiguous, in the state's real type, like the next one
  const void* delta_bias = nullptr;
  Coefficient B, C;

  // Inlined always: a copy that is compiled for one instruction set must not serve another.
  FUSEPORT_INLINED int64_t chunks() const { return (length + CHUNK - 1) / CHUNK; }
  FUSEPORT_INLINED int64_t saved() const { return chunks() + 1; }
  // Numbers in a row of a B or C that varies.
  FUSEPORT_INLINED int64_t row() const { return complex ? 2 * length : length; }
  // Small problems are cut finer, so that more threads find work.
  FUSEPORT_INLINED int64_t block() const { return batches * channels < MANY ? BLOCK / 2 : BLOCK; }
  FUSEPORT_INLINED int64_t blocks_per_span() const { return (span + block() - 1) / block(); }
  FUSEPORT_INLINED int64_t blocks() const { return channels / span * blocks_per_span(); }
  FUSEPORT_INLINED int64_t units() const { return batches * blocks(); }
};

struct Forward {
  MutableSequence out;           // out.data is null where only states are wanted
  void* last_state = nullptr;    // (b, d, N), contiguous, in the state's type; may be null
  void* chunk_states = nullptr;  // (b, saved, N, d), likewise: before each chunk, and at the end
};

struct Backward {
  Sequence dout;
  const void* dlast_state = nullptr;   // (b, d, N), contiguous, in the state's type
  const void* chunk_states = nullptr;  // as forward left them
  MutableSequence du, ddelta, dz;
  // Sums over one unit, which `sum_units` and the binding add up.
  double* dA = nullptr;                // (b, d, N), of pairs where A is complex
  double* dD = nullptr;                // (b, d)
  double* ddelta_bias = nullptr;       // (b, d)
  // B varies: (b, blocks, N, row()) in the state's real type; else double, (b, d, N), as dA is.
  void* dB = nullptr;
  void* dC = nullptr;
};

// Adds up the parts of dB, of a B that varies, and writes (b, G, N, row()), contiguous, in `dtype`.
struct SumUnits {
  const void* parts = nullptr;  // (b, blocks, N, row())
  void* total = nullptr;
  int64_t groups = 0;

  FUSEPORT_INLINED int64_t units(const Problem& p) const { return p.batches * groups * p.states; }
};

// The kernels for one instruction set.
struct Kernels {
  int64_t (*forward_scratch)(const Problem&);  // bytes for one unit, to be 64-aligned
  int64_t (*backward_scratch)(const Problem&);
  void (*forward)(const Problem&, const Forward&, int64_t unit, void* scratch);
  void (*backward)(const Problem&, const Backward&, int64_t unit, void* scratch);
  void (*sum_units)(const Problem&, const SumUnits&, int64_t unit);
};

FUSEPORT_CHOOSE_KERNELS()

}  // namespace fuseport::selective_scan
