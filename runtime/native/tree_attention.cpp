// TreeAttention: attention of packed queries, keys and values [1, T, (Hq + 2 H) D], see attention.h.
#include "attention.h"
#include "ops.h"

namespace elsi {
namespace {

constexpr size_t kSerialRows = 16;  // entered by the caller alone: a hand-off takes longer

class TreeAttention : public Kernel {
 public:
  explicit TreeAttention(const NodeInfo& node) : attention_(node) {}

  void compute(const Call& call) const override {
    const Tensor qkv = call.input(0, abi::kFloat);
    ELSI_REQUIRE(qkv.shape.size() == 3 && qkv.shape[0] == 1,
                 "queries, keys and values are " + text(qkv.shape) + ", they must be [1, T, (Hq + 2 H) D]");
    const size_t rows = static_cast<size_t>(qkv.shape[1]), width = static_cast<size_t>(qkv.shape[2]);
    const Attention::Run run = attention_.start(call, Attention::inputs(call, 1), rows, width, 1);
    const size_t columns = attention_.heads() * run.width();
    float* out = call.output(0, {1, qkv.shape[1], static_cast<int64_t>(columns)}, abi::kFloat).as_mutable<float>();
    if (rows == 0) return;
    const Pool pool = call.pool();
    auto enter = [&](size_t row) { run.enter(qkv.as<float>() + row * width, row); };
    if (rows > kSerialRows) {
      pool.run(rows, enter);
    } else {
      for (size_t row = 0; row < rows; ++row) enter(row);
    }
    auto attend = [&](size_t task) { run.attend(task); };
    pool.run(run.tasks(), attend);
    run.require_memory();
    for (size_t row = 0; row < rows; ++row) run.finish(row, out + row * columns);
  }

 private:
  Attention attention_;
};

}  // namespace

const Op& tree_attention() {
  static const Op op(
      "TreeAttention", {abi::kFloat, abi::kFloat, abi::kFloat, abi::kFloat, abi::kFloat, abi::kInt32, abi::kInt64},
      {abi::kFloat, abi::kFloat, abi::kFloat},
      [](const NodeInfo& node) -> std::unique_ptr<Kernel> { return std::make_unique<TreeAttention>(node); });
  return op;
}

}  // namespace elsi
