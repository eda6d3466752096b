// Attention over int8 keys and values, in AVX2; see attention.h for the layout and the order of sums.
#include "attention.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "linear.h"
#include "rows.h"

namespace fused {
namespace {

constexpr int kMaxHeads = 3;     // query heads at once: with 4 blocks or 4 vectors 12 sums, the registers' limit
constexpr int kScoreBlocks = 4;  // blocks of positions at once
constexpr int kWideVectors = 4;  // vectors of the head's dimensions at once
constexpr int kKvRange = 127;

// The memory of one layer, row and KV head.
struct Run {
    int8_t *keys, *values;
    float *key_scales, *value_scales;
};

inline int64_t run_bytes(const FusedModel &model) {
    return padded_context(model) * (2 * model.head_dim + 2 * static_cast<int64_t>(sizeof(float)));
}

inline Run run_of(const FusedModel &model, int layer, int row, int kv_head) {
    const int64_t index = (static_cast<int64_t>(layer) * model.num_rows + row) * model.kv_heads + kv_head;
    const int64_t context = padded_context(model), width = context * model.head_dim;
    uint8_t *start = model.cache + index * run_bytes(model);
    float *scales = reinterpret_cast<float *>(start + 2 * width);
    return {reinterpret_cast<int8_t *>(start), reinterpret_cast<int8_t *>(start + width), scales, scales + context};
}

// One call: `Heads` query heads of one KV head over positions [first, end).
struct Span {
    Run run;
    const int16_t *queries;      // (Heads, head_dim)
    float query_scales[kMaxHeads];
    float *scores;               // (Heads, slots)
    int16_t *weights;            // (Heads, slots)
    float *outputs;              // (Heads, head_dim)
    int first, end, head_dim;
    int64_t slots;
};

inline __m256i widen(const int8_t *numbers) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(numbers)));
}

// Scores of `Blocks` blocks from `block` on, unmasked.
template <int Heads, int Blocks>
inline void score(const Span &span, int block) {
    __m256i sums[Heads][Blocks];
    for (auto &head : sums)
        for (auto &sum : head) sum = _mm256_setzero_si256();
    const int64_t block_bytes = static_cast<int64_t>(span.head_dim) * kSlotBlock;
    const int8_t *keys = span.run.keys + block * block_bytes;
    const int16_t *queries = span.queries, *const end = queries + span.head_dim;
#pragma GCC unroll 1
    for (; queries != end; queries += 2, keys += 2 * kSlotBlock) {
        __m256i pairs[Heads];
        for (int h = 0; h < Heads; ++h) pairs[h] = broadcast(queries + h * span.head_dim);
#pragma GCC unroll 4
        for (int b = 0; b < Blocks; ++b) {
            const __m256i numbers = widen(keys + b * block_bytes);
            for (int h = 0; h < Heads; ++h) multiply_add(sums[h][b], numbers, pairs[h]);
        }
    }
    for (int b = 0; b < Blocks; ++b) {
        const __m256 key_scales = _mm256_loadu_ps(span.run.key_scales + (block + b) * kSlotBlock);
        for (int h = 0; h < Heads; ++h) {
            const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[h][b]), key_scales);
            float *out = span.scores + h * span.slots + static_cast<int64_t>(block + b) * kSlotBlock;
            _mm256_storeu_ps(out, _mm256_mul_ps(scaled, _mm256_set1_ps(span.query_scales[h])));
        }
    }
}

inline float highest_lane(__m256 lanes) {
    alignas(32) float numbers[8];
    _mm256_store_ps(numbers, lanes);
    return *std::max_element(numbers, numbers + 8);
}

// Turns scores into e^(score - highest) x value scale as int16, masked positions into 0. Returns what undoes the
// quantization and divides by the sum of the softmax: NaN where a score is.
float weigh(const Span &span, float *scores, int16_t *weights) {
    const int first_slot = span.first / kSlotBlock * kSlotBlock;
    const int last_slot = (span.end + kSlotBlock - 1) / kSlotBlock * kSlotBlock;
    std::fill(scores + first_slot, scores + span.first, -INFINITY);
    std::fill(scores + span.end, scores + last_slot, -INFINITY);
    __m256 highest = _mm256_set1_ps(-INFINITY);
    for (int slot = first_slot; slot < last_slot; slot += 8)
        highest = _mm256_max_ps(highest, _mm256_loadu_ps(scores + slot));
    const __m256 top = _mm256_set1_ps(highest_lane(highest));
    __m256 sums = _mm256_setzero_ps();
    for (int slot = first_slot; slot < last_slot; slot += 8) {
        const __m256 numbers = exponential(_mm256_sub_ps(_mm256_loadu_ps(scores + slot), top));
        sums = _mm256_add_ps(sums, numbers);
        _mm256_storeu_ps(scores + slot, _mm256_mul_ps(numbers, _mm256_loadu_ps(span.run.value_scales + slot)));
    }
    // Scales behind the position are anything; NaN x 0 would spread.
    std::fill(scores + first_slot, scores + span.first, 0.0f);
    std::fill(scores + span.end, scores + last_slot, 0.0f);
    const float scale = quantize(scores + first_slot, last_slot - first_slot, kRange, weights + first_slot);
    return scale / fold(sums);
}

// Weighted sums of `Vectors` vectors of the values from dimension `d` on.
template <int Heads, int Vectors>
inline void blend(const Span &span, int d, const float *factors) {
    __m256 totals[Heads][Vectors];
    for (auto &head : totals)
        for (auto &total : head) total = _mm256_setzero_ps();
    const int first = span.first / 2 * 2, end = (span.end + 1) / 2 * 2;
    for (int begin = first; begin < end; begin = (begin / kSpan + 1) * kSpan) {
        const int stop = std::min(end, (begin / kSpan + 1) * kSpan);
        __m256i sums[Heads][Vectors];
        for (auto &head : sums)
            for (auto &sum : head) sum = _mm256_setzero_si256();
        const int8_t *values = span.run.values + static_cast<int64_t>(begin) * span.head_dim + 2 * d;
        const int16_t *weights = span.weights + begin, *const last = span.weights + stop;
#pragma GCC unroll 1
        for (; weights != last; weights += 2, values += 2 * span.head_dim) {
            __m256i pairs[Heads];
            for (int h = 0; h < Heads; ++h) pairs[h] = broadcast(weights + h * span.slots);
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v) {
                const __m256i numbers = widen(values + v * 16);
                for (int h = 0; h < Heads; ++h) multiply_add(sums[h][v], numbers, pairs[h]);
            }
        }
        for (int h = 0; h < Heads; ++h)
            for (int v = 0; v < Vectors; ++v)
                totals[h][v] = _mm256_add_ps(totals[h][v], _mm256_cvtepi32_ps(sums[h][v]));
    }
    for (int h = 0; h < Heads; ++h)
        for (int v = 0; v < Vectors; ++v)
            _mm256_storeu_ps(span.outputs + h * span.head_dim + d + v * 8,
                             _mm256_mul_ps(totals[h][v], _mm256_set1_ps(factors[h])));
}

template <int Heads>
void attend_heads(const Span &span) {
    const int last_block = (span.end - 1) / kSlotBlock;
    int block = span.first / kSlotBlock;
    for (; block + kScoreBlocks <= last_block + 1; block += kScoreBlocks) score<Heads, kScoreBlocks>(span, block);
    for (; block <= last_block; ++block) score<Heads, 1>(span, block);
    float factors[Heads];
    for (int h = 0; h < Heads; ++h)
        factors[h] = weigh(span, span.scores + h * span.slots, span.weights + h * span.slots);
    int d = 0;
    for (; d + kWideVectors * 8 <= span.head_dim; d += kWideVectors * 8) blend<Heads, kWideVectors>(span, d, factors);
    for (; d < span.head_dim; d += 8) blend<Heads, 1>(span, d, factors);
}

}  // namespace

int64_t cache_bytes(const FusedModel &model) {
    return static_cast<int64_t>(model.num_layers) * model.num_rows * model.kv_heads * run_bytes(model);
}

void store_kv(const FusedModel &model, int layer, int row, int position, const float *keys, const float *values) {
    const int dim = model.head_dim;
    int16_t numbers[kMaxHeadDim];
    for (int kv_head = 0; kv_head < model.kv_heads; ++kv_head, keys += dim, values += dim) {
        const Run run = run_of(model, layer, row, kv_head);
        run.key_scales[position] = quantize(keys, dim, kKvRange, numbers);
        int8_t *key = run.keys + static_cast<int64_t>(position / kSlotBlock) * kSlotBlock * dim;
        key += position % kSlotBlock * 2;
        for (int d = 0; d < dim; d += 2, key += 2 * kSlotBlock) {
            key[0] = static_cast<int8_t>(numbers[d]);
            key[1] = static_cast<int8_t>(numbers[d + 1]);
        }
        run.value_scales[position] = quantize(values, dim, kKvRange, numbers);
        int8_t *value = run.values + static_cast<int64_t>(position / 2) * 2 * dim + position % 2;
        for (int d = 0; d < dim; ++d) value[2 * d] = static_cast<int8_t>(numbers[d]);
    }
}

void copy_kv(const FusedModel &model, int layer, int kv_head, int from_row, int to_row, int count) {
    const Run from = run_of(model, layer, from_row, kv_head), to = run_of(model, layer, to_row, kv_head);
    const int64_t slots = (count + kSlotBlock - 1) / kSlotBlock * kSlotBlock;  // whole blocks: what is too much is masked
    std::memcpy(to.keys, from.keys, slots * model.head_dim);
    std::memcpy(to.values, from.values, slots * model.head_dim);
    std::memcpy(to.key_scales, from.key_scales, slots * sizeof(float));
    std::memcpy(to.value_scales, from.value_scales, slots * sizeof(float));
}

// Of one query head: quantize fills up to whole groups, from any block on.
inline int64_t scratch_slots(const FusedModel &model) { return padded_context(model) + kGroup; }

int64_t attention_scratch(const FusedModel &model) {
    return kMaxHeads * (scratch_slots(model) * (sizeof(float) + sizeof(int16_t)) + kMaxHeadDim * sizeof(int16_t));
}

void attend(const FusedModel &model, int layer, int row, int kv_head, int position, const float *queries,
            float *outputs, uint8_t *scratch) {
    constexpr void (*kKernels[kMaxHeads])(const Span &) = {attend_heads<1>, attend_heads<2>, attend_heads<3>};
    const int window = model.layers[layer].window, dim = model.head_dim;
    const int64_t slots = scratch_slots(model);
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    float *scores = reinterpret_cast<float *>(scratch);
    int16_t *weights = reinterpret_cast<int16_t *>(scores + kMaxHeads * slots);
    int16_t *numbers = weights + kMaxHeads * slots;
    Span span{run_of(model, layer, row, kv_head), numbers, {}, scores, weights, outputs,
              window > 0 ? std::max(0, position - window + 1) : 0, position + 1, dim, slots};
    const int heads = model.heads / model.kv_heads;
    const int calls = (heads + kMaxHeads - 1) / kMaxHeads;
    for (int i = 0; i < calls; ++i) {
        const int first = heads * i / calls, last = heads * (i + 1) / calls;
        for (int head = first; head < last; ++head) {
            const float *query = queries + static_cast<int64_t>(head) * dim;
            span.query_scales[head - first] =
                scale * quantize(query, dim, kRange, numbers + (head - first) * dim);
        }
        span.outputs = outputs + static_cast<int64_t>(first) * dim;
        kKernels[last - first - 1](span);
    }
}

}  // namespace fused

extern "C" int64_t fused_cache_bytes(const FusedModel *model) { return fused::cache_bytes(*model); }

extern "C" void fused_store_kv(const FusedModel *model, int32_t layer, int32_t row, int32_t position, const float *key,
                               const float *value) {
    fused::store_kv(*model, layer, row, position, key, value);
}

extern "C" void fused_attend(const FusedModel *model, int32_t layer, int32_t row, int32_t position,
                             const float *queries, float *outputs) {
    const auto scratch = std::make_unique<uint8_t[]>(fused::attention_scratch(*model));
    const int64_t width = static_cast<int64_t>(model->heads / model->kv_heads) * model->head_dim;
    for (int kv_head = 0; kv_head < model->kv_heads; ++kv_head)
        fused::attend(*model, layer, row, kv_head, position, queries + kv_head * width, outputs + kv_head * width,
                      scratch.get());
}
