// The kernels for CUDA, for all dtypes; ops/cuda.py compiles this file with nvcc.
#include "matmul_nbits/kernel.cuh"
#include "native/cuda_stored_products.cuh"

namespace fuseport::matmul_nbits::cuda {

int64_t forward_scratch(const Problem& p) {
  return p.rows <= FEW ? 0 : product_scratch(p, product_of(p, Forward{}));
}

const char* forward(const Problem& p, const Forward& f, void* scratch, void* stream) {
  return p.rows <= FEW ? run_forward<Weight>(p, f, stream)
                       : run_product<Weight, false>(p, product_of(p, f), scratch, stream);
}

int64_t backward_scratch(const Problem& p) {
  return product_scratch(p, product_of(p, Backward{}));
}

const char* backward(const Problem& p, const Backward& b, void* scratch, void* stream) {
  const char* const error = run_product<Weight, true>(p, product_of(p, b), scratch, stream);
  return error ? error : run_sum_rows(p, b, stream);
}

const char* decode(const Problem& p, const Tile& tile, void* to, void* stream) {
  return run_decode<Weight>(p, tile, to, stream);
}

}  // namespace fuseport::matmul_nbits::cuda
