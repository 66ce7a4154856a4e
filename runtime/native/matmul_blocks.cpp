// MatMulBlocks: y [.., N] = x [.., K] times a matrix of 4- or 8-bit weights, as MatMulNBits has it at accuracy level 4.
// GatedBlocks: y = SiLU(x times a first matrix) * (x times a second one), x quantised once.
#include <algorithm>

#include "matrix.h"
#include "ops.h"

namespace elsi {
namespace {

constexpr int64_t kMostColumns = 1 << 24;

int bits_of(const NodeInfo& node) {
  const int bits = static_cast<int>(node.integer("bits", 4, 8));
  require(bits == 4 || bits == 8, "attribute bits is " + std::to_string(bits) + ", it must be 4 or 8");
  node.integer("block_size", kBlock, kBlock);
  return bits;
}

// Rows of x and the shape of y. Refused where x's last axis is not K.
size_t rows_of(const Tensor& x, size_t inputs) {
  require(!x.shape.empty() && x.shape.back() == static_cast<int64_t>(inputs),
          "x is " + text(x.shape) + ", its last axis must be K = " + std::to_string(inputs));
  return x.size() / inputs;
}

float* output_like(const Call& call, const Tensor& x, size_t columns) {
  std::vector<int64_t> shape = x.shape;
  shape.back() = static_cast<int64_t>(columns);
  return call.output(0, shape, abi::kFloat).as_mutable<float>();
}

class MatMulBlocks : public Kernel {
 public:
  explicit MatMulBlocks(const NodeInfo& node)
      : path_(chosen_path()),
        inputs_(static_cast<size_t>(node.integer("K", 1, kMostColumns))),
        matrix_(node.constant(1), node.constant(2), inputs_, static_cast<size_t>(node.integer("N", 1, kMostColumns)),
                bits_of(node)) {}

  void compute(const Call& call) const override {
    const Tensor x = call.input(0, abi::kFloat);
    const size_t rows = rows_of(x, inputs_), columns = matrix_.columns();
    float* y = output_like(call, x, columns);
    if (rows == 0) return;
    const Pool pool = call.pool();
    const Activations acts(path_, pool, x.as<float>(), rows, inputs_, matrix_.zero());
    const size_t groups = matrix_.groups(), tasks = task_count(groups, matrix_.group_bytes(), rows);
    const size_t tile =
        acts.chunks() == 1 ? groups : 1;  // with several chunks, a group stays in the cache for all of them
    auto work = [&](size_t task) {
      const size_t end = (task + 1) * groups / tasks;
      for (size_t group = task * groups / tasks; group < end; group += tile)
        for (size_t chunk = 0; chunk < acts.chunks(); ++chunk)
          matrix_.multiply(path_, acts.chunk(chunk), group, std::min(end, group + tile),
                           y + acts.first_row(chunk) * columns + group * kColumns, columns);
    };
    pool.run(tasks, work);
  }

 private:
  const Path& path_;
  size_t inputs_;
  PackedMatrix matrix_;
};

class GatedBlocks : public Kernel {
 public:
  explicit GatedBlocks(const NodeInfo& node)
      : path_(chosen_path()),
        inputs_(static_cast<size_t>(node.integer("K", 1, kMostColumns))),
        gate_(node.constant(1), node.constant(2), inputs_, static_cast<size_t>(node.integer("N", 1, kMostColumns)),
              bits_of(node)),
        up_(node.constant(3), node.constant(4), inputs_, gate_.columns(), bits_of(node)) {}

  void compute(const Call& call) const override {
    const Tensor x = call.input(0, abi::kFloat);
    const size_t rows = rows_of(x, inputs_), columns = gate_.columns();
    float* y = output_like(call, x, columns);
    if (rows == 0) return;
    const Pool pool = call.pool();
    const Activations acts(path_, pool, x.as<float>(), rows, inputs_, gate_.zero());
    const size_t groups = gate_.groups(), tasks = task_count(groups, 2 * gate_.group_bytes(), rows);
    auto work = [&](size_t task) {
      for (size_t group = task * groups / tasks; group < (task + 1) * groups / tasks; ++group)
        for (size_t chunk = 0; chunk < acts.chunks(); ++chunk)
          one_group(acts.chunk(chunk), group, y + acts.first_row(chunk) * columns + group * kColumns);
    };
    pool.run(tasks, work);
  }

 private:
  void one_group(const QuantisedRows& rows, size_t group, float* y) const {
    float gates[kMaxRows * kColumns] = {}, ups[kMaxRows * kColumns] = {};
    gate_.multiply(path_, rows, group, group + 1, gates, kColumns);
    up_.multiply(path_, rows, group, group + 1, ups, kColumns);
    const size_t width = std::min(kColumns, gate_.columns() - group * kColumns);
    for (size_t row = 0; row < rows.count; ++row) {
      path_.gate(gates + row * kColumns, ups + row * kColumns);
      std::copy_n(gates + row * kColumns, width, y + row * gate_.columns());
    }
  }

  const Path& path_;
  size_t inputs_;
  PackedMatrix gate_, up_;
};

}  // namespace

const Op& matmul_blocks() {
  static const Op op(
      "MatMulBlocks", {abi::kFloat, abi::kUint8, abi::kFloat}, {abi::kFloat},
      [](const NodeInfo& node) -> std::unique_ptr<Kernel> { return std::make_unique<MatMulBlocks>(node); });
  return op;
}

const Op& gated_blocks() {
  static const Op op(
      "GatedBlocks", {abi::kFloat, abi::kUint8, abi::kFloat, abi::kUint8, abi::kFloat}, {abi::kFloat},
      [](const NodeInfo& node) -> std::unique_ptr<Kernel> { return std::make_unique<GatedBlocks>(node); });
  return op;
}

}  // namespace elsi
