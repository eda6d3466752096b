// The plain C interface of the fused step: what Python passes in and calls. PROCESS 2 loads it with ctypes.
//
// All memory that a pointer here names belongs to the caller and outlives the engine. Every struct is mirrored in
// fused_library.py, field by field; fused_struct_bytes lets it prove that both sides mean the same.
#pragma once

#include <cstdint>

extern "C" {

// A linear layer, packed by fused_pack.
struct FusedLinear {
    const uint8_t *weights;  // blocks of 16 outputs, see linear_eight.cpp and linear_four.cpp
    const float *bias;       // (outputs), or null
    int32_t outputs;
    int32_t inputs;
    int32_t bits;            // of a weight: 8 or 4
    int32_t unused;
};

struct FusedLayer {
    FusedLinear qkv;      // outputs: query heads, key heads, value heads, each head_dim wide
    FusedLinear output;   // of the attention
    FusedLinear gate_up;  // outputs: gate, then up
    FusedLinear down;
    const float *attention_norm;  // (hidden)
    const float *mlp_norm;        // (hidden)
    const float *query_norm;      // (head_dim), or null
    const float *key_norm;        // (head_dim), or null
    int32_t window;               // positions that a query sees, its own included; 0: all before it
    int32_t unused;
};

struct FusedModel {
    int32_t hidden, intermediate, heads, kv_heads, head_dim, vocab;
    int32_t num_layers, num_rows, context_tokens;
    int32_t num_threads;
    float epsilon;  // of every norm
    int32_t unused;
    const FusedLayer *layers;  // (num_layers)
    FusedLinear head;
    const float *embedding;    // (vocab, hidden)
    const float *final_norm;   // (hidden)
    const float *cosines;      // (context, head_dim / 2)
    const float *sines;        // (context, head_dim / 2)
    uint8_t *cache;            // fused_cache_bytes, aligned to 4; see attention.h
};

// Positions [0, count) of one row for another, or for itself, which is nothing to do.
struct FusedCopy {
    int32_t from_row, to_row, count, unused;
};

// One step: copies first, then tokens; tokens of a row are neighbours and ascend by position; what a row's KV lacks comes before what reads it.
struct FusedStep {
    int32_t num_tokens, num_outputs, num_copies, unused;
    const FusedCopy *copies;   // (num_copies), from rows that none of them writes
    const int32_t *token_ids;  // (num_tokens)
    const int32_t *rows;       // (num_tokens)
    const int32_t *positions;  // (num_tokens)
    const int32_t *outputs;    // (num_outputs), ascending indices of the tokens whose logits or states are wanted
    float *logits;             // (num_outputs, vocab); not written where states are wanted
    float *states;             // (num_outputs, hidden): what the head would see; null where logits are wanted
    uint8_t *finite;           // (num_tokens): 0 where the token's hidden state is NaN or infinite
};

struct FusedEngine;

// Copies *model and starts its threads; null if memory or threads are lacking.
FusedEngine *fused_open(const FusedModel *model);
void fused_step(FusedEngine *engine, const FusedStep *step);

// The lowest id of the highest of logits (num_rows, vocab) of each row; -1 if one of the row's is NaN or infinite.
void fused_highest(FusedEngine *engine, const float *logits, int32_t vocab, int32_t num_rows, int32_t *ids);

// Copies rows[i] of logits (any, vocab) to masked (num_rows, vocab), under the bits of its mask, (num_rows, octets of
// vocab): see select.h. Writes the lowest id of each copy's highest logit; -1 if all are impossible.
void fused_mask(FusedEngine *engine, const float *logits, int32_t vocab, int32_t num_rows, const int32_t *rows,
                const uint8_t *bits, float *masked, int32_t *ids);

// The `count` highest logits of each of `num_wishes` rows, and where temperatures[i] > 0 the row's weights; see select.h.
// logits (any, vocab); rows, temperatures (num_wishes); values, ids (num_wishes, count); block_weights (num_wishes,
// blocks of 64 ids). Returns 0 if memory is lacking.
int32_t fused_select(FusedEngine *engine, const float *logits, int32_t vocab, int32_t num_wishes, const int32_t *rows,
                     int32_t count, const float *temperatures, float *values, int32_t *ids, double *block_weights);
void fused_close(FusedEngine *engine);

int64_t fused_struct_bytes(int32_t which);  // FusedLinear, FusedLayer, FusedModel, FusedCopy, FusedStep: 0 to 4
int64_t fused_cache_bytes(const FusedModel *model);

// Returns 4 if every 32 weights of an output lie on 16 levels, as they do in a model that was quantized so, and no
// lowest level is over some 64 times the output's largest scale: then four bits hold a scale without loss down to a
// sixteenth of the output's largest, and below that to within a 32,768th of the largest. Else 8.
int32_t fused_weight_bits(const float *weights, int32_t outputs, int32_t inputs);
int64_t fused_packed_bytes(int32_t bits, int32_t outputs, int32_t inputs);

// Packs weights (outputs, inputs) in so many bits.
void fused_pack(int32_t bits, const float *weights, int32_t outputs, int32_t inputs, uint8_t *packed);

// The parts of a step by themselves, for tests and measurements; one thread.
float fused_quantize(const float *values, int32_t count, int32_t range, int16_t *quantized);
void fused_quantize_groups(const float *values, int32_t count, int8_t *quantized, float *scales, float *sums);
int32_t fused_linear(const FusedLinear *linear, const float *inputs, int32_t rows, float *outputs);  // 0: no memory
void fused_store_kv(const FusedModel *model, int32_t layer, int32_t row, int32_t position, const float *key,
                    const float *value);
void fused_attend(const FusedModel *model, int32_t layer, int32_t row, int32_t position, const float *queries,
                  float *outputs);
double fused_peak_macs(int32_t bits, int64_t instructions);  // a second of one thread that does nothing else
}
