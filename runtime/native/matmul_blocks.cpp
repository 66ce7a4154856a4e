// MatMulBlocks: y [.., N] = x [.., K] times a matrix of 4- or 8-bit weights, as MatMulNBits has it at accuracy level 4.
// GatedBlocks: y = SiLU(x times a first matrix) * (x times a second one), x quantised once.
// NormMatMulBlocks, NormGatedBlocks: the same of norm(x + skip), with inputs skip and gamma after x; x + skip is the
// second output.
// Each takes the shifts of 4-bit weights as optional inputs at its end, for all its matrices or none: shift_values and
// shift_scales, in GatedBlocks those of the gate, then those of the other.
#include <algorithm>
#include <memory>

#include "matrix.h"
#include "ops.h"
#include "skip_norm.h"

namespace elsi {
namespace {

// What a product reads: x [.., K] as it is, or the norm of x + skip.
class Source {
 public:
  Source(const NodeInfo& node, bool normed)
      : inputs_(size_of(node, "K")), norm_(normed ? std::make_unique<SkipNorm>(node, 2, inputs_) : nullptr) {}

  size_t inputs() const { return inputs_; }
  size_t first_weight() const { return norm_ ? 3 : 1; }  // its place among the node's inputs

  struct Rows {
    const float* data;  // [count, K]
    size_t count;
    float* y;  // the first output, [count, columns]
  };

  // Refused where the last axis is not K, or where skip is not as x is.
  Rows read(const Call& call, size_t columns) const {
    const Tensor x = call.input(0, abi::kFloat);
    ELSI_REQUIRE(!x.shape.empty() && x.shape.back() == static_cast<int64_t>(inputs_),
                 "x is " + text(x.shape) + ", its last axis must be K = " + std::to_string(inputs_));
    std::vector<int64_t> shape = x.shape;
    shape.back() = static_cast<int64_t>(columns);
    Rows rows{x.as<float>(), x.size() / inputs_, call.output(0, shape, abi::kFloat).as_mutable<float>()};
    if (norm_) {
      const Tensor skip = call.input(1, abi::kFloat);
      ELSI_REQUIRE(skip.shape == x.shape, "skip is " + text(skip.shape) + ", x is " + text(x.shape));
      float* sums = call.output(1, x.shape, abi::kFloat).as_mutable<float>();
      rows.data = norm_->run(call.pool(), rows.data, skip.as<float>(), sums, rows.count);
    }
    return rows;
  }

 private:
  size_t inputs_;
  std::unique_ptr<SkipNorm> norm_;
};

// Matrix `index` of the `count` that a node has.
PackedMatrix packed(const NodeInfo& node, const Source& source, size_t index, size_t count) {
  const PackedMatrix::Tensors tensors = PackedMatrix::tensors(node, source.first_weight(), index, count);
  node.integer("block_size", kBlock, kBlock);
  return PackedMatrix(tensors, source.inputs(), size_of(node, "N"), bits_of(node));
}

class MatMulBlocks : public Kernel {
 public:
  MatMulBlocks(const NodeInfo& node, bool normed)
      : path_(chosen_path()), source_(node, normed), matrix_(packed(node, source_, 0, 1)) {}

  void compute(const Call& call) const override {
    const size_t columns = matrix_.columns();
    const Source::Rows rows = source_.read(call, columns);
    if (rows.count == 0) return;
    const Pool pool = call.pool();
    const Activations acts(path_, pool, rows.data, rows.count, matrix_);
    const size_t tasks = task_count(matrix_.groups(), matrix_.group_bytes(), rows.count);
    auto work = [&](size_t task) { multiply_share(path_, matrix_, acts, task, tasks, rows.y); };
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
        matrices_{packed(node, source_, 0, 2), packed(node, source_, 1, 2)} {}

  void compute(const Call& call) const override {
    const PackedMatrix& gate = matrices_.gate;
    const Source::Rows rows = source_.read(call, gate.columns());
    if (rows.count == 0) return;
    const Pool pool = call.pool();
    const Activations acts(path_, pool, rows.data, rows.count, gate);
    const size_t tasks = task_count(gate.groups(), 2 * gate.group_bytes(), rows.count);
    auto work = [&](size_t task) { matrices_.multiply_share(path_, acts, task, tasks, rows.y); };
    pool.run(tasks, work);
  }

 private:
  const Path& path_;
  Source source_;
  GatedMatrices matrices_;
};

template <class Product, bool kNormed>
std::unique_ptr<Kernel> made(const NodeInfo& node) {
  return std::make_unique<Product>(node, kNormed);
}

// x, skip and gamma where normed, then the tensors of the matrices, their shifts included.
std::vector<abi::ElementType> inputs_of(bool normed, size_t matrices) {
  std::vector<abi::ElementType> types(normed ? 3 : 1, abi::kFloat);
  for (size_t pair = 0; pair < 2 * matrices; ++pair) types.insert(types.end(), {abi::kUint8, abi::kFloat});
  return types;
}

}  // namespace

const Op& matmul_blocks() {
  static const Op op("MatMulBlocks", inputs_of(false, 1), {abi::kFloat}, made<MatMulBlocks, false>, 2);
  return op;
}

const Op& norm_matmul_blocks() {
  static const Op op("NormMatMulBlocks", inputs_of(true, 1), {abi::kFloat, abi::kFloat}, made<MatMulBlocks, true>, 2);
  return op;
}

const Op& gated_blocks() {
  static const Op op("GatedBlocks", inputs_of(false, 2), {abi::kFloat}, made<GatedBlocks, false>, 4);
  return op;
}

const Op& norm_gated_blocks() {
  static const Op op("NormGatedBlocks", inputs_of(true, 2), {abi::kFloat, abi::kFloat}, made<GatedBlocks, true>, 4);
  return op;
}

}  // namespace elsi
