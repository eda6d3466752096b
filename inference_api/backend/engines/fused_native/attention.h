// The KV cache of all rows, and attention of one token over its own row's positions. Knows no threads.
//
// Both caches are fp16, for each layer, row and KV head one run of context x head_dim halves, the context rounded up
// to blocks of 8 positions. Values stand position by position. Keys stand in blocks of 8 positions, in a block
// dimension by dimension, so that eight scores are summed in eight lanes:
//
//     keys    | block 0: d0 of p0..p7 | d1 of p0..p7 | ... | block 1: d0 of p8..p15 | ...
//     values  | p0: d0 d1 d2 ... | p1: d0 d1 d2 ... | ...
//
// Invariant: a score is summed over the dimensions in ascending order, the softmax in the lane of a position modulo 8
// over ascending blocks, the output over ascending positions; so what a token gets depends on its position and its
// row's content alone. Slots behind the position may hold anything: they are masked, never multiplied.
#pragma once

#include <cstdint>

#include "interface.h"

namespace fused {

constexpr int kSlotBlock = 8;

inline int64_t padded_context(const FusedModel &model) {
    return (model.context_tokens + kSlotBlock - 1) / kSlotBlock * kSlotBlock;
}

// Stores the keys and values (kv_heads, head_dim) of one position.
void store_kv(const FusedModel &model, int layer, int row, int position, const float *keys, const float *values);

// Floats that attend needs to work in.
int64_t attention_scratch(const FusedModel &model);

// Attends with the query heads of one KV head: queries and outputs are (heads / kv_heads, head_dim).
void attend(const FusedModel &model, int layer, int row, int kv_head, int position, const float *queries,
            float *outputs, float *scratch);

}  // namespace fused
