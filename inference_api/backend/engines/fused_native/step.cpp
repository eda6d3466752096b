// The whole step of a Llama-shaped model: embedding, layers, final norm, and logits or states where they are wanted.
//
// Every member of the team runs the same stages and takes shares of each: rows of numbers, blocks of outputs, or
// tokens x KV heads. A step of more than kTileTokens tokens runs tile by tile through the whole model, so that the
// work space is allocated once; tiles cannot change a bit, for no token's arithmetic depends on its company.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <system_error>
#include <vector>

#include "attention.h"
#include "interface.h"
#include "linear.h"
#include "rows.h"
#include "select.h"
#include "team.h"

namespace fused {

constexpr int kTileTokens = 128;  // their activations fit a core's second-level cache

// A part of a step: tokens [first, first + count), or `count` of them that are named.
struct Tile {
    const FusedStep *step;
    int first, count;
    const int32_t *named = nullptr;  // (count), ascending indices of the step's tokens
    int index(int token) const { return named == nullptr ? first + token : named[token]; }
    int token_id(int token) const { return step->token_ids[index(token)]; }
    int row(int token) const { return step->rows[index(token)]; }
    int position(int token) const { return step->positions[index(token)]; }
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
          numbers(kTileTokens * quantized_width * sizeof(int16_t)),
          scales(kTileTokens * num_groups(quantized_width)),
          sums(scales.size()),
          quantized{numbers.data(), scales.data(), sums.data(),
                    static_cast<int64_t>(quantized_width * sizeof(int16_t)), num_groups(quantized_width)},
          scratch(static_cast<size_t>(model.num_threads)),
          team(model.num_threads) {
        for (auto &part : scratch) part.resize(attention_scratch(model));
    }

    void run(const FusedStep &step) {
        team.run([&](Team::Member &member) {
            for (int i = 0; i < step.num_copies; ++i) copy(step.copies[i], member);
            int output = 0;
            for (int first = 0; first < step.num_tokens; first += kTileTokens) {
                const Tile tile{&step, first, std::min(kTileTokens, step.num_tokens - first)};
                const int last = static_cast<int>(
                    std::lower_bound(step.outputs, step.outputs + step.num_outputs, first + tile.count) - step.outputs);
                const Tile drawn{&step, first, last - output, step.outputs + output};
                run_layers(tile, drawn, member);
                run_head(drawn, output, member);
                output = last;
            }
        });
    }

    template <typename Each>
    void share_out(int total, Each each) {
        team.run([&](Team::Member &member) {
            member.share(total, [&](int first, int last) {
                for (int i = first; i < last; ++i) each(i);
            });
        });
    }

  private:
    void copy(const FusedCopy &copy, Team::Member &member) {
        if (copy.from_row == copy.to_row) return;
        member.share(model.num_layers * model.kv_heads, [&](int first, int last) {
            for (int unit = first; unit < last; ++unit)
                copy_kv(model, unit / model.kv_heads, unit % model.kv_heads, copy.from_row, copy.to_row, copy.count);
        });
    }

    // Leaves the hidden states of `drawn`, the tokens of the tile of which outputs are wanted, in their order.
    void run_layers(Tile tile, const Tile &drawn, Team::Member &member) {
        for_tokens(tile, member, [&](int token) {
            const float *row = model.embedding + static_cast<int64_t>(tile.token_id(token)) * model.hidden;
            std::memcpy(hidden_of(token), row, sizeof(float) * model.hidden);
            norm_and_quantize(token, model.layers[0].attention_norm, model.layers[0].qkv);
        });
        for (int index = 0; index < model.num_layers; ++index) {
            const FusedLayer &layer = model.layers[index];
            linear(layer.qkv, tile.count, wide.data(), false, member);
            for_tokens(tile, member, [&](int token) { place(tile, token, index); });
            // Of the last layer the other tokens need keys and values alone.
            if (index + 1 == model.num_layers) tile = keep(tile, drawn, member);
            attend_all(tile, index, member);
            for_tokens(tile, member, [&](int token) { quantized.set(token, attended_of(token), layer.output); });
            linear(layer.output, tile.count, hidden.data(), true, member);
            for_tokens(tile, member, [&](int token) { norm_and_quantize(token, layer.mlp_norm, layer.gate_up); });
            linear(layer.gate_up, tile.count, wide.data(), false, member);
            for_tokens(tile, member, [&](int token) {
                float *gates = wide.data() + static_cast<int64_t>(token) * 2 * model.intermediate;
                gate(gates, gates + model.intermediate, model.intermediate);
                quantized.set(token, gates, layer.down);
            });
            linear(layer.down, tile.count, hidden.data(), true, member);
            if (index + 1 == model.num_layers) break;
            const FusedLayer &next = model.layers[index + 1];
            for_tokens(tile, member, [&](int token) { norm_and_quantize(token, next.attention_norm, next.qkv); });
        }
    }

    // Says of all tokens of the tile what is finite, and moves the hidden states and queries of `drawn` to the front.
    Tile keep(const Tile &tile, const Tile &drawn, Team::Member &member) {
        say_finite(tile, member);
        member.share(1, [&](int, int) {
            for (int i = 0; i < drawn.count; ++i) {
                const int token = drawn.index(i) - tile.first;
                if (token == i) continue;
                std::memcpy(hidden_of(i), hidden_of(token), sizeof(float) * model.hidden);
                std::memcpy(queries_of(i), queries_of(token), sizeof(float) * attention_width);
            }
        });
        return drawn;
    }

    // Writes the logits or the states of the tokens `drawn`, the first of which is the step's output `begin`, and what is
    // finite.
    void run_head(const Tile &drawn, int begin, Team::Member &member) {
        say_finite(drawn, member);
        if (float *states = drawn.step->states) {
            states += static_cast<int64_t>(begin) * model.hidden;
            for_tokens(drawn, member, [&](int token) {
                rms_norm(hidden_of(token), model.final_norm, model.hidden, model.epsilon,
                         states + static_cast<int64_t>(token) * model.hidden);
            });
            return;
        }
        for_tokens(drawn, member, [&](int token) { norm_and_quantize(token, model.final_norm, model.head); });
        float *logits = drawn.step->logits + static_cast<int64_t>(begin) * model.vocab;
        linear(model.head, drawn.count, logits, false, member);
    }

    void say_finite(const Tile &tile, Team::Member &member) {
        for_tokens(tile, member, [&](int token) {
            tile.step->finite[tile.index(token)] = all_finite(hidden_of(token), model.hidden);
        });
    }

    template <typename Each>
    void for_tokens(const Tile &tile, Team::Member &member, Each each) {
        member.share(tile.count, [&](int first, int last) {
            for (int token = first; token < last; ++token) each(token);
        });
    }

    void linear(const FusedLinear &layer, int rows, float *outputs, bool add, Team::Member &member) {
        const LinearTask task{&layer, quantized, rows, outputs, add};
        const int blocks = rows > 0 ? num_blocks(layer.outputs) : 0;
        member.share(blocks, [&](int first, int last) { run_linear(task, first, last); });
    }

    // Norms and rotates a token's query and key heads, and stores its keys and values.
    void place(const Tile &tile, int token, int index) {
        const FusedLayer &layer = model.layers[index];
        const int dim = model.head_dim, position = tile.position(token);
        float *queries = queries_of(token);
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
        const int64_t heads_width = static_cast<int64_t>(attention_width / model.kv_heads);
        const int units = tile.count * model.kv_heads;
        member.share(units, [&](int first, int last) {
            for (int unit = first; unit < last; ++unit) {
                const int kv_head = unit / tile.count, token = unit % tile.count;
                attend(model, index, tile.row(token), kv_head, tile.position(token),
                       queries_of(token) + kv_head * heads_width,
                       attended_of(token) + kv_head * heads_width, scratch[member.number].data());
            }
        });
    }

    void norm_and_quantize(int token, const float *norm, const FusedLinear &next) {
        float *normed = attended.data() + static_cast<int64_t>(token) * model.hidden;
        rms_norm(hidden_of(token), norm, model.hidden, model.epsilon, normed);
        quantized.set(token, normed, next);
    }

    float *hidden_of(int token) { return hidden.data() + static_cast<int64_t>(token) * model.hidden; }
    float *queries_of(int token) { return wide.data() + static_cast<int64_t>(token) * qkv_width; }
    float *attended_of(int token) { return attended.data() + static_cast<int64_t>(token) * attention_width; }

    const FusedModel model;
    const int qkv_width, attention_width, quantized_width;
    std::vector<float> hidden;       // (tokens, hidden): the residual stream
    // Each of the two holds rows of two widths in turn, so that one kind's rows lie where several of the other's do. That
    // is safe because no stage reads one kind and writes the other: a stage ends before the next begins, and a share
    // that norms a row into `attended` quantizes it before it takes another.
    std::vector<float> wide;         // (tokens, qkv) or (tokens, gate and up)
    std::vector<float> attended;     // (tokens, heads x head_dim), or normed rows (tokens, hidden)
    std::vector<char> numbers;       // of `quantized`, which names the next two too
    std::vector<float> scales, sums;
    const Activations quantized;
    std::vector<std::vector<uint8_t>> scratch;  // of the attention, one a member
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

extern "C" void fused_highest(FusedEngine *engine, const float *logits, int32_t vocab, int32_t num_rows, int32_t *ids) {
    engine->share_out(num_rows, [&](int row) { ids[row] = highest_id(logits + static_cast<int64_t>(row) * vocab, vocab); });
}

extern "C" void fused_mask(FusedEngine *engine, const float *logits, int32_t vocab, int32_t num_rows,
                           const int32_t *rows, const uint8_t *bits, float *masked, int32_t *ids) {
    const int64_t octets = (vocab + 7) / 8;
    engine->share_out(num_rows, [&](int i) {
        ids[i] = mask_row(logits + static_cast<int64_t>(rows[i]) * vocab, vocab, bits + i * octets,
                          masked + static_cast<int64_t>(i) * vocab);
    });
}

extern "C" int32_t fused_select(FusedEngine *engine, const float *logits, int32_t vocab, int32_t num_wishes,
                                const int32_t *rows, int32_t count, const float *temperatures, float *values,
                                int32_t *ids, double *block_weights) {
    const int64_t blocks = num_select_blocks(vocab);
    std::atomic<bool> lacking{false};
    engine->share_out(num_wishes, [&](int i) {
        try {
            const int64_t at = static_cast<int64_t>(i) * count;
            select_row(logits + static_cast<int64_t>(rows[i]) * vocab, vocab, count, temperatures[i], values + at,
                       ids + at, block_weights + i * blocks);
        } catch (const std::bad_alloc &) {
            lacking = true;
        }
    });
    return lacking ? 0 : 1;
}

extern "C" void fused_close(FusedEngine *engine) { delete engine; }

extern "C" int64_t fused_struct_bytes(int32_t which) {
    constexpr int64_t kBytes[] = {sizeof(FusedLinear), sizeof(FusedLayer), sizeof(FusedModel), sizeof(FusedCopy),
                                  sizeof(FusedStep)};
    return kBytes[which];
}
