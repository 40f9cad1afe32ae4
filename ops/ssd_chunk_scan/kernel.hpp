// What the kernels of the chunked scan take and give, over raw pointers: the interface between
// kernel.cpp, compiled once per instruction set, and its bindings.
//
// Work is cut into units that depend on nothing of each other. What sums over units does so in
// their order; hence bits do not depend on threads.
#pragma once

#include <cstdint>

#include "native/isa.hpp"
#include "native/strided.hpp"

namespace fuseport::ssd_chunk_scan {

// As in shapes.py: steps whose outputs are products of matrices, and the least of given decays.
constexpr int64_t CHUNK = 64;
constexpr double LEAST_LOG_DECAY = -1e3;

// The type that is computed in, float or double, is called real. What is contiguous has no strides.
struct Problem {
  Dtype dtype = Dtype::float32;
  int64_t batches = 0, length = 0, heads = 0, width = 0, groups = 1, states = 0;
  bool softplus = false;
  Strided x, dt, B, C, z;                // z.data is null where there is no gate
  // (b, l, H), real: of the discrete scan, which has no dt, A, dt_bias and dt_limit; else its data is
  // null.
  Strided log_decay;
  const void* A = nullptr;               // (H,), contiguous, real, like all that follow
  const void* D = nullptr;               // (H, P)
  const void* dt_bias = nullptr;         // (H,)
  const void* initial_states = nullptr;  // (b, H, P, N)
  const void* dt_limit = nullptr;        // (2,)
  // (b, l), contiguous: the state does not go over from a step to one of another number.
  const int32_t* seq_idx = nullptr;
  // For each batch, chunk and group: B and C, (64, padded N), and C·Bᵀ, (64, 64); null unless groups
  // are shared.
  void* prepared = nullptr;

  // Inlined always: a copy that is compiled for one instruction set must not serve another.
  FUSEPORT_INLINED int64_t chunks() const { return (length + CHUNK - 1) / CHUNK; }
  FUSEPORT_INLINED int64_t heads_per_group() const { return heads / groups; }
  // Whether B and C are prepared for several units, and not by the one that takes them.
  FUSEPORT_INLINED bool shares_groups() const { return heads_per_group() > 1; }
  // Heads whose parts of dB and dC are summed at once: fewer where units would be too few.
  FUSEPORT_INLINED int64_t block() const {
    const int64_t wanted = batches * heads >= 96 ? 4 : batches * heads >= 24 ? 3 : 1;
    return wanted < heads_per_group() ? wanted : heads_per_group();
  }
  FUSEPORT_INLINED int64_t blocks_per_group() const {
    return (heads_per_group() + block() - 1) / block();
  }
  FUSEPORT_INLINED int64_t blocks() const { return groups * blocks_per_group(); }
};

struct Forward {
  void* out = nullptr;           // (b, l, H, P), contiguous, in `dtype`
  void* final_states = nullptr;  // (b, H, P, N), contiguous, real
};

struct Backward {
  Strided dout;
  const void* dfinal_states = nullptr;  // (b, H, P, N), contiguous, real
  // Contiguous, in `dtype`, in the shapes of what they belong to.
  void *dx = nullptr, *ddt = nullptr, *dz = nullptr;
  void* dlog_decay = nullptr;           // (b, l, H), contiguous, real
  void* dinitial_states = nullptr;      // (b, H, P, N), contiguous, real
  // Sums over one unit, which `sum` and the binding add up.
  void *dB = nullptr, *dC = nullptr;    // (b, l, blocks, N), real
  double *dA = nullptr, *ddt_bias = nullptr;  // (b, H)
  double* dD = nullptr;                       // (b, H, P)
};

// The gradients that are summed over units, in their own shapes and dtypes, contiguous; null where
// there is no such input.
struct Totals {
  void *dA = nullptr, *dB = nullptr, *dC = nullptr, *dD = nullptr, *ddt_bias = nullptr;
};

// Adds up the parts of dB or dC, and writes (b, l, G, N), contiguous, in `dtype`.
struct Sum {
  const void* parts = nullptr;
  void* total = nullptr;
};

// The functions for one instruction set. Scratch is each unit's own, 64-aligned.
struct Kernels {
  int64_t (*prepared_bytes)(const Problem&);  // of all of p.prepared, to be 64-aligned; or 0
  int64_t (*scratch_bytes)(const Problem&, bool backward);
  void (*prepare)(const Problem&, int64_t unit, void* scratch);  // units: b · chunks · G
  void (*forward)(const Problem&, const Forward&, int64_t unit, void* scratch);  // b · H
  void (*backward)(const Problem&, const Backward&, int64_t unit, void* scratch);  // b · blocks
  void (*sum)(const Problem&, const Sum&, int64_t unit);  // b · l
};

FUSEPORT_CHOOSE_KERNELS()

}  // namespace fuseport::ssd_chunk_scan
