// Runs an artifact in C++ libtorch, for `fuseport verify`. No Python is in this process.
//
//     host FORMAT ARTIFACT DEVICE [LIBRARY…]
//
// FORMAT is `torchscript` or `aot_inductor`, DEVICE `cpu` or `cuda`; libraries are opened first, in
// order. It says `ok 0` once the artifact is loaded; from then on it answers requests until its input
// ends. A message is a line with a word and a number of bytes, then those bytes. Requests are `run`
// and `differentiate`, with what `torch.save` makes of
//
//     {"inputs": {name: tensor}, "cotangents": {output: tensor}, "outputs": [name]}
//
// Answers are `ok`, with what `torch.load` reads as (((output, tensor), …), ((name, gradient), …),
// seconds), None for no gradient, or `error` with a reason. The seconds are those of the call itself,
// on the device: tensors come and go as the CPU's. Strides survive both ways.
#include <dlfcn.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/cuda.h>
#include <torch/script.h>
#include <unistd.h>

#ifdef __linux__
#include <signal.h>
#include <sys/prctl.h>
#endif

#include <chrono>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

using torch::IValue;
using torch::Tensor;
using Tensors = std::vector<Tensor>;
using Named = std::vector<std::pair<std::string, Tensor>>;  // in order

// An artifact, loaded on a device: inputs in order and the names of outputs → outputs.
struct Artifact {
  torch::Device device = at::kCPU;
  std::function<Named(const Tensors&, const std::vector<std::string>&)> call;
  Named parameters;  // that require gradients
};

Named zip(const std::vector<std::string>& names, const Tensors& tensors) {
  if (names.size() != tensors.size()) {
    throw std::runtime_error("it returned " + std::to_string(tensors.size()) + " tensors where " +
                             std::to_string(names.size()) + " are expected");
  }
  Named named;
  for (size_t i = 0; i < names.size(); ++i) named.emplace_back(names[i], tensors[i]);
  return named;
}

Named outputs_of(const IValue& result, const std::vector<std::string>& names) {
  if (result.isTensor()) return zip(names, {result.toTensor()});
  if (result.isTuple()) {
    Tensors tensors;
    for (const IValue& element : result.toTupleRef().elements()) {
      tensors.push_back(element.toTensor());
    }
    return zip(names, tensors);
  }
  Named named;
  for (const auto& entry : result.toGenericDict()) {
    named.emplace_back(entry.key().toStringRef(), entry.value().toTensor());
  }
  return named;
}

Artifact load_torchscript(const std::string& file, torch::Device device) {
  const auto module = std::make_shared<torch::jit::Module>(torch::jit::load(file, device));
  Artifact artifact{device};
  std::unordered_set<const void*> seen;  // a tied parameter counts once, under its first name
  for (const auto& parameter : module->named_parameters()) {
    if (parameter.value.requires_grad() &&
        seen.insert(parameter.value.unsafeGetTensorImpl()).second) {
      artifact.parameters.emplace_back(parameter.name, parameter.value);
    }
  }
  // A graph is made ready for what its first call asks for, gradients or none, and stays so.
  const auto trained = std::make_shared<torch::jit::Module>(module->clone(/*inplace=*/true));
  artifact.call = [module, trained](const Tensors& inputs, const std::vector<std::string>& names) {
    const auto& asked = torch::GradMode::is_enabled() ? trained : module;
    return outputs_of(asked->forward({inputs.begin(), inputs.end()}), names);
  };
  return artifact;
}

Artifact load_aot_inductor(const std::string& file, torch::Device device) {
  const auto package = std::make_shared<torch::inductor::AOTIModelPackageLoader>(file);
  Artifact artifact{device};
  artifact.call = [package](const Tensors& inputs, const std::vector<std::string>& names) {
    return zip(names, package->run(inputs));
  };
  return artifact;
}

Named run(const Artifact& artifact, const Named& inputs, const std::vector<std::string>& names) {
  const torch::NoGradGuard no_grad;
  Tensors values;
  for (const auto& [name, tensor] : inputs) values.push_back(tensor);
  return artifact.call(values, names);
}

// Outputs, and the gradients of floating inputs and parameters by libtorch's autograd; a gradient
// that does not exist is an undefined tensor, and that of a complex parameter is of its parts.
std::pair<Named, Named> differentiate(const Artifact& artifact, const Named& inputs,
                                      const Named& cotangents,
                                      const std::vector<std::string>& names) {
  const torch::AutoGradMode with_grad(true);
  Tensors values;
  Named leaves;
  for (const auto& [name, tensor] : inputs) {
    values.push_back(tensor);
    if (tensor.is_floating_point()) {
      values.back() = tensor.detach().requires_grad_();
      leaves.emplace_back(name, values.back());
    }
  }
  leaves.insert(leaves.end(), artifact.parameters.begin(), artifact.parameters.end());
  Named outputs = artifact.call(values, names);
  Tensors roots, seeds, wanted;
  for (auto& [name, output] : outputs) {
    for (const auto& [seeded, cotangent] : cotangents) {
      if (seeded == name && output.requires_grad()) {
        roots.push_back(output);
        seeds.push_back(cotangent);
      }
    }
    output = output.detach();
  }
  for (const auto& [name, leaf] : leaves) wanted.push_back(leaf);
  Tensors gradients(wanted.size());
  if (!roots.empty() && !wanted.empty()) {
    gradients = torch::autograd::grad(roots, wanted, seeds, /*retain_graph=*/std::nullopt,
                                      /*create_graph=*/false, /*allow_unused=*/true);
  }
  for (size_t i = 0; i < leaves.size(); ++i) {
    const auto& gradient = gradients[i];
    leaves[i].second = gradient.defined() && gradient.is_complex()
                           ? at::view_as_real(gradient.resolve_conj())
                           : gradient;
  }
  return {outputs, leaves};
}

Named named(const IValue& dictionary, torch::Device device) {
  Named tensors;
  for (const auto& entry : dictionary.toGenericDict()) {
    tensors.emplace_back(entry.key().toStringRef(), entry.value().toTensor().to(device));
  }
  return tensors;
}

// Tuples: a list or dictionary would be pickled with a type tag, which `weights_only` refuses.
IValue packed(const Named& tensors) {
  std::vector<IValue> pairs;
  for (const auto& [name, tensor] : tensors) {
    const IValue value = tensor.defined() ? IValue(tensor.to(at::kCPU)) : IValue();
    pairs.emplace_back(c10::ivalue::Tuple::create(IValue(name), value));
  }
  return c10::ivalue::Tuple::create(std::move(pairs));
}

// Until a GPU has done what it was told to.
void wait_for(torch::Device device) {
  if (device.is_cuda()) torch::cuda::synchronize();
}

std::vector<char> answer(const Artifact& artifact, const std::string& what,
                         const std::vector<char>& content) {
  const auto request = torch::jit::pickle_load(content).toGenericDict();
  const Named inputs = named(request.at("inputs"), artifact.device);
  std::vector<std::string> names;
  for (const IValue& name : request.at("outputs").toListRef()) names.push_back(name.toStringRef());
  const Named cotangents = named(request.at("cotangents"), artifact.device);
  wait_for(artifact.device);
  const auto begin = std::chrono::steady_clock::now();
  std::pair<Named, Named> results;
  if (what == "run") {
    results.first = run(artifact, inputs, names);
  } else {
    results = differentiate(artifact, inputs, cotangents, names);
  }
  wait_for(artifact.device);
  const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
  return torch::jit::pickle_save(c10::ivalue::Tuple::create(
      packed(results.first), packed(results.second), IValue(passed.count())));
}

void send(FILE* out, const char* word, const char* data, size_t size) {
  std::fprintf(out, "%s %zu\n", word, size);
  if (std::fwrite(data, 1, size, out) != size || std::fflush(out) != 0) {
    throw std::runtime_error("nobody reads the answer");
  }
}

void refuse(FILE* out, const std::exception& error) {
  // Without the C++ backtrace that torch's own errors carry.
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  const std::string text = torch_error ? torch_error->what_without_backtrace() : error.what();
  send(out, "error", text.data(), text.size());
}

// The answers' own file; whatever else is printed goes to standard error.
FILE* standard_output() {
  FILE* out = fdopen(dup(STDOUT_FILENO), "wb");
  dup2(STDERR_FILENO, STDOUT_FILENO);
  return out;
}

Artifact load(int count, char** arguments) {
  for (int i = 4; i < count; ++i) {
    if (!dlopen(arguments[i], RTLD_NOW | RTLD_GLOBAL)) throw std::runtime_error(dlerror());
  }
  const std::string format = arguments[1], file = arguments[2];
  const torch::Device device(arguments[3]);
  if (device.is_cuda()) {
    if (!torch::cuda::is_available()) throw std::runtime_error("libtorch sees no GPU");
    // As in Python, see `_device`: float32 is float32.
    at::globalContext().setAllowTF32CuDNN(false);
    at::globalContext().setFloat32MatmulPrecision("highest");
  }
  return format == "aot_inductor" ? load_aot_inductor(file, device) : load_torchscript(file, device);
}

}  // namespace

int main(int count, char** arguments) {
#ifdef __linux__
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // end with the process that asked, even if it is killed
#endif
  FILE* out = standard_output();
  if (count < 4) return 2;
  Artifact artifact;
  try {
    artifact = load(count, arguments);
  } catch (const std::exception& error) {
    refuse(out, error);
    return 1;
  }
  send(out, "ok", "", 0);
  char what[16];
  size_t size = 0;
  while (std::scanf("%15s %zu", what, &size) == 2 && std::getchar() == '\n') {
    std::vector<char> content(size);
    if (std::fread(content.data(), 1, size, stdin) != size) return 1;
    try {
      const std::vector<char> result = answer(artifact, what, content);
      send(out, "ok", result.data(), result.size());
    } catch (const std::exception& error) {
      refuse(out, error);
    }
  }
  return 0;
}
