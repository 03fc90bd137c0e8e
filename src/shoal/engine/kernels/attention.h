// Attention of new tokens over keys and values that lie in blocks, without gathering them; before it the queries' and
// keys' RMS norm and rotation, and the writing of new keys and values.
//
// Values are kept in cells of 32 bits: one float32, or two bfloat16 (f = 1 or 2 values). A layer of the pool is
// [blocks][kv heads][2][t · D], and so that vectors and matrix units can take rows of a block as they lie,
//     keys    [t / g][D / f][g] cells, f neighbouring dims of a token in one; g = min(t, 16) tokens are a group,
//     values  [t / f][D] cells, f neighbouring tokens in one.
//
// A lane is one query of one query head; 16 lanes are a tile. A task takes a few tiles of one span and kv head, and walks
// over their context in chunks of 128 tokens: scores, softmax within the chunk, weighted sum of values. The results of
// chunks are merged in their order. So a lane's result depends on nothing but its own context: not on who shares the
// step, how its prompt was cut, which other lanes are in its task, or which threads computed its chunks.
//
// A shard of a context keeps each num_shards-th token, side by side in the same blocks, and attends to these alone: where
// "here" is said, tokens are counted on this shard. What it then gives is a part of the result, to be merged with the
// others' by the logarithm of the sum of its weights (parallel/context.py). A lane may see no token here: its part weighs
// nothing.
//
// Shape letters: t tokens of a block, D head size, H query heads, K kv heads, G = H / K, S spans.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention_math.h"
#include "parallel.h"

namespace shoal {

struct Task {
    int32_t span, head, first_lane;
    int32_t first_chunk, end_chunk;
    int32_t slot;    // where the results of its context's chunks go, so that threads share the context; -1: not shared
    int32_t writes;  // its span's keys and values itself: nobody else reads them
};

struct Write {
    int32_t span, first, end;  // queries
};

struct Step {
    const int32_t *row, *start, *length, *table;  // [S], [S], [S], [S, width]; see model/spans.py
    int32_t num_spans, width;
    const float* angles;  // [positions, D]: D / 2 cosines, D / 2 sines
    Task* tasks;
    Write* writes;
    int32_t num_tasks, num_writes, num_slots;  // `plan` fills these and what tasks and writes point to
    float* results;  // [slots, 16 · (2 + D)]
    int32_t* done;   // [slots], zeros
};

struct Layer {
    const void* qkv;  // [T, (H + 2 K) · D]
    void* kv;
    const void *q_norm, *k_norm;  // [D], or null
    void* out;     // [T, H · D]
    int32_t part;  // not 0: out is float32 [T, H · D + H], behind the values the logarithms of the sums of weights
};

// -- rows of the step -------------------------------------------------------------------------------------------------

// to[D] = x, normed where there is a weight, with pairs (i, i + D / 2) turned by their angles.
template <class T, class U>
inline void rotate(const Attention& a, const T* x, const T* norm, const float* angles, U* to) {
    const int half = a.head_size / 2;
    float factor = 1;
    if (norm) {
        Eight squares = {};
        for (int i = 0; i < a.head_size; i += 8) squares += load_eight(x + i) * load_eight(x + i);
        factor = 1 / std::sqrt(reduce<8>(squares, [](auto l, auto r) { return l + r; }) / a.head_size + a.epsilon);
    }
    for (int i = 0; i < half; i += 8) {
        Eight low = load_eight(x + i) * factor, high = load_eight(x + half + i) * factor;
        if (norm) low *= load_eight(norm + i), high *= load_eight(norm + half + i);
        const Eight cosine = load_eight(angles + i), sine = load_eight(angles + half + i);
        store_eight(to + i, low * cosine - high * sine);
        store_eight(to + half + i, high * cosine + low * sine);
    }
}

// Keys of a block and kv head; its values follow.
template <class T>
inline T* block_keys(const Attention& a, const Layer& layer, int block, int head) {
    return (T*)layer.kv + (size_t(block) * a.num_kv_heads + head) * 2 * a.block_tokens * a.head_size;
}

// What may be far away is asked for before it is needed.
template <class T>
inline void fetch(const T* values, int count) {
    for (int i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(values + i);
}

// Keys and values of queries [first, end) of a span to their blocks, of one kv head; those that belong here.
template <class T>
void write(const Attention& a, const Step& step, const Layer& layer, const Write& part, int head) {
    constexpr int f = 4 / sizeof(T);
    const int D = a.head_size, g = a.group(), c = a.num_shards, start = step.start[part.span];
    const int first = a.here(start + part.first) * c + a.shard - start;
    const size_t width = a.row_values(), next = c * width;
    const T* const key_row = (const T*)layer.qkv + step.row[part.span] * width + (a.num_heads + head) * D;
    const T* const value_row = key_row + a.num_kv_heads * D;
    for (int query = first; query < part.end; query += c) {
        fetch(key_row + query * width, D), fetch(value_row + query * width, D);
    }
    alignas(64) T key[kMaxHead];
    for (int query = first; query < part.end; query += c) {
        const int position = start + query, token = a.here(position), place = token % a.block_tokens;
        rotate(a, key_row + query * width, (const T*)layer.k_norm, step.angles + size_t(position) * D, key);
        const int block = step.table[size_t(part.span) * step.width + token / a.block_tokens];
        T* keys = block_keys<T>(a, layer, block, head);
        T* values = keys + a.block_tokens * D + place / f * f * D;
        keys += place / g * g * D + place % g * f;
        for (int d = 0; d < D; d += f) std::memcpy(keys + d * g, key + d, sizeof(float));
        const T* value = value_row + query * width;
        if constexpr (f == 1) {
            std::memcpy(values, value, D * sizeof(T));
        } else {
            const bool with_next = place % 2 == 0 && query + c < part.end, done = place % 2 && query > first;
            for (int d = 0; d < D && with_next; d += 8) store_pairs(values + d * f, value + d, value + next + d);
            for (int d = 0; d < D && !with_next && !done; ++d) values[d * f + place % f] = value[d];
        }
    }
}

// -- a task -----------------------------------------------------------------------------------------------------------

// Of a tile over a chunk or several: per lane the largest score (times log2 e), the sum of weights 2^(score - largest),
// and the sum of values so weighted.
struct Result {
    float *largest, *weight, *sums;
    Result(float* memory) : largest(memory), weight(memory + kLanes), sums(memory + 2 * kLanes) {}
};

// Of so many tokens; where there are none, one.
inline int chunks_of(int num_tokens) { return std::max(1, (num_tokens + kChunk - 1) / kChunk); }

// `into` becomes the result of both. A lane of `into` has seen something: only tiles with a second chunk get here.
inline void merge(const Attention& a, int num_lanes, Result into, Result next) {
    const Floats one = load<Floats>(into.largest), other = load<Floats>(next.largest), largest = larger(one, other);
    const Floats factor = exp2(one - largest), more_factor = exp2(other - largest);
    store(into.largest, largest);
    store(into.weight, load<Floats>(into.weight) * factor + load<Floats>(next.weight) * more_factor);
    for (int lane = 0; lane < num_lanes; ++lane) {
        float* sums = into.sums + lane * a.head_size;
        const float* more = next.sums + lane * a.head_size;
        for (int d = 0; d < a.head_size; d += 16) {
            store(sums + d, load<Floats>(sums + d) * factor[lane] + load<Floats>(more + d) * more_factor[lane]);
        }
    }
}

template <class Unit>
class Work {
    using T = typename Unit::Value;
    using Operand = typename Unit::Operand;

public:
    Work(const Attention& a, const Step& step, const Layer& layer, const Task& task)
        : a(a), step(step), layer(layer), task(task),
          start(step.start[task.span]), end(start + step.length[task.span]), num_here(a.here(end)),
          num_lanes(std::min(kTiles * kLanes, step.length[task.span] * a.per_kv_head() - task.first_lane)),
          num_tiles((num_lanes + kLanes - 1) / kLanes), scale(1.44269504f / std::sqrt(float(a.head_size))),
          table(step.table + size_t(task.span) * step.width), unit(a, std::min(num_lanes, kLanes)) {
        const int G = a.per_kv_head();
        for (int lane = 0, at = task.first_lane / G, of = task.first_lane % G; lane < num_lanes; ++lane) {
            query[lane] = at;
            head[lane] = task.head * G + of;
            sees[lane] = a.here(start + at + 1);
            if (++of == G) ++at, of = 0;
        }
        num_chunks = chunks_of(sees[num_lanes - 1]);
    }

    void run() {
        if (task.writes) write<T>(a, step, layer, {task.span, 0, end - start}, task.head);
        load_queries();
        if (task.slot < 0) {
            alignas(64) float memory[kTiles + 1][kLanes * (2 + kMaxHead)];
            const Result next(memory[kTiles]);
            for (int chunk = 0; chunk < num_chunks; ++chunk) {
                find(chunk);
                for (int tile = first_tile(chunk); tile < num_tiles; ++tile) {
                    attend(chunk, tile, chunk ? next : memory[tile]);
                    if (chunk) merge(a, lanes_of(tile), memory[tile], next);
                }
            }
            for (int tile = 0; tile < num_tiles; ++tile) finish(tile, memory[tile]);
        } else {
            for (int chunk = task.first_chunk; chunk < task.end_chunk; ++chunk) {
                find(chunk);
                for (int tile = first_tile(chunk); tile < num_tiles; ++tile) attend(chunk, tile, shared(chunk, tile));
            }
            if (is_last()) finish_shared();
        }
    }

private:
    int position(int lane) const { return start + query[lane]; }
    size_t row(int lane) const { return step.row[task.span] + query[lane]; }
    const T* query_of(int lane) const {
        return (const T*)layer.qkv + row(lane) * a.row_values() + head[lane] * a.head_size;
    }
    int lanes_of(int tile) const { return std::min(kLanes, num_lanes - tile * kLanes); }
    int last_sees(int tile) const { return sees[tile * kLanes + lanes_of(tile) - 1]; }

    // Of a chunk, with whole units.
    int padded(int num_tokens) const { return (std::min(kChunk, num_tokens) + a.unit() - 1) / a.unit() * a.unit(); }

    // The first that sees something of the chunk; all have a result of the first chunk.
    int first_tile(int chunk) const {
        int tile = 0;
        while (chunk && last_sees(tile) <= chunk * kChunk) ++tile;
        return tile;
    }

    void load_queries() {
        for (int lane = 0; lane < num_lanes; ++lane) fetch(query_of(lane), a.head_size);
        for (int lane = 0; lane < num_lanes; ++lane) {
            const T* x = query_of(lane);
            const float* angles = step.angles + size_t(position(lane)) * a.head_size;
            Operand* to = queries + lane * a.head_size;
            if constexpr (sizeof(T) == sizeof(Operand)) {
                rotate(a, x, (const T*)layer.q_norm, angles, to);
            } else {
                T rounded[kMaxHead];
                rotate(a, x, (const T*)layer.q_norm, angles, rounded);
                for (int d = 0; d < a.head_size; d += 8) store_eight(to + d, load_eight(rounded + d));
            }
        }
    }

    // Where the chunk's keys and values lie.
    void find(int chunk) {
        const int D = a.head_size, g = a.group(), u = a.unit();
        const int first = chunk * kChunk, num_tokens = padded(sees[num_lanes - 1] - first);
        for (int i = 0; i < num_tokens; i += g) {
            const int token = first + i, place = token % a.block_tokens;
            const T* keys = block_keys<T>(a, layer, table[token / a.block_tokens], task.head);
            pieces.keys[i / g] = keys + place * D;
            const T* values = keys + (a.block_tokens + place) * D;
            if (place % u == 0) pieces.values[i / u] = values;
            for (int ahead = 0; ahead < g * D; ahead += 64 / sizeof(T)) __builtin_prefetch(values + ahead, 0, 2);
        }
        const int last = num_tokens - u, left = num_here - (first + last);
        if (num_tokens && left < u) cut_tail(pieces.values[last / u], left);
    }

    // What lies behind the end of a span may be anything, so its weight 0 would not do.
    void cut_tail(const T*& values, int num_tokens) {
        constexpr int f = 4 / sizeof(T);
        const int D = a.head_size, whole = num_tokens / f * f;
        std::memcpy(tail, values, size_t(whole) * D * sizeof(T));
        std::memset(tail + whole * D, 0, size_t(a.unit() - whole) * D * sizeof(T));
        if (whole < num_tokens) {
            for (int d = 0; d < D; ++d) tail[whole * D + d * f] = values[whole * D + d * f];
        }
        values = tail;
    }

    void attend(int chunk, int tile, Result result) {
        const int first = chunk * kChunk, num_tokens = padded(last_sees(tile) - first);
        unit.scores(a, queries + tile * kLanes * a.head_size, pieces, num_tokens, scores);
        const int lanes = lanes_of(tile);
        int seen[kLanes];
        Floats found[kLanes];
        for (int lane = 0; lane < lanes; ++lane) {
            seen[lane] = std::clamp(sees[tile * kLanes + lane] - first, 0, num_tokens);
            found[lane] = find_largest(scores + lane * kChunk, seen[lane]);
        }
        reduce_each(found, lanes, [](auto l, auto r) { return l > r ? l : r; }, result.largest);
        for (int lane = 0; lane < lanes; ++lane) {
            result.largest[lane] *= scale;
            const float shift = seen[lane] ? result.largest[lane] : 0;
            found[lane] = soften(scores + lane * kChunk, seen[lane], shift, num_tokens, weights + lane * kChunk);
        }
        reduce_each(found, lanes, [](auto l, auto r) { return l + r; }, result.weight);
        unit.weigh(a, weights, pieces, num_tokens, result.sums);
    }

    static int num_vectors(int seen) { return (seen + 31) / 32 * 2; }

    // Of the first scores, 16 candidates; the others, as far as their vectors reach, become those of a weight 0.
    Floats find_largest(float* s, int seen) const {
        const Floats nothing = Floats{} - std::numeric_limits<float>::infinity();
        for (int i = seen; i < num_vectors(seen) * 16; ++i) s[i] = nothing[0];
        Floats low = nothing, high = nothing;
        for (int i = 0; i < num_vectors(seen); i += 2) {
            low = larger(low, load<Floats>(s + 16 * i));
            high = larger(high, load<Floats>(s + 16 * i + 16));
        }
        return larger(low, high);
    }

    // Scores to weights; returns 16 parts of their sum.
    Floats soften(const float* s, int seen, float shift, int num_tokens, Operand* p) const {
        Floats low = {}, high = {};
        for (int i = 0; i < num_vectors(seen); i += 2) {
            const Floats first = exp2<Unit::kPrecise>(load<Floats>(s + 16 * i) * scale - shift);
            const Floats second = exp2<Unit::kPrecise>(load<Floats>(s + 16 * i + 16) * scale - shift);
            low += first;
            high += second;
            Unit::store(p + 16 * i, first, second);
        }
        const int done = num_vectors(seen) * 16;
        if (done < num_tokens) std::memset(p + done, 0, (num_tokens - done) * sizeof(Operand));
        return low + high;
    }

    void finish(int tile, Result result) const {
        for (int i = 0; i < lanes_of(tile); ++i) {
            const int lane = tile * kLanes + i;
            const int width = a.num_heads * a.head_size, first = head[lane] * a.head_size;
            const float* sums = result.sums + i * a.head_size;
            const float weight = result.weight[i];
            if (!layer.part) {
                put((T*)layer.out + row(lane) * width + first, sums, 1 / weight);
            } else {
                float* out = (float*)layer.out + row(lane) * (width + a.num_heads);
                put(out + first, sums, weight ? 1 / weight : 0);
                out[width + head[lane]] = 0.693147181f * result.largest[i] + std::log(weight);
            }
        }
    }

    template <class U>
    void put(U* out, const float* sums, float factor) const {
        for (int d = 0; d < a.head_size; d += 8) store_eight(out + d, load_eight(sums + d) * factor);
    }

    Result shared(int chunk, int tile) const {
        return step.results + size_t(task.slot + chunk * num_tiles + tile) * a.result_floats();
    }

    // Of the tasks that share the context, to be done.
    bool is_last() const {
        int32_t& done = step.done[task.slot];
        const int mine = task.end_chunk - task.first_chunk;
        if (__atomic_add_fetch(&done, mine, __ATOMIC_ACQ_REL) < num_chunks) return false;
        done = 0;  // for the next layer
        return true;
    }

    void finish_shared() const {
        for (int chunk = 1; chunk < num_chunks; ++chunk) {
            for (int tile = first_tile(chunk); tile < num_tiles; ++tile) {
                merge(a, lanes_of(tile), shared(0, tile), shared(chunk, tile));
            }
        }
        for (int tile = 0; tile < num_tiles; ++tile) finish(tile, shared(0, tile));
    }

    const Attention& a;
    const Step& step;
    const Layer& layer;
    const Task& task;
    const int start, end, num_here, num_lanes, num_tiles;
    int num_chunks;
    int query[kTiles * kLanes], head[kTiles * kLanes], sees[kTiles * kLanes];  // of each lane
    const float scale;  // of the scores, times log2 e
    const int32_t* table;
    const Unit unit;
    Pieces<T> pieces;
    alignas(64) Operand queries[kTiles * kLanes * kMaxHead];  // rows beyond num_lanes hold anything, and nobody looks
    alignas(64) float scores[kLanes * kChunk];
    alignas(64) Operand weights[kLanes * kChunk];
    alignas(64) T tail[kMaxUnit * kMaxHead];
};

// -- a step -----------------------------------------------------------------------------------------------------------

// Fills tasks, the longest first, writes, and their numbers. A context that is much of the step's work is shared by
// several tasks. There is room for K tasks per 16 lanes and 8 more per thread, and for a write per 16 lanes.
inline void plan(const Attention& a, Step& step) {
    constexpr int kMost = kTiles * kLanes;
    const auto num_lanes = [&](int span) { return step.length[span] * a.per_kv_head(); };
    const auto num_chunks = [&](int span, int first_lane) {
        const int last = std::min(first_lane + kMost, num_lanes(span)) - 1;
        return chunks_of(a.here(step.start[span] + last / a.per_kv_head() + 1));
    };
    const auto num_tiles = [&](int span, int first_lane) {
        return (std::min(kMost, num_lanes(span) - first_lane) + kLanes - 1) / kLanes;
    };
    int64_t all = 0;  // chunks, for a kv head
    for (int span = 0; span < step.num_spans; ++span) {
        for (int lane = 0; lane < num_lanes(span); lane += kMost) all += num_chunks(span, lane) * num_tiles(span, lane);
    }
    const int64_t most = std::max<int64_t>(4, all * a.num_kv_heads / (4 * a.num_threads));  // that a task should have
    step.num_tasks = step.num_writes = step.num_slots = 0;
    for (int span = 0; span < step.num_spans; ++span) {
        bool writes = num_lanes(span) <= kMost;
        for (int lane = 0; lane < num_lanes(span); lane += kMost) {
            const int chunks = num_chunks(span, lane), tiles = num_tiles(span, lane);
            const int parts = std::min<int64_t>(chunks, (chunks * tiles + most - 1) / most);
            writes &= parts == 1;
            for (int head = 0; head < a.num_kv_heads; ++head) {
                for (int part = 0; part < parts; ++part) {
                    const int first = chunks * part / parts, end = chunks * (part + 1) / parts;
                    const int slot = parts > 1 ? step.num_slots : -1;
                    step.tasks[step.num_tasks++] = {span, head, lane, first, end, slot, writes};
                }
                step.num_slots += parts > 1 ? chunks * tiles : 0;
            }
        }
        for (int query = 0; query < step.length[span] && !writes; query += kLanes) {
            step.writes[step.num_writes++] = {span, query, std::min(query + kLanes, step.length[span])};
        }
    }
    const auto longer = [](const Task& left, const Task& right) {
        return left.end_chunk - left.first_chunk > right.end_chunk - right.first_chunk;
    };
    std::sort(step.tasks, step.tasks + step.num_tasks, longer);
}

template <class Unit>
void attend_with(const Attention& a, const Step& step, const Layer& layer) {
    Pool& pool = Pool::get();
    const auto write_part = [&](int index, int) {
        write<typename Unit::Value>(a, step, layer, step.writes[index / a.num_kv_heads], index % a.num_kv_heads);
    };
    const int num_writes = step.num_writes * a.num_kv_heads;
    if (num_writes <= 8) for (int index = 0; index < num_writes; ++index) write_part(index, 0);
    else pool.run(num_writes, write_part);
    pool.run(step.num_tasks, [&](int index, int) { Work<Unit>(a, step, layer, step.tasks[index]).run(); });
}

inline void attend(const Attention& a, const Step& step, const Layer& layer) {
    switch (a.math) {
        case kFloat32: return attend_with<Plain<float>>(a, step, layer);
        case kBfloat16: return attend_with<Plain<bf16>>(a, step, layer);
#ifdef SHOAL_ATTENTION_UNIT
        case kBfloat16Unit: return attend_with<MatrixUnit>(a, step, layer);
#endif
    }
}

inline bool attention_has_unit() {
#ifdef SHOAL_ATTENTION_UNIT
    return have_matrix_unit();
#else
    return false;
#endif
}

}  // namespace shoal
