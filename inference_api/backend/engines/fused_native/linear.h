// Linear layers over quantized rows; one number of bits and one instruction set a file.
//
// Invariant: a row's result depends on that row alone. What is summed in integers cannot overflow, so that no order,
// tiling or number of rows can change a bit; what is summed in fp32 is summed in one order, by the same expression in
// every tile.
//
// Either way every group of 32 weights of an output has a scale, and the sum of a group's products is exact. Eight bits:
// activations are int16 with one scale a row. Four bits: a group of weights also has a lowest level, and a group of 32
// activations is int8 with a scale.
#pragma once

#include <cstdint>
#include <cstring>

#include "interface.h"

namespace fused {

constexpr int kBlock = 16;  // outputs that are computed together
constexpr int kGroup = 32;  // inputs that share a scale
constexpr int kRange = 32767;  // of int16 activations
constexpr float kLowestUnits = 32.0f;  // that a lowest level counts in; see linear_four.cpp
constexpr int kSumBits = 13;           // of the sum of a group of activations: with a level's 11 they fill fp32's 24

inline int num_blocks(int outputs) { return (outputs + kBlock - 1) / kBlock; }
inline int num_groups(int inputs) { return (inputs + kGroup - 1) / kGroup; }

// Numbers of one quantized row: whole vectors, the end zero.
inline int padded(int count) { return (count + kGroup - 1) / kGroup * kGroup; }

// Rows of quantized activations.
struct Activations {
    char *numbers;  // (rows, row_bytes): int16 for eight bits, int8 for four
    float *scales;  // (rows, row_groups): with eight bits the first of a row alone
    float *sums;    // (rows, row_groups): kLowestUnits x scale x sum of the group, in kSumBits; four bits only
    int64_t row_bytes;
    int64_t row_groups;

    // Quantizes `values` (linear.inputs) as the layer takes them.
    void set(int row, const float *values, const FusedLinear &linear) const;
};

// What a kernel computes: blocks [first, last) of a linear layer for all rows.
struct LinearTask {
    const FusedLinear *linear;
    Activations inputs;
    int rows;
    float *outputs;  // (rows, linear->outputs)
    bool add;        // to what stands there, instead of replacing it
};

// Writes 16 outputs of a row, less those behind the last, with the bias.
inline void store_block(const LinearTask &task, int row, int block, float *totals) {
    const FusedLinear &linear = *task.linear;
    const int first = block * kBlock, count = linear.outputs - first;
    float *out = task.outputs + static_cast<int64_t>(row) * linear.outputs + first;
    if (linear.bias != nullptr)
        for (int i = 0; i < kBlock && i < count; ++i) totals[i] += linear.bias[first + i];
    if (task.add)
        for (int i = 0; i < kBlock && i < count; ++i) totals[i] = out[i] + totals[i];
    if (count >= kBlock)
        std::memcpy(out, totals, kBlock * sizeof(float));
    else
        std::memcpy(out, totals, count * sizeof(float));
}

using TileKernel = void (*)(const LinearTask &task, int block, int first_row);

// Runs blocks [first, last): kernels[n - 1] computes a tile of n rows. Rows are dealt out evenly: 32 of them as 5, 5, 5,
// 5, 6, 6, for a tile of 2 would waste its weights' loads.
template <int TileRows>
void run_tiles(const LinearTask &task, int first_block, int last_block, const TileKernel (&kernels)[TileRows]) {
    const int tiles = (task.rows + TileRows - 1) / TileRows;
    for (int block = first_block; block < last_block; ++block) {
        for (int i = 0; i < tiles; ++i) {
            const int first = task.rows * i / tiles, last = task.rows * (i + 1) / tiles;
            kernels[last - first - 1](task, block, first);
        }
    }
}

void linear_eight(const LinearTask &task, int first_block, int last_block);
void linear_four(const LinearTask &task, int first_block, int last_block);

inline void run_linear(const LinearTask &task, int first_block, int last_block) {
    (task.linear->bits == 4 ? linear_four : linear_eight)(task, first_block, last_block);
}

// Bytes and packing of either kind; see fused_pack.
int64_t packed_bytes_eight(int outputs, int inputs);
int64_t packed_bytes_four(int outputs, int inputs);
void pack_eight(const float *weights, int outputs, int inputs, uint8_t *packed);
void pack_four(const float *weights, int outputs, int inputs, uint8_t *packed);
bool fits_four(const float *weights, int outputs, int inputs);

}  // namespace fused
