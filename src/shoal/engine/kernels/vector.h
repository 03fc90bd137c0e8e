// Vectors of any width on any processor, as the compiler's extension has them; a few instructions of our own choice.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace shoal {

using bf16 = uint16_t;

template <int n>
struct Vector {
    typedef float Floats __attribute__((vector_size(4 * n)));
    typedef uint32_t Cells __attribute__((vector_size(4 * n)));
};
using Floats = Vector<16>::Floats;
using Cells = Vector<16>::Cells;

template <class V, class T>
inline V load(const T* from) {
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class V, class T>
inline void store(T* to, const V& value) { std::memcpy(to, &value, sizeof value); }

using Eight = Vector<8>::Floats;
typedef bf16 EightShorts __attribute__((vector_size(16)));
typedef uint32_t EightCells __attribute__((vector_size(32)));

inline Eight load_eight(const float* from) { return load<Eight>(from); }
inline Eight load_eight(const bf16* from) {
    return (Eight)(__builtin_convertvector(load<EightShorts>(from), EightCells) << 16);
}

// Cells of each two neighbours: low[i], high[i].
inline void store_pairs(bf16* to, const bf16* low, const bf16* high) {
    const auto first = __builtin_convertvector(load<EightShorts>(low), EightCells);
    const auto second = __builtin_convertvector(load<EightShorts>(high), EightCells);
    store(to, first | second << 16);
}

inline void store_eight(float* to, Eight value) { store(to, value); }
inline void store_eight(bf16* to, Eight value) {
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
    store(to, _mm256_cvtneps_pbh((__m256)value));
#else
    const EightCells bits = (EightCells)value, rounded = bits + 0x7fff + (bits >> 16 & 1);
    store(to, __builtin_convertvector((value == value ? rounded : bits) >> 16, EightShorts));
#endif
}

inline Floats larger(Floats l, Floats r) {
#ifdef __AVX512F__
    return (Floats)_mm512_max_ps((__m512)l, (__m512)r);
#else
    return l > r ? l : r;
#endif
}

// 2^x for x <= 0, relative error below 2e-7, or 2e-4 where that is precise enough; 0 below 2^-126. The polynomials are
// 2^f on [0, 1], and exactly 1 at 0.
template <bool precise = true>
inline Floats exp2(Floats x) {
#ifdef __AVX512DQ__
    const Floats f = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);  // x - floor(x); 0 for infinity
#else
    const Floats clamped = x < -126.0f ? Floats{} - 126.0f : x;
    const Floats shifted = clamped - 0.5f + 12582912.0f;  // 1.5 · 2^23: the low bits are x, rounded to a whole number
    const Floats f = clamped - (shifted - 12582912.0f);
#endif
    Floats p;
    if constexpr (precise) {
        p = f * 1.867130521e-3f + 9.017029359e-3f;
        p = p * f + 5.579991380e-2f;
        p = p * f + 2.401644500e-1f;
        p = p * f + 6.931513118e-1f;
    } else {
        p = f * 7.826797017e-2f + 2.263076823e-1f;
        p = p * f + 6.954243475e-1f;
    }
    p = p * f + 1.0f;
#ifdef __AVX512DQ__
    return (Floats)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    const Floats power = (Floats)((Cells)p + ((Cells)shifted << 23));
    return x < -126.0f ? Floats{} : power;
#endif
}

template <int n, class Op>
inline float reduce(const typename Vector<n>::Floats& value, Op op) {
    if constexpr (n == 1) {
        return value[0];
    } else {
        using Half = typename Vector<n / 2>::Floats;
        const auto* halves = reinterpret_cast<const float*>(&value);
        return reduce<n / 2>(op(load<Half>(halves), load<Half>(halves + n / 2)), op);
    }
}

#ifdef __AVX512F__
// Two vectors' halves, or halves of halves, become one vector: op(low halves, high halves).
template <int half>
struct Places {
    alignas(64) int32_t low[16], high[16];
    constexpr Places() : low(), high() {
        for (int i = 0; i < 16; ++i) {
            low[i] = i % 8 / half * 2 * half + i % half + i / 8 * 16;
            high[i] = low[i] + half;
        }
    }
};
template <int half, class Op>
inline void fold(Floats* vectors, Op op) {
    static constexpr Places<half> places;
    for (int i = 0; i < half; ++i) {
        const auto pick = [&](const int32_t* of) {
            const auto index = _mm512_load_si512(of);
            return (Floats)_mm512_permutex2var_ps((__m512)vectors[2 * i], index, (__m512)vectors[2 * i + 1]);
        };
        vectors[i] = op(pick(places.low), pick(places.high));
    }
}
#endif

// Of each of the first of 16 vectors the reduction of its values; overwrites the vectors.
template <class Op>
inline void reduce_each(Floats* vectors, int count, Op op, float* results) {
#ifdef __AVX512F__
    if (count > 4) {  // the same order as one by one
        for (int i = count; i < 16; ++i) vectors[i] = Floats{};
        fold<8>(vectors, op);
        fold<4>(vectors, op);
        fold<2>(vectors, op);
        fold<1>(vectors, op);
        store(results, vectors[0]);
        return;
    }
#endif
    for (int i = 0; i < count; ++i) results[i] = reduce<16>(vectors[i], op);
}

}  // namespace shoal
