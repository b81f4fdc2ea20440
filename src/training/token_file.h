// Tokens for training, as they lie on disk:
//   nanoGPT's files   headerless uint16, little-endian                         train.bin, val.bin
//   llm.c's shards    256 int32 (20240520, 1, count, zeros), then count uint16  *.bin
//   text              any file or folder as it is: the byte vocabulary
// A file that is shortened while it is read causes a DataError.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/random_access_file.h"

namespace evenkeel {

// The text files that paths stand for: a file itself, of a folder all files below it, in the order of their
// paths as bytes. In folders, hidden names, links, binary files (a NUL among the first 8 KiB) and the folders of runs
// are left out: a run's own records never become its text.
struct TextFile {
  std::string path;
  int64_t bytes;
};
struct TextFiles {
  std::vector<TextFile> files;
  int64_t binary = 0;  // left out; so is a binary file that is named itself
};
// What lies below the folder `except`, if one is named, is left out too.
TextFiles find_text_files(const std::vector<std::string>& paths, const std::string& except = "");

enum class TokenKind { nanogpt, llmc, text };
const char* name(TokenKind kind);

// Where the tokens lie in a token file. DataError: what is wrong with it. `file` is for messages.
struct TokenLayout {
  TokenKind kind;  // nanogpt or llmc
  int64_t first_byte, tokens;
};
TokenLayout token_layout(std::string_view bytes, std::string_view file);
// The same from the first kTokenHeadBytes of a file, or all of it where it is shorter.
inline constexpr size_t kTokenHeadBytes = 1024;
TokenLayout token_layout(std::string_view head, int64_t file_size, std::string_view file);

// meta.json next to token files, as `evenkeel data prepare` writes it: the size of the vocabulary, and how many
// tokens each file has.
struct TokenMeta {
  int64_t vocabulary = 0;
  std::vector<std::pair<std::string, int64_t>> files;  // name in the folder, tokens
};
TokenMeta parse_token_meta(std::string_view text, std::string_view file);

// One sequence of tokens. Thread-safe once opened.
class TokenSource {
 public:
  // path is a token file (*.bin), a pattern of them (* and ? in the last name), a text file, or a folder: its
  // token files if it has any, otherwise its text. Several files follow each other in the order of their names;
  // in a folder, those with the word "val" in their name (val.bin, x_val_0.bin) are left to open_validation.
  static TokenSource open(const std::string& path);
  // The validation files of a folder, if it has some.
  static std::optional<TokenSource> open_validation(const std::string& path);

  TokenKind kind() const { return kind_; }
  int64_t size() const { return size_; }
  // 256 for text; of token files what meta.json says, otherwise the largest token + 1.
  int64_t vocabulary() const { return vocabulary_; }
  // Tokens [offset, offset + count). DataError on a token outside of the vocabulary that meta.json promised.
  void read(int64_t offset, int64_t count, int32_t* out) const;
  std::vector<std::string> files() const;
  // Of all tokens, in hexadecimal digits: the same tokens have the same, however they are shared among files. Reads
  // everything, once in a process as long as no file changes.
  std::string digest() const;

 private:
  // Read where they lie, or copied where they are few: folders of text have many files.
  class FileBytes {
   public:
    explicit FileBytes(const std::string& path);
    int64_t size() const { return static_cast<int64_t>(file_.size()); }
    const std::string& identity() const { return file_.identity(); }
    void read_at(int64_t offset, size_t count, std::byte* to) const;

   private:
    RandomAccessFile file_;
    std::string copied_;
  };
  struct Segment {
    std::string path;
    FileBytes bytes;
    int64_t first_byte;     // of the tokens in it
    int64_t begin, tokens;  // in the sequence
  };
  TokenSource() = default;
  static TokenSource open_token_files(const std::vector<std::string>& paths);
  static TokenSource open_text(const std::string& path);
  void add(std::string path, FileBytes bytes, int64_t first_byte, int64_t tokens);
  int32_t largest_token() const;
  int64_t token_bytes() const { return kind_ == TokenKind::text ? 1 : 2; }
  // Bytes of the tokens as they lie in the files, those of all files in one sequence.
  void read_bytes(uint64_t offset, size_t count, std::byte* to) const;
  std::vector<Segment>::const_iterator segment_at(int64_t token) const;

  TokenKind kind_ = TokenKind::text;
  std::vector<Segment> segments_;
  int64_t size_ = 0, vocabulary_ = 0;
};

// Where the rows of a batch begin: a function of seed, step and row alone, so that any batch can be named
// without those before it. Uniform over the places from which tokens_per_row tokens can be read; a trainer that
// needs targets asks for one token more than the context. out: (rows)
void batch_offsets(uint64_t seed, int64_t step, int64_t rows, int64_t tokens_per_row, int64_t source_size,
                   int64_t* out);

}  // namespace evenkeel
