// What the linear layers' processors have: the matrix unit (AMX) with its tiles, and AVX-512 BF16; between these and plain
// numbers, conversions of bfloat16 and of int8 weights.
#pragma once

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define SHOAL_LINEAR

#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

#include "vector.h"

namespace shoal {

constexpr int kTile = 16;    // rows of an A tile, columns of a B tile
constexpr int kDepth = 32;   // values of k in a tile
constexpr int kBlock = 32;   // rows of W in a block

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

inline bf16 round_to_bf16(float value) {
    return static_cast<bf16>(_mm_extract_epi16((__m128i)_mm_cvtneps_pbh(_mm_set_ss(value)), 0));
}

inline float widen(bf16 value) {
    const uint32_t bits = uint32_t{value} << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// 32 values as floats.
struct Wide {
    __m512 low, high;
    explicit Wide(__m512i values)
        : low(widened(_mm512_castsi512_si256(values))), high(widened(_mm512_extracti64x4_epi64(values, 1))) {}

private:
    static __m512 widened(__m256i values) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
    }
};

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

}  // namespace shoal

#endif
