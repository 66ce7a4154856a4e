// What every operator here is built from: tensors as spans, errors as exceptions that end as ONNX Runtime statuses.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "ort_abi.h"

namespace elsi {

// A graph or call that cannot be run as given. Becomes ORT_INVALID_ARGUMENT with this one line.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Refuses unless `condition` holds. A macro, so that the message is made only then: kernels check every call, and the
// words for a dozen shapes take microseconds.
#define ELSI_REQUIRE(condition, ...)                      \
  do {                                                    \
    if (!(condition)) throw ::elsi::Refused(__VA_ARGS__); \
  } while (false)

struct Tensor {
  int type = abi::kUndefined;
  std::vector<int64_t> shape;
  void* data = nullptr;

  template <class T>
  const T* as() const {
    return static_cast<const T*>(data);
  }
  template <class T>
  T* as_mutable() const {
    return static_cast<T*>(data);
  }
  size_t size() const;  // elements
};

std::string text(const std::vector<int64_t>& shape);  // "[1, 8, 576]"

// Runs work(0..tasks-1) on ONNX Runtime's own pool, the caller included. A task must not throw.
class Pool {
 public:
  Pool(const abi::ApiTable* api, const abi::KernelContext* context) : api_(api), context_(context) {}
  template <class Work>
  void run(size_t tasks, Work& work) const {
    if (tasks <= 1) {
      if (tasks == 1) work(0);
      return;
    }
    dispatch(tasks, [](void* data, size_t index) { (*static_cast<Work*>(data))(index); }, &work);
  }

 private:
  void dispatch(size_t tasks, void (*fn)(void*, size_t), void* data) const;
  const abi::ApiTable* api_;
  const abi::KernelContext* context_;
};

// What a node says: read once, when its kernel is made.
class NodeInfo {
 public:
  NodeInfo(const abi::ApiTable* api, const abi::KernelInfo* info) : api_(api), info_(info) {}
  int64_t integer(const char* name, int64_t low, int64_t high) const;  // required; Refused outside low..high
  float number(const char* name) const;                                // required
  Tensor constant(size_t input) const;                                 // Refused where it is not an initializer
  size_t input_count() const;                                          // without optional ones left out at the end

 private:
  const abi::ApiTable* api_;
  const abi::KernelInfo* info_;
};

// One call of a kernel.
class Call {
 public:
  Call(const abi::ApiTable* api, abi::KernelContext* context) : api_(api), context_(context) {}
  Tensor input(size_t index, int type) const;  // Refused for another element type
  Tensor output(size_t index, const std::vector<int64_t>& shape, int type) const;
  Pool pool() const { return Pool(api_, context_); }

 private:
  const abi::ApiTable* api_;
  abi::KernelContext* context_;
};

class Kernel {
 public:
  virtual ~Kernel() = default;
  virtual void compute(const Call& call) const = 0;
};

using MakeKernel = std::unique_ptr<Kernel> (*)(const NodeInfo&);

// Name, element types and kernel of one operator, as ONNX Runtime asks for them. The last `optional` inputs may be left
// out.
struct Op : abi::CustomOp {
  Op(const char* name, std::vector<abi::ElementType> inputs, std::vector<abi::ElementType> outputs, MakeKernel make,
     size_t optional = 0);
  const char* op_name;
  std::vector<abi::ElementType> inputs, outputs;
  MakeKernel make;
  size_t optional;
};

// Memory aligned to a cache line, grown and never shrunk; the bytes are not initialised.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes) { reserve(bytes); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }
  uint8_t* reserve(size_t bytes) {
    if (bytes > capacity_) {
      std::free(data_);
      capacity_ = 0;
      const size_t rounded = (bytes + 63) / 64 * 64;
      data_ = static_cast<uint8_t*>(std::aligned_alloc(64, rounded));
      if (data_ == nullptr) throw std::bad_alloc();
      capacity_ = rounded;
    }
    return data_;
  }
  uint8_t* data() const { return data_; }

 private:
  uint8_t* data_ = nullptr;
  size_t capacity_ = 0;
};

}  // namespace elsi
