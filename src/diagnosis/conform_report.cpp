#include "diagnosis/conform_report.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "base/json_text.h"
#include "base/markup.h"
#include "base/safetensors.h"
#include "diagnosis/capture.h"

namespace evenkeel {

using OrderedJson = nlohmann::ordered_json;

std::vector<std::string> quick_families() { return {"ties_2_tail", "sink", "scores_100", "loss_feedback"}; }

namespace {

// What a form's call threw; null where none did.
const FormFinding* exception_of(const FormsReport& forms) {
  for (const FormResult& failure : forms.failures)
    for (const FormFinding& x : failure.findings)
      if (x.fault == Fault::error) return &x;
  return nullptr;
}

}  // namespace

bool KernelJudgement::raised() const { return exception_of(forms) || !families_raised.empty(); }

std::string KernelJudgement::verdict() const {
  // Before all else: what was to be judged did not run.
  if (const FormFinding* thrown = exception_of(forms)) return "ERROR: the kernel raised: " + thrown->words;
  if (!families_raised.empty()) return "ERROR: the kernel raised on " + families_raised.front();
  if (forms.judged == 0 && !families) return "nothing was judged";
  if (passes()) return "pass";
  if (!forms.named.empty()) return "FAIL: " + forms.named.front().words;
  if (!forms.failures.empty()) {
    const FormFinding& first = forms.failures.front().findings.front();
    return fmt::format("FAIL: {} {}", evenkeel::name(first.fault), first.output);
  }
  if (families)
    for (const ConformResult& r : families->results)
      if (!r.passes()) return fmt::format("FAIL: {} on {}", r.verdict(), r.case_name);
  return "FAIL: nothing was judged";
}

ConformKernel family_kernel(const FormKernel& kernel, FormType type) {
  return [kernel, type](const AttentionProblem& problem, const AttentionInputs& in,
                        View<const float> grad_output, AttentionBuffers& out) {
    const AttentionProblem whole = problem_of(problem, in);
    ConformForm form;
    form.H = form.G = whole.H, form.T = whole.T, form.N = whole.N, form.D = form.Dv = whole.D;
    form.causal = whole.mask.causal, form.type = type;
    std::vector<uint8_t> visible;
    if (const View<const uint8_t>& mask = problem.mask.visible; mask.present()) {
      form.mask = FormMask::rows;
      for (int64_t h = 0; h < whole.H; ++h)
        for (int64_t i = 0; i < whole.T; ++i)
          for (int64_t j = 0; j < whole.N; ++j) visible.push_back(*mask.at(0, h, i, j) != 0);
    }
    FormTensors t;
    t.q = in.q.data, t.k = in.k.data, t.v = in.v.data, t.grad_output = grad_output.data;
    t.visible = visible.empty() ? nullptr : visible.data();
    t.o = out.o.values().data(), t.lse = out.lse.values().data();
    t.dq = out.dq.values().data(), t.dk = out.dk.values().data(), t.dv = out.dv.values().data();
    require(kernel(form, t) == FormAnswer::done, "[conform] not offered: {}", form.text());
  };
}

namespace {

bool offers(const FormKernel& kernel, const ConformCase& family, FormType type) {
  ConformForm form;
  form.T = family.rows_per_head, form.N = family.keys, form.D = form.Dv = family.head_size;
  form.causal = family.causal, form.type = type;
  if (family.masked()) form.mask = FormMask::rows;
  const FormInputs in(form);
  std::vector<float> o(in.d_o.size()), lse(static_cast<size_t>(form.H * form.T)), dq(in.q.size()),
      dk(in.k.size()), dv(in.v.size());
  FormTensors t;
  t.q = in.q.data(), t.k = in.k.data(), t.v = in.v.data(), t.grad_output = in.d_o.data();
  t.visible = in.visible.empty() ? nullptr : in.visible.data();
  t.o = o.data(), t.lse = lse.data(), t.dq = dq.data(), t.dk = dk.data(), t.dv = dv.data();
  return kernel(form, t) == FormAnswer::done;
}

std::vector<ConformCase> families_of(const KernelRequest& request) {
  std::vector<std::string> names = request.families;
  if (names.empty() && request.extent == FormExtent::quick) names = quick_families();
  return names.empty() ? conform_cases() : cases_named(names);
}

}  // namespace

KernelJudgement judge_kernel(const FormKernel& kernel, const KernelRequest& request,
                             const std::function<void(const char*, int64_t, int64_t)>& progress) {
  KernelJudgement out;
  out.name = request.name, out.plan = request.plan;
  JudgeOptions options;
  options.plan = parse_plan(request.plan);
  options.extent = request.extent, options.seed = request.seed;
  options.deterministic = request.deterministic, options.aligned = request.aligned;
  options.shrink = request.shrink;
  const std::vector<ConformCase> wanted = families_of(request);
  out.forms = judge_forms(kernel, options, [&](int64_t done, int64_t of) {
    if (progress) progress("forms", done, of);
  });
  if (!request.with_families) return out;
  const auto raised = [&](const ConformCase& c, const std::exception& error) {
    out.families_raised.push_back(fmt::format("{}: {}", c.name, error.what()));
  };
  std::vector<ConformCase> families;
  const auto begin = [&](const ConformCase& c) {
    if (request.before_family) request.before_family(c.name);
  };
  for (const ConformCase& c : wanted) try {
      begin(c);
      if (offers(kernel, c, request.type))
        families.push_back(c);
      else
        out.families_not_judged.push_back(fmt::format("{}: not offered", c.name));
    } catch (const std::exception& error) {
      raised(c, error);
    }
  ConformPlan judged{request.plan, plan_for(options.plan, request.type), {}};
  const int64_t work = conform_work(1, families, request.rows);
  int64_t done = 0;
  for (const ConformCase& c : families) try {
      begin(c);
      std::vector<ConformPlan> plans = {{judged.name, judged.plan, {}}};
      conform(
          plans, {c}, request.rows, request.seed, family_kernel(kernel, request.type),
          [&] {
            if (progress) progress("families", ++done, work);
          },
          /*constant_feature=*/true);
      judged.results.push_back(plans[0].results.at(0));
    } catch (const std::exception& error) {
      raised(c, error);
    }
  out.risk = risk_of(judged);
  if (!judged.results.empty()) out.families = std::move(judged);
  return out;
}

namespace {

FormInputs captured_inputs(const Capture& capture, FormType type) {
  require(capture.slopes.empty(), "[conform] expected a capture without slopes: forms have none");
  ConformForm form;
  form.causal = capture.causal, form.scale = capture.scale, form.softcap = capture.softcap;
  form.type = type, form.sinks = !capture.sinks.empty();
  FormInputs inputs(form, capture.inputs(), capture.d_o.view());
  inputs.sinks = capture.sinks;
  return inputs;
}

}  // namespace

KernelJudgement judge_file(const FormKernel& kernel, const KernelRequest& request,
                           const std::filesystem::path& file) {
  KernelJudgement out;
  out.name = request.name, out.plan = request.plan;
  JudgeOptions options;
  options.plan = parse_plan(request.plan), options.deterministic = request.deterministic;
  const bool captured = Safetensors(file).metadata().contains("evenkeel_capture");
  const FormInputs inputs =
      captured ? captured_inputs(read_capture(file), request.type) : FormInputs(read_form(file));
  const FormResult one = judge_form(inputs, kernel, options);
  out.forms.judged = one.judged;
  out.forms.largest_over = std::max({one.over_o, one.over_lse, one.over_dq, one.over_dk, one.over_dv});
  if (!one.judged) out.forms.not_judged.push_back(one.form.text());
  if (one.findings.empty()) return out;
  out.forms.failures = {one};
  if (!captured) out.forms.smallest = one;  // which can be written again from its few numbers
  return out;
}

OrderedJson result_json(const FormResult& result) {
  OrderedJson form, findings = OrderedJson::array();
  to_json(form, result.form);
  for (const FormFinding& x : result.findings)
    findings.push_back(
        {{"fault", name(x.fault)}, {"output", x.output}, {"error_over_allowed", x.over}, {"words", x.words}});
  return {{"text", result.form.text()},
          {"passes", result.passes()},
          {"judged", result.judged},
          {"findings", findings},
          {"form", form}};
}

OrderedJson judgement_json(const KernelJudgement& j) {
  OrderedJson failures = OrderedJson::array(), named = OrderedJson::array(), families = OrderedJson::array();
  for (const FormResult& failure : j.forms.failures) failures.push_back(result_json(failure));
  for (const NamedFault& x : j.forms.named)
    named.push_back({{"fault", x.words}, {"forms_explained", x.forms}, {"forms_tried", x.tried}});
  if (j.families)
    for (const ConformResult& r : j.families->results)
      families.push_back({{"family", r.case_name},
                          {"rows", r.rows},
                          {"passes", r.passes()},
                          {"verdict", r.verdict()},
                          {"what_to_fix", r.what_to_fix()},
                          {"residual_mean", r.residual.mean()},
                          {"residual_z", r.residual.z()},
                          {"residual_allowed", r.bias_floor},
                          {"residual_rms", r.residual.rms()},
                          {"residual_bound", r.noise_bound()}});
  OrderedJson out = {{"kernel", j.name},
                     {"plan", j.plan},
                     {"passes", j.passes()},
                     {"verdict", j.verdict()},
                     {"forms",
                      {{"judged", j.forms.judged},
                       {"failed", j.forms.failures.size()},
                       {"not_judged", j.forms.not_judged},
                       {"largest_error_over_bound", j.forms.largest_over},
                       {"named", named},
                       {"public_bugs", j.forms.public_bugs},
                       {"failures", failures}}},
                     {"families", families},
                     {"families_not_judged", j.families_not_judged},
                     {"families_raised", j.families_raised}};
  if (j.forms.smallest) out["forms"]["smallest"] = result_json(*j.forms.smallest);
  if (j.risk)
    out["risk"] = {{"words", in_words(*j.risk)},
                   {"drifts", j.risk->drifts()},
                   {"mean_leak", j.risk->bias},
                   {"mean_leak_error", j.risk->bias_error}};
  if (j.risk && j.risk->drifts()) {
    out["risk"]["steps"] = j.risk->steps;
    out["risk"]["earliest"] = j.risk->earliest;
    out["risk"]["latest"] = std::isfinite(j.risk->latest) ? OrderedJson(j.risk->latest) : OrderedJson();
  }
  return out;
}

std::string judgement_text(const KernelJudgement& j) {
  std::string out =
      fmt::format("{}: {}\n  forms: {} judged, {} failed; largest error {:.2g} of what roundings allow\n",
                  j.name, j.verdict(), j.forms.judged, j.forms.failures.size(), j.forms.largest_over);
  for (const std::string& what : j.forms.not_judged) out += fmt::format("  not judged: {}\n", what);
  for (const std::string& what : j.forms.public_bugs) out += fmt::format("  fails under {}\n", what);
  for (const NamedFault& x : j.forms.named)
    out += x.tried > 0 ? fmt::format("  fault: {} ({} of {} failing forms)\n", x.words, x.forms, x.tried)
                       : fmt::format("  fault: {}\n", x.words);
  if (j.forms.smallest) {
    out += fmt::format("  smallest failing form: {}\n", j.forms.smallest->form.text());
    for (const FormFinding& x : j.forms.smallest->findings)
      out += fmt::format("    {} {}: {}\n", name(x.fault), x.output, x.words);
  }
  if (j.families) {
    const auto failed =
        std::ranges::count_if(j.families->results, [](const ConformResult& r) { return !r.passes(); });
    out += fmt::format("  families: {} judged, {} failed\n", j.families->results.size(), failed);
    std::set<std::string> said;  // advice once a verdict, under its first family
    for (const ConformResult& r : j.families->results) {
      if (r.passes()) continue;
      out += fmt::format("    {}: {}", r.case_name, r.verdict());
      if (r.right())
        out += fmt::format(": leak {:+.1e} (z {:+.0f}), rms {:.2f} of what is allowed", r.residual.mean(),
                           r.residual.z(), r.residual.rms() / r.noise_bound());
      out += said.insert(r.verdict()).second ? fmt::format("\n      to fix: {}\n", r.what_to_fix()) : "\n";
    }
  }
  for (const std::string& what : j.families_not_judged) out += fmt::format("  family not judged: {}\n", what);
  for (const std::string& what : j.families_raised) out += fmt::format("  the kernel raised on {}\n", what);
  if (j.risk) out += fmt::format("  in training: {}\n", in_words(*j.risk));
  return out;
}

std::string judgement_junit(const KernelJudgement& j) {
  std::string cases;
  int64_t tests = 0, failures = 0, skipped = 0;
  const auto add = [&](const std::string& group, const std::string& test, const std::string& failure,
                       bool skip) {
    ++tests;
    cases += fmt::format("  <testcase classname=\"evenkeel.conform.{}\" name=\"{}\"", group, escape(test));
    if (skip) {
      ++skipped;
      cases += fmt::format("><skipped message=\"{}\"/></testcase>\n", escape(failure));
    } else if (!failure.empty()) {
      ++failures;
      cases += fmt::format("><failure message=\"{}\"/></testcase>\n", escape(failure));
    } else {
      cases += "/>\n";
    }
  };
  for (const FormResult& failure : j.forms.failures) {
    std::string words;
    for (const FormFinding& x : failure.findings)
      words += fmt::format("{}{} {}: {}", words.empty() ? "" : "; ", name(x.fault), x.output, x.words);
    add("forms", failure.form.text(), words, false);
  }
  add("forms", fmt::format("{} forms", j.forms.judged),
      j.forms.judged == 0        ? "no form was judged"
      : j.forms.failures.empty() ? ""
                                 : j.verdict(),
      false);
  for (const std::string& what : j.forms.not_judged) add("forms", what, "not offered by the kernel", true);
  if (j.families)
    for (const ConformResult& r : j.families->results)
      add("families", std::string(r.case_name),
          r.passes() ? "" : fmt::format("{}: {}", r.verdict(), r.what_to_fix()), false);
  for (const std::string& what : j.families_not_judged)
    add("families", what, "not offered by the kernel", true);
  for (const std::string& what : j.families_raised) add("families", what, "the kernel raised", false);
  return fmt::format(
      "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuite name=\"evenkeel conform {}\" tests=\"{}\" "
      "failures=\"{}\" "
      "skipped=\"{}\" errors=\"0\">\n{}</testsuite>\n",
      escape(j.name), tests, failures, skipped, cases);
}

std::string judgement_badge(const KernelJudgement& j) {
  const bool drifts = j.risk && j.risk->drifts();
  const std::string words = j.raised()              ? "raises"
                            : drifts && !j.passes() ? "drifts in training"
                            : j.passes()            ? "safe to train with"
                                                    : "fails";
  const char* const colour = j.passes() ? "#2e7d32" : "#b3261e";
  // 7 units a letter and a margin: any font's digits and letters fit.
  const size_t left = 70, right = 7 * words.size() + 16;
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"20\" role=\"img\" "
      "aria-label=\"evenkeel: {4}\">"
      "<title>evenkeel: {4}</title><rect width=\"{1}\" height=\"20\" fill=\"#444\"/><rect x=\"{1}\" "
      "width=\"{2}\" "
      "height=\"20\" fill=\"{3}\"/><g fill=\"#fff\" font-family=\"Verdana,DejaVu Sans,sans-serif\" "
      "font-size=\"11\" "
      "text-anchor=\"middle\"><text x=\"{5}\" y=\"14\">evenkeel</text><text x=\"{6}\" "
      "y=\"14\">{4}</text></g></svg>\n",
      left + right, left, right, colour, words, left / 2, left + right / 2);
}

void write_failing_form(const std::filesystem::path& file, const ConformForm& form, const std::string& plan) {
  const FormInputs in(form);
  FormInputs clean(form);
  if (form.values == FormValues::nan) clean.v[0] = 0;
  const AttentionTruth truth = clean.truth(PrecisionPlan{});
  OrderedJson json;
  to_json(json, form);
  std::vector<TensorHeader> headers;
  std::vector<std::pair<std::string, Bytes>> contents;
  const auto add = [&](const char* tensor, const char* type, const std::array<int64_t, 4>& shape,
                       const auto& values) {
    if (values.empty()) return;
    headers.push_back({tensor, element_type(type), {shape.begin(), shape.end()}});
    contents.emplace_back(tensor, std::as_bytes(std::span(values)));
  };
  const int64_t B = form.batch(), rows = form.all_rows(), keys = form.all_keys();
  add("q", "F32", {B, form.H, rows, form.D}, in.q);
  add("k", "F32", {B, form.G, keys, form.D}, in.k);
  add("v", "F32", {B, form.G, keys, form.Dv}, in.v);
  add("grad_output", "F32", {B, form.H, rows, form.Dv}, in.d_o);
  add("sinks", "F32", {1, form.H, 1, 1}, in.sinks);
  add("grad_lse", "F32", {B, form.H, rows, 1}, in.grad_lse);
  add("visible", "U8", {form.B, form.H, form.T, form.N}, in.visible);
  add("query_starts", "I32", {1, 1, 1, form.B + 1}, in.query_starts);
  add("key_starts", "I32", {1, 1, 1, form.B + 1}, in.key_starts);
  add("exact_o", "F64", truth.o.shape(), truth.o.values());
  add("exact_lse", "F64", truth.lse.shape(), truth.lse.values());
  add("exact_dq", "F64", truth.dq.shape(), truth.dq.values());
  add("exact_dk", "F64", truth.dk.shape(), truth.dk.values());
  add("exact_dv", "F64", truth.dv.shape(), truth.dv.values());
  SafetensorsWriter writer(file, headers, {{"form", json.dump()}, {"plan", plan}, {"text", form.text()}});
  for (const auto& [tensor, bytes] : contents) writer.append(tensor, bytes);
  writer.commit();
}

ConformForm read_form(const std::filesystem::path& file) {
  const Safetensors stored(file);
  const auto found = stored.metadata().find("form");
  require_data(found != stored.metadata().end(),
               "{}: expected a failing form of conform (metadata \"form\") or a capture, found neither",
               file.string());
  const OrderedJson json = try_parse_json(found->second);
  require_data(!json.is_discarded(), "{}: the form in its metadata is not JSON", file.string());
  return form_from_json(json);
}

}  // namespace evenkeel
