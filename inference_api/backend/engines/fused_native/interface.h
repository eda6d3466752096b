// The plain C interface of the fused step: what Python passes in and calls. PROCESS 2 loads it with ctypes.
//
// All memory that a pointer here names belongs to the caller and outlives the engine. Every struct is mirrored in
// fused_library.py, field by field; fused_struct_bytes lets it prove that both sides mean the same.
#pragma once

#include <cstdint>

extern "C" {

// A linear layer, quantized and packed by fused_pack.
struct FusedLinear {
    const int8_t *weights;  // blocks of 16 outputs, see linear.h
    const float *scales;    // (outputs)
    const float *bias;      // (outputs), or null
    int32_t outputs;
    int32_t inputs;
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
    uint16_t *keys;            // fp16, fused_cache_halves each; see attention.h
    uint16_t *values;
};

// One step: tokens of a row are neighbours and ascend by position; what a row's KV lacks comes before what reads it.
struct FusedStep {
    int32_t num_tokens, num_outputs;
    const int32_t *token_ids;  // (num_tokens)
    const int32_t *rows;       // (num_tokens)
    const int32_t *positions;  // (num_tokens)
    const int32_t *outputs;    // (num_outputs), ascending indices of the tokens whose logits are wanted
    float *logits;             // (num_outputs, vocab)
    uint8_t *finite;           // (num_tokens): 0 where the token's hidden state is NaN or infinite
};

struct FusedEngine;

// Copies *model and starts its threads; null if memory or threads are lacking.
FusedEngine *fused_open(const FusedModel *model);
void fused_step(FusedEngine *engine, const FusedStep *step);
void fused_close(FusedEngine *engine);

int64_t fused_struct_bytes(int32_t which);  // 0: FusedLinear, 1: FusedLayer, 2: FusedModel, 3: FusedStep
int64_t fused_packed_bytes(int32_t outputs, int32_t inputs);
int64_t fused_cache_halves(const FusedModel *model);
int32_t fused_activation_range(int32_t inputs);

// Quantizes weights (outputs, inputs) to int8 by output and packs them.
void fused_pack(const float *weights, int32_t outputs, int32_t inputs, int8_t *packed, float *scales);

// The parts of a step by themselves, for tests and measurements; one thread.
float fused_quantize(const float *values, int32_t count, int32_t range, int16_t *quantized);
void fused_linear(const FusedLinear *linear, const int16_t *inputs, const float *input_scales, int32_t rows,
                  int32_t stride, float *outputs);
void fused_store_kv(const FusedModel *model, int32_t layer, int32_t row, int32_t position, const float *key,
                    const float *value);
void fused_attend(const FusedModel *model, int32_t layer, int32_t row, int32_t position, const float *queries,
                  float *outputs);
double fused_peak_macs(int64_t instructions);  // multiply-accumulates a second of one thread that does nothing else
}
