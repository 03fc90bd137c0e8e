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
    const auto attend_layer = [&](const Block& block) {
        Layer layer = block.attention;
        layer.qkv = a.qkv, layer.out = a.out;
        attend(attention, step, layer);
    };
    const auto qkv = [&](const Block& block) { return Call{a.x, block.attention_norm, a.rows, kStore, a.qkv}; };
    const auto output = [&](const Block&) { return Call{a.out, nullptr, a.rows, kAdd, a.x}; };
    const auto gate_up = [&](const Block& block) { return Call{a.x, block.mlp_norm, a.rows, kSilu, a.mlp}; };
    const auto down = [&](const Block&) { return Call{a.mlp, nullptr, a.rows, kAdd, a.x}; };
    const Block* const end = blocks + count;
    const int own = own_rows(a.rows);
    if (!own) {
        for (const Block* block = blocks; block < end; ++block) {
            linear(*block->qkv, qkv(*block));
            attend_layer(*block);
            linear(*block->output, output(*block));
            linear(*block->gate_up, gate_up(*block));
            linear(*block->down, down(*block));
        }
        return;
    }
    // From one attention to the next a row needs no other: a thread keeps its rows in its cache.
    for (const Block* block = blocks; block <= end; ++block) {
        Pool::get().run((a.rows + own - 1) / own, [&](int index, int) {
            const int first = index * own, last = std::min(a.rows, first + own);
            if (block > blocks) {
                const Block& before = block[-1];
                const void* after = block < end ? block->qkv->packed : before.output->packed;
                linear_rows(*before.output, output(before), first, last, before.gate_up->packed);
                linear_rows(*before.gate_up, gate_up(before), first, last, before.down->packed);
                linear_rows(*before.down, down(before), first, last, after);
            }
            if (block < end) linear_rows(*block->qkv, qkv(*block), first, last, block->output->packed);
        });
        if (block < end) attend_layer(*block);
    }
}

}  // namespace shoal

#endif
