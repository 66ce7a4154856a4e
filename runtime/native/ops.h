// The operators of the domain elsi.edge.
#pragma once

#include <vector>

#include "op.h"

namespace elsi {

const Op& matmul_blocks();
const Op& gated_blocks();
const Op& tree_attention();

inline std::vector<const Op*> operators() { return {&matmul_blocks(), &gated_blocks(), &tree_attention()}; }

}  // namespace elsi
