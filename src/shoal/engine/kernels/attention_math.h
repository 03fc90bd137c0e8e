// The two products of attention, of a tile of queries with a chunk of keys, and of its weights with the chunk's values:
// on any processor, and on the matrix unit (AMX) of x86 processors. See attention.h for how keys and values lie.
#pragma once

#include <algorithm>

#include "linear.h"
#include "vector.h"

namespace shoal {

constexpr int kLanes = 16, kTiles = 8, kChunk = 128, kMaxHead = 256, kMaxUnit = 32;

enum Math : int { kFloat32 = 0, kBfloat16 = 1, kBfloat16Unit = 2 };

struct Attention {
    int32_t num_heads, num_kv_heads, head_size, block_tokens;
    int32_t math;
    int32_t num_threads;        // that a context may be shared by
    float epsilon;              // of the norms
    int32_t num_shards, shard;  // keys and values of position p are on shard p % num_shards; this one is `shard`
    // Of a sequence's first `count` tokens, those that are on this shard: also the place there of token `count`.
    int32_t here(int32_t count) const { return (count + num_shards - 1 - shard) / num_shards; }
    int32_t group() const { return std::min(block_tokens, 16); }
    int32_t unit() const { return std::min(block_tokens, kMaxUnit); }  // tokens whose values are multiplied at once
    int32_t per_kv_head() const { return num_heads / num_kv_heads; }
    int32_t row_values() const { return (num_heads + 2 * num_kv_heads) * head_size; }
    int32_t result_floats() const { return kLanes * (2 + head_size); }
};

// Where the keys of each group and the values of each unit of a chunk lie.
template <class T>
struct Pieces {
    const T* keys[kChunk / 8];
    const T* values[kChunk / 8];
};

// On any processor. Queries and weights are float32, whatever T is.
template <class T>
struct Plain {
    using Value = T;
    using Operand = float;
    static constexpr bool kPrecise = true;
    static constexpr int f = 4 / sizeof(T);

    Plain(const Attention&, int num_lanes) : num_lanes(num_lanes) {}

    void scores(const Attention& a, const float* q, const Pieces<T>& pieces, int num_tokens, float* s) const {
        for (int i = 0; i < num_tokens / a.group(); ++i) {
            if (a.group() == 8) multiply<8>(q, a.head_size, pieces.keys + i, 1, a.head_size, 8, s + 8 * i, kChunk);
            else multiply<16>(q, a.head_size, pieces.keys + i, 1, a.head_size, 16, s + 16 * i, kChunk);
        }
    }

    void weigh(const Attention& a, const float* p, const Pieces<T>& pieces, int num_tokens, float* sums) const {
        const int num_units = num_tokens / a.unit();
        const T* columns[kChunk / 8];
        for (int d = 0; d < a.head_size; d += 16) {
            for (int i = 0; i < num_units; ++i) columns[i] = pieces.values[i] + d * f;
            multiply<16>(p, kChunk, columns, num_units, a.unit(), a.head_size, sums + d, a.head_size);
        }
    }

    static void store(float* to, Floats low, Floats high) {
        shoal::store(to, low);
        shoal::store(to + 16, high);
    }

private:
    // out[lanes][n] = a[lanes][count · depth] · b[count][depth][n], rows of f-value cells of b stride cells apart.
    template <int n>
    void multiply(const float* a, int lda, const T* const* b, int count, int depth, int stride, float* out,
                  int ldo) const {
        for (int lane = 0; lane < num_lanes; lane += 4, a += 4 * lda, out += 4 * ldo) {
            switch (num_lanes - lane) {
                case 1: rows<n, 1>(a, lda, b, count, depth, stride, out, ldo); break;
                case 2: rows<n, 2>(a, lda, b, count, depth, stride, out, ldo); break;
                case 3: rows<n, 3>(a, lda, b, count, depth, stride, out, ldo); break;
                default: rows<n, 4>(a, lda, b, count, depth, stride, out, ldo);
            }
        }
    }

    template <int n, int lanes>
    static void rows(const float* a, int lda, const T* const* b, int count, int depth, int stride, float* out,
                     int ldo) {
        using Row = typename Vector<n>::Floats;
        using RowCells = typename Vector<n>::Cells;
        Row even[lanes] = {}, odd[lanes] = {};
        for (int i = 0; i < count; ++i, a += depth) {
            for (int k = 0; k < depth; k += 2) {
                Row first, second;
                if constexpr (f == 1) {
                    first = load<Row>(b[i] + k * stride);
                    second = load<Row>(b[i] + (k + 1) * stride);
                } else {
                    const auto cells = load<RowCells>(b[i] + k * stride);
                    first = (Row)(cells << 16);
                    second = (Row)(cells & 0xffff0000);
                }
                for (int lane = 0; lane < lanes; ++lane) {
                    even[lane] += first * a[lane * lda + k];
                    odd[lane] += second * a[lane * lda + k + 1];
                }
            }
        }
        for (int lane = 0; lane < lanes; ++lane) shoal::store(out + lane * ldo, even[lane] + odd[lane]);
    }

    int num_lanes;
};

#if defined(SHOAL_LINEAR) && defined(__AMX_BF16__)
#define SHOAL_ATTENTION_UNIT

// On the matrix unit: lanes are rows of A, cells are rows of B. Tiles 0 to 3 are results, of as many columns as a group
// has tokens; 4 and 5 are queries and keys, 6 and 7 weights and values.
struct MatrixUnit {
    using Value = bf16;
    using Operand = bf16;
    static constexpr bool kPrecise = false;  // weights are rounded to bfloat16

    MatrixUnit(const Attention& a, int num_lanes) : depth(a.head_size % 32 ? 16 : 32) {
        TileConfig config;
        for (int result = 0; result < 4; ++result) config.shape(result, num_lanes, a.group());
        config.shape(4, num_lanes, depth / 2), config.shape(5, depth / 2, a.group());
        config.shape(6, num_lanes, a.unit() / 2), config.shape(7, a.unit() / 2, a.group());
        _tile_loadconfig(&config);
    }
    ~MatrixUnit() { _tile_release(); }

    void scores(const Attention& a, const bf16* q, const Pieces<bf16>& pieces, int num_tokens, float* s) const {
        asm volatile("" ::: "memory");  // the tile instructions do not tell the compiler what they read
        const int num_groups = num_tokens / a.group();
        int i = 0;
        for (; i + 2 <= num_groups; i += 2) scores_of<2>(a, q, pieces.keys + i, s + i * a.group());
        if (i < num_groups) scores_of<1>(a, q, pieces.keys + i, s + i * a.group());
        asm volatile("" ::: "memory");
    }

    void weigh(const Attention& a, const bf16* p, const Pieces<bf16>& pieces, int num_tokens, float* sums) const {
        asm volatile("" ::: "memory");
        const int num_units = num_tokens / a.unit(), g = a.group();
        int d = 0;
        for (; d + 4 * g <= a.head_size; d += 4 * g) weigh_of<4>(a, p, pieces, num_units, d, sums + d);
        for (; d < a.head_size; d += g) weigh_of<1>(a, p, pieces, num_units, d, sums + d);
        asm volatile("" ::: "memory");
    }

    static void store(bf16* to, Floats low, Floats high) {
        shoal::store(to, _mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
    }

private:
    template <int count>
    static void zero() {
        _tile_zero(0);
        if constexpr (count >= 2) _tile_zero(1);
        if constexpr (count == 4) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }

    template <int count>
    static void store_results(float* to, int columns, int stride) {
        _tile_stored(0, to, stride);
        if constexpr (count >= 2) _tile_stored(1, to + columns, stride);
        if constexpr (count == 4) {
            _tile_stored(2, to + 2 * columns, stride);
            _tile_stored(3, to + 3 * columns, stride);
        }
    }

    template <int groups>
    void scores_of(const Attention& a, const bf16* q, const bf16* const* keys, float* s) const {
        const int g = a.group();
        zero<groups>();
        for (int d = 0; d < a.head_size; d += depth) {
            _tile_loadd(4, q + d, a.head_size * 2);
            _tile_loadd(5, keys[0] + d * g, g * 4);
            _tile_dpbf16ps(0, 4, 5);
            if constexpr (groups == 2) {
                _tile_loadd(5, keys[1] + d * g, g * 4);
                _tile_dpbf16ps(1, 4, 5);
            }
        }
        store_results<groups>(s, g, kChunk * 4);
    }

    template <int columns>
    void weigh_of(const Attention& a, const bf16* p, const Pieces<bf16>& pieces, int num_units, int d,
                  float* sums) const {
        const int unit = a.unit(), stride = a.head_size * 4, g = a.group();
        zero<columns>();
        for (int i = 0; i < num_units; ++i) {
            const bf16* values = pieces.values[i] + d * 2;
            _tile_loadd(6, p + i * unit, kChunk * 2);
            _tile_loadd(7, values, stride);
            _tile_dpbf16ps(0, 6, 7);
            if constexpr (columns == 4) {
                _tile_loadd(7, values + 2 * g, stride);
                _tile_dpbf16ps(1, 6, 7);
                _tile_loadd(7, values + 4 * g, stride);
                _tile_dpbf16ps(2, 6, 7);
                _tile_loadd(7, values + 6 * g, stride);
                _tile_dpbf16ps(3, 6, 7);
            }
        }
        store_results<columns>(sums, g, stride);
    }

    int depth;
};
#endif

}  // namespace shoal
