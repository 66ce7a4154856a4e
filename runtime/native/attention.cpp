#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace elsi {
namespace {

constexpr size_t kSplitRows = 16;  // at most so many rows: spans are shared out too, and merged afterwards
constexpr size_t kTaskRows = 8;    // rows of a task beyond that
constexpr int64_t kMostHeads = 1 << 12;

// Rotates pairs (i, i + half) of one head by the angles of its position; coordinates beyond 2 * half stay.
void rotate(const float* in, const float* cos, const float* sin, size_t half, size_t width, float scale, float* out) {
  for (size_t i = 0; i < half; ++i) {
    const float a = in[i], b = in[half + i];
    out[i] = (a * cos[i] - b * sin[i]) * scale;
    out[half + i] = (b * cos[i] + a * sin[i]) * scale;
  }
  for (size_t i = 2 * half; i < width; ++i) out[i] = in[i] * scale;
}

// The present cache of an output: the past one, or a copy of its first `used` slots.
float* present(const Call& call, size_t output, const Tensor& past, size_t used) {
  float* to = call.output(output, past.shape, abi::kFloat).as_mutable<float>();
  const size_t heads = static_cast<size_t>(past.shape[1]), width = static_cast<size_t>(past.shape[3]);
  const size_t head = static_cast<size_t>(past.shape[2]) * width;
  if (to != past.data)
    for (size_t h = 0; h < heads; ++h)
      std::memcpy(to + h * head, past.as<float>() + h * head, used * width * sizeof(float));
  return to;
}

}  // namespace

Attention::Attention(const NodeInfo& node)
    : path_(chosen_path()),
      heads_(static_cast<size_t>(node.integer("num_heads", 1, kMostHeads))),
      kv_heads_(static_cast<size_t>(node.integer("kv_num_heads", 1, kMostHeads))),
      window_(node.integer("window", -1, 1 << 30)),
      scale_(node.number("scale")),
      softcap_(node.number("softcap")) {
  ELSI_REQUIRE(heads_ % kv_heads_ == 0,
               std::to_string(heads_) + " heads cannot share " + std::to_string(kv_heads_) + " kv heads");
  ELSI_REQUIRE(window_ != 0, "attribute window is 0, it must be -1 for none or at least 1");
  ELSI_REQUIRE(std::isfinite(scale_) && scale_ >= 0.0f, "attribute scale must be a finite number, 0 for 1 / sqrt(D)");
  ELSI_REQUIRE(std::isfinite(softcap_) && softcap_ >= 0.0f, "attribute softcap must be a finite number, 0 for none");
}

Attention::Inputs Attention::inputs(const Call& call, size_t first) {
  return {call.input(first, abi::kFloat),     call.input(first + 1, abi::kFloat), call.input(first + 2, abi::kFloat),
          call.input(first + 3, abi::kFloat), call.input(first + 4, abi::kInt32), call.input(first + 5, abi::kInt64)};
}

Attention::Run Attention::start(const Call& call, const Inputs& inputs, size_t rows, size_t width,
                                size_t first_output) const {
  const Tensor &key = inputs.past_key, &cos = inputs.cos, &cached = inputs.cached, &parents = inputs.parents;
  ELSI_REQUIRE(key.shape.size() == 4 && key.shape[0] == 1 && key.shape[1] == static_cast<int64_t>(kv_heads_) &&
                   key.shape == inputs.past_value.shape,
               "the caches are " + text(key.shape) + " and " + text(inputs.past_value.shape) + ", they must be [1, " +
                   std::to_string(kv_heads_) + ", C, D]");
  const int64_t head = key.shape[3];
  ELSI_REQUIRE(head % kTile == 0 && head > 0 && head <= static_cast<int64_t>(kMostHead),
               "a head has width " + std::to_string(head) + ", it must be a multiple of 16 up to 256");
  const size_t all = (heads_ + 2 * kv_heads_) * static_cast<size_t>(head);
  ELSI_REQUIRE(width == all, "queries, keys and values of a row are " + std::to_string(width) + ", they must be " +
                                 std::to_string(all));
  ELSI_REQUIRE(
      cos.shape.size() == 2 && cos.shape == inputs.sin.shape && cos.shape[1] > 0 && 2 * cos.shape[1] <= head,
      "the angles are " + text(cos.shape) + " and " + text(inputs.sin.shape) + ", they must be [P, at most D / 2]");
  ELSI_REQUIRE(cached.size() == 1, "cached is " + text(cached.shape) + ", it must be one number");
  ELSI_REQUIRE(parents.shape.size() == 1 && parents.size() >= rows,
               "parents is " + text(parents.shape) + " for " + std::to_string(rows) + " rows");
  const int64_t slots = *cached.as<int32_t>();
  ELSI_REQUIRE(slots >= 0 && slots + parents.shape[0] <= key.shape[2],
               std::to_string(slots) + " cached and " + std::to_string(parents.shape[0]) +
                   " new rows do not fit the cache's " + std::to_string(key.shape[2]) + " slots");
  ELSI_REQUIRE(key.shape[2] < (int64_t{1} << 31), "the cache has more slots than 2^31");
  return Run(*this, call, inputs, rows, first_output);
}

Attention::Run::Run(const Attention& attention, const Call& call, const Inputs& inputs, size_t rows,
                    size_t first_output)
    : attention_(attention), cos_(inputs.cos), sin_(inputs.sin), rows_(rows), before_(inputs.parents.size() - rows) {
  call_.heads = attention.heads_;
  call_.kv_heads = attention.kv_heads_;
  call_.width = static_cast<size_t>(inputs.past_key.shape[3]);
  call_.capacity = static_cast<size_t>(inputs.past_key.shape[2]);
  call_.cached = static_cast<size_t>(*inputs.cached.as<int32_t>());
  call_.softcap = attention.softcap_;
  read_tree(inputs.parents.as<int64_t>(), before_ + rows);
  const size_t deepest = rows == 0 ? 0 : *std::max_element(ends_.begin(), ends_.end());
  ELSI_REQUIRE(deepest <= static_cast<size_t>(cos_.shape[0]), "position " + std::to_string(deepest) +
                                                                  " is beyond the " + std::to_string(cos_.shape[0]) +
                                                                  " that the model has angles for");
  keys_ = present(call, first_output, inputs.past_key, call_.cached + before_);
  values_ = present(call, first_output + 1, inputs.past_value, call_.cached + before_);
  call_.keys = keys_;
  call_.values = values_;
  call_.starts = starts_.data() + before_;
  call_.ends = ends_.data() + before_;
  call_.paths = paths_.data() + before_;
  spans_ = (deepest + kSpan - 1) / kSpan;
  split_ = rows <= kSplitRows;
  units_ = split_ ? spans_ : 1;
  task_rows_ = split_ ? std::max<size_t>(1, rows) : kTaskRows;
  chunks_ = (rows + task_rows_ - 1) / task_rows_;
  static thread_local Buffer queries, states;  // states [H, units, T, group, state]
  queries_ = reinterpret_cast<float*>(queries.reserve(rows * call_.heads * call_.width * sizeof(float)));
  states_ = reinterpret_cast<float*>(states.reserve(call_.kv_heads * units_ * rows * row_floats() * sizeof(float)));
  call_.queries = queries_;
}

// parents [W]: an earlier row, or -1 for the first row of a path.
void Attention::Run::read_tree(const int64_t* parents, size_t nodes) {
  std::vector<size_t> offsets;
  offsets.reserve(nodes);
  slots_.reserve(nodes);
  paths_.reserve(nodes);
  for (std::vector<size_t>* each : {&depths_, &starts_, &ends_}) each->reserve(nodes);
  for (size_t row = 0; row < nodes; ++row) {
    const int64_t parent = parents[row];
    ELSI_REQUIRE(
        -1 <= parent && parent < static_cast<int64_t>(row),
        "parents[" + std::to_string(row) + "] is " + std::to_string(parent) + ", it must be an earlier row or -1");
    const size_t depth = parent < 0 ? 0 : depths_[static_cast<size_t>(parent)] + 1;
    const size_t from = parent < 0 ? 0 : offsets[static_cast<size_t>(parent)];
    if (parent >= 0 && from + depth == slots_.size()) {
      offsets.push_back(from);  // the parent's path ends at the end of all: go on there
    } else {
      offsets.push_back(slots_.size());
      for (size_t i = 0; i < depth; ++i) slots_.push_back(slots_[from + i]);
    }
    slots_.push_back(static_cast<int32_t>(call_.cached + row));
    depths_.push_back(depth);
    const size_t end = call_.cached + depth + 1, window = static_cast<size_t>(attention_.window_);
    ends_.push_back(end);
    starts_.push_back(attention_.window_ < 0 || end <= window ? 0 : end - window);
  }
  for (size_t offset : offsets) paths_.push_back(slots_.data() + offset);
}

void Attention::Run::enter(const float* qkv, size_t row) const {
  const size_t node = before_ + row, width = call_.width, half = static_cast<size_t>(cos_.shape[1]);
  const size_t position = call_.cached + depths_[node];
  const float *c = cos_.as<float>() + position * half, *s = sin_.as<float>() + position * half;
  const float given = attention_.scale_, scale = given > 0.0f ? given : 1.0f / std::sqrt(static_cast<float>(width));
  const size_t heads = call_.heads, kv_heads = call_.kv_heads;
  for (size_t h = 0; h < heads; ++h)
    rotate(qkv + h * width, c, s, half, width, scale, queries_ + (row * heads + h) * width);
  for (size_t h = 0; h < kv_heads; ++h) {
    const size_t slot = (h * call_.capacity + call_.cached + node) * width;
    rotate(qkv + (heads + h) * width, c, s, half, width, 1.0f, keys_ + slot);
    std::memcpy(values_ + slot, qkv + (heads + kv_heads + h) * width, width * sizeof(float));
  }
}

void Attention::Run::attend(size_t task) const {
  const size_t kv_head = task / (chunks_ * units_), first = task / units_ % chunks_ * task_rows_, unit = task % units_;
  const size_t last = std::min(rows_, first + task_rows_);
  float* result = states_ + ((kv_head * units_ + unit) * rows_ + first) * row_floats();
  const size_t scratch_floats = attention_scratch(call_, last - first);
  static thread_local Buffer own;
  try {
    own.reserve((scratch_floats + (split_ ? 0 : (last - first) * row_floats())) * sizeof(float));
  } catch (const std::bad_alloc&) {
    failed_ = true;
    return;
  }
  float* scratch = reinterpret_cast<float*>(own.data());
  if (split_) {
    attention_.path_.attend(call_, kv_head, first, last, unit, result, scratch);
  } else {
    all_spans(kv_head, first, last, result, scratch, scratch + scratch_floats);
  }
}

void Attention::Run::require_memory() const {
  if (failed_) throw std::bad_alloc();
}

// Spans in their order, each merged into what came before: the same operations as with the spans shared out.
void Attention::Run::all_spans(size_t kv_head, size_t first, size_t last, float* result, float* scratch,
                               float* later) const {
  for (size_t span = 0; span < spans_; ++span) {
    attention_.path_.attend(call_, kv_head, first, last, span, later, scratch);
    for (size_t row = first; row < last; ++row) {
      if (!call_.sees(row, span)) continue;
      float *state = result + (row - first) * row_floats(), *part = later + (row - first) * row_floats();
      if (span == call_.starts[row] / kSpan) {
        std::memcpy(state, part, row_floats() * sizeof(float));
      } else {
        for (size_t q = 0; q < call_.group(); ++q)
          attention_.path_.merge(state + q * call_.state(), part + q * call_.state(), call_.width);
      }
    }
  }
}

void Attention::Run::finish(size_t row, float* out) const {
  const size_t stride = rows_ * row_floats(), first = split_ ? call_.starts[row] / kSpan : 0;
  for (size_t kv_head = 0; kv_head < call_.kv_heads; ++kv_head)
    for (size_t q = 0; q < call_.group(); ++q, out += call_.width) {
      float* state = states_ + (kv_head * units_ * rows_ + row) * row_floats() + q * call_.state() + first * stride;
      for (size_t span = first + 1; span < units_; ++span)
        if (call_.sees(row, span)) attention_.path_.merge(state, state + (span - first) * stride, call_.width);
      attention_.path_.divide(state, call_.width, out);
    }
}

}  // namespace elsi
