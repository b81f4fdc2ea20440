#include "base/toml.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/error.h"

namespace evenkeel {
namespace {

TomlTable parsed(std::string_view text) { return parse_toml(text, "c.toml"); }

std::string refusal(std::string_view text) {
  try {
    return "accepted: " + to_toml(parsed(text));
  } catch (const DataError& error) {
    return error.what();
  }
}

// The value of the only key.
TomlValue value_of(const std::string& text) { return parsed("x = " + text).entries().at(0)->value; }

TEST(Toml, a_run_configuration) {
  const TomlTable config = parsed(R"(# a run
name = "micro"   # a comment
steps = 1_600
lr = 1e-3
plan = 'bf16_all; layer 1 head 3,7: output_for_delta=fp32'

[model]
layers = 3
tied = true
norm.epsilon = 1e-5
[optimizer.adamw]
betas = [0.9, 0.95,
         # the last comma is allowed
]
[[at]]
step = 3000
change = "layer 1: stabiliser=zero_sum"
[[at]]
step = 4000
inline = { a = 1, b.c = [{}, { d = false }] }
)");
  EXPECT_EQ(config.find("name")->string(), "micro");
  EXPECT_EQ(config.find("steps")->integer(), 1600);
  EXPECT_EQ(config.find("lr")->number(), 1e-3);
  EXPECT_EQ(config.find("plan")->string(), "bf16_all; layer 1 head 3,7: output_for_delta=fp32");
  const TomlTable& model = config.find("model")->table();
  EXPECT_EQ(model.find("layers")->number(), 3.0);  // an integer is a number, too
  EXPECT_TRUE(model.find("tied")->boolean());
  EXPECT_EQ(model.find("norm")->table().find("epsilon")->number(), 1e-5);
  const auto& betas = config.find("optimizer")->table().find("adamw")->table().find("betas")->array();
  ASSERT_EQ(betas.size(), 2u);
  EXPECT_EQ(betas[1].number(), 0.95);
  const auto& at = config.find("at")->array();
  ASSERT_EQ(at.size(), 2u);
  EXPECT_EQ(at[1].table().find("step")->integer(), 4000);
  const TomlTable& inside = at[1].table().find("inline")->table();
  EXPECT_FALSE(inside.find("b")->table().find("c")->array()[1].table().find("d")->boolean());
  EXPECT_EQ(config.find("none"), nullptr);
  EXPECT_EQ(config.entries()[0]->key, "name");
  EXPECT_EQ(config.entries().back()->key, "at");
}

TEST(Toml, numbers) {
  const std::pair<const char*, int64_t> kIntegers[] = {{"0", 0},
                                                       {"+99", 99},
                                                       {"-17", -17},
                                                       {"-0", 0},
                                                       {"1_000", 1000},
                                                       {"1_2_3", 123},
                                                       {"0xDEAD_beef", 0xDEADBEEF},
                                                       {"0o0755", 0755},
                                                       {"0b1101", 13},
                                                       {"9223372036854775807", INT64_MAX},
                                                       {"-9223372036854775808", INT64_MIN},
                                                       {"0x7fffffffffffffff", INT64_MAX}};
  for (const auto& [text, value] : kIntegers) EXPECT_EQ(value_of(text).integer(), value) << text;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::pair<const char*, double> kFloats[] = {{"1.0", 1},
                                                    {"+3.14", 3.14},
                                                    {"-0.01", -0.01},
                                                    {"5e+22", 5e22},
                                                    {"1e06", 1e6},
                                                    {"-2E-2", -0.02},
                                                    {"6.626e-34", 6.626e-34},
                                                    {"9_2.2_4e0_1", 922.4},
                                                    {"inf", kInfinity},
                                                    {"+inf", kInfinity},
                                                    {"-inf", -kInfinity},
                                                    {"0.1", 0.1},
                                                    {"1.1e-33", 1.1e-33},
                                                    {"123e-4", 0.0123},
                                                    {"4.9406564584124654e-324", 5e-324}};
  for (const auto& [text, value] : kFloats) {
    ASSERT_TRUE(value_of(text).get_if<double>()) << text;
    EXPECT_EQ(value_of(text).number(), value) << text;
  }
  EXPECT_TRUE(std::signbit(value_of("-0.0").number()));
  for (const char* nan : {"nan", "+nan", "-nan"}) EXPECT_TRUE(std::isnan(value_of(nan).number()));
  for (const char* bad : {"01",
                          "1__0",
                          "_1",
                          "1_",
                          "1.",
                          ".5",
                          "1.e5",
                          "1e",
                          "1e+",
                          "+-1",
                          "0x",
                          "0xg",
                          "0x_1",
                          "+0x1",
                          "0b2",
                          "0o8",
                          "1_.0",
                          "1._0",
                          "1e_5",
                          "00.5",
                          "0x1_",
                          "Inf",
                          "NaN",
                          "True",
                          "1a",
                          "--1",
                          "1,5",
                          "9223372036854775808",
                          "-9223372036854775809",
                          "0x8000000000000000",
                          "1e999",
                          "1e-999",
                          "-",
                          "+",
                          "1.5.6",
                          "1e5e5",
                          "1e5.5",
                          "tru",
                          "infinity"})
    EXPECT_EQ(refusal(std::string("x = ") + bad).find("c.toml:1:"), 0u)
        << bad << refusal(std::string("x = ") + bad);
}

TEST(Toml, strings) {
  const std::pair<const char*, std::string> kStrings[] = {
      {R"("")", ""},
      {R"("a\tb\n\"\\\b\f\r")", "a\tb\n\"\\\b\f\r"},
      {R"("\u00e9\U0001F600\u0000")", std::string("\xC3\xA9\xF0\x9F\x98\x80\0", 7)},
      {"\"\xC3\xA9\t\"", "\xC3\xA9\t"},
      {R"('C:\x "y" \')", "C:\\x \"y\" \\"},
      {"''", ""},
      {"\"\"\"\none\ntwo\"\"\"", "one\ntwo"},
      {"\"\"\"a\r\nb\"\"\"", "a\nb"},
      {"\"\"\"a \\  \n\n   b\\\r\n c\"\"\"", "a bc"},
      {"\"\"\"a\"b\"\"c\"\"\"", "a\"b\"\"c"},
      {"\"\"\"\"\"\"", ""},
      {"\"\"\"\"a\"\"\"\"\"", "\"a\"\""},
      {"'''\n\\a'b''\n'''", "\\a'b''\n"},
      {"''''''''", "''"},
  };
  for (const auto& [text, value] : kStrings) EXPECT_EQ(value_of(text).string(), value) << text;
}

TEST(Toml, keys_of_every_kind) {
  const TomlTable table =
      parsed("1.2 = 3\n\"a b\".'c' . d=1\n\"\" = 2\n-_- = 4\n'x\"y' = 5\n[ a . \"b.c\" ]\n");
  EXPECT_EQ(table.find("1")->table().find("2")->integer(), 3);
  EXPECT_EQ(table.find("a b")->table().find("c")->table().find("d")->integer(), 1);
  EXPECT_EQ(table.find("")->integer(), 2);
  EXPECT_EQ(table.find("-_-")->integer(), 4);
  EXPECT_EQ(table.find("x\"y")->integer(), 5);
  EXPECT_TRUE(table.find("a")->table().find("b.c")->table().empty());
}

TEST(Toml, layout_does_not_matter) {
  for (const char* text : {"", "\n", "# only a comment", "\xEF\xBB\xBF# marked", "\t \r\n\n"})
    EXPECT_TRUE(parsed(text).empty()) << text;
  const TomlTable plain = parsed("a = 1\n[b]\nc = [1, 2]\n");
  for (const char* text : {"a=1\r\n[b]#x\r\nc=[1,2]", "\n\n\ta\t=\t1\n[\tb ]\nc = [ # x\n1\n,\n\n2,]",
                           "b.c = [1,2]\na = 1", "a = 1\nb = { c = [1, 2] }", "[b]\n\"c\" = [ 1,2 ]\n[d]\n"})
    EXPECT_EQ(same(parsed(text), plain), std::string(text).find("[d]") == std::string::npos) << text;
}

TEST(Toml, faults_say_where_what_and_instead) {
  const std::pair<std::string, std::string> kCases[] = {
      {"a", "1:2: expected '=' and a value, found the end of the file"},
      {"a\n", "1:2: expected '=' and a value, found the end of the line"},
      {"a = ",
       "1:5: expected a value (a string, a number, true, false, an array or a table), found the end of the "
       "file"},
      {"a = \n",
       "1:5: expected a value (a string, a number, true, false, an array or a table), found the end of the "
       "line"},
      {"\n\n  = 1", "3:3: expected a key, found '='"},
      {"a. = 1", "1:4: expected a key, found '='"},
      {"a = 1 b = 2", "1:7: expected the end of the line, found 'b'"},
      {"\xC3\xA9 = 1",
       "1:1: expected a key, found '?"
       "?'"},
      {"\"\xC3\xA9\" = x",
       "1:7: expected a value (a string, a number, true, false, an array or a table), found 'x'"},
      {"a = flase", "1:5: expected a value (a string, a number, true or false), found 'flase'"},
      {"a = 3 layers", "1:7: expected the end of the line, found 'layers'"},
      {"a = 1979-05-27", "1:5: expected a number (dates and times are not read), found '1979-05-27'"},
      {"a = 07:32:00", "1:5: expected a number (dates and times are not read), found '07:32:00'"},
      {"a = 99999999999999999999", "1:5: expected an integer of 64 bits, found '99999999999999999999'"},
      {"a = \"x", "1:7: expected \" to end the string of 1:5, found the end of the file"},
      {"a = \"x\nb = 1", "1:7: expected \" to end the string of 1:5, found the end of the line"},
      {"a = '''\nx\n", "3:1: expected ''' to end the string of 1:5, found the end of the file"},
      {"a = \"\\q\"",
       "1:6: expected an escape (\\b \\t \\n \\f \\r \\\" \\\\ \\uXXXX \\UXXXXXXXX), found '\\q'"},
      {"a = \"\\ud800\"", "1:6: expected a character by 4 hexadecimal digits, found '\\ud800'"},
      {"a = \"\\U00110000\"", "1:6: expected a character by 8 hexadecimal digits, found '\\U00110000'"},
      {"a = \"\\u12\"", "1:6: expected a character by 4 hexadecimal digits, found '\\u12\"'"},
      {"a = \"\\u+123\"", "1:6: expected a character by 4 hexadecimal digits, found '\\u+123'"},
      {std::string("a = \"\0\"", 7),
       "1:6: expected a string without control characters (escape them), found the "
       "control character 0x00"},
      {"a = 'x\x7F'",
       "1:7: expected a string without control characters (escape them), found the control character "
       "0x7f"},
      {"a = 1 # \x01",
       "1:9: expected a comment without control characters, found the control character 0x01"},
      {"a = 1\rb = 2", "1:6: expected the end of the line, found the control character 0x0d"},
      {"a = [1 2]", "1:8: expected ',' or ']', found '2'"},
      {"a = [1,\n2", "2:2: expected ',' or ']', found the end of the file"},
      {"a = [,]", "1:6: expected a value (a string, a number, true, false, an array or a table), found ','"},
      {"a = { b = 1 c = 2 }", "1:13: expected ',' or '}', found 'c'"},
      {"a = { b = 1, }", "1:14: expected a key, found '}'"},
      {"a = { b = 1\n}", "1:12: expected ',' or '}', found the end of the line"},
      {"[a", "1:3: expected ']', found the end of the file"},
      {"[a]]", "1:4: expected the end of the line, found ']'"},
      {"[[a]", "1:4: expected ']]', found ']'"},
      {"[]", "1:2: expected a key, found ']'"},
      {"[a] b = 1", "1:5: expected the end of the line, found 'b'"},
      {"\"\"\"a\"\"\" = 1", "1:1: expected a key on one line, found '\"\"\"a\"\"\"'"},
      {"a = 1\nb = \xFF", "2:5: expected text in UTF-8, found the byte 0xff"},
      {"# \xED\xA0\x80", "1:3: expected text in UTF-8, found the byte 0xed"},
      // every key once
      {"a = 1\na = 2", "2:1: expected a new key, found 'a', which is the integer 1 since line 1"},
      {"a = 1\na.b = 2", "2:1: expected a new key, found 'a', which is the integer 1 since line 1"},
      {"a.b = 1\na = 2", "2:1: expected a new key, found 'a', which is a table since line 1"},
      {"[a]\n[a]", "2:2: expected a new table, found 'a', which is a table since line 1"},
      {"[a.b]\n[a]\n[a]", "3:2: expected a new table, found 'a', which is a table since line 2"},
      {"[a]\nb.c = 1\n[a.b]", "3:4: expected a new table, found 'b', which is a table since line 2"},
      {"[a.b]\nc = 1\n[a]\nb.d = 2", "4:1: expected a new key, found 'b', which is a table since line 1"},
      {"[a.b.c]\nz = 1\n[a]\nb.x = 2", "4:1: expected a new key, found 'b', which is a table since line 1"},
      {"a = {}\n[a]", "2:2: expected a new table, found 'a', which is a table since line 1"},
      {"a = {}\n[a.b]", "2:2: expected a table that can grow, found 'a', which is a table since line 1"},
      {"a = { b.c = 1 }\na.b.d = 1", "2:1: expected a new key, found 'a', which is a table since line 1"},
      {"a = { b = {}, b.c = 1 }", "1:15: expected a new key, found 'b', which is a table since line 1"},
      {"a = []\n[[a]]", "2:3: expected an array of tables, found 'a', which is an array since line 1"},
      {"a = [{}]\n[a.b]", "2:2: expected a table that can grow, found 'a', which is an array since line 1"},
      {"[[a]]\n[a]", "2:2: expected a new table, found 'a', which is an array since line 1"},
      {"[a]\n[[a]]", "2:3: expected an array of tables, found 'a', which is a table since line 1"},
      {"[[a]]\nb.c = 1\n[a.b]", "3:4: expected a new table, found 'b', which is a table since line 2"},
      {"[[a.b]]\n[[a]]", "2:3: expected an array of tables, found 'a', which is a table since line 1"},
      {"[a]\nb = 1\n[a.b.c]",
       "3:4: expected a table that can grow, found 'b', which is the integer 1 since line 2"},
  };
  for (const auto& [text, says] : kCases) EXPECT_EQ(refusal(text), "c.toml:" + says) << text;
}

TEST(Toml, what_may_still_be_added) {
  for (const char* text : {"[a.b]\n[a]", "[a]\nb.c = 1\n[a.b.d]", "[[a]]\n[a.b]\n[[a]]\n[a.b]",
                           "[[a]]\n[[a.b]]\n[[a.b]]\n[a.b.c]", "a.b = 1\na.c = 2", "a = { b.c = 1, b.d = 2 }",
                           "[x.y.z]\n[x]\n[x.w]", "[a]\n[b]\n[a.c]"})
    EXPECT_EQ(refusal(text).find("accepted"), 0u) << text << ": " << refusal(text);
}

TEST(Toml, values_of_the_wrong_kind_are_named) {
  const TomlTable table = parsed("\n  a = 'x'\nb = 1.5\nc = [1]\nd = {}\ne = true\nf = 3");
  const auto fault = [](auto&& get) {
    try {
      get();
    } catch (const DataError& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  const auto get = [&](const char* key) { return table.find(key); };
  EXPECT_EQ(fault([&] { get("a")->integer(); }), "c.toml:2:7: expected an integer, found the string \"x\"");
  EXPECT_EQ(fault([&] { get("b")->integer(); }), "c.toml:3:5: expected an integer, found the number 1.5");
  EXPECT_EQ(fault([&] { get("c")->number(); }), "c.toml:4:5: expected a number, found an array");
  EXPECT_EQ(fault([&] { get("d")->string(); }), "c.toml:5:5: expected a string, found a table");
  EXPECT_EQ(fault([&] { get("e")->array(); }), "c.toml:6:5: expected an array, found true");
  EXPECT_EQ(fault([&] { get("f")->boolean(); }), "c.toml:7:5: expected true or false, found the integer 3");
  EXPECT_EQ(fault([&] { get("f")->table(); }), "c.toml:7:5: expected a table, found the integer 3");
  EXPECT_EQ(fault([&] { get("f")->refuse("1 or 2"); }), "c.toml:7:5: expected 1 or 2, found the integer 3");
  EXPECT_EQ(fault([] { TomlValue(3).string(); }), "expected a string, found the integer 3");
}

TEST(Toml, keys_nobody_asked_for_are_found) {
  const TomlTable table = parsed(
      "steps = 1\nstpes = 2\n[model]\nlayers = 3\nhesds.x = 4\n[other]\na = 1\nb = 2\n[[at]]\nstep = "
      "1\n[[at]]\nstep = "
      "2\nspet = 3\n");
  EXPECT_EQ(unused_keys(table).size(), 5u);
  table.find("steps");
  table.find("model")->table().find("layers");
  for (const TomlValue& at : table.find("at")->array()) at.table().find("step");
  EXPECT_EQ(unused_keys(table), (std::vector<std::string>{"c.toml:2:9: 'stpes'", "c.toml:5:1: 'model.hesds'",
                                                          "c.toml:6:2: 'other'", "c.toml:13:8: 'at.spet'"}));
  const TomlTable copy = table;  // with what is known of it
  EXPECT_EQ(unused_keys(copy), unused_keys(table));
}

TEST(Toml, nesting_has_a_limit) {
  const auto repeated = [](std::string_view part, size_t count) {
    std::string text;
    for (size_t i = 0; i < count; ++i) text += part;
    return text;
  };
  for (const size_t count : {size_t{60}, size_t{100}, size_t{1'000'000}}) {
    for (const std::string& text : {"a = " + repeated("[", count) + repeated("]", count),
                                    "a = " + repeated("{a=", count) + "1" + repeated("}", count),
                                    repeated("a.", count) + "a = 1", "[" + repeated("a.", count) + "a]",
                                    "a = " + repeated("{a.a=", count / 2) + "1" + repeated("}", count / 2)}) {
      const std::string answer = refusal(text);
      EXPECT_EQ(answer.find("accepted") == 0, count == 60) << answer.substr(0, 200);
      EXPECT_EQ(answer.find("64") != std::string::npos, count > 60) << answer.substr(0, 200);
    }
  }
  EXPECT_NE(refusal("[" + repeated("a.", 40) + "a]\n" + repeated("b.", 40) + "b = 1").find("64"),
            std::string::npos);
}

TEST(Toml, time_grows_as_the_text_does) {
  std::string line = "a = { ", lines, headers, array = "x = [";
  for (int i = 0; i < 50'000; ++i) {
    line += fmt::format("{}k{} = {}", i ? ", " : "", i, i);
    lines += fmt::format("k{} = {}\n", i, i);
    headers += fmt::format("[[t]]\nk{} = {}\n", i, i);
    array += "1,";
  }
  EXPECT_EQ(parsed(line + "}").find("a")->table().size(), 50'000u);
  EXPECT_EQ(parsed(lines).size(), 50'000u);
  EXPECT_EQ(parsed(headers).find("t")->array().size(), 50'000u);
  EXPECT_EQ(parsed(array + "]").find("x")->array().size(), 50'000u);
}

TEST(Toml, writes_what_it_reads_back) {
  TomlTable model;
  model.add("layers", 3);
  model.add("dropout", 0.0);
  model.add("tied", true);
  TomlTable at;
  at.add("step", int64_t{3000});
  TomlTable table;
  table.add("model", model);  // tables come after values, whatever their order
  table.add("name", "a \"quoted\"\n\tname\x01\x7F \xC3\xA9");
  table.add("lr", 1e-3);
  table.add("numbers", TomlValue::Array{1e22, -0.0, 1.5, 1e-310, 100000.0});
  table.add("not numbers", TomlValue::Array{std::numeric_limits<double>::infinity(), -NAN});
  table.add("at", TomlValue::Array{at, TomlTable()});
  table.add("mixed", TomlValue::Array{1, "x", at, TomlValue::Array{}, TomlTable()});
  EXPECT_EQ(to_toml(table), R"(name = "a \"quoted\"\n	name\u0001\u007F é"
lr = 0.001
numbers = [1e+22, -0.0, 1.5, 1e-310, 100000.0]
"not numbers" = [inf, -nan]
mixed = [1, "x", { step = 3000 }, [], { }]

[model]
layers = 3
dropout = 0.0
tied = true

[[at]]
step = 3000

[[at]]
)");
  const TomlTable again = parsed(to_toml(table));
  EXPECT_TRUE(same(again, table));
  EXPECT_EQ(to_toml(again), to_toml(parsed(to_toml(again))));
  EXPECT_THROW(table.add("lr", 1), std::invalid_argument);
  table.add("bad", "\xFF");
  EXPECT_THROW(to_toml(table), std::invalid_argument);
}

TEST(Toml, same_means_same) {
  const TomlTable one = parsed("a = 1\nb = [1, 2.0]\nc.d = nan");
  EXPECT_TRUE(same(one, parsed("c = { d = -nan }\nb = [1, 2.0]\na = 1")));
  for (const char* other :
       {"a = 1\nb = [1, 2.0]", "a = 2\nb = [1, 2.0]\nc.d = nan", "a = 1.0\nb = [1, 2.0]\nc.d = nan",
        "a = 1\nb = [1, 2.0, 3]\nc.d = nan", "a = 1\nb = [1, -2.0]\nc.d = nan",
        "a = 1\nb = [1, 2.0]\nc.d = 0.0", "a = 1\nb = [1, 2.0]\nc.e = nan", ""})
    EXPECT_FALSE(same(one, parsed(other))) << other;
  EXPECT_FALSE(same(parsed("a = 0.0"), parsed("a = -0.0")));
}

}  // namespace
}  // namespace evenkeel
