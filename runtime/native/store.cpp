#include "store.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

// Under a sanitizer plain memory, so that it sees the end of every matrix.
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__)
#define ELSI_LARGE_PAGES
#include <sys/mman.h>
#endif

namespace elsi {
namespace {

constexpr size_t kLine = 64;

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

#if defined(ELSI_LARGE_PAGES)

constexpr size_t kPage = 2u << 20;
constexpr size_t kRange = 256u << 20;  // of addresses; costs nothing until it is used

// Addresses without memory behind them at first, so that limits on memory count what is used.
class Range {
 public:
  explicit Range(size_t bytes) : size_(rounded(bytes, kPage)) {
    reserved_ = size_ + kPage;
    start_ = mmap(nullptr, reserved_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start_ == MAP_FAILED) throw std::bad_alloc();
    base_ = reinterpret_cast<uint8_t*>(rounded(reinterpret_cast<uintptr_t>(start_), kPage));
    madvise(base_, size_, MADV_HUGEPAGE);  // small pages do where that is refused
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
  ~Range() { munmap(start_, reserved_); }

  bool has(size_t bytes) const { return used_ + bytes <= size_; }

  uint8_t* take(size_t bytes) {
    const size_t end = rounded(used_ + bytes, kPage);
    if (end > ready_) {
      if (mprotect(base_ + ready_, end - ready_, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
      ready_ = end;
    }
    uint8_t* taken = base_ + used_;
    used_ += bytes;
    return taken;
  }

 private:
  void* start_;
  uint8_t* base_;
  size_t size_, reserved_, ready_ = 0, used_ = 0;
};

#endif

}  // namespace

StoredBytes::StoredBytes(size_t bytes) {
  bytes = rounded(std::max<size_t>(bytes, 1), kLine);
#if defined(ELSI_LARGE_PAGES)
  static std::mutex mutex;
  static std::weak_ptr<Range> newest;  // matrices own their range, so that it goes with the last of them
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Range> range = newest.lock();
  if (!range || !range->has(bytes)) newest = range = std::make_shared<Range>(std::max(bytes, kRange));
  data_ = range->take(bytes);
  owner_ = range;
#else
  data_ = static_cast<uint8_t*>(std::aligned_alloc(kLine, bytes));
  if (data_ == nullptr) throw std::bad_alloc();
  std::memset(data_, 0, bytes);
  owner_ = std::shared_ptr<void>(data_, std::free);
#endif
}

}  // namespace elsi
