// Safetensors files. As they are, and once more with the header's length put right: the fuzzer seldom hits
// it.
#include "base/safetensors.h"

#include <algorithm>

#include "fuzz/fuzz.h"

using namespace evenkeel;

namespace {

void check(Bytes file) {
  fuzz::accepts([&] {
    const Safetensors read(file, "f");
    const std::byte* end = nullptr;
    for (const StoredTensor& tensor : read.tensors()) {
      fuzz::must(tensor.bytes.size() == byte_count(tensor), "a tensor has as many bytes as its shape says");
      fuzz::must(tensor.bytes.data() >= file.data() &&
                     tensor.bytes.data() + tensor.bytes.size() <= file.data() + file.size(),
                 "a tensor lies within the file");
      fuzz::must(end == nullptr || tensor.bytes.data() == end, "tensors lie one behind the other");
      end = tensor.bytes.data() + tensor.bytes.size();
      fuzz::must(read.find(tensor.name) == &tensor, "a tensor is found by its name");
      fuzz::must(&read.at(tensor) == &tensor, "and by its whole description");
    }
    fuzz::must(end == nullptr || end == file.data() + file.size(), "tensors go to the end of the file");
  });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string file(fuzz::text_of(data, size));
  check(bytes_of(file));
  if (size < sizeof(uint64_t)) return 0;
  // The header as the longest text that ends in '}'; the rest is data.
  const size_t brace = file.rfind('}');
  if (brace == std::string::npos || brace < sizeof(uint64_t)) return 0;
  const uint64_t length = brace + 1 - sizeof(uint64_t);
  std::copy_n(reinterpret_cast<const char*>(&length), sizeof length, file.begin());
  check(bytes_of(file));
  return 0;
}
