// The operators of the domain elsi.edge.
#pragma once

#include <vector>

#include "op.h"

namespace elsi {

const Op& matmul_blocks();
const Op& norm_matmul_blocks();
const Op& gated_blocks();
const Op& norm_gated_blocks();
const Op& likeliest_blocks();
const Op& tree_attention();
const Op& decoder_block();

inline std::vector<const Op*> operators() {
  return {&matmul_blocks(),    &norm_matmul_blocks(), &gated_blocks(), &norm_gated_blocks(),
          &likeliest_blocks(), &tree_attention(),     &decoder_block()};
}

}  // namespace elsi
