// x · W^T in bfloat16 for weights that were packed once, on the matrix unit (AMX) of x86 processors or else on AVX-512
// BF16, with what surrounds it in a transformer layer: RMS norm before, residual or SiLU after. Weights are bfloat16, or
// int8 with a scale per row of W.
//
// Packed layout: [N / 32][K / 32][2][16][16][2]: blocks of 32 rows of W; in a block, per 32 values of k, two tiles of
// 16 rows; in a tile, 16 pairs of k, each with its value of the 16 rows side by side, as TDPBF16PS takes them. N and K
// are padded with zeros. For SiLU, tile 0 of a block holds 16 gate rows, tile 1 the up rows that belong to them.
//
// A row of the result does not depend on other rows nor on their number: its sums run over k in one order.
#pragma once

#include "tiles.h"

#ifdef SHOAL_LINEAR

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "parallel.h"
#include "vector.h"

namespace shoal {

enum Epilogue : int { kStore = 0, kAdd = 1, kSilu = 2, kFloat = 3 };

struct Linear {
    const void* packed;   // bf16 or int8
    const float* scale;   // [N padded] of int8 weights, else null
    const float* bias;    // [N], or null
    int32_t n, k;         // rows and columns of W; n counts gate and up together
    float epsilon;        // of the norm before it
};

struct Call {
    const bf16* x;        // [rows, k]
    const bf16* norm;     // [k] weight of an RMS norm over x, or null
    int32_t rows;
    int32_t epilogue;
    void* out;            // bf16 [rows, n], with kSilu [rows, n / 2]; with kFloat float; kAdd adds to what is there
};

inline int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }

// x / (1 + e^-x), relative error below 1e-6.
inline __m512 silu(__m512 x) {
    const __m512 power = _mm512_min_ps(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f)), _mm512_set1_ps(126));
    const __m512 below = _mm512_add_ps((__m512)exp2((Floats)power), _mm512_set1_ps(1));
    const __m512 guess = _mm512_rcp14_ps(below);
    return _mm512_mul_ps(x, _mm512_mul_ps(guess, _mm512_fnmadd_ps(guess, below, _mm512_set1_ps(2))));
}

// Rows of A as tiles take them: [rows / 16][depth / 32][16][32] values.
inline bf16* row_of(bf16* tiles, int row, int depth) {
    return tiles + size_t(row / kTile) * kTile * depth + row % kTile * kDepth;
}

// x, or x / rms(x) · norm, to a row of A; zeros behind k.
inline void prepare_row(const bf16* x, const bf16* norm, float epsilon, int k, int depth, bf16* out) {
    const auto read = [&](const bf16* from, int i) {
        return i + kDepth <= k ? _mm512_loadu_si512(from + i) : _mm512_maskz_loadu_epi16((1u << (k - i)) - 1, from + i);
    };
    constexpr int kNext = kTile * kDepth;
    if (!norm) {
        for (int i = 0; i < depth; i += kDepth, out += kNext) _mm512_store_si512(out, read(x, i));
        return;
    }
    __m512 low = _mm512_setzero_ps(), high = _mm512_setzero_ps();
    for (int i = 0; i < depth; i += kDepth) {
        const Wide values(read(x, i));
        low = _mm512_fmadd_ps(values.low, values.low, low), high = _mm512_fmadd_ps(values.high, values.high, high);
    }
    const float mean = _mm512_reduce_add_ps(_mm512_add_ps(low, high)) / k;
    const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(mean + epsilon));
    for (int i = 0; i < depth; i += kDepth, out += kNext) {
        const Wide values(read(x, i)), weights(read(norm, i));
        const __m512 first = _mm512_mul_ps(_mm512_mul_ps(values.low, factor), weights.low);
        const __m512 second = _mm512_mul_ps(_mm512_mul_ps(values.high, factor), weights.high);
        _mm512_store_si512(out, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    }
}

struct Job {
    const Linear& linear;
    const Call& call;
    bf16* a;    // tiles of rows, the first is first_row
    int depth;  // k rounded up
    int first_row = 0;
};

// Weights that the processor shall fetch meanwhile, a share in each step over k.
struct Ahead {
    const char* from;
    int bytes;  // per step
};

// Where a pass over a block finds it. Streamed: in memory; it is fetched a few steps ahead, and int8 widened on the way.
// Cached: fetched or widened before, and stays in the first cache, past which rows go; what comes after this block is
// fetched meanwhile.
enum Source : int { kCached, kStreamed, kStreamedInt8 };

constexpr int kStepValues = kDepth * kBlock;
constexpr int kPassRows = 2 * kTile;

// Rows of a vocabulary often lie a multiple of the cache's own length apart; written through it they evict each other.
inline void store_float(float* to, __mmask16 mask, __m512 value, bool past_the_cache) {
    if (past_the_cache && mask == 0xffff && uintptr_t(to) % 64 == 0) _mm512_stream_ps(to, value);
    else _mm512_mask_storeu_ps(to, mask, value);
}

// Sums of rows [row, end) and columns [n, n + 32) of W to their place.
template <int kEpilogue>
void finish_rows(const Job& job, int row, int end, int n, const float* sums) {
    const Linear& linear = job.linear;
    const Call& call = job.call;
    const int width = kEpilogue == kSilu ? linear.n / 2 : linear.n, column = kEpilogue == kSilu ? n / 2 : n;
    const int left = width - column;
    const auto mask = static_cast<__mmask32>(left >= kBlock ? ~0u : (1u << left) - 1);
    for (; row < end; ++row, sums += kBlock) {
        __m512 low = _mm512_load_ps(sums), high = _mm512_load_ps(sums + kTile);
        if (linear.scale) {
            low = _mm512_mul_ps(low, _mm512_loadu_ps(linear.scale + n));
            high = _mm512_mul_ps(high, _mm512_loadu_ps(linear.scale + n + kTile));
        }
        if (linear.bias) {
            low = _mm512_add_ps(low, _mm512_loadu_ps(linear.bias + n));
            high = _mm512_add_ps(high, _mm512_loadu_ps(linear.bias + n + kTile));
        }
        if constexpr (kEpilogue == kFloat) {
            float* out = (float*)call.out + size_t(row) * width + column;
            store_float(out, mask, low, call.rows > kTile / 4);
            if (left > kTile) store_float(out + kTile, mask >> kTile, high, call.rows > kTile / 4);
            continue;
        }
        bf16* out = (bf16*)call.out + size_t(row) * width + column;
        if constexpr (kEpilogue == kSilu) {
            const auto result = (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(silu(low), high));
            _mm256_mask_storeu_epi16(out, static_cast<__mmask16>(mask), result);
            continue;
        }
        if constexpr (kEpilogue == kAdd) {
            const Wide before(_mm512_maskz_loadu_epi16(mask, out));
            low = _mm512_add_ps(low, before.low), high = _mm512_add_ps(high, before.high);
        }
        _mm512_mask_storeu_epi16(out, mask, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
}

// Sums on their way to their place: those of a pass are finished beside the products of the next one.
class Sums {
public:
    explicit Sums(const Job& job) : job_(job) {}

    // Of the next pass; [32][32].
    float* next() { return sums_[1 - pending_]; }

    // They are there.
    void add(int row, int end, int n) {
        finish(kPassRows);
        pending_ = 1 - pending_;
        row_ = first_ = row, end_ = end, n_ = n;
    }

    void finish(int num_rows) {
        const int row = row_, end = std::min(end_, row + num_rows);
        if (row == end) return;
        row_ = end;
        constexpr std::array kFinish{finish_rows<kStore>, finish_rows<kAdd>, finish_rows<kSilu>, finish_rows<kFloat>};
        kFinish[job_.call.epilogue](job_, row, end, n_, sums_[pending_] + (row - first_) * kBlock);
    }

private:
    const Job& job_;
    int pending_ = 0, first_ = 0, row_ = 0, end_ = 0, n_ = 0;
    alignas(64) float sums_[2][kPassRows * kBlock];
};

#ifdef __AMX_BF16__
template <Source kSource>
inline void load_rows_6(const bf16* a) {
    if constexpr (kSource == kCached) _tile_stream_loadd(6, a, 64);
    else _tile_loadd(6, a, 64);
}
template <Source kSource>
inline void load_rows_7(const bf16* a) {
    if constexpr (kSource == kCached) _tile_stream_loadd(7, a, 64);
    else _tile_loadd(7, a, 64);
}

// 16 or 32 rows (tiles of A) times one block of W.
template <int kTilesA, Source kSource>
void multiply_on_unit(const bf16* a, const void* weights, int depth, Ahead ahead, Sums& sums) {
    alignas(64) bf16 widened[2][kStepValues];
    const auto* block = (const bf16*)weights;
    const auto* ints = (const uint8_t*)weights;
    if constexpr (kSource == kStreamedInt8) widen_block(ints, kStepValues, widened[0]);
    asm volatile("" ::: "memory");  // the tile instructions do not tell the compiler what they read
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTilesA == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    constexpr int kValueBytes = kSource == kStreamedInt8 ? sizeof(int8_t) : sizeof(bf16);
    const int bytes = kSource == kCached ? ahead.bytes : kStepValues * kValueBytes;
    const int rows_of_step = (kPassRows * kDepth + depth - 1) / depth;
    const bf16* second = a + size_t(kTile) * depth;
    for (int k = 0; k < depth; k += kDepth, block += kStepValues, a += kTile * kDepth, second += kTile * kDepth) {
        for (int line = 0; line < bytes; line += 64) {
            _mm_prefetch(ahead.from + line, kSource == kCached ? _MM_HINT_T1 : _MM_HINT_T0);
        }
        ahead.from += bytes;
        if constexpr (kSource == kStreamedInt8) {
            block = widened[k / kDepth % 2];
            if (k + kDepth < depth) widen_block(ints += kStepValues, kStepValues, widened[(k / kDepth + 1) % 2]);
            asm volatile("" ::: "memory");
        }
        _tile_loadd(4, block, 64);
        _tile_loadd(5, block + kDepth * kTile, 64);
        load_rows_6<kSource>(a);
        _tile_dpbf16ps(0, 6, 4);
        _tile_dpbf16ps(1, 6, 5);
        if constexpr (kTilesA == 2) {
            load_rows_7<kSource>(second);
            _tile_dpbf16ps(2, 7, 4);
            _tile_dpbf16ps(3, 7, 5);
        }
        sums.finish(rows_of_step);
    }
    float* to = sums.next();
    _tile_stored(0, to, kBlock * 4);
    _tile_stored(1, to + kTile, kBlock * 4);
    if constexpr (kTilesA == 2) {
        _tile_stored(2, to + kTile * kBlock, kBlock * 4);
        _tile_stored(3, to + kTile * kBlock + kTile, kBlock * 4);
    }
    asm volatile("" ::: "memory");
}
#endif

// The same with vector instructions, 4 rows at a time; at most 32 rows.
inline void multiply_on_vectors(const bf16* a, const bf16* block, int depth, int rows, float* sums) {
    constexpr int kRows = 4;
    for (int first = 0; first < rows; first += kRows) {
        __m512 sum[kRows][2] = {};
        const bf16* weights = block;
        const bf16* from = a + size_t(first / kTile) * kTile * depth + first % kTile * kDepth;
        for (int k = 0; k < depth; k += kDepth, weights += kStepValues, from += kTile * kDepth) {
            for (int pair = 0; pair < kDepth / 2; ++pair) {
                const auto* tile = (const __m512i*)weights + pair;
                for (int row = 0; row < kRows; ++row) {
                    int32_t both;
                    std::memcpy(&both, from + row * kDepth + 2 * pair, sizeof both);
                    const __m512bh values = (__m512bh)_mm512_set1_epi32(both);
                    sum[row][0] = _mm512_dpbf16_ps(sum[row][0], values, (__m512bh)_mm512_loadu_si512(tile));
                    sum[row][1] = _mm512_dpbf16_ps(sum[row][1], values, (__m512bh)_mm512_loadu_si512(tile + kTile));
                }
            }
        }
        for (int row = 0; row < kRows; ++row) {
            _mm512_store_ps(sums + (first + row) * kBlock, sum[row][0]);
            _mm512_store_ps(sums + (first + row) * kBlock + kTile, sum[row][1]);
        }
    }
}

inline void multiply(const bf16* a, const void* weights, int depth, int rows, [[maybe_unused]] Source source,
                     [[maybe_unused]] Ahead ahead, Sums& sums) {
#ifdef __AMX_BF16__
    if (have_matrix_unit()) {
        constexpr std::array kOneTile{
            multiply_on_unit<1, kCached>, multiply_on_unit<1, kStreamed>, multiply_on_unit<1, kStreamedInt8>};
        constexpr std::array kTwoTiles{
            multiply_on_unit<2, kCached>, multiply_on_unit<2, kStreamed>, multiply_on_unit<2, kStreamedInt8>};
        return (rows > kTile ? kTwoTiles : kOneTile)[source](a, weights, depth, ahead, sums);
    }
#endif
    multiply_on_vectors(a, (const bf16*)weights, depth, rows, sums.next());
}

inline size_t block_bytes(const Linear& linear) {
    return size_t(round_up(linear.k, kDepth)) * kBlock * (linear.scale ? sizeof(int8_t) : sizeof(bf16));
}

// Memory of this thread, in whole lines.
struct alignas(64) Line {
    bf16 values[kDepth];
};
inline bf16* grown(std::vector<Line>& lines, size_t values) {
    if (lines.size() * kDepth < values) lines.resize((values + kDepth - 1) / kDepth);
    return lines[0].values;
}

// `next` is what this thread will most likely take next: it is brought into the second cache meanwhile, unless this
// block is streamed.
inline void run_block(const Job& job, int block, const char* next, int first_row, int end_row, Sums& sums) {
    constexpr int kSoon = 8192;  // bytes: 4 steps of bf16, 8 of int8
    static thread_local std::vector<Line> widened;
    const size_t bytes = block_bytes(job.linear);
    const char* weights = (const char*)job.linear.packed + block * bytes;
    const int steps = job.depth / kDepth, passes = (end_row - first_row + kPassRows - 1) / kPassRows;
    Ahead ahead{next, round_up(static_cast<int>(bytes) / (passes * steps), 64)};
    Source source = kCached;
    if (passes == 1 && have_matrix_unit()) {
        source = job.linear.scale ? kStreamedInt8 : kStreamed;
        ahead.from = weights + kSoon;
    } else if (job.linear.scale) {
        const int values = job.depth * kBlock;
        bf16* wide = grown(widened, values);
        widen_block((const uint8_t*)weights, values, wide);
        weights = (const char*)wide;
    }
    for (int row = first_row; row < end_row; row += kPassRows, ahead.from += steps * ahead.bytes) {
        const bf16* a = job.a + size_t(row - job.first_row) * job.depth;
        const int end = std::min(row + kPassRows, end_row);
        multiply(a, weights, job.depth, end - row, source, ahead, sums);
        sums.add(row, end, block * kBlock);
    }
}

// `after`: what is taken next, after the last block.
inline void run_blocks(const Job& job, int first, int end, const char* after, int first_row, int end_row) {
    Sums sums(job);
    const size_t bytes = block_bytes(job.linear);
    for (int block = first; block < end; ++block) {
        const char* next = block + 1 < end ? (const char*)job.linear.packed + (block + 1) * bytes : after;
        run_block(job, block, next, first_row, end_row, sums);
    }
    sums.finish(kPassRows);
    _mm_sfence();  // streamed results are seen before the task is called done
}

inline void prepare_rows(const Job& job, int first, int end) {
    const Linear& linear = job.linear;
    for (int row = first; row < end; ++row) {
        const bf16* x = job.call.x + size_t(row) * linear.k;
        bf16* to = row_of(job.a, row - job.first_row, job.depth);
        prepare_row(x, job.call.norm, linear.epsilon, linear.k, job.depth, to);
    }
}

inline bf16* rows_of_thread(int rows, int depth) {
    static thread_local std::vector<Line> tiles;
    return grown(tiles, size_t(round_up(rows, kPassRows)) * depth);  // a pass may read rows that nobody looks at
}

// Rows [first, end) of the call, by this thread alone. `after`: weights that it will take next.
inline void linear_rows(const Linear& linear, const Call& call, int first, int end, const void* after) {
    const int depth = round_up(linear.k, kDepth), blocks = (linear.n + kBlock - 1) / kBlock;
    const Job job{linear, call, rows_of_thread(end - first, depth), depth, first};
    prepare_rows(job, first, end);
    const Tiles tiles;
    run_blocks(job, 0, blocks, (const char*)after, first, end);
}

// Rows that a thread takes for itself, when there are so many for each; 0: there are not, and threads share rows.
inline int own_rows(int rows) {
    constexpr int kLeast = 128, kMost = 384;
    const int threads = Pool::get().num_threads();
    if (rows < kLeast * threads) return 0;
    const int rounds = (rows + threads * kMost - 1) / (threads * kMost);
    return round_up((rows + threads * rounds - 1) / (threads * rounds), kPassRows);
}

inline void linear(const Linear& linear, const Call& call) {
    Pool& pool = Pool::get();
    if (const int own = own_rows(call.rows)) {
        pool.run((call.rows + own - 1) / own, [&](int index, int) {
            linear_rows(linear, call, index * own, std::min(call.rows, (index + 1) * own), linear.packed);
        });
        return;
    }
    const int depth = round_up(linear.k, kDepth);
    const Job job{linear, call, rows_of_thread(call.rows, depth), depth};
    const int tasks = call.rows <= kPassRows ? 1 : (call.rows + kTile - 1) / kTile;
    const int rows = (call.rows + tasks - 1) / tasks;
    pool.run(tasks, [&](int index, int) {
        prepare_rows(job, index * rows, std::min(call.rows, (index + 1) * rows));
    });
    const int blocks = (linear.n + kBlock - 1) / kBlock;
    constexpr int kRowsOfTask = 256;
    const int row_tasks = (call.rows + kRowsOfTask - 1) / kRowsOfTask;
    const int per_task = std::max(1, std::min(blocks / (4 * pool.num_threads()), (512 << 10) / (depth * kBlock * 2)));
    const int block_tasks = (blocks + per_task - 1) / per_task;
    pool.run(block_tasks * row_tasks, [&](int index, int) {
        const Tiles tiles;
        const int first = index % block_tasks * per_task, end = std::min(blocks, first + per_task);
        const int first_row = index / block_tasks * kRowsOfTask, end_row = std::min(call.rows, first_row + kRowsOfTask);
        const int of_next_task = (index + pool.num_threads()) % block_tasks * per_task;
        const char* after = (const char*)linear.packed + of_next_task * block_bytes(linear);
        run_blocks(job, first, end, after, first_row, end_row);
    });
}

// Rows of W, as they were before they were packed: an embedding's vectors. Not of a gated W.
// False: an id is not that of a row.
inline bool rows(const Linear& linear, const int64_t* ids, int count, bf16* out) {
    const int depth = round_up(linear.k, kDepth);
    for (int i = 0; i < count; ++i, out += linear.k) {
        if (ids[i] < 0 || ids[i] >= linear.n) return false;
        const size_t block = ids[i] / kBlock * size_t(depth) * kBlock, tile = ids[i] % kBlock / kTile * kDepth * kTile;
        const size_t first = block + tile + ids[i] % kTile * 2;
        for (int k = 0; k < linear.k; ++k) {
            const size_t at = first + size_t(k / kDepth) * kDepth * kBlock + k % kDepth / 2 * kDepth + k % 2;
            if (linear.scale) {
                const bf16 whole = Int8Tables::get().widen(((const uint8_t*)linear.packed)[packed_place(at)]);
                out[k] = round_to_bf16(widen(whole) * linear.scale[ids[i]]);
            }
            else out[k] = ((const bf16*)linear.packed)[at];
        }
    }
    return true;
}

}  // namespace shoal

#endif
