#include "op.h"

namespace elsi {
namespace {

// Whether a call of the API went well; its status is let go.
bool done(const abi::ApiTable* api, abi::Status* status) {
  if (status != nullptr) abi::ReleaseStatus::of(api)(status);
  return status == nullptr;
}

// "input 3": a value in words.
struct Place {
  const char* kind;
  size_t index;
  std::string operator+(const char* what) const { return std::string(kind) + " " + std::to_string(index) + what; }
};

Tensor view(const abi::ApiTable* api, const abi::Value* value, const Place& what) {
  Tensor tensor;
  abi::TensorInfo* info = nullptr;
  ELSI_REQUIRE(done(api, abi::GetTensorTypeAndShape::of(api)(value, &info)), what + " is no tensor");
  size_t rank = 0;
  abi::Status* status = abi::GetTensorElementType::of(api)(info, &tensor.type);
  if (status == nullptr) status = abi::GetDimensionsCount::of(api)(info, &rank);
  if (status == nullptr) {
    tensor.shape.resize(rank);
    status = abi::GetDimensions::of(api)(info, tensor.shape.data(), rank);
  }
  abi::ReleaseTensorInfo::of(api)(info);
  ELSI_REQUIRE(done(api, status), what + " has no shape");
  // const or not, the pointer is the same; inputs are only read
  ELSI_REQUIRE(done(api, abi::GetTensorMutableData::of(api)(const_cast<abi::Value*>(value), &tensor.data)),
               what + " has no data");
  return tensor;
}

struct Made {
  const abi::ApiTable* api;
  std::unique_ptr<Kernel> kernel;
};

template <class Work>
abi::Status* guarded(const abi::ApiTable* api, const char* name, Work work) {
  try {
    work();
    return nullptr;
  } catch (const Refused& error) {
    return abi::CreateStatus::of(api)(abi::kInvalidArgument, (std::string(name) + ": " + error.what()).c_str());
  } catch (const std::bad_alloc&) {
    return abi::CreateStatus::of(api)(abi::kFail, (std::string(name) + ": bad_alloc, out of memory").c_str());
  } catch (const std::exception& error) {
    return abi::CreateStatus::of(api)(abi::kFail, (std::string(name) + ": " + error.what()).c_str());
  }
}

const Op& self(const abi::CustomOp* op) { return *static_cast<const Op*>(op); }

}  // namespace

size_t Tensor::size() const {
  size_t count = 1;
  for (int64_t dim : shape) count *= static_cast<size_t>(dim);
  return count;
}

std::string text(const std::vector<int64_t>& shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) out += (i ? ", " : "") + std::to_string(shape[i]);
  return out + "]";
}

void Pool::dispatch(size_t tasks, void (*fn)(void*, size_t), void* data) const {
  ELSI_REQUIRE(done(api_, abi::ParallelFor::of(api_)(context_, fn, tasks, 0, data)),
               "the thread pool refused the work");
}

int64_t NodeInfo::integer(const char* name, int64_t low, int64_t high) const {
  int64_t value = 0;
  ELSI_REQUIRE(done(api_, abi::GetAttributeInt::of(api_)(info_, name, &value)),
               std::string("attribute ") + name + " is missing");
  ELSI_REQUIRE(low <= value && value <= high, std::string("attribute ") + name + " is " + std::to_string(value) +
                                                  ", it must be " + std::to_string(low) + ".." + std::to_string(high));
  return value;
}

float NodeInfo::number(const char* name) const {
  float value = 0;
  ELSI_REQUIRE(done(api_, abi::GetAttributeFloat::of(api_)(info_, name, &value)),
               std::string("attribute ") + name + " is missing");
  return value;
}

Tensor NodeInfo::constant(size_t input) const {
  int is_constant = 0;
  const abi::Value* value = nullptr;
  const Place what{"input", input};
  ELSI_REQUIRE(done(api_, abi::GetConstantInput::of(api_)(info_, input, &is_constant, &value)), what + " is missing");
  ELSI_REQUIRE(is_constant != 0 && value != nullptr, what + " must be an initializer");
  return view(api_, value, what);
}

size_t NodeInfo::input_count() const {
  size_t count = 0;
  ELSI_REQUIRE(done(api_, abi::GetNodeInputCount::of(api_)(info_, &count)), "the inputs cannot be counted");
  return count;
}

Tensor Call::input(size_t index, int type) const {
  const abi::Value* value = nullptr;
  const Place what{"input", index};
  ELSI_REQUIRE(done(api_, abi::GetInput::of(api_)(context_, index, &value)) && value != nullptr, what + " is missing");
  Tensor tensor = view(api_, value, what);
  ELSI_REQUIRE(tensor.type == type,
               what + " has element type " + std::to_string(tensor.type) + ", it must be " + std::to_string(type));
  return tensor;
}

Tensor Call::output(size_t index, const std::vector<int64_t>& shape, int type) const {
  abi::Value* value = nullptr;
  const Place what{"output", index};
  ELSI_REQUIRE(done(api_, abi::GetOutput::of(api_)(context_, index, shape.data(), shape.size(), &value)),
               what + " cannot be made with shape " + text(shape));
  ELSI_REQUIRE(value != nullptr, what + " is missing");
  Tensor tensor;
  tensor.type = type;
  tensor.shape = shape;
  ELSI_REQUIRE(done(api_, abi::GetTensorMutableData::of(api_)(value, &tensor.data)), what + " has no data");
  return tensor;
}

Op::Op(const char* called, std::vector<abi::ElementType> ins, std::vector<abi::ElementType> outs, MakeKernel maker,
       size_t optional_inputs)
    : op_name(called), inputs(std::move(ins)), outputs(std::move(outs)), make(maker), optional(optional_inputs) {
  using abi::CustomOp;
  CustomOp::name = [](const CustomOp* op) { return self(op).op_name; };
  provider = [](const CustomOp*) -> const char* { return nullptr; };  // the CPU
  input_type = [](const CustomOp* op, size_t index) { return self(op).inputs.at(index); };
  input_count = [](const CustomOp* op) { return self(op).inputs.size(); };
  output_type = [](const CustomOp* op, size_t index) { return self(op).outputs.at(index); };
  output_count = [](const CustomOp* op) { return self(op).outputs.size(); };
  input_characteristic = [](const CustomOp* op, size_t index) {
    return index + self(op).optional < self(op).inputs.size() ? abi::kRequired : abi::kOptional;
  };
  output_characteristic = [](const CustomOp*, size_t) { return abi::kRequired; };
  input_memory = [](const CustomOp*, size_t) { return 0; };  // as the provider has it
  variadic_input_min = variadic_output_min = [](const CustomOp*) { return 1; };
  variadic_input_same = variadic_output_same = [](const CustomOp*) { return 1; };
  start_version = end_version = [](const CustomOp*) { return 1; };
  create_kernel_v2 = [](const CustomOp* op, const abi::ApiTable* api, const abi::KernelInfo* info, void** out) {
    return guarded(api, self(op).op_name, [&] { *out = new Made{api, self(op).make(NodeInfo(api, info))}; });
  };
  compute_v2 = [](void* kernel, abi::KernelContext* context) {
    const Made& made = *static_cast<Made*>(kernel);
    return guarded(made.api, "elsi.edge", [&] { made.kernel->compute(Call(made.api, context)); });
  };
  destroy = [](void* kernel) { delete static_cast<Made*>(kernel); };
}

}  // namespace elsi
