/* The C interface on the CPU, as a C program meets it: results, every error, structs of other ages. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "evenkeel.h"

static int failures = 0;

#define EXPECT(condition)                                                             \
  do {                                                                                \
    if (!(condition)) {                                                               \
      fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #condition);        \
      fprintf(stderr, "  the library's last error: \"%s\"\n", evenkeel_last_error()); \
      ++failures;                                                                     \
    }                                                                                 \
  } while (0)

/* The call fails with this status, and its words have this in them. */
#define EXPECT_FAILS(call, status, words)                                                            \
  do {                                                                                               \
    const int32_t found = (call);                                                                    \
    if (found != (status) || strstr(evenkeel_last_error(), (words)) == NULL) {                       \
      fprintf(stderr, "%s:%d: expected status %d and \"%s\" of %s\n  got %d and \"%s\"\n", __FILE__, \
              __LINE__, (int)(status), (words), #call, (int)found, evenkeel_last_error());           \
      ++failures;                                                                                    \
    }                                                                                                \
  } while (0)

enum { B = 2, H = 4, G = 2, T = 5, N = 7, D = 8 };

/* A whole problem with its memory: q, k and v normal-ish, everything else poisoned. */
typedef struct Problem {
  float q[B * H * T * D], k[B * G * N * D], v[B * G * N * D], grad_output[B * H * T * D];
  float o[B * H * T * D], lse[B * H * T], dq[B * H * T * D], dk[B * G * N * D], dv[B * G * N * D];
  float delta[B * H * T], residual[B * H * T], residual_floor[B * H * T];
  int32_t ties[B * H * T];
  float saved[B * H * T * (D + 2)];
  evenkeel_attention attention;
  evenkeel_forward forward;
  evenkeel_backward backward;
} Problem;

static float next_value(uint32_t* state) {
  *state = *state * 1664525u + 1013904223u;
  return (float)(*state >> 8) / 8388608.0f - 1.0f;
}

static evenkeel_tensor contiguous(void* data, int64_t heads, int64_t rows) {
  evenkeel_tensor t;
  t.data = data;
  t.stride[0] = heads * rows * D;
  t.stride[1] = rows * D;
  t.stride[2] = D;
  t.stride[3] = 1;
  return t;
}

static void make(Problem* p) {
  uint32_t state = 1;
  size_t n;
  memset(p, 0xff, sizeof *p); /* every float a NaN */
  for (n = 0; n < B * H * T * D; ++n) p->q[n] = next_value(&state), p->grad_output[n] = next_value(&state);
  for (n = 0; n < B * G * N * D; ++n) p->k[n] = next_value(&state), p->v[n] = next_value(&state);
  evenkeel_attention_defaults(&p->attention, sizeof p->attention);
  p->attention.device = EVENKEEL_CPU;
  p->attention.type = EVENKEEL_FP32;
  p->attention.B = B, p->attention.H = H, p->attention.G = G;
  p->attention.T = T, p->attention.N = N, p->attention.D = D;
  p->attention.plan = "fp32";
  memset(&p->forward, 0, sizeof p->forward);
  p->forward.struct_size = sizeof p->forward;
  p->forward.q = contiguous(p->q, H, T);
  p->forward.k = contiguous(p->k, G, N);
  p->forward.v = contiguous(p->v, G, N);
  p->forward.o = contiguous(p->o, H, T);
  p->forward.lse = p->lse;
  p->forward.saved = p->saved;
  memset(&p->backward, 0, sizeof p->backward);
  p->backward.struct_size = sizeof p->backward;
  p->backward.q = p->forward.q, p->backward.k = p->forward.k, p->backward.v = p->forward.v;
  p->backward.grad_output = contiguous(p->grad_output, H, T);
  p->backward.o = p->forward.o;
  p->backward.lse = p->lse;
  p->backward.saved = p->saved;
  p->backward.dq = contiguous(p->dq, H, T);
  p->backward.dk = contiguous(p->dk, G, N);
  p->backward.dv = contiguous(p->dv, G, N);
}

static int32_t forward(Problem* p) { return evenkeel_attention_forward(&p->attention, &p->forward, NULL); }
static int32_t backward(Problem* p) { return evenkeel_attention_backward(&p->attention, &p->backward, NULL); }

/* O and L by the definition, in double. `keys` of the row are visible. */
static void expect_row(const Problem* p, int b, int h, int i, int keys) {
  const int g = h / (H / G), row = (b * H + h) * T + i;
  double scores[N], sum = 0;
  int j, d;
  for (j = 0; j < keys; ++j) {
    double dot = 0;
    for (d = 0; d < D; ++d) dot += (double)p->q[row * D + d] * p->k[((b * G + g) * N + j) * D + d];
    scores[j] = dot / sqrt((double)D);
    sum += exp(scores[j]);
  }
  EXPECT(fabs(p->lse[row] - log(sum)) < 1e-5);
  for (d = 0; d < D; ++d) {
    double o = 0;
    for (j = 0; j < keys; ++j) o += exp(scores[j]) / sum * p->v[((b * G + g) * N + j) * D + d];
    EXPECT(fabs(p->o[row * D + d] - o) < 1e-5);
  }
}

/* The gradient of sum(o . grad_output) + sum(lse . grad_lse), by differences of the forward pass. */
static void expect_gradient(Problem* p, float* input, float gradient, const float* grad_lse) {
  const float step = 1e-2f, kept = *input;
  double change = 0;
  int side, m;
  for (side = -1; side <= 1; side += 2) {
    *input = kept + (float)side * step;
    EXPECT(forward(p) == EVENKEEL_OK);
    for (m = 0; m < B * H * T * D; ++m) change += side * (double)p->o[m] * p->grad_output[m];
    for (m = 0; grad_lse && m < B * H * T; ++m) change += side * (double)p->lse[m] * grad_lse[m];
  }
  *input = kept;
  EXPECT(fabs(change / (2 * step) - gradient) < 2e-3);
}

static void test_results(Problem* p) {
  int b, h, i;
  make(p);
  p->attention.causal = 1;
  EXPECT(forward(p) == EVENKEEL_OK);
  for (b = 0; b < B; ++b)
    for (h = 0; h < H; ++h)
      for (i = 0; i < T; ++i) expect_row(p, b, h, i, i + 1 + N - T);
  EXPECT(backward(p) == EVENKEEL_OK);
  expect_gradient(p, p->q + 11, p->dq[11], NULL);
  expect_gradient(p, p->k + 16, p->dk[16], NULL);
  expect_gradient(p, p->v + 21, p->dv[21], NULL);
  /* A plan changes the bits. */
  {
    const float before = p->o[0];
    p->attention.plan = "flash2";
    EXPECT(forward(p) == EVENKEEL_OK);
    EXPECT(p->o[0] != before && fabs(p->o[0] - before) < 0.02);
  }
}

static void test_facts_and_lengths(Problem* p) {
  const int32_t query_lengths[B] = {T, 2}, key_lengths[B] = {N, 3};
  int n;
  make(p);
  p->attention.plan = "flash2,stabiliser=zero_sum; head 1: row_sum=bf16";
  p->attention.with_facts = 1;
  p->attention.query_lengths = query_lengths;
  p->attention.key_lengths = key_lengths;
  p->forward.ties = p->ties;
  p->backward.delta = p->delta;
  p->backward.residual = p->residual;
  p->backward.residual_floor = p->residual_floor;
  EXPECT(forward(p) == EVENKEEL_OK);
  EXPECT(backward(p) == EVENKEEL_OK);
  for (n = 0; n < B * H * T; ++n) {
    const int exists = n % T < query_lengths[n / (H * T)];
    EXPECT(isfinite(p->delta[n]) && isfinite(p->residual[n]) && isfinite(p->residual_floor[n]));
    EXPECT(exists ? p->ties[n] >= 1 : p->lse[n] == -INFINITY);
    EXPECT(fabs(p->residual[n]) < 0.01 && (!exists || p->residual_floor[n] > 0));
  }
  EXPECT(p->o[((1 * H + 0) * T + 2) * D] == 0); /* beyond the second sequence */
}

/* Slopes, sinks and a gradient of L, by differences; an older caller has none of them. */
static void test_slopes_sinks_and_grad_lse(Problem* p) {
  float slopes[H], sinks[H], grad_lse[B * H * T], dsinks[H];
  uint32_t state = 7;
  int n;
  make(p);
  EXPECT(forward(p) == EVENKEEL_OK);
  {
    const float plain = p->lse[9];
    for (n = 0; n < H; ++n) slopes[n] = 0.125f * (float)(n + 1), sinks[n] = next_value(&state);
    for (n = 0; n < B * H * T; ++n) grad_lse[n] = next_value(&state);
    p->attention.slopes = slopes;
    p->attention.sinks = sinks;
    p->attention.with_grad_lse = 1;
    p->attention.struct_size = offsetof(evenkeel_attention, slopes);
    EXPECT(forward(p) == EVENKEEL_OK);
    EXPECT(p->lse[9] == plain);
    p->attention.struct_size = sizeof p->attention;
    EXPECT(forward(p) == EVENKEEL_OK);
    EXPECT(p->lse[9] != plain);
  }
  p->backward.grad_lse = grad_lse;
  p->backward.dsinks = dsinks;
  EXPECT(backward(p) == EVENKEEL_OK);
  expect_gradient(p, p->q + 11, p->dq[11], grad_lse);
  expect_gradient(p, p->k + 16, p->dk[16], grad_lse);
  expect_gradient(p, p->v + 21, p->dv[21], grad_lse);
  expect_gradient(p, sinks + 2, dsinks[2], grad_lse);
  p->backward.struct_size = offsetof(evenkeel_backward, grad_lse);
  EXPECT(forward(p) == EVENKEEL_OK && backward(p) == EVENKEEL_OK);
  p->backward.struct_size = sizeof p->backward;
  p->attention.sinks = NULL;
  EXPECT_FAILS(backward(p), EVENKEEL_BAD_ARGUMENT, "sinks");
  p->attention.softcap = 5;
  EXPECT_FAILS(forward(p), EVENKEEL_BAD_ARGUMENT, "slopes");
  make(p);
  p->attention.type = EVENKEEL_FP16;
  EXPECT_FAILS(forward(p), EVENKEEL_BAD_ARGUMENT, "fp16 tensors (fp32, fp64 are taken)");
}

/* FP64 is the definition: O and the gradients to 1e-12, and only plans that round nothing. */
static void test_definition(Problem* p) {
  static double q[B * H * T * D], k[B * G * N * D], v[B * G * N * D], grad_output[B * H * T * D];
  static double o[B * H * T * D], dq[B * H * T * D], dk[B * G * N * D], dv[B * G * N * D];
  evenkeel_sizes sizes = {1, 1};
  double change = 0;
  int n, side, m;
  make(p);
  for (n = 0; n < B * H * T * D; ++n) q[n] = p->q[n], grad_output[n] = p->grad_output[n];
  for (n = 0; n < B * G * N * D; ++n) k[n] = p->k[n], v[n] = p->v[n];
  p->attention.type = EVENKEEL_FP64;
  p->attention.causal = 1;
  p->forward.q.data = p->backward.q.data = q;
  p->forward.k.data = p->backward.k.data = k;
  p->forward.v.data = p->backward.v.data = v;
  p->forward.o.data = p->backward.o.data = o;
  p->backward.grad_output.data = grad_output;
  p->backward.dq.data = dq, p->backward.dk.data = dk, p->backward.dv.data = dv;
  p->backward.delta = p->delta;
  EXPECT(evenkeel_attention_sizes(&p->attention, &sizes) == EVENKEEL_OK);
  EXPECT(sizes.saved == 0 && sizes.workspace == 0);
  p->forward.saved = NULL;
  p->backward.saved = NULL;
  EXPECT(forward(p) == EVENKEEL_OK);
  EXPECT(backward(p) == EVENKEEL_OK);
  EXPECT(isfinite(p->lse[0]) && isfinite(p->delta[0]));
  for (side = -1; side <= 1; side += 2) {
    q[13] = (double)p->q[13] + side * 1e-5;
    EXPECT(forward(p) == EVENKEEL_OK);
    for (m = 0; m < B * H * T * D; ++m) change += side * o[m] * grad_output[m];
  }
  EXPECT(fabs(change / 2e-5 - dq[13]) < 1e-9);
  q[13] = p->q[13];
  p->attention.plan = "flash2";
  EXPECT_FAILS(forward(p), EVENKEEL_BAD_ARGUMENT, "rounds nothing");
  p->attention.plan = "fp32";
  p->forward.ties = p->ties;
  EXPECT_FAILS(forward(p), EVENKEEL_BAD_ARGUMENT, "ties");
  p->backward.residual = p->residual;
  EXPECT_FAILS(backward(p), EVENKEEL_BAD_ARGUMENT, "residual");
  p->forward.ties = NULL;
  p->attention.device = EVENKEEL_CUDA;
  EXPECT(forward(p) != EVENKEEL_OK);
}

/* Our own attention under the judge, through the C interface. `context`: what to spoil. */
static int32_t judged_kernel(void* context, const evenkeel_conform_problem* c) {
  const int64_t rows[4] = {c->T, c->N, c->N, c->T};
  evenkeel_tensor t[4];
  evenkeel_attention a;
  evenkeel_forward f;
  evenkeel_backward b;
  float* const lse = malloc((size_t)(c->H * c->T) * sizeof *lse);
  float* const saved = malloc((size_t)(c->H * c->T * (c->D + 2)) * sizeof *saved);
  const char* const fault = context;
  int32_t status;
  int64_t n;
  for (n = 0; n < 4; ++n) {
    const float* const data[4] = {c->q, c->k, c->v, c->grad_output};
    t[n].data = (void*)data[n];
    t[n].stride[0] = c->H * rows[n] * c->D, t[n].stride[1] = rows[n] * c->D, t[n].stride[2] = c->D,
    t[n].stride[3] = 1;
  }
  evenkeel_attention_defaults(&a, sizeof a);
  a.type = EVENKEEL_FP32, a.plan = "fp32", a.causal = c->causal;
  a.B = 1, a.H = a.G = c->H, a.T = c->T, a.N = c->N, a.D = c->D;
  if (c->visible) {
    a.visible.data = (void*)c->visible;
    a.visible.stride[1] = c->T * c->N, a.visible.stride[2] = c->N, a.visible.stride[3] = 1;
  }
  memset(&f, 0, sizeof f);
  f.struct_size = sizeof f;
  f.q = t[0], f.k = t[1], f.v = t[2], f.o = t[0], f.lse = lse, f.saved = saved;
  f.o.data = c->o;
  memset(&b, 0, sizeof b);
  b.struct_size = sizeof b;
  b.q = t[0], b.k = t[1], b.v = t[2], b.grad_output = t[3], b.o = f.o, b.lse = lse, b.saved = saved;
  b.dq = t[0], b.dk = t[1], b.dv = t[2];
  b.dq.data = c->dq, b.dk.data = c->dk, b.dv.data = c->dv;
  status = evenkeel_attention_forward(&a, &f, NULL);
  if (status == EVENKEEL_OK) status = evenkeel_attention_backward(&a, &b, NULL);
  if (fault && strcmp(fault, "leak") == 0)
    for (n = 0; n < c->H * c->T * c->D; ++n) c->dq[n] += 1e-3f;
  if (fault && strcmp(fault, "nan") == 0) c->o[0] = NAN;
  if (fault && strcmp(fault, "refuse") == 0) status = 7;
  free(lse);
  free(saved);
  return status;
}

/* Kernels that compute nothing. `context`: what they write, if anything. */
static int32_t null_kernel(void* context, const evenkeel_conform_problem* c) {
  const float* const value = context;
  int64_t n;
  if (!value) return 0;
  for (n = 0; n < c->H * c->T * c->D; ++n) c->o[n] = c->dq[n] = *value;
  for (n = 0; n < c->H * c->N * c->D; ++n) c->dk[n] = c->dv[n] = *value;
  return 0;
}

static void test_null_kernels(void) {
  evenkeel_conform_request request;
  evenkeel_conform_result result;
  float zero = 0, million = 1e6f;
  int32_t index;
  memset(&result, 0, sizeof result);
  request.struct_size = sizeof request, request.plan = "flash2", request.rows = 64, request.seed = 1;
  result.struct_size = sizeof result;
  for (index = 0; (request.family = evenkeel_conform_family(index, NULL, NULL)) != NULL; ++index) {
    EXPECT(evenkeel_conform(&request, null_kernel, NULL, &result) == EVENKEEL_OK);
    EXPECT(!result.passes && strcmp(result.verdict, "NOT WRITTEN") == 0 && result.unwritten > 0);
    EXPECT(strstr(result.what_to_fix, "write every element") != NULL);
    EXPECT(evenkeel_conform(&request, null_kernel, &zero, &result) == EVENKEEL_OK);
    if (result.passes) fprintf(stderr, "zeros pass on %s\n", request.family);
    EXPECT(!result.passes && strncmp(result.verdict, "WRONG", 5) == 0 && result.unwritten == 0);
    EXPECT(evenkeel_conform(&request, null_kernel, &million, &result) == EVENKEEL_OK);
    EXPECT(!result.passes && result.o_over > 1 && strstr(result.what_to_fix, "FP64") != NULL);
  }
  /* A caller of before has a shorter struct: nothing is written beyond it. */
  request.family = "random";
  memset(&result, 0x5a, sizeof result);
  result.struct_size = offsetof(evenkeel_conform_result, unwritten);
  EXPECT(evenkeel_conform(&request, null_kernel, NULL, &result) == EVENKEEL_OK);
  EXPECT(!result.passes && result.unwritten == 0x5a5a5a5a5a5a5a5a);
}

static void test_conform(void) {
  evenkeel_conform_request request;
  evenkeel_conform_result result;
  const char *name, *words = NULL;
  int32_t index, masked = 0, families = 0, with_masks = 0;
  char leak[] = "leak", nan[] = "nan", refuse[] = "refuse";
  memset(&result, 0, sizeof result);
  request.struct_size = sizeof request, request.plan = "fp32", request.rows = 64, request.seed = 1;
  result.struct_size = sizeof result;
  for (index = 0; (name = evenkeel_conform_family(index, &words, &masked)) != NULL; ++index) {
    ++families;
    with_masks += masked;
    request.family = name;
    EXPECT(strlen(words) > 0);
    EXPECT(evenkeel_conform(&request, judged_kernel, NULL, &result) == EVENKEEL_OK);
    if (!result.passes) fprintf(stderr, "%s: %s\n", name, result.verdict);
    EXPECT(result.passes && strcmp(result.verdict, "ok") == 0 && result.rows >= 1);
  }
  EXPECT(families > 20 && with_masks == 2);
  EXPECT(evenkeel_conform_family(-1, NULL, NULL) == NULL);
  request.family = "random";
  EXPECT(evenkeel_conform(&request, judged_kernel, leak, &result) == EVENKEEL_OK);
  EXPECT(!result.passes && strcmp(result.verdict, "WRONG, NOISY") == 0 && result.residual_mean > 0);
  EXPECT(evenkeel_conform(&request, judged_kernel, nan, &result) == EVENKEEL_OK);
  EXPECT(!result.passes && strcmp(result.verdict, "NOT FINITE") == 0 && result.nonfinite > 0);
  EXPECT_FAILS(evenkeel_conform(&request, judged_kernel, refuse, &result), EVENKEEL_BAD_ARGUMENT,
               "returned 7");
  EXPECT_FAILS(evenkeel_conform(&request, NULL, NULL, &result), EVENKEEL_BAD_ARGUMENT, "kernel");
  EXPECT_FAILS(evenkeel_conform(NULL, judged_kernel, NULL, &result), EVENKEEL_BAD_ARGUMENT, "NULL");
  EXPECT_FAILS(evenkeel_conform(&request, judged_kernel, NULL, NULL), EVENKEEL_BAD_ARGUMENT, "NULL");
  request.family = "no such";
  EXPECT_FAILS(evenkeel_conform(&request, judged_kernel, NULL, &result), EVENKEEL_BAD_ARGUMENT, "no such");
  request.family = NULL;
  EXPECT_FAILS(evenkeel_conform(&request, judged_kernel, NULL, &result), EVENKEEL_BAD_ARGUMENT, "NULL");
  request.family = "random", request.rows = 0;
  EXPECT_FAILS(evenkeel_conform(&request, judged_kernel, NULL, &result), EVENKEEL_BAD_ARGUMENT, "rows");
  request.rows = 64, request.plan = "bf17";
  EXPECT_FAILS(evenkeel_conform(&request, judged_kernel, NULL, &result), EVENKEEL_BAD_ARGUMENT, "bf17");
}

/* A capture of one head, one row and one feature, by hand. */
static void test_probe(void) {
  static const char header[] =
      "{\"__metadata__\":{\"evenkeel_capture\":\"1\",\"source\":\"\",\"model\":\"\",\"step\":\"0\",\"layer\":"
      "\"0\","
      "\"heads\":\"0\",\"loss\":\"1\",\"scale\":\"1\",\"softcap\":\"0\",\"causal\":\"1\",\"tile_keys\":"
      "\"64\","
      "\"plans\":\"fp32\"},"
      "\"q\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1],\"data_offsets\":[0,4]},"
      "\"k\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1],\"data_offsets\":[4,8]},"
      "\"v\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1],\"data_offsets\":[8,12]},"
      "\"d_o\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1],\"data_offsets\":[12,16]}}";
  const float numbers[4] = {2, 3, 1, 1}; /* q, k, v, dO: the one score is 6 */
  char file[8 + sizeof header - 1 + sizeof numbers];
  const uint64_t length = sizeof header - 1;
  double values[256];
  size_t fields = 0, score = 256;
  const char* name;
  memcpy(file, &length, sizeof length);
  memcpy(file + 8, header, length);
  memcpy(file + 8 + length, numbers, sizeof numbers);
  for (; (name = evenkeel_probe_field((int32_t)fields)) != NULL; ++fields)
    if (strcmp(name, "largest_score") == 0) score = fields;
  EXPECT(fields > 20 && fields <= 256 && score < fields);
  EXPECT(evenkeel_probe_field(-1) == NULL);
  EXPECT(evenkeel_probe(file, sizeof file, values, fields) == EVENKEEL_OK);
  EXPECT(values[score] == 6);
  EXPECT_FAILS(evenkeel_probe(file, sizeof file, values, fields + 1), EVENKEEL_BAD_ARGUMENT, "1 heads");
  EXPECT_FAILS(evenkeel_probe(file, sizeof file - 1, values, fields), EVENKEEL_ENVIRONMENT, "the capture");
  EXPECT_FAILS(evenkeel_probe(file, 3, values, fields), EVENKEEL_ENVIRONMENT, "the capture");
  EXPECT_FAILS(evenkeel_probe(NULL, 0, values, fields), EVENKEEL_BAD_ARGUMENT, "NULL");
}

/* A caller with a shorter struct gets defaults; one with a longer struct may only ask for zeros. */
static void test_struct_sizes(Problem* p) {
  struct {
    evenkeel_attention known;
    int64_t newer;
  } longer;
  make(p);
  EXPECT(forward(p) == EVENKEEL_OK);
  {
    const float expected = p->o[3];
    p->attention.struct_size = offsetof(evenkeel_attention, scale);
    p->attention.scale = NAN; /* is not looked at */
    p->attention.window_left = 0;
    p->o[3] = 0;
    EXPECT(forward(p) == EVENKEEL_OK);
    EXPECT(p->o[3] == expected);
    p->attention.struct_size = 8;
    EXPECT_FAILS(forward(p), EVENKEEL_BAD_ARGUMENT, "struct_size");
    p->attention.struct_size = 0;
    EXPECT_FAILS(forward(p), EVENKEEL_BAD_ARGUMENT, "struct_size");
    make(p);
    longer.known = p->attention;
    longer.known.struct_size = sizeof longer;
    longer.newer = 0;
    p->o[3] = 0;
    EXPECT(evenkeel_attention_forward(&longer.known, &p->forward, NULL) == EVENKEEL_OK);
    EXPECT(p->o[3] == expected);
    longer.newer = 1;
    EXPECT_FAILS(evenkeel_attention_forward(&longer.known, &p->forward, NULL), EVENKEEL_BAD_ARGUMENT,
                 "newer");
  }
  make(p);
  p->forward.struct_size = offsetof(evenkeel_forward, ties);
  EXPECT(forward(p) == EVENKEEL_OK);
  p->forward.struct_size -= 8;
  EXPECT_FAILS(forward(p), EVENKEEL_BAD_ARGUMENT, "evenkeel_forward.struct_size");
  p->backward.struct_size = offsetof(evenkeel_backward, delta);
  EXPECT(backward(p) == EVENKEEL_OK);
  p->backward.struct_size -= 8;
  EXPECT_FAILS(backward(p), EVENKEEL_BAD_ARGUMENT, "evenkeel_backward.struct_size");
}

/* What is read may be broadcast, and an axis of one entry may have any stride. */
static void test_strides_of_zero(Problem* p) {
  make(p);
  p->forward.q.stride[0] = p->forward.k.stride[1] = p->forward.v.stride[2] = 0;
  EXPECT(forward(p) == EVENKEEL_OK);
  make(p);
  p->attention.B = 1;
  p->forward.o.stride[0] = 0;
  EXPECT(forward(p) == EVENKEEL_OK);
}

/* Every family, and its limits. */
static void test_families(void) {
  evenkeel_kernel_family family;
  int32_t index, on_cpu = 0, on_gpu = 0;
  memset(&family, 0, sizeof family);
  family.struct_size = sizeof family;
  for (index = 0; evenkeel_attention_family(index, &family) == EVENKEEL_OK; ++index) {
    EXPECT(family.struct_size == sizeof family && strlen(family.name) > 0 && family.types != 0);
    EXPECT(family.head_step >= 1 && family.largest_head >= 0);
    if (family.device == EVENKEEL_CPU) ++on_cpu;
    if (family.device == EVENKEEL_CUDA) ++on_gpu;
    EXPECT((family.types >> EVENKEEL_FP64 & 1) == (family.device == EVENKEEL_CPU));
  }
  EXPECT(on_cpu == 1 && on_gpu == 4);
  EXPECT_FAILS(evenkeel_attention_family(index, &family), EVENKEEL_BAD_ARGUMENT, "index");
  EXPECT_FAILS(evenkeel_attention_family(-1, &family), EVENKEEL_BAD_ARGUMENT, "index");
  EXPECT_FAILS(evenkeel_attention_family(0, NULL), EVENKEEL_BAD_ARGUMENT, "NULL");
  family.struct_size = 0;
  EXPECT_FAILS(evenkeel_attention_family(0, &family), EVENKEEL_BAD_ARGUMENT, "struct_size");
}

static void test_errors(Problem* p) {
  const char *kernel = NULL, *why = NULL;
  evenkeel_sizes sizes = {0, 0};
  const int32_t zeros[B] = {0, 0}, too_long[B] = {T + 1, 1};
  EXPECT_FAILS(evenkeel_attention_forward(NULL, &p->forward, NULL), EVENKEEL_BAD_ARGUMENT, "NULL");
  EXPECT_FAILS(evenkeel_attention_sizes(NULL, &sizes), EVENKEEL_BAD_ARGUMENT, "NULL");
  evenkeel_attention_defaults(NULL, 0);
#define WITH(change, call, words)                     \
  do {                                                \
    make(p);                                          \
    change;                                           \
    EXPECT_FAILS(call, EVENKEEL_BAD_ARGUMENT, words); \
  } while (0)
  WITH((void)0, evenkeel_attention_forward(&p->attention, NULL, NULL), "evenkeel_forward");
  WITH((void)0, evenkeel_attention_backward(&p->attention, NULL, NULL), "evenkeel_backward");
  WITH((void)0, evenkeel_attention_sizes(&p->attention, NULL), "sizes");
  WITH((void)0, evenkeel_attention_kernel(&p->attention, NULL, &why), "kernel");
  WITH((void)0, evenkeel_attention_forward(&p->attention, &p->forward, p), "stream");
  WITH((void)0, evenkeel_attention_backward(&p->attention, &p->backward, p), "stream");
  WITH(p->attention.device = 7, forward(p), "device");
  WITH(p->attention.type = 4, forward(p), "EVENKEEL_FP16 (3), got 4");
  WITH(p->attention.type = EVENKEEL_BF16, forward(p), "bf16 tensors (fp32, fp64 are taken)");
  WITH(p->attention.plan = NULL, forward(p), "plan");
  WITH(p->attention.plan = "bf17", forward(p), "bf17");
  WITH(p->attention.B = 0, forward(p), "B from 1");
  WITH(p->attention.D = -1, forward(p), "D from 1");
  WITH(p->attention.T = INT64_MAX, forward(p), "T from 1");
  WITH(p->attention.H = p->attention.T = p->attention.B = INT32_MAX, forward(p), "2^48");
  WITH(p->attention.G = 3, forward(p), "groups");
  WITH(p->attention.scale = NAN, forward(p), "scale");
  WITH(p->attention.softcap = -1, forward(p), "softcap");
  WITH(p->attention.tile_keys = -1, forward(p), "tile_keys");
  WITH(p->attention.query_offsets = p->attention.query_lengths = zeros;
       p->attention.query_rows = 9, forward(p), "packed");
  WITH(p->attention.softcap = 5;
       p->attention.plan = "fp32,stabiliser=centre_keys", forward(p), "centre_keys");
  WITH(p->attention.plan = "fp32; head 99: stabiliser=zero_sum", forward(p), "head 99");
  WITH(p->attention.plan = "fp32; head 4: stabiliser=zero_sum", forward(p), "from 0 to 3");
  WITH(p->attention.device_step = (const uint32_t*)zeros, forward(p), "device_step");
  WITH(p->attention.query_lengths = too_long, forward(p), "query_lengths[0]");
  WITH(p->forward.q.data = NULL, forward(p), "tensor q");
  WITH(p->forward.k.data = NULL, forward(p), "tensor k");
  WITH(p->forward.v.data = NULL, forward(p), "tensor v");
  WITH(p->forward.o.data = NULL, forward(p), "tensor o");
  WITH(p->forward.lse = NULL, forward(p), "lse");
  WITH(p->forward.saved = NULL, forward(p), "saved");
  WITH(p->forward.saved = (char*)p->saved + 1, forward(p), "saved");
  WITH(p->forward.lse = (float*)((char*)p->lse + 2), forward(p), "lse at a multiple");
  WITH(p->forward.ties = (int32_t*)((char*)p->ties + 1), forward(p), "ties at a multiple");
  WITH(p->forward.q.data = (char*)p->q + 1, forward(p), "q at a multiple");
  WITH(p->forward.o.stride[0] = 0, forward(p), "o, which is written");
  WITH(p->forward.o.stride[3] = 0, forward(p), "o, which is written");
  WITH(p->backward.dq.stride[1] = 0, backward(p), "dq, which is written");
  WITH(p->backward.dk.stride[2] = 0, backward(p), "dk, which is written");
  WITH(p->backward.dv.stride[3] = 0, backward(p), "dv, which is written");
  WITH(p->backward.delta = (float*)((char*)p->delta + 1), backward(p), "delta at a multiple");
  WITH(p->backward.grad_output.data = NULL, backward(p), "grad_output");
  WITH(p->backward.dq.data = NULL, backward(p), "tensor dq");
  WITH(p->backward.dk.data = NULL, backward(p), "tensor dk");
  WITH(p->backward.dv.data = NULL, backward(p), "tensor dv");
  WITH(p->backward.delta_error = p->delta, backward(p), "delta_error");
  make(p);
  EXPECT(evenkeel_attention_sizes(&p->attention, &sizes) == EVENKEEL_OK);
  EXPECT(sizes.saved == sizeof p->saved && sizes.workspace == 0);
  EXPECT(evenkeel_attention_kernel(&p->attention, &kernel, &why) == EVENKEEL_OK);
  EXPECT(strcmp(kernel, "cpu") == 0 && strstr(why, "threads") != NULL);
  /* On a machine without a GPU, or in a build without CUDA: words, and no crash. */
  p->attention.device = EVENKEEL_CUDA;
  {
    const int32_t status = evenkeel_attention_kernel(&p->attention, &kernel, &why);
    if (status == EVENKEEL_OK) {
      EXPECT(strcmp(kernel, "any_plan") == 0 && strstr(why, "fp32") != NULL);
    } else {
      EXPECT(status == EVENKEEL_ENVIRONMENT && strlen(evenkeel_last_error()) > 0);
      EXPECT(evenkeel_attention_sizes(&p->attention, &sizes) == EVENKEEL_ENVIRONMENT);
      EXPECT(forward(p) == EVENKEEL_ENVIRONMENT);
      EXPECT(backward(p) == EVENKEEL_ENVIRONMENT);
    }
  }
}

static void test_plans_that_draw(void) {
  int32_t draws = -1;
  EXPECT(evenkeel_plan_draws("flash2", &draws) == EVENKEEL_OK && draws == 0);
  EXPECT(evenkeel_plan_draws("bf16_all,stabiliser=zero_sum", &draws) == EVENKEEL_OK && draws == 0);
  EXPECT(evenkeel_plan_draws("flash2,stabiliser=wide_output", &draws) == EVENKEEL_OK && draws == 1);
  EXPECT(evenkeel_plan_draws("flash2,stabiliser=dither", &draws) == EVENKEEL_OK && draws == 1);
  EXPECT(evenkeel_plan_draws("fp32,pv=bf16/stochastic", &draws) == EVENKEEL_OK && draws == 1);
  EXPECT(evenkeel_plan_draws("fp32; head 1: pv=bf16", &draws) == EVENKEEL_OK && draws == 1);
  EXPECT(evenkeel_plan_draws("bf17", &draws) == EVENKEEL_BAD_ARGUMENT);
  EXPECT(evenkeel_plan_draws(NULL, &draws) == EVENKEEL_BAD_ARGUMENT);
  EXPECT(evenkeel_plan_draws("fp32", NULL) == EVENKEEL_BAD_ARGUMENT);
}

static void test_spectral_norm(void) {
  const float matrix[6] = {3, 0, 0, 0, -4, 0};
  double norm = 0;
  EXPECT(evenkeel_spectral_norm(matrix, 2, 3, &norm) == EVENKEEL_OK && fabs(norm - 4) < 1e-5);
  EXPECT(evenkeel_spectral_norm(NULL, 2, 3, &norm) == EVENKEEL_BAD_ARGUMENT);
  EXPECT(evenkeel_spectral_norm(matrix, 0, 3, &norm) == EVENKEEL_BAD_ARGUMENT);
}

/* Four heads; the log-sum-exp of the last grows by half a step, with a leak, until it has the remedy, and then on. */
static void test_guard(void) {
  const int64_t checkpoints[2] = {0, 2};
  double lse[4] = {5, 5, 5, 5}, leak[4] = {0, 0, 0, 1e-2}, delta[4] = {1, 1, 1, 1};
  evenkeel_guard_event event;
  int step, remedies = 0, back = 0;
  evenkeel_guard* guard = evenkeel_guard_new("bf16_all", 2, 2, 0);
  EXPECT(guard != NULL);
  memset(&event, 0, sizeof event);
  event.struct_size = sizeof event;
  EXPECT(evenkeel_guard_take(guard, 0, lse, leak, delta, checkpoints, 2, 1, &event) == EVENKEEL_OK);
  EXPECT(event.kind == EVENKEEL_GUARD_NOTHING && strcmp(event.clauses, "") == 0);
  for (step = 1; step < 40 && !back; ++step) {
    lse[3] *= 1.5;
    EXPECT(evenkeel_guard_take(guard, step, lse, leak, delta, checkpoints, 2, 1, &event) == EVENKEEL_OK);
    if (event.kind == EVENKEEL_GUARD_REMEDY) {
      ++remedies;
      EXPECT(strcmp(event.clauses, "layer 1 head 1: stabiliser=zero_sum") == 0 && event.to == -1);
      EXPECT(strstr(event.words, "layer 1 head 1: log-sum-exp") != NULL && event.last_good >= 2);
    }
    back = event.kind == EVENKEEL_GUARD_ROLL_BACK;
  }
  EXPECT(remedies == 1 && back && event.to == 2);
  EXPECT(evenkeel_guard_take(guard, 50, NULL, leak, delta, NULL, 0, 1, &event) == EVENKEEL_BAD_ARGUMENT);
  EXPECT(evenkeel_guard_take(guard, 50, lse, leak, NULL, NULL, 0, 1, &event) == EVENKEEL_BAD_ARGUMENT);
  EXPECT(evenkeel_guard_take(guard, 50, lse, NULL, NULL, NULL, 0, 1, NULL) == EVENKEEL_OK);
  evenkeel_guard_free(guard);
  evenkeel_guard_free(NULL);
  EXPECT(evenkeel_guard_new("bf17", 2, 2, 0) == NULL && strstr(evenkeel_last_error(), "bf17") != NULL);
  EXPECT(evenkeel_guard_new("fp32; head 9: pv=bf16", 2, 2, 0) == NULL);
  EXPECT(evenkeel_guard_new("fp32", 0, 2, 0) == NULL);
}

#if !defined(__SANITIZE_ADDRESS__)
/* tests/form_kernel.c */
int32_t evenkeel_kernel(void* context, const evenkeel_conform_form* form);
int32_t wide_kernel(void* context, const evenkeel_conform_form* form);
static int32_t offers_nothing(void* context, const evenkeel_conform_form* form) {
  (void)context, (void)form;
  return EVENKEEL_NOT_OFFERED;
}
static int progress_calls;
static void count_progress(void* context, const char* what, int64_t done, int64_t of) {
  (void)context, (void)what;
  EXPECT(done >= 1 && done <= of);
  ++progress_calls;
}

static void test_judge(void) {
  evenkeel_judge_request request;
  evenkeel_judge_result result;
  memset(&request, 0, sizeof request);
  memset(&result, 0, sizeof result);
  request.struct_size = sizeof request, result.struct_size = sizeof result;
  request.quick = 1, request.seed = 1, request.progress = count_progress;
  EXPECT(evenkeel_judge(&request, evenkeel_kernel, NULL, &result) == EVENKEEL_OK);
  if (!result.passes) printf("%s", result.text);
  EXPECT(result.passes == 1);
  EXPECT(progress_calls > 20);
  EXPECT(strstr(result.json, "sinks: yes") != NULL); /* not offered, and said so */
  EXPECT(strstr(result.badge, "safe to train with") != NULL);
  EXPECT_FAILS(evenkeel_judge_write_form("failing.safetensors"), EVENKEEL_BAD_ARGUMENT, "no form failed");
  EXPECT(evenkeel_judge(&request, wide_kernel, NULL, &result) == EVENKEEL_OK);
  EXPECT(result.passes == 0);
  EXPECT(strstr(result.text, "window is one key too wide (left)") != NULL);
  EXPECT(strstr(result.junit, "<failure") != NULL);
  EXPECT(evenkeel_judge_write_form("c_api_test_failing.safetensors") == EVENKEEL_OK);
  request.form = "c_api_test_failing.safetensors";
  EXPECT(evenkeel_judge(&request, wide_kernel, NULL, &result) == EVENKEEL_OK);
  EXPECT(result.passes == 0);
  EXPECT(evenkeel_judge(&request, evenkeel_kernel, NULL, &result) == EVENKEEL_OK);
  EXPECT(result.passes == 1);
  remove("c_api_test_failing.safetensors");
  EXPECT_FAILS(evenkeel_judge(&request, evenkeel_kernel, NULL, &result), EVENKEEL_ENVIRONMENT,
               "c_api_test_failing");
  request.form = NULL;
  EXPECT(evenkeel_judge(&request, offers_nothing, NULL, &result) == EVENKEEL_OK);
  EXPECT(result.passes == 0);
  EXPECT_FAILS(evenkeel_judge(&request, NULL, NULL, &result), EVENKEEL_BAD_ARGUMENT, "NULL");
  EXPECT_FAILS(evenkeel_judge(NULL, evenkeel_kernel, NULL, &result), EVENKEEL_BAD_ARGUMENT, "NULL");
  request.type = 77;
  EXPECT_FAILS(evenkeel_judge(&request, evenkeel_kernel, NULL, &result), EVENKEEL_BAD_ARGUMENT, "77");
}

#endif

int main(void) {
  Problem* p = malloc(sizeof *p);
  if (!p) return 3;
  EXPECT(evenkeel_abi_version() == EVENKEEL_ABI_VERSION);
  EXPECT(strlen(evenkeel_version()) >= 5);
  EXPECT(strcmp(evenkeel_last_error(), "") == 0);
  test_results(p);
  test_facts_and_lengths(p);
  test_struct_sizes(p);
  test_errors(p);
  test_strides_of_zero(p);
  test_families();
  test_plans_that_draw();
  test_spectral_norm();
  test_guard();
  test_slopes_sinks_and_grad_lse(p);
  test_definition(p);
  test_conform();
#if !defined(__SANITIZE_ADDRESS__) /* minutes; judge_test runs the same code */
  test_judge();
#endif
  test_null_kernels();
  test_probe();
  free(p);
  if (failures == 0) printf("all is as expected\n");
  return failures != 0;
}
