// The part of ONNX Runtime's C ABI that these operators use, declared by hand: the wheels carry no headers.
//
// OrtApi is a table of function pointers that only ever grows at its end, so a function is its slot number; the
// numbers up to slot 275 (version 17, where KernelContext_ParallelFor came) are fixed for good. OrtCustomOp is read by
// ONNX Runtime up to the field that the `version` we put in it implies. See onnxruntime_c_api.h, ONNX Runtime 1.17+.
#pragma once

#include <cstddef>
#include <cstdint>

namespace elsi::abi {

constexpr uint32_t kApiVersion = 17;

// Opaque to us; ONNX Runtime hands out pointers to them.
struct Status;
struct Value;
struct TensorInfo;
struct KernelInfo;
struct KernelContext;
struct SessionOptions;
struct CustomOpDomain;

enum ElementType : int { kUndefined = 0, kFloat = 1, kUint8 = 2, kInt32 = 6, kInt64 = 7 };
enum Characteristic : int { kRequired = 0, kOptional = 1, kVariadic = 2 };
enum ErrorCode : int { kFail = 1, kInvalidArgument = 2 };

struct ApiTable {
  const void* slots[1];  // [kLastSlot + 1] and more
};

struct ApiBase {
  const ApiTable* (*get_api)(uint32_t version);  // null for a version that this library does not have
  const char* (*version_string)();
};

// A function of the table: its slot and its type.
template <size_t kSlot, class Fn>
struct Slot {
  static Fn of(const ApiTable* api) { return reinterpret_cast<Fn>(const_cast<void*>(api->slots[kSlot])); }
};

using CreateStatus = Slot<0, Status* (*)(int code, const char* message)>;
using GetErrorCode = Slot<1, int (*)(const Status*)>;
using CreateCustomOpDomain = Slot<26, Status* (*)(const char* name, CustomOpDomain** out)>;
using AddToDomain = Slot<27, Status* (*)(CustomOpDomain*, const struct CustomOp*)>;
using AddCustomOpDomain = Slot<28, Status* (*)(SessionOptions*, CustomOpDomain*)>;
using GetTensorMutableData = Slot<51, Status* (*)(Value*, void** out)>;
using GetTensorElementType = Slot<60, Status* (*)(const TensorInfo*, int* out)>;
using GetDimensionsCount = Slot<61, Status* (*)(const TensorInfo*, size_t* out)>;
using GetDimensions = Slot<62, Status* (*)(const TensorInfo*, int64_t* out, size_t count)>;
using GetTensorTypeAndShape = Slot<65, Status* (*)(const Value*, TensorInfo** out)>;
using GetAttributeFloat = Slot<85, Status* (*)(const KernelInfo*, const char* name, float* out)>;
using GetAttributeInt = Slot<86, Status* (*)(const KernelInfo*, const char* name, int64_t* out)>;
using GetInputCount = Slot<88, Status* (*)(const KernelContext*, size_t* out)>;
using GetInput = Slot<90, Status* (*)(const KernelContext*, size_t index, const Value** out)>;
using GetOutput = Slot<91, Status* (*)(KernelContext*, size_t index, const int64_t* dims, size_t count, Value** out)>;
using ReleaseStatus = Slot<93, void (*)(Status*)>;
using ReleaseTensorInfo = Slot<99, void (*)(TensorInfo*)>;
using GetNodeInputCount = Slot<230, Status* (*)(const KernelInfo*, size_t* out)>;
using GetConstantInput = Slot<249, Status* (*)(const KernelInfo*, size_t index, int* is_constant, const Value** out)>;
using ParallelFor =
    Slot<274, Status* (*)(const KernelContext*, void (*fn)(void*, size_t), size_t total, size_t batches, void* data)>;

// The fields of OrtCustomOp in their order; the last is version 18's. Null where the default is meant.
struct CustomOp {
  uint32_t version = kApiVersion;
  void* (*create_kernel)(const CustomOp*, const ApiTable*, const KernelInfo*) = nullptr;
  const char* (*name)(const CustomOp*) = nullptr;
  const char* (*provider)(const CustomOp*) = nullptr;
  ElementType (*input_type)(const CustomOp*, size_t) = nullptr;
  size_t (*input_count)(const CustomOp*) = nullptr;
  ElementType (*output_type)(const CustomOp*, size_t) = nullptr;
  size_t (*output_count)(const CustomOp*) = nullptr;
  void (*compute)(void*, KernelContext*) = nullptr;  // null: the fallible ones below are used
  void (*destroy)(void*) = nullptr;
  Characteristic (*input_characteristic)(const CustomOp*, size_t) = nullptr;
  Characteristic (*output_characteristic)(const CustomOp*, size_t) = nullptr;
  int (*input_memory)(const CustomOp*, size_t) = nullptr;
  int (*variadic_input_min)(const CustomOp*) = nullptr;
  int (*variadic_input_same)(const CustomOp*) = nullptr;
  int (*variadic_output_min)(const CustomOp*) = nullptr;
  int (*variadic_output_same)(const CustomOp*) = nullptr;
  Status* (*create_kernel_v2)(const CustomOp*, const ApiTable*, const KernelInfo*, void** kernel) = nullptr;
  Status* (*compute_v2)(void*, KernelContext*) = nullptr;
  Status* (*infer_shape)(const CustomOp*, void* context) = nullptr;
  int (*start_version)(const CustomOp*) = nullptr;
  int (*end_version)(const CustomOp*) = nullptr;
  size_t (*may_inplace)(int**, int**) = nullptr;
  void (*release_inplace)(int*, int*) = nullptr;
  size_t (*alias_map)(int**, int**) = nullptr;
  void (*release_alias)(int*, int*) = nullptr;
};

}  // namespace elsi::abi
