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

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define SHOAL_LINEAR

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "parallel.h"
#include "vector.h"

namespace shoal {

constexpr int kTile = 16;    // rows of an A tile, columns of a B tile
constexpr int kDepth = 32;   // values of k in a tile
constexpr int kBlock = 32;   // rows of W in a block
constexpr int kTileBytes = 1024;

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

inline bool have_matrix_unit() {
#ifdef __AMX_BF16__
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
    static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return granted;
#else
    return false;
#endif
}

#ifdef __AMX_BF16__
// What `_tile_loadconfig` reads: of each tile its rows, and the bytes of a row.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    void shape(int tile, int num_rows, int cells) {
        rows[tile] = static_cast<uint8_t>(num_rows);
        bytes[tile] = static_cast<uint16_t>(4 * cells);
    }
};
#endif

// Eight full tiles. Configured for each task: other libraries in the process configure the unit for themselves.
class Tiles {
public:
#ifdef __AMX_BF16__
    Tiles() {
        TileConfig config;
        for (int tile = 0; tile < 8; ++tile) config.shape(tile, kTile, kDepth / 2);
        if (have_matrix_unit()) _tile_loadconfig(&config);
    }
    ~Tiles() {
        if (have_matrix_unit()) _tile_release();
    }
#else
    Tiles() {}
#endif
};

inline __m512 load_bf16(const bf16* from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16));
}

inline void store_bf16(bf16* to, __m512 values) {
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(values));
}

inline bf16 round_to_bf16(float value) {
    return static_cast<bf16>(_mm_extract_epi16((__m128i)_mm_cvtneps_pbh(_mm_set_ss(value)), 0));
}

inline float widen(bf16 value) {
    const uint32_t bits = uint32_t{value} << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// e^x for x <= 0 and moderate x > 0: 2^n · p(f), relative error below 2e-7 (Cephes' polynomial).
inline __m512 exp_ps(__m512 x) {
    x = _mm512_max_ps(_mm512_min_ps(x, _mm512_set1_ps(88.0f)), _mm512_set1_ps(-87.3f));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    }
    p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

// out[0..depth) = x / rms(x) · weight, zeros behind k.
inline void norm_row(const bf16* x, const bf16* weight, float epsilon, int k, int depth, bf16* out) {
    __m512 squares = _mm512_setzero_ps();
    int i = 0;
    for (; i + 16 <= k; i += 16) { const __m512 v = load_bf16(x + i); squares = _mm512_fmadd_ps(v, v, squares); }
    float sum = _mm512_reduce_add_ps(squares);
    for (int j = i; j < k; ++j) sum += widen(x[j]) * widen(x[j]);
    const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(sum / k + epsilon));
    for (i = 0; i < depth; i += 16) {
        const __mmask16 mask = i + 16 <= k ? 0xffff : i < k ? (1u << (k - i)) - 1 : 0;
        const auto widened = [&](const bf16* p) {
            const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p + i));
            return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
        };
        store_bf16(out + i, _mm512_mul_ps(_mm512_mul_ps(widened(x), factor), widened(weight)));
    }
}

// int8 values are exact in bf16; their scale is applied to the sums. A byte is a sign and seven bits of magnitude, and the
// two bytes of its bf16 are looked up in tables of 128. Each 64 values lie as interleaving the two lookups takes them.
inline size_t packed_place(size_t value) {
    return value / 64 * 64 + value % 32 / 8 * 16 + value % 64 / 32 * 8 + value % 8;
}

struct Int8Tables {
    alignas(64) uint8_t low[128], high[128];

    Int8Tables() {
        for (int magnitude = 0; magnitude < 128; ++magnitude) {
            const bf16 wide = round_to_bf16(static_cast<float>(magnitude));
            low[magnitude] = static_cast<uint8_t>(wide), high[magnitude] = static_cast<uint8_t>(wide >> 8);
        }
    }
    static const Int8Tables& get() {
        static const Int8Tables tables;
        return tables;
    }
    bf16 widen(uint8_t byte) const { return low[byte & 127] | (high[byte & 127] | (byte & 128)) << 8; }
};

// `count` is a multiple of 64.
inline void widen_block(const uint8_t* from, int count, bf16* to) {
    const Int8Tables& tables = Int8Tables::get();
    const __m512i low0 = _mm512_load_si512(tables.low), low1 = _mm512_load_si512(tables.low + 64);
    const __m512i high0 = _mm512_load_si512(tables.high), high1 = _mm512_load_si512(tables.high + 64);
    const __m512i sign = _mm512_set1_epi8(-128);
    for (int i = 0; i < count; i += 64) {
        constexpr int kOrAnd = 0xf8;  // a | (b & c)
        const __m512i bytes = _mm512_load_si512(from + i);
        const __m512i low = _mm512_permutex2var_epi8(low0, bytes, low1);
        const __m512i magnitude = _mm512_permutex2var_epi8(high0, bytes, high1);
        const __m512i high = _mm512_ternarylogic_epi64(magnitude, bytes, sign, kOrAnd);
        _mm512_store_si512(to + i, _mm512_unpacklo_epi8(low, high));
        _mm512_store_si512(to + i + 32, _mm512_unpackhi_epi8(low, high));
    }
}

struct Job {
    const Linear& linear;
    const Call& call;
    const bf16* a;      // [rows rounded up, lda]
    int lda, depth;     // values per row of a; k rounded up
};

// Weights that the processor shall fetch meanwhile, a share in each step over k.
struct Ahead {
    const char* from;
    int bytes;  // per step
};

// Where a pass over a block finds it. Streamed: in memory; it is fetched a few steps ahead, and int8 widened on the way.
// Cached: fetched or widened before; what comes after this block is fetched meanwhile.
enum Source : int { kCached, kStreamed, kStreamedInt8 };

constexpr int kStepValues = kDepth * kBlock;

#ifdef __AMX_BF16__
// 16 or 32 rows (tiles of A) times one block of W into sums [rows][32].
template <int kTilesA, Source kSource>
void multiply_on_unit(const bf16* a, int lda, const void* weights, int depth, Ahead ahead, float* sums) {
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
    for (int k = 0; k < depth; k += kDepth, block += kStepValues, ahead.from += bytes) {
        for (int line = 0; line < bytes; line += 64) {
            _mm_prefetch(ahead.from + line, kSource == kCached ? _MM_HINT_T1 : _MM_HINT_T0);
        }
        if constexpr (kSource == kStreamedInt8) {
            block = widened[k / kDepth % 2];
            if (k + kDepth < depth) widen_block(ints += kStepValues, kStepValues, widened[(k / kDepth + 1) % 2]);
            asm volatile("" ::: "memory");
        }
        _tile_loadd(4, block, 64);
        _tile_loadd(5, block + kDepth * kTile, 64);
        _tile_loadd(6, a + k, lda * 2);
        _tile_dpbf16ps(0, 6, 4);
        _tile_dpbf16ps(1, 6, 5);
        if constexpr (kTilesA == 2) {
            _tile_loadd(7, a + size_t(kTile) * lda + k, lda * 2);
            _tile_dpbf16ps(2, 7, 4);
            _tile_dpbf16ps(3, 7, 5);
        }
    }
    _tile_stored(0, sums, kBlock * 4);
    _tile_stored(1, sums + kTile, kBlock * 4);
    if constexpr (kTilesA == 2) {
        _tile_stored(2, sums + kTile * kBlock, kBlock * 4);
        _tile_stored(3, sums + kTile * kBlock + kTile, kBlock * 4);
    }
    asm volatile("" ::: "memory");
}
#endif

// The same with vector instructions, 4 rows at a time; at most 32 rows.
inline void multiply_on_vectors(const bf16* a, int lda, const bf16* block, int depth, int rows, float* sums) {
    constexpr int kRows = 4;
    for (int first = 0; first < rows; first += kRows) {
        __m512 sum[kRows][2] = {};
        const bf16* weights = block;
        for (int k = 0; k < depth; k += kDepth, weights += kDepth * kBlock) {
            for (int pair = 0; pair < kDepth / 2; ++pair) {
                const auto* tile = (const __m512i*)weights + pair;
                for (int row = 0; row < kRows; ++row) {
                    int32_t both;
                    std::memcpy(&both, a + size_t(first + row) * lda + k + 2 * pair, sizeof both);
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

inline void multiply(const bf16* a, int lda, const void* weights, int depth, int rows, [[maybe_unused]] Source source,
                     [[maybe_unused]] Ahead ahead, float* sums) {
#ifdef __AMX_BF16__
    if (have_matrix_unit()) {
        constexpr std::array kOneTile{
            multiply_on_unit<1, kCached>, multiply_on_unit<1, kStreamed>, multiply_on_unit<1, kStreamedInt8>};
        constexpr std::array kTwoTiles{
            multiply_on_unit<2, kCached>, multiply_on_unit<2, kStreamed>, multiply_on_unit<2, kStreamedInt8>};
        return (rows > kTile ? kTwoTiles : kOneTile)[source](a, lda, weights, depth, ahead, sums);
    }
#endif
    multiply_on_vectors(a, lda, (const bf16*)weights, depth, rows, sums);
}

// Rows of a vocabulary often lie a multiple of the cache's own length apart; written through it they evict each other.
inline void store_float(float* to, __mmask16 mask, __m512 value, bool past_the_cache) {
    if (past_the_cache && mask == 0xffff && uintptr_t(to) % 64 == 0) _mm512_stream_ps(to, value);
    else _mm512_mask_storeu_ps(to, mask, value);
}

// One row of sums of block n .. n + 32 to its place.
inline void finish_row(const Job& job, int row, int n, const float* sums) {
    const Linear& linear = job.linear;
    const int width = job.call.epilogue == kSilu ? linear.n / 2 : linear.n;
    __m512 value[2];
    for (int half = 0; half < 2; ++half) {
        value[half] = _mm512_load_ps(sums + 16 * half);
        if (linear.scale) value[half] = _mm512_mul_ps(value[half], _mm512_loadu_ps(linear.scale + n + 16 * half));
        if (linear.bias) value[half] = _mm512_add_ps(value[half], _mm512_loadu_ps(linear.bias + n + 16 * half));
    }
    if (job.call.epilogue == kSilu) {
        const int column = n / 2;
        const __mmask16 mask = column + 16 <= width ? 0xffff : (1u << (width - column)) - 1;
        const __m512 one = _mm512_set1_ps(1), minus = _mm512_sub_ps(_mm512_setzero_ps(), value[0]);
        const __m512 sigmoid = _mm512_div_ps(one, _mm512_add_ps(one, exp_ps(minus)));
        const auto result = (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_mul_ps(value[0], sigmoid), value[1]));
        _mm256_mask_storeu_epi16((bf16*)job.call.out + size_t(row) * width + column, mask, result);
        return;
    }
    for (int half = 0; half < 2; ++half) {
        const int column = n + 16 * half;
        if (column >= width) return;
        const __mmask16 mask = column + 16 <= width ? 0xffff : (1u << (width - column)) - 1;
        if (job.call.epilogue == kFloat) {
            float* out = (float*)job.call.out + size_t(row) * width + column;
            store_float(out, mask, value[half], job.call.rows > kTile / 4);
            continue;
        }
        bf16* out = (bf16*)job.call.out + size_t(row) * width + column;
        if (job.call.epilogue == kAdd) {
            const __m512i before = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, out)), 16);
            value[half] = _mm512_add_ps(value[half], _mm512_castsi512_ps(before));
        }
        _mm256_mask_storeu_epi16(out, mask, (__m256i)_mm512_cvtneps_pbh(value[half]));
    }
}

// `next` is the block that this thread will most likely take next: it is brought into the second cache meanwhile, unless
// this one is streamed.
inline void run_block(const Job& job, int block, int next, int first_row, int end_row) {
    constexpr int kSoon = 8192;  // bytes: 4 steps of bf16, 8 of int8
    alignas(64) float sums[2 * kTile * kBlock];
    static thread_local std::vector<bf16> widened;
    const size_t values = size_t(job.depth) * kBlock;
    const size_t bytes = values * (job.linear.scale ? sizeof(int8_t) : sizeof(bf16));
    const auto* packed = (const char*)job.linear.packed;
    const char* weights = packed + block * bytes;
    const int steps = job.depth / kDepth, passes = (end_row - first_row + 2 * kTile - 1) / (2 * kTile);
    Ahead ahead{packed + next * bytes, round_up(static_cast<int>(bytes) / (passes * steps), 64)};
    Source source = kCached;
    if (passes == 1 && have_matrix_unit()) {
        source = job.linear.scale ? kStreamedInt8 : kStreamed;
        ahead.from = weights + kSoon;
    } else if (job.linear.scale) {
        if (widened.size() < values + 32) widened.resize(values + 32);
        auto* aligned = (bf16*)((uintptr_t(widened.data()) + 63) & ~uintptr_t{63});
        widen_block((const uint8_t*)weights, static_cast<int>(values), aligned);
        weights = (const char*)aligned;
    }
    for (int row = first_row; row < end_row; row += 2 * kTile, ahead.from += steps * ahead.bytes) {
        const bf16* a = job.a + size_t(row) * job.lda;
        const int rows = std::min(2 * kTile, end_row - row);
        multiply(a, job.lda, weights, job.depth, rows, source, ahead, sums);
        for (int r = 0; r < rows; ++r) finish_row(job, row + r, block * kBlock, sums + r * kBlock);
    }
}

// Rows of A as tiles need them: normed, k and rows padded. Memory behind the last row is read and not used.
inline void prepare_rows(const Linear& linear, const Call& call, int first, int end, int depth, bf16* to) {
    for (int row = first; row < end; ++row) {
        const bf16* x = call.x + size_t(row) * linear.k;
        bf16* out = to + size_t(row) * depth;
        if (call.norm) {
            norm_row(x, call.norm, linear.epsilon, linear.k, depth, out);
        } else {
            std::memcpy(out, x, linear.k * sizeof(bf16));
            std::memset(out + linear.k, 0, (depth - linear.k) * sizeof(bf16));
        }
    }
}

inline void linear(const Linear& linear, const Call& call) {
    static thread_local std::vector<bf16> scratch;
    Pool& pool = Pool::get();
    const int depth = round_up(linear.k, kDepth);
    Job job{linear, call, call.x, linear.k, depth};
    if (call.norm || depth != linear.k || call.rows % kTile) {
        scratch.resize(std::max(scratch.size(), size_t(round_up(call.rows, kTile)) * depth));
        bf16* a = scratch.data();
        job.a = a, job.lda = depth;
        const int tasks = call.rows <= 2 * kTile ? 1 : (call.rows + kTile - 1) / kTile;
        const int rows = (call.rows + tasks - 1) / tasks;
        pool.run(tasks, [&](int index, int) {
            prepare_rows(linear, call, index * rows, std::min(call.rows, (index + 1) * rows), depth, a);
        });
    }
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
        for (int block = first; block < end; ++block) {
            run_block(job, block, block + 1 < end ? block + 1 : of_next_task, first_row, end_row);
        }
        _mm_sfence();  // streamed results are seen before the task is called done
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
