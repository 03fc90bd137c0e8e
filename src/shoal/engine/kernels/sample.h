// Draws a token per row of logits; the distribution and the noise are those that sample.py defines. A row is one task.
//
// No sorting. With weights w_i = exp((logit_i - max) / T) and exponential noise E_i = -log1p(-W_i), the Gumbel-max token
// is the one with the least E_i / w_i. The filters keep whatever is at least as likely as some threshold, so:
//
//   draw from all;  is the winner kept: fewer than k are likelier, and they hold less than top_p?
//     yes: it would win among those kept too
//     no:  whatever is not likelier than it is not kept either: draw from the rest
//
// Without top-k only tokens with a weight above (1 - top_p) / V of the whole are looked at: all below together hold less
// than 1 - top_p. With it, those that some weight which at least k tokens reach leaves.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "parallel.h"

namespace shoal::sampling {

struct Settings {
    const float* temperature;  // [rows]; under `greedy_below`: the likeliest token, of equal ones the first
    const float* top_p;        // [rows]; 1: off
    const float* min_p;        // [rows]; 0: off
    const int64_t* top_k;      // [rows]; 0: off
    const uint64_t* keys;      // [rows] of the noise; not read where a row is greedy
    float greedy_below;
};

constexpr int kLanes = 16;
constexpr int kChunk = 64 * kLanes;  // summed in float, the sums in double

inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// Uniform in (0, 1), the 53 highest bits of the token's hash.
inline double uniform(uint64_t key, uint64_t token) {
    return (static_cast<double>(mix(key + token * 0x9E3779B97F4A7C15u) >> 11) + 0.5) * 0x1p-53;
}

// e^x for x <= 0 to 2e-7 of its value; 0 under e^-87. Without branches, so that loops over it become vector code.
inline float exp_negative(float x) {
    const float magic = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer
    const float shifted = x * 1.44269504f + magic;
    const float whole = shifted - magic;
    const float rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;  // ln 2 in two parts
    float power = 1.0f / 5040;
    for (const float factor : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 1.0f / 2, 1.0f, 1.0f}) {
        power = power * rest + factor;
    }
    int32_t bits;
    float result;
    std::memcpy(&bits, &shifted, sizeof bits);
    const int32_t scale = static_cast<int32_t>((static_cast<uint32_t>(bits) + 127u) << 23);
    std::memcpy(&result, &scale, sizeof result);
    return x > -87.0f ? power * result : 0.0f;
}

// The highest value, and the chunk in which it first occurs.
struct Peak {
    float value = -std::numeric_limits<float>::infinity();
    int begin = 0;
};

inline Peak find_peak(const float* values, int count) {
    Peak peak;
    for (int begin = 0; begin < count; begin += kChunk) {
        const int end = std::min(count, begin + kChunk);
        constexpr int kWidth = 4 * kLanes;
        float best[kWidth];
        std::fill_n(best, kWidth, -std::numeric_limits<float>::infinity());
        int index = begin;
        for (; index + kWidth <= end; index += kWidth) {
            for (int lane = 0; lane < kWidth; ++lane) {
                best[lane] = values[index + lane] > best[lane] ? values[index + lane] : best[lane];
            }
        }
        for (; index < end; ++index) best[0] = std::max(best[0], values[index]);
        const float value = *std::max_element(best, best + kWidth);
        if (value > peak.value) peak = {value, begin};
    }
    return peak;
}

// Of equal ones the first. Where nothing is a number some token must be named: 0.
inline int first_highest(const float* values, int count, const Peak& peak) {
    const float* end = values + std::min(count, peak.begin + kChunk);
    const float* found = std::find(values + peak.begin, end, peak.value);
    return found == end ? 0 : static_cast<int>(found - values);
}

class Sampler {
public:
    int draw(const float* logits, int vocab, const Settings& all, int row) {
        const Peak peak = find_peak(logits, vocab);
        const float most = peak.value, temperature = all.temperature[row];
        if (temperature < all.greedy_below || !std::isfinite(most)) return first_highest(logits, vocab, peak);
        const int64_t top_k = all.top_k[row] > 0 && all.top_k[row] < vocab ? all.top_k[row] : 0;
        const float top_p = all.top_p[row];
        const double total = weigh(logits, vocab, most, temperature, all.min_p[row]);
        collect(vocab, top_k ? at_least_k_from(vocab, top_k) : static_cast<float>(0.999 * (1.0 - top_p) * total / vocab));
        const double whole = top_k ? weight_of_first(top_k) : total;
        const auto k = top_k ? top_k : std::numeric_limits<int64_t>::max();
        const double share = top_p < 1 ? top_p * whole : std::numeric_limits<double>::infinity();
        for (;;) {
            const int winner = least_race(all.keys[row]);
            const float weight = kept_[winner];
            if (is_kept(weight, k, share)) return ids_[winner];
            drop_up_to(weight);
        }
    }

private:
    // Weights of all tokens and their sum; 0 under min-p.
    double weigh(const float* logits, int vocab, float most, float temperature, float min_p) {
        weights_.resize(vocab);
        const float inverse = 1.0f / temperature;
        double total = 0;
        for (int begin = 0; begin < vocab; begin += kChunk) {
            const int end = std::min(vocab, begin + kChunk);
            float* weights = weights_.data();
            for (int index = begin; index < end; ++index) {
                const float weight = exp_negative((logits[index] - most) * inverse);
                weights[index] = weight >= min_p ? weight : 0.0f;
            }
            total += sum(weights + begin, end - begin);
        }
        return total;
    }

    static double sum(const float* values, int count) {
        float sums[kLanes] = {};
        int index = 0;
        for (; index + kLanes <= count; index += kLanes) {
            for (int lane = 0; lane < kLanes; ++lane) sums[lane] += values[index + lane];
        }
        for (; index < count; ++index) sums[0] += values[index];
        double total = 0;
        for (const float part : sums) total += part;
        return total;
    }

    // A weight that at least k tokens reach, and few more: the k-th of the highest weights of groups of tokens.
    float at_least_k_from(int vocab, int64_t k) {
        const int num_groups = vocab / kLanes;
        if (k > num_groups) return 0;
        groups_.resize(num_groups);
        for (int group = 0; group < num_groups; ++group) {
            float best = 0;
            for (int lane = 0; lane < kLanes; ++lane) best = std::max(best, weights_[group * kLanes + lane]);
            groups_[group] = best;
        }
        std::nth_element(groups_.begin(), groups_.begin() + (k - 1), groups_.end(), std::greater<>());
        return groups_[k - 1];
    }

    // ids_ and kept_: tokens whose weight is at least `least`, and not 0.
    void collect(int vocab, float least) {
        ids_.resize(vocab + kLanes);
        kept_.resize(vocab + kLanes);
        least = std::max(least, std::numeric_limits<float>::min());
        int count = 0, index = 0;
#ifdef __AVX512F__
        const __m512 bound = _mm512_set1_ps(least);
        __m512i id = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        for (; index + kLanes <= vocab; index += kLanes) {
            const __m512 weight = _mm512_loadu_ps(weights_.data() + index);
            const __mmask16 mask = _mm512_cmp_ps_mask(weight, bound, _CMP_GE_OQ);
            _mm512_storeu_ps(kept_.data() + count, _mm512_maskz_compress_ps(mask, weight));
            _mm512_storeu_si512(ids_.data() + count, _mm512_maskz_compress_epi32(mask, id));
            count += __builtin_popcount(mask);
            id = _mm512_add_epi32(id, _mm512_set1_epi32(kLanes));
        }
#endif
        for (; index < vocab; ++index) {
            kept_[count] = weights_[index];
            ids_[count] = index;
            count += weights_[index] >= least;
        }
        resize(count);
    }

    // Together, of the k highest weights.
    double weight_of_first(int64_t k) {
        if (k >= static_cast<int64_t>(kept_.size())) return sum(kept_.data(), static_cast<int>(kept_.size()));
        groups_ = kept_;
        std::nth_element(groups_.begin(), groups_.begin() + (k - 1), groups_.end(), std::greater<>());
        return sum(groups_.data(), static_cast<int>(k));
    }

    // The index in kept_ of the least E / w. W <= E, so E is computed where W / w would win already.
    int least_race(uint64_t key) {
        const int count = static_cast<int>(kept_.size());
        int winner = 0;
        double best = std::numeric_limits<double>::infinity();
        double uniforms[kLanes];
        for (int begin = 0; begin < count; begin += kLanes) {
            const int end = std::min(count, begin + kLanes);
            int near = 0;
            for (int index = begin; index < end; ++index) {
                uniforms[index - begin] = uniform(key, static_cast<uint64_t>(ids_[index]));
                near |= uniforms[index - begin] < best * kept_[index];
            }
            if (!near) continue;
            for (int index = begin; index < end; ++index) {
                const double race = -std::log1p(-std::min(uniforms[index - begin], 1 - 0x1p-24)) / kept_[index];
                if (race < best) best = race, winner = index;
            }
        }
        return winner;
    }

    bool is_kept(float weight, int64_t k, double share) const {
        int64_t num_likelier = 0;
        double likelier = 0;
        const int count = static_cast<int>(kept_.size());
        for (int begin = 0; begin < count; begin += kChunk) {
            const int end = std::min(count, begin + kChunk);
            float sums[kLanes] = {};
            int32_t num = 0;
            int index = begin;
            for (; index + kLanes <= end; index += kLanes) {
                for (int lane = 0; lane < kLanes; ++lane) {
                    const float other = kept_[index + lane];
                    sums[lane] += other > weight ? other : 0.0f;
                    num += other > weight;
                }
            }
            for (; index < end; ++index) {
                sums[0] += kept_[index] > weight ? kept_[index] : 0.0f;
                num += kept_[index] > weight;
            }
            num_likelier += num;
            for (const float part : sums) likelier += part;
        }
        return num_likelier == 0 || (num_likelier < k && likelier < share);
    }

    void drop_up_to(float weight) {
        int count = 0;
        for (size_t index = 0; index < kept_.size(); ++index) {
            const bool stays = kept_[index] > weight;
            kept_[count] = kept_[index];
            ids_[count] = ids_[index];
            count += stays;
        }
        resize(count);
    }

    void resize(int count) {
        kept_.resize(count);
        ids_.resize(count);
    }

    std::vector<float> weights_, kept_, groups_;
    std::vector<int32_t> ids_;
};

// `logits`: [rows, vocab]; writes one token per row.
inline void sample(const float* logits, int rows, int vocab, const Settings& settings, int64_t* tokens) {
    Pool::get().run(rows, [&](int row, int) {
        static thread_local Sampler sampler;
        tokens[row] = sampler.draw(logits + static_cast<size_t>(row) * vocab, vocab, settings, row);
    });
}

}  // namespace shoal::sampling
