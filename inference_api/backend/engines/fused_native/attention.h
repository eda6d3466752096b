// The KV cache of all rows, and attention of one token over its own row's positions. Knows no threads.
//
// Keys and values are int8 with an fp32 scale for each position and KV head. For each layer, row and KV head stands one
// run of memory, over the context rounded up to blocks of 8 positions:
//
//     keys          | block 0: d0 d1 of p0, d0 d1 of p1, ... of p7 | d2 d3 of p0, ... | ... | block 1 ...
//     values        | p0 p1 of d0, p0 p1 of d1, ... | p2 p3 of d0, ... | ...
//     key scales    | p0 p1 p2 ...
//     value scales  | p0 p1 p2 ...
//
// so that vpmaddwd multiplies a pair of dimensions of 8 positions, or a pair of positions of 8 dimensions. Queries and
// softmax weights are quantized to int16: both products are exact in int32.
//
// Invariant: scores are exact sums; the softmax is summed in the lane of a position modulo 8 over ascending blocks, the
// output exactly over spans of kSpan absolute positions and over ascending spans in fp32. So what a token gets depends
// on its position and its row's content alone. Slots behind the position may hold anything: they weigh nothing.
#pragma once

#include <cstdint>

#include "interface.h"

namespace fused {

constexpr int kSlotBlock = 8;
constexpr int kSpan = 512;       // positions whose weighted values fit an int32: 512 x 127 x 32,767
constexpr int kMaxHeadDim = 512;

inline int64_t padded_context(const FusedModel &model) {
    return (model.context_tokens + kSlotBlock - 1) / kSlotBlock * kSlotBlock;
}

int64_t cache_bytes(const FusedModel &model);

// Stores the keys and values (kv_heads, head_dim) of one position.
void store_kv(const FusedModel &model, int layer, int row, int position, const float *keys, const float *values);

// Copies positions [0, count) of one layer and KV head between rows.
void copy_kv(const FusedModel &model, int layer, int kv_head, int from_row, int to_row, int count);

// Bytes that attend needs to work in, aligned to 4.
int64_t attention_scratch(const FusedModel &model);

// Attends with the query heads of one KV head: queries and outputs are (heads / kv_heads, head_dim).
void attend(const FusedModel &model, int layer, int row, int kv_head, int position, const float *queries,
            float *outputs, uint8_t *scratch);

}  // namespace fused
