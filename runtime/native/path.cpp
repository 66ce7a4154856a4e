#include "path.h"

#include <atomic>
#include <cstring>

namespace elsi {
namespace {

std::atomic<const Path*> forced{nullptr};

}  // namespace

const std::vector<const Path*>& paths() {
  static const std::vector<const Path*> all = {
#if defined(__x86_64__)
      &kAvx512Vnni,
      &kAvx2,
#elif defined(__aarch64__)
      &kNeonI8mm,
      &kNeonDot,
#endif
      &kPortable,
  };
  return all;
}

const Path& chosen_path() {
  if (const Path* path = forced.load()) return *path;
  for (const Path* path : paths())
    if (path->usable()) return *path;
  return kPortable;
}

bool force_path(const char* name) {
  if (*name == '\0') {
    forced = nullptr;
    return true;
  }
  for (const Path* path : paths())
    if (std::strcmp(path->name, name) == 0 && path->usable()) {
      forced = path;
      return true;
    }
  return false;
}

}  // namespace elsi
