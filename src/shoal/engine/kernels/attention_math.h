// The two products of attention, of a tile of queries with a chunk of keys, and of its weights with the chunk's values:
// on any processor, and on the matrix unit (AMX) of x86 processors. See attention.h for how keys and values lie.
#pragma once

#include <algorithm>

#include "linear.h"
#include "vector.h"

namespace shoal {

constexpr int kLanes = 16, kTiles = 4, kChunk = 128, kMaxHead = 256, kMaxUnit = 32;

enum Math : int { kFloat32 = 0, kBfloat16 = 1, kBfloat16Unit = 2 };

struct Attention {
    int32_t num_heads, num_kv_heads, head_size, block_tokens;
    int32_t math;
    int32_t num_threads;  // that a context may be shared by
    float epsilon;        // of the norms
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

// On the matrix unit: lanes are rows of A, cells are rows of B. Scores use tiles 0 to 3, weighted sums 4 to 7.
struct MatrixUnit {
    using Value = bf16;
    using Operand = bf16;

    MatrixUnit(const Attention& a, int num_lanes) : depth(a.head_size % 32 ? 16 : 32) {
        TileConfig config;
        config.shape(0, num_lanes, a.group()), config.shape(1, num_lanes, a.group());
        config.shape(2, num_lanes, depth / 2), config.shape(3, depth / 2, a.group());
        config.shape(4, num_lanes, 16), config.shape(5, num_lanes, 16);
        config.shape(6, num_lanes, a.unit() / 2), config.shape(7, a.unit() / 2, 16);
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
        const int num_units = num_tokens / a.unit();
        int d = 0;
        for (; d + 32 <= a.head_size; d += 32) weigh_of<2>(a, p, pieces, num_units, d, sums + d);
        if (d < a.head_size) weigh_of<1>(a, p, pieces, num_units, d, sums + d);
        asm volatile("" ::: "memory");
    }

    static void store(bf16* to, Floats low, Floats high) {
        shoal::store(to, _mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
    }

private:
    template <int groups>
    void scores_of(const Attention& a, const bf16* q, const bf16* const* keys, float* s) const {
        const int g = a.group();
        _tile_zero(0);
        if constexpr (groups == 2) _tile_zero(1);
        for (int d = 0; d < a.head_size; d += depth) {
            _tile_loadd(2, q + d, a.head_size * 2);
            _tile_loadd(3, keys[0] + d * g, g * 4);
            _tile_dpbf16ps(0, 2, 3);
            if constexpr (groups == 2) {
                _tile_loadd(3, keys[1] + d * g, g * 4);
                _tile_dpbf16ps(1, 2, 3);
            }
        }
        _tile_stored(0, s, kChunk * 4);
        if constexpr (groups == 2) _tile_stored(1, s + g, kChunk * 4);
    }

    template <int columns>
    void weigh_of(const Attention& a, const bf16* p, const Pieces<bf16>& pieces, int num_units, int d,
                  float* sums) const {
        const int unit = a.unit(), stride = a.head_size * 4;
        _tile_zero(4);
        if constexpr (columns == 2) _tile_zero(5);
        for (int i = 0; i < num_units; ++i) {
            _tile_loadd(6, p + i * unit, kChunk * 2);
            _tile_loadd(7, pieces.values[i] + d * 2, stride);
            _tile_dpbf16ps(4, 6, 7);
            if constexpr (columns == 2) {
                _tile_loadd(7, pieces.values[i] + (d + 16) * 2, stride);
                _tile_dpbf16ps(5, 6, 7);
            }
        }
        _tile_stored(4, sums, stride);
        if constexpr (columns == 2) _tile_stored(5, sums + 16, stride);
    }

    int depth;
};
#endif

}  // namespace shoal
