// The rotary embedding for torch: schemas, CPU kernels, autograd.
#include "native/autograd.hpp"
#include "rotary_embedding/torch.hpp"

#include <torch/library.h>

namespace fuseport::rotary_embedding {
namespace {

struct OnCpu {
  static void forward(const char*, const Tensor&, const Problem& p, void* out) {
    for_each_unit(Host{}, p.batch * p.blocks(), 4 * numbers(p), 0,
                  [&](int64_t unit, void*) { kernels().forward(p, out, unit); });
  }
  static void backward(const char*, const Tensor&, const Problem& p, const Backward& g) {
    const int64_t tables = p.of_batch ? p.batch : 1;
    const int64_t scratch = 2 * p.pairs * p.positions_per_unit() * (int64_t)sizeof(double);
    for_each_unit(Host{}, tables * p.blocks(), 8 * numbers(p), scratch,
                  [&](int64_t unit, void* memory) { kernels().backward(p, g, unit, memory); });
  }

 private:
  static int64_t numbers(const Problem& p) { return p.batch * p.heads * p.length * p.channels; }
};

using Cpu = Operators<OnCpu>;

TORCH_LIBRARY_FRAGMENT(fuseport, m) {
  // Where the fakes come from: torch names this module to whom they are missing.
  m.set_python_module("fuseport.ops.registration");
  m.def("rotary_embedding(Tensor x, Tensor cos, Tensor sin, bool interleaved) -> Tensor out");
  m.def(
      "rotary_embedding_backward(Tensor dout, Tensor x, Tensor cos, Tensor sin, bool interleaved) "
      "-> (Tensor dx, Tensor dcos, Tensor dsin)");
}

TORCH_LIBRARY_IMPL(fuseport, CPU, m) {
  m.impl("rotary_embedding", Cpu::forward);
  m.impl("rotary_embedding_backward", Cpu::backward);
}

TORCH_LIBRARY_IMPL(fuseport, Autograd, m) {
  differentiated_by(m, "rotary_embedding", "rotary_embedding_backward");
}

}  // namespace
}  // namespace fuseport::rotary_embedding
