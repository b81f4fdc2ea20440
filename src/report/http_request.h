// The head of an HTTP/1.1 request, read strictly (RFC 9112): what is not quite right is refused, not guessed at. Knows
// nothing of sockets or files.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace evenkeel {

struct HttpRequest {
  std::string method;  // as sent, a token
  // Decoded, without the query. Begins with '/'; UTF-8 without control characters or backslashes; no segment is "." or "..",
  // and none but the last is empty.
  std::string path;
  std::string host;           // lower case, without the port; empty: not sent (HTTP/1.0)
  std::string if_none_match;  // as sent
  bool keep_alive = true;     // the client would like to ask again on this connection
};

struct HttpParse {
  // 0: more is needed; 200: there it is; else the status of the refusal.
  int status = 0;
  std::string why;   // of a refusal: what was expected and what was found
  size_t taken = 0;  // bytes of the request, where there is one
  HttpRequest request;
};

// `bytes`: what has come so far, from the first byte of the request on. A request with a body is refused: none of ours has
// one, and what is taken for the next request must not be the rest of this one.
HttpParse parse_http_request(std::string_view bytes, size_t longest_head);

}  // namespace evenkeel
