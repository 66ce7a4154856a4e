// MatMulBlocks: y [.., N] = x [.., K] times a matrix of 4- or 8-bit weights, as MatMulNBits has it at accuracy level 4.
#include <algorithm>

#include "matrix.h"
#include "ops.h"

namespace elsi {
namespace {

constexpr int64_t kMostWidth = 1 << 24;

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

class MatMulBlocks : public Kernel {
 public:
  explicit MatMulBlocks(const NodeInfo& node)
      : path_(chosen_path()),
        inputs_(static_cast<size_t>(node.integer("K", 1, kMostWidth))),
        matrix_(node.constant(1), node.constant(2), inputs_, static_cast<size_t>(node.integer("N", 1, kMostWidth)), bits_of(node)) {}

  void compute(const Call& call) const override {
    const Tensor x = call.input(0, abi::kFloat);
    const size_t rows = rows_of(x, inputs_);
    std::vector<int64_t> shape = x.shape;
    shape.back() = static_cast<int64_t>(matrix_.columns());
    float* y = call.output(0, shape, abi::kFloat).as_mutable<float>();
    if (rows == 0) return;
    const Pool pool = call.pool();
    const Activations acts(path_, pool, x.as<float>(), rows, inputs_, matrix_.zero());
    const size_t groups = matrix_.groups(), tasks = task_count(groups, matrix_.group_bytes(), rows);
    const size_t tile = acts.chunks() == 1 ? groups : 1;  // with several chunks, a group stays in the cache for all of them
    auto work = [&](size_t task) {
      const size_t end = (task + 1) * groups / tasks;
      for (size_t group = task * groups / tasks; group < end; group += tile)
        for (size_t chunk = 0; chunk < acts.chunks(); ++chunk)
          matrix_.multiply(path_, acts.chunk(chunk), group, std::min(end, group + tile), y + acts.first_row(chunk) * matrix_.columns(),
                           matrix_.columns());
    };
    pool.run(tasks, work);
  }

 private:
  const Path& path_;
  size_t inputs_;
  PackedMatrix matrix_;
};

}  // namespace

const Op& matmul_blocks() {
  static const Op op("MatMulBlocks", {abi::kFloat, abi::kUint8, abi::kFloat}, {abi::kFloat},
                     [](const NodeInfo& node) -> std::unique_ptr<Kernel> { return std::make_unique<MatMulBlocks>(node); });
  return op;
}

}  // namespace elsi
