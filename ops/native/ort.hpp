// Custom ops of ONNX Runtime, in the domain `fuseport.ops`: what the ort.cpp of every op is written
// with. One library holds all ops, since ONNX Runtime takes a domain from one library only; ort.cpp
// beside this file is its entrance. The ops of its CUDA provider are another library, which has that
// entrance too: ort_cuda.hpp.
//
// It is written to ONNX Runtime's C API, which only ever grows: a library that asks for a version
// of it runs in that and all later ones, whichever headers it was compiled with. Exceptions are
// used inside, and become an OrtStatus before they reach ONNX Runtime.
#pragma once

#include <onnxruntime_c_api.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <list>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "native/dtype.hpp"
#include "native/schedule.hpp"

#if ORT_API_VERSION < 17
#error "these headers are older than ONNX Runtime 1.17, the first whose threads a custom op can use"
#endif

namespace fuseport::ort {

constexpr const char* DOMAIN = "fuseport.ops";

using Type = ONNXTensorElementDataType;
using Shape = std::vector<int64_t>;

// Becomes an OrtStatus.
struct Error {
  OrtErrorCode code;
  std::string message;
};

// A shape as Python prints a tuple.
inline std::string text(const Shape& shape) {
  std::ostringstream out;
  out << '(';
  for (size_t i = 0; i < shape.size(); ++i) out << (i ? ", " : "") << shape[i];
  out << (shape.size() == 1 ? ",)" : ")");
  return out.str();
}

inline void check(const OrtApi& api, OrtStatus* status) {
  if (!status) return;
  Error error{api.GetErrorCode(status), api.GetErrorMessage(status)};
  api.ReleaseStatus(status);
  throw error;
}

// How many elements a tensor of that shape has. Beside a zero, sizes are bounded by no memory.
inline int64_t elements(const Shape& shape) {
  int64_t count = 1;
  for (int64_t size : shape)
    if (size == 0) return 0;
  for (int64_t size : shape) count *= size;
  return count;
}

// An input: contiguous, in memory of the provider that the op is for. `data` may be null where there
// are no elements.
struct Tensor {
  Shape shape;
  const void* data = nullptr;
};

// Memory of the session's own allocator, which keeps it for the next call. It is not initialised.
template <class T>
class Buffer {
 public:
  // Takes the allocator over. allocate(&data) has it allocate so many bytes.
  template <class Allocate>
  Buffer(const OrtApi& api, OrtAllocator* allocator, size_t bytes, const Allocate& allocate)
      : api_(api), allocator_(allocator) {
    OrtStatus* status = allocate(&data_);
    if (status) api_.ReleaseStatus(status);  // or there is no status, and no memory either
    if (data_) return;
    api_.ReleaseAllocator(allocator_);
    throw Error{ORT_FAIL, "no memory for " + std::to_string(bytes) + " bytes"};
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    allocator_->Free(allocator_, data_);
    api_.ReleaseAllocator(allocator_);
  }

  T* data() const { return static_cast<T*>(data_); }

 private:
  const OrtApi& api_;
  OrtAllocator* allocator_;
  void* data_ = nullptr;
};

// One call of an op, on whatever provider.
class Call {
 public:
  Call(const OrtApi& api, OrtKernelContext* context, const char* op,
       const std::vector<int64_t>& attributes)
      : op(op), attributes(attributes), api_(api), context_(context) {}

  const char* const op;
  const std::vector<int64_t>& attributes;  // in the order that the op names them in

  template <class Got>
  void require(bool holds, const char* name, const std::string& expected, const Got& got) const {
    if (holds) return;
    std::ostringstream out;
    out << DOMAIN << "::" << op << ": " << name << " must be " << expected << "; got " << got;
    throw Error{ORT_INVALID_ARGUMENT, out.str()};
  }

  void require_shape(const char* name, const Tensor& t, const char* meaning,
                     const Shape& expected) const {
    if (t.shape != expected)
      require(false, name, std::string(meaning) + " = " + text(expected), text(t.shape));
  }

  Tensor input(size_t index) const {
    const OrtValue* value = input_value(index);
    Tensor t;
    OrtTensorTypeAndShapeInfo* info = nullptr;
    check(api_, api_.GetTensorTypeAndShape(value, &info));
    size_t rank = 0;
    OrtStatus* status = api_.GetDimensionsCount(info, &rank);
    if (!status) {
      t.shape.resize(rank);
      status = api_.GetDimensions(info, t.shape.data(), rank);
    }
    api_.ReleaseTensorTypeAndShapeInfo(info);
    check(api_, status);
    void* data = nullptr;  // this version of the API has no other access, and nothing writes to it
    check(api_, api_.GetTensorMutableData(const_cast<OrtValue*>(value), &data));
    t.data = data;
    return t;
  }

  void* output(size_t index, const Shape& shape) const {
    OrtValue* value = nullptr;
    check(api_,
          api_.KernelContext_GetOutput(context_, index, shape.data(), shape.size(), &value));
    void* data = nullptr;
    check(api_, api_.GetTensorMutableData(value, &data));
    return data;
  }

 protected:
  const OrtValue* input_value(size_t index) const {
    const OrtValue* value = nullptr;
    check(api_, api_.KernelContext_GetInput(context_, index, &value));
    if (!value) throw Error{ORT_INVALID_ARGUMENT, std::string(op) + ": an input is missing"};
    return value;
  }

  // The bytes of so many T as a tensor of that shape has, and one at least.
  template <class T>
  static size_t bytes_of(const Shape& shape) {
    size_t bytes = sizeof(T);
    for (int64_t size : shape)
      if (__builtin_mul_overflow(bytes, size, &bytes))
        throw Error{ORT_INVALID_ARGUMENT, "no memory for a tensor of shape " + text(shape)};
    return bytes ? bytes : 1;
  }

  const OrtApi& api_;
  OrtKernelContext* context_;
};

// One call of an op on the CPU.
class Context : public Call {
 public:
  static constexpr const char* PROVIDER = nullptr;
  static constexpr uint32_t API = 17;

  explicit Context(const Call& call) : Call(call) {}

  // Makes all elements 0, of so many bytes each; data may be null where there are none.
  void clear(void* data, const Shape& shape, size_t bytes) const {
    if (const int64_t count = elements(shape)) std::memset(data, 0, count * bytes);
  }

  // Copies all elements, of so many bytes each.
  void copy(const Tensor& from, void* to, size_t bytes) const {
    if (const int64_t count = elements(from.shape)) std::memcpy(to, from.data, count * bytes);
  }

  // For so many T as a tensor of that shape has.
  template <class T>
  Buffer<T> allocate(const Shape& shape) const {
    const size_t bytes = bytes_of<T>(shape);
    OrtMemoryInfo* memory = nullptr;
    check(api_, api_.CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory));
    OrtAllocator* allocator = nullptr;
    OrtStatus* status = api_.KernelContext_GetAllocator(context_, memory, &allocator);
    api_.ReleaseMemoryInfo(memory);
    check(api_, status);
    return Buffer<T>(api_, allocator, bytes, [&](void** data) {
      return api_.AllocatorAlloc(allocator, bytes, data);
    });
  }

  Buffer<char> scratch(int64_t bytes) const { return allocate<char>({bytes}); }

  // How many threads to share so much work among. ONNX Runtime does not tell how many its session
  // has: calls beyond those find no unit left.
  int64_t threads_for(int64_t units, int64_t steps) const {
    static const int64_t cores = std::thread::hardware_concurrency();
    return fuseport::threads_for(cores ? cores : 1, units, steps);
  }

  // Calls work(unit, slot) for each unit on the session's own threads; slot is below `threads`.
  template <class Work>
  void parallel(int64_t units, int64_t threads, const Work& work) const {
    Queue<Work> queue{work, units};
    if (threads == 1) return Queue<Work>::run(&queue);
    const auto run = [](void* queue, size_t) { Queue<Work>::run(queue); };
    check(api_, api_.KernelContext_ParallelFor(context_, run, static_cast<size_t>(threads), 0,
                                               &queue));
  }
};

// What `run` throws, as a status.
template <class Run>
OrtStatus* guarded(const OrtApi& api, const Run& run) {
  try {
    run();
    return nullptr;
  } catch (const Error& error) {
    return api.CreateStatus(error.code, error.message.c_str());
  } catch (const std::exception& error) {
    return api.CreateStatus(ORT_FAIL, error.what());
  } catch (...) {
    return api.CreateStatus(ORT_FAIL, "an unknown exception in a custom op");
  }
}

// An op on tensors of fixed types, for the provider of the context that `compute` takes. ONNX Runtime
// tells ops of one name apart by their types.
struct Op : OrtCustomOp {
  const char* name;
  const char* provider;  // null is the CPU's
  std::vector<Type> inputs, outputs;
  std::vector<const char*> attribute_names;  // integers
  std::vector<int64_t> defaults;  // of the last of them, where older files lack these
  std::function<void(const Call&)> compute;
  mutable std::atomic<int64_t> calls{0};

  template <class OfProvider>
  Op(const char* name, std::vector<Type> inputs, std::vector<Type> outputs,
     std::vector<const char*> attribute_names, void (*compute)(const OfProvider&),
     std::vector<int64_t> defaults = {})
      : OrtCustomOp{},
        name(name),
        provider(OfProvider::PROVIDER),
        inputs(std::move(inputs)),
        outputs(std::move(outputs)),
        attribute_names(std::move(attribute_names)),
        defaults(std::move(defaults)),
        compute([compute](const Call& call) { compute(OfProvider(call)); }) {
    version = OfProvider::API;
    GetName = [](const OrtCustomOp* op) { return self(op).name; };
    GetExecutionProviderType = [](const OrtCustomOp* op) { return self(op).provider; };
    GetInputTypeCount = [](const OrtCustomOp* op) { return self(op).inputs.size(); };
    GetInputType = [](const OrtCustomOp* op, size_t i) { return self(op).inputs[i]; };
    GetOutputTypeCount = [](const OrtCustomOp* op) { return self(op).outputs.size(); };
    GetOutputType = [](const OrtCustomOp* op, size_t i) { return self(op).outputs[i]; };
    GetInputCharacteristic = GetOutputCharacteristic = [](const OrtCustomOp*, size_t) {
      return INPUT_OUTPUT_REQUIRED;
    };
    GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };
    CreateKernelV2 = [](const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info,
                        void** kernel) -> OrtStatusPtr {
      return guarded(*api, [&] { *kernel = new Kernel(self(op), *api, info); });
    };
    KernelComputeV2 = [](void* kernel, OrtKernelContext* context) -> OrtStatusPtr {
      const Kernel& k = *static_cast<Kernel*>(kernel);
      return guarded(k.api, [&] {
        k.op.compute(Call(k.api, context, k.op.name, k.attributes));
        ++k.op.calls;
      });
    };
    KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  }

 private:
  struct Kernel {
    const Op& op;
    const OrtApi& api;
    std::vector<int64_t> attributes;

    Kernel(const Op& op, const OrtApi& api, const OrtKernelInfo* info) : op(op), api(api) {
      const size_t required = op.attribute_names.size() - op.defaults.size();
      for (const char* name : op.attribute_names) {
        const size_t i = attributes.size();
        int64_t value = 0;
        OrtStatus* status = api.KernelInfoGetAttribute_int64(info, name, &value);
        if (status && i >= required) {
          api.ReleaseStatus(status);
          value = op.defaults[i - required];
        } else {
          check(api, status);
        }
        attributes.push_back(value);
      }
    }
  };

  static const Op& self(const OrtCustomOp* op) { return *static_cast<const Op*>(op); }
};

// All ops of the library, which each ort.cpp adds its own to before anyone reads them.
inline std::list<Op>& ops() {
  static std::list<Op> all;
  return all;
}

// Calls add.operator()<dtype>(stored, wide) for each dtype, with ONNX Runtime's names of it and of
// the type that is computed in; true, for a static variable to hold.
template <class Add>
bool for_each_dtype(const Add& add) {
  constexpr Type single = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  constexpr Type twice = ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE;
  add.template operator()<Dtype::float32>(single, single);
  add.template operator()<Dtype::float64>(twice, twice);
  add.template operator()<Dtype::float16>(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, single);
  add.template operator()<Dtype::bfloat16>(ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16, single);
  return true;
}

}  // namespace fuseport::ort
