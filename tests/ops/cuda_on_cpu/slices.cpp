// The backward of deformable attention in slices of some pairs each. A binding makes them as large as
// 31 bits allow, which no test has the memory for.
#include <algorithm>
#include <vector>

#include "ms_deform_attn/cuda.hpp"

using namespace fuseport::ms_deform_attn;

// Of contiguous tensors of float32: the inputs of the node in their order, and its outputs. `sizes`
// are b, s, h, c, q, L and P. Null, or what is wrong.
extern "C" __attribute__((visibility("default"))) const char* backward_in_slices(
    const int64_t* sizes, void* const* tensors, int64_t pairs_at_once) {
  Problem p;
  p.wide_points = true;
  int64_t* const fields[] = {&p.batches, &p.positions, &p.heads, &p.channels,
                             &p.queries, &p.levels,    &p.points};
  for (int64_t* field : fields) *field = *sizes++;
  p.value = tensors[1];
  p.shapes = (const int64_t*)tensors[2];
  p.starts = (const int64_t*)tensors[3];
  p.locations = tensors[4];
  p.weights = tensors[5];
  const Backward b{tensors[0], tensors[6], tensors[7], tensors[8]};
  int64_t bytes = 0;
  if (const char* error = cuda::backward_scratch(p, pairs_at_once, &bytes)) return error;
  constexpr int64_t GUARD = 4096;
  constexpr char POISON = 0x5a;
  std::vector<char> scratch((size_t)(bytes + GUARD), POISON);
  if (const char* error = cuda::backward(p, b, pairs_at_once, scratch.data(), nullptr))
    return error;
  const bool whole = std::all_of(scratch.end() - GUARD, scratch.end(),
                                 [](char x) { return x == POISON; });
  return whole ? nullptr : "a write beyond the scratch memory";
}
