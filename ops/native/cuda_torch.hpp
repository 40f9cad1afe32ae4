// What the bindings of CUDA kernels to torch are written with. Headers of torch for CUDA are included
// here alone: a torch for the CPU does not have them all.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#if defined(FUSEPORT_CUDA_ON_CPU)
// Tests run kernels and bindings on the CPU, under another name.
#define FUSEPORT_CUDA_NAMESPACE fuseport_cuda_on_cpu
#define FUSEPORT_CUDA_KEY CPU
#else
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#define FUSEPORT_CUDA_NAMESPACE fuseport
#define FUSEPORT_CUDA_KEY CUDA
#endif

namespace fuseport {

// The device of a tensor, for as long as this lives, and its current stream.
class OnDevice {
 public:
#if defined(FUSEPORT_CUDA_ON_CPU)
  explicit OnDevice(const at::Tensor&) {}
  void* stream() const { return nullptr; }
#else
  explicit OnDevice(const at::Tensor& t) : guard_(t.device()) {}
  void* stream() const { return c10::cuda::getCurrentCUDAStream().stream(); }

 private:
  c10::cuda::CUDAGuard guard_;
#endif
};

// Memory for a kernel's own use; torch keeps it until the stream has come past what is launched now.
inline at::Tensor device_scratch(int64_t bytes, const at::Tensor& like) {
  return at::empty({bytes}, like.options().dtype(at::kByte));
}

inline void check_cuda(const char* op, const char* error) {
  TORCH_CHECK(error == nullptr, "fuseport::", op, ": ", error);
}

}  // namespace fuseport
