// A residual sum with its root-mean-square norm, folded into the product that reads the normed rows.
#pragma once

#include "op.h"

namespace elsi {

// sum = x + skip; normed = sum / sqrt(mean(sum^2) + epsilon) * gamma, as SkipSimplifiedLayerNormalization has it. The
// squares go into 16 lanes, which are added up in pairs: a row's bits are its own, on every path and for any number of
// rows. What ONNX Runtime's operator gives differs by rounding.
class SkipNorm {
 public:
  // gamma float [K], an initializer.
  SkipNorm(const NodeInfo& node, size_t gamma_input, size_t inputs);

  // Rows of x + skip into sums [rows, K]; the normed rows, in a buffer that the calling thread keeps until its next call.
  const float* run(const Pool& pool, const float* x, const float* skip, float* sums, size_t rows) const;
  // The norm of one row that is a sum already.
  void norm_row(const float* sum, float* normed) const;

 private:
  void one_row(const float* x, const float* skip, float* sum, float* normed) const;

  float epsilon_;
  std::vector<float> gamma_;
};

}  // namespace elsi
