// SwiGLU for torch: schemas, CPU kernels, autograd.
#include "native/autograd.hpp"
#include "swiglu/torch.hpp"

#include <torch/library.h>

namespace fuseport::swiglu {
namespace {

struct OnCpu {
  static void forward(const char*, const Tensor&, const Problem& p, const MutableRows& out) {
    for_each_unit(Host{}, p, [&](int64_t unit) { kernels().forward(p, out, unit); });
  }
  static void backward(const char*, const Tensor&, const Problem& p, const Backward& b) {
    for_each_unit(Host{}, p, [&](int64_t unit) { kernels().backward(p, b, unit); });
  }
};

using Cpu = Operators<OnCpu>;

TORCH_LIBRARY_FRAGMENT(fuseport, m) {
  // Where the fakes come from: torch names this module to whom they are missing.
  m.set_python_module("fuseport.ops.registration");
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor out");
  m.def("swiglu_backward(Tensor dout, Tensor gate, Tensor up) -> (Tensor dgate, Tensor dup)");
  m.def("swiglu_packed(Tensor x) -> Tensor out");
  m.def("swiglu_packed_backward(Tensor dout, Tensor x) -> Tensor dx");
}

TORCH_LIBRARY_IMPL(fuseport, CPU, m) {
  m.impl("swiglu", Cpu::swiglu);
  m.impl("swiglu_backward", Cpu::swiglu_backward);
  m.impl("swiglu_packed", Cpu::packed);
  m.impl("swiglu_packed_backward", Cpu::packed_backward);
}

TORCH_LIBRARY_IMPL(fuseport, Autograd, m) {
  differentiated_by(m, "swiglu", "swiglu_backward");
  differentiated_by(m, "swiglu_packed", "swiglu_packed_backward");
}

}  // namespace
}  // namespace fuseport::swiglu
