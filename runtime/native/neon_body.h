// The product of a few rows with a group of 16 columns in NEON: included once for each kind of dot product, after
// ELSI_NEON (target attribute), kUnsigned and add<kBits>(sum, weights, row) are defined.

template <int kRows, int kBits, bool kShifted>
ELSI_NEON void pass(const uint8_t* data, size_t all_rows, size_t first_row, size_t blocks, const Columns& columns) {
  constexpr size_t kRecord = record_bytes(kBits);
  const uint8_t* record = columns.weights + columns.first_group * blocks * kRecord;
  float32x4_t totals[kRows][4];
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < 4; ++c) totals[r][c] = vdupq_n_f32(0.0f);
  const uint8_t* chunk = data;
  for (size_t block = 0; block < blocks; ++block, record += kRecord, chunk += all_rows * kRowBytes) {
    const uint8_t* values = chunk + first_row * kBlock;
    int32x4_t dots[kRows][4];
    for (int r = 0; r < kRows; ++r) {
      int32_t offset;
      std::memcpy(&offset, chunk + all_rows * kBlock + 4 * (first_row + r), 4);
      for (int c = 0; c < 4; ++c) dots[r][c] = vdupq_n_s32(kUnsigned ? offset : 0);
    }
    for (int i = 0; i < kBits; ++i)
      for (int c = 0; c < 4; ++c) {
        const uint8x16_t raw = vld1q_u8(record + kScaleBytes + 64 * i + 16 * c);
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
      int32_t offset;
      float scale;
      std::memcpy(&offset, chunk + all_rows * kBlock + 4 * (first_row + r), 4);
      std::memcpy(&scale, chunk + all_rows * (kBlock + 4) + 4 * (first_row + r), 4);
      const float factor = kShifted ? shift_factor(offset, scale) : 0.0f;
      for (int c = 0; c < 4; ++c) {
        const float32x4_t scales =
            kShifted ? halves(record + 8 * c) : vld1q_f32(reinterpret_cast<const float*>(record) + 4 * c);
        const float32x4_t scaled = vmulq_n_f32(vcvtq_f32_s32(dots[r][c]), scale);
        totals[r][c] = vaddq_f32(totals[r][c], vmulq_f32(scaled, scales));
        if (kShifted) {
          const float32x4_t shifts = halves(record + kScaleBytes / 2 + 8 * c);
          totals[r][c] = vaddq_f32(totals[r][c], vmulq_n_f32(shifts, factor));
        }
      }
    }
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
