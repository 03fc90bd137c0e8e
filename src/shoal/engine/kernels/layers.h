// All layers of a step in one call: between two kernels nothing waits for Python or its lock.
#pragma once

#include "attention.h"
#include "linear.h"

#ifdef SHOAL_LINEAR

namespace shoal {

struct Block {
    const bf16 *attention_norm, *mlp_norm;  // [E]
    const Linear *qkv, *output, *gate_up, *down;
    Layer attention;  // qkv and out are set here
};

struct Activations {
    bf16 *x;    // [T, E]: embeddings in, hidden states out
    bf16 *qkv;  // [T, (H + 2 K) · D]
    bf16 *out;  // [T, H · D]
    bf16 *mlp;  // [T, F]
    int32_t rows;
};

inline void layers(const Block* blocks, int count, const Attention& attention, const Step& step, const Activations& a) {
    for (const Block* block = blocks; block < blocks + count; ++block) {
        Layer layer = block->attention;
        layer.qkv = a.qkv, layer.out = a.out;
        linear(*block->qkv, {a.x, block->attention_norm, a.rows, kStore, a.qkv});
        attend(attention, step, layer);
        linear(*block->output, {a.out, nullptr, a.rows, kAdd, a.x});
        linear(*block->gate_up, {a.x, block->mlp_norm, a.rows, kSilu, a.mlp});
        linear(*block->down, {a.mlp, nullptr, a.rows, kAdd, a.x});
    }
}

}  // namespace shoal

#endif
