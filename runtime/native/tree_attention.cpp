// TreeAttention: new rows that are nodes of a tree, behind a cache, with rotary embedding by depth.
//
// A row's positions are the cached ones, then its ancestors, then itself. Its sums run over them in that order,
// whatever slots they lie in and whatever rows are beside it: the bits are those of one-token decoding along its path.
// Where `parents` is longer than the rows, its first entries are nodes of earlier calls, in the slots behind the cached.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "matrix.h"
#include "ops.h"

namespace elsi {
namespace {

constexpr size_t kSplitRows = 16;  // at most so many rows: spans are shared out too, and merged afterwards
constexpr size_t kTaskRows = 8;    // rows of a task beyond that
constexpr int64_t kMostHeads = 1 << 12;

enum Input : size_t { kQkv, kPastKey, kPastValue, kCos, kSin, kCached, kParents };

struct Tree {
  std::vector<size_t> depths, starts, ends;  // [T]
  std::vector<int32_t> slots;                // of all paths; a chain shares one
  std::vector<const int32_t*> paths;         // [T] into `slots`
};

// parents [T]: an earlier row, or -1 for the first row of a path.
Tree read_tree(const int64_t* parents, size_t rows, size_t cached, int64_t window) {
  Tree tree;
  std::vector<size_t> offsets;
  for (size_t row = 0; row < rows; ++row) {
    const int64_t parent = parents[row];
    require(-1 <= parent && parent < static_cast<int64_t>(row),
            "parents[" + std::to_string(row) + "] is " + std::to_string(parent) + ", it must be an earlier row or -1");
    const size_t depth = parent < 0 ? 0 : tree.depths[static_cast<size_t>(parent)] + 1;
    const size_t from = parent < 0 ? 0 : offsets[static_cast<size_t>(parent)];
    if (parent >= 0 && from + depth == tree.slots.size()) {
      offsets.push_back(from);  // the parent's path ends at the end of all: go on there
    } else {
      offsets.push_back(tree.slots.size());
      for (size_t i = 0; i < depth; ++i) tree.slots.push_back(tree.slots[from + i]);
    }
    tree.slots.push_back(static_cast<int32_t>(cached + row));
    tree.depths.push_back(depth);
    const size_t end = cached + depth + 1;
    tree.ends.push_back(end);
    tree.starts.push_back(window < 0 || end <= static_cast<size_t>(window) ? 0 : end - static_cast<size_t>(window));
  }
  for (size_t offset : offsets) tree.paths.push_back(tree.slots.data() + offset);
  return tree;
}

// Rotates pairs (i, i + half) of one head by the angles of its position; coordinates beyond 2 * half stay.
void rotate(const float* in, const float* cos, const float* sin, size_t half, size_t width, float scale, float* out) {
  for (size_t i = 0; i < half; ++i) {
    const float a = in[i], b = in[half + i];
    out[i] = (a * cos[i] - b * sin[i]) * scale;
    out[half + i] = (b * cos[i] + a * sin[i]) * scale;
  }
  for (size_t i = 2 * half; i < width; ++i) out[i] = in[i] * scale;
}

class TreeAttention : public Kernel {
 public:
  explicit TreeAttention(const NodeInfo& node)
      : path_(chosen_path()),
        heads_(static_cast<size_t>(node.integer("num_heads", 1, kMostHeads))),
        kv_heads_(static_cast<size_t>(node.integer("kv_num_heads", 1, kMostHeads))),
        window_(node.integer("window", -1, 1 << 30)),
        scale_(node.number("scale")),
        softcap_(node.number("softcap")) {
    require(heads_ % kv_heads_ == 0,
            std::to_string(heads_) + " heads cannot share " + std::to_string(kv_heads_) + " kv heads");
    require(window_ != 0, "attribute window is 0, it must be -1 for none or at least 1");
    require(std::isfinite(scale_) && scale_ >= 0.0f, "attribute scale must be a finite number, 0 for 1 / sqrt(D)");
    require(std::isfinite(softcap_) && softcap_ >= 0.0f, "attribute softcap must be a finite number, 0 for none");
  }

  void compute(const Call& call) const override {
    const Tensor qkv = call.input(kQkv, abi::kFloat), past_key = call.input(kPastKey, abi::kFloat);
    const Tensor past_value = call.input(kPastValue, abi::kFloat);
    const Tensor cos = call.input(kCos, abi::kFloat), sin = call.input(kSin, abi::kFloat);
    const Tensor cached = call.input(kCached, abi::kInt32), parents = call.input(kParents, abi::kInt64);
    const AttentionCall shape = checked(qkv, past_key, past_value, cos, sin, cached, parents);
    const size_t rows = static_cast<size_t>(qkv.shape[1]), nodes = static_cast<size_t>(parents.shape[0]);
    const size_t before = nodes - rows;  // of earlier calls
    const Tree tree = read_tree(parents.as<int64_t>(), nodes, shape.cached, window_);
    const size_t deepest = rows == 0 ? 0 : *std::max_element(tree.ends.begin(), tree.ends.end());
    require(deepest <= static_cast<size_t>(cos.shape[0]), "position " + std::to_string(deepest) + " is beyond the " +
                                                              std::to_string(cos.shape[0]) +
                                                              " that the model has angles for");
    float* out =
        call.output(0, {1, qkv.shape[1], static_cast<int64_t>(heads_ * shape.width)}, abi::kFloat).as_mutable<float>();
    float* keys = cache(call, 1, past_key, shape.cached + before);
    float* values = cache(call, 2, past_value, shape.cached + before);
    if (rows == 0) return;

    AttentionCall attention = shape;
    attention.keys = keys;
    attention.values = values;
    attention.starts = tree.starts.data() + before;
    attention.ends = tree.ends.data() + before;
    attention.paths = tree.paths.data() + before;
    static thread_local Buffer buffer;
    float* queries = reinterpret_cast<float*>(buffer.reserve(rows * heads_ * shape.width * sizeof(float)));
    attention.queries = queries;
    const Pool pool = call.pool();
    auto place = [&](size_t row) {
      enter(attention, qkv.as<float>(), cos, sin, tree.depths[before + row], row, before + row, queries, keys, values);
    };
    if (rows > kSplitRows) {
      pool.run(rows, place);
    } else {
      for (size_t row = 0; row < rows; ++row) place(row);
    }
    run(attention, pool, rows, (deepest + kSpan - 1) / kSpan, out);
  }

 private:
  AttentionCall checked(const Tensor& qkv, const Tensor& key, const Tensor& value, const Tensor& cos, const Tensor& sin,
                        const Tensor& cached, const Tensor& parents) const {
    require(key.shape.size() == 4 && key.shape[0] == 1 && key.shape[1] == static_cast<int64_t>(kv_heads_) &&
                key.shape == value.shape,
            "the caches are " + text(key.shape) + " and " + text(value.shape) + ", they must be [1, " +
                std::to_string(kv_heads_) + ", C, D]");
    const int64_t width = key.shape[3];
    require(width % kTile == 0 && width > 0 && width <= static_cast<int64_t>(kMostHead),
            "a head has width " + std::to_string(width) + ", it must be a multiple of 16 up to 256");
    const int64_t all = static_cast<int64_t>(heads_ + 2 * kv_heads_) * width;
    require(qkv.shape.size() == 3 && qkv.shape[0] == 1 && qkv.shape[2] == all,
            "queries, keys and values are " + text(qkv.shape) + ", they must be [1, T, " + std::to_string(all) + "]");
    require(cos.shape.size() == 2 && cos.shape == sin.shape && cos.shape[1] > 0 && 2 * cos.shape[1] <= width,
            "the angles are " + text(cos.shape) + " and " + text(sin.shape) + ", they must be [P, at most D / 2]");
    require(cached.size() == 1, "cached is " + text(cached.shape) + ", it must be one number");
    require(parents.shape.size() == 1 && parents.shape[0] >= qkv.shape[1],
            "parents is " + text(parents.shape) + " for " + std::to_string(qkv.shape[1]) + " rows");
    const int64_t slots = *cached.as<int32_t>();
    require(slots >= 0 && slots + parents.shape[0] <= key.shape[2],
            std::to_string(slots) + " cached and " + std::to_string(parents.shape[0]) +
                " new rows do not fit the cache's " + std::to_string(key.shape[2]) + " slots");
    require(key.shape[2] < (int64_t{1} << 31), "the cache has more slots than 2^31");
    AttentionCall call{};
    call.heads = heads_;
    call.kv_heads = kv_heads_;
    call.width = static_cast<size_t>(width);
    call.capacity = static_cast<size_t>(key.shape[2]);
    call.cached = static_cast<size_t>(slots);
    call.softcap = softcap_;
    return call;
  }

  // The present cache: the past one itself where the caller bound one buffer as both, else a copy of what is in use.
  float* cache(const Call& call, size_t output, const Tensor& past, size_t cached) const {
    float* present = call.output(output, past.shape, abi::kFloat).as_mutable<float>();
    const size_t head = static_cast<size_t>(past.shape[2] * past.shape[3]);
    if (present != past.data)
      for (size_t h = 0; h < kv_heads_; ++h)
        std::memcpy(present + h * head, past.as<float>() + h * head,
                    cached * static_cast<size_t>(past.shape[3]) * sizeof(float));
    return present;
  }

  // One new row: its queries and key rotated to its position, key and value written to slot S + node.
  void enter(const AttentionCall& call, const float* qkv, const Tensor& cos, const Tensor& sin, size_t depth,
             size_t row, size_t node, float* queries, float* keys, float* values) const {
    const size_t width = call.width, half = static_cast<size_t>(cos.shape[1]), position = call.cached + depth;
    const float* in = qkv + row * (heads_ + 2 * kv_heads_) * width;
    const float *c = cos.as<float>() + position * half, *s = sin.as<float>() + position * half;
    const float scale = scale_ > 0.0f ? scale_ : 1.0f / std::sqrt(static_cast<float>(width));
    for (size_t h = 0; h < heads_; ++h)
      rotate(in + h * width, c, s, half, width, scale, queries + (row * heads_ + h) * width);
    for (size_t h = 0; h < kv_heads_; ++h) {
      const size_t slot = (h * call.capacity + call.cached + node) * width;
      rotate(in + (heads_ + h) * width, c, s, half, width, 1.0f, keys + slot);
      std::memcpy(values + slot, in + (heads_ + kv_heads_ + h) * width, width * sizeof(float));
    }
  }

  void run(const AttentionCall& call, const Pool& pool, size_t rows, size_t spans, float* out) const {
    const bool split = rows <= kSplitRows;
    const size_t units = split ? spans : 1, task_rows = split ? rows : kTaskRows,
                 chunks = (rows + task_rows - 1) / task_rows;
    const size_t row_floats = call.group() * call.state();
    static thread_local Buffer buffer;  // states [H, units, T, group, state]
    float* states = reinterpret_cast<float*>(buffer.reserve(kv_heads_ * units * rows * row_floats * sizeof(float)));
    std::atomic<bool> failed{false};
    auto work = [&](size_t task) {
      const size_t kv_head = task / (chunks * units), first = task / units % chunks * task_rows, unit = task % units;
      const size_t last = std::min(rows, first + task_rows);
      float* result = states + ((kv_head * units + unit) * rows + first) * row_floats;
      const size_t scratch_floats = attention_scratch(call, last - first);
      static thread_local Buffer own;
      try {
        own.reserve((scratch_floats + (split ? 0 : (last - first) * row_floats)) * sizeof(float));
      } catch (const std::bad_alloc&) {
        failed = true;
        return;
      }
      float* scratch = reinterpret_cast<float*>(own.data());
      if (split) {
        path_.attend(call, kv_head, first, last, unit, result, scratch);
      } else {
        all_spans(call, kv_head, first, last, spans, result, scratch, scratch + scratch_floats);
      }
    };
    pool.run(kv_heads_ * chunks * units, work);
    if (failed) throw std::bad_alloc();
    for (size_t kv_head = 0; kv_head < kv_heads_; ++kv_head)
      for (size_t row = 0; row < rows; ++row)
        for (size_t q = 0; q < call.group(); ++q)
          finish(call, states + (kv_head * units * rows + row) * row_floats + q * call.state(), rows * row_floats, row,
                 split ? spans : 1, out + (row * heads_ + kv_head * call.group() + q) * call.width);
  }

  // Spans in their order, each merged into what came before: the same operations as with the spans shared out.
  void all_spans(const AttentionCall& call, size_t kv_head, size_t first, size_t last, size_t spans, float* result,
                 float* scratch, float* later) const {
    const size_t row_floats = call.group() * call.state();
    for (size_t span = 0; span < spans; ++span) {
      path_.attend(call, kv_head, first, last, span, later, scratch);
      for (size_t row = first; row < last; ++row) {
        if (!call.sees(row, span)) continue;
        float *state = result + (row - first) * row_floats, *part = later + (row - first) * row_floats;
        if (span == call.starts[row] / kSpan) {
          std::memcpy(state, part, row_floats * sizeof(float));
        } else {
          for (size_t q = 0; q < call.group(); ++q)
            path_.merge(state + q * call.state(), part + q * call.state(), call.width);
        }
      }
    }
  }

  // Merges the states of `spans` spans, `stride` floats apart, and divides by the sum of weights.
  void finish(const AttentionCall& call, float* state, size_t stride, size_t row, size_t spans, float* out) const {
    if (spans > 1) {
      const size_t first = call.starts[row] / kSpan;
      for (size_t span = first + 1; span < spans; ++span)
        if (call.sees(row, span)) path_.merge(state + first * stride, state + span * stride, call.width);
      state += first * stride;
    }
    for (size_t d = 0; d < call.width; ++d) out[d] = state[d] / state[call.width + 1];
  }

  const Path& path_;
  size_t heads_, kv_heads_;
  int64_t window_;
  float scale_, softcap_;
};

}  // namespace

const Op& tree_attention() {
  static const Op op(
      "TreeAttention", {abi::kFloat, abi::kFloat, abi::kFloat, abi::kFloat, abi::kFloat, abi::kInt32, abi::kInt64},
      {abi::kFloat, abi::kFloat, abi::kFloat},
      [](const NodeInfo& node) -> std::unique_ptr<Kernel> { return std::make_unique<TreeAttention>(node); });
  return op;
}

}  // namespace elsi
