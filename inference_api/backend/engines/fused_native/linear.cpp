// What the linear layers of either kind share: how a row of activations is quantized for them, and their C interface.
#include "linear.h"

#include <new>
#include <vector>

#include "rows.h"

namespace fused {

void Activations::set(int row, const float *values, const FusedLinear &linear) const {
    char *out = numbers + row * row_bytes;
    float *row_scales = scales + row * row_groups;
    if (linear.bits == 4)
        quantize_groups(values, linear.inputs, reinterpret_cast<int8_t *>(out), row_scales, sums + row * row_groups);
    else
        *row_scales = quantize(values, linear.inputs, kRange, reinterpret_cast<int16_t *>(out));
}

}  // namespace fused

using namespace fused;

extern "C" int32_t fused_weight_bits(const float *weights, int32_t outputs, int32_t inputs) {
    return fits_four(weights, outputs, inputs) ? 4 : 8;
}

extern "C" int64_t fused_packed_bytes(int32_t bits, int32_t outputs, int32_t inputs) {
    return bits == 4 ? packed_bytes_four(outputs, inputs) : packed_bytes_eight(outputs, inputs);
}

extern "C" void fused_pack(int32_t bits, const float *weights, int32_t outputs, int32_t inputs, uint8_t *packed) {
    if (bits == 4)
        pack_four(weights, outputs, inputs, packed);
    else
        pack_eight(weights, outputs, inputs, packed);
}

extern "C" int32_t fused_linear(const FusedLinear *linear, const float *inputs, int32_t rows, float *outputs) {
    try {
        const int64_t row_bytes = padded(linear->inputs) * sizeof(int16_t), groups = num_groups(linear->inputs);
        std::vector<char> numbers(rows * row_bytes);
        std::vector<float> scales(rows * groups), sums(rows * groups);
        const Activations activations{numbers.data(), scales.data(), sums.data(), row_bytes, groups};
        for (int row = 0; row < rows; ++row)
            activations.set(row, inputs + static_cast<int64_t>(row) * linear->inputs, *linear);
        run_linear({linear, activations, rows, outputs, false}, 0, num_blocks(linear->outputs));
        return 1;
    } catch (const std::bad_alloc &) {
        return 0;
    }
}
