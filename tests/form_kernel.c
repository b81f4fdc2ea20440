/* A kernel of someone else, in C, by nothing but evenkeel.h: attention in double precision, row by row. Built as a shared
 * library for `evenkeel conform --library`, and linked into c_api_test. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "evenkeel.h"

static int sees(const evenkeel_conform_form* f, int64_t b, int64_t h, int64_t i, int64_t j, int64_t wider) {
  const int64_t position = i + f->N - f->T;
  if (f->causal && j > position) return 0;
  if (f->window_left >= 0 && j < position - f->window_left - wider) return 0;
  if (f->window_right >= 0 && j > position + f->window_right) return 0;
  return !f->visible || f->visible[((b * f->H + h) * f->T + i) * f->N + j] != 0;
}

static double dot(const float* x, const float* y, int64_t count) {
  double sum = 0;
  int64_t d;
  for (d = 0; d < count; ++d) sum += (double)x[d] * y[d];
  return sum;
}

static float bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* p: scores, and then exp(score - m), whose sum is returned. */
static double output(const evenkeel_conform_form* f, int64_t n, int64_t kv, double m, double* p) {
  double l = 0;
  int64_t j, d;
  for (j = 0; j < f->N; ++j) l += p[j] = exp(p[j] - m);
  for (d = 0; d < f->Dv; ++d) {
    double o = 0;
    for (j = 0; j < f->N; ++j)
      if (p[j] != 0) o += p[j] / l * f->v[(kv + j) * f->Dv + d];
    f->o[n * f->Dv + d] = (float)o;
  }
  return l;
}
/* The same with FlashAttention-2's roundings, and with an exponent that is not 0 at the largest score. */
static double fused_output(const evenkeel_conform_form* f, int64_t n, int64_t kv, double m, double* p) {
  const float c = 1.44269504f, rounded = (float)m * c;
  double l = 0;
  int64_t j, d;
  for (j = 0; j < f->N; ++j) l += p[j] = exp2f(fmaf((float)p[j], c, -rounded));
  for (d = 0; d < f->Dv; ++d) {
    double o = 0;
    for (j = 0; j < f->N; ++j) o += bf16((float)p[j]) * f->v[(kv + j) * f->Dv + d];
    f->o[n * f->Dv + d] = bf16((float)(o / l));
  }
  return l;
}

/* p: room for N numbers twice. */
static void row(const evenkeel_conform_form* f, int64_t b, int64_t h, int64_t i, int64_t wider, int fused,
                double* p, double* dp) {
  const int64_t n = (b * f->H + h) * f->T + i, kv = (b * f->G + h / (f->H / f->G)) * f->N;
  const float *q = f->q + n * f->D, *d_o = f->grad_output + n * f->Dv;
  double m = -HUGE_VAL, l, delta = 0;
  int64_t j, d;
  for (j = 0; j < f->N; ++j) {
    p[j] = sees(f, b, h, i, j, wider) ? f->scale * dot(q, f->k + (kv + j) * f->D, f->D) : -HUGE_VAL;
    if (p[j] > m) m = p[j];
  }
  f->lse[n] = -HUGE_VALF;
  if (m == -HUGE_VAL) return;
  l = fused ? fused_output(f, n, kv, m, p) : output(f, n, kv, m, p);
  f->lse[n] = (float)(m + log(l));
  for (j = 0; j < f->N; ++j) {
    p[j] /= l;
    dp[j] = p[j] == 0 ? 0 : dot(d_o, f->v + (kv + j) * f->Dv, f->Dv);
    delta += p[j] * dp[j];
  }
  if (fused) delta = dot(d_o, f->o + n * f->Dv, f->Dv);
  for (j = 0; j < f->N; ++j) {
    const double ds = f->scale * p[j] * (dp[j] - delta);
    if (p[j] == 0) continue;
    for (d = 0; d < f->D; ++d) {
      f->dq[n * f->D + d] += (float)(ds * f->k[(kv + j) * f->D + d]);
      f->dk[(kv + j) * f->D + d] += (float)(ds * q[d]);
    }
    for (d = 0; d < f->Dv; ++d) f->dv[(kv + j) * f->Dv + d] += (float)(p[j] * d_o[d]);
  }
}

static int32_t attention(const evenkeel_conform_form* f, int64_t wider, int fused) {
  double* room;
  int64_t b, h, i;
  if (f->query_starts || f->sinks || f->grad_lse || f->softcap != 0) return EVENKEEL_NOT_OFFERED;
  room = malloc((size_t)f->N * 2 * sizeof *room);
  if (!room) return 1;
  memset(f->o, 0, (size_t)(f->B * f->H * f->T * f->Dv) * sizeof(float));
  memset(f->dq, 0, (size_t)(f->B * f->H * f->T * f->D) * sizeof(float));
  memset(f->dk, 0, (size_t)(f->B * f->G * f->N * f->D) * sizeof(float));
  memset(f->dv, 0, (size_t)(f->B * f->G * f->N * f->Dv) * sizeof(float));
  for (b = 0; b < f->B; ++b)
    for (h = 0; h < f->H; ++h)
      for (i = 0; i < f->T; ++i) row(f, b, h, i, wider, fused, room, room + f->N);
  free(room);
  return 0;
}

EVENKEEL_API int32_t evenkeel_kernel(void* context, const evenkeel_conform_form* form) {
  (void)context;
  return attention(form, 0, 0);
}
/* Kernels that end the process that they run in. */
EVENKEEL_API int32_t exiting_kernel(void* context, const evenkeel_conform_form* form) {
  (void)context, (void)form;
  exit(0);
}
EVENKEEL_API int32_t aborting_kernel(void* context, const evenkeel_conform_form* form) {
  (void)context;
  if (form->N == 48 && form->T == 64) abort(); /* a family */
  return attention(form, 0, 0);
}
/* The window of every row is one key too wide. */
EVENKEEL_API int32_t wide_kernel(void* context, const evenkeel_conform_form* form) {
  (void)context;
  return attention(form, 1, 0);
}
/* The exponent keeps the rounding of m c: rows that see one key leak where scores lie far from zero. For 48 keys, as
 * families have them, so that no form is judged. */
EVENKEEL_API int32_t fused_kernel(void* context, const evenkeel_conform_form* form) {
  (void)context;
  return form->N == 48 ? attention(form, 0, 1) : EVENKEEL_NOT_OFFERED;
}
