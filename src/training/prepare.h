// Text to token files: what `evenkeel data prepare` does. The same text gives the same files on any machine
// and any number of threads.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace evenkeel {

struct PrepareRequest {
  std::vector<std::string>
      paths;              // files and folders, as find_text_files takes them; each file is a document
  std::string tokenizer;  // bytes, bpe:8192, or a file: tokenizer.json or vocab.bpe
  std::string folder;     // where the files go; made where it is not there
  double validation_share = 0.01;  // from 0 on, below 1
};

struct PreparedSplit {
  int64_t documents = 0, bytes = 0, tokens = 0;
};

struct Prepared {
  PreparedSplit train, validation;
  int64_t binary_files = 0;                      // left out
  int64_t vocabulary = 0, asked_vocabulary = 0;  // asked: of bpe:N, otherwise the same
};

// Writes train.bin, val.bin (unless the share is 0), tokenizer.json and meta.json, each whole or not at all.
// The last, meta.json, says how many tokens the others have, so that files of two calls do not pass for
// one. Every document ends with the tokenizer's <|endoftext|>. Validation is every (1 / share)-th document,
// but none that is larger than the share of all bytes. Where that gives less than half of the share (a few
// large files), the end of the largest document is added. `progress(stage, total, done)`: `done` more of the
// stage's total. Any thread calls it, one at a time.
using PrepareProgress = std::function<void(const char* stage, int64_t total, int64_t done)>;
Prepared prepare_tokens(const PrepareRequest& request, const PrepareProgress& progress = {});

}  // namespace evenkeel
