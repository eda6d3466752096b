// One way of up to kTileTokens tokens through the model: the work space, and the stages over it.
//
// A stage is cut into shares, which a Sharer hands out: a team's members take them in turns, a lane takes all itself.
// Cuts cannot change a bit, for no token's arithmetic depends on its company.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "attention.h"
#include "interface.h"
#include "linear.h"
#include "rows.h"

namespace fused {

constexpr int kTileTokens = 128;   // their activations fit a core's second-level cache
constexpr int kSharesAMember = 8;  // of a stage: enough that a disturbed core does not hold up the others

// A part of a step: tokens [first, first + count).
struct Tile {
    const FusedStep *step;
    int first, count;
    int token_id(int token) const { return step->token_ids[first + token]; }
    int row(int token) const { return step->rows[first + token]; }
    int position(int token) const { return step->positions[first + token]; }
};

class Pass {
  public:
    explicit Pass(const FusedModel &source)
        : model(source),
          qkv_width((model.heads + 2 * model.kv_heads) * model.head_dim),
          attention_width(model.heads * model.head_dim),
          quantized_width(padded(std::max({model.hidden, model.intermediate, attention_width}))),
          hidden(static_cast<int64_t>(kTileTokens) * model.hidden),
          wide(static_cast<int64_t>(kTileTokens) * std::max(qkv_width, 2 * model.intermediate)),
          attended(static_cast<int64_t>(kTileTokens) * std::max(attention_width, model.hidden)),
          numbers(kTileTokens * quantized_width * sizeof(int16_t)),
          scales(kTileTokens * num_groups(quantized_width)),
          sums(scales.size()),
          quantized{numbers.data(), scales.data(), sums.data(),
                    static_cast<int64_t>(quantized_width * sizeof(int16_t)), num_groups(quantized_width)},
          scratch(static_cast<size_t>(model.num_threads)) {
        for (auto &part : scratch) part.resize(attention_scratch(model));
    }

    Pass(Pass &&) = delete;  // `quantized` names its own memory

    // Runs all layers. Calls placed(layer) when the tile's keys and values of a layer are stored, before they are read.
    template <typename Sharer, typename Placed>
    void run_layers(const Tile &tile, Sharer &sharer, Placed placed) {
        for_tokens(tile, sharer, [&](int token) {
            const float *row = model.embedding + static_cast<int64_t>(tile.token_id(token)) * model.hidden;
            std::memcpy(hidden_of(token), row, sizeof(float) * model.hidden);
            norm_and_quantize(token, model.layers[0].attention_norm, model.layers[0].qkv);
        });
        for (int index = 0; index < model.num_layers; ++index) {
            const FusedLayer &layer = model.layers[index];
            linear(layer.qkv, tile.count, wide.data(), false, sharer);
            for_tokens(tile, sharer, [&](int token) { place(tile, token, index); });
            placed(index);
            attend_all(tile, index, sharer);
            for_tokens(tile, sharer, [&](int token) { quantized.set(token, attended_of(token), layer.output); });
            linear(layer.output, tile.count, hidden.data(), true, sharer);
            for_tokens(tile, sharer, [&](int token) { norm_and_quantize(token, layer.mlp_norm, layer.gate_up); });
            linear(layer.gate_up, tile.count, wide.data(), false, sharer);
            for_tokens(tile, sharer, [&](int token) {
                float *gates = wide.data() + static_cast<int64_t>(token) * 2 * model.intermediate;
                gate(gates, gates + model.intermediate, model.intermediate);
                quantized.set(token, gates, layer.down);
            });
            linear(layer.down, tile.count, hidden.data(), true, sharer);
            if (index + 1 == model.num_layers) break;
            const FusedLayer &next = model.layers[index + 1];
            for_tokens(tile, sharer, [&](int token) { norm_and_quantize(token, next.attention_norm, next.qkv); });
        }
    }

    // Writes the logits of the step's outputs that lie in the tile, and what is finite in it.
    template <typename Sharer>
    void run_head(const Tile &tile, Sharer &sharer) {
        const FusedStep &step = *tile.step;
        const int32_t *const last_output = step.outputs + step.num_outputs;
        const int32_t *outputs = std::lower_bound(step.outputs, last_output, tile.first);
        const int count = static_cast<int>(std::lower_bound(outputs, last_output, tile.first + tile.count) - outputs);
        for_tokens(tile, sharer, [&](int token) {
            step.finite[tile.first + token] = all_finite(hidden_of(token), model.hidden);
        });
        sharer.share(count, 1, [&](int first, int last) {
            for (int i = first; i < last; ++i) {
                float *normed = attended.data() + static_cast<int64_t>(i) * model.hidden;
                rms_norm(hidden_of(outputs[i] - tile.first), model.final_norm, model.hidden, model.epsilon, normed);
                quantized.set(i, normed, model.head);
            }
        });
        linear(model.head, count, step.logits + (outputs - step.outputs) * static_cast<int64_t>(model.vocab), false,
               sharer);
    }

  private:
    // Units that a member takes at once, of so many in a stage.
    int share_of(int units) const { return std::max(1, units / (kSharesAMember * model.num_threads)); }

    template <typename Sharer, typename Each>
    void for_tokens(const Tile &tile, Sharer &sharer, Each each) {
        sharer.share(tile.count, share_of(tile.count), [&](int first, int last) {
            for (int token = first; token < last; ++token) each(token);
        });
    }

    template <typename Sharer>
    void linear(const FusedLinear &layer, int rows, float *outputs, bool add, Sharer &sharer) {
        const LinearTask task{&layer, quantized, rows, outputs, add};
        const int blocks = rows > 0 ? num_blocks(layer.outputs) : 0;
        sharer.share(blocks, share_of(blocks), [&](int first, int last) { run_linear(task, first, last); });
    }

    // Norms and rotates a token's query and key heads, and stores its keys and values.
    void place(const Tile &tile, int token, int index) {
        const FusedLayer &layer = model.layers[index];
        const int dim = model.head_dim, position = tile.position(token);
        float *queries = wide.data() + static_cast<int64_t>(token) * qkv_width;
        float *keys = queries + attention_width;
        const int64_t angles = static_cast<int64_t>(position) * (dim / 2);
        for (int head = 0; head < model.heads + model.kv_heads; ++head) {
            float *values = queries + head * dim;
            const float *norm = head < model.heads ? layer.query_norm : layer.key_norm;
            if (norm != nullptr) rms_norm(values, norm, dim, model.epsilon, values);
            rotate(values, model.cosines + angles, model.sines + angles, dim);
        }
        store_kv(model, index, tile.row(token), position, keys, keys + model.kv_heads * dim);
    }

    // KV heads outside, tokens inside: neighbouring shares read the same keys and values.
    template <typename Sharer>
    void attend_all(const Tile &tile, int index, Sharer &sharer) {
        const int64_t group_width = static_cast<int64_t>(attention_width / model.kv_heads);
        const int units = tile.count * model.kv_heads;
        sharer.share(units, share_of(units), [&](int first, int last) {
            for (int unit = first; unit < last; ++unit) {
                const int kv_head = unit / tile.count, token = unit % tile.count;
                attend(model, index, tile.row(token), kv_head, tile.position(token),
                       wide.data() + static_cast<int64_t>(token) * qkv_width + kv_head * group_width,
                       attended_of(token) + kv_head * group_width, scratch[sharer.number].data());
            }
        });
    }

    void norm_and_quantize(int token, const float *norm, const FusedLinear &next) {
        float *normed = attended.data() + static_cast<int64_t>(token) * model.hidden;
        rms_norm(hidden_of(token), norm, model.hidden, model.epsilon, normed);
        quantized.set(token, normed, next);
    }

    float *hidden_of(int token) { return hidden.data() + static_cast<int64_t>(token) * model.hidden; }
    float *attended_of(int token) { return attended.data() + static_cast<int64_t>(token) * attention_width; }

    const FusedModel &model;
    const int qkv_width, attention_width, quantized_width;
    std::vector<float> hidden;    // (tokens, hidden): the residual stream
    std::vector<float> wide;      // (tokens, qkv) or (tokens, gate and up)
    std::vector<float> attended;  // (tokens, heads x head_dim), or normed rows (tokens, hidden)
    std::vector<char> numbers;    // of `quantized`, which names the next two too
    std::vector<float> scales, sums;
    const Activations quantized;
    std::vector<std::vector<uint8_t>> scratch;  // of the attention, one a member
};

}  // namespace fused
