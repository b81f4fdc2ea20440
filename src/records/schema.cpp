#include "records/schema.h"

#include <algorithm>

namespace evenkeel {
namespace {

using enum RecordFile;
using enum FieldShape;

// clang-format off
constexpr RecordField kFields[] = {
    {config, "", "attention", "", object, "", "how attention is computed"},
    {config, "attention", "plan", "", text, "", "the precision plan"},
    {config, "attention", "changes", "", objects, "", "clauses added to the plan on the way"},
    {config, "changes", "step", "", number, "step", "from which they hold"},
    {config, "changes", "plan", "", text, "", "the clauses"},
    {config, "", "model", "", object, "", "sizes of the model"},
    {config, "model", "layers", "", number, "", "L"},
    {config, "model", "heads", "", number, "", "H"},
    {config, "", "schedule", "", object, "", "the learning rate"},
    {config, "schedule", "steps", "", number, "steps", "of the whole run"},

    {metrics, "", "step", "", number, "step", "from 0 on"},
    {metrics, "", "schema", "", number, "", "version of the names; in the first line"},
    {metrics, "", "backend", "", text, "", "what trains; in a process's first line"},
    {metrics, "", "loss", "", number, "nats a token", "mean over the step's tokens"},
    {metrics, "", "gradient_norm", "", number, "", "Euclidean norm of the whole gradient, before clipping"},
    {metrics, "", "lr", "", number, "", "learning rate"},
    {metrics, "", "tokens_per_second", "", number, "tokens / s", "speed"},
    {metrics, "", "validation_loss", "", number, "nats a token", "mean over the validation batches"},
    {metrics, "", "fact_sequences", "", number, "sequences", "that ties, leaks and delta are of"},
    {metrics, "", "largest_score", "", per_head, "", "largest score"},
    {metrics, "", "offset", "largest_row_mean", per_head, "", "largest |mean of a row's scores|: what softmax cannot see"},
    {metrics, "", "mean_lse", "", per_head, "nats", "mean log-sum-exp"},
    {metrics, "", "largest_lse", "", per_head, "nats", "largest |log-sum-exp|"},
    {metrics, "", "key_share", "", per_head, "share", "|mean key|^2 over the mean |key|^2, mean over sequences"},
    {metrics, "", "tied_rows", "", per_head, "share", "rows where another score ties with the largest"},
    {metrics, "", "leak_mean", "residual_mean", per_head, "", "mean over rows of the leak, the sum of a row of dS"},
    {metrics, "", "leak_error", "residual_error", per_head, "", "standard error of that mean"},
    {metrics, "", "leak_rms", "residual_rms", per_head, "", "root mean square of the leak"},
    {metrics, "", "delta_rms", "", per_head, "", "root mean square of delta"},
    {metrics, "", "guard", "", object, "", "the guard's event of this step, as in guard.jsonl"},
    {metrics, "", "probe", "", object, "", "a full set of probes"},
    {metrics, "probe", "step", "", number, "step", "that the probes are of; not after the line's"},
    {metrics, "probe", "loss", "", number, "nats a token", "of that step"},
    {metrics, "probe", "sequences", "", number, "sequences", "that were probed"},
    {metrics, "probe", "rows", "", number, "rows", "that were probed"},
    {metrics, "probe", "norms", "", object, "", "spectral norm of every weight, by its name"},
    {metrics, "probe", "largest_score", "", per_head, "", "largest score"},
    {metrics, "probe", "row_mean", "", per_head, "", "mean of the scores"},
    {metrics, "probe", "offset", "largest_row_mean", per_head, "", "largest |mean score of a row|"},
    {metrics, "probe", "row_spread", "", per_head, "", "standard deviation of a row's scores"},
    {metrics, "probe", "largest_row_spread", "", per_head, "", "largest |score - its row's mean|"},
    {metrics, "probe", "mean_lse", "", per_head, "nats", "mean log-sum-exp"},
    {metrics, "probe", "largest_lse", "", per_head, "nats", "largest |log-sum-exp|"},
    {metrics, "probe", "key_share", "", per_head, "share", "|mean key|^2 over the mean |key|^2, mean over sequences"},
    {metrics, "probe", "entropy", "", per_head, "nats", "entropy of a row's probabilities, nats"},
    {metrics, "probe", "sink_mass", "", per_head, "share", "probability on the first key"},
    {metrics, "probe", "heaviest_mass", "", per_head, "share", "largest probability of a row"},
    {metrics, "probe", "tied_rows", "", per_head, "share", "share of rows with tied largest scores"},
    {metrics, "probe", "leak_mean", "residual_mean", per_head, "", "leak, the sum of a row of dS: mean"},
    {metrics, "probe", "leak_error", "residual_error", per_head, "", "standard error of that mean"},
    {metrics, "probe", "leak_z", "residual_z", per_head, "", "mean / standard error"},
    {metrics, "probe", "leak_rms", "residual_rms", per_head, "", "root mean square of the leak"},
    {metrics, "probe", "delta_rms", "", per_head, "", "root mean square of delta"},
    {metrics, "probe", "leak_size", "residual_share", per_head, "share", "leak / delta, root mean squares"},
    {metrics, "probe", "delta_error_sum", "", per_head, "", "sum of delta's errors"},
    {metrics, "probe", "delta_error_running", "", per_head, "", "the same over all probed steps"},
    {metrics, "probe", "norm_q", "", per_head, "", "spectral norm of W_Q"},
    {metrics, "probe", "norm_k", "", per_head, "", "spectral norm of W_K"},
    {metrics, "probe", "norm_v", "", per_head, "", "spectral norm of W_V"},
    {metrics, "probe", "weight_entropy", "", per_head, "nats", "spectral entropy of W_Q W_K^T, nats"},
    {metrics, "probe", "score_entropy", "", per_head, "nats", "spectral entropy of Q K^T, nats"},
    {metrics, "probe", "one_signed", "", per_head, "share", "one-signedness of V, mean over features"},
    {metrics, "probe", "largest_one_signed", "", per_head, "share", "the same, largest"},
    {metrics, "probe", "sign_purity", "", per_head, "share", "share of V's commoner sign, mean over features"},
    {metrics, "probe", "gradient_norm", "", per_head, "", "norm of W_Q's gradient"},
    {metrics, "probe", "gradient_error", "", per_head, "", "norm of its error"},
    {metrics, "probe", "gradient_share", "", per_head, "share", "error / gradient"},
    {metrics, "probe", "gradient_rank_1", "", per_head, "share", "share of the error that is of rank 1"},
    {metrics, "probe", "leak_share", "", per_head, "share", "part of W_Q's gradient that leaks made"},
    {metrics, "probe", "similarity", "", per_head, "cosine", "mean cosine of (PK)^T X across rows"},
    {metrics, "probe", "coherence", "", per_head, "share", "how far leaks add up: 1 all of them"},
    {metrics, "probe", "mean_q", "", per_head, "", "norm of the mean query"},
    {metrics, "probe", "mean_k", "", per_head, "", "norm of the mean key"},
    {metrics, "probe", "mean_x", "", per_head, "", "norm of the mean input of the layer's attention"},
    {metrics, "probe", "mean_score", "", per_head, "", "scaled product of mean query and mean key: the offset with its sign"},
    {metrics, "probe", "effective_size", "", per_head, "features", "features that make that product: the head size, if all count alike"},
    {metrics, "probe", "leak_along", "", per_head, "", "W_Q's gradient by the leak, along mean key and mean input; signed"},
    {metrics, "probe", "gradient_along", "", per_head, "", "root mean square of W_Q's gradient along the same"},
    {metrics, "probe", "leak_lag_1", "", per_head, "", "autocorrelation, lag 1, of the steps' mean leaks since the last probe (behind a resume, to four digits)"},
    {metrics, "probe", "nonfinite", "", per_head, "numbers", "numbers of q, k, v, dO that are not finite"},

    {guard, "", "step", "", number, "step", "at which it happened"},
    {guard, "", "kind", "", text, "", "warning, remedy or roll_back"},
    {guard, "", "heads", "", objects, "", "[layer, head] of each head in alarm"},
    {guard, "", "plan", "", text, "", "clauses that were, or would be, added to the plan"},
    {guard, "", "words", "", text, "", "what was seen, with figures"},
    {guard, "", "next_command", "", text, "", "what to type; none where the guard has done all there is to do"},
    {guard, "", "to", "", number, "step", "of the checkpoint that the run went back to"},

    {findings, "", "schema", "", number, "", "version of the names"},
    {findings, "", "findings", "", objects, "", "each of them"},
    {findings, "findings", "step", "", number, "step", "at which it happened"},
    {findings, "findings", "kind", "", text, "", "not_finite or divergence"},
    {findings, "findings", "words", "", text, "", "what happened, with figures"},

    {isolate, "", "schema", "", number, "", "version of the names"},
    {isolate, "", "config", "", text, "", "settings of the run that the trials are of"},
    {isolate, "", "trials", "", objects, "", "each replay"},
    {isolate, "trials", "what", "", text, "", "what was changed, in words"},
    {isolate, "trials", "clauses", "", text, "", "what was added to the plan"},
    {isolate, "trials", "lr_factor", "", number, "", "on the learning rate"},
    {isolate, "trials", "begin", "", number, "step", "first step"},
    {isolate, "trials", "end", "", number, "step", "behind the last one"},
    {isolate, "trials", "seconds", "", number, "s", "that it took"},
    {isolate, "trials", "offset", "", number, "", "largest offset over heads, at the end"},
    {isolate, "trials", "lse", "", number, "nats", "largest |log-sum-exp|, at the end"},
    {isolate, "trials", "loss", "", number, "nats a token", "at the end"},
    {isolate, "trials", "gradient_norm", "", number, "", "at the end"},
    {isolate, "trials", "head_offset", "", flat_heads, "", "offset of each head, at the end"},
    {isolate, "trials", "leak_size", "residual_share", flat_heads, "share", "leak over delta, root mean squares"},
    {isolate, "trials", "leak_bias", "residual_bias", flat_heads, "share", "of the leak's squares that its mean makes"},
    {isolate, "trials", "step_loss", "", numbers, "nats a token", "loss of every step, every digit"},

    {verdict, "", "schema", "", number, "", "version of the names"},
    {verdict, "", "run", "", text, "", "the run's folder"},
    {verdict, "", "cause", "", text, "", "a name of the causes"},
    {verdict, "", "words", "", text, "", "the verdict in one or two sentences"},
    {verdict, "", "certainty", "", text, "", "how sure, and why"},
    {verdict, "", "next_command", "", text, "", "what to type next"},
    {verdict, "", "evidence", "", texts, "", "the chain, link by link"},
    {verdict, "", "symptom", "", text, "", "what is wrong, in words"},
    {verdict, "", "since", "", number, "step", "from which the symptom holds"},
    {verdict, "", "limit", "", number, "", "of the offset: beyond it a head drifts"},
    {verdict, "", "limit_words", "", text, "", "where the limit comes from"},
    {verdict, "", "shows_symptom", "", flag, "", "the unchanged replay shows the recorded symptom"},
    {verdict, "", "begin", "", number, "step", "first step of the replayed stretch"},
    {verdict, "", "end", "", number, "step", "behind its last one"},
    {verdict, "", "heads", "", objects, "", "the smallest set of heads whose FP32 heals"},
    {verdict, "heads", "layer", "", number, "", "from 0 on"},
    {verdict, "heads", "head", "", number, "", "from 0 on"},
    {verdict, "", "sites", "", texts, "", "the smallest set of their sites whose FP32 heals"},
    {verdict, "", "formats", "", texts, "", "of these sites"},
    {verdict, "", "sites_alone", "", texts, "", "every site that heals by itself"},
    {verdict, "", "parts", "", objects, "", "the trials of the argument: fields of isolate.json's trials, and"},
    {verdict, "parts", "part", "", text, "", "a name of kVerdictParts"},
    {verdict, "parts", "heals", "", flag, "", "within the limit, and nearer to the control than to the recorded course"},
    {verdict, "", "bits", "", object, "", "the addition that errs most, as explain writes it"},
    {verdict, "", "replays", "", number, "replays", "that were made"},
    {verdict, "", "trials", "", objects, "", "every replay; in the command's output alone"},
};
// clang-format on

// The facts of heads are there, in the order of their enumeration.
constexpr bool facts_are_in_order() {
  size_t next = 0;
  for (const RecordField& field : kFields)
    if (field.file == metrics && field.inside.empty() && field.shape == per_head)
      if (next >= kHeadFactCount || field.name != kHeadFactNames[next++]) return false;
  return next == kHeadFactCount;
}
static_assert(facts_are_in_order());

bool is_word_of(std::string_view words, std::string_view word) {
  for (size_t begin = 0; begin < words.size();) {
    const size_t end = std::min(words.find(' ', begin), words.size());
    if (words.substr(begin, end - begin) == word) return true;
    begin = end + 1;
  }
  return false;
}

}  // namespace

const std::span<const RecordField> kRecordFields = kFields;

std::filesystem::path record_path(const std::filesystem::path& folder, RecordFile file) {
  return folder / name(file);
}

const RecordField* find_field(RecordFile file, std::string_view inside, std::string_view name) {
  for (const RecordField& field : kFields)
    if (field.file == file && field.inside == inside &&
        (field.name == name || is_word_of(field.aliases, name)))
      return &field;
  // The trials of a verdict are those of isolate.json.
  if (file == verdict && (inside == "parts" || inside == "trials"))
    return find_field(isolate, "trials", name);
  return nullptr;
}

}  // namespace evenkeel
