// The linear kernel for AVX2: vpmaddwd multiplies 16 pairs of int16 and adds neighbours, exactly, in one instruction.
//
// Packed weights: for each block of 16 outputs, for each pair of inputs, 16 outputs x 2 inputs as int8: 32 bytes. They
// are widened as they are loaded; a pair of a row's activations is broadcast to all lanes. A tile of 6 rows x 16
// outputs keeps its 12 sums in registers over all inputs.
#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>

#include "linear.h"

namespace fused {
namespace {

constexpr int kTileRows = 6;  // 12 sums, 2 weights and 1 activation: 15 of the 16 registers
constexpr int kPairBytes = 2 * kBlock;

inline int num_pairs(int inputs) { return (inputs + 1) / 2; }

// Writes eight sums of a row as fp32: sum x (row's scale x output's scale) + bias, unfused.
inline void store_eight(const LinearTask &task, int row, int first_output, __m256i sums) {
    const FusedLinear &linear = *task.linear;
    float *out = task.outputs + static_cast<int64_t>(row) * linear.outputs + first_output;
    const int count = std::min(8, linear.outputs - first_output);
    if (count == 8) {
        const __m256 scales = _mm256_mul_ps(_mm256_set1_ps(task.scales[row]),
                                            _mm256_loadu_ps(linear.scales + first_output));
        __m256 values = _mm256_mul_ps(_mm256_cvtepi32_ps(sums), scales);
        if (linear.bias != nullptr) values = _mm256_add_ps(values, _mm256_loadu_ps(linear.bias + first_output));
        _mm256_storeu_ps(out, task.add ? _mm256_add_ps(_mm256_loadu_ps(out), values) : values);
        return;
    }
    alignas(32) int32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i *>(lanes), sums);
    for (int i = 0; i < count; ++i) {
        float value = static_cast<float>(lanes[i]) * (task.scales[row] * linear.scales[first_output + i]);
        if (linear.bias != nullptr) value += linear.bias[first_output + i];
        out[i] = task.add ? out[i] + value : value;
    }
}

template <int Rows>
void tile(const LinearTask &task, int block, int first_row) {
    const int pairs = num_pairs(task.linear->inputs);
    const int8_t *weights = task.linear->weights + static_cast<int64_t>(block) * pairs * kPairBytes;
    const int8_t *const end = weights + static_cast<int64_t>(pairs) * kPairBytes;
    // Two bases and one stride address all rows; six pointers and an index would not stay in registers.
    const int64_t stride = static_cast<int64_t>(task.stride) * sizeof(int16_t);
    const char *base = reinterpret_cast<const char *>(task.inputs) + first_row * stride;
    const char *fourth = base + 3 * stride;
    __m256i low[Rows], high[Rows];
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) low[r] = high[r] = _mm256_setzero_si256();
    for (; weights != end; weights += kPairBytes) {
        const __m128i *packed = reinterpret_cast<const __m128i *>(weights);
        const __m256i weight_low = _mm256_cvtepi8_epi16(_mm_loadu_si128(packed));
        const __m256i weight_high = _mm256_cvtepi8_epi16(_mm_loadu_si128(packed + 1));
#pragma GCC unroll 6
        for (int r = 0; r < Rows; ++r) {
            int32_t pair;
            std::memcpy(&pair, (r < 3 ? base : fourth) + r % 3 * stride, sizeof pair);
            const __m256i activation = _mm256_set1_epi32(pair);
            low[r] = _mm256_add_epi32(low[r], _mm256_madd_epi16(weight_low, activation));
            high[r] = _mm256_add_epi32(high[r], _mm256_madd_epi16(weight_high, activation));
        }
        base += 2 * sizeof(int16_t);
        fourth += 2 * sizeof(int16_t);
        asm("" : "+r"(base), "+r"(fourth));
    }
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
        store_eight(task, first_row + r, block * kBlock, low[r]);
        store_eight(task, first_row + r, block * kBlock + 8, high[r]);
    }
}

using Tile = void (*)(const LinearTask &, int, int);
constexpr Tile kTiles[kTileRows] = {tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};

}  // namespace

void linear_avx2(const LinearTask &task, int first_block, int last_block) {
    const int tiles = (task.rows + kTileRows - 1) / kTileRows;
    for (int block = first_block; block < last_block; ++block) {
        // Rows are dealt out evenly: 32 of them as 5, 5, 5, 5, 6, 6, for a tile of 2 would waste its weights' loads.
        for (int i = 0; i < tiles; ++i) {
            const int first = task.rows * i / tiles, last = task.rows * (i + 1) / tiles;
            kTiles[last - first - 1](task, block, first);
        }
    }
}

int activation_range(int inputs) {
    const int64_t bound = std::numeric_limits<int32_t>::max() / (static_cast<int64_t>(kMaxWeight) * inputs);
    return static_cast<int>(std::min<int64_t>(bound, std::numeric_limits<int16_t>::max()));
}

}  // namespace fused

using fused::kBlock;

extern "C" int32_t fused_activation_range(int32_t inputs) { return fused::activation_range(inputs); }

extern "C" int64_t fused_packed_bytes(int32_t outputs, int32_t inputs) {
    return static_cast<int64_t>(fused::num_blocks(outputs)) * fused::num_pairs(inputs) * fused::kPairBytes;
}

extern "C" void fused_pack(const float *weights, int32_t outputs, int32_t inputs, int8_t *packed, float *scales) {
    const int pairs = fused::num_pairs(inputs);
    std::memset(packed, 0, fused_packed_bytes(outputs, inputs));
    for (int output = 0; output < outputs; ++output) {
        const float *row = weights + static_cast<int64_t>(output) * inputs;
        float largest = 0.0f;
        bool finite = true;
        for (int i = 0; i < inputs; ++i) {
            finite = finite && std::isfinite(row[i]);
            largest = std::max(largest, std::fabs(row[i]));
        }
        // A broken weight must make its output NaN, which ends the requests that see it, and not a wrong number.
        scales[output] = finite ? largest / fused::kMaxWeight : std::numeric_limits<float>::quiet_NaN();
        if (!finite || largest == 0.0f) continue;
        int8_t *block = packed + static_cast<int64_t>(output / kBlock) * pairs * fused::kPairBytes;
        const float inverse = fused::kMaxWeight / largest;
        for (int i = 0; i < inputs; ++i) {
            const float rounded = std::nearbyint(std::clamp(row[i] * inverse, -127.0f, 127.0f));
            block[(i / 2) * fused::kPairBytes + (output % kBlock) * 2 + i % 2] = static_cast<int8_t>(rounded);
        }
    }
}

extern "C" void fused_linear(const FusedLinear *linear, const int16_t *inputs, const float *input_scales, int32_t rows,
                             int32_t stride, float *outputs) {
    const fused::LinearTask task{linear, inputs, input_scales, rows, stride, outputs, false};
    fused::linear_kernel(task, 0, fused::num_blocks(linear->outputs));
}

extern "C" double fused_peak_macs(int64_t instructions) {
    constexpr int kChains = 12;  // as many sums as the tile has
    __m256i sums[kChains], weights = _mm256_set1_epi16(3), activation = _mm256_set1_epi16(5);
#pragma GCC unroll 12
    for (int chain = 0; chain < kChains; ++chain) sums[chain] = _mm256_setzero_si256();
    const auto began = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < instructions / kChains; ++i) {
#pragma GCC unroll 12
        for (int chain = 0; chain < kChains; ++chain) {
            // Written out, for the optimizer would multiply once for all.
            __m256i products;
            asm volatile("vpmaddwd %1, %2, %0" : "=x"(products) : "x"(weights), "x"(activation));
            asm volatile("vpaddd %1, %0, %0" : "+x"(sums[chain]) : "x"(products));
        }
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - began;
    return static_cast<double>(instructions / kChains * kChains) * 16 / seconds.count();
}
