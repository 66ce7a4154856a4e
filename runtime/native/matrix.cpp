#include "matrix.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "half.h"

namespace elsi {
namespace {

constexpr int64_t kMostColumns = 1 << 24;
constexpr size_t kTaskBytes = 48 << 10;  // of weights, at few rows: about 5 us from memory
constexpr size_t kMostTasks = 32;
constexpr size_t kEvenTaskBytes = 64 << 10;  // shorter runs through memory are slower
constexpr size_t kSerialValues = 32 << 10;   // quantised by the caller alone below this

Buffer& activation_buffer() {  // of the thread that runs the graph; its workers read it
  static thread_local Buffer buffer;
  return buffer;
}

size_t blocks_of(size_t inputs) { return (inputs + kBlock - 1) / kBlock; }

unsigned value_at(const uint8_t* block, size_t input, int bits) {
  if (bits == 8) return block[input];
  const uint8_t pair = block[input / 2];
  return input % 2 ? pair >> 4 : pair & 15;
}

// Values uint8 [N, blocks, blob] and their scales float [N, blocks]; `what` is empty or "shift ".
void require_blocks(const std::string& what, const Tensor& values, const Tensor& scales, size_t columns, size_t blocks,
                    size_t blob) {
  const std::vector<int64_t> shape = {static_cast<int64_t>(columns), static_cast<int64_t>(blocks),
                                      static_cast<int64_t>(blob)};
  ELSI_REQUIRE(values.type == abi::kUint8 && values.shape == shape,
               "the " + what + (what.empty() ? "weights" : "values") + " are " + text(values.shape) + " of type " +
                   std::to_string(values.type) + ", K, N and bits say uint8 " + text(shape));
  ELSI_REQUIRE(scales.type == abi::kFloat && scales.size() == columns * blocks,
               "the " + what + "scales are " + text(scales.shape) + " of type " + std::to_string(scales.type) +
                   ", K and N say " + std::to_string(columns * blocks) + " float32");
}

void put_half(uint8_t* to, float scale) {
  const uint16_t half = to_half(scale);
  ELSI_REQUIRE(is_finite_half(half), "a scale is " + std::to_string(scale) + ", a 16-bit float holds up to 65504");
  std::memcpy(to, &half, sizeof half);
}

// The first `count` levels of a column's block into its bytes of each line.
void put_levels(uint8_t* to, const uint8_t* block, size_t count, int bits) {
  for (size_t i = 0; i < count; ++i) {
    const size_t line = bits == 4 ? i / 4 % 4 : i / 4;
    const unsigned high = bits == 4 && i >= 16 ? 4 : 0;
    to[64 * line + i % 4] |= static_cast<uint8_t>(value_at(block, i, bits) << high);
  }
}

}  // namespace

int bits_of(const NodeInfo& node) {
  const int bits = static_cast<int>(node.integer("bits", 4, 8));
  ELSI_REQUIRE(bits == 4 || bits == 8, "attribute bits is " + std::to_string(bits) + ", it must be 4 or 8");
  return bits;
}

size_t size_of(const NodeInfo& node, const char* name) {
  return static_cast<size_t>(node.integer(name, 1, kMostColumns));
}

PackedMatrix::PackedMatrix(const Tensors& tensors, size_t inputs, size_t columns, int bits)
    : inputs_(inputs), columns_(columns), bits_(bits), shifted_(tensors.shifted) {
  const size_t blob = kBlock * static_cast<size_t>(bits) / 8, shift_blocks = blocks_of(blocks());
  if (shifted_) {
    ELSI_REQUIRE(bits == 4, "attribute bits is " + std::to_string(bits) + ", a product with shifts takes 4");
    ELSI_REQUIRE(inputs % kBlock == 0,
                 "K is " + std::to_string(inputs) + ", a product with shifts takes a multiple of 32");
    require_blocks("shift ", tensors.shift_values, tensors.shift_scales, columns, shift_blocks, kBlock);
  }
  require_blocks("", tensors.values, tensors.scales, columns, blocks(), blob);
  packed_ = StoredBytes(groups() * group_bytes());
  for (size_t column = 0; column < columns; ++column) {
    uint8_t* group = packed_.data() + column / kColumns * group_bytes();
    const size_t c = column % kColumns;
    for (size_t block = 0; block < blocks(); ++block) {
      put_half(group + scales_at(bits, block) + 2 * c, tensors.scales.as<float>()[column * blocks() + block]);
      const uint8_t* from = tensors.values.as<uint8_t>() + (column * blocks() + block) * blob;
      put_levels(group + levels_at(bits, block) + 4 * c, from, std::min(kBlock, inputs - block * kBlock), bits);
    }
    for (size_t first = 0; shifted_ && first < blocks(); first += kBlock) {
      const size_t record = column * shift_blocks + first / kBlock, count = std::min(kBlock, blocks() - first);
      const float scale = tensors.shift_scales.as<float>()[record];
      ELSI_REQUIRE(std::isfinite(scale), "a scale of shifts is " + std::to_string(scale) + ", it must be finite");
      uint8_t* at = group + shifts_at(bits, blocks(), first);
      std::memcpy(at + 4 * c, &scale, 4);
      put_levels(at + 64 + 4 * c, tensors.shift_values.as<uint8_t>() + record * kBlock, count, 8);
    }
  }
}

void PackedMatrix::multiply(const Path& path, const QuantisedRows& rows, size_t first, size_t last, float* out,
                            size_t stride) const {
  const auto multiply = shifted_ ? path.multiply4_shifted : bits_ == 4 ? path.multiply4 : path.multiply8;
  multiply(rows, {packed_.data(), first, last, columns_, out, stride});
}

void PackedMatrix::fetch_share(size_t task, size_t tasks, size_t most) const {
  const size_t bytes = std::min(most, groups() * group_bytes());
  for (size_t at = task * bytes / tasks / 64 * 64; at < (task + 1) * bytes / tasks; at += 64)
    __builtin_prefetch(packed_.data() + at, 0, 2);
}

PackedMatrix::Tensors PackedMatrix::tensors(const NodeInfo& node, size_t first, size_t index, size_t count) {
  const size_t given = node.input_count(), plain = first + 2 * count, shifted = plain + 2 * count;
  ELSI_REQUIRE(given == plain || given == shifted, "there are " + std::to_string(given) + " inputs, it must be " +
                                                       std::to_string(plain) + ", or " + std::to_string(shifted) +
                                                       " with shifts");
  Tensors out{node.constant(first + 2 * index), node.constant(first + 2 * index + 1)};
  if (given == shifted) {
    out.shifted = true;
    out.shift_values = node.constant(plain + 2 * index);
    out.shift_scales = node.constant(plain + 2 * index + 1);
  }
  return out;
}

Activations::Activations(size_t rows, const PackedMatrix& matrix)
    : rows_(rows),
      inputs_(matrix.inputs()),
      blocks_(matrix.blocks()),
      zero_(matrix.zero()),
      sums_(matrix.shifted()),
      data_(room(rows, blocks_)) {}

Activations::Activations(const Path& path, const Pool& pool, const float* x, size_t rows, const PackedMatrix& matrix)
    : Activations(rows, matrix) {
  auto quantise = [&](size_t index) { quantise_chunk(path, x, index); };
  if (rows * inputs_ >= kSerialValues) {
    pool.run(chunks(), quantise);
  } else {
    for (size_t index = 0; index < chunks(); ++index) quantise(index);
  }
}

uint8_t* Activations::room(size_t rows, size_t blocks) {
  return activation_buffer().reserve(rows * (blocks + blocks_of(blocks)) * kRowBytes);
}

void Activations::make_room(size_t rows, size_t most_inputs) { room(rows, blocks_of(most_inputs)); }

QuantisedRows Activations::chunk(size_t index) const {
  const size_t first = first_row(index), end = first_row(index + 1);
  const uint8_t* sums = data_ + rows_ * blocks_ * kRowBytes;
  return {data_ + first * blocks_ * kRowBytes, sums + first * blocks_of(blocks_) * kRowBytes, end - first, blocks_};
}

void Activations::quantise_chunk(const Path& path, const float* x, size_t index) const {
  const QuantisedRows rows = chunk(index);
  for (size_t r = 0; r < rows.count; ++r) quantise(path, x + (first_row(index) + r) * inputs_, rows, r);
}

void Activations::quantise_row(const Path& path, const float* x, size_t row) const {
  size_t index = 0;
  while (first_row(index + 1) <= row) ++index;
  quantise(path, x, chunk(index), row - first_row(index));
}

void Activations::quantise(const Path& path, const float* x, const QuantisedRows& chunk, size_t row) const {
  path.quantise(x, inputs_, zero_, const_cast<uint8_t*>(chunk.data), row, chunk.count);
  float sums[kBlock];
  for (size_t first = 0; sums_ && first < blocks_; first += kBlock) {
    const size_t count = std::min(kBlock, blocks_ - first);
    for (size_t i = 0; i < count; ++i) {
      const uint8_t* block = chunk.data + (first + i) * chunk.count * kRowBytes + chunk.count * kBlock + 4 * row;
      int32_t offset;
      float scale;
      std::memcpy(&offset, block, 4);
      std::memcpy(&scale, block + 4 * chunk.count, 4);
      sums[i] = block_sum(offset, scale);
    }
    uint8_t* to = const_cast<uint8_t*>(chunk.sums) + first / kBlock * chunk.count * kRowBytes;
    path.quantise(sums, count, 128, to, row, chunk.count);
  }
}

size_t task_count(size_t groups, size_t group_bytes, size_t rows) {
  const size_t work = groups * group_bytes * std::max<size_t>(1, rows / 3);
  return std::clamp<size_t>(work / kTaskBytes, 1, std::min(kMostTasks, groups));
}

size_t even_task_count(size_t groups, size_t group_bytes, size_t threads) {
  const size_t each = std::max<size_t>(1, (groups * group_bytes / threads + kEvenTaskBytes / 2) / kEvenTaskBytes);
  return std::min(groups, threads * each);
}

void multiply_share(const Path& path, const PackedMatrix& matrix, const Activations& acts, size_t task, size_t tasks,
                    float* y) {
  const size_t groups = matrix.groups(), columns = matrix.columns(), end = (task + 1) * groups / tasks;
  // with several chunks, a group stays in the cache for all of them
  const size_t tile = acts.chunks() == 1 ? groups : 1;
  for (size_t group = task * groups / tasks; group < end; group += tile)
    for (size_t chunk = 0; chunk < acts.chunks(); ++chunk)
      matrix.multiply(path, acts.chunk(chunk), group, std::min(end, group + tile),
                      y + acts.first_row(chunk) * columns + group * kColumns, columns);
}

void GatedMatrices::multiply_share(const Path& path, const Activations& acts, size_t task, size_t tasks,
                                   float* y) const {
  const size_t groups = gate.groups(), columns = gate.columns();
  for (size_t group = task * groups / tasks; group < (task + 1) * groups / tasks; ++group)
    for (size_t chunk = 0; chunk < acts.chunks(); ++chunk) {
      const QuantisedRows rows = acts.chunk(chunk);
      float gates[kMaxRows * kColumns] = {}, ups[kMaxRows * kColumns] = {};
      gate.multiply(path, rows, group, group + 1, gates, kColumns);
      up.multiply(path, rows, group, group + 1, ups, kColumns);
      float* out = y + acts.first_row(chunk) * columns + group * kColumns;
      for (size_t row = 0; row < rows.count; ++row) {
        path.gate(gates + row * kColumns, ups + row * kColumns);
        std::copy_n(gates + row * kColumns, std::min(kColumns, columns - group * kColumns), out + row * columns);
      }
    }
}

}  // namespace elsi
