// A matrix of 4- or 8-bit weights, packed once, and rows of float quantised to go through it.
#pragma once

#include <cstdint>

#include "op.h"
#include "path.h"
#include "store.h"

namespace elsi {

int bits_of(const NodeInfo& node);                       // attribute bits: 4 or 8
size_t size_of(const NodeInfo& node, const char* name);  // an attribute that counts rows or columns of a matrix

// Columns in groups of 16, inputs in blocks of 32. A group holds, for each pair of blocks,
//
//   64 bytes        scales of column 0..15 in the first block, then in the second, 16-bit floats
//   levels of the first block, then of the second (not there where blocks are odd in number):
//   4 bits: line l = 0..3, 64 bytes each, byte 4 * c + i of it:
//                   low nibble  input 4 * l + i      of column c
//                   high nibble input 4 * l + i + 16 of column c
//   8 bits: line l = 0..7, byte 4 * c + i: input 4 * l + i of column c
//
// Levels are unsigned around the zero point (8 or 128), as in the file. Inputs and columns beyond the matrix are 0.
// A shifted matrix has 4 bits: weight = scale * (level - 8) + shift, and K is a multiple of 32. Its shifts are an 8-bit
// matrix [blocks, N] after each group's pairs: for every 32 blocks 16 float scales, then lines as above, the last ones
// only as far as there are blocks.
class PackedMatrix {
 public:
  // As MatMulNBits takes them: values uint8 [N, blocks, 4 * bits] and scales float [N, blocks] in any shape, where
  // blocks is ceil(K / 32). The shifts of a shifted matrix are an 8-bit matrix [N, blocks] of that kind themselves:
  // shift_values uint8 [N, ceil(blocks / 32), 32] around 128, shift_scales float [N, ceil(blocks / 32)].
  struct Tensors {
    Tensor values, scales;
    bool shifted = false;
    Tensor shift_values = {}, shift_scales = {};
  };
  // Refused where they are not so, where a scale is not finite as a 16-bit float, and where that of shifts is not at
  // all.
  PackedMatrix(const Tensors& tensors, size_t inputs, size_t columns, int bits);

  size_t inputs() const { return inputs_; }
  size_t columns() const { return columns_; }
  size_t blocks() const { return (inputs_ + kBlock - 1) / kBlock; }
  size_t groups() const { return (columns_ + kColumns - 1) / kColumns; }
  size_t group_bytes() const { return elsi::group_bytes(bits_, shifted_, blocks()); }
  int zero() const { return bits_ == 4 ? 8 : 128; }
  bool shifted() const { return shifted_; }

  // Tensors of matrix `index` of the `count` that a node has from input `first` on: values and scales of each, then,
  // where there are any, the shifts of each. Refused where inputs are of another number.
  static Tensors tensors(const NodeInfo& node, size_t first, size_t index, size_t count);

  // Asks for share `task` of `tasks` of the first `most` bytes, to be there when they are needed.
  void fetch_share(size_t task, size_t tasks, size_t most) const;

  // Rows of one chunk times columns of groups first..last-1; out [R, stride] starts at column 16 * first.
  void multiply(const Path& path, const QuantisedRows& rows, size_t first, size_t last, float* out,
                size_t stride) const;

 private:
  size_t inputs_, columns_;
  int bits_;
  bool shifted_;
  StoredBytes packed_;
};

// Rows quantised for a matrix and others of its kind; a view into a buffer that the calling thread keeps, one for all.
class Activations {
 public:
  Activations(size_t rows, const PackedMatrix& matrix);  // not quantised yet
  Activations(const Path& path, const Pool& pool, const float* x, size_t rows, const PackedMatrix& matrix);

  // So that several may follow each other in the buffer without its moving.
  static void make_room(size_t rows, size_t most_inputs);

  size_t rows() const { return rows_; }
  size_t chunks() const { return (rows_ + kMaxRows - 1) / kMaxRows; }
  size_t first_row(size_t chunk) const { return chunk * rows_ / chunks(); }
  QuantisedRows chunk(size_t index) const;
  void quantise_row(const Path& path, const float* x, size_t row) const;  // x [K] of that row

 private:
  void quantise_chunk(const Path& path, const float* x, size_t index) const;
  void quantise(const Path& path, const float* x, const QuantisedRows& chunk, size_t row) const;  // a row of the chunk
  static uint8_t* room(size_t rows, size_t blocks);

  size_t rows_, inputs_, blocks_;
  int zero_;
  bool sums_;  // whether sums of blocks are needed
  uint8_t* data_;
};

// How many tasks to cut `groups` column groups into: a hand-off costs some microseconds, so a task has to be worth it.
size_t task_count(size_t groups, size_t group_bytes, size_t rows);
// The same where so many threads are there already and take their shares: as many tasks for each.
size_t even_task_count(size_t groups, size_t group_bytes, size_t threads);

// Task `task` of `tasks` of a product: all rows times its share of the columns, into y [rows, N].
void multiply_share(const Path& path, const PackedMatrix& matrix, const Activations& acts, size_t task, size_t tasks,
                    float* y);

// Two matrices of one size over one input.
struct GatedMatrices {
  PackedMatrix gate, up;
  // Task `task` of `tasks` of SiLU(x gate) * (x up), into y [rows, N].
  void multiply_share(const Path& path, const Activations& acts, size_t task, size_t tasks, float* y) const;
};

}  // namespace elsi
