/* A step of AdamW over n elements, in one pass over memory: the operations of adamw.py in their order.
 *
 * Each of them is rounded by itself, so the bits are those of adamw.py: it must be compiled without contraction of
 * a * b + c (-ffp-contract=off) and without -ffast-math; sqrtf is exact by IEEE 754. New and old vectors may be the same.
 */
#include <math.h>
#include <stddef.h>

struct scalars {
  float clip, beta1, rest1, beta2, rest2, eps, correction2, step_size, shrink;
};

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
/* One of these is chosen when the library is loaded; more elements at a time round none of them otherwise. */
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void swarm_adamw(size_t n, const float *p, const float *m, const float *v, const float *g, float *new_p, float *new_m,
                 float *new_v, const struct scalars *s) {
  const struct scalars k = *s;
#pragma omp simd
  for (size_t i = 0; i < n; i++) {
    float clipped = g[i] * k.clip;
    float mean = m[i] * k.beta1;
    float add = clipped * k.rest1;
    mean = mean + add;
    float square = v[i] * k.beta2;
    float squared = clipped * clipped;
    squared = squared * k.rest2;
    square = square + squared;
    float root = sqrtf(square * k.correction2);
    root = root + k.eps;
    float step = mean * k.step_size;
    step = step / root;
    float kept = p[i] * k.shrink;
    new_p[i] = kept - step;
    new_m[i] = mean;
    new_v[i] = square;
  }
}
