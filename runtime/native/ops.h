// The operators of the domain elsi.edge.
#pragma once

#include <vector>

#include "op.h"

namespace elsi {

const Op& matmul_blocks();
const Op& norm_matmul_blocks();
const Op& gated_blocks();
const Op& norm_gated_blocks();
const Op& tree_attention();

inline std::vector<const Op*> operators() {
  return {&matmul_blocks(), &norm_matmul_blocks(), &gated_blocks(), &norm_gated_blocks(), &tree_attention()};
}

}  // namespace elsi
