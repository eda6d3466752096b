// What the multiply instructions of the linear layers do at best on this processor: the bound that benches name.
#include <immintrin.h>

#include <chrono>

#include "interface.h"

namespace {

constexpr int kChains = 12;  // as many sums as the kernels have

// Multiply-accumulates a second of one thread; each pair of instructions does `Macs`. Written out, for the optimizer
// would multiply once for all.
template <int Macs>
double rate(int64_t instructions) {
    __m256i sums[kChains], weights = _mm256_set1_epi8(3), activations = _mm256_set1_epi8(5);
#pragma GCC unroll 12
    for (auto &sum : sums) sum = _mm256_setzero_si256();
    const auto began = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < instructions / kChains; ++i) {
#pragma GCC unroll 12
        for (auto &sum : sums) {
            __m256i products;
            if constexpr (Macs == 32) {
                asm volatile("vpmaddubsw %1, %2, %0" : "=x"(products) : "x"(weights), "x"(activations));
                asm volatile("vpaddw %1, %0, %0" : "+x"(sum) : "x"(products));
            } else {
                asm volatile("vpmaddwd %1, %2, %0" : "=x"(products) : "x"(weights), "x"(activations));
                asm volatile("vpaddd %1, %0, %0" : "+x"(sum) : "x"(products));
            }
        }
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - began;
    return static_cast<double>(instructions / kChains * kChains) * Macs / seconds.count();
}

}  // namespace

extern "C" double fused_peak_macs(int32_t bits, int64_t instructions) {
    return bits == 4 ? rate<32>(instructions) : rate<16>(instructions);
}
