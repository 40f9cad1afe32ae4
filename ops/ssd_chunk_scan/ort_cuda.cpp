// The chunked scan as custom ops of ONNX Runtime's CUDA provider, with the products of its own kernels.
#include "native/ort_cuda.hpp"
#include "ssd_chunk_scan/cuda_passes.hpp"
#include "ssd_chunk_scan/ort.hpp"

namespace fuseport::ssd_chunk_scan {
namespace {

struct Host {
  const ort::CudaContext& context;

  struct Scratch {
    ort::Buffer<char> held;

    Scratch(const Host& host, int64_t bytes) : held(host.context.scratch(bytes)) {}
    void* data() const { return held.data(); }
  };

  void* stream() const { return context.stream(); }
  void started(const char* error) const { context.started(error); }
  void multiply(const Problem& p, const cuda::Product& product) const {
    started(cuda::multiply(p, product, stream()));
  }
};

struct Passes {
  using Context = ort::CudaContext;

  static void forward(const Context& context, const Problem& p, const Forward& forward) {
    cuda::run_forward(Host{context}, p, forward);
  }

  static void backward(const Context& context, const Problem& p, const Backward& backward,
                       const Totals& totals) {
    cuda::run_backward(Host{context}, p, backward, totals);
  }
};

[[maybe_unused]] const bool added = add_nodes<Passes>();

}  // namespace
}  // namespace fuseport::ssd_chunk_scan
