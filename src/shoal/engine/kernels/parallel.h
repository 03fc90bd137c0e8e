// The threads that kernels share. A job is a number of tasks; whoever is free takes the next one, so a thread that
// the system has put aside delays nobody for longer than the one task it holds.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace shoal {

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Pool {
public:
    static Pool& get() {
        static Pool* pool = new Pool;  // never destroyed: its threads may outlive main
        return *pool;
    }

    int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

    // Grows only; the calling thread is one of them.
    void grow(int num_threads) {
        std::lock_guard<std::mutex> lock(mutex_);
        while (this->num_threads() < num_threads) {
            workers_.emplace_back([this, index = this->num_threads()] { work(index); });
        }
    }

    // Calls task(index, thread) for 0 <= index < num_tasks; returns when all are done.
    template <typename Task>
    void run(int num_tasks, Task&& task) {
        if (num_tasks <= 1 || workers_.empty()) {
            for (int index = 0; index < num_tasks; ++index) task(index, 0);
            return;
        }
        std::lock_guard<std::mutex> lock(mutex_);
        call_ = [](void* context, int index, int thread) {
            (*static_cast<std::remove_reference_t<Task>*>(context))(index, thread);
        };
        context_ = const_cast<void*>(static_cast<const void*>(&task));
        done_.store(0, std::memory_order_relaxed);
        num_tasks_ = num_tasks;
        const uint32_t job = job_.load(std::memory_order_relaxed) + 1;
        ticket_.store(uint64_t{job} << 32 | static_cast<uint32_t>(num_tasks), std::memory_order_release);
        job_.store(job, std::memory_order_release);
        job_.notify_all();
        take_tasks(job, 0);
        for (uint32_t done; (done = done_.load(std::memory_order_acquire)) != static_cast<uint32_t>(num_tasks);) {
            if (!spin([&] { return done_.load(std::memory_order_acquire) != done; })) std::this_thread::yield();
        }
    }

private:
    static constexpr std::chrono::microseconds kSpin{50};  // longer than the pause between two kernels of a step

    void work(int thread) {
        for (uint32_t seen = 0;;) {
            if (!spin([&] { return job_.load(std::memory_order_acquire) != seen; })) job_.wait(seen);
            seen = job_.load(std::memory_order_acquire);
            take_tasks(seen, thread);
        }
    }

    // A ticket names its job: a thread that comes late finds another job's ticket, or none left, and takes nothing.
    // Once a task is taken its job cannot end before it is done, so call_, context_ and num_tasks_ are that job's.
    void take_tasks(uint32_t job, int thread) {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        for (;;) {
            const auto left = static_cast<uint32_t>(ticket);
            if (ticket >> 32 != job || left == 0) return;
            if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
            call_(context_, num_tasks_ - static_cast<int>(left), thread);
            done_.fetch_add(1, std::memory_order_acq_rel);
            ticket = ticket_.load(std::memory_order_acquire);
        }
    }

    // False: the time is over and the condition does not hold.
    template <typename Condition>
    static bool spin(Condition&& condition) {
        const auto ends = std::chrono::steady_clock::now() + kSpin;
        do {
            for (int round = 0; round < 32; ++round) {
                if (condition()) return true;
                relax();
            }
        } while (std::chrono::steady_clock::now() < ends);
        return false;
    }

    std::mutex mutex_;  // one job at a time
    std::vector<std::thread> workers_;
    void (*call_)(void*, int, int) = nullptr;
    void* context_ = nullptr;
    int num_tasks_ = 0;
    alignas(64) std::atomic<uint64_t> ticket_{0};  // job << 32 | tasks not taken yet
    alignas(64) std::atomic<uint32_t> job_{0};
    alignas(64) std::atomic<uint32_t> done_{0};
};

}  // namespace shoal
