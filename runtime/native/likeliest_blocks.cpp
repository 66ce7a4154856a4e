// LikeliestBlocks: MatMulBlocks for the head of a model, with the column of each row's largest value [..] beside the
// product. Inputs x [.., R, K], product_wanted int64 [1], the matrix, optionally its shifts. Where product_wanted is 0
// the product itself is [.., 0, N]: greedy decoding asks for nothing else than the column, and every row of a large
// vocabulary is a hundred thousand bytes and more to write, and to read again.
#include <algorithm>
#include <vector>

#include "matrix.h"
#include "ops.h"

namespace elsi {
namespace {

constexpr size_t kTileGroups = 16;  // groups whose products are searched while they are in the nearest cache
constexpr size_t kTileColumns = kTileGroups * kColumns;
constexpr size_t kWeights = 2;  // their place among the inputs

PackedMatrix packed(const NodeInfo& node) {
  const PackedMatrix::Tensors tensors = PackedMatrix::tensors(node, kWeights, 0, 1);
  node.integer("block_size", kBlock, kBlock);
  return PackedMatrix(tensors, size_of(node, "K"), size_of(node, "N"), bits_of(node));
}

class LikeliestBlocks : public Kernel {
 public:
  explicit LikeliestBlocks(const NodeInfo& node) : path_(chosen_path()), matrix_(packed(node)) {}

  void compute(const Call& call) const override {
    const Tensor x = call.input(0, abi::kFloat), wanted = call.input(1, abi::kInt64);
    const size_t rank = x.shape.size(), inputs = matrix_.inputs();
    ELSI_REQUIRE(rank >= 2 && x.shape.back() == static_cast<int64_t>(inputs),
                 "x is " + text(x.shape) + ", it must be [.., R, K] with K = " + std::to_string(inputs));
    ELSI_REQUIRE(wanted.size() == 1, "product_wanted is " + text(wanted.shape) + ", it must be [1]");
    const bool product = *wanted.as<int64_t>() != 0;
    std::vector<int64_t> shape = x.shape;
    shape.back() = static_cast<int64_t>(matrix_.columns());
    if (!product) shape[rank - 2] = 0;
    float* y = call.output(0, shape, abi::kFloat).as_mutable<float>();
    shape.assign(x.shape.begin(), x.shape.end() - 1);
    int64_t* columns = call.output(1, shape, abi::kInt64).as_mutable<int64_t>();
    const size_t rows = x.size() / inputs;
    if (rows == 0) return;
    const Pool pool = call.pool();
    const Activations acts(path_, pool, x.as<float>(), rows, matrix_);
    const size_t tasks = task_count(matrix_.groups(), matrix_.group_bytes(), rows);
    std::vector<Largest> found(tasks * rows);
    auto work = [&](size_t task) { search(acts, task, tasks, product ? y : nullptr, found.data() + task * rows); };
    pool.run(tasks, work);
    for (size_t row = 0; row < rows; ++row) {
      Largest most = found[row];
      for (size_t task = 1; task < tasks; ++task)
        if (found[task * rows + row].value > most.value) most = found[task * rows + row];
      columns[row] = static_cast<int64_t>(most.column);
    }
  }

 private:
  // A task's share of the columns: all rows' products, into y [R, N] or nowhere, and the largest of each row.
  void search(const Activations& acts, size_t task, size_t tasks, float* y, Largest* found) const {
    float here[kMaxRows * kTileColumns];
    const size_t groups = matrix_.groups(), columns = matrix_.columns(), end = (task + 1) * groups / tasks;
    for (size_t group = task * groups / tasks; group < end; group += kTileGroups) {
      const size_t last = std::min(end, group + kTileGroups), first = group * kColumns;
      const size_t count = std::min(columns, last * kColumns) - first, stride = y == nullptr ? kTileColumns : columns;
      for (size_t chunk = 0; chunk < acts.chunks(); ++chunk) {
        const QuantisedRows rows = acts.chunk(chunk);
        float* out = y == nullptr ? here : y + acts.first_row(chunk) * columns + first;
        matrix_.multiply(path_, rows, group, last, out, stride);
        for (size_t row = 0; row < rows.count; ++row)
          path_.largest(out + row * stride, count, first, found + acts.first_row(chunk) + row);
      }
    }
  }

  const Path& path_;
  PackedMatrix matrix_;
};

std::unique_ptr<Kernel> made(const NodeInfo& node) { return std::make_unique<LikeliestBlocks>(node); }

}  // namespace

const Op& likeliest_blocks() {
  static const Op op("LikeliestBlocks", {abi::kFloat, abi::kInt64, abi::kUint8, abi::kFloat, abi::kUint8, abi::kFloat},
                     {abi::kFloat, abi::kInt64}, made, 2);
  return op;
}

}  // namespace elsi
