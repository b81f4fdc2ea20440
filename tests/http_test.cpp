// Requests, read strictly; and the server under clients that are slow, silent, greedy or hostile. Real sockets; whatever
// takes time is waited for, never slept through.
#include <gtest/gtest.h>

#include <thread>

#include "base/error.h"
#include "http_client.h"
#include "report/http_server.h"

namespace evenkeel {
namespace {

using std::chrono::milliseconds;

constexpr size_t kLongest = 8192;

HttpParse parse(const std::string& text) { return parse_http_request(text, kLongest); }
HttpParse parse_path(const std::string& path) {
  return parse("GET " + path + " HTTP/1.1\r\nHost: localhost\r\n\r\n");
}

TEST(HttpRequest, is_taken_apart) {
  const std::string text =
      "GET /a/b%20c%C3%A4?q=/../x HTTP/1.1\r\nhOst: LocalHost:5335\r\nIf-None-Match:  \"1\" \r\nX: \t "
      "y\r\n\r\n";
  const HttpParse p = parse(text + "GET / HTTP/1.1\r\n");
  ASSERT_EQ(p.status, 200) << p.why;
  EXPECT_EQ(p.taken, text.size());
  EXPECT_EQ(p.request.method, "GET");
  EXPECT_EQ(p.request.path, "/a/b cä");
  EXPECT_EQ(p.request.host, "localhost");
  EXPECT_EQ(p.request.if_none_match, "\"1\"");
  EXPECT_TRUE(p.request.keep_alive);
  EXPECT_EQ(parse("GET / HTTP/1.1\r\nHost: [::1]:80\r\nConnection: close\r\n\r\n").request.host, "[::1]");
  EXPECT_FALSE(parse("GET / HTTP/1.1\r\nHost: a\r\nConnection: Close\r\n\r\n").request.keep_alive);
  EXPECT_FALSE(parse("GET / HTTP/1.0\r\n\r\n").request.keep_alive);
  EXPECT_TRUE(parse("GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n").request.keep_alive);
  EXPECT_EQ(parse("DELETE / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n").status, 200);
  EXPECT_EQ(parse_path("/").request.path, "/");
  EXPECT_EQ(parse_path("/a/").request.path, "/a/");
  EXPECT_EQ(parse_path("/..a/.b/c..").request.path, "/..a/.b/c..");
}

TEST(HttpRequest, is_waited_for_byte_by_byte) {
  const std::string text = "GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n";
  for (size_t length = 0; length < text.size(); ++length)
    EXPECT_EQ(parse(text.substr(0, length)).status, 0) << length;
  EXPECT_EQ(parse(text).status, 200);
}

TEST(HttpRequest, that_is_not_quite_right_is_refused_with_the_reason) {
  const std::string end = " HTTP/1.1\r\nHost: localhost\r\n\r\n", nul(1, '\0');
  const struct {
    std::string text;
    int status;
  } table[] = {
      {"\r\n\r\n", 400},
      {"\x16\x03\x01\x02 TLS", 400},
      {"GET\r\n\r\n", 400},
      {"GET /\r\n\r\n", 400},
      {"GET  / HTTP/1.1\r\nHost: a\r\n\r\n", 400},
      {"GET / HTTP/1.1 \r\nHost: a\r\n\r\n", 400},
      {"G(T / HTTP/1.1\r\nHost: a\r\n\r\n", 400},
      {"GET / XTTP/1.1\r\nHost: a\r\n\r\n", 400},
      {"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505},
      {"GET / HTTP/1.1\nHost: a\n\r\n\r\n", 400},
      {"GET / HTTP/1.1\r\n\r\n", 400},
      {"GET / HTTP/1.1\r\nHost:\r\n\r\n", 400},
      {"GET / HTTP/1.1\r\nHost: a b\r\n\r\n", 400},
      {"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400},
      {"GET / HTTP/1.1\r\nHost : a\r\n\r\n", 400},
      {"GET / HTTP/1.1\r\nHost: a\r\n folded\r\n\r\n", 400},
      {"GET / HTTP/1.1\r\nHost: a\r\nnonsense\r\n\r\n", 400},
      {"GET / HTTP/1.1\r\nHost: a\r\nX: " + nul + "\r\n\r\n", 400},
      {"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello", 400},
      {"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 00\r\n\r\n", 400},
      {"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400},
      {"GET http://localhost/" + end, 400},
      {"GET *" + end, 400},
      {"GET /a#b" + end, 400},
      {"GET /.." + end, 400},
      {"GET /../etc/passwd" + end, 400},
      {"GET /a/../../etc/passwd" + end, 400},
      {"GET /%2e%2e/etc/passwd" + end, 400},
      {"GET /.%2E/etc/passwd" + end, 400},
      {"GET /..%2fetc" + end, 400},
      {"GET /%2fetc" + end, 400},
      {"GET /..%5cetc" + end, 400},
      {"GET /..\\etc" + end, 400},
      {"GET //etc/passwd" + end, 400},
      {"GET /./a" + end, 400},
      {"GET /a%00.html" + end, 400},
      {"GET /%0d%0aX:y" + end, 400},
      {"GET /%c0%ae%c0%ae/" + end, 400},  // two dots, overlong
      {"GET /%" + end, 400},
      {"GET /%2" + end, 400},
      {"GET /%zz" + end, 400},
      {"GET /%-1" + end, 400},
      {"GET /" + std::string(kLongest, 'a') + end, 431},
      {"GET / HTTP/1.1\r\nHost: a\r\nX: " + std::string(kLongest, 'a') + "\r\n\r\n", 431},
      {std::string(kLongest, 'G'), 431},
  };
  for (const auto& [text, status] : table) {
    const HttpParse p = parse(text);
    EXPECT_EQ(p.status, status) << text << "\n" << p.why;
    EXPECT_NE(p.why.find("expected"), std::string::npos) << text;
  }
}

// A server in a thread of its own. /page: its answer; /stream; /later: answered once it is there.
class HttpServerTest : public testing::Test {
 protected:
  void start(const HttpServer::Limits& limits = {}) {
    server.emplace("127.0.0.1", 0, limits,
                   [this](const HttpRequest& request, HttpClock::time_point) { return handle(request); });
    thread = std::thread([this] { server->run(); });
    port = server->port();
  }
  void TearDown() override {
    if (!thread.joinable()) return;
    server->stop();
    thread.join();
  }
  std::optional<HttpAnswer> handle(const HttpRequest& request) {
    ++asked;
    if (request.path == "/page") return HttpAnswer{.body = page, .tag = "v1"};
    if (request.path == "/stream")
      return HttpAnswer{.type = "text/event-stream",
                        .body = std::make_shared<const std::string>("data: hello\n\n"),
                        .stream = true};
    if (request.path == "/later" && !ready) return {};
    return HttpAnswer{.status = request.path == "/later" ? 200 : 404};
  }
  HttpReply get(const std::string& path, const std::string& more = "") { return http_get(port, path, more); }

  std::shared_ptr<const std::string> page = std::make_shared<const std::string>(3'000'000, 'x');
  std::atomic<bool> ready = false;
  std::atomic<int> asked = 0;
  std::optional<HttpServer> server;
  std::thread thread;
  int port = 0;
};

TEST_F(HttpServerTest, answers_get_and_head_and_nothing_else) {
  start();
  EXPECT_TRUE(server->loopback());
  EXPECT_EQ(server->url(), "http://127.0.0.1:" + std::to_string(port) + "/");
  const HttpReply reply = get("/page");
  EXPECT_EQ(reply.status, 200);
  EXPECT_EQ(reply.body, *page);
  EXPECT_EQ(reply.field("ETag"), "\"v1\"");
  EXPECT_NE(reply.field("Content-Security-Policy").find("default-src 'none'"), std::string::npos);
  EXPECT_EQ(get("/other").status, 404);
  EXPECT_EQ(get("/page", "If-None-Match: \"v0\"\r\n").status, 200);
  const HttpReply unchanged = get("/page", "If-None-Match: W/\"v1\", \"v0\"\r\n");
  EXPECT_EQ(unchanged.status, 304);
  EXPECT_EQ(unchanged.body, "");

  HttpClient head(port);
  head.say("HEAD /page HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
  const HttpReply only_head = head.reply(/*with_body=*/false);
  EXPECT_EQ(only_head.status, 200);
  EXPECT_EQ(only_head.field("Content-Length"), std::to_string(page->size()));
  EXPECT_TRUE(head.hears_the_end());

  const int before = asked;
  for (const char* method :
       {"POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PATCH", "get", "BREW"}) {
    HttpClient client(port);
    client.say(std::string(method) + " /page HTTP/1.1\r\nHost: localhost\r\n\r\n");
    const HttpReply refused = client.reply();
    EXPECT_EQ(refused.status, 405) << method;
    EXPECT_EQ(refused.field("Allow"), "GET, HEAD");
    EXPECT_TRUE(client.hears_the_end()) << method;
  }
  EXPECT_EQ(asked, before);  // the handler never hears of them
}

// A site whose name points at this machine must not read through a visitor's browser.
TEST_F(HttpServerTest, on_loopback_refuses_other_hosts) {
  start();
  for (const char* host : {"localhost", "LOCALHOST:1", "127.0.0.1:5335", "[::1]:5335"}) {
    HttpClient client(port);
    client.say("GET /page HTTP/1.1\r\nHost: " + std::string(host) + "\r\n\r\n");
    EXPECT_EQ(client.reply().status, 200) << host;
  }
  for (const char* host : {"evil.example", "localhost.evil.example", "127.0.0.1.evil.example",
                           "127.evil.example", "192.168.0.1"}) {
    HttpClient client(port);
    client.say("GET /page HTTP/1.1\r\nHost: " + std::string(host) + "\r\n\r\n");
    EXPECT_EQ(client.reply().status, 421) << host;
  }
}

TEST_F(HttpServerTest, answers_requests_one_behind_the_other_and_in_pieces) {
  start();
  HttpClient client(port);
  std::string many;
  for (int n = 0; n < 100; ++n) many += "GET /other HTTP/1.1\r\nHost: localhost\r\n\r\n";
  client.say(many);
  for (int n = 0; n < 100; ++n) EXPECT_EQ(client.reply().status, 404) << n;
  for (const char byte : std::string("GET /page HTTP/1.1\r\nHost: localhost\r\n\r\n"))
    client.say(std::string(1, byte));
  EXPECT_EQ(client.reply().body.size(), page->size());
}

TEST_F(HttpServerTest, refuses_what_is_malformed_and_hangs_up) {
  start();
  for (const std::string& bad : {std::string("nonsense\r\n\r\n"), std::string("\x16\x03\x01\x02\0 \r\n", 8),
                                 std::string("GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n"),
                                 "GET /" + std::string(3'000'000, 'a')}) {
    HttpClient client(port);
    client.say(bad);
    const int status = client.reply().status;
    EXPECT_TRUE(status == 400 || status == 431) << status;
    EXPECT_TRUE(client.hears_the_end());
  }
  EXPECT_EQ(get("/page").status, 200);
}

TEST_F(HttpServerTest, has_patience_but_not_for_ever) {
  HttpServer::Limits limits;
  limits.head = milliseconds(20);
  start(limits);
  HttpClient silent(port), slow(port);
  slow.say("GET /page HTTP/1.1\r\nHo");
  EXPECT_EQ(slow.reply().status, 408);
  EXPECT_TRUE(slow.hears_the_end());
  EXPECT_TRUE(silent.hears_the_end());
}

TEST_F(HttpServerTest, lets_go_of_one_that_asks_and_does_not_read) {
  HttpServer::Limits limits;
  limits.head = limits.stall = milliseconds(20);
  page = std::make_shared<const std::string>(64'000'000, 'x');  // more than sockets buffer
  start(limits);
  HttpClient deaf(port);
  deaf.get("/page");
  for (int n = 0; n < 3; ++n) EXPECT_TRUE(HttpClient(port).hears_the_end());  // as many times 20 ms go by
  const HttpReply reply = deaf.reply();
  EXPECT_EQ(reply.status, 200);
  EXPECT_LT(reply.body.size(), page->size());
}

TEST_F(HttpServerTest, lets_the_silent_go_first_when_it_is_full) {
  HttpServer::Limits limits;
  limits.connections = 4;
  start(limits);
  HttpClient stream(port);
  stream.get("/stream");
  EXPECT_EQ(stream.hear_until("hello\n\n").substr(0, 15), "HTTP/1.1 200 OK");
  std::vector<std::unique_ptr<HttpClient>> silent;
  for (int n = 0; n < 20; ++n) silent.push_back(std::make_unique<HttpClient>(port));
  EXPECT_EQ(get("/page").status, 200);
  EXPECT_TRUE(silent[0]->hears_the_end());
  server->publish("data: still here\n\n");
  EXPECT_NE(stream.hear_until("here\n\n").find("still"), std::string::npos);
}

TEST(HttpServerHosts, at_another_address_names_are_refused_but_for_its_own) {
  HttpServer server("0.0.0.0", 0, {}, [](const HttpRequest&, HttpClock::time_point) { return HttpAnswer{}; });
  char machine[256] = "";
  gethostname(machine, sizeof machine - 1);
  std::string own = machine;
  for (char& c : own) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  for (const std::string& host : {std::string(), std::string("192.168.0.7"), std::string("[fe80::1]"),
                                  std::string("127.0.0.1"), std::string("localhost"), own})
    EXPECT_TRUE(server.accepts_host(host)) << host;
  for (const std::string& host : {std::string("evil.example"), std::string("192.168.0.7.evil.example"),
                                  std::string("[evil.example]"), "x" + own, own + ".evil.example"})
    EXPECT_FALSE(server.accepts_host(host)) << host;
}

TEST_F(HttpServerTest, the_oldest_stream_makes_room_where_there_is_nothing_else) {
  HttpServer::Limits limits;
  limits.connections = 2;
  start(limits);
  HttpClient a(port), b(port);
  for (HttpClient* client : {&a, &b}) {
    client->get("/stream");
    client->hear_until("hello\n\n");
  }
  while (server->streams() < 2) std::this_thread::yield();
  EXPECT_EQ(get("/page").status, 200);
  EXPECT_TRUE(a.hears_the_end());
  server->publish("data: still here\n\n");
  EXPECT_NE(b.hear_until("here\n\n").find("still"), std::string::npos);
}

TEST_F(HttpServerTest, publishes_to_every_reader_and_drops_those_who_do_not_read) {
  HttpServer::Limits limits;
  limits.heartbeat = milliseconds(5);
  start(limits);
  HttpClient reader(port), deaf(port);
  for (HttpClient* client : {&reader, &deaf}) {
    client->get("/stream");
    client->hear_until("hello\n\n");
  }
  while (server->streams() < 2) std::this_thread::yield();  // counted behind the answer
  EXPECT_EQ(reader.hear_until(":\n\n"), ":\n\n");           // nothing is said, but that it is there
  const std::string event = "data: " + std::string(100'000, 'y') + "\n\n";
  // More than the buffers of a socket hold: the one who does not read is let go, the other gets everything.
  while (server->streams() == 2) {
    server->publish(event);
    EXPECT_NE(reader.hear_until("y\n\n").find(event), std::string::npos);
  }
  server->publish("data: end\n\n");
  EXPECT_NE(reader.hear_until("end\n\n").find("end"), std::string::npos);
}

TEST_F(HttpServerTest, answers_later_what_is_not_ready) {
  start();
  HttpClient first(port), second(port);
  first.get("/later");
  second.get("/later");
  while (asked < 2) std::this_thread::yield();
  EXPECT_EQ(get("/page").status, 200);  // meanwhile
  ready = true;
  server->wake();
  EXPECT_EQ(first.reply().status, 200);
  EXPECT_EQ(second.reply().status, 200);
}

TEST_F(HttpServerTest, ends_in_order_with_readers_at_its_door) {
  start();
  HttpClient stream(port), silent(port), later(port);
  stream.get("/stream");
  stream.hear_until("hello\n\n");
  later.get("/later");
  while (asked < 2) std::this_thread::yield();
  server->stop();
  thread.join();
  EXPECT_TRUE(stream.hears_the_end());
  EXPECT_TRUE(silent.hears_the_end());
  EXPECT_TRUE(later.hears_the_end());
  server.reset();
  EXPECT_FALSE(HttpClient(port).connected);
}

TEST(HttpServerStart, says_why_it_cannot_listen) {
  const auto nothing = [](const HttpRequest&, HttpClock::time_point) { return std::optional(HttpAnswer{}); };
  HttpServer first("127.0.0.1", 0, {}, nothing);
  try {
    HttpServer second("127.0.0.1", first.port(), {}, nothing);
    FAIL() << "two servers at one port";
  } catch (const DataError& error) {
    EXPECT_NE(std::string(error.what()).find("--port 0"), std::string::npos) << error.what();
  }
  EXPECT_THROW(HttpServer("no.such.host.invalid", 0, {}, nothing), DataError);
  EXPECT_FALSE(HttpServer("0.0.0.0", 0, {}, nothing).loopback());
}

}  // namespace
}  // namespace evenkeel
