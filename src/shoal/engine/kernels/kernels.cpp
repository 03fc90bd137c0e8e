// What ctypes calls; library.py has the other side.
#include "attention.h"
#include "layers.h"
#include "linear.h"
#include "ranks.h"
#include "sample.h"

extern "C" {

void shoal_threads(int count) { shoal::Pool::get().grow(count); }

#ifdef SHOAL_LINEAR
int shoal_has_linear() { return 1; }

void shoal_linear(const shoal::Linear* linear, const shoal::bf16* x, const shoal::bf16* norm, int rows, int epilogue,
                  void* out) {
    shoal::linear(*linear, {x, norm, rows, epilogue, out});
}

int shoal_rows(const shoal::Linear* linear, const int64_t* ids, int count, shoal::bf16* out) {
    return shoal::rows(*linear, ids, count, out);
}

void shoal_layers(const shoal::Block* blocks, int count, const shoal::Attention* attention, const shoal::Step* step,
                  const shoal::Activations* activations) {
    shoal::layers(blocks, count, *attention, *step, *activations);
}
#else
int shoal_has_linear() { return 0; }
#endif

int shoal_attention_unit() { return shoal::attention_has_unit(); }

void shoal_plan_attention(const shoal::Attention* attention, shoal::Step* step) { shoal::plan(*attention, *step); }

void shoal_attend(const shoal::Attention* attention, const shoal::Step* step, const shoal::Layer* layer) {
    shoal::attend(*attention, *step, *layer);
}

void shoal_sample(const float* logits, int rows, int vocab, const shoal::sampling::Settings* settings,
                  int64_t* tokens) {
    shoal::sampling::sample(logits, rows, vocab, *settings, tokens);
}

int shoal_all_reduce(shoal::Member* member, void* x, int64_t count, int is_bf16) {
    return is_bf16 ? shoal::all_reduce(*member, (shoal::bf16*)x, count) : shoal::all_reduce(*member, (float*)x, count);
}

int shoal_all_gather(shoal::Member* member, const char* x, int64_t rows, const int64_t* widths, char* out) {
    return shoal::all_gather(*member, x, rows, widths, out);
}

int shoal_send(shoal::Member* member, const char* x, int64_t bytes, int to) {
    return shoal::send(*member, x, bytes, to);
}

int shoal_receive(shoal::Member* member, char* x, int64_t bytes, int from) {
    return shoal::receive(*member, x, bytes, from);
}

}
