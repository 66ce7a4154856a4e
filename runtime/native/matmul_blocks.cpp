// MatMulBlocks: y [.., N] = x [.., K] times a matrix of 4- or 8-bit weights, as MatMulNBits has it at accuracy level 4.
// GatedBlocks: y = SiLU(x times a first matrix) * (x times a second one), x quantised once.
// NormMatMulBlocks, NormGatedBlocks: the same of norm(x + skip), with inputs skip and gamma after x; x + skip is the
// second output.
#include <algorithm>
#include <memory>

#include "matrix.h"
#include "ops.h"
#include "skip_norm.h"

namespace elsi {
namespace {

constexpr int64_t kMostColumns = 1 << 24;

int bits_of(const NodeInfo& node) {
  const int bits = static_cast<int>(node.integer("bits", 4, 8));
  require(bits == 4 || bits == 8, "attribute bits is " + std::to_string(bits) + ", it must be 4 or 8");
  node.integer("block_size", kBlock, kBlock);
  return bits;
}

size_t size_of(const NodeInfo& node, const char* name) {
  return static_cast<size_t>(node.integer(name, 1, kMostColumns));
}

// What a product reads: x [.., K] as it is, or the norm of x + skip.
class Source {
 public:
  Source(const NodeInfo& node, bool normed)
      : inputs_(size_of(node, "K")), norm_(normed ? std::make_unique<SkipNorm>(node, 2, inputs_) : nullptr) {}

  size_t inputs() const { return inputs_; }
  // The place of a weight among the node's inputs, 0 for the first.
  size_t place(size_t weight) const { return (norm_ ? 3 : 1) + weight; }

  struct Rows {
    const float* data;  // [count, K]
    size_t count;
    float* y;  // the first output, [count, columns]
  };

  // Refused where the last axis is not K, or where skip is not as x is.
  Rows read(const Call& call, size_t columns) const {
    const Tensor x = call.input(0, abi::kFloat);
    require(!x.shape.empty() && x.shape.back() == static_cast<int64_t>(inputs_),
            "x is " + text(x.shape) + ", its last axis must be K = " + std::to_string(inputs_));
    std::vector<int64_t> shape = x.shape;
    shape.back() = static_cast<int64_t>(columns);
    Rows rows{x.as<float>(), x.size() / inputs_, call.output(0, shape, abi::kFloat).as_mutable<float>()};
    if (norm_) {
      const Tensor skip = call.input(1, abi::kFloat);
      require(skip.shape == x.shape, "skip is " + text(skip.shape) + ", x is " + text(x.shape));
      float* sums = call.output(1, x.shape, abi::kFloat).as_mutable<float>();
      rows.data = norm_->run(call.pool(), rows.data, skip.as<float>(), sums, rows.count);
    }
    return rows;
  }

 private:
  size_t inputs_;
  std::unique_ptr<SkipNorm> norm_;
};

class MatMulBlocks : public Kernel {
 public:
  MatMulBlocks(const NodeInfo& node, bool normed)
      : path_(chosen_path()),
        source_(node, normed),
        matrix_(node.constant(source_.place(0)), node.constant(source_.place(1)), source_.inputs(), size_of(node, "N"),
                bits_of(node)) {}

  void compute(const Call& call) const override {
    const size_t columns = matrix_.columns();
    const Source::Rows rows = source_.read(call, columns);
    if (rows.count == 0) return;
    const Pool pool = call.pool();
    const Activations acts(path_, pool, rows.data, rows.count, source_.inputs(), matrix_.zero());
    const size_t groups = matrix_.groups(), tasks = task_count(groups, matrix_.group_bytes(), rows.count);
    const size_t tile =
        acts.chunks() == 1 ? groups : 1;  // with several chunks, a group stays in the cache for all of them
    auto work = [&](size_t task) {
      const size_t end = (task + 1) * groups / tasks;
      for (size_t group = task * groups / tasks; group < end; group += tile)
        for (size_t chunk = 0; chunk < acts.chunks(); ++chunk)
          matrix_.multiply(path_, acts.chunk(chunk), group, std::min(end, group + tile),
                           rows.y + acts.first_row(chunk) * columns + group * kColumns, columns);
    };
    pool.run(tasks, work);
  }

 private:
  const Path& path_;
  Source source_;
  PackedMatrix matrix_;
};

class GatedBlocks : public Kernel {
 public:
  GatedBlocks(const NodeInfo& node, bool normed)
      : path_(chosen_path()),
        source_(node, normed),
        gate_(node.constant(source_.place(0)), node.constant(source_.place(1)), source_.inputs(), size_of(node, "N"),
              bits_of(node)),
        up_(node.constant(source_.place(2)), node.constant(source_.place(3)), source_.inputs(), gate_.columns(),
            bits_of(node)) {}

  void compute(const Call& call) const override {
    const size_t columns = gate_.columns();
    const Source::Rows rows = source_.read(call, columns);
    if (rows.count == 0) return;
    const Pool pool = call.pool();
    const Activations acts(path_, pool, rows.data, rows.count, source_.inputs(), gate_.zero());
    const size_t groups = gate_.groups(), tasks = task_count(groups, 2 * gate_.group_bytes(), rows.count);
    auto work = [&](size_t task) {
      for (size_t group = task * groups / tasks; group < (task + 1) * groups / tasks; ++group)
        for (size_t chunk = 0; chunk < acts.chunks(); ++chunk)
          one_group(acts.chunk(chunk), group, rows.y + acts.first_row(chunk) * columns + group * kColumns);
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
  Source source_;
  PackedMatrix gate_, up_;
};

}  // namespace

const Op& matmul_blocks() {
  static const Op op(
      "MatMulBlocks", {abi::kFloat, abi::kUint8, abi::kFloat}, {abi::kFloat},
      [](const NodeInfo& node) -> std::unique_ptr<Kernel> { return std::make_unique<MatMulBlocks>(node, false); });
  return op;
}

const Op& norm_matmul_blocks() {
  static const Op op(
      "NormMatMulBlocks", {abi::kFloat, abi::kFloat, abi::kFloat, abi::kUint8, abi::kFloat},
      {abi::kFloat, abi::kFloat},
      [](const NodeInfo& node) -> std::unique_ptr<Kernel> { return std::make_unique<MatMulBlocks>(node, true); });
  return op;
}

const Op& gated_blocks() {
  static const Op op(
      "GatedBlocks", {abi::kFloat, abi::kUint8, abi::kFloat, abi::kUint8, abi::kFloat}, {abi::kFloat},
      [](const NodeInfo& node) -> std::unique_ptr<Kernel> { return std::make_unique<GatedBlocks>(node, false); });
  return op;
}

const Op& norm_gated_blocks() {
  static const Op op(
      "NormGatedBlocks",
      {abi::kFloat, abi::kFloat, abi::kFloat, abi::kUint8, abi::kFloat, abi::kUint8, abi::kFloat},
      {abi::kFloat, abi::kFloat},
      [](const NodeInfo& node) -> std::unique_ptr<Kernel> { return std::make_unique<GatedBlocks>(node, true); });
  return op;
}

}  // namespace elsi
