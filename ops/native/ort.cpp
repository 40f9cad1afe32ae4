// The entrance of a library of ONNX Runtime custom ops.
#include "native/ort.hpp"

#include <algorithm>
#include <string>

#define FUSEPORT_EXPORT extern "C" __attribute__((visibility("default")))

namespace fuseport::ort {
namespace {

// The domain with all ops, made once: sessions refer to it for as long as they live, and nothing
// tells when the last of them ends, so it stays.
OrtCustomOpDomain* domain(const OrtApi& api) {
  static OrtCustomOpDomain* const made = [&] {
    OrtCustomOpDomain* created = nullptr;
    check(api, api.CreateCustomOpDomain(DOMAIN, &created));
    for (Op& op : ops()) check(api, api.CustomOpDomain_Add(created, &op));
    return created;
  }();
  return made;
}

}  // namespace
}  // namespace fuseport::ort

// What ONNX Runtime calls when the library is registered with a session's options.
FUSEPORT_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  using namespace fuseport::ort;
  uint32_t version = Context::API;
  for (const Op& op : ops()) version = std::max(version, op.version);
  const OrtApi* api = base->GetApi(version);
  if (!api) {
    const std::string needed = "fuseport needs ONNX Runtime 1." + std::to_string(version);
    return base->GetApi(1)->CreateStatus(ORT_FAIL, (needed + " or later").c_str());
  }
  return guarded(*api, [&] { check(*api, api->AddCustomOpDomain(options, domain(*api))); });
}

// How often kernels of the op of that name have run in this process; -1 if the library has none.
// So a caller can tell that they run, rather than the op's function body.
FUSEPORT_EXPORT int64_t fuseport_calls(const char* name) {
  int64_t calls = -1;
  for (const fuseport::ort::Op& op : fuseport::ort::ops())
    if (std::string_view(op.name) == name) calls = (calls < 0 ? 0 : calls) + op.calls;
  return calls;
}
