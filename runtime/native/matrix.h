// A matrix of 4- or 8-bit weights, packed once, and rows of float quantised to go through it.
#pragma once

#include <cstdint>

#include "op.h"
#include "path.h"
#include "store.h"

namespace elsi {

int bits_of(const NodeInfo& node);                        // attribute bits: 4 or 8
size_t size_of(const NodeInfo& node, const char* name);  // an attribute that counts rows or columns of a matrix

// Columns in groups of 16, inputs in blocks of 32. Record (group, block), records in that order:
//
//   bytes 0..63     scale of column 0..15, float32; in a shifted matrix 16 scales, then 16 shifts, 16-bit floats
//   4 bits: line l = 0..3, 64 bytes each, byte 4 * c + i of it:
//                   low nibble  input 4 * l + i      of column c
//                   high nibble input 4 * l + i + 16 of column c
//   8 bits: line l = 0..7, byte 4 * c + i: input 4 * l + i of column c
//
// Values are unsigned around the zero point (8 or 128), as in the file. Inputs and columns beyond the matrix are 0.
// A shifted matrix has 4 bits: weight = scale * (value - 8) + shift, and K is a multiple of 32.
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
  // Refused where they are not so, and where a shifted matrix's scale or shift is no finite 16-bit float.
  PackedMatrix(const Tensors& tensors, size_t inputs, size_t columns, int bits);

  size_t inputs() const { return inputs_; }
  size_t columns() const { return columns_; }
  size_t blocks() const { return (inputs_ + kBlock - 1) / kBlock; }
  size_t groups() const { return (columns_ + kColumns - 1) / kColumns; }
  size_t group_bytes() const { return blocks() * record_bytes(bits_); }
  int zero() const { return bits_ == 4 ? 8 : 128; }

  // Tensors of a node: values and scales from input `at` on, those of the shifts from `shifts_at` on where that is not 0.
  static Tensors tensors(const NodeInfo& node, size_t at, size_t shifts_at);

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

// Rows quantised for matrices of one zero point; a view into a buffer that the calling thread keeps, one for all of them.
class Activations {
 public:
  Activations(size_t rows, size_t inputs);  // not quantised yet
  Activations(const Path& path, const Pool& pool, const float* x, size_t rows, size_t inputs, int zero);

  // So that several may follow each other in the buffer without its moving.
  static void make_room(size_t rows, size_t most_inputs);

  size_t rows() const { return rows_; }
  size_t chunks() const { return (rows_ + kMaxRows - 1) / kMaxRows; }
  size_t first_row(size_t chunk) const { return chunk * rows_ / chunks(); }
  QuantisedRows chunk(size_t index) const;
  void quantise_row(const Path& path, const float* x, size_t row, int zero) const;  // x [K] of that row

 private:
  void quantise_chunk(const Path& path, const float* x, size_t index, int zero) const;

  size_t rows_, inputs_, blocks_;
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
