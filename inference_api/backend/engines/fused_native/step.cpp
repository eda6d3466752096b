// The whole step of a Llama-shaped model: which thread computes which of its tokens, and the C interface.
//
// Many tokens are cut into lanes, one for each thread: a lane takes its tokens through the whole model by itself, so
// that threads share nothing but the weights. Where the cut goes through a row, the later lane waits, layer by layer,
// for what the earlier one stores. Few tokens go through together: every thread takes shares of each stage. A step of
// more tokens than there is work space for runs tile by tile.
#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <system_error>
#include <vector>

#include "attention.h"
#include "interface.h"
#include "pass.h"
#include "select.h"
#include "team.h"

using namespace fused;

namespace {

constexpr int kLaneTokens = 6;  // fewer would load weights for too little: a whole tile of the linear kernels

// Hands a lane every share of every stage.
struct Lane {
    template <typename Take>
    void share(int total, int, Take take) {
        if (total > 0) take(0, total);
    }

    const int number;  // of the member that computes it
};

}  // namespace

struct FusedEngine {
    explicit FusedEngine(const FusedModel &source)
        : model(source), placed(static_cast<size_t>(model.num_threads)), team(model.num_threads) {
        for (int lane = 0; lane < model.num_threads; ++lane) passes.push_back(std::make_unique<Pass>(model));
    }

    void run(const FusedStep &step) {
        for (auto &layers : placed) layers.store(0, std::memory_order_relaxed);
        team.run([&](Team::Member &member) {
            for (int i = 0; i < step.num_copies; ++i) copy(step.copies[i], member);
            const int lanes = team.size();
            int round = 0;
            for (int first = 0, count; first < step.num_tokens; first += count) {
                const int rest = step.num_tokens - first;
                const bool in_lanes = lanes > 1 && rest >= lanes * kLaneTokens;
                count = std::min(rest, in_lanes ? lanes * kTileTokens : kTileTokens);
                const Tile tile{&step, first, count};
                if (in_lanes) {
                    member.share(lanes, 1, [&](int lane, int) { run_lane(tile, lane, round, member.number); });
                    ++round;
                } else {
                    passes[0]->run_layers(tile, member, [](int) {});
                    passes[0]->run_head(tile, member);
                }
            }
        });
    }

    template <typename Each>
    void share_out(int total, Each each) {
        team.run([&](Team::Member &member) {
            member.share(total, 1, [&](int first, int last) {
                for (int i = first; i < last; ++i) each(i);
            });
        });
    }

  private:
    void copy(const FusedCopy &copy, Team::Member &member) {
        if (copy.from_row == copy.to_row) return;
        member.share(model.num_layers * model.kv_heads, 1, [&](int unit, int) {
            copy_kv(model, unit / model.kv_heads, unit % model.kv_heads, copy.from_row, copy.to_row, copy.count);
        });
    }

    // Lanes are taken in ascending order, so that whom a lane waits for is always under way.
    void run_lane(const Tile &tile, int number, int round, int member) {
        const int first = start_of(tile, number);
        const Tile part{tile.step, tile.first + first, start_of(tile, number + 1) - first};
        Lane lane{member};
        passes[number]->run_layers(part, lane, [&](int layer) {
            const int done = round * model.num_layers + layer + 1;
            placed[number].store(done, std::memory_order_release);
            placed[number].notify_all();
            for (int earlier = number; earlier > 0 && goes_on(tile, earlier); --earlier)
                Team::wait_until(placed[earlier - 1], done);
        });
        passes[number]->run_head(part, lane);
    }

    int start_of(const Tile &tile, int lane) const {
        return static_cast<int>(static_cast<int64_t>(tile.count) * lane / team.size());
    }

    // Whether a lane's first token has its row with the last one of the lane before.
    bool goes_on(const Tile &tile, int lane) const {
        const int first = start_of(tile, lane);
        return tile.row(first) == tile.row(first - 1);
    }

    const FusedModel model;
    std::vector<std::unique_ptr<Pass>> passes;  // one a lane; few tokens take the first
    std::vector<std::atomic<int>> placed;       // layers whose keys and values a lane has stored in this run
    Team team;                                  // last: its threads use all of the above
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
