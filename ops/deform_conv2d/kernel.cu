// The kernels for CUDA, for all dtypes; ops/cuda.py compiles this file with nvcc.
#include "deform_conv2d/kernel.cuh"

#include "deform_conv2d/cuda_gather.cuh"
#include "deform_conv2d/cuda_products.cuh"

namespace fuseport::deform_conv2d::cuda {

namespace {

constexpr int64_t MUCH = int64_t(1) << 28;  // bytes of cotangents of samples: as many as pay

int64_t stored_bytes(const Problem& p) {
  return p.dtype == Dtype::float16 || p.dtype == Dtype::bfloat16 ? 2 : p.real_bytes();
}

int64_t cotangent_bytes(const Problem& p) {
  return p.places() * p.taps() * p.channels * p.real_bytes();
}

int64_t parts_of(const Problem& p) {
  int64_t parts = 1;
  with_dtype(p.dtype, [&](auto stored) -> const char* {
    parts = cuda::parts_of<decltype(stored)>(p);
    return nullptr;
  });
  return parts;
}

// Hands out parts of scratch memory, aligned as that of allocators of devices is.
struct Memory {
  char* base;
  int64_t used = 0;

  void* take(int64_t bytes) {
    void* const here = base + used;
    used += (bytes + 255) / 256 * 256;
    return here;
  }
};

// What the forward pass works in.
struct Copies {
  void *table, *weight;

  Copies(const Problem& p, Memory& memory)
      : table(memory.take(p.batches * p.pixels() * p.channels * stored_bytes(p))),
        weight(memory.take(p.outputs * p.terms() * stored_bytes(p))) {}
};

// What the backward works in, besides.
struct Parts {
  void *dweight, *dsamples, *dinput, *sort;

  Parts(const Problem& p, int64_t at_once, const Cells& cells, Memory& memory)
      : dweight(memory.take(parts_of(p) * p.outputs * p.terms() * p.real_bytes())),
        dsamples(memory.take(at_once * cotangent_bytes(p))),
        dinput(memory.take(at_once * p.pixels() * p.channels * stored_bytes(p))),
        sort(memory.take(cells.bytes())) {}
};

template <class Stored>
const char* run_copies(const Problem& p, const Copies& copies, void* stream) {
  const char* error = run_transpose((const Stored*)p.input, (Stored*)copies.table, p.batches,
                                    p.channels, p.pixels(), stream);
  return error ? error : run_reorder(p, (Stored*)copies.weight, stream);
}

template <class Stored>
bool packs(const void* data, int64_t row) {
  return aligned<VECTOR<Stored>, Stored>(data, row);
}

template <class Stored>
const char* run_filter(const Problem& p, const Backward& b, const Copies& copies, void* scratch,
                       void* stream) {
  const int64_t parts = cuda::parts_of<Stored>(p);
  const Filtered<Stored> product{p,
                                 {(const Stored*)copies.table, in_runs(p)},
                                 (const Stored*)b.dout,
                                 (Real<Stored>*)scratch,
                                 packs<Stored>(b.dout, p.places()),
                                 parts};
  const char* error = run_product<Stored>(product, stream);
  return error ? error
               : run_filter_sum<Stored>(p, b, (const Real<Stored>*)scratch, parts, stream);
}

// Of some batch entries: cotangents of samples, and the gradients that are made of them.
template <class Stored>
const char* run_slice(const Problem& p, const Backward& b, int64_t first, int64_t batches,
                      const Copies& copies, const Parts& parts, Cells& cells, void* stream) {
  const Differentiated<Stored> product{p,
                                       first,
                                       batches,
                                       (const Stored*)b.dout,
                                       (const Stored*)copies.weight,
                                       (Real<Stored>*)parts.dsamples,
                                       packs<Stored>(copies.weight, p.terms())};
  const Slice<Real<Stored>> slice{first, batches, (const Real<Stored>*)parts.dsamples};
  const char* error = run_product<Stored>(product, stream);
  if (!error) error = run_samples<Stored>(p, b, slice, (const Stored*)copies.table, stream);
  if (error || p.pixels() == 0) return error;
  error = run_gather<Stored>(p, slice, cells, parts.sort, (Stored*)parts.dinput, stream);
  if (error) return error;
  Stored* const dinput = (Stored*)b.dinput + first * p.channels * p.pixels();
  return run_transpose((const Stored*)parts.dinput, dinput, batches, p.pixels(), p.channels, stream);
}

}  // namespace

int64_t batches_at_once(const Problem& p) {
  constexpr int64_t LIMIT = OUTSIDE - 1;
  const int64_t samples = samples_of(p, 1), cells = cells_of(p, 1);
  const int64_t counted = LIMIT / (samples > cells ? samples : cells);
  const int64_t paying = 1 + MUCH / cotangent_bytes(p);
  const int64_t batches = counted < paying ? counted : paying;
  return batches < p.batches || p.batches == 0 ? batches : p.batches;
}

int64_t forward_scratch(const Problem& p) {
  Memory memory{nullptr};
  const Copies copies(p, memory);
  return memory.used;
}

const char* backward_scratch(const Problem& p, int64_t batches_at_once, int64_t* bytes) {
  Memory memory{nullptr};
  const Cells cells(samples_of(p, batches_at_once), cells_of(p, batches_at_once));
  const Copies copies(p, memory);
  const Parts parts(p, batches_at_once, cells, memory);
  *bytes = memory.used;
  return cells.error;
}

const char* forward(const Problem& p, const Forward& f, void* scratch, void* stream) {
  Memory memory{(char*)scratch};
  const Copies copies(p, memory);
  if (p.batches * p.outputs == 0) return nullptr;
  return with_dtype(p.dtype, [&](auto stored) {
    using Stored = decltype(stored);
    const char* error = run_copies<Stored>(p, copies, stream);
    if (error) return error;
    const Convolved<Stored> product{p,
                                    {(const Stored*)copies.table, in_runs(p)},
                                    (const Stored*)copies.weight,
                                    (Stored*)f.out,
                                    packs<Stored>(copies.weight, p.terms())};
    return run_product<Stored>(product, stream);
  });
}

const char* backward(const Problem& p, const Backward& b, int64_t batches_at_once, void* scratch,
                     void* stream) {
  Memory memory{(char*)scratch};
  Cells cells(samples_of(p, batches_at_once), cells_of(p, batches_at_once));
  if (cells.error) return cells.error;
  const Copies copies(p, memory);
  const Parts parts(p, batches_at_once, cells, memory);
  return with_dtype(p.dtype, [&](auto stored) {
    using Stored = decltype(stored);
    const char* error = run_copies<Stored>(p, copies, stream);
    if (!error) error = run_filter<Stored>(p, b, copies, parts.dweight, stream);
    if (!error) error = run_bias<Stored>(p, b, stream);
    for (int64_t first = 0; first < p.batches && !error; first += batches_at_once) {
      const int64_t left = p.batches - first;
      error = run_slice<Stored>(p, b, first, batches_at_once < left ? batches_at_once : left,
                                copies, parts, cells, stream);
    }
    return error;
  });
}

}  // namespace fuseport::deform_conv2d::cuda
