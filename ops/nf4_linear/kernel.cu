// The kernels for CUDA, for all dtypes; ops/cuda.py compiles this file with nvcc.
#include "nf4_linear/cuda_few_backward.cuh"

namespace fuseport::nf4_linear::cuda {

int64_t forward_scratch(const Problem& p) {
  const int64_t few = few_fit(p) ? few_scratch(p, Forward{}) : 0;
  const int64_t many = p.rows <= FEW ? 0 : product_scratch(p, product_of(p, Forward{}));
  return few > many ? few : many;
}

bool decodes_once(const Problem& p, const Forward& f) { return few_fit(p) && in_vectors(p, f.x); }

bool decodes_once(const Problem& p, const Backward& b) {
  return few_fit_back(p) && in_vectors(p, b.dout);
}

const char* forward(const Problem& p, const Forward& f, void* scratch, void* stream) {
  if (decodes_once(p, f)) return run_few(p, f, scratch, stream);
  return p.rows <= FEW ? run_forward<Weight>(p, f, stream)
                       : run_product<Weight, false>(p, product_of(p, f), scratch, stream);
}

int64_t backward_scratch(const Problem& p) {
  const int64_t few = few_fit_back(p) ? few_scratch(p, Backward{}) : 0;
  const int64_t many = product_scratch(p, product_of(p, Backward{}));
  return few > many ? few : many;
}

const char* backward(const Problem& p, const Backward& b, void* scratch, void* stream) {
  const char* const error = decodes_once(p, b)
                                ? run_few(p, b, scratch, stream)
                                : run_product<Weight, true>(p, product_of(p, b), scratch, stream);
  return error ? error : run_sum_rows(p, b, stream);
}

const char* decode(const Problem& p, const Tile& tile, void* to, void* stream) {
  return run_decode<Weight>(p, tile, to, stream);
}

}  // namespace fuseport::nf4_linear::cuda
