#include "training/prepare.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "base/threads.h"
#include "training/pretokenize.h"
#include "training/token_file.h"
#include "training/tokenizer.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kLargestVocabulary = int64_t{1} << 16;  // a token is a uint16
constexpr size_t kStride = Tokenizer::kPieceBytes;

// A document, or the part of it before or after the cut that gives its end to validation.
struct Document {
  const TextFile* file;
  int64_t begin, end;  // bytes
};

// The text of a document, as long as this lives.
class DocumentText {
 public:
  explicit DocumentText(const Document& document) : bytes_(document.file->path) {
    require_data(static_cast<int64_t>(bytes_.text().size()) == document.file->bytes,
                 "{}: had {} bytes and now has {}: expected a file that does not change", document.file->path,
                 document.file->bytes, bytes_.text().size());
    text_ = bytes_.text().substr(document.begin, document.end - document.begin);
  }
  std::string_view text() const { return text_; }

 private:
  MappedFile bytes_;
  std::string_view text_;
};

// What one thread does at a time: small documents together, or one piece of a large one.
struct Task {
  size_t first_document, end_document;
  size_t piece;  // of the only document, where it has several
};

std::vector<Task> make_tasks(const std::vector<Document>& documents) {
  std::vector<Task> tasks;
  size_t collected = kStride;  // bytes of the last task; full: begin another
  for (size_t index = 0; index < documents.size(); ++index) {
    const auto bytes = static_cast<size_t>(documents[index].end - documents[index].begin);
    if (bytes > kStride) {
      for (size_t piece = 0; piece < piece_count(bytes, kStride); ++piece)
        tasks.push_back({index, index + 1, piece});
      collected = kStride;
    } else if (collected + bytes > kStride) {
      tasks.push_back({index, index + 1, 0});
      collected = bytes;
    } else {
      tasks.back().end_document = index + 1;
      collected += bytes;
    }
  }
  return tasks;
}

// use(text, document ends here) for every piece of text of a task, in order.
template <class Function>
void for_each_text(const std::vector<Document>& documents, const Task& task, Function&& use) {
  for (size_t index = task.first_document; index < task.end_document; ++index) {
    const DocumentText document(documents[index]);
    const std::string_view text = document.text();
    const Piece piece = find_piece(text, kStride, task.piece);
    const bool is_last = task.piece + 1 >= piece_count(text.size(), kStride);
    use(text.substr(piece.begin, piece.end - piece.begin), is_last);
  }
}

int64_t total_bytes(const std::vector<Document>& documents) {
  int64_t bytes = 0;
  for (const Document& document : documents) bytes += document.end - document.begin;
  return bytes;
}

struct Split {
  std::vector<Document> train, validation;
};

Split split_documents(const std::vector<TextFile>& files, double share) {
  int64_t total = 0;
  for (const TextFile& file : files) total += file.bytes;
  const auto budget = static_cast<int64_t>(share * static_cast<double>(total));
  Split split;
  double number = 0;  // of documents so far
  for (const TextFile& file : files) {
    if (file.bytes == 0) continue;
    const bool is_turn = std::floor((number + 1) * share) > std::floor(number * share);
    (is_turn && file.bytes <= budget ? split.validation : split.train).push_back({&file, 0, file.bytes});
    ++number;
  }
  const int64_t missing = budget - total_bytes(split.validation);
  if (missing <= budget / 2 || split.train.empty()) return split;
  Document& largest = *std::max_element(
      split.train.begin(), split.train.end(),
      [](const Document& a, const Document& b) { return a.end - a.begin < b.end - b.begin; });
  const DocumentText document(largest);
  int64_t cut = std::max<int64_t>(0, largest.end - missing);
  while (cut < largest.end && !is_safe_cut(document.text(), static_cast<size_t>(cut))) ++cut;
  if (cut == largest.end) return split;  // one word to the end: it is not torn apart
  split.validation.push_back({largest.file, cut, largest.end});
  largest.end = cut;
  return split;
}

// bytes, bpe:N or the name of a file.
struct TokenizerChoice {
  int64_t trained_vocabulary = 0;  // 0: nothing is trained
  bool is_bytes = false;
};
TokenizerChoice parse_choice(const std::string& text) {
  constexpr std::string_view kTrained = "bpe:";
  if (text == "bytes") return {0, true};
  if (!text.starts_with(kTrained)) {
    require(!text.empty(), "expected a tokenizer: bytes, bpe:N, a tokenizer.json or a vocab.bpe");
    return {};
  }
  int64_t vocabulary = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data() + kTrained.size(), end, vocabulary);
  require(error == std::errc() && stop == end && vocabulary > kByteValues && vocabulary <= kLargestVocabulary,
          "tokenizer {}: expected bpe:N with N from {} to {}", text, kByteValues + 1, kLargestVocabulary);
  return {vocabulary, false};
}

Tokenizer train_tokenizer(const std::vector<Document>& documents, int64_t vocabulary,
                          const PrepareProgress& progress) {
  BpeTrainer trainer;
  const std::vector<Task> tasks = make_tasks(documents);
  const int64_t bytes = total_bytes(documents);
  parallel_for(static_cast<int64_t>(tasks.size()), [&](int64_t item, int worker) {
    for_each_text(documents, tasks[item], [&](std::string_view text, bool) {
      trainer.add(text, worker);
      progress("counting words, bytes", bytes, static_cast<int64_t>(text.size()));
    });
  });
  return trainer.train(vocabulary,
                       [&](int64_t) { progress("merging pairs, tokens", vocabulary - kByteValues - 1, 1); });
}

PreparedSplit write_tokens(const std::vector<Document>& documents, const Tokenizer& tokenizer,
                           WholeFileWriter& file, const char* stage, const PrepareProgress& progress) {
  PreparedSplit result;
  result.documents = static_cast<int64_t>(documents.size());
  result.bytes = total_bytes(documents);
  const std::vector<Task> tasks = make_tasks(documents);
  std::vector<std::unique_ptr<Encoder>> encoders(thread_count());
  // A few tasks for each thread, then they are written in order: memory stays small whatever the text's size.
  const size_t together = 8 * encoders.size();
  std::vector<std::vector<int32_t>> tokens(together);
  std::vector<uint16_t> written;
  for (size_t first = 0; first < tasks.size(); first += together) {
    const size_t count = std::min(together, tasks.size() - first);
    parallel_for(static_cast<int64_t>(count), [&](int64_t item, int worker) {
      if (!encoders[worker]) encoders[worker] = std::make_unique<Encoder>(tokenizer);
      tokens[item].clear();
      for_each_text(documents, tasks[first + item], [&](std::string_view text, bool ends_document) {
        encoders[worker]->encode(text, tokens[item]);
        if (ends_document) tokens[item].push_back(tokenizer.end_of_text());
        progress(stage, result.bytes, static_cast<int64_t>(text.size()));
      });
    });
    for (size_t item = 0; item < count; ++item) {
      written.assign(tokens[item].begin(), tokens[item].end());
      file.append(
          std::string_view{reinterpret_cast<const char*>(written.data()), written.size() * sizeof(uint16_t)});
      result.tokens += static_cast<int64_t>(written.size());
    }
  }
  return result;
}

}  // namespace

Prepared prepare_tokens(const PrepareRequest& request, const PrepareProgress& on_progress) {
  const TokenizerChoice choice = parse_choice(request.tokenizer);
  require(request.validation_share >= 0 && request.validation_share < 1,
          "validation share {}: expected from 0 on, below 1", request.validation_share);
  require(!request.folder.empty(), "expected a folder for the token files");
  std::mutex mutex;
  const PrepareProgress progress = [&](const char* stage, int64_t total, int64_t done) {
    if (!on_progress) return;
    std::lock_guard lock(mutex);
    on_progress(stage, total, done);
  };

  // What can be wrong is found before anything is made.
  std::optional<Tokenizer> tokenizer;
  if (choice.is_bytes)
    tokenizer = Tokenizer::byte_tokenizer();
  else if (choice.trained_vocabulary == 0)
    tokenizer = Tokenizer::load(request.tokenizer);
  if (tokenizer) {
    require_data(tokenizer->vocabulary() <= kLargestVocabulary,
                 "{}: expected at most {} tokens, as many as a uint16 can name, found {}", request.tokenizer,
                 kLargestVocabulary, tokenizer->vocabulary());
    require_data(tokenizer->end_of_text() >= 0, "{}: expected a special token {} or a single other one",
                 request.tokenizer, kEndOfText);
  }
  const TextFiles text = find_text_files(request.paths, request.folder);
  const Split split = split_documents(text.files, request.validation_share);
  require_data(!split.train.empty(), "expected text, found {} empty and {} binary files", text.files.size(),
               text.binary);
  std::error_code error;
  fs::create_directories(request.folder, error);
  require_data(fs::is_directory(request.folder), "cannot make the folder {}: {}", request.folder,
               error ? error.message() : "there is a file of that name");

  Prepared result;
  result.binary_files = text.binary;
  if (!tokenizer) tokenizer = train_tokenizer(split.train, choice.trained_vocabulary, progress);
  result.vocabulary = tokenizer->vocabulary();
  result.asked_vocabulary = choice.trained_vocabulary > 0 ? choice.trained_vocabulary : result.vocabulary;

  const fs::path folder = request.folder;
  nlohmann::ordered_json meta = {{"schema", 1},
                                 {"tokenizer", request.tokenizer},
                                 {"vocabulary", result.vocabulary},
                                 {"end_of_text", tokenizer->end_of_text()},
                                 {"files", nlohmann::ordered_json::object()}};
  const auto note = [&](const char* file, const PreparedSplit& part) {
    meta["files"][file] = {{"tokens", part.tokens}, {"bytes", part.bytes}, {"documents", part.documents}};
  };
  WholeFileWriter train(folder / "train.bin");
  result.train = write_tokens(split.train, *tokenizer, train, "encoding, bytes", progress);
  note("train.bin", result.train);
  const fs::path validation_path = folder / "val.bin";
  std::optional<WholeFileWriter> validation;
  if (!split.validation.empty()) {
    validation.emplace(validation_path);
    result.validation =
        write_tokens(split.validation, *tokenizer, *validation, "encoding validation, bytes", progress);
    note("val.bin", result.validation);
  }
  WholeFileWriter tokenizer_json(folder / "tokenizer.json"), meta_json(folder / "meta.json");
  tokenizer_json.append(tokenizer->to_json());
  meta_json.append(meta.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
  train.commit();
  if (validation) validation->commit();
  tokenizer_json.commit();
  meta_json.commit();
  if (!validation) fs::remove(validation_path, error);  // of an earlier call
  return result;
}

}  // namespace evenkeel
