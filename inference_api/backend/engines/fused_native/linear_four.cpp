// Four-bit weights in AVX2: vpmaddubsw multiplies 32 pairs of a level (0 to 15) and an int8 activation, exactly.
//
// A weight is scale x level + lowest, with a scale and a lowest level for each output and each group of 32 inputs, as
// in GGUF's Q4_1 (and Q4_0). So a group adds to a row's sum
//
//     (scale x sum of level x activation) x row's scale  +  lowest x (row's scale x sum of activations)
//
// The sum of the group is held in int16, where it fits: eight sums of two products, 15 x 127 each, are 30,480 at most.
// Scales are whole numbers of their output's unit, a power of two, so that one vpmaddwd widens the sums and scales them,
// exactly: 2 x 30,480 x 32,767 fits an int32. A lowest level is a multiple of 32 units, in fp16.
//
// Packed weights, for each block of 16 outputs: its groups, then 16 units in fp32. A group is eight times 32 bytes, for
// four inputs each, with outputs 0 to 7 in the low and 8 to 15 in the high halves of the bytes; then 16 scales in int16,
// in the order 0-3, 8-11, 4-7, 12-15, which vpunpcklwd and vpunpckhwd undo; then 16 lowest levels in fp16.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "linear.h"
#include "rows.h"

namespace fused {
namespace {

constexpr int kTileRows = 6;
constexpr int kQuads = kGroup / 4;
constexpr int kQuadBytes = 32;
constexpr int kLevelBytes = kQuads * kQuadBytes;
constexpr int kScaleBytes = kBlock * 2;
constexpr int kGroupBytes = kLevelBytes + 2 * kScaleBytes;
constexpr int kUnitBytes = kBlock * static_cast<int>(sizeof(float));
constexpr int kTopLevel = 15;
constexpr float kMaxScale = 32767.0f, kMaxHalf = 65504.0f;

inline int64_t block_bytes(int inputs) { return static_cast<int64_t>(num_groups(inputs)) * kGroupBytes + kUnitBytes; }

// Adds 32 products in pairs to 16 sums. Written out, because the compiler moves the sums through more registers than
// there are.
inline void multiply_add_levels(__m256i &sums, __m256i levels, __m256i activations) {
    __m256i products;
    asm("vpmaddubsw %2, %1, %0" : "=x"(products) : "x"(levels), "x"(activations));
    asm("vpaddw %1, %0, %0" : "+x"(sums) : "x"(products));
}

// Stores 16 numbers of fp16 as fp32.
inline void widen(const uint8_t *halves, float *out) {
    for (int i = 0; i < 2; ++i)
        _mm256_store_ps(out + 8 * i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(halves) + i)));
}

// Adds what a group's integer sums of 8 outputs are worth to what the groups before it are.
inline void add_group(float *totals, __m256i sums, __m256i scales, const float *lowest, __m256 scale, __m256 row_sum) {
    const __m256 values = _mm256_cvtepi32_ps(_mm256_madd_epi16(sums, scales));
    const __m256 total = _mm256_add_ps(_mm256_load_ps(totals), _mm256_mul_ps(values, scale));
    // 13 bits times 11 are exact in fp32: a product and a sum give the same bits.
    _mm256_store_ps(totals, _mm256_fmadd_ps(row_sum, _mm256_load_ps(lowest), total));
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
    const uint8_t *weights = task.linear->weights + block * block_bytes(task.linear->inputs);
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
        const uint8_t *const end = weights + kLevelBytes;
        multiply_quad<Rows, true>(weights, base, fourth, stride, low, high);
#pragma GCC unroll 1
        while (weights != end) multiply_quad<Rows, false>(weights, base, fourth, stride, low, high);
        const __m256i scales = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(weights));
        const __m256i scales_low = _mm256_unpacklo_epi16(scales, scales);
        const __m256i scales_high = _mm256_unpackhi_epi16(scales, scales);
        alignas(32) float lowest[kBlock];  // stored, for in registers they would drive out the sums
        widen(weights + kScaleBytes, lowest);
        weights += 2 * kScaleBytes;
#pragma GCC unroll 6
        for (int r = 0; r < Rows; ++r) {
            asm volatile("" ::: "memory");
            const __m256 scale = _mm256_broadcast_ss(row_scales + r * row_groups + group);
            const __m256 row_sum = _mm256_broadcast_ss(row_sums + r * row_groups + group);
            add_group(totals[r], low[r], scales_low, lowest, scale, row_sum);
            add_group(totals[r] + 8, high[r], scales_high, lowest + 8, scale, row_sum);
        }
    }
    const float *units = reinterpret_cast<const float *>(weights);
    for (int r = 0; r < Rows; ++r) {
        for (int i = 0; i < kBlock; ++i) totals[r][i] *= units[i];
        store_block(task, first_row + r, block, totals[r]);
    }
}

constexpr TileKernel kTiles[kTileRows] = {tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};

// The levels of a group of 32 weights.
struct Levels {
    float scale, lowest;  // of fp16 precision
    uint8_t numbers[kGroup];
};

inline uint16_t narrow(float value) { return static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT)); }

// Finds the 16 levels that all of a group lie on; false if there are none, or fp16 does not hold them.
bool find_levels(const float *weights, Levels &levels) {
    const auto [lowest, highest] = std::minmax_element(weights, weights + kGroup);
    levels.lowest = _cvtsh_ss(narrow(*lowest));
    levels.scale = _cvtsh_ss(narrow((*highest - *lowest) / kTopLevel));
    if (!(levels.lowest == *lowest) || !std::isfinite(levels.scale)) return false;
    for (int i = 0; i < kGroup; ++i) {
        const float level = levels.scale > 0.0f ? std::nearbyint((weights[i] - levels.lowest) / levels.scale) : 0.0f;
        if (!(level >= 0.0f && level <= kTopLevel)) return false;
        levels.numbers[i] = static_cast<uint8_t>(level);
        const float again = levels.scale * level + levels.lowest;
        if (!(std::fabs(again - weights[i]) <= 1e-6f * std::max(std::fabs(*lowest), std::fabs(*highest)))) return false;
    }
    return true;
}

// The smallest power of two of which no scale is more than an int16, and no lowest level more than 32 times an fp16.
float find_unit(const std::vector<Levels> &groups) {
    float unit = std::numeric_limits<float>::min();
    for (const Levels &levels : groups)
        while (levels.scale > kMaxScale * unit || std::fabs(levels.lowest) > kMaxHalf * kLowestUnits * unit) unit *= 2;
    return unit;
}

// Whether the unit is the smallest that the scales let it be: a larger one, for a lowest level, holds them less well.
bool holds_scales(const std::vector<Levels> &groups) {
    float largest = 0.0f;
    for (const Levels &levels : groups) largest = std::max(largest, levels.scale);
    return largest == 0.0f || 2.0f * largest > kMaxScale * find_unit(groups);
}

// Packs the `index`-th output of a block.
void pack_output(const std::vector<Levels> &groups, int index, uint8_t *block) {
    const int lane = index % 8, shift = index < 8 ? 0 : 4;
    const int scale_at = lane / 4 * 8 + index / 8 * 4 + lane % 4;
    const float unit = find_unit(groups);
    uint8_t *out = block;
    for (const Levels &levels : groups) {
        for (int i = 0; i < kGroup; ++i)
            out[i / 4 * kQuadBytes + lane * 4 + i % 4] |= static_cast<uint8_t>(levels.numbers[i] << shift);
        const int16_t scale = static_cast<int16_t>(std::nearbyint(levels.scale / unit));
        const uint16_t lowest = narrow(levels.lowest / unit / kLowestUnits);
        std::memcpy(out + kLevelBytes + scale_at * sizeof scale, &scale, sizeof scale);
        std::memcpy(out + kLevelBytes + kScaleBytes + index * sizeof lowest, &lowest, sizeof lowest);
        out += kGroupBytes;
    }
    std::memcpy(out + index * sizeof unit, &unit, sizeof unit);
}

}  // namespace

void linear_four(const LinearTask &task, int first_block, int last_block) {
    run_tiles(task, first_block, last_block, kTiles);
}

bool fits_four(const float *weights, int outputs, int inputs) {
    if (inputs % kGroup != 0) return false;
    std::vector<Levels> groups(num_groups(inputs));
    for (int output = 0; output < outputs; ++output) {
        for (Levels &levels : groups) {
            if (!find_levels(weights, levels)) return false;
            weights += kGroup;
        }
        if (!holds_scales(groups)) return false;
    }
    return true;
}

int64_t packed_bytes_four(int outputs, int inputs) { return num_blocks(outputs) * block_bytes(inputs); }

void pack_four(const float *weights, int outputs, int inputs, uint8_t *packed) {
    std::memset(packed, 0, packed_bytes_four(outputs, inputs));
    std::vector<Levels> groups(num_groups(inputs));
    for (int output = 0; output < outputs; ++output) {
        for (Levels &levels : groups) {
            find_levels(weights, levels);
            weights += kGroup;
        }
        pack_output(groups, output % kBlock, packed + output / kBlock * block_bytes(inputs));
    }
}

}  // namespace fused
