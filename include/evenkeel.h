/* The C interface of Evenkeel: attention forward and backward by a precision plan, on the CPU or on a GPU; a judge of
 * anyone's attention; roundings to any format; probes of a captured layer.
 *
 * No call allocates device memory, synchronises a stream or a device, or lets an exception through. Calls may be made
 * from any thread, several at once. Every call that can fail returns an evenkeel_status; evenkeel_last_error()
 * has the words.
 *
 * Structs start with their own size, so that a library and a caller of different age understand each other: what an
 * older caller does not have takes its default. Fill them with evenkeel_attention_defaults() first.
 *
 * One alphabet of sizes: B batch, H query heads, G key/value heads (H a multiple of G), T query rows, N keys, D head
 * size. Strides count elements. "Device memory" below is host memory for EVENKEEL_CPU.
 */
#ifndef EVENKEEL_H
#define EVENKEEL_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define EVENKEEL_API
#else
#define EVENKEEL_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Raised where a caller of the older header would be misunderstood. */
#define EVENKEEL_ABI_VERSION 1

typedef enum evenkeel_status {
  EVENKEEL_OK = 0,
  EVENKEEL_BAD_ARGUMENT = 1, /* an invalid argument: the caller's fault */
  EVENKEEL_ENVIRONMENT = 2,  /* no GPU, built without CUDA, an error that CUDA reports, an invalid capture */
  EVENKEEL_INTERNAL = 3      /* anything else, out of memory included */
} evenkeel_status;

typedef enum evenkeel_device { EVENKEEL_CPU = 0, EVENKEEL_CUDA = 1 } evenkeel_device;
/* A GPU takes BF16, FP32 and FP16 (with a plan whose 16-bit sites are fp16), the CPU FP32 and FP64. FP64 is the definition of
 * attention, where nothing is rounded: it takes plans that round nothing ("fp32", with keel if wanted) and has no facts but
 * delta. */
typedef enum evenkeel_type {
  EVENKEEL_BF16 = 0,
  EVENKEEL_FP32 = 1,
  EVENKEEL_FP64 = 2,
  EVENKEEL_FP16 = 3
} evenkeel_type;

typedef struct evenkeel_tensor {
  void* data;
  int64_t stride[4]; /* (B, H or G, T or N, D) */
} evenkeel_tensor;

/* One attention problem. Required: up to and including plan. */
typedef struct evenkeel_attention {
  uint64_t struct_size; /* sizeof(evenkeel_attention) of the caller */
  int32_t device;       /* evenkeel_device */
  int32_t type;         /* evenkeel_type: of q, k, v, o and their gradients */
  int64_t B, H, G, T, N, D;
  /* "flash2,stabiliser=consistent"; scopes choose heads and layers: "bf16_all; layer 1 head 3,7: output_for_delta=fp32" */
  const char* plan;
  /* --- the rest may be left to its default */
  float scale;   /* 0 (default) stands for 1 / sqrt(D): a scale of 0 itself cannot be asked for */
  float softcap; /* 0 (default): off */
  int32_t causal;
  int64_t window_left, window_right; /* row i sees [i - left, i + right]; below 0 (default): unbounded */
  /* Device memory, (B) each, or NULL (default): all T, all N. Outputs beyond are zero. The last row sees the last key. */
  const int32_t *query_lengths, *key_lengths;
  /* Device memory, (B) each, or NULL (default): where sequence b starts on the row axis of packed tensors, whose batch
   * stride is 0. With them: the rows and keys of all sequences together. GPU only. */
  const int32_t *query_offsets, *key_offsets;
  int64_t query_rows, key_rows;
  evenkeel_tensor visible; /* uint8, (B, H, T, N): nonzero is visible; NULL (default): all */
  int64_t
      tile_keys; /* keys a tile: 64 (default), or 0 for all in one; decides where row_sum and pv are rounded */
  uint32_t step, layer; /* of the random numbers; `layer` also chooses the plan's clauses */
  const uint32_t*
      device_step; /* device memory, or NULL: read instead of step, for replayed graphs. GPU only */
  /* Some of ties, delta, residual, residual_floor, delta_error will be asked for, in either pass. */
  int32_t with_facts;
  /* 1 (default) promises that every tensor of both passes starts at a multiple of 16 bytes, with a last stride of 1
   * and others that are multiples of 8: the fast kernels need that. The CPU does not look. */
  int32_t aligned;
  /* Device memory, (H) each, or NULL (default): none. Slopes (ALiBi): a score falls by slope times the distance of row
   * and key. The last row is at the last key. Not with softcap. Sinks: one more score of every row, without a value. It takes
   * its share of the probability, and L counts it. */
  const float *slopes, *sinks;
  /* Backward will be given a gradient of L: only kernels that take one are chosen. */
  int32_t with_grad_lse;
  int32_t reserved; /* 0 */
  /* Features of v, o and their gradients; 0 (default): D. Callers whose struct_size ends before it have D. */
  int64_t Dv;
} evenkeel_attention;

/* What a pass reads and writes. Tensors are (B, H, T, D) for q and its gradient, (B, G, N, D) for k and its own; with Dv in
 * the place of D for o and for v; rows are (B, H, T), contiguous. */
typedef struct evenkeel_forward {
  uint64_t struct_size;
  evenkeel_tensor q, k, v;
  evenkeel_tensor
      o; /* no two elements of a tensor that is written share memory: each stride steps over all that the smaller ones reach */
  float* lse; /* L = log sum exp, -inf for a row that sees no key */
  void*
      saved; /* evenkeel_sizes.saved bytes, aligned to 256: for backward; opaque (wide_output: O's missing bits) */
  void* workspace; /* evenkeel_sizes.workspace bytes, aligned to 256: free for other use after the pass */
  int32_t* ties;   /* optional: visible scores within tie_tolerance of the row's maximum */
} evenkeel_forward;

typedef struct evenkeel_backward {
  uint64_t struct_size;
  evenkeel_tensor q, k, v, grad_output;
  evenkeel_tensor o; /* o, lse, saved: as forward left them */
  const float* lse;
  const void* saved;
  void* workspace;
  evenkeel_tensor dq, dk, dv;
  /* Optional: delta as used, keel included; the zero-sum residual sum_j dS_ij / scale and the standard deviation that
   * rounding dS must give it; delta less sum P dP / sum P (GPU only). */
  float *delta, *residual, *residual_floor, *delta_error;
  /* Optional: the gradient of L, (B, H, T), which is read; the gradient of the sinks, (H), which is written. */
  const float* grad_lse;
  float* dsinks;
} evenkeel_backward;

/* `saved` is B H T times a number that depends on neither B, T nor N. Forward writes every byte of it, and the same bytes
 * for the same problem and numbers. */
typedef struct evenkeel_sizes {
  uint64_t saved, workspace; /* bytes */
} evenkeel_sizes;

EVENKEEL_API int32_t evenkeel_abi_version(void); /* EVENKEEL_ABI_VERSION of the library */
EVENKEEL_API const char* evenkeel_version(void); /* "MAJOR.MINOR.PATCH" */
/* Of this thread's latest call that failed; "" before the first. Valid until this thread's next call. */
EVENKEEL_API const char* evenkeel_last_error(void);

/* Sets every field but the required ones to its default; those are zeroed. `size` is sizeof(evenkeel_attention). */
EVENKEEL_API void evenkeel_attention_defaults(evenkeel_attention* attention, size_t size);

/* Whether a plan draws random numbers in some kernel, so that results depend on `step`: *draws is 1 or 0. Kernels may round
 * the O that stabilisers keep wide stochastically, so such plans draw; a plan with clauses for layers or heads counts as
 * one that draws. */
EVENKEEL_API int32_t evenkeel_plan_draws(const char* plan, int32_t* draws);
/* What one head has of a plan, as a plan without clauses: "flash2; layer 1: stabiliser=zero_sum" gives
 * "flash2,stabiliser=zero_sum" at layer 1. Valid until this thread's next call. */
EVENKEEL_API int32_t evenkeel_plan_of_head(const char* plan, int32_t layer, int32_t head, const char** text);

/* How many bytes of memory the two passes of a problem need. */
EVENKEEL_API int32_t evenkeel_attention_sizes(const evenkeel_attention* attention, evenkeel_sizes* sizes);
/* Which family of kernels runs ("hopper", "hopper_fp8", "ampere", "any_plan", "cpu") and why. Valid until this thread's next call. */
EVENKEEL_API int32_t evenkeel_attention_kernel(const evenkeel_attention* attention, const char** kernel,
                                               const char** why);
/* The limits of one family of kernels; a problem beyond those of every family of its device is refused. */
typedef struct evenkeel_kernel_family {
  uint64_t struct_size;
  const char* name;                /* "hopper"; static */
  int32_t device;                  /* evenkeel_device */
  uint32_t types;                  /* bit n: takes evenkeel_type n */
  int64_t largest_head, head_step; /* head sizes are multiples of head_step up to largest_head; 0: any */
} evenkeel_kernel_family;
/* The index-th family, the fastest first. EVENKEEL_BAD_ARGUMENT beyond the last. */
EVENKEEL_API int32_t evenkeel_attention_family(int32_t index, evenkeel_kernel_family* family);
/* `stream` is a cudaStream_t; NULL for the CPU, where the call returns when the work is done. */
EVENKEEL_API int32_t evenkeel_attention_forward(const evenkeel_attention* attention,
                                                const evenkeel_forward* pass, void* stream);
/* The gradients, from what the forward pass of the same problem left in o, lse and saved. */
EVENKEEL_API int32_t evenkeel_attention_backward(const evenkeel_attention* attention,
                                                 const evenkeel_backward* pass, void* stream);

/* --- Conform: any attention judged by the sign of its errors on families of hard inputs (docs/numerics.md has the
 * bounds). The inputs are BF16 numbers; the zero-sum residual is read off dQ, since every key ends with the same feature.
 * Outputs are filled with NaN before each call and must be wholly written, finite and near FP64. */

/* One chunk of a family, in host memory, contiguous, FP32: B is 1, G is H, scale is 1 / sqrt(D). */
typedef struct evenkeel_conform_problem {
  uint64_t struct_size;
  int64_t H, T, N, D;
  int32_t causal;               /* T is N then */
  const uint8_t* visible;       /* (H, T, N), or NULL: all */
  const float *q, *grad_output; /* (H, T, D) */
  const float *k, *v;           /* (H, N, D) */
  float *o, *dq;                /* (H, T, D): to be written */
  float *dk, *dv;               /* (H, N, D) */
} evenkeel_conform_problem;
/* Writes o, dq, dk, dv. 0: done; anything else ends the call with EVENKEEL_BAD_ARGUMENT. Called by the calling thread. */
typedef int32_t (*evenkeel_conform_kernel)(void* context, const evenkeel_conform_problem* problem);

typedef struct evenkeel_conform_request {
  uint64_t struct_size;
  const char* family; /* a name of evenkeel_conform_family */
  const char* plan; /* the plan whose rounding of dS is granted as noise: "flash2" for BF16 kernels, "fp32" */
  int64_t rows;     /* at least so many; under 100000 no family is judged for bias */
  uint64_t seed;
} evenkeel_conform_request;

/* The residual is in units of delta's root mean square. Errors of O, dQ, dK, dV are in BF16 ulps of the row's largest true
 * value. Each has a mean, and a mean over its standard error. */
typedef struct evenkeel_conform_result {
  uint64_t struct_size;
  int64_t rows, nonfinite;
  int32_t passes;
  const char*
      verdict; /* "ok", "NOT WRITTEN", "NOT FINITE", or some of WRONG, BIASED, NOISY: "WRONG, NOISY"; static */
  double residual_mean, residual_z, residual_rms, residual_bound;
  double o_bias, o_z, dq_bias, dq_z, dk_bias, dk_z, dv_bias, dv_z;
  /* Callers whose struct_size ends before these get none of them. */
  int64_t unwritten;       /* values that were not written */
  double residual_allowed; /* a mean of this size is FP32's own arithmetic, whatever its z */
  double o_over, dq_over, dk_over,
      dv_over;             /* largest error over the worst case of the plan's roundings; above 1: WRONG */
  const char* what_to_fix; /* a sentence, empty where it passes; valid until this thread's next call */
} evenkeel_conform_result;

/* The index-th family, or NULL beyond the last: its name, and what it is. `masked`: does it come with `visible`? Static. */
EVENKEEL_API const char* evenkeel_conform_family(int32_t index, const char** description, int32_t* masked);
/* Judges a kernel on one family: calls it chunk by chunk and fills `result`. */
EVENKEEL_API int32_t evenkeel_conform(const evenkeel_conform_request* request, evenkeel_conform_kernel kernel,
                                      void* context, evenkeel_conform_result* result);

/* --- The whole judgement: forms, that is, attention problems that cross every feature a kernel may offer, and the families
 * above. docs/check_my_kernel.md says what is judged. */

/* One form, in host memory, contiguous. Numbers are of `type`, stored as FP32. (B, H or G, T or N, D or Dv); of packed
 * sequences (H or G, rows of all sequences, D or Dv). The last row of a sequence is aligned with its last key. */
typedef struct evenkeel_conform_form {
  uint64_t struct_size;
  int64_t B, H, G, T, N, D, Dv; /* Dv: features of v and o; T, N of packed sequences: those of the longest */
  int32_t type;                 /* EVENKEEL_BF16, EVENKEEL_FP32 or EVENKEEL_FP16 */
  int32_t causal;
  int64_t window_left, window_right;        /* row i sees [i - left, i + right]; below 0: unbounded */
  float scale;                              /* never 0 */
  float softcap;                            /* 0: off */
  const uint8_t* visible;                   /* (B, H, T, N), or NULL: all */
  const int32_t *query_starts, *key_starts; /* (B + 1): packed sequences; or NULL */
  const float* sinks;    /* (H), or NULL: one more score of each head's softmax, without a value */
  const float* grad_lse; /* (B, H, T), or NULL: gradient of the log-sum-exp */
  const float *q, *k, *v, *grad_output;
  float *o, *dq, *dk, *dv; /* to be written, every element */
  float* lse;              /* (B, H, T): to be written wholly or not at all */
  float* grad_sinks;       /* (H), or NULL without sinks: likewise */
} evenkeel_conform_form;
/* 0: done. EVENKEEL_NOT_OFFERED: the kernel does not take such a form, which is then listed as not judged. Anything else:
 * an error, reported as such, with the words of evenkeel_kernel_error. Called by the calling thread, often twice with the
 * same form. */
#define EVENKEEL_NOT_OFFERED 100
typedef int32_t (*evenkeel_form_kernel)(void* context, const evenkeel_conform_form* form);

typedef struct evenkeel_judge_request {
  uint64_t struct_size;
  const char* name; /* of the kernel, or NULL */
  const char*
      plan;     /* whose roundings are granted, or NULL: "flash2"; bf16 in it stands for the form's type */
  int64_t rows; /* of a family; 0: no families */
  uint64_t seed;
  int32_t quick;             /* fewer forms, four families */
  int32_t type;              /* of the families' tensors: EVENKEEL_BF16, EVENKEEL_FP32 or EVENKEEL_FP16 */
  int32_t not_deterministic; /* 1: other bits in a second call are allowed */
  int32_t not_aligned;       /* 1: causal masks and windows are given with T = N alone */
  const char* form; /* a file that evenkeel_judge_write_form wrote, or a capture: judge it alone; or NULL */
  /* What is judged ("forms", "families"), how many are done, and of how many; or NULL. */
  void (*progress)(void* context, const char* what, int64_t done, int64_t of);
  /* Callers whose struct_size ends before these leave them 0. */
  int32_t
      not_shrunk; /* 1: a failing form is not made smaller, which takes some fifty calls of other shapes */
} evenkeel_judge_request;
/* passes: 1 or 0. json, text, junit, badge (an SVG): the judgement, each NULL where it is not wanted; valid until this
 * thread's next call. */
typedef struct evenkeel_judge_result {
  uint64_t struct_size;
  int32_t passes;
  const char *json, *text, *junit, *badge;
} evenkeel_judge_result;
/* For a kernel under test that is about to return an error: why, for the report. Copied; of this thread's call. */
EVENKEEL_API void evenkeel_kernel_error(const char* words);
/* Judges a kernel on every form that it offers, and on the families where `rows` is not 0. */
EVENKEEL_API int32_t evenkeel_judge(const evenkeel_judge_request* request, evenkeel_form_kernel kernel,
                                    void* context, evenkeel_judge_result* result);
/* The smallest failing form of this thread's latest evenkeel_judge, with its tensors and the exact results, as safetensors.
 * EVENKEEL_BAD_ARGUMENT where none failed. */
EVENKEEL_API int32_t evenkeel_judge_write_form(const char* file);

/* --- Rounding: what a plan does to an operand of attention, as a call of its own. */

typedef struct evenkeel_rounding {
  uint64_t struct_size;
  const char*
      format; /* as a plan has it behind a site: "e4m3", "e5m2/stochastic", "int8*row", "e2m1*block32@e8m0_up" */
  int64_t B, H, T, D; /* sequences, heads, rows, features: they say which values share a scale */
  uint64_t seed;      /* of stochastic rounding: element n draws number n */
} evenkeel_rounding;
/* y = x rounded: B H T D numbers each, in host memory, contiguous; y may be x. NaN stays NaN. */
EVENKEEL_API int32_t evenkeel_round(const evenkeel_rounding* rounding, const float* x, float* y);

/* --- Probes: figures of the heads of one layer at one step. `capture` is the content of a capture file. */

/* The name of a probe, or NULL beyond the last; static. */
EVENKEEL_API const char* evenkeel_probe_field(int32_t index);
/* values: (heads, fields), `count` numbers in all; NaN where a number is not known. */
EVENKEEL_API int32_t evenkeel_probe(const void* capture, size_t bytes, double* values, size_t count);

/* The largest singular value of a contiguous FP32 matrix (rows, columns) in host memory, to one part in 10^6; NaN where a
 * number is not finite. */
EVENKEEL_API int32_t evenkeel_spectral_norm(const float* matrix, int64_t rows, int64_t columns, double* norm);

/* --- The guard's rule: which heads drift, and what is to be done. Used by one thread at a time. */

typedef struct evenkeel_guard evenkeel_guard;
typedef enum evenkeel_guard_kind {
  EVENKEEL_GUARD_NOTHING = 0,
  EVENKEEL_GUARD_WARNING = 1,  /* heads drift; nothing is to be done, or nothing can be */
  EVENKEEL_GUARD_REMEDY = 2,   /* add `clauses` to the plan from the next step on */
  EVENKEEL_GUARD_ROLL_BACK = 3 /* the same, from the checkpoint of step `to` on */
} evenkeel_guard_kind;
typedef struct evenkeel_guard_event {
  uint64_t struct_size;
  int32_t kind;      /* evenkeel_guard_kind */
  int64_t last_good; /* the last step at which no head of the event was beyond the limit; -1: none */
  int64_t to;        /* a roll-back's checkpoint, else -1 */
  const char *clauses, *words; /* valid until the guard's next call */
} evenkeel_guard_event;
/* plan: in force now, of a model with so many layers and heads; bf16: q and k come from BF16 products. NULL on failure. */
EVENKEEL_API evenkeel_guard* evenkeel_guard_new(const char* plan, int64_t layers, int64_t heads,
                                                int32_t bf16);
/* Frees a guard; NULL is allowed. */
EVENKEEL_API void evenkeel_guard_free(evenkeel_guard* guard);
/* The figures of a step, (layers, heads) each: largest |log-sum-exp|, root mean squares of leak and delta (both or neither
 * NULL). `checkpoints`: steps to which the run can go back, ascending. `act`: 0 reports and changes nothing. `event`: NULL takes the figures of
 * earlier steps without an answer. Steps ascend. */
EVENKEEL_API int32_t evenkeel_guard_take(evenkeel_guard* guard, int64_t step, const double* lse,
                                         const double* leak, const double* delta, const int64_t* checkpoints,
                                         size_t checkpoint_count, int32_t act, evenkeel_guard_event* event);

#ifdef __cplusplus
}
#endif

#endif /* EVENKEEL_H */
