// The CUDA kernels of the chunked scan as their bindings see them; no header of CUDA, none of torch.
//
// The scan is products of matrices and what lies between them, which name the products as reference.py
// does; cuda_passes.hpp has the order. Everything is computed in float32 or float64. But for float64,
// passes are kernels with the products inside, at no less precision. A chunk has 64 steps, T, those
// beyond the end being zeros. "By heads" is (b, c, H, T, P), "by groups" (b, c, G, T, H/G, P): there
// all heads of a group are one matrix.
#pragma once

#include "ssd_chunk_scan/kernel.hpp"

namespace fuseport::ssd_chunk_scan::cuda {

// What all kernels read of the steps; contiguous.
struct Steps {
  void* step = nullptr;      // δ, (b, c, T, H), real
  // The sum of δ·A from the chunk's first step on, (b, c, T, H), as a real and what that lacks: a
  // difference of two large sums is then as good as a small one.
  void *total = nullptr, *rest = nullptr;
  int32_t* begin = nullptr;  // the step at which its sequence began, -1 if before the chunk, (b, c, T)
};

// Products and what they are made of; all real, contiguous.
struct Forward {
  void *x = nullptr, *weighted = nullptr;  // by heads, and by groups: x and w·x
  void *B = nullptr, *C = nullptr;         // (b, c, G, T, N)
  void* CB = nullptr;                      // C·Bᵀ, (b, c, G, T, T)
  void* M = nullptr;                       // (b, c, H, T, T)
  // What each chunk adds to the state, then the state before it, (b, c, H, P, N).
  void* states = nullptr;
  void *within = nullptr, *across = nullptr;  // M·x, by heads, and C·states, by groups
  void* out = nullptr;
};

// Chunks in a row, that something goes through in turn.
struct Segments {
  int64_t span = 1, count = 0;  // chunks of a segment, of which the last may have fewer; segments
};

// Over the chunks with the state; or back, with its cotangent. All real and contiguous but for out.
struct Walk {
  bool back = false;
  const void* start = nullptr;  // initial_states, or dfinal_states
  void* end = nullptr;          // final_states, or dinitial_states; null if nobody asks for it
  // What each segment adds to the state, then the state before it, (b, segments, H, P, N); of a walk
  // back, the cotangent after it.
  void* segments = nullptr;
  Strided dout;          // of a walk back, where it is dy, and of one forth that has dy
  void* kept = nullptr;  // if not null, the same of each chunk, (b, c, H, P, N)
  void* out = nullptr;   // if not null; (b, l, H, P), in the problem's dtype
  // Of a gate, if not null: dy, real, and dz, in the problem's dtype; (b, l, H, P).
  void *dy = nullptr, *dz = nullptr;
};

struct Backward {
  Forward forward;  // without out
  Strided dout;
  void *dy = nullptr, *dy_outer = nullptr;  // by heads, and by groups: dy and exp(c_t)·dy
  // What each chunk adds to the cotangent of the state before it, then that after it; like states.
  void* dstates = nullptr;
  void* dM = nullptr;      // dy·xᵀ, then M, (b, c, H, T, T)
  void* Q = nullptr;       // of some heads of a group each, (b, c, G, parts, T, T)
  // Of K·δ in rows less δ times K in columns, (b, c, H, T): in double, and without the diagonal, the
  // same K cancels in sums over steps, however it was rounded.
  double* row_excess = nullptr;
  void* column_sums = nullptr;  // of K
  // Of no pass of products: parts of dB and dC, real, (b, c, G, sums_of_heads, T, N).
  void *dB = nullptr, *dC = nullptr;
  void* gB = nullptr;      // B·dstates, by groups
  void* dx_within = nullptr;  // Mᵀ·dy, by heads
  double *dA = nullptr, *ddt_bias = nullptr, *dD = nullptr;  // of each chunk, (b·c, H), and (b·c, H·P)
  void *dx = nullptr, *ddt = nullptr, *dlog_decay = nullptr, *dz = nullptr;
};

// In batches, to = a·b, or what is there already plus a·b: (rows, inner) and (inner, columns). All
// real, each matrix contiguous, or the transpose of one that is.
struct Product {
  const void *a = nullptr, *b = nullptr;
  void* to = nullptr;
  int64_t batches = 0, rows = 0, inner = 0, columns = 0;
  bool a_transposed = false, b_transposed = false, add = false;
};

constexpr int HEADS = 4;  // whose Q are added up in one block
inline int64_t parts(const Problem& p) { return (p.heads_per_group() + HEADS - 1) / HEADS; }

// Start on a stream, a cudaStream_t, of the current device, and do not wait for it. They return
// null, or what CUDA says is wrong. Each writes what it is named for, from what those before it,
// and products in between, have written.
const char* find_steps(const Problem&, const Steps&, void* stream);
const char* spread(const Problem&, const Steps&, const Forward&, void* stream);   // x, weighted, B, C
const char* carry(const Problem&, const Steps&, const Segments&, const Walk&, void* stream);  // segments
const char* mix(const Problem&, const Steps&, const Forward&, void* stream);      // M
const char* finish(const Problem&, const Steps&, const Forward&, void* stream);   // out
const char* spread_back(const Problem&, const Steps&, const Backward&, void* stream);  // dy, dz, dD
const char* mix_back(const Problem&, const Steps&, const Backward&, void* stream);     // M, Q, sums
const char* finish_back(const Problem&, const Steps&, const Backward&, void* stream);  // the rest
const char* multiply(const Problem&, const Product&, void* stream);
// Sums in a fixed order: of Q over its parts, (b, c, G, T, T); of parts of dB or dC, (b, c, G, parts,
// T, N), in the problem's dtype, (b, l, G, N); and over chunks, (b·c, count), real.
const char* sum_of_Q(const Problem&, const Backward&, void* to, void* stream);
const char* join(const Problem&, const void* of_chunks, int64_t parts, void* to, void* stream);
const char* sum_of_chunks(const Problem&, const double*, int64_t count, void* to, void* stream);

// Products and all, where `walks` says so. Of more segments than one, `add_up` has to be
// called first, and then `carry`; `walk` writes what else the walk asks for.
bool walks(const Problem&);
Segments segments(const Problem&);
const char* add_up(const Problem&, const Steps&, const Segments&, const Walk&, void* stream);
const char* walk(const Problem&, const Steps&, const Segments&, const Walk&, void* stream);
// From walks that kept `states` and `dstates`, all else of Backward that is named after a gradient.
bool has_gradients(const Problem&);
int64_t sums_of_heads(const Problem&);  // of a group, in dB and dC
const char* gradients(const Problem&, const Steps&, const Backward&, void* stream);

}  // namespace fuseport::ssd_chunk_scan::cuda
