// Attention of new rows that are nodes of a tree, behind a cache, with rotary embedding by depth.
//
// A row's positions are the cached ones, then its ancestors, then itself. Its sums run over them in that order,
// whatever slots they lie in and whatever rows are beside it: the bits are those of one-token decoding along its path.
// Where `parents` is longer than the rows, its first entries are nodes of earlier calls, in the slots behind the cached.
#pragma once

#include <atomic>
#include <vector>

#include "op.h"
#include "path.h"

namespace elsi {

class Attention {
 public:
  // Attributes num_heads, kv_num_heads, window, scale, softcap.
  explicit Attention(const NodeInfo& node);

  struct Inputs {
    Tensor past_key, past_value;  // float [1, H, C, D]
    Tensor cos, sin;              // float [P, at most D / 2]
    Tensor cached;                // int32 [1]: S
    Tensor parents;               // int64 [W], W >= T
  };
  static Inputs inputs(const Call& call, size_t first);  // six of a node, in that order

  size_t heads() const { return heads_; }
  size_t kv_heads() const { return kv_heads_; }

  // One call, in three steps, each to be done for all before the next: enter(row), attend(task), finish(row).
  class Run {
   public:
    size_t rows() const { return rows_; }
    size_t width() const { return call_.width; }  // D
    // qkv [(Hq + 2 H) D] of a row: its queries and key rotated to its position, key and value put into the cache.
    void enter(const float* qkv, size_t row) const;
    size_t tasks() const { return attention_.kv_heads_ * chunks_ * units_; }
    void attend(size_t task) const;
    void finish(size_t row, float* out) const;  // [Hq D]
    void require_memory() const;                // throws where a task found none

   private:
    friend class Attention;
    Run(const Attention& attention, const Call& call, const Inputs& inputs, size_t rows, size_t first_output);
    void read_tree(const int64_t* parents, size_t nodes);
    void all_spans(size_t kv_head, size_t first, size_t last, float* result, float* scratch, float* later) const;
    size_t row_floats() const { return call_.group() * call_.state(); }

    const Attention& attention_;
    const Tensor cos_, sin_;
    AttentionCall call_{};
    size_t rows_, before_;  // before: nodes of earlier calls
    std::vector<size_t> depths_, starts_, ends_;  // [W]
    std::vector<int32_t> slots_;                  // of all paths; a chain shares one
    std::vector<const int32_t*> paths_;           // [W] into them
    float *keys_ = nullptr, *values_ = nullptr, *queries_ = nullptr, *states_ = nullptr;
    size_t spans_ = 0, units_ = 0, chunks_ = 0, task_rows_ = 0;
    bool split_ = false;  // spans are tasks of their own
    mutable std::atomic<bool> failed_{false};
  };
  // Checks the inputs against `width` = (Hq + 2 H) D of the rows and yields the present caches as the two outputs from
  // `first_output` on: the past ones themselves where the caller bound one buffer as both, else copies of what is in use.
  // The run works in buffers of the calling thread: one run at a time. Refused with what disagrees.
  Run start(const Call& call, const Inputs& inputs, size_t rows, size_t width, size_t first_output) const;

 private:
  const Path& path_;
  size_t heads_, kv_heads_;
  int64_t window_;
  float scale_, softcap_;
};

}  // namespace elsi
