// The whole step of a Llama-shaped model: embedding, layers, final norm, logits where they are wanted.
//
// Every member of the team runs the same stages and takes shares of each: rows of numbers, blocks of outputs, or
// tokens x KV heads. A step of more than kTileTokens tokens runs tile by tile through the whole model, so that the
// work space is allocated once; tiles cannot change a bit, for no token's arithmetic depends on its company.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <system_error>
#include <vector>

#include "attention.h"
#include "interface.h"
#include "linear.h"
#include "rows.h"
#include "team.h"

namespace fused {

constexpr int kTileTokens = 128;  // their activations fit a core's second-level cache
constexpr int kSharesAMember = 8;  // of a linear layer: enough that a disturbed core does not hold up the others

// A part of a step: tokens [first, first + count).
struct Tile {
    const FusedStep *step;
    int first, count;
    int token_id(int token) const { return step->token_ids[first + token]; }
    int row(int token) const { return step->rows[first + token]; }
    int position(int token) const { return step->positions[first + token]; }
};

}  // namespace fused

using namespace fused;

struct FusedEngine {
    explicit FusedEngine(const FusedModel &source)
        : model(source),
          qkv_width((model.heads + 2 * model.kv_heads) * model.head_dim),
          attention_width(model.heads * model.head_dim),
          quantized_width(padded(std::max({model.hidden, model.intermediate, attention_width}))),
          hidden(static_cast<int64_t>(kTileTokens) * model.hidden),
          wide(static_cast<int64_t>(kTileTokens) * std::max(qkv_width, 2 * model.intermediate)),
          attended(static_cast<int64_t>(kTileTokens) * std::max(attention_width, model.hidden)),
          quantized(static_cast<int64_t>(kTileTokens) * quantized_width),
          scales(kTileTokens),
          scratch(static_cast<size_t>(model.num_threads)),
          team(model.num_threads) {
        for (auto &part : scratch) part.resize(attention_scratch(model));
    }

    void run(const FusedStep &step) {
        team.run([&](Team::Member &member) {
            int output = 0;
            for (int first = 0; first < step.num_tokens; first += kTileTokens) {
                const Tile tile{&step, first, std::min(kTileTokens, step.num_tokens - first)};
                run_layers(tile, member);
                const int last = static_cast<int>(
                    std::lower_bound(step.outputs, step.outputs + step.num_outputs, first + tile.count) - step.outputs);
                run_head(tile, output, last, member);
                output = last;
            }
        });
    }

  private:
    void run_layers(const Tile &tile, Team::Member &member) {
        for_tokens(tile, member, [&](int token) {
            const float *row = model.embedding + static_cast<int64_t>(tile.token_id(token)) * model.hidden;
            std::memcpy(hidden_of(token), row, sizeof(float) * model.hidden);
            norm_and_quantize(token, model.layers[0].attention_norm, model.layers[0].qkv);
        });
        for (int index = 0; index < model.num_layers; ++index) {
            const FusedLayer &layer = model.layers[index];
            linear(layer.qkv, tile.count, wide.data(), false, member);
            for_tokens(tile, member, [&](int token) { place(tile, token, index); });
            attend_all(tile, index, member);
            for_tokens(tile, member, [&](int token) { quantize_for(token, attended_of(token), layer.output); });
            linear(layer.output, tile.count, hidden.data(), true, member);
            for_tokens(tile, member, [&](int token) { norm_and_quantize(token, layer.mlp_norm, layer.gate_up); });
            linear(layer.gate_up, tile.count, wide.data(), false, member);
            for_tokens(tile, member, [&](int token) {
                float *gates = wide.data() + static_cast<int64_t>(token) * 2 * model.intermediate;
                gate(gates, gates + model.intermediate, model.intermediate);
                quantize_for(token, gates, layer.down);
            });
            linear(layer.down, tile.count, hidden.data(), true, member);
            if (index + 1 == model.num_layers) break;
            const FusedLayer &next = model.layers[index + 1];
            for_tokens(tile, member, [&](int token) { norm_and_quantize(token, next.attention_norm, next.qkv); });
        }
    }

    // Writes the logits of step->outputs[begin, end), all of which lie in the tile, and what is finite in it.
    void run_head(const Tile &tile, int begin, int end, Team::Member &member) {
        for_tokens(tile, member, [&](int token) {
            tile.step->finite[tile.first + token] = all_finite(hidden_of(token), model.hidden);
        });
        member.share(end - begin, 1, [&](int i, int) {
            const int token = tile.step->outputs[begin + i] - tile.first;
            float *normed = attended.data() + static_cast<int64_t>(i) * model.hidden;
            rms_norm(hidden_of(token), model.final_norm, model.hidden, model.epsilon, normed);
            quantize_for(i, normed, model.head);
        });
        float *logits = tile.step->logits + static_cast<int64_t>(begin) * model.vocab;
        linear(model.head, end - begin, logits, false, member);
    }

    template <typename Each>
    void for_tokens(const Tile &tile, Team::Member &member, Each each) {
        member.share(tile.count, 1, [&](int token, int) { each(token); });
    }

    void linear(const FusedLinear &layer, int rows, float *outputs, bool add, Team::Member &member) {
        const LinearTask task{&layer, quantized.data(), scales.data(), rows, quantized_width, outputs, add};
        const int blocks = rows > 0 ? num_blocks(layer.outputs) : 0;
        member.share(blocks, std::max(1, blocks / (kSharesAMember * team.size())),
                   [&](int first, int last) { linear_kernel(task, first, last); });
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
    void attend_all(const Tile &tile, int index, Team::Member &member) {
        const int64_t group_width = static_cast<int64_t>(attention_width / model.kv_heads);
        member.share(tile.count * model.kv_heads, 1, [&](int unit, int) {
            const int kv_head = unit / tile.count, token = unit % tile.count;
            attend(model, index, tile.row(token), kv_head, tile.position(token),
                   wide.data() + static_cast<int64_t>(token) * qkv_width + kv_head * group_width,
                   attended_of(token) + kv_head * group_width, scratch[member.number].data());
        });
    }

    void norm_and_quantize(int token, const float *norm, const FusedLinear &next) {
        float *normed = attended.data() + static_cast<int64_t>(token) * model.hidden;
        rms_norm(hidden_of(token), norm, model.hidden, model.epsilon, normed);
        quantize_for(token, normed, next);
    }

    void quantize_for(int token, const float *values, const FusedLinear &next) {
        scales[token] = quantize(values, next.inputs, activation_range(next.inputs),
                                 quantized.data() + static_cast<int64_t>(token) * quantized_width);
    }

    float *hidden_of(int token) { return hidden.data() + static_cast<int64_t>(token) * model.hidden; }
    float *attended_of(int token) { return attended.data() + static_cast<int64_t>(token) * attention_width; }

    const FusedModel model;
    const int qkv_width, attention_width, quantized_width;
    std::vector<float> hidden;       // (tokens, hidden): the residual stream
    std::vector<float> wide;         // (tokens, qkv) or (tokens, gate and up)
    std::vector<float> attended;     // (tokens, heads x head_dim), or normed rows (tokens, hidden)
    std::vector<int16_t> quantized;  // (tokens, quantized_width)
    std::vector<float> scales;       // (tokens)
    std::vector<std::vector<float>> scratch;  // of the attention, one a member
    Team team;  // last: its threads use all of the above
};

extern "C" FusedEngine *fused_open(const FusedModel *model) {
    try {
        return new FusedEngine(*model);
    } catch (const std::bad_alloc &) {
        return nullptr;
    } catch (const std::system_error &) {
        return nullptr;
    }
}

extern "C" void fused_step(FusedEngine *engine, const FusedStep *step) { engine->run(*step); }

extern "C" void fused_close(FusedEngine *engine) { delete engine; }

extern "C" int64_t fused_struct_bytes(int32_t which) {
    constexpr int64_t kBytes[] = {sizeof(FusedLinear), sizeof(FusedLayer), sizeof(FusedModel), sizeof(FusedStep)};
    return kBytes[which];
}
