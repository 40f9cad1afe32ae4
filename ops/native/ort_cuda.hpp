// Custom ops for ONNX Runtime's CUDA provider: what the ort_cuda.cpp of every op is written with. No
// header of CUDA: kernels are started behind the cuda.hpp of the ops. Data of inputs and outputs
// are on the device, and nothing here reads or writes any, nor waits for what is started.
//
// Products of matrices and sorts, which a binding to torch may have torch do, are kernels of the ops.
#pragma once

#include "native/ort.hpp"

#if ORT_API_VERSION < 18
#error "these headers are older than ONNX Runtime 1.18, the first with scratch memory of a stream"
#endif

namespace fuseport::cuda {

// Make so many bytes of device memory 0, or copy them, on a stream; null, or what CUDA says is wrong.
// They are in memory.cu.
const char* clear(void* data, int64_t bytes, void* stream);
const char* copy(const void* from, void* to, int64_t bytes, void* stream);

}  // namespace fuseport::cuda

namespace fuseport::ort {

// One call of an op on a device that ONNX Runtime has made the current one, on the session's stream.
class CudaContext : public Call {
 public:
#if defined(FUSEPORT_CUDA_ON_CPU)
  static constexpr const char* PROVIDER = nullptr;  // tests run kernels and bindings on the CPU
#else
  static constexpr const char* PROVIDER = "CUDAExecutionProvider";
#endif
  static constexpr uint32_t API = 18;  // has KernelContext_GetScratchBuffer

  explicit CudaContext(const Call& call) : Call(call) {
    check(api_, api_.KernelContext_GetGPUComputeStream(context_, &stream_));
  }

  void* stream() const { return stream_; }

  // Kernels write packs of 16 bytes. ONNX Runtime's own memory is aligned to more than that; memory
  // that a caller binds need not be.
  void* output(size_t index, const Shape& shape) const {
    void* data = Call::output(index, shape);
    const std::string name = "the memory of output " + std::to_string(index);
    require(reinterpret_cast<uintptr_t>(data) % 16 == 0, name.c_str(), "aligned to 16 bytes", data);
    return data;
  }

  // What starting a kernel returned: null, or what CUDA says is wrong.
  void started(const char* error) const {
    if (error) throw Error{ORT_FAIL, std::string(DOMAIN) + "::" + op + ": " + error};
  }

  // Makes all elements 0, of so many bytes each; data may be null where there are none.
  void clear(void* data, const Shape& shape, size_t bytes) const {
    const int64_t count = elements(shape);
    if (count > 0) started(cuda::clear(data, count * static_cast<int64_t>(bytes), stream_));
  }

  // Copies all elements, of so many bytes each.
  void copy(const Tensor& from, void* to, size_t bytes) const {
    const int64_t count = elements(from.shape);
    if (count > 0)
      started(cuda::copy(from.data, to, count * static_cast<int64_t>(bytes), stream_));
  }

  // For so many T as a tensor of that shape has, on the device that the node's inputs are on. It may
  // be freed as soon as all that uses it has been started: the session's allocator notes the stream
  // that it allocates scratch for, and has other streams wait before they get that memory. What it
  // allocates without a stream it would give to any of them at once, while kernels still run. Where
  // there is no stream, or only CUDA's default one, there is none to wait for.
  template <class T>
  Buffer<T> allocate(const Shape& shape) const {
    const size_t bytes = bytes_of<T>(shape);
    const OrtMemoryInfo* memory = nullptr;
    check(api_, api_.GetTensorMemoryInfo(input_value(0), &memory));
    OrtAllocator* allocator = nullptr;
    check(api_, api_.KernelContext_GetAllocator(context_, memory, &allocator));
    return Buffer<T>(api_, allocator, bytes, [&](void** data) {
      return stream_ ? api_.KernelContext_GetScratchBuffer(context_, memory, bytes, data)
                     : api_.AllocatorAlloc(allocator, bytes, data);
    });
  }

  // Memory of kernels' own, aligned to 16 and more: allocators of devices align to 256.
  Buffer<char> scratch(int64_t bytes) const { return allocate<char>({bytes}); }

 private:
  void* stream_ = nullptr;
};

}  // namespace fuseport::ort
