// The program's contract with its users: exit codes, JSON keys, error texts. Runs the program itself; the gate's part
// is played by a script, so that every way a gate can end is tried.
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fla/core/context.h"
#include "fla/core/version.h"
#include "fla/registry/registry.h"
#include "gtest/gtest.h"
#include "tools/common/cases.h"
#include "tools/common/frozen.h"
#include "tools/common/safetensors.h"

extern char** environ;

namespace fla::tools {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using Words = std::vector<std::string>;

struct Ended {
  int code = -1;  // negative: the signal that ended it
  std::string out, err;
  Json json() const { return Json::parse(out, nullptr, false); }
};

std::string read_file(const fs::path& p) {
  std::ifstream in(p, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

Case small_case() {
  Sizes s;
  s.T = 20;
  s.K = 8;
  s.V = 12;
  return make_case("chunk_gla", s);
}

class Cli : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "fla_cli.XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    dir_ = name;
  }
  void TearDown() override { fs::remove_all(dir_); }

  Ended fla(const Words& args) const { return start(FLA_PROGRAM, args); }
  Ended start(const std::string& program, const Words& args, const fs::path& to = {}) const {
    const fs::path out = to.empty() ? dir_ / "stdout" : to, err = dir_ / "stderr";
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_addopen(&actions, 2, err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    std::vector<char*> argv{const_cast<char*>(program.c_str())};
    for (const auto& a : args) argv.push_back(const_cast<char*>(a.c_str()));
    argv.push_back(nullptr);
    Ended r;
    pid_t pid = -1;
    const int error = posix_spawn(&pid, program.c_str(), &actions, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    if (error != 0) return r;
    int status = 0;
    waitpid(pid, &status, 0);
    r.code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    if (to.empty()) r.out = read_file(out);
    r.err = read_file(err);
    return r;
  }

  std::string path(const std::string& name) const { return (dir_ / name).string(); }

  // A copy of the program with a gate of its own beside it. `body` is what that gate does when told to run; $report is
  // where it writes, $filter the tests it got.
  std::string with_gate(const std::string& list, const std::string& body) const {
    const fs::path program = dir_ / "fla";
    fs::copy_file(FLA_PROGRAM, program, fs::copy_options::overwrite_existing);
    std::ofstream(dir_ / "fla_gate")
        << "#!/bin/sh\n"
        << "if [ \"$1\" = --list-exercises ]; then printf '" << list << "'; exit 0; fi\n"
        << "for a; do case $a in\n"
        << "  --gtest_output=json:*) report=${a#--gtest_output=json:} ;;\n"
        << "  --gtest_flagfile=*) filter=$(sed -n 's/^--gtest_filter=//p' \"${a#--gtest_flagfile=}\") ;;\n"
        << "esac; done\n"
        << "echo \"$filter\" >>" << (dir_ / "filters").string() << "\n"
        << body << "\n";
    fs::permissions(dir_ / "fla_gate", fs::perms::owner_all);
    return program.string();
  }

  // A file that `fla run chunk_gla` accepts.
  std::string input_file(const std::string& name, bool extra = false) const {
    const Case c = small_case();
    std::vector<std::pair<std::string, TensorView>> tensors;
    for (const auto& n : c.input_names()) tensors.emplace_back(n, c.input(n));
    const Buffer o(DType::F32, {1, 20, 2, 12}, Fill::Zero);
    tensors.emplace_back("out.o", o.view());
    tensors.emplace_back("aux.note", o.view());
    tensors.emplace_back("grad_out.o", o.view());
    if (extra) tensors.emplace_back("kk", o.view());
    EXPECT_TRUE(write_safetensors(path(name), tensors).ok());
    return path(name);
  }

  fs::path dir_;
};

void expect_keys(const Json& j, const Words& keys) {
  for (const auto& k : keys) EXPECT_TRUE(j.contains(k)) << k << " in " << j.dump().substr(0, 300);
}

// What with_gate's scripts do.
const char* const kReport = R"(printf '{"testsuites":[{"name":"All/Gate","testsuite":[%s]}]}' "$tests" >"$report")";
std::string report(const std::string& tests, int status) {
  return "tests='" + tests + "'\n" + kReport + "\nexit " + std::to_string(status);
}
const std::string kOk = R"({"name":"chunk_gla_dense","status":"RUN","result":"COMPLETED"})";
const std::string kSkip = R"({"name":"chunk_gla_dense","status":"RUN","result":"SKIPPED"})";
const std::string kBad =
    R"({"name":"chunk_gla_dense","status":"RUN","result":"COMPLETED","failures":[{"failure":"R is 3, limit 0.005"}]})";
const std::string kList = "exercises All/Gate.chunk_gla_dense: chunk_gla\\n";

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

constexpr const char* kCommands[] = {"ops", "run", "check", "gate", "bench", "verify", "explain", "doctor"};

TEST_F(Cli, EveryCommandHasHelpWithAnExampleAndJson) {
  for (const char* c : kCommands) {
    const Ended r = fla({c, "--help"});
    EXPECT_EQ(r.code, 0) << c;
    EXPECT_HAS(r.out, "Examples:");
    EXPECT_HAS(r.out, std::string("fla ") + c);
    EXPECT_HAS(r.out, "--json");
    EXPECT_EQ(r.err, "");
  }
}

TEST_F(Cli, Version) {
  const Ended r = fla({"--version"});
  EXPECT_EQ(r.code, 0);
  EXPECT_HAS(r.out, std::string("fla ") + version());
}

TEST_F(Cli, WrongUsageNamesTheArgumentAndWhatWasExpected) {
  const struct {
    Words args;
    Words texts;
  } cases[] = {
      {{}, {"expected a command", "verify"}},
      {{"opps"}, {"'opps'", "expected ops, run"}},
      {{"ops", "--fliter", "x"}, {"--fliter", "fla ops --help"}},
      {{"ops", "--signature", "chunk_gal"}, {"--signature", "'chunk_gal'", "chunk_gla"}},
      {{"explain", "chunk_gal", "--shape", "T=1,H=1,D=4"}, {"'chunk_gal'", "chunk_gla"}},
      {{"explain", "chunk_gla"}, {"--shape"}},
      {{"explain", "chunk_gla", "--shape", "T=1,H=1,Q=4"}, {"'Q'"}},
      {{"explain", "chunk_gla", "--shape", "T=1,H=1"}, {"K", "needed"}},
      {{"explain", "chunk_gla", "--shape", "T=1,H=1,D=4", "--backend", "gpu"},
       {"--backend", "cpu", "reference", "'gpu'"}},
      {{"explain", "chunk_gla", "--shape", "T=1,H=1,D=4", "--set", "scal=1"}, {"scal", "scale"}},
      {{"explain", "chunk_gla", "--shape", "T=1,H=1,D=4", "--set", "scale"}, {"--set", "name=value"}},
      {{"explain", "chunk_gdn2", "--shape", "T=1,H=1,D=4", "--set", "chunk_size=32"},
       {"chunk_size: expected 64, got 32"}},
      {{"explain", "chunk_kda", "--shape", "T=1,H=1,D=4", "--set", "chunk_size=16"}, {"chunk_size: expected 32 to 64"}},
      {{"explain", "chunk_lightning_attn", "--shape", "T=1,H=1,D=4", "--set", "chunk_size=0"},
       {"chunk_size: expected at least 1, got 0"}},
      {{"explain", "chunk_gla", "--shape", "T=1,H=1,D=4", "--with", "h0"}, {"--with", "'h0'", "initial_state"}},
      {{"explain", "chunk_gla", "--shape", "T=9,H=1,D=4", "--with", "cu_seqlens=0,5"}, {"cu_seqlens", "end at T = 9"}},
      {{"bench", "chunk_gla", "--threads", "two"}, {"--threads", "integer", "'two'"}},
      {{"bench", "chunk_gla", "--dtype", "f64"}, {"--dtype", "bf16", "'f64'"}},
      {{"explain", "chunk_gla", "--shape", "T=1,H=1,D=4", "--with", "q"}, {"--with", "optional", "'q'"}},
      {{"bench", "chunk_gla", "--modes", ""}, {"--modes", "fwdbwd", "''"}},
      {{"bench", "chunk_gla", "--shapes", ""}, {"--shapes", "''"}},
      {{"bench", "chunk_gla", "--custom-shapes", ""}, {"--custom-shapes", "''"}},
      {{"bench", "chunk_gla", "--varlen", ""}, {"--varlen", "''"}},
      {{"bench", "chunk_gla", "--backend", ""}, {"--backend", "''"}},
      {{"gate", "chunk_gla", "-k", ""}, {"-k", "''"}},
      {{"bench", "chunk_gla", "--modes", "bwd"}, {"--modes", "fwdbwd", "'bwd'"}},
      {{"bench", "chunk_gla", "--shapes", "huge"}, {"--shapes", "B1_T512_H16_D64", "'huge'"}},
      {{"bench", "chunk_gla", "--device", "cuda"}, {"--device", "no CUDA", "'cuda'"}},
      {{"bench", "chunk_gla", "--custom-shapes", "{\"a\": {\"T\": 4, \"Q\": 1}}"}, {"custom", "'Q'"}},
      {{"bench", "chunk_gla", "--custom-shapes", "@/nonexistent"}, {"--custom-shapes", "/nonexistent"}},
      {{"bench", "chunk_hgrn", "--varlen", "even"}, {"cu_seqlens", "no packed sequences"}},
      {{"gate", "glaa"}, {"'glaa'", "nearest"}},
      {{"gate"}, {"operators or --changed"}},
      {{"verify", "--op", "chunk_glaa", "--no-gate"}, {"'chunk_glaa'", "chunk_gla"}},
      {{"run", "chunk_gla", "--in", "/nonexistent.safetensors", "--out", "/tmp/o"}, {"/nonexistent.safetensors"}},
      {{"check", "/nonexistent"}, {"/nonexistent"}},
  };
  for (const auto& c : cases) {
    const Ended r = fla(c.args);
    EXPECT_EQ(r.code, 2) << r.err;
    for (const auto& t : c.texts) EXPECT_HAS(r.err, t);
    if (c.args.empty()) continue;
    Words with_json = c.args;
    with_json.emplace_back("--json");
    const Ended j = fla(with_json);
    EXPECT_EQ(j.code, 2) << j.err;
    const Json error = j.json().value("error", Json::object());
    EXPECT_EQ(error.value("exit", 0), 2) << j.out;
    EXPECT_EQ(j.err, "fla: " + error.value("message", "") + "\n");
  }
}

TEST_F(Cli, AFullStdoutIsAnErrorOfEveryCommand) {
  ASSERT_TRUE(fs::exists("/dev/full"));
  const std::string program = with_gate(kList, report(kOk, 0));
  const std::string small = R"({"s": {"T": 4, "H": 1, "D": 4}})";
  const Words commands[] = {
      {"--help"},
      {"--version"},
      {"ops"},
      {"ops", "--help"},
      {"ops", "--check"},
      {"ops", "--env"},
      {"ops", "--markdown"},
      {"ops", "--signature", "chunk_gla"},
      {"run", "chunk_gla", "--in", input_file("in.safetensors"), "--out", path("o")},
      {"check", (fs::path(FLA_SOURCE_DIR) / "tests" / "golden" / "hgrn").string()},
      {"gate", "chunk_gla"},
      {"bench", "chunk_gla", "--custom-shapes", small, "--modes", "fwd"},
      {"verify", "--op", "chunk_gla", "--custom-shapes", small, "--modes", "fwd"},
      {"explain", "chunk_gla", "--shape", "T=1,H=1,D=4"},
      {"doctor"},
  };
  for (Words args : commands)
    for (const bool json : {false, true}) {
      if (json) args.emplace_back("--json");
      if (json && (args[0] == "--version" || args.size() == 2 || args[1] == "--markdown")) continue;
      const Ended r = start(program, args, "/dev/full");
      EXPECT_EQ(r.code, 2) << args[0] << " " << r.err;
      EXPECT_HAS(r.err, "fla: stdout: cannot write the result: No space left on device");
    }
}

// Names that would move a terminal's cursor, colour it or retitle it.
TEST_F(Cli, ControlCharactersNeverReachATerminal) {
  const std::string evil =
      "\x1b]0;x\x07\x1b[31m\x7f\xc2\x9b"
      "1m\nfla: 9 passed";
  const std::string good = input_file("in.safetensors");
  const Buffer o(DType::F32, {1, 20, 2, 12}, Fill::Zero);
  ASSERT_TRUE(write_safetensors(path("names"), {{evil, o.view()}}).ok());
  const std::string odd = path("a\x1b[2J\n.safetensors");
  fs::copy_file(good, odd);
  fs::create_directory(path("cases"));
  ASSERT_TRUE(write_safetensors(path("cases") + "/b\x1b[2J\n.safetensors", {{"q", o.view()}}, {{"op", evil}}).ok());
  const Words commands[] = {
      {evil},
      {"ops", evil},
      {"ops", "--filter", evil},
      {"ops", "--signature", evil},
      {"run", "chunk_gla", "--in", path("names"), "--out", path("o")},
      {"run", "chunk_gla", "--in", odd, "--out", path("o\x1b[2J")},
      {"run", "chunk_gla", "--in", good, "--out", path("o"), "--set", evil + "=1"},
      {"run", "chunk_gla", "--in", good, "--out", path("o"), "--set", "scale=" + evil},
      {"check", path("cases")},
      {"check", path(evil)},
      {"explain", "chunk_gla", "--shape", evil},
      {"bench", "chunk_gla", "--custom-shapes", evil},
  };
  for (const Words& args : commands) {
    const Ended r = fla(args);
    const std::string all = r.out + r.err;
    EXPECT_NE(all, "");
    for (const char* bad : {"\x1b", "\x07", "\x7f", "\xc2\x9b"}) EXPECT_EQ(all.find(bad), std::string::npos) << all;
  }
  // Not a line of its own either.
  EXPECT_EQ(fla(commands[4]).err.find("\nfla: 9 passed"), std::string::npos);
}

TEST_F(Cli, OpsListsEveryForwardFunction) {
  const Ended r = fla({"ops", "--json"});
  ASSERT_EQ(r.code, 0) << r.err;
  const Json j = r.json();
  ASSERT_TRUE(j.is_object());
  std::set<std::string> names;
  for (const auto& op : j["ops"]) {
    names.insert(op["name"].get<std::string>());
    expect_keys(op, {"name", "family", "exported", "deprecated", "alias_of", "args", "flags", "outputs", "backends"});
    for (const auto& a : op["args"]) expect_keys(a, {"name", "dims", "dtypes", "required", "grad"});
    for (const auto& f : op["flags"]) {
      expect_keys(f, {"name", "type", "default", "limits"});
      const bool chunks_of_kda = op["name"] == "chunk_kda" && f["name"] == "chunk_size";
      EXPECT_TRUE(!chunks_of_kda || f["limits"] == "32 to 64, a power of two") << f.dump();
      EXPECT_TRUE(f["type"] != "bool" || f["limits"].is_null()) << f.dump();
    }
    expect_keys(op["backends"]["cpu"], {"forward", "backward"});
    EXPECT_TRUE(op["exported"] == "root" || op["exported"] == "family");
  }
  std::set<std::string> expected;
  for (const auto* e : Registry::global().entries())
    if (!e->spec.is_backward()) expected.insert(e->spec.name);
  EXPECT_EQ(names, expected);
  EXPECT_EQ(fla({"ops", "--filter", "no such thing"}).code, 4);
}

TEST_F(Cli, OpsCheckFailsExactlyWhenSomethingIsMissing) {
  const Ended r = fla({"ops", "--check", "--json"});
  const Json c = r.json()["check"];
  EXPECT_EQ(c["expected"], 55);
  EXPECT_TRUE(c["extra"].empty());
  EXPECT_TRUE(c["defects"].empty());
  const bool missing = !c["absent"].empty() || !c["uncovered"].empty();
  EXPECT_EQ(r.code, missing ? 1 : 0);
}

TEST_F(Cli, ReadmeHasTheOperatorTable) {
  const std::string readme = read_file(fs::path(FLA_SOURCE_DIR) / "README.md");
  const std::string begin = "<!-- fla ops --markdown -->\n", end = "<!-- end -->";
  const std::size_t at = readme.find(begin);
  ASSERT_NE(at, std::string::npos) << "README.md has no line " << begin;
  const std::size_t from = at + begin.size();
  EXPECT_EQ(readme.substr(from, readme.find(end, from) - from), fla({"ops", "--markdown"}).out);
}

TEST_F(Cli, RunGivesWhatTheLibraryGives) {
  const std::string in = input_file("in.safetensors"), out = path("out.safetensors");
  const Ended r = fla({"run", "chunk_gla", "--in", in, "--out", out, "--set", "output_final_state=true", "--backend",
                       "reference", "--json"});
  ASSERT_EQ(r.code, 0) << r.err;
  expect_keys(r.json(), {"op", "backend", "outputs"});
  const auto file = SafeTensorsFile::open(out);
  ASSERT_TRUE(file.ok()) << file.status().message();
  ASSERT_EQ((*file)->tensors().size(), 2U);
  ContextOptions by_reference;
  by_reference.backend = kReference;
  const Context ctx(by_reference);
  const Outcome expected = small_case().run(ctx);
  for (const char* name : {"out.o", "out.final_state"})
    EXPECT_TRUE(same_bits(expected[name], (*file)->tensor(name).value())) << name;
}

TEST_F(Cli, RunBackwardWritesOutputsAndGradients) {
  const std::string out = path("out.safetensors");
  const Ended r = fla(
      {"run", "chunk_gla", "--in", input_file("in.safetensors"), "--out", out, "--backward", "--backend", "reference"});
  ASSERT_EQ(r.code, 0) << r.err;
  const auto file = SafeTensorsFile::open(out);
  ASSERT_TRUE(file.ok());
  for (const char* name : {"out.o", "grad.q", "grad.k", "grad.v", "grad.g"})
    EXPECT_TRUE((*file)->tensor(name).ok()) << name;
}

TEST_F(Cli, RunRefusesAndWritesNothing) {
  const std::string good = input_file("in.safetensors"), extra = input_file("extra.safetensors", true);
  std::ofstream(path("broken.safetensors")) << "not a file of tensors";
  const struct {
    Words args;
    std::string text;
  } cases[] = {
      {{"run", "chunk_gla", "--in", extra, "--out", path("o")}, "kk: unknown argument"},
      {{"run", "chunk_gla", "--in", path("broken.safetensors"), "--out", path("o")}, "broken.safetensors"},
      {{"run", "chunk_gla", "--in", good, "--out", path("no/such/folder/o")}, "--out"},
      {{"run", "chunk_gla", "--in", good, "--out", "/dev/null"}, "--out"},
      {{"run", "chunk_gla", "--in", good, "--out", path("o"), "--device", "cuda"},
       "--device: expected cpu, got 'cuda': "},
      {{"run", "chunk_gla", "--in", good, "--out", path("o"), "--backend", "fast"}, "'fast'"},
      {{"run", "chunk_gla", "--in", good, "--out", path("o"), "--set", "scale=wide"}, "scale: expected a number"},
      {{"run", "chunk_linear_attn", "--in", good, "--out", path("o")}, "g: unknown argument"},
      {{"run", "fused_recurrent_hgrn", "--in", good, "--out", path("o")}, "unknown argument"},
  };
  for (const auto& c : cases) {
    const Ended r = fla(c.args);
    EXPECT_EQ(r.code, 2) << r.err;
    EXPECT_HAS(r.err, c.text);
    EXPECT_FALSE(fs::exists(path("o")));
  }
}

TEST_F(Cli, MoreThanThereIsMemoryForIsUsageWithTheSize) {
  // Few tokens' worth of inputs, and scores beyond any address space: 4 T^2 bytes.
  Sizes s;
  s.T = 6'000'000;
  s.H = s.K = s.V = 1;
  const Case c = make_case("parallel_retention", s);
  std::vector<std::pair<std::string, TensorView>> tensors;
  for (const auto& name : c.input_names()) tensors.emplace_back(name, c.input(name));
  ASSERT_TRUE(write_safetensors(path("long.safetensors"), tensors, {}).ok());
  const Ended r = fla({"run", "parallel_retention", "--in", path("long.safetensors"), "--out", path("o"), "--set",
                       "output_attentions=true", "--json"});
  EXPECT_EQ(r.code, 2) << r.err;
  EXPECT_HAS(r.err, "out of memory: 144000000");
  EXPECT_EQ(r.json()["error"]["exit"], 2) << r.out;
  EXPECT_FALSE(fs::exists(path("o")));
}

TEST_F(Cli, WhatThisMachineCannotServeIsUsageWithTheReason) {
  const std::string in = input_file("in.safetensors");
  ASSERT_EQ(setenv("FLA_CPP_BACKEND_CPU", "0", 1), 0);
  const Ended r = fla({"run", "chunk_gla", "--in", in, "--out", path("o"), "--backend", "cpu", "--json"});
  const Ended explained = fla({"explain", "chunk_gla", "--shape", "T=9,H=1,D=4", "--backend", "cpu", "--json"});
  unsetenv("FLA_CPP_BACKEND_CPU");
  EXPECT_EQ(r.code, 2);
  EXPECT_HAS(r.err, "cpu: disabled: FLA_CPP_BACKEND_CPU is 0");
  EXPECT_EQ(r.json()["error"]["exit"], 2) << r.out;
  EXPECT_FALSE(fs::exists(path("o")));
  EXPECT_EQ(explained.code, 2);
  EXPECT_EQ(explained.json()["error"]["exit"], 2) << explained.out;
  EXPECT_EQ(explained.json()["routes"][0]["steps"][0]["outcome"], "disabled");
}

TEST_F(Cli, RunWritesWhereALinkLeads) {
  fs::create_directory(path("elsewhere"));
  fs::create_symlink("elsewhere/target", path("link"));
  const std::string in = input_file("in.safetensors");
  for (int i = 0; i < 2; ++i) {  // there is no target, then there is one
    const Ended r = fla({"run", "chunk_gla", "--in", in, "--out", path("link")});
    ASSERT_EQ(r.code, 0) << r.err;
    EXPECT_TRUE(fs::is_symlink(path("link")));
    EXPECT_TRUE(SafeTensorsFile::open(path("elsewhere/target")).ok());
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(path("elsewhere")), fs::directory_iterator()), 1);
  fs::create_symlink("no/such/folder/f", path("lost"));
  EXPECT_EQ(fla({"run", "chunk_gla", "--in", in, "--out", path("lost")}).code, 2);
  EXPECT_TRUE(fs::is_symlink(path("lost")));
}

TEST_F(Cli, ADeprecatedNameWarnsOnce) {
  const auto warnings = [](const std::string& err) {
    std::size_t n = 0;
    for (std::size_t at = 0; (at = err.find("warning: ", at)) != std::string::npos; ++at) ++n;
    return n;
  };
  const std::string in = input_file("in.safetensors"), text = "warning: fused_chunk_gla: deprecated; use chunk_gla\n";
  Ended r = fla({"run", "fused_chunk_gla", "--in", in, "--out", path("o"), "--backward", "--json"});
  EXPECT_EQ(r.code, 0);
  EXPECT_EQ(warnings(r.err), 1U) << r.err;
  EXPECT_HAS(r.err, text);
  EXPECT_EQ(r.json()["warnings"].size(), 1U);
  r = fla({"bench", "fused_chunk_gla", "--custom-shapes", R"({"s": {"T": 4, "H": 1, "D": 4}})"});
  EXPECT_EQ(warnings(r.err), 1U) << r.err;
  EXPECT_HAS(r.err, text);
  r = fla({"explain", "fused_chunk_gla", "--shape", "T=1,H=1,D=4"});
  EXPECT_EQ(warnings(r.err), 1U) << r.err;
  r = fla({"run", "chunk_gla", "--in", in, "--out", path("o")});
  EXPECT_EQ(warnings(r.err), 0U) << r.err;
}

TEST_F(Cli, SignaturesTellTypesOfStates) {
  const auto line_of = [](const std::string& text, const std::string& name) {
    const std::size_t begin = text.find("\n    " + name + " ");
    return begin == std::string::npos ? "" : text.substr(begin + 1, text.find('\n', begin + 1) - begin - 1);
  };
  const std::string chunk = fla({"ops", "--signature", "chunk_precond_kda"}).out;
  for (const char* name : {"initial_state", "log_atk_scale", "final_state", "final_A_state"})
    EXPECT_HAS(line_of(chunk, name), "  F32, or F64 as q  ");
  EXPECT_HAS(line_of(fla({"ops", "--signature", "fused_recurrent_precond_kda"}).out, "initial_state"),
             "  F32 F16 BF16 F64  ");
}

TEST_F(Cli, SignaturesOfBackwardsTellTheNamesInFiles) {
  const Ended r = fla({"ops", "--signature", "chunk_gla_backward"});
  EXPECT_EQ(r.code, 0);
  for (const char* name : {"grad_out.o", "grad_out.final_state", "grad.q", "grad.initial_state"})
    EXPECT_HAS(r.out, std::string("in files ") + name);
  const Json j = fla({"ops", "--signature", "chunk_gla_backward", "--json"}).json()["ops"][0];
  std::set<std::string> given, made;
  for (const auto& a : j["args"]) given.insert(a["in_files"].get<std::string>());
  for (const auto& a : j["output_args"]) made.insert(a["in_files"].get<std::string>());
  EXPECT_TRUE(given.contains("q") && given.contains("grad_out.o")) << j["args"];
  EXPECT_EQ(made, (std::set<std::string>{"grad.q", "grad.k", "grad.v", "grad.g", "grad.initial_state"}));
  EXPECT_HAS(fla({"ops", "--signature", "chunk_gla"}).out, "in files out.final_state");
}

TEST_F(Cli, CheckCountsAndKeepsGoingAfterABadFile) {
  const fs::path golden = fs::path(FLA_SOURCE_DIR) / "tests" / "golden" / "gla";
  ASSERT_TRUE(fs::exists(golden));
  fs::path first;
  for (const auto& e : fs::directory_iterator(golden))
    if (first.empty() || e.path() < first) first = e.path();
  const Ended r = fla({"check", first.string(), "--backend", "reference", "--json"});
  EXPECT_EQ(r.code, 0) << r.out << r.err;
  const Json j = r.json();
  expect_keys(j, {"cases", "passed", "failed", "not_covered"});
  ASSERT_FALSE(j["cases"].empty());
  EXPECT_EQ(j["cases"].size(), j["passed"].get<std::size_t>());
  for (const auto& c : j["cases"]) {
    expect_keys(c, {"file", "function", "backend", "dtype", "status", "ok", "reason", "dropped_flags", "tensors"});
    EXPECT_EQ(c["backend"], "reference");
    for (const auto& t : c["tensors"]) expect_keys(t, {"name", "R", "max_abs", "index", "limit", "ok"});
  }

  std::ofstream(path("broken.safetensors")) << "x";
  const Ended both = fla({"check", path("broken.safetensors"), first.string(), "--backend", "reference", "--json"});
  EXPECT_EQ(both.code, 2);
  EXPECT_EQ(both.json()["passed"], j["passed"]);
  EXPECT_EQ(both.json()["errors"].size(), 1U);

  fs::create_directory(path("empty"));
  EXPECT_EQ(fla({"check", path("empty")}).code, 4);
  EXPECT_EQ(fla({"check", first.string(), "--function", "chunk_glaaa"}).code, 2);
  EXPECT_EQ(fla({"check", first.string(), "--function", "chunk_hgrn"}).code, 4);
}

TEST_F(Cli, ExplainSaysWhoServesAndWhyNot) {
  const Ended r = fla({"explain", "chunk_gla", "--shape", "B=1,T=64,H=2,D=32", "--with", "initial_state", "--json"});
  ASSERT_EQ(r.code, 0) << r.err;
  const Json j = r.json();
  expect_keys(j, {"op", "shape", "dtype", "device", "isa", "threads", "routes"});
  ASSERT_EQ(j["routes"].size(), 2U);
  for (const auto& route : j["routes"]) {
    expect_keys(route, {"function", "chosen", "kernel", "workspace_bytes", "steps"});
    for (const auto& s : route["steps"]) expect_keys(s, {"backend", "kernel", "outcome", "reason"});
  }
  // A shape that nobody could allocate.
  EXPECT_EQ(fla({"explain", "chunk_gla", "--shape", "B=1,T=4194304,H=4096,D=128", "--dtype", "bf16"}).code, 0);
  const Ended none = fla({"explain", "chunk_gla", "--shape", "B=1,T=64,H=2,D=32", "--device", "cuda"});
  EXPECT_EQ(none.code, 2);
  EXPECT_HAS(none.out, "no backend takes this call");
  EXPECT_HAS(none.out, "this build has no CUDA code");
}

TEST_F(Cli, BenchGivesARowPerShapeAndMode) {
  const Ended r = fla(
      {"bench", "chunk_gla", "--custom-shapes",
       R"({"small": {"T": 40, "H": 2, "K": 8, "V": 12}, "packed": {"T": 40, "H": 2, "D": 8, "cu_seqlens": [0, 9, 40]}})",
       "--threads", "1", "--json"});
  ASSERT_EQ(r.code, 0) << r.out << r.err;
  const Json j = r.json();
  expect_keys(j["machine"], {"cpu", "isa", "threads", "peak_gflops", "bandwidth_gbs", "commit"});
  ASSERT_EQ(j["results"].size(), 4U);
  for (const auto& row : j["results"]) {
    expect_keys(row, {"op",       "mode",
                      "shape",    "B",
                      "T",        "H",
                      "D",        "K",
                      "V",        "HV",
                      "dtype",    "device",
                      "backend",  "threads",
                      "seed",     "commit",
                      "checked",  "median_ms",
                      "p10_ms",   "p20_ms",
                      "p80_ms",   "p90_ms",
                      "n",        "peak_bytes",
                      "floor_ms", "workspace_bytes",
                      "share"});
    EXPECT_EQ(row["checked"], true);
    EXPECT_GE(row["n"].get<int>(), 5);
    EXPECT_LE(row["p10_ms"].get<double>(), row["p90_ms"].get<double>());
  }
}

TEST_F(Cli, BenchFailsWithARowAndAReason) {
  const Ended r = fla({"bench", "chunk_gla", "--custom-shapes", R"({"huge": {"T": 1073741824, "H": 64, "D": 128}})",
                       "--modes", "fwd", "--json"});
  EXPECT_EQ(r.code, 1);
  const Json row = r.json()["results"][0];
  EXPECT_TRUE(row["median_ms"].is_null());
  EXPECT_EQ(row["checked"], false);
  EXPECT_HAS(row["error"].get<std::string>(), "available");
}

TEST_F(Cli, DoctorKnowsItsBuild) {
  const Ended r = fla({"doctor", "--json"});
  EXPECT_EQ(r.code, 0) << r.err;
  expect_keys(r.json(), {"version", "commit", "build_type", "compiler", "flags", "cpu", "isa", "processors", "threads",
                         "memory_bytes", "gpu", "environment"});
  EXPECT_EQ(r.json()["frozen_hash"], frozen_hash());
}

// ---- the gate

TEST_F(Cli, GateGreenRedSkippedAndEmpty) {
  const std::string program = with_gate(kList, report(kOk, 0));
  Ended r = start(program, {"gate", "chunk_gla", "--json"});
  EXPECT_EQ(r.code, 0) << r.err;
  Json j = r.json();
  EXPECT_EQ(j["ops"], Json({"chunk_gla"}));
  EXPECT_EQ(j["passed"], 1);
  EXPECT_EQ(j["failed"], 0);
  EXPECT_EQ(j["skipped"], 0);
  EXPECT_EQ(j["hash"], frozen_hash());
  EXPECT_EQ(start(program, {"gate", "chunk_gla", "-k", "packed"}).code, 4);
  EXPECT_EQ(start(program, {"gate", "chunk_hgrn"}).code, 4);
  EXPECT_EQ(start(program, {"gate", "chunk_gla", "-k", "*dense"}).code, 0);

  with_gate(kList, report(kBad, 1));
  r = start(program, {"gate", "gla"});
  EXPECT_EQ(r.code, 1);
  EXPECT_HAS(r.out, "R is 3, limit 0.005");
  EXPECT_HAS(r.out, "0 passed, 1 failed, 0 skipped");

  with_gate(kList, report(kSkip, 0));
  EXPECT_EQ(start(program, {"gate", "all"}).code, 4);

  fs::remove(dir_ / "fla_gate");
  r = start(program, {"gate", "all"});
  EXPECT_EQ(r.code, 2);
  EXPECT_HAS(r.err, "fla_gate");
}

TEST_F(Cli, GateThatCrashesIsRedAndNamesTheTestAndTheSignal) {
  const std::string program = with_gate(kList, "echo '[ RUN      ] All/Gate.chunk_gla_dense'; kill -SEGV $$");
  const Ended r = start(program, {"gate", "chunk_gla"});
  EXPECT_EQ(r.code, 1);
  EXPECT_HAS(r.out, "All/Gate.chunk_gla_dense");
  EXPECT_HAS(r.out, "SIGSEGV");
  with_gate(kList, "exit 7");
  EXPECT_EQ(start(program, {"gate", "chunk_gla"}).code, 1);
}

TEST_F(Cli, GateSelectsEveryTestThatExercisesTheOperator) {
  const std::string program = with_gate(
      "exercises Gla.chunk_gla/Dense: chunk_gla\\nexercises Gla.fused_chunk_gla/Dense: fused_chunk_gla\\n"
      "exercises Gla.EqualChannels: chunk_gla chunk_simple_gla\\nexercises Overlap.Outputs: chunk_gla\\n"
      "exercises SimpleGla.chunk_simple_gla/Dense: chunk_simple_gla\\nexercises Compare.FollowsTheContract: \\n"
      "a line that says nothing: chunk_gla\\n",
      report(kOk, 0));
  const auto selected = [&](const Words& ops) {
    fs::remove(dir_ / "filters");
    Words args = ops;
    args.insert(args.begin(), "gate");
    start(program, args);
    std::set<std::string> tests;
    std::string text = read_file(dir_ / "filters"), word;
    for (const char c : text) {
      if (c != ':' && c != '\n')
        word += c;
      else if (!word.empty())
        tests.insert(std::exchange(word, {}));
    }
    return tests;
  };
  EXPECT_EQ(selected({"chunk_gla"}),
            (std::set<std::string>{"Gla.chunk_gla/Dense", "Gla.EqualChannels", "Overlap.Outputs"}));
  EXPECT_EQ(selected({"simple_gla"}), (std::set<std::string>{"Gla.EqualChannels", "SimpleGla.chunk_simple_gla/Dense"}));
  EXPECT_EQ(selected({"all"}).size(), 6U);
}

TEST_F(Cli, VerifyTimesNothingBehindARedGate) {
  const Words args = {"verify",  "--op", "chunk_gla", "--custom-shapes", R"({"s": {"T": 40, "H": 2, "D": 8}})",
                      "--modes", "fwd",  "--json"};
  const std::string program = with_gate(kList, report(kBad, 1));
  Ended r = start(program, args);
  EXPECT_EQ(r.code, 1);
  EXPECT_TRUE(r.json()["rows"].empty());

  with_gate(kList, report(kSkip, 0));
  EXPECT_EQ(start(program, args).code, 4);

  with_gate(kList, report(kOk, 0));
  r = start(program, args);
  ASSERT_EQ(r.code, 0) << r.err;
  const Json j = r.json();
  expect_keys(j, {"machine", "op", "gate", "base", "candidate", "rows", "geomean", "verdict"});
  expect_keys(j["gate"], {"passed", "failed", "skipped", "hash"});
  expect_keys(j["candidate"], {"commit", "dirty"});
  ASSERT_EQ(j["rows"].size(), 1U);
  expect_keys(j["rows"][0], {"mode", "shape", "dtype", "base_ms", "new_ms", "speedup", "p10", "p90", "n", "peak_base",
                             "peak_new", "err_base", "err_new", "flags"});
  EXPECT_TRUE(j["verdict"].is_null());

  Words without = args;
  without.emplace_back("--no-gate");
  r = start(program, without);
  EXPECT_EQ(r.code, 0);
  EXPECT_HAS(r.err, "WARNING");
  EXPECT_TRUE(r.json()["gate"].is_null());
}

}  // namespace
}  // namespace fla::tools
