// The product of a few rows with a group of 16 columns in NEON: included once for each kind of dot product, after
// ELSI_NEON (target attribute), kUnsigned and add<kBits>(sum, weights, row) are defined.

// totals += a block's products. Rows are those of a chunk from `first_row` on; `scales` by 4 columns.
template <int kRows, int kBits>
ELSI_NEON inline void add_block(const uint8_t* chunk, size_t all_rows, size_t first_row, const uint8_t* levels,
                                size_t lines, const float32x4_t (&scales)[4], float32x4_t (&totals)[kRows][4]) {
  const uint8_t* values = chunk + first_row * kBlock;
  int32x4_t dots[kRows][4];
  for (int r = 0; r < kRows; ++r) {
    int32_t offset;
    std::memcpy(&offset, chunk + all_rows * kBlock + 4 * (first_row + r), 4);
    for (int c = 0; c < 4; ++c) dots[r][c] = vdupq_n_s32(kUnsigned ? offset : 0);
  }
  for (size_t i = 0; i < lines; ++i)
    for (int c = 0; c < 4; ++c) {
      const uint8x16_t raw = vld1q_u8(levels + 64 * i + 16 * c);
      const uint8x16_t lower = kBits == 4 ? vandq_u8(raw, vdupq_n_u8(15)) : raw, upper = vshrq_n_u8(raw, 4);
      for (int r = 0; r < kRows; ++r) {
        int32_t first, second;
        std::memcpy(&first, values + r * kBlock + 4 * i, 4);
        dots[r][c] = add<kBits>(dots[r][c], lower, vreinterpretq_s8_s32(vdupq_n_s32(first)));
        if (kBits == 4) {
          std::memcpy(&second, values + r * kBlock + 16 + 4 * (i % 4), 4);
          dots[r][c] = add<kBits>(dots[r][c], upper, vreinterpretq_s8_s32(vdupq_n_s32(second)));
        }
      }
    }
  for (int r = 0; r < kRows; ++r) {
    float scale;
    std::memcpy(&scale, chunk + all_rows * (kBlock + 4) + 4 * (first_row + r), 4);
    for (int c = 0; c < 4; ++c)
      totals[r][c] = vaddq_f32(totals[r][c], vmulq_f32(vmulq_n_f32(vcvtq_f32_s32(dots[r][c]), scale), scales[c]));
  }
}

template <int kRows, int kBits, bool kShifted>
ELSI_NEON void pass(const QuantisedRows& rows, size_t first_row, const Columns& columns) {
  const size_t blocks = rows.blocks, all_rows = rows.count;
  const uint8_t* weights = columns.weights + columns.first_group * group_bytes(kBits, kShifted, blocks);
  const uint8_t* chunk = rows.data;
  float32x4_t totals[kRows][4], scales[4];
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < 4; ++c) totals[r][c] = vdupq_n_f32(0.0f);
  for (size_t block = 0; block < blocks; ++block, chunk += all_rows * kRowBytes) {
    for (size_t c = 0; c < 4; ++c) scales[c] = halves(weights + scales_at(kBits, block) + 8 * c);
    add_block<kRows, kBits>(chunk, all_rows, first_row, weights + levels_at(kBits, block), kBits, scales, totals);
  }
  chunk = rows.sums;
  for (size_t first = 0; kShifted && first < blocks; first += kBlock, chunk += all_rows * kRowBytes) {
    const uint8_t* shifts = weights + shifts_at(kBits, blocks, first);
    for (int c = 0; c < 4; ++c) scales[c] = vld1q_f32(reinterpret_cast<const float*>(shifts) + 4 * c);
    add_block<kRows, 8>(chunk, all_rows, first_row, shifts + 64, shift_lines(blocks, first), scales, totals);
  }
  const size_t left = columns.columns - columns.first_group * kColumns, width = left < kColumns ? left : kColumns;
  for (int r = 0; r < kRows; ++r)
    std::memcpy(columns.out + (first_row + r) * columns.stride, totals[r], width * sizeof(float));
}

template <int kBits, bool kShifted>
void multiply(const QuantisedRows& rows, const Columns& columns) {
  static constexpr Pass by_rows[kPassRows] = {pass<1, kBits, kShifted>, pass<2, kBits, kShifted>,
                                              pass<3, kBits, kShifted>, pass<4, kBits, kShifted>};
  all_groups(by_rows, rows, columns);
}
