// Attention in fp32 over fp16 keys and values, in AVX2, F16C and FMA.
#include "attention.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "rows.h"

namespace fused {
namespace {

constexpr int kMaxGroup = 3;      // query heads at once: with 4 blocks or 4 vectors 12 sums, the registers' limit
constexpr int kScoreBlocks = 4;   // blocks of positions at once
constexpr int kWideVectors = 4;   // vectors of the head's dimensions at once

// One call: `Group` query heads of one KV head over positions [first, end).
struct Span {
    const uint16_t *keys, *values;
    const float *queries;  // (Group, head_dim)
    float *scores;         // (Group, stride)
    float *outputs;        // (Group, head_dim)
    int first, end, head_dim;
    int64_t stride;
};

inline __m256 widen(const uint16_t *halves) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(halves)));
}

// Scores of `Blocks` blocks from `block` on, unmasked.
template <int Group, int Blocks>
inline void score(const Span &span, int block, float scale) {
    __m256 sums[Group][Blocks];
    for (auto &head : sums)
        for (auto &sum : head) sum = _mm256_setzero_ps();
    const int64_t block_halves = static_cast<int64_t>(span.head_dim) * kSlotBlock;
    const uint16_t *keys = span.keys + block * block_halves;
    for (int d = 0; d < span.head_dim; ++d) {
        __m256 queries[Group];
        for (int g = 0; g < Group; ++g) queries[g] = _mm256_broadcast_ss(span.queries + g * span.head_dim + d);
#pragma GCC unroll 4
        for (int b = 0; b < Blocks; ++b) {
            const __m256 key = widen(keys + b * block_halves + d * kSlotBlock);
            for (int g = 0; g < Group; ++g) sums[g][b] = _mm256_fmadd_ps(key, queries[g], sums[g][b]);
        }
    }
    for (int g = 0; g < Group; ++g)
        for (int b = 0; b < Blocks; ++b) {
            float *out = span.scores + g * span.stride + static_cast<int64_t>(block + b) * kSlotBlock;
            _mm256_storeu_ps(out, _mm256_mul_ps(sums[g][b], _mm256_set1_ps(scale)));
        }
}

// Turns scores into weights e^(score - highest) and returns their sum; masked positions weigh 0.
float weigh(float *scores, int first, int end) {
    const int first_block = first / kSlotBlock, last_block = (end - 1) / kSlotBlock;
    for (int slot = first_block * kSlotBlock; slot < first; ++slot) scores[slot] = -INFINITY;
    for (int slot = end; slot < (last_block + 1) * kSlotBlock; ++slot) scores[slot] = -INFINITY;
    __m256 highest = _mm256_set1_ps(-INFINITY);
    for (int block = first_block; block <= last_block; ++block)
        highest = _mm256_max_ps(highest, _mm256_loadu_ps(scores + block * kSlotBlock));
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, highest);
    const __m256 top = _mm256_set1_ps(*std::max_element(lanes, lanes + 8));
    __m256 sums = _mm256_setzero_ps();
    for (int block = first_block; block <= last_block; ++block) {
        const __m256 weights = exponential(_mm256_sub_ps(_mm256_loadu_ps(scores + block * kSlotBlock), top));
        _mm256_storeu_ps(scores + block * kSlotBlock, weights);
        sums = _mm256_add_ps(sums, weights);
    }
    return fold(sums);
}

// Weighted sums of `Vectors` vectors of the values from dimension `d` on.
template <int Group, int Vectors>
inline void blend(const Span &span, int d, const float *totals) {
    __m256 sums[Group][Vectors];
    for (auto &head : sums)
        for (auto &sum : head) sum = _mm256_setzero_ps();
    const uint16_t *values = span.values + static_cast<int64_t>(span.first) * span.head_dim + d;
    for (int slot = span.first; slot < span.end; ++slot, values += span.head_dim) {
        __m256 weights[Group];
        for (int g = 0; g < Group; ++g) weights[g] = _mm256_broadcast_ss(span.scores + g * span.stride + slot);
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) {
            const __m256 value = widen(values + v * 8);
            for (int g = 0; g < Group; ++g) sums[g][v] = _mm256_fmadd_ps(weights[g], value, sums[g][v]);
        }
    }
    for (int g = 0; g < Group; ++g)
        for (int v = 0; v < Vectors; ++v)
            _mm256_storeu_ps(span.outputs + g * span.head_dim + d + v * 8,
                             _mm256_div_ps(sums[g][v], _mm256_set1_ps(totals[g])));
}

template <int Group>
void attend_group(const Span &span) {
    const float scale = 1.0f / std::sqrt(static_cast<float>(span.head_dim));
    const int last_block = (span.end - 1) / kSlotBlock;
    int block = span.first / kSlotBlock;
    for (; block + kScoreBlocks <= last_block + 1; block += kScoreBlocks) score<Group, kScoreBlocks>(span, block, scale);
    for (; block <= last_block; ++block) score<Group, 1>(span, block, scale);
    float totals[Group];
    for (int g = 0; g < Group; ++g) totals[g] = weigh(span.scores + g * span.stride, span.first, span.end);
    int d = 0;
    for (; d + kWideVectors * 8 <= span.head_dim; d += kWideVectors * 8) blend<Group, kWideVectors>(span, d, totals);
    for (; d < span.head_dim; d += 8) blend<Group, 1>(span, d, totals);
}

inline int64_t run_halves(const FusedModel &model) { return padded_context(model) * model.head_dim; }

inline int64_t run_start(const FusedModel &model, int layer, int row, int kv_head) {
    return ((static_cast<int64_t>(layer) * model.num_rows + row) * model.kv_heads + kv_head) * run_halves(model);
}

inline uint16_t narrow(float value) { return static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT)); }

}  // namespace

void store_kv(const FusedModel &model, int layer, int row, int position, const float *keys, const float *values) {
    const int dim = model.head_dim;
    for (int kv_head = 0; kv_head < model.kv_heads; ++kv_head, keys += dim, values += dim) {
        const int64_t start = run_start(model, layer, row, kv_head);
        uint16_t *block = model.keys + start + static_cast<int64_t>(position / kSlotBlock) * kSlotBlock * dim;
        uint16_t *value = model.values + start + static_cast<int64_t>(position) * dim;
        for (int d = 0; d < dim; ++d) {
            block[d * kSlotBlock + position % kSlotBlock] = narrow(keys[d]);
            value[d] = narrow(values[d]);
        }
    }
}

int64_t attention_scratch(const FusedModel &model) { return kMaxGroup * padded_context(model); }

void attend(const FusedModel &model, int layer, int row, int kv_head, int position, const float *queries,
            float *outputs, float *scratch) {
    constexpr void (*kGroups[kMaxGroup])(const Span &) = {attend_group<1>, attend_group<2>, attend_group<3>};
    const int window = model.layers[layer].window;
    const int64_t start = run_start(model, layer, row, kv_head);
    Span span{model.keys + start, model.values + start, queries, scratch, outputs,
              window > 0 ? std::max(0, position - window + 1) : 0, position + 1, model.head_dim,
              padded_context(model)};
    const int heads = model.heads / model.kv_heads;
    const int groups = (heads + kMaxGroup - 1) / kMaxGroup;
    for (int i = 0; i < groups; ++i) {
        const int first = heads * i / groups, last = heads * (i + 1) / groups;
        span.queries = queries + static_cast<int64_t>(first) * model.head_dim;
        span.outputs = outputs + static_cast<int64_t>(first) * model.head_dim;
        kGroups[last - first - 1](span);
    }
}

}  // namespace fused

extern "C" int64_t fused_cache_halves(const FusedModel *model) {
    return fused::run_start(*model, model->num_layers, 0, 0);
}

extern "C" void fused_store_kv(const FusedModel *model, int32_t layer, int32_t row, int32_t position, const float *key,
                               const float *value) {
    fused::store_kv(*model, layer, row, position, key, value);
}

extern "C" void fused_attend(const FusedModel *model, int32_t layer, int32_t row, int32_t position,
                             const float *queries, float *outputs) {
    std::vector<float> scratch(fused::attention_scratch(*model));
    const int64_t width = static_cast<int64_t>(model->heads / model->kv_heads) * model->head_dim;
    for (int kv_head = 0; kv_head < model->kv_heads; ++kv_head)
        fused::attend(*model, layer, row, kv_head, position, queries + kv_head * width, outputs + kv_head * width,
                      scratch.data());
}
