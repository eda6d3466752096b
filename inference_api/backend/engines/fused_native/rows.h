// What a step does to one row of numbers by itself: norms, quantization, rotation, the gate. Knows no threads.
//
// Invariant: sums run over eight lanes and are then folded in one fixed order; nothing here sees a second row. No
// product is fused with a sum: every operation is rounded by itself, so that fused_torch.py can make the same bits.
// Lengths are multiples of 8 unless said otherwise.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace fused {

// The sum of the eight lanes, always in the same order.
inline float fold(__m256 lanes) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}

// The same four bytes in every lane.
inline __m256i broadcast(const void *bytes) {
    int32_t lane;
    std::memcpy(&lane, bytes, sizeof lane);
    return _mm256_set1_epi32(lane);
}

// sums += products of 16 pairs of int16, neighbours added: exact. Written out, because the compiler moves the sums
// through more registers than there are.
inline void multiply_add(__m256i &sums, __m256i left, __m256i right) {
    __m256i products;
    asm("vpmaddwd %2, %1, %0" : "=x"(products) : "x"(left), "x"(right));
    asm("vpaddd %1, %0, %0" : "+x"(sums) : "x"(products));
}

// e to the power of each lane; at most 3 units in the last place off. Exactly 0 below -87; NaN stays NaN.
// Polynomial and split of ln 2: Cephes, single/expf.c.
inline __m256 exponential(__m256 x) {
    const __m256 lowest = _mm256_set1_ps(-87.0f), highest = _mm256_set1_ps(88.0f);
    const __m256 vanishes = _mm256_cmp_ps(x, lowest, _CMP_LT_OQ);
    // x stands second: where it is NaN, minps and maxps return their second operand.
    x = _mm256_min_ps(highest, _mm256_max_ps(lowest, x));
    const __m256 power = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504088896341f)),
                                         _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    x = _mm256_sub_ps(x, _mm256_mul_ps(power, _mm256_set1_ps(0.693359375f)));
    x = _mm256_sub_ps(x, _mm256_mul_ps(power, _mm256_set1_ps(-2.12194440e-4f)));
    __m256 y = _mm256_set1_ps(1.9875691500e-4f);
    for (float coefficient : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        y = _mm256_add_ps(_mm256_mul_ps(y, x), _mm256_set1_ps(coefficient));
    y = _mm256_add_ps(_mm256_mul_ps(y, _mm256_mul_ps(x, x)), _mm256_add_ps(x, _mm256_set1_ps(1.0f)));
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127)), 23);
    return _mm256_andnot_ps(vanishes, _mm256_mul_ps(y, _mm256_castsi256_ps(exponent)));
}

// out = values / sqrt(mean(values^2) + epsilon) * weights; may run in place.
void rms_norm(const float *values, const float *weights, int count, float epsilon, float *out);

// Writes round(values * range / max |values|), padded with zeros to padded(count); returns the scale that undoes it.
// A row with NaN or infinity becomes zeros with the scale NaN. Any count.
float quantize(const float *values, int count, int range, int16_t *out);

// Quantizes each 32 values to int8 by a scale of their own: writes round(value * 127 / max |value|), the scale that
// undoes it, and kLowestUnits x scale x sum of the numbers, rounded to kSumBits. A group with NaN or infinity has the
// scale NaN. A multiple of 32 values.
void quantize_groups(const float *values, int count, int8_t *out, float *scales, float *sums);

// Rotates a head's halves against each other by the angles of its position; head_dim is even.
void rotate(float *head, const float *cosines, const float *sines, int head_dim);

// gate = gate / (1 + e^-gate) * up
void gate(float *gates, const float *ups, int count);

bool all_finite(const float *values, int count);

}  // namespace fused
