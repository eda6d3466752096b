// Selection: blocks whose maximum is among the `count` highest maxima hold all of the `count` highest logits.
#include "select.h"

#include <immintrin.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "rows.h"

namespace fused {
namespace {

constexpr int kLanes = 8;
constexpr float kImpossible = -std::numeric_limits<float>::infinity();
using Candidate = std::pair<float, int32_t>;  // logit, id

bool comes_first(const Candidate &left, const Candidate &right) {
    return left.first > right.first || (left.first == right.first && left.second < right.second);
}

float highest_of(__m256 values) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

// A block's logits; what the vocabulary lacks at its end is impossible.
const float *block_of(const float *logits, int vocab, int block, float *padded) {
    const int first = block * kSelectBlock;
    if (first + kSelectBlock <= vocab) return logits + first;
    std::fill_n(std::copy(logits + first, logits + vocab, padded), first + kSelectBlock - vocab, kImpossible);
    return padded;
}

float maximum(const float *block) {
    __m256 highest = _mm256_loadu_ps(block);
    for (int at = kLanes; at < kSelectBlock; at += kLanes) {
        highest = _mm256_max_ps(highest, _mm256_loadu_ps(block + at));
    }
    return highest_of(highest);
}

void collect(const float *block, int first, float bound, std::vector<Candidate> &found) {
    const __m256 bounds = _mm256_set1_ps(bound);
    for (int at = 0; at < kSelectBlock; at += kLanes) {
        int bits = _mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(block + at), bounds, _CMP_GE_OQ));
        for (; bits; bits &= bits - 1) {
            const int place = at + __builtin_ctz(bits);
            found.emplace_back(block[place], first + place);
        }
    }
}

double weight(const float *block, float highest, float inverse) {
    __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
    for (int at = 0; at < kSelectBlock; at += kLanes) {
        const __m256 above = _mm256_sub_ps(_mm256_loadu_ps(block + at), _mm256_set1_ps(highest));
        const __m256 weights = exponential(_mm256_mul_ps(above, _mm256_set1_ps(inverse)));
        low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(weights)));
        high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(weights, 1)));
    }
    alignas(32) double sums[4];
    _mm256_store_pd(sums, _mm256_add_pd(low, high));
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// The lowest id of the highest of logits (vocab), none of which is NaN; -1 if all are impossible.
int32_t first_highest(const float *logits, int vocab) {
    alignas(32) float padded[kSelectBlock];
    const int blocks = num_select_blocks(vocab);
    int best = -1;
    float highest = kImpossible;
    for (int block = 0; block < blocks; ++block) {
        const float found = maximum(block_of(logits, vocab, block, padded));
        if (found > highest) {
            highest = found;
            best = block;
        }
    }
    if (best < 0) return -1;
    const float *first = logits + best * kSelectBlock;
    return static_cast<int32_t>(std::find(first, logits + vocab, highest) - logits);
}

}  // namespace

int32_t highest_id(const float *logits, int vocab) {
    return all_finite(logits, vocab) ? first_highest(logits, vocab) : -1;
}

int32_t mask_row(const float *logits, int vocab, const uint8_t *bits, float *masked) {
    const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256 impossible = _mm256_set1_ps(kImpossible);
    int id = 0;
    for (; id + kLanes <= vocab; id += kLanes) {
        const __m256i octet = _mm256_and_si256(_mm256_set1_epi32(bits[id / kLanes]), lanes);
        const __m256 allowed = _mm256_castsi256_ps(_mm256_cmpeq_epi32(octet, lanes));
        _mm256_storeu_ps(masked + id, _mm256_blendv_ps(impossible, _mm256_loadu_ps(logits + id), allowed));
    }
    for (; id < vocab; ++id) masked[id] = bits[id / kLanes] >> id % kLanes & 1 ? logits[id] : kImpossible;
    return first_highest(masked, vocab);
}

void select_row(const float *logits, int vocab, int count, float temperature, float *values, int32_t *ids,
                double *block_weights) {
    alignas(32) float padded[kSelectBlock];
    const int blocks = num_select_blocks(vocab);
    std::vector<float> maxima(blocks);
    for (int block = 0; block < blocks; ++block) maxima[block] = maximum(block_of(logits, vocab, block, padded));
    float bound = kImpossible;
    if (count < blocks) {
        std::vector<float> order(maxima);
        std::nth_element(order.begin(), order.begin() + (count - 1), order.end(), std::greater<float>());
        bound = order[count - 1];
    }
    std::vector<Candidate> found;
    found.reserve(4 * count);
    for (int block = 0; block < blocks; ++block) {
        if (maxima[block] >= bound) {
            collect(block_of(logits, vocab, block, padded), block * kSelectBlock, bound, found);
        }
    }
    while (static_cast<int>(found.size()) > vocab) found.pop_back();  // the padding's, the last ones
    std::nth_element(found.begin(), found.begin() + (count - 1), found.end(), comes_first);
    std::sort(found.begin(), found.begin() + count, comes_first);
    for (int index = 0; index < count; ++index) {
        values[index] = found[index].first;
        ids[index] = found[index].second;
    }
    if (temperature <= 0) return;
    for (int block = 0; block < blocks; ++block) {
        block_weights[block] = weight(block_of(logits, vocab, block, padded), values[0], 1 / temperature);
    }
}

}  // namespace fused
