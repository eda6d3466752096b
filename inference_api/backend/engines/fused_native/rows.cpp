// Norms, quantization, rotation and the gate of one row, in AVX2.
#include "rows.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "interface.h"
#include "linear.h"

namespace fused {
namespace {

constexpr int32_t kInfinityBits = 0x7f800000;
constexpr float kTiniest = 1e-30f;  // a row below it is zeros: the inverse of its scale would be infinite

// The bits of the largest magnitude. As integers magnitudes keep their order, and NaN stands above infinity.
int32_t largest_bits(const float *values, int count) {
    __m256i largest = _mm256_setzero_si256();
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    int i = 0;
    for (; i + 8 <= count; i += 8) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(values + i));
        largest = _mm256_max_epi32(largest, _mm256_and_si256(bits, magnitude));
    }
    alignas(32) int32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i *>(lanes), largest);
    int32_t result = 0;
    for (int32_t lane : lanes) result = lane > result ? lane : result;
    for (; i < count; ++i) {
        int32_t bits;
        std::memcpy(&bits, values + i, sizeof bits);
        bits &= 0x7fffffff;
        result = bits > result ? bits : result;
    }
    return result;
}

// Rounds to kSumBits, halves away from zero.
float rounded_sum(float value) {
    constexpr uint32_t kLost = 1u << (std::numeric_limits<float>::digits - kSumBits);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits = (bits + kLost / 2) & ~(kLost - 1);
    std::memcpy(&value, &bits, sizeof bits);
    return value;
}

}  // namespace

void rms_norm(const float *values, const float *weights, int count, float epsilon, float *out) {
    __m256 squares = _mm256_setzero_ps();
    for (int i = 0; i < count; i += 8) {
        const __m256 x = _mm256_loadu_ps(values + i);
        squares = _mm256_add_ps(squares, _mm256_mul_ps(x, x));
    }
    const __m256 factor = _mm256_set1_ps(1.0f / std::sqrt(fold(squares) / static_cast<float>(count) + epsilon));
    for (int i = 0; i < count; i += 8) {
        const __m256 normed = _mm256_mul_ps(_mm256_loadu_ps(values + i), factor);
        _mm256_storeu_ps(out + i, _mm256_mul_ps(normed, _mm256_loadu_ps(weights + i)));
    }
}

float quantize(const float *values, int count, int range, int16_t *out) {
    std::memset(out, 0, sizeof(int16_t) * padded(count));
    const int32_t bits = largest_bits(values, count);
    if (bits >= kInfinityBits) return std::numeric_limits<float>::quiet_NaN();
    float largest;
    std::memcpy(&largest, &bits, sizeof largest);
    if (largest < kTiniest) return 0.0f;
    const float inverse = static_cast<float>(range) / largest;
    const __m256 inverses = _mm256_set1_ps(inverse);
    int i = 0;
    for (; i + 8 <= count; i += 8) {
        const __m256i rounded = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(values + i), inverses));
        const __m128i low = _mm256_castsi256_si128(rounded), high = _mm256_extracti128_si256(rounded, 1);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(out + i), _mm_packs_epi32(low, high));
    }
    for (; i < count; ++i) out[i] = static_cast<int16_t>(std::nearbyint(values[i] * inverse));
    return largest / static_cast<float>(range);
}

void quantize_groups(const float *values, int count, int8_t *out, float *scales, float *sums) {
    constexpr int kRange = 127;
    // vpackssdw and vpacksswb work within halves of a register; this order of four bytes each undoes it.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int first = 0; first < count; first += kGroup, values += kGroup, out += kGroup, ++scales, ++sums) {
        const int32_t bits = largest_bits(values, kGroup);
        float largest;
        std::memcpy(&largest, &bits, sizeof largest);
        if (bits >= kInfinityBits || largest < kTiniest) {
            std::memset(out, 0, kGroup);
            *scales = *sums = bits >= kInfinityBits ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
            continue;
        }
        const __m256 inverses = _mm256_set1_ps(static_cast<float>(kRange) / largest);
        __m256i rounded[4];
        for (int i = 0; i < 4; ++i)
            rounded[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(values + 8 * i), inverses));
        const __m256i total = _mm256_add_epi32(_mm256_add_epi32(rounded[0], rounded[1]),
                                               _mm256_add_epi32(rounded[2], rounded[3]));
        const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(rounded[0], rounded[1]),
                                                  _mm256_packs_epi32(rounded[2], rounded[3]));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(out), _mm256_permutevar8x32_epi32(packed, order));
        *scales = largest / static_cast<float>(kRange);
        *sums = rounded_sum(*scales * (kLowestUnits * fold(_mm256_cvtepi32_ps(total))));  // small integers: exact
    }
}

void rotate(float *head, const float *cosines, const float *sines, int head_dim) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; ++i) {
        const float first = head[i], second = head[i + half];
        head[i] = first * cosines[i] - second * sines[i];
        head[i + half] = second * cosines[i] + first * sines[i];
    }
}

void gate(float *gates, const float *ups, int count) {
    const __m256 one = _mm256_set1_ps(1.0f), sign = _mm256_set1_ps(-0.0f);
    for (int i = 0; i < count; i += 8) {
        const __m256 x = _mm256_loadu_ps(gates + i);
        const __m256 divisor = _mm256_add_ps(one, exponential(_mm256_xor_ps(x, sign)));
        _mm256_storeu_ps(gates + i, _mm256_mul_ps(_mm256_div_ps(x, divisor), _mm256_loadu_ps(ups + i)));
    }
}

bool all_finite(const float *values, int count) { return largest_bits(values, count) < kInfinityBits; }

}  // namespace fused

extern "C" float fused_quantize(const float *values, int32_t count, int32_t range, int16_t *quantized) {
    return fused::quantize(values, count, range, quantized);
}

extern "C" void fused_quantize_groups(const float *values, int32_t count, int8_t *quantized, float *scales,
                                      float *sums) {
    fused::quantize_groups(values, count, quantized, scales, sums);
}
