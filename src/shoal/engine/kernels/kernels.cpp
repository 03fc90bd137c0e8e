// Entry points for ctypes; see __init__.py.
#include "linear.h"

extern "C" {
void shoal_threads(int count) { shoal::Pool::get().grow(count); }
int shoal_has_linear() {
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
    return shoal::have_matrix_unit();
#else
    return 0;
#endif
}
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
void shoal_linear(const shoal::Linear* linear, const shoal::Call* call, shoal::bf16* scratch) { shoal::linear(*linear, *call, scratch); }
#endif
}
