// The highest logits of a row, its weights by block, and the row under a mask, for drawing. Knows no rule of sampling
// and no randomness.
#pragma once

#include <cstdint>

namespace fused {

constexpr int kSelectBlock = 64;  // sampling_rules.BLOCK

inline int num_select_blocks(int vocab) { return (vocab + kSelectBlock - 1) / kSelectBlock; }

// Returns the lowest id of the highest of logits (vocab); -1 if one of them is NaN or infinite.
int32_t highest_id(const float *logits, int vocab);

// Copies logits (vocab), none of which is NaN, to `masked`; those whose bit, the lowest of a byte first, is not set
// become -infinity. Returns the lowest id of the highest one; -1 if all are impossible.
int32_t mask_row(const float *logits, int vocab, const uint8_t *bits, float *masked);

// Writes the `count` highest of logits (vocab), descending, equal ones by ascending id; count is at most vocab, and no
// logit is NaN. With a temperature above 0 also the sums of exp((logit - highest) / temperature) of each 64 ids, the
// last block's maybe of fewer. Everything depends on this row alone.
// Throws std::bad_alloc.
void select_row(const float *logits, int vocab, int count, float temperature, float *values, int32_t *ids,
                double *block_weights);

}  // namespace fused
