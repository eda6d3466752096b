// A fixed set of threads that run one function together, stage by stage. Knows no model.
//
// The caller is a member. A stage ends when all its shares are done, not when all members have come: one that the
// system has put aside between stages holds nobody up, and skips what is over when it returns. Waiting spins for some
// microseconds, because stages are that short, and then sleeps: an idle engine uses no processor. Which member takes
// a share never matters to the result.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace fused {

class Team {
  public:
    // One member's way through the stages of a run. Every member must pass the same stages with the same totals.
    class Member {
      public:
        // Hands out [0, total) of the next stage in shares, as take(first, last); returns when all are done, and what
        // they wrote is seen.
        template <typename Take>
        void share(int total, Take take) {
            if (total > 0) team_.share(stage_++, static_cast<uint32_t>(total), take);
        }

        const int number;  // 0: the caller

      private:
        friend class Team;
        Member(Team &team, int number) : number(number), team_(team) {}
        Team &team_;
        uint32_t stage_ = 0;
    };

    using Work = std::function<void(Member &)>;

    // Throws std::system_error or std::bad_alloc if a thread cannot start; those before it have ended then.
    explicit Team(int size) : size_(size) {
        try {
            for (int number = 1; number < size; ++number) threads_.emplace_back([this, number] { serve(number); });
        } catch (...) {
            stop();  // a thread that is destroyed while it runs ends the process
            throw;
        }
    }

    Team(const Team &) = delete;
    Team &operator=(const Team &) = delete;

    ~Team() { stop(); }

    // Runs work on every member that is awake in time; returns when all stages are done and no member is inside.
    void run(const Work &work) {
        work_ = &work;
        state_.store(0, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        inside_.store(0, std::memory_order_release);
        call();
        Member member(*this, 0);
        work(member);
        inside_.fetch_or(kClosed, std::memory_order_acq_rel);
        for (int inside; (inside = inside_.load(std::memory_order_acquire)) != kClosed;) wait(inside_, inside);
    }

    int size() const { return size_; }

  private:
    static constexpr int kSpins = 1000;
    static constexpr uint32_t kSharesAMember = 4;  // of what is left
    static constexpr int kClosed = 1 << 30;

    // state_ is the running stage (high half) and the first unit of it that is not taken (low half). Shares grow smaller
    // towards a stage's end, so that members end it together and yet take few (guided self-scheduling: Polychronopoulos
    // and Kuck, 1987).
    template <typename Take>
    void share(uint32_t stage, uint32_t total, Take take) {
        const uint32_t parts = kSharesAMember * static_cast<uint32_t>(size_);
        uint64_t state = state_.load(std::memory_order_acquire);
        while (state >> 32 == stage) {
            const uint32_t first = static_cast<uint32_t>(state);
            if (first >= total) {
                wait(state_, state);
                state = state_.load(std::memory_order_acquire);
                continue;
            }
            const uint32_t last = first + std::max(1u, (total - first) / parts);
            if (!state_.compare_exchange_weak(state, state + (last - first), std::memory_order_acq_rel)) continue;
            take(static_cast<int>(first), static_cast<int>(last));
            if (done_.fetch_add(last - first, std::memory_order_acq_rel) + (last - first) == total) {
                // Nobody is in this stage any more: a share that is taken is a share that is not yet done.
                done_.store(0, std::memory_order_relaxed);
                state_.store(static_cast<uint64_t>(stage + 1) << 32, std::memory_order_release);
                state_.notify_all();
                return;
            }
            state = state_.load(std::memory_order_acquire);
        }
    }

    template <typename Number>
    static void wait(std::atomic<Number> &value, Number old) {
        for (int spin = 0; spin < kSpins; ++spin) {
            if (value.load(std::memory_order_acquire) != old) return;
            _mm_pause();
        }
        value.wait(old, std::memory_order_acquire);
    }

    void stop() {
        stopping_ = true;
        call();
        for (auto &thread : threads_) thread.join();
    }

    void call() {
        calls_.fetch_add(1, std::memory_order_release);
        calls_.notify_all();
    }

    void serve(int number) {
        for (int seen = 0;;) {
            wait(calls_, seen);
            seen = calls_.load(std::memory_order_acquire);
            if (stopping_) return;
            int inside = inside_.load(std::memory_order_acquire);
            while (inside < kClosed && !inside_.compare_exchange_weak(inside, inside + 1, std::memory_order_acq_rel)) {
            }
            if (inside >= kClosed) continue;  // too late for this run
            Member member(*this, number);
            (*work_)(member);
            inside_.fetch_sub(1, std::memory_order_acq_rel);
            inside_.notify_all();
        }
    }

    const int size_;
    const Work *work_ = nullptr;
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<int> calls_{0};
    alignas(64) std::atomic<int> inside_{kClosed};
    alignas(64) std::atomic<uint64_t> state_{0};
    alignas(64) std::atomic<uint32_t> done_{0};
    std::vector<std::thread> threads_;  // last: they use all of the above
};

}  // namespace fused
