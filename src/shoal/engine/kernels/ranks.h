// Ranks of one replica on one host: sums, gathers and messages through memory that they share.
//
// A rank that calls a collective puts its part into a slot of its own, says that it has come, waits until all have, and
// reads the others' parts. Slots alternate: who writes to one again knows that all have come to the call between, so
// all have read it. Every rank adds the parts in the order of ranks, so all get the same bits.
//
// With a part goes a tag: a digest of the step and the kind and size of the call. Ranks that are not at the same place
// of the same step find out at once, and not by waiting for each other.
//
// Memory of a group of n ranks: [n] Arrival, [n][2] slots; of messages [n][n] Channel, [n][n][4] pieces.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

#include "parallel.h"
#include "vector.h"

namespace shoal {

// One rank's side of a group; library.py has the same.
struct Member {
    char *arrivals, *slots, *channels, *pieces;
    int32_t* aborted;      // of the whole replica: not 0: every wait ends
    int32_t rank, size;
    int64_t slot_bytes, piece_bytes;
    int64_t limit_ns;      // of a wait
    int64_t spin_ns;       // before a wait gives its core away
    uint64_t num_calls;
    uint64_t tag;          // of the step
    int32_t culprit;       // the rank that was waited for, or had another tag
};

enum Outcome : int { kDone = 0, kLate = 1, kAborted = 2, kOther = 3 };

struct alignas(64) Arrival {
    std::atomic<uint64_t> num_calls;
    std::atomic<uint64_t> tags[2];
};

struct Channel {
    alignas(64) std::atomic<uint64_t> sent;
    alignas(64) std::atomic<uint64_t> taken;
    alignas(64) int64_t bytes[4];
};

constexpr int kMaxRanks = 64;
constexpr uint64_t kPieces = 4;  // that may wait between two ranks

// Spins, then lets others have the core, then sleeps: with fewer cores than ranks the one that is waited for needs it.
template <class Condition>
Outcome wait_until(const Member& m, Condition&& holds) {
    using Clock = std::chrono::steady_clock;
    constexpr int64_t kYieldNs = 2'000'000;
    if (holds()) return kDone;
    const auto began = Clock::now();
    for (;;) {
        for (int round = 0; round < 32; ++round) {
            if (holds()) return kDone;
            relax();
        }
        const int64_t waited = std::chrono::nanoseconds(Clock::now() - began).count();
        if (waited < m.spin_ns) continue;
        if (__atomic_load_n(m.aborted, __ATOMIC_RELAXED)) return kAborted;
        if (waited > m.limit_ns) return kLate;
        if (waited < kYieldNs) sched_yield();
        else std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
}

inline char* slot_of(const Member& m, int rank, uint64_t call) {
    return m.slots + (size_t(rank) * 2 + call % 2) * m.slot_bytes;
}

// This rank's part is in its slot; returns when everyone's is. `kind` and `bytes` must be everyone's.
inline Outcome meet(Member& m, uint64_t kind, uint64_t bytes) {
    const uint64_t call = m.num_calls;
    const uint64_t tag = m.tag * 0x9E3779B97F4A7C15u ^ kind << 56 ^ bytes;
    auto* arrivals = (Arrival*)m.arrivals;
    arrivals[m.rank].tags[call % 2].store(tag, std::memory_order_relaxed);
    arrivals[m.rank].num_calls.store(call, std::memory_order_release);
    for (int rank = 0; rank < m.size; ++rank) {
        const auto& other = arrivals[rank];
        const Outcome outcome =
            wait_until(m, [&] { return other.num_calls.load(std::memory_order_acquire) >= call; });
        m.culprit = rank;
        if (outcome) return outcome;
        if (other.tags[call % 2].load(std::memory_order_relaxed) != tag) return kOther;
    }
    return kDone;
}

// x becomes the sum of all ranks' x.
template <class T>
Outcome all_reduce(Member& m, T* x, int64_t count) {
    const int64_t most = m.slot_bytes / sizeof(T);
    do {
        const int64_t piece = std::min(count, most);
        ++m.num_calls;
        std::memcpy(slot_of(m, m.rank, m.num_calls), x, piece * sizeof(T));
        if (const Outcome outcome = meet(m, 1 + sizeof(T), count * sizeof(T))) return outcome;
        const T* parts[kMaxRanks];
        for (int rank = 0; rank < m.size; ++rank) {
            parts[rank] = rank == m.rank ? x : (const T*)slot_of(m, rank, m.num_calls);
        }
        const auto sum = [&](int64_t at) {
            Eight all = load_eight(parts[0] + at);
            for (int rank = 1; rank < m.size; ++rank) all += load_eight(parts[rank] + at);
            return all;
        };
        int64_t i = 0;
        for (; i + 8 <= piece; i += 8) store_eight(x + i, sum(i));
        if (i < piece) {
            T rest[kMaxRanks][8] = {};
            for (int rank = 0; rank < m.size; ++rank) {
                std::memcpy(rest[rank], parts[rank] + i, (piece - i) * sizeof(T));
                parts[rank] = rest[rank] - i;
            }
            T last[8];
            store_eight(last, sum(i));
            std::memcpy(x + i, last, (piece - i) * sizeof(T));
        }
        x += piece, count -= piece;
    } while (count > 0);
    return kDone;
}

// Rows of `widths[rank]` bytes each become rows of all ranks' bytes, one behind the other.
inline Outcome all_gather(Member& m, const char* x, int64_t rows, const int64_t* widths, char* out) {
    const int64_t widest = *std::max_element(widths, widths + m.size), most = m.slot_bytes / widest;
    int64_t whole = 0;
    for (int rank = 0; rank < m.size; ++rank) whole += widths[rank];
    do {
        const int64_t piece = std::min(rows, most);
        ++m.num_calls;
        std::memcpy(slot_of(m, m.rank, m.num_calls), x, piece * widths[m.rank]);
        if (const Outcome outcome = meet(m, 1, rows * whole)) return outcome;
        char* to = out;
        for (int rank = 0; rank < m.size; to += widths[rank++]) {
            const char* from = rank == m.rank ? x : slot_of(m, rank, m.num_calls);
            for (int64_t row = 0; row < piece; ++row) {
                std::memcpy(to + row * whole, from + row * widths[rank], widths[rank]);
            }
        }
        x += piece * widths[m.rank], out += piece * whole, rows -= piece;
    } while (rows > 0);
    return kDone;
}

inline Channel& channel(const Member& m, int from, int to) { return ((Channel*)m.channels)[from * m.size + to]; }
inline char* piece_of(const Member& m, int from, int to, uint64_t number) {
    return m.pieces + ((size_t(from) * m.size + to) * kPieces + number % kPieces) * m.piece_bytes;
}

// Returns when all is written; the other rank need not have read it.
inline Outcome send(Member& m, const char* x, int64_t bytes, int to) {
    Channel& way = channel(m, m.rank, to);
    m.culprit = to;
    do {
        const uint64_t number = way.sent.load(std::memory_order_relaxed);
        const Outcome outcome =
            wait_until(m, [&] { return number - way.taken.load(std::memory_order_acquire) < kPieces; });
        if (outcome) return outcome;
        const int64_t piece = std::min(bytes, m.piece_bytes);
        way.bytes[number % kPieces] = bytes;
        std::memcpy(piece_of(m, m.rank, to, number), x, piece);
        way.sent.store(number + 1, std::memory_order_release);
        x += piece, bytes -= piece;
    } while (bytes > 0);
    return kDone;
}

inline Outcome receive(Member& m, char* x, int64_t bytes, int from) {
    Channel& way = channel(m, from, m.rank);
    m.culprit = from;
    do {
        const uint64_t number = way.taken.load(std::memory_order_relaxed);
        const Outcome outcome = wait_until(m, [&] { return way.sent.load(std::memory_order_acquire) > number; });
        if (outcome) return outcome;
        if (way.bytes[number % kPieces] != bytes) return kOther;
        const int64_t piece = std::min(bytes, m.piece_bytes);
        std::memcpy(x, piece_of(m, from, m.rank, number), piece);
        way.taken.store(number + 1, std::memory_order_release);
        x += piece, bytes -= piece;
    } while (bytes > 0);
    return kDone;
}

}  // namespace shoal
