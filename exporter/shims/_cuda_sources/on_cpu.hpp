// A CPU in the place of a GPU, for extensions of model code, which are compiled behind this header
// and called on small tensors: what such sources use of CUDA, of torch and of its bindings. Blocks
// run one after the other, the threads of one as fibers from barrier to barrier.
#pragma once

#include <assert.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct float4 {
  float x, y, z, w;
};
using cudaStream_t = void*;

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

template <class A, class B>
std::common_type_t<A, B> max(A a, B b) {
  using Number = std::common_type_t<A, B>;
  return (Number)a > (Number)b ? (Number)a : (Number)b;
}

template <class A, class B>
std::common_type_t<A, B> min(A a, B b) {
  using Number = std::common_type_t<A, B>;
  return (Number)a < (Number)b ? (Number)a : (Number)b;
}

inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }

template <class Number>
Number atomicAdd(Number* at, Number by) {
  const Number before = *at;
  *at += by;
  return before;
}

namespace fuseport {

[[noreturn]] inline void refuse(const std::string& why) {
  fprintf(stderr, "%s\n", why.c_str());
  exit(2);
}

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool ended = false;
};

inline ucontext_t scheduler;
inline Fiber* current = nullptr;
inline const std::function<void()>* body = nullptr;

inline void enter() {
  (*body)();
  current->ended = true;
  swapcontext(&current->context, &scheduler);
}

inline std::vector<Fiber>* block = nullptr;

// What a variable is in another lane of the warp, whose stack has it at the same place: all lanes
// are between the same two barriers, which Python has put around the loop that this is called in.
template <class Number>
Number of_lane(const Number& mine, int lane) {
  const auto own = (size_t)(current - block->data());
  const size_t other = own / 32 * 32 + (size_t)lane % 32;
  if (other >= block->size()) return mine;
  const ptrdiff_t place = (const char*)&mine - current->stack.data();
  Number found;
  memcpy(&found, (*block)[other].stack.data() + place, sizeof found);
  return found;
}

// A launch, of what stands between the chevrons.
class Launch {
 public:
  Launch(dim3 grid, dim3 block, size_t = 0, cudaStream_t = nullptr) : grid_(grid), block_(block) {}

  void run(const std::function<void()>& kernel) {
    gridDim = grid_;
    blockDim = block_;
    body = &kernel;
    for (unsigned z = 0; z < grid_.z; ++z)
      for (unsigned y = 0; y < grid_.y; ++y)
        for (unsigned x = 0; x < grid_.x; ++x) {
          blockIdx = dim3(x, y, z);
          run_block();
        }
  }

 private:
  void run_block() {
    constexpr size_t STACK = 128 * 1024;
    const size_t count = (size_t)block_.x * block_.y * block_.z;
    if (count == 0 || count > 1024) refuse("a block of " + std::to_string(count) + " threads");
    std::vector<Fiber> fibers(count);
    fuseport::block = &fibers;
    for (Fiber& fiber : fibers) {
      fiber.stack.resize(STACK);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data();
      fiber.context.uc_stack.ss_size = STACK;
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, enter, 0);
    }
    for (size_t left = count; left > 0;) {
      for (size_t i = 0; i < count; ++i) {
        if (fibers[i].ended) continue;
        current = &fibers[i];
        threadIdx = dim3((unsigned)(i % block_.x), (unsigned)(i / block_.x % block_.y),
                         (unsigned)(i / block_.x / block_.y));
        swapcontext(&scheduler, &current->context);
        left -= current->ended;
      }
    }
  }

  dim3 grid_, block_;
};

// A number of sixteen bits, as a float: bfloat16 is rounded, halves keep more than they would.
template <bool BFLOAT16>
class Sixteen {
 public:
  Sixteen() = default;
  template <class Number, class = std::enable_if_t<std::is_arithmetic_v<Number>>>
  Sixteen(Number number) : value_(rounded((float)number)) {}
  operator float() const { return value_; }
  Sixteen& operator+=(float by) { return *this = Sixteen(value_ + by); }
  Sixteen& operator-=(float by) { return *this = Sixteen(value_ - by); }
  Sixteen& operator*=(float by) { return *this = Sixteen(value_ * by); }

 private:
  static float rounded(float x) {
    if (!BFLOAT16 || x != x) return x;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    memcpy(&x, &bits, sizeof x);
    return x;
  }

  float value_ = 0;
};

using BFloat16 = Sixteen<true>;
using Half = Sixteen<false>;

template <class Number>
const char* kind() {
  if (std::is_same_v<Number, float>) return "float32";
  if (std::is_same_v<Number, double>) return "float64";
  if (std::is_same_v<Number, BFloat16>) return "bfloat16";
  if (std::is_same_v<Number, Half>) return "float16";
  refuse("a pointer to numbers of another kind");
}

// The numbers of a tensor, which become those of a kind when a pointer of that is asked for.
struct Storage {
  std::vector<int64_t> sizes;
  std::vector<double> values;
  std::shared_ptr<void> memory;
  std::function<void()> read_back = [] {};
  std::string kind;
};

struct Device {
  bool is_cuda() const { return true; }
};

class Tensor {
 public:
  // Beyond the last element is as much again that may be read, of zeros.
  static constexpr size_t BEYOND = 1 << 14;

  explicit Tensor(std::vector<int64_t> sizes) : storage_(std::make_shared<Storage>()) {
    int64_t count = 1;
    for (const int64_t size : sizes) count *= size;
    storage_->sizes = std::move(sizes);
    storage_->values.resize((size_t)count);
  }

  // Of any kind, by a cast.
  struct Any {
    const Tensor* tensor;
    template <class Number>
    explicit operator Number*() const {
      return tensor->data_ptr<Number>();
    }
  };

  template <class Number>
  Number* data_ptr() const {
    Storage& all = *storage_;
    if (all.kind.empty()) {
      all.kind = fuseport::kind<Number>();
      auto* const made = new std::vector<Number>(all.values.size() + BEYOND);
      for (size_t i = 0; i < all.values.size(); ++i) (*made)[i] = (Number)all.values[i];
      all.memory = std::shared_ptr<void>(made, [made](void*) { delete made; });
      all.read_back = [made, &all] {
        for (size_t i = 0; i < all.values.size(); ++i) all.values[i] = (double)(float)(*made)[i];
      };
    }
    if (all.kind != fuseport::kind<Number>()) refuse("a tensor of two kinds of numbers");
    return static_cast<std::vector<Number>*>(all.memory.get())->data();
  }
  Any data_ptr() const { return {this}; }

  int64_t size(int64_t axis) const {
    const auto rank = (int64_t)storage_->sizes.size();
    return storage_->sizes.at((size_t)(axis < 0 ? axis + rank : axis));
  }
  const std::vector<int64_t>& sizes() const { return storage_->sizes; }
  int64_t numel() const { return (int64_t)storage_->values.size(); }
  int64_t dim() const { return (int64_t)storage_->sizes.size(); }
  bool is_contiguous() const { return true; }
  bool is_cuda() const { return true; }
  Device device() const { return {}; }
  int type() const { return 0; }
  int scalar_type() const { return 0; }
  Storage& storage() const { return *storage_; }

 private:
  std::shared_ptr<Storage> storage_;
};

inline Tensor zeros_like(const Tensor& tensor) { return Tensor(tensor.sizes()); }

using Numbers = std::vector<double>;  // a call, as Python writes it down

class Given {
 public:
  explicit Given(FILE* file) {
    for (double number; fread(&number, sizeof number, 1, file) == 1;) numbers_.push_back(number);
  }
  double number() { return numbers_.at(at_++); }

  template <class Type>
  std::decay_t<Type> take() {
    using Plain = std::decay_t<Type>;
    if constexpr (std::is_same_v<Plain, Tensor>) {
      std::vector<int64_t> sizes((size_t)number());
      for (int64_t& size : sizes) size = (int64_t)number();
      Tensor tensor(std::move(sizes));
      for (double& value : tensor.storage().values) value = number();
      tensors.push_back(tensor);
      return tensor;
    } else {
      return (Plain)number();
    }
  }

  std::vector<Tensor> tensors;

 private:
  Numbers numbers_;
  size_t at_ = 0;
};

inline std::map<std::string, std::function<void(Given&)>> bound;

inline void keep(Given& given, const Tensor& result) { given.tensors.push_back(result); }
inline void keep(Given& given, const std::vector<Tensor>& results) {
  given.tensors.insert(given.tensors.end(), results.begin(), results.end());
}

// Of a binding: pybind11's, or of a library of operators.
struct Module {
  template <class Result, class... Parameters>
  void def(const std::string& name, Result (*function)(Parameters...), const char* = "") {
    bound[name] = [function](Given& given) {
      std::tuple<std::decay_t<Parameters>...> arguments{given.take<Parameters>()...};
      if constexpr (std::is_void_v<Result>) {
        std::apply(function, arguments);
      } else {
        keep(given, std::apply(function, arguments));
      }
    };
  }
  void def(const char*) {}  // a schema alone
  template <class Function>
  void impl(const std::string& name, Function* function) {
    def(name, function);
  }
};

struct Binding {
  explicit Binding(void (*bind)(Module&)) {
    Module module;
    bind(module);
  }
};

}  // namespace fuseport

inline void __syncthreads() {
  swapcontext(&fuseport::current->context, &fuseport::scheduler);
}

#define __shfl_sync(mask, variable, lane) fuseport::of_lane(variable, (int)(lane))

using __nv_bfloat16 = fuseport::BFloat16;
using __half = fuseport::Half;
using half = fuseport::Half;
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
inline float __half2float(__half x) { return x; }
inline __half __float2half(float x) { return x; }

namespace c10 {
using fuseport::BFloat16;
using fuseport::Half;
}  // namespace c10
namespace at {
using fuseport::BFloat16;
using fuseport::Half;
using fuseport::Tensor;
}  // namespace at
namespace torch {
using fuseport::Tensor;
using fuseport::zeros_like;
}  // namespace torch

#define TORCH_CHECK(condition, ...) \
  if (!(condition)) fuseport::refuse("it refuses: " #condition)
#define AT_DISPATCH_FLOATING_TYPES(type, name, ...) \
  [&] {                                             \
    using scalar_t = float;                         \
    (__VA_ARGS__)();                                \
  }()
#define FUSEPORT_JOINED_(a, b) a##b
#define FUSEPORT_JOINED(a, b) FUSEPORT_JOINED_(a, b)
#define FUSEPORT_BOUND(bind, m)                  \
  static void bind(fuseport::Module&);           \
  static fuseport::Binding FUSEPORT_JOINED(kept_, bind)(bind); \
  static void bind(fuseport::Module& m)
#define FUSEPORT_BIND(number, m) FUSEPORT_BOUND(FUSEPORT_JOINED(bind_, number), m)
#define PYBIND11_MODULE(name, m) FUSEPORT_BIND(__COUNTER__, m)
#define TORCH_LIBRARY(name, m) FUSEPORT_BIND(__COUNTER__, m)
#define TORCH_LIBRARY_IMPL(name, key, m) FUSEPORT_BIND(__COUNTER__, m)

// A function by its name, on the numbers of a file; all tensors go to another one, those that were
// given first: the kind of each, how many numbers, and these.
inline int main_of(int argc, char** argv) {
  if (argc != 4) return 3;
  FILE* const from = fopen(argv[2], "rb");
  FILE* const to = fopen(argv[3], "wb");
  if (from == nullptr || to == nullptr) return 3;
  const auto found = fuseport::bound.find(argv[1]);
  if (found == fuseport::bound.end()) fuseport::refuse("it binds no " + std::string(argv[1]));
  fuseport::Given given(from);
  found->second(given);
  for (const fuseport::Tensor& tensor : given.tensors) {
    fuseport::Storage& all = tensor.storage();
    all.read_back();
    const double count = (double)all.values.size();
    char kind[16] = "";
    snprintf(kind, sizeof kind, "%s", all.kind.c_str());
    fwrite(kind, sizeof kind, 1, to);
    fwrite(&count, sizeof count, 1, to);
    fwrite(all.values.data(), sizeof(double), all.values.size(), to);
  }
  fclose(from);
  return fclose(to);
}
