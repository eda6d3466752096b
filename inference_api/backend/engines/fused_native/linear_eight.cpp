// Eight-bit weights in AVX2: vpmaddwd multiplies 16 pairs of int16 and adds neighbours, exactly, in one instruction.
//
// A weight is scale x number (-127 to 127), with a scale for each output and each group of 32 inputs, as in GGUF's
// Q8_0, which is held without loss. Activations are int16. The sum of a group is exact: 32 x 127 x 32,767 fits an int32.
//
// Packed weights, for each block of 16 outputs and each group: 16 times 32 bytes, for two inputs each, output by output;
// then 16 scales in fp32. Weights are widened as they are loaded; a pair of a row's activations is broadcast.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "linear.h"
#include "rows.h"

namespace fused {
namespace {

constexpr int kTileRows = 6;  // 12 sums, 2 weights, 1 activation and 1 product: the 16 registers
constexpr int kPairs = kGroup / 2;
constexpr int kPairBytes = 2 * kBlock;
constexpr int kGroupBytes = kPairs * kPairBytes + kBlock * static_cast<int>(sizeof(float));
constexpr float kMaxWeight = 127.0f;

// What a group's integer sums of 8 outputs are worth, added to what the groups before it are.
inline void add_group(float *totals, __m256i sums, const float *scales) {
    const __m256 values = _mm256_mul_ps(_mm256_cvtepi32_ps(sums), _mm256_loadu_ps(scales));
    _mm256_store_ps(totals, _mm256_add_ps(_mm256_load_ps(totals), values));
}

template <int Rows>
void tile(const LinearTask &task, int block, int first_row) {
    const int groups = num_groups(task.linear->inputs);
    const uint8_t *weights = task.linear->weights + static_cast<int64_t>(block) * groups * kGroupBytes;
    // Two bases and one stride address all rows; six pointers and an index would not stay in registers.
    const int64_t stride = task.inputs.row_bytes;
    const char *base = task.inputs.numbers + first_row * stride;
    const char *fourth = base + 3 * stride;
    alignas(32) float totals[Rows][kBlock] = {};
    for (int group = 0; group < groups; ++group) {
        __m256i low[Rows], high[Rows];
#pragma GCC unroll 6
        for (int r = 0; r < Rows; ++r) low[r] = high[r] = _mm256_setzero_si256();
        const uint8_t *const end = weights + kPairs * kPairBytes;
#pragma GCC unroll 1
        for (; weights != end; weights += kPairBytes) {
            const __m128i *packed = reinterpret_cast<const __m128i *>(weights);
            const __m256i weights_low = _mm256_cvtepi8_epi16(_mm_loadu_si128(packed));
            const __m256i weights_high = _mm256_cvtepi8_epi16(_mm_loadu_si128(packed + 1));
#pragma GCC unroll 6
            for (int r = 0; r < Rows; ++r) {
                const __m256i activations = broadcast((r < 3 ? base : fourth) + r % 3 * stride);
                multiply_add(low[r], weights_low, activations);
                multiply_add(high[r], weights_high, activations);
            }
            base += 2 * sizeof(int16_t);
            fourth += 2 * sizeof(int16_t);
            asm("" : "+r"(base), "+r"(fourth));
        }
        const float *scales = reinterpret_cast<const float *>(weights);
        weights += kBlock * sizeof(float);
#pragma GCC unroll 6
        for (int r = 0; r < Rows; ++r) {
            asm volatile("" ::: "memory");  // scales are read again: kept in registers they would drive out the sums
            add_group(totals[r], low[r], scales);
            add_group(totals[r] + 8, high[r], scales + 8);
        }
    }
    for (int r = 0; r < Rows; ++r) {
        const float scale = task.inputs.scales[(first_row + r) * task.inputs.row_groups];
        for (float &total : totals[r]) total *= scale;
        store_block(task, first_row + r, block, totals[r]);
    }
}

constexpr TileKernel kTiles[kTileRows] = {tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};

}  // namespace

void linear_eight(const LinearTask &task, int first_block, int last_block) {
    run_tiles(task, first_block, last_block, kTiles);
}

int64_t packed_bytes_eight(int outputs, int inputs) {
    return static_cast<int64_t>(num_blocks(outputs)) * num_groups(inputs) * kGroupBytes;
}

void pack_eight(const float *weights, int outputs, int inputs, uint8_t *packed) {
    const int groups = num_groups(inputs);
    std::memset(packed, 0, packed_bytes_eight(outputs, inputs));
    for (int output = 0; output < outputs; ++output) {
        for (int group = 0; group < groups; ++group) {
            const int first = group * kGroup, count = std::min(kGroup, inputs - first);
            const float *values = weights + static_cast<int64_t>(output) * inputs + first;
            uint8_t *out = packed + (static_cast<int64_t>(output / kBlock) * groups + group) * kGroupBytes;
            float largest = 0.0f;
            bool finite = true;
            for (int i = 0; i < count; ++i) {
                finite = finite && std::isfinite(values[i]);
                largest = std::max(largest, std::fabs(values[i]));
            }
            // A broken weight must make its output NaN, which ends the requests that see it, and not a wrong number.
            const float scale = finite ? largest / kMaxWeight : std::numeric_limits<float>::quiet_NaN();
            std::memcpy(out + kPairs * kPairBytes + output % kBlock * sizeof scale, &scale, sizeof scale);
            if (!(scale > 0.0f)) continue;
            for (int i = 0; i < count; ++i) {
                const float number = std::nearbyint(std::clamp(values[i] / scale, -kMaxWeight, kMaxWeight));
                out[i / 2 * kPairBytes + output % kBlock * 2 + i % 2] = static_cast<uint8_t>(static_cast<int8_t>(number));
            }
        }
    }
}

}  // namespace fused
