// What the shared library exports: ONNX Runtime's entry, and three plain functions that Python asks through ctypes.
#include <string>

#include "op.h"
#include "ops.h"
#include "path.h"

using namespace elsi;

namespace {

constexpr const char* kDomain = "elsi.edge";

// Set once, by the first registration; read by Python.
std::string& found_version() {
  static std::string version;
  return version;
}

// A call that shows whether the table is the one declared: a status keeps the code that it is made with.
bool statuses_work(const abi::ApiTable* api) {
  abi::Status* status = abi::CreateStatus::of(api)(abi::kInvalidArgument, "");
  const bool same = status != nullptr && abi::GetErrorCode::of(api)(status) == abi::kInvalidArgument;
  if (status != nullptr) abi::ReleaseStatus::of(api)(status);
  return same;
}

}  // namespace

#define ELSI_EXPORT extern "C" __attribute__((visibility("default")))

// Bumped whenever a graph written for one build of the library would not run the same on another.
ELSI_EXPORT int elsi_native_format() { return 5; }

// The version of ONNX Runtime that registered the operators, "" before that.
ELSI_EXPORT const char* elsi_native_runtime() { return found_version().c_str(); }

// Names of the paths that this CPU can run, best first, separated by spaces.
ELSI_EXPORT const char* elsi_native_paths() {
  static const std::string names = [] {
    std::string out;
    for (const Path* path : paths())
      if (path->usable()) out += (out.empty() ? "" : " ") + std::string(path->name);
    return out;
  }();
  return names.c_str();
}

// Makes kernels created from now on use the named path; "" the best one. 0 where it cannot run here.
ELSI_EXPORT int elsi_native_force(const char* name) { return force_path(name) ? 1 : 0; }

ELSI_EXPORT abi::Status* RegisterCustomOps(abi::SessionOptions* options, const abi::ApiBase* base) {
  // Version 1's table is there in every release: enough to say what is wrong with an old one.
  const abi::ApiTable* oldest = base->get_api(1);
  const abi::ApiTable* api = base->get_api(abi::kApiVersion);
  if (api == nullptr) {
    const std::string message =
        std::string("the native operators need ONNX Runtime 1.17 or newer, this is ") + base->version_string();
    return oldest == nullptr ? nullptr : abi::CreateStatus::of(oldest)(abi::kFail, message.c_str());
  }
  // A slot that holds nothing means another table than the one declared here.
  for (const size_t slot : {26, 27, 28, 230, 249, 274})
    if (api->slots[slot] == nullptr)
      return abi::CreateStatus::of(api)(abi::kFail, "ONNX Runtime's table of functions has holes");
  if (!statuses_work(api))
    return abi::CreateStatus::of(api)(abi::kFail, "ONNX Runtime's table of functions is not the expected one");
  found_version() = base->version_string();
  abi::CustomOpDomain* domain = nullptr;  // ONNX Runtime keeps it for as long as the options live
  abi::Status* status = abi::CreateCustomOpDomain::of(api)(kDomain, &domain);
  for (const Op* op : operators())
    if (status == nullptr) status = abi::AddToDomain::of(api)(domain, op);
  if (status == nullptr) status = abi::AddCustomOpDomain::of(api)(options, domain);
  return status;
}
