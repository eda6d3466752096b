// Linear layers of int8 weights and int16 activations, exact in int32; one instruction set a file.
//
// Invariant: a row's result depends on that row alone. Products and sums are integers that cannot overflow (see
// activation_range), so that no order, tiling or number of rows can change a bit; the one fp32 expression behind them
// is the same for every tile.
#pragma once

#include <cstdint>

#include "interface.h"

namespace fused {

constexpr int kBlock = 16;  // outputs that are computed together
constexpr int kMaxWeight = 127;

inline int num_blocks(int outputs) { return (outputs + kBlock - 1) / kBlock; }

// int16 numbers of one quantized row: whole vectors, the end zero.
inline int padded(int count) { return (count + 15) / 16 * 16; }

// The largest activation for which the sum of `inputs` products with weights up to 127 still fits an int32:
// 29,357 at 576 inputs, 11,008 at 1,536. Never above what an int16 holds.
int activation_range(int inputs);

// What a kernel computes: blocks [first, last) of a linear layer for all rows.
struct LinearTask {
    const FusedLinear *linear;
    const int16_t *inputs;  // (rows, stride), quantized
    const float *scales;    // (rows)
    int rows;
    int stride;    // of the inputs
    float *outputs;  // (rows, linear->outputs)
    bool add;      // to what stands there, instead of replacing it
};

using LinearKernel = void (*)(const LinearTask &task, int first_block, int last_block);

// The table of kernels: the one for AVX2. One for another instruction set has its own packing beside it.
void linear_avx2(const LinearTask &task, int first_block, int last_block);
constexpr LinearKernel linear_kernel = linear_avx2;

}  // namespace fused
