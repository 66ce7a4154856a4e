#include "skip_norm.h"

#include <algorithm>
#include <cmath>

namespace elsi {
namespace {

constexpr size_t kLanes = 16;
constexpr size_t kSerialValues = 32 << 10;  // by the caller alone below this: a hand-off takes longer
constexpr float kMostEpsilon = 1.0f;

float added_up(float (&lanes)[kLanes]) {
  for (size_t half = kLanes / 2; half > 0; half /= 2)
    for (size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

}  // namespace

SkipNorm::SkipNorm(const NodeInfo& node, size_t gamma_input, size_t inputs) : epsilon_(node.number("epsilon")) {
  ELSI_REQUIRE(epsilon_ >= 0.0f && epsilon_ <= kMostEpsilon,
               "attribute epsilon is " + std::to_string(epsilon_) + ", it must be 0..1");
  const Tensor gamma = node.constant(gamma_input);
  ELSI_REQUIRE(gamma.type == abi::kFloat && gamma.shape == std::vector<int64_t>{static_cast<int64_t>(inputs)},
               "gamma is " + text(gamma.shape) + " of type " + std::to_string(gamma.type) + ", K says float32 [" +
                   std::to_string(inputs) + "]");
  gamma_.assign(gamma.as<float>(), gamma.as<float>() + inputs);
}

const float* SkipNorm::run(const Pool& pool, const float* x, const float* skip, float* sums, size_t rows) const {
  static thread_local Buffer buffer;
  const size_t inputs = gamma_.size();
  float* normed = reinterpret_cast<float*>(buffer.reserve(rows * inputs * sizeof(float)));
  auto work = [&](size_t row) {
    one_row(x + row * inputs, skip + row * inputs, sums + row * inputs, normed + row * inputs);
  };
  if (rows * inputs >= kSerialValues) {
    pool.run(rows, work);
  } else {
    for (size_t row = 0; row < rows; ++row) work(row);
  }
  return normed;
}

void SkipNorm::one_row(const float* x, const float* skip, float* sum, float* normed) const {
  for (size_t i = 0; i < gamma_.size(); ++i) sum[i] = x[i] + skip[i];
  norm_row(sum, normed);
}

void SkipNorm::norm_row(const float* sum, float* normed) const {
  const size_t inputs = gamma_.size(), whole = inputs / kLanes * kLanes;
  float lanes[kLanes] = {};
  for (size_t i = 0; i < whole; i += kLanes)
    for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += sum[i + lane] * sum[i + lane];
  for (size_t i = whole; i < inputs; ++i) lanes[i - whole] += sum[i] * sum[i];
  const float mean = added_up(lanes) / static_cast<float>(inputs);
  const float scale = 1.0f / std::sqrt(mean + epsilon_);
  for (size_t i = 0; i < inputs; ++i) normed[i] = sum[i] * scale * gamma_[i];
}

}  // namespace elsi
