// DecoderBlock: a whole block of a Llama-like model on the residual stream x [1, T, E]:
//
//   middle = x + attention(norm(x) Wqkv) Wo;  y = middle + (SiLU(norm(middle) Wgate) * (norm(middle) Wup)) Wdown
//
// The operations are those of NormMatMulBlocks, TreeAttention, MatMulBlocks and NormGatedBlocks one after another, in
// the same order, but with one hand-off to the pool for all of them: at a few rows that is half of a small block's
// time.
//
// Inputs: x; keys, values, cos, sin, cached, parents as TreeAttention has them; gamma of either norm; levels and scales
// of Wqkv, Wo, Wgate, Wup, Wdown; optionally the same ten for their shifts, shift_values and shift_scales.
// Outputs: y, present keys, present values.
#include <algorithm>

#include "attention.h"
#include "matrix.h"
#include "ops.h"
#include "skip_norm.h"
#include "team.h"

namespace elsi {
namespace {

constexpr size_t kAttention = 1, kGamma = 7, kMatrices = 9, kMatrixCount = 5;
constexpr size_t kFetched = 64 << 10;  // bytes of weights asked for while attention computes

// Matrix `index` of the five.
PackedMatrix packed(const NodeInfo& node, size_t index, size_t inputs, size_t columns) {
  return PackedMatrix(PackedMatrix::tensors(node, kMatrices, index, kMatrixCount), inputs, columns, bits_of(node));
}

class DecoderBlock : public Kernel {
 public:
  explicit DecoderBlock(const NodeInfo& node)
      : path_(chosen_path()),
        width_(size_of(node, "width")),
        attended_(size_of(node, "attended")),
        attention_(node),
        first_norm_(node, kGamma, width_),
        second_norm_(node, kGamma + 1, width_),
        qkv_(packed(node, 0, width_, size_of(node, "qkv"))),
        o_(packed(node, 1, attended_, width_)),
        mlp_{packed(node, 2, width_, size_of(node, "mlp")), packed(node, 3, width_, size_of(node, "mlp"))},
        down_(packed(node, 4, mlp_.gate.columns(), width_)) {}

  void compute(const Call& call) const override {
    const Tensor input = call.input(0, abi::kFloat);
    ELSI_REQUIRE(input.shape.size() == 3 && input.shape[0] == 1 && input.shape[2] == static_cast<int64_t>(width_),
                 "x is " + text(input.shape) + ", it must be [1, T, " + std::to_string(width_) + "]");
    const size_t rows = static_cast<size_t>(input.shape[1]), mlp = mlp_.gate.columns();
    const float* x = input.as<float>();
    const Attention::Run attention =
        attention_.start(call, Attention::inputs(call, kAttention), rows, qkv_.columns(), 1);
    ELSI_REQUIRE(attention_.heads() * attention.width() == attended_,
                 "attribute attended is " + std::to_string(attended_) + ", heads and cache say " +
                     std::to_string(attention_.heads() * attention.width()));
    float* y = call.output(0, input.shape, abi::kFloat).as_mutable<float>();
    if (rows == 0) return;
    const size_t widest = std::max({qkv_.columns(), attended_, mlp, width_});
    static thread_local Buffer buffer;
    float* normed = reinterpret_cast<float*>(buffer.reserve(rows * (2 * width_ + widest) * sizeof(float)));
    float *middle = normed + rows * width_, *wide = middle + rows * width_;  // wide: qkv, then the gated rows
    Activations::make_room(rows, widest);
    const Activations of_width(rows, qkv_), of_attended(rows, o_), of_mlp(rows, down_);

    auto normalise = [&](const SkipNorm* norm, const float* from) {
      return [&, norm, from](size_t row) {
        float* to = normed + row * width_;
        norm->norm_row(from + row * width_, to);
        of_width.quantise_row(path_, to, row);
      };
    };
    const size_t threads = Team::threads_seen();
    Team::run(call.pool(), [&](Team::Member& member) {
      member.phase(rows, normalise(&first_norm_, x));
      product(member, threads, qkv_, of_width, wide);
      member.phase(rows, [&](size_t row) { attention.enter(wide + row * qkv_.columns(), row); });
      member.phase(attention.tasks(), [&](size_t task) {
        // Scores come from the caches of the CPU: meanwhile memory may bring what is read next.
        const size_t share = attention.tasks();
        o_.fetch_share(task, share, kFetched);
        mlp_.gate.fetch_share(task, share, kFetched / 2);
        mlp_.up.fetch_share(task, share, kFetched / 2);
        attention.attend(task);
      });
      member.phase(rows, [&](size_t row) {
        float* out = wide + row * attended_;  // the queries, keys and values have been read
        attention.finish(row, out);
        of_attended.quantise_row(path_, out, row);
      });
      product(member, threads, o_, of_attended, middle, x);
      member.phase(rows, normalise(&second_norm_, middle));
      const size_t tasks = even_task_count(mlp_.gate.groups(), 2 * mlp_.gate.group_bytes(), threads);
      member.phase(tasks, [&](size_t task) { mlp_.multiply_share(path_, of_width, task, tasks, wide); });
      member.phase(rows, [&](size_t row) { of_mlp.quantise_row(path_, wide + row * mlp, row); });
      product(member, threads, down_, of_mlp, y, middle);
    });
    attention.require_memory();
  }

 private:
  // y [T, N] = rows times a matrix, added to `skip` where there is one.
  void product(Team::Member& member, size_t threads, const PackedMatrix& matrix, const Activations& acts, float* y,
               const float* skip = nullptr) const {
    const size_t tasks = even_task_count(matrix.groups(), matrix.group_bytes(), threads), columns = matrix.columns();
    member.phase(tasks, [&](size_t task) {
      multiply_share(path_, matrix, acts, task, tasks, y);
      if (skip == nullptr) return;
      const size_t first = task * matrix.groups() / tasks * kColumns;
      const size_t last = std::min(columns, (task + 1) * matrix.groups() / tasks * kColumns);
      for (size_t row = 0; row < acts.rows(); ++row)
        for (size_t i = row * columns + first; i < row * columns + last; ++i) y[i] = skip[i] + y[i];
    });
  }

  const Path& path_;
  size_t width_, attended_;
  Attention attention_;
  SkipNorm first_norm_, second_norm_;
  PackedMatrix qkv_, o_;
  GatedMatrices mlp_;
  PackedMatrix down_;
};

}  // namespace

const Op& decoder_block() {
  static const Op op(
      "DecoderBlock",
      [] {
        std::vector<abi::ElementType> types(1 + 4, abi::kFloat);
        types.insert(types.end(), {abi::kInt32, abi::kInt64, abi::kFloat, abi::kFloat});
        for (size_t pair = 0; pair < 2 * kMatrixCount; ++pair) types.insert(types.end(), {abi::kUint8, abi::kFloat});
        return types;
      }(),
      {abi::kFloat, abi::kFloat, abi::kFloat},
      [](const NodeInfo& node) -> std::unique_ptr<Kernel> { return std::make_unique<DecoderBlock>(node); },
      2 * kMatrixCount);
  return op;
}

}  // namespace elsi
