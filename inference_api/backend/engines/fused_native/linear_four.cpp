// Four-bit weights in AVX2: vpmaddubsw multiplies 32 pairs of a level (0 to 15) and an int8 activation, exactly.
//
// A weight is scale x level + lowest, with a scale and a lowest level for each output and each group of 32 inputs, as
// in GGUF's Q4_1 (and Q4_0). So a group adds to a row's sum
//
//     (scale x sum of level x activation) x row's scale  +  lowest x (row's scale x sum of activations)
//
// The sum of the group is held in int16, where it fits: eight sums of two products, 15 x 127 each, are 30,480 at most.
//
// Packed weights, for each block of 16 outputs and each group: eight times 32 bytes, for four inputs each, with outputs
// 0 to 7 in the low and 8 to 15 in the high halves of the bytes; then 16 scales and 16 lowest levels in fp16.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "linear.h"
#include "rows.h"

namespace fused {
namespace {

constexpr int kTileRows = 6;
constexpr int kQuads = kGroup / 4;
constexpr int kQuadBytes = 32;
constexpr int kScaleBytes = kBlock * 2;
constexpr int kGroupBytes = kQuads * kQuadBytes + 2 * kScaleBytes;
constexpr int kTopLevel = 15;

// Adds 32 products in pairs to 16 sums. Written out, because the compiler moves the sums through more registers than
// there are.
inline void multiply_add_levels(__m256i &sums, __m256i levels, __m256i activations) {
    __m256i products;
    asm("vpmaddubsw %2, %1, %0" : "=x"(products) : "x"(levels), "x"(activations));
    asm("vpaddw %1, %0, %0" : "+x"(sums) : "x"(products));
}

inline __m256 widen(const uint8_t *halves) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(halves)));
}

// Scales and lowest levels of 16 outputs and one group, as fp32.
struct GroupScales {
    alignas(32) float scales[kBlock], lowest[kBlock];

    explicit GroupScales(const uint8_t *halves) {
        for (int i = 0; i < 2; ++i) {
            _mm256_store_ps(scales + 8 * i, widen(halves + 16 * i));
            _mm256_store_ps(lowest + 8 * i, widen(halves + kScaleBytes + 16 * i));
        }
    }
};

// What a group's integer sums of 8 outputs are worth, added to what the groups before it are.
inline void add_group(float *totals, __m256i sums, const GroupScales &group, int half, __m256 scale, __m256 row_sum) {
    const __m256 values = _mm256_cvtepi32_ps(_mm256_madd_epi16(sums, _mm256_set1_epi16(1)));
    const __m256 scaled = _mm256_mul_ps(values, _mm256_load_ps(group.scales + half));
    const __m256 total = _mm256_add_ps(_mm256_load_ps(totals + half), _mm256_mul_ps(scaled, scale));
    const __m256 lowest = _mm256_mul_ps(row_sum, _mm256_load_ps(group.lowest + half));
    _mm256_store_ps(totals + half, _mm256_add_ps(total, lowest));
}

// Multiplies four inputs of 16 outputs for all rows, and goes on to the next four; `First` begins the sums.
template <int Rows, bool First>
inline __attribute__((always_inline)) void multiply_quad(const uint8_t *&weights, const char *&base,
                                                         const char *&fourth, int64_t stride, __m256i *low,
                                                         __m256i *high) {
    const __m256i low_half = _mm256_set1_epi8(kTopLevel);
    const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(weights));
    const __m256i levels_low = _mm256_and_si256(packed, low_half);
    const __m256i levels_high = _mm256_and_si256(_mm256_srli_epi16(packed, 4), low_half);
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
        const __m256i activations = broadcast((r < 3 ? base : fourth) + r % 3 * stride);
        if constexpr (First) {
            low[r] = _mm256_maddubs_epi16(levels_low, activations);
            high[r] = _mm256_maddubs_epi16(levels_high, activations);
        } else {
            multiply_add_levels(low[r], levels_low, activations);
            multiply_add_levels(high[r], levels_high, activations);
        }
    }
    weights += kQuadBytes;
    base += sizeof(int32_t);
    fourth += sizeof(int32_t);
    asm("" : "+r"(base), "+r"(fourth));
}

template <int Rows>
void tile(const LinearTask &task, int block, int first_row) {
    const int groups = num_groups(task.linear->inputs);
    const uint8_t *weights = task.linear->weights + static_cast<int64_t>(block) * groups * kGroupBytes;
    // Two bases and one stride address all rows; six pointers and an index would not stay in registers.
    const int64_t stride = task.inputs.row_bytes;
    const char *base = task.inputs.numbers + first_row * stride;
    const char *fourth = base + 3 * stride;
    const int64_t row_groups = task.inputs.row_groups;
    const float *row_scales = task.inputs.scales + first_row * row_groups;
    const float *row_sums = task.inputs.sums + first_row * row_groups;
    alignas(32) float totals[Rows][kBlock] = {};
    for (int group = 0; group < groups; ++group) {
        __m256i low[Rows], high[Rows];
        const uint8_t *const end = weights + kQuads * kQuadBytes;
        multiply_quad<Rows, true>(weights, base, fourth, stride, low, high);
#pragma GCC unroll 1
        while (weights != end) multiply_quad<Rows, false>(weights, base, fourth, stride, low, high);
        const GroupScales scales(weights);
        weights += 2 * kScaleBytes;
#pragma GCC unroll 6
        for (int r = 0; r < Rows; ++r) {
            asm volatile("" ::: "memory");  // scales are read again: kept in registers they would drive out the sums
            const __m256 scale = _mm256_broadcast_ss(row_scales + r * row_groups + group);
            const __m256 row_sum = _mm256_broadcast_ss(row_sums + r * row_groups + group);
            add_group(totals[r], low[r], scales, 0, scale, row_sum);
            add_group(totals[r], high[r], scales, 8, scale, row_sum);
        }
    }
    for (int r = 0; r < Rows; ++r) store_block(task, first_row + r, block, totals[r]);
}

constexpr TileKernel kTiles[kTileRows] = {tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};

// The levels of a group of 32 weights.
struct Levels {
    uint16_t scale, lowest;  // fp16
    uint8_t numbers[kGroup];
};

inline uint16_t narrow(float value) { return static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT)); }

// Finds the 16 levels that all of a group lie on; false if there are none, or fp16 does not hold them.
bool find_levels(const float *weights, Levels &levels) {
    const auto [lowest, highest] = std::minmax_element(weights, weights + kGroup);
    levels.lowest = narrow(*lowest);
    levels.scale = narrow((*highest - *lowest) / kTopLevel);
    const float base = _cvtsh_ss(levels.lowest), step = _cvtsh_ss(levels.scale);
    if (!(base == *lowest) || !std::isfinite(step)) return false;
    for (int i = 0; i < kGroup; ++i) {
        const float level = step > 0.0f ? std::nearbyint((weights[i] - base) / step) : 0.0f;
        if (!(level >= 0.0f && level <= kTopLevel)) return false;
        levels.numbers[i] = static_cast<uint8_t>(level);
        const float again = step * level + base;
        if (!(std::fabs(again - weights[i]) <= 1e-6f * std::max(std::fabs(*lowest), std::fabs(*highest)))) return false;
    }
    return true;
}

}  // namespace

void linear_four(const LinearTask &task, int first_block, int last_block) {
    run_tiles(task, first_block, last_block, kTiles);
}

bool fits_four(const float *weights, int outputs, int inputs) {
    Levels levels;
    if (inputs % kGroup != 0) return false;
    const int64_t count = static_cast<int64_t>(outputs) * inputs;
    for (int64_t i = 0; i < count; i += kGroup)
        if (!find_levels(weights + i, levels)) return false;
    return true;
}

int64_t packed_bytes_four(int outputs, int inputs) {
    return static_cast<int64_t>(num_blocks(outputs)) * num_groups(inputs) * kGroupBytes;
}

void pack_four(const float *weights, int outputs, int inputs, uint8_t *packed) {
    const int groups = num_groups(inputs);
    std::memset(packed, 0, packed_bytes_four(outputs, inputs));
    for (int output = 0; output < outputs; ++output) {
        const int lane = output % 8, shift = output % kBlock < 8 ? 0 : 4;
        for (int group = 0; group < groups; ++group) {
            Levels levels;
            find_levels(weights + static_cast<int64_t>(output) * inputs + group * kGroup, levels);
            uint8_t *out = packed + (static_cast<int64_t>(output / kBlock) * groups + group) * kGroupBytes;
            for (int i = 0; i < kGroup; ++i)
                out[i / 4 * kQuadBytes + lane * 4 + i % 4] |= static_cast<uint8_t>(levels.numbers[i] << shift);
            uint8_t *scales = out + kQuads * kQuadBytes + output % kBlock * 2;
            std::memcpy(scales, &levels.scale, sizeof levels.scale);
            std::memcpy(scales + kScaleBytes, &levels.lowest, sizeof levels.lowest);
        }
    }
}

}  // namespace fused
