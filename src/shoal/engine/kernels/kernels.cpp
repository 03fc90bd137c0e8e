// What ctypes calls; library.py has the other side.
#include "linear.h"
#include "sample.h"

extern "C" {

void shoal_threads(int count) { shoal::Pool::get().grow(count); }

#ifdef SHOAL_LINEAR
int shoal_has_linear() { return 1; }

void shoal_linear(const shoal::Linear* linear, const shoal::bf16* x, const shoal::bf16* norm, int rows, int epilogue, void* out) {
    shoal::linear(*linear, {x, norm, rows, epilogue, out});
}
#else
int shoal_has_linear() { return 0; }
#endif

void shoal_sample(const float* logits, int rows, int vocab, const shoal::sampling::Settings* settings,
                  int64_t* tokens) {
    shoal::sampling::sample(logits, rows, vocab, *settings, tokens);
}

}
