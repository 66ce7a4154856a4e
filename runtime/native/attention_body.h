// What is written over V16, a vector of 16 floats, attention above all: included once per instruction set, after V16 and
// the macros ELSI_PATH (target attribute) and ELSI_PATH_INLINE are defined. Every row goes through the same operations
// in the same order whatever is beside it: keys in tiles of 16 positions, spans of 128, positions its own.

// e^x, x <= 0: 2^n * p(r), |r| <= ln(2) / 2, relative error below 2e-7; e^0 is 1, and below -104 it is 0.
ELSI_PATH_INLINE V16 exponential(V16 x) {
  x = V16::max(V16::set1(-110.0f), x);
  const V16 n = V16::rint(V16::mul(x, V16::set1(1.44269504f)));
  V16 r = V16::fma(n, V16::set1(-0.693359375f), x);
  r = V16::fma(n, V16::set1(2.12194440e-4f), r);
  V16 p = V16::set1(1.0f / 720);
  p = V16::fma(p, r, V16::set1(1.0f / 120));
  p = V16::fma(p, r, V16::set1(1.0f / 24));
  p = V16::fma(p, r, V16::set1(1.0f / 6));
  p = V16::fma(p, r, V16::set1(0.5f));
  p = V16::fma(p, r, V16::set1(1.0f));
  p = V16::fma(p, r, V16::set1(1.0f));
  return V16::scale2(p, n);
}

// SiLU of one vector times another. The sigmoid is e^min(x, 0) / (1 + e^-|x|): nothing overflows.
ELSI_PATH void gate(float* gate, const float* up) {
  const V16 x = V16::load(gate), zero = V16::set1(0.0f), minus = V16::sub(zero, x);
  const V16 over =
      exponential(V16::sub(zero, V16::max(zero, minus)));  // a NaN passes: max takes its second argument then
  const V16 under = V16::add(V16::set1(1.0f), exponential(V16::sub(zero, V16::max(x, minus))));
  V16::mul(V16::mul(x, V16::div(over, under)), V16::load(up)).store(gate);
}

// First the largest alone, which is rarely above the one before; only then its place.
ELSI_PATH void largest(const float* x, size_t count, size_t first, Largest* found) {
  float most[kTile];
  V16 lanes = V16::set1(found->value);
  size_t i = 0;
  for (; i + kTile <= count; i += kTile) lanes = V16::max(V16::load(x + i), lanes);  // mostly takes lanes beside a NaN
  lanes.store(most);
  bool odd = false;  // a NaN came through: Arm's max passes it on
  float top = found->value;
  for (float value : most) {
    odd = odd || value != value;
    top = value > top ? value : top;
  }
  for (i = odd ? 0 : i; i < count; ++i) top = x[i] > top ? x[i] : top;
  if (!(top > found->value)) return;
  for (i = 0; x[i] != top;) ++i;
  *found = {top, first + i};
}

ELSI_PATH_INLINE V16 capped(V16 x, float cap) {  // cap * tanh(x / cap), through e^(-2|x| / cap)
  const V16 y = V16::mul(x, V16::set1(1.0f / cap));
  const V16 size = V16::max(y, V16::sub(V16::set1(0.0f), y));
  const V16 e = exponential(V16::mul(size, V16::set1(-2.0f)));
  const V16 t = V16::div(V16::sub(V16::set1(1.0f), e), V16::add(V16::set1(1.0f), e));
  // the sign back: y / |y|, by the larger of the two that differ in sign
  float signs[kTile], values[kTile];
  y.store(signs);
  V16::mul(t, V16::set1(cap)).store(values);
  for (size_t i = 0; i < kTile; ++i) values[i] = std::copysign(values[i], signs[i]);
  return V16::load(values);
}

// Scores of kQueries queries [kQueries, D] against 16 keys, each a row of D floats.
template <int kQueries>
ELSI_PATH void scores(const float* const* keys, const float* queries, size_t width, float* out) {
  V16 quads[kQueries][4];
#pragma GCC unroll 4
  for (int quad = 0; quad < 4; ++quad) {
    V16 parts[kQueries][4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
#pragma GCC unroll 3
      for (int q = 0; q < kQueries; ++q) parts[q][i] = V16::set1(0.0f);
    for (size_t d = 0; d < width; d += kTile)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const V16 key = V16::load(keys[4 * quad + i] + d);
#pragma GCC unroll 3
        for (int q = 0; q < kQueries; ++q) parts[q][i] = V16::fma(key, V16::load(queries + q * width + d), parts[q][i]);
      }
#pragma GCC unroll 3
    for (int q = 0; q < kQueries; ++q) quads[q][quad] = V16::sum4(parts[q][0], parts[q][1], parts[q][2], parts[q][3]);
  }
#pragma GCC unroll 3
  for (int q = 0; q < kQueries; ++q)
    V16::sum16(quads[q][0], quads[q][1], quads[q][2], quads[q][3]).store(out + q * kSpan);
}

// state[q] = sum over positions of weight * value, 64 coordinates at a time (fewer at the end), position after
// position.
template <int kQueries, int kVectors>
ELSI_PATH void weighted(const AttentionCall& call, size_t row, const float* values, size_t begin, size_t end,
                        const float* weights, size_t at, float* states) {
  V16 sums[kQueries][kVectors];
#pragma GCC unroll 3
  for (int q = 0; q < kQueries; ++q)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums[q][v] = V16::set1(0.0f);
  const float* weight = weights + begin % kSpan;
  for (size_t position = begin; position < end; ++position, ++weight) {
    const float* value = values + call.slot(row, position) * call.width + at;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const V16 part = V16::load(value + kTile * v);
#pragma GCC unroll 3
      for (int q = 0; q < kQueries; ++q) sums[q][v] = V16::fma(V16::set1(weight[q * kSpan]), part, sums[q][v]);
    }
  }
#pragma GCC unroll 3
  for (int q = 0; q < kQueries; ++q)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums[q][v].store(states + q * call.state() + at + kTile * v);
}

template <int kQueries>
ELSI_PATH void weighted_all(const AttentionCall& call, size_t row, const float* values, size_t begin, size_t end,
                            const float* weights, float* states) {
  size_t at = 0;
  for (; at + 64 <= call.width; at += 64) weighted<kQueries, 4>(call, row, values, begin, end, weights, at, states);
  for (; at < call.width; at += 16) weighted<kQueries, 1>(call, row, values, begin, end, weights, at, states);
}

ELSI_PATH_INLINE float reduced_max(V16 a) {
  float lanes[kTile];
  a.store(lanes);
  for (size_t width = 8; width > 0; width /= 2)
    for (size_t i = 0; i < width; ++i) lanes[i] = lanes[i + width] < lanes[i] ? lanes[i] : lanes[i + width];
  return lanes[0];
}

ELSI_PATH_INLINE float reduced_sum(V16 a) {
  float lanes[kTile];
  a.store(lanes);
  for (size_t width = 8; width > 0; width /= 2)
    for (size_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

// Scores of one query over tiles first..last-1 of a span become weights; their largest and their sum go to the state.
ELSI_PATH void softmax(float* row, size_t first, size_t last, float* state, size_t width) {
  V16 most = V16::load(row + kTile * first);
  for (size_t t = first + 1; t < last; ++t) most = V16::max(most, V16::load(row + kTile * t));
  const float top = reduced_max(most);
  V16 sum = V16::set1(0.0f);
  for (size_t t = first; t < last; ++t) {
    const V16 weight = exponential(V16::sub(V16::load(row + kTile * t), V16::set1(top)));
    weight.store(row + kTile * t);
    sum = V16::add(sum, weight);
  }
  state[width] = top;
  state[width + 1] = reduced_sum(sum);
}

// Scores [group, kSpan] of one row at positions tile..tile+15; -infinity where the row does not see one.
ELSI_PATH void score_tile(const AttentionCall& call, const float* keys, size_t row, size_t head, size_t tile,
                          float* out) {
  const size_t group = call.group(), width = call.width, left = call.ends[row] - tile,
               count = left < kTile ? left : kTile;
  const float* rows[kTile];
  for (size_t i = 0; i < kTile; ++i) rows[i] = keys + call.slot(row, i < count ? tile + i : tile) * width;
  const float* query = call.queries + (row * call.heads + head) * width;
  size_t q = 0;
  for (; q + 3 <= group; q += 3) scores<3>(rows, query + q * width, width, out + q * kSpan);
  for (; q < group; ++q) scores<1>(rows, query + q * width, width, out + q * kSpan);
  if (call.softcap > 0.0f)
    for (q = 0; q < group; ++q) capped(V16::load(out + q * kSpan), call.softcap).store(out + q * kSpan);
  if (count < kTile || tile < call.starts[row])
    for (size_t i = 0; i < kTile; ++i)
      if (i >= count || tile + i < call.starts[row])
        for (q = 0; q < group; ++q) out[q * kSpan + i] = -std::numeric_limits<float>::infinity();
}

ELSI_PATH void attend(const AttentionCall& call, size_t kv_head, size_t first, size_t last, size_t span, float* states,
                      float* scratch) {
  const size_t group = call.group(), head = kv_head * group, width = call.width, base = span * kSpan;
  const float* keys = call.keys + kv_head * call.capacity * width;
  const float* values = call.values + kv_head * call.capacity * width;
  for (size_t tile = base; tile < base + kSpan; tile += kTile)  // the keys of a tile stay in the cache for all rows
    for (size_t row = first; row < last; ++row)
      if (call.ends[row] > tile && call.starts[row] < tile + kTile)
        score_tile(call, keys, row, head, tile, scratch + (row - first) * group * kSpan + (tile - base));
  for (size_t row = first; row < last; ++row) {
    if (!call.sees(row, span)) continue;
    const size_t begin = call.starts[row] > base ? call.starts[row] : base;
    const size_t end = call.ends[row] < base + kSpan ? call.ends[row] : base + kSpan;
    float* weights = scratch + (row - first) * group * kSpan;
    float* state = states + (row - first) * group * call.state();
    for (size_t q = 0; q < group; ++q)
      softmax(weights + q * kSpan, (begin - base) / kTile, (end - base + kTile - 1) / kTile, state + q * call.state(),
              width);
    size_t q = 0;
    for (; q + 3 <= group; q += 3)
      weighted_all<3>(call, row, values, begin, end, weights + q * kSpan, state + q * call.state());
    for (; q < group; ++q)
      weighted_all<1>(call, row, values, begin, end, weights + q * kSpan, state + q * call.state());
  }
}

ELSI_PATH void merge(float* state, const float* later, size_t width) {
  const float top = later[width] < state[width] ? state[width] : later[width];
  float shrink[kTile] = {state[width] - top, later[width] - top};
  exponential(V16::load(shrink)).store(shrink);
  for (size_t d = 0; d < width; d += kTile)
    V16::fma(V16::load(later + d), V16::set1(shrink[1]), V16::mul(V16::load(state + d), V16::set1(shrink[0])))
        .store(state + d);
  state[width + 1] = state[width + 1] * shrink[0] + later[width + 1] * shrink[1];
  state[width] = top;
}

ELSI_PATH void divide(const float* state, size_t width, float* out) {
  const V16 by = V16::set1(state[width + 1]);
  for (size_t d = 0; d < width; d += kTile) V16::div(V16::load(state + d), by).store(out + d);
}
