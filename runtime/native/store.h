// Memory for packed weights: matrix after matrix in the same large pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace elsi {

// Bytes at a 64-byte boundary, zero at first. On Linux the bytes of many matrices lie side by side in a range of
// addresses that is backed by pages of 2 MiB where the system has them to give: weights are read once a step from
// memory, and with pages of 4 KiB every 4 KiB of them waits for its address to be looked up. Memory is asked for as it
// is used, and given back when the last matrix of a range is gone. Elsewhere it is plain memory.
class StoredBytes {
 public:
  StoredBytes() = default;             // none
  explicit StoredBytes(size_t bytes);  // throws std::bad_alloc
  uint8_t* data() const { return data_; }

 private:
  std::shared_ptr<void> owner_;
  uint8_t* data_ = nullptr;
};

}  // namespace elsi
