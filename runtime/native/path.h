// The inner loops that exist once per instruction set, behind one table; which is chosen when a kernel is made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace elsi {

constexpr size_t kColumns = 16;      // columns of a group
constexpr size_t kBlock = 32;        // inputs that share a scale
constexpr size_t kRowBytes = 40;     // a quantised block of one row: 32 values, an offset (int32), a scale (float)
constexpr size_t kScaleBytes = 64;   // 16 float scales at the head of a weight record
constexpr size_t kMaxRows = 12;      // rows that one pass over a group takes

constexpr size_t record_bytes(int bits) { return kScaleBytes + kColumns * kBlock * static_cast<size_t>(bits) / 8; }

// Rows quantised to 8 bits. Rows go through the matrices in chunks of R <= 12; a chunk is stored block by block, and
// each block as R x 32 int8 values, R int32 offsets, R float scales. value = scale * q; offset = -zero * sum(q).
struct QuantisedRows {
  const uint8_t* data;
  size_t count;   // R
  size_t blocks;  // of 32 inputs
};

// One call's share of a product: columns [16 * first_group, 16 * last_group) of the packed weights.
struct Columns {
  const uint8_t* weights;  // [group][block] records: 16 scales, then the values (see matmul.h)
  size_t first_group, last_group;
  size_t columns;  // N, may end within the last group
  float* out;      // [R, stride]
  size_t stride;
};

struct Path {
  const char* name;
  bool (*usable)();  // asked of the CPU
  // x [K] -> block b of row `row` in a chunk of `rows` rows; zero is the weights' zero point, 8 or 128.
  void (*quantise)(const float* x, size_t k, int zero, uint8_t* chunk, size_t row, size_t rows);
  void (*multiply4)(const QuantisedRows& rows, const Columns& columns);
  void (*multiply8)(const QuantisedRows& rows, const Columns& columns);
};

const std::vector<const Path*>& paths();  // compiled in, best first, the portable one last
const Path& chosen_path();
bool force_path(const char* name);  // false, and nothing changes, where it is unknown or this CPU cannot run it

extern const Path kPortable;
extern const Path kAvx512Vnni;
extern const Path kAvx2;
extern const Path kNeonDot;
extern const Path kNeonI8mm;

}  // namespace elsi
