// The backward of the deformable convolution, some batch entries at a time. A binding takes as many as
// pay in memory, which is all of what a test has.
#include <algorithm>
#include <vector>

#include "deform_conv2d/cuda.hpp"

using namespace fuseport::deform_conv2d;

// Of contiguous tensors of float32: dout, input, offset, mask, weight and the gradients of the last
// four and of the bias. `sizes` are those of a problem, from b to the columns of the output. Null, or
// what is wrong.
extern "C" __attribute__((visibility("default"))) const char* backward_in_batches(
    const int64_t* sizes, void* const* tensors, int64_t batches_at_once) {
  Problem p;
  int64_t* const fields[] = {&p.batches,  &p.channels, &p.height, &p.width,         &p.outputs,
                             &p.kernel_h, &p.kernel_w, &p.groups, &p.offset_groups, &p.rows,
                             &p.columns};
  for (int64_t* field : fields) *field = *sizes++;
  p.input = tensors[1];
  p.offset = tensors[2];
  p.mask = tensors[3];
  p.weight = tensors[4];
  const Backward b{tensors[0], tensors[5], tensors[6], tensors[7], tensors[8], tensors[9]};
  int64_t bytes = 0;
  if (const char* error = cuda::backward_scratch(p, batches_at_once, &bytes)) return error;
  constexpr int64_t GUARD = 4096;
  constexpr char POISON = 0x5a;
  std::vector<char> scratch((size_t)(bytes + GUARD), POISON);
  if (const char* error = cuda::backward(p, b, batches_at_once, scratch.data(), nullptr))
    return error;
  const bool whole = std::all_of(scratch.end() - GUARD, scratch.end(),
                                 [](char x) { return x == POISON; });
  return whole ? nullptr : "a write beyond the scratch memory";
}
