// The inner loops that exist once per instruction set, behind one table; which is chosen when a kernel is made.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace elsi {

constexpr size_t kColumns = 16;    // columns of a group
constexpr size_t kBlock = 32;      // inputs that share a scale
constexpr size_t kRowBytes = 40;   // a quantised block of one row: 32 values, an offset (int32), a scale (float)
constexpr size_t kHeadBytes = 64;  // 16-bit scales of a group's columns for two blocks
constexpr size_t kMaxRows = 12;    // rows that one pass over a group takes

// Packed weights, see matrix.h: bytes from a group's start to a block's scales and levels, and to the record of shifts
// of the 32 blocks from `first` on: 16 float scales, then lines of 64 bytes.
constexpr size_t level_bytes(int bits) { return kColumns * kBlock * static_cast<size_t>(bits) / 8; }
constexpr size_t scales_at(int bits, size_t block) {
  return block / 2 * (kHeadBytes + 2 * level_bytes(bits)) + block % 2 * (kHeadBytes / 2);
}
constexpr size_t levels_at(int bits, size_t block) { return (block / 2 + 1) * kHeadBytes + block * level_bytes(bits); }
constexpr size_t shifts_at(int bits, size_t blocks, size_t first) {
  return (blocks + 1) / 2 * kHeadBytes + blocks * level_bytes(bits) + first / kBlock * (64 + level_bytes(8));
}
constexpr size_t shift_lines(size_t blocks, size_t first) {
  return ((blocks - first < kBlock ? blocks - first : kBlock) + 3) / 4;
}
constexpr size_t group_bytes(int bits, bool shifted, size_t blocks) {
  return shifts_at(bits, blocks, 0) + (shifted ? 64 * ((blocks + kBlock - 1) / kBlock + (blocks + 3) / 4) : 0);
}

// Rows quantised to 8 bits. Rows go through the matrices in chunks of R <= 12; a chunk is stored block by block, and
// each block as R x 32 int8 values, R int32 offsets, R float scales. value = scale * q; offset = -zero * sum(q).
//
// Shifts of 4-bit weights multiply the sums of a row's blocks, sum(q) * scale, which are quantised as rows themselves.
struct QuantisedRows {
  const uint8_t* data;
  const uint8_t* sums;  // the same of [R, blocks], for 8-bit shifts: zero is 128
  size_t count;         // R
  size_t blocks;        // of 32 inputs
};

// 4-bit weights' offset is -8 * sum(q).
inline float block_sum(int32_t offset, float scale) { return static_cast<float>(offset) * -0.125f * scale; }

// One call's share of a product: columns [16 * first_group, 16 * last_group) of the packed weights.
struct Columns {
  const uint8_t* weights;  // packed groups (see matrix.h)
  size_t first_group, last_group;
  size_t columns;  // N, may end within the last group
  float* out;      // [R, stride], from the first group's first column on
  size_t stride;
};

constexpr size_t kTile = 16;       // positions scored together
constexpr size_t kSpan = 128;      // positions whose softmax is taken together; spans start at multiples of it
constexpr size_t kMostHead = 256;  // of a head, a multiple of 16

// One attention call, past the rotation: T new rows behind S cached ones. Positions are a row's own: 0..S-1 the cache,
// then its ancestors among the new rows, then itself. All floats.
struct AttentionCall {
  size_t heads, kv_heads, width, capacity;  // Hq, H, D, C
  size_t cached;                            // S
  float softcap;                            // 0: none
  const float* queries;                     // [T, Hq, D], rotated and scaled
  const float* keys;                        // [H, C, D]
  const float* values;                      // [H, C, D]
  const size_t* ends;                       // [T] positions that a row sees: S + depth + 1
  const size_t* starts;                     // [T] first position it sees, above 0 under a sliding window
  const int32_t* const* paths;              // [T] slots of positions S, S + 1, ..., ends - 1

  size_t group() const { return heads / kv_heads; }
  size_t state() const { return width + kTile; }  // floats: D weighted sums, the largest score, the sum of weights
  size_t slot(size_t row, size_t position) const {
    return position < cached ? position : static_cast<size_t>(paths[row][position - cached]);
  }
  bool sees(size_t row, size_t span) const { return starts[row] < (span + 1) * kSpan && ends[row] > span * kSpan; }
};

// The largest value of a row so far and its column; of equal ones the first. NaN never is the largest.
struct Largest {
  float value = -std::numeric_limits<float>::infinity();
  size_t column = 0;
};

struct Path {
  const char* name;
  bool (*usable)();  // asked of the CPU
  // x [K] -> block b of row `row` in a chunk of `rows` rows; zero is the weights' zero point, 8 or 128.
  void (*quantise)(const float* x, size_t k, int zero, uint8_t* chunk, size_t row, size_t rows);
  void (*multiply4)(const QuantisedRows& rows, const Columns& columns);
  void (*multiply8)(const QuantisedRows& rows, const Columns& columns);
  void (*multiply4_shifted)(const QuantisedRows& rows, const Columns& columns);
  // Softmax sums of rows first..last-1 over one span, for the query heads of one kv head. states [rows, group, state];
  // those of rows that do not see the span are not written. scratch: floats, attention_scratch(call, rows) of them.
  void (*attend)(const AttentionCall& call, size_t kv_head, size_t first, size_t last, size_t span, float* states,
                 float* scratch);
  void (*gate)(float* gate, const float* up);                     // 16 values: gate = gate / (1 + e^-gate) * up
  void (*merge)(float* state, const float* later, size_t width);  // state of two runs of positions, in their order
  void (*divide)(const float* state, size_t width, float* out);   // weighted sums by the sum of weights
  // Takes values x [count] of columns first, first + 1, ... into `found`, which knows those before.
  void (*largest)(const float* x, size_t count, size_t first, Largest* found);
};

inline size_t attention_scratch(const AttentionCall& call, size_t rows) { return rows * call.group() * kSpan; }

const std::vector<const Path*>& paths();  // compiled in, best first, the portable one last
const Path& chosen_path();
bool force_path(const char* name);  // false, and nothing changes, where it is unknown or this CPU cannot run it

extern const Path kPortable;
extern const Path kAvx512Vnni;
extern const Path kAvx2;
extern const Path kNeonDot;
extern const Path kNeonI8mm;

}  // namespace elsi
