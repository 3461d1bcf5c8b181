// Plug-ins: a good one through every command that takes one, and one with each defect, which must fail with its own
// text and leave the program standing.
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fla/fla.h"
#include "fla/fla.hpp"
#include "fla/registry/dynamic.h"
#include "fla/registry/plugin.h"
#include "gtest/gtest.h"
#include "tools/common/cases.h"
#include "tools/common/compare.h"
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
  std::string all() const { return out + err; }
};

std::string read_file(const fs::path& p) {
  std::ifstream in(p, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

class PluginTool : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "fla_plugin.XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    dir_ = name;
  }
  void TearDown() override { fs::remove_all(dir_); }

  // Runs the program with FLA_CPP_TEST_PLUGIN = defect.
  Ended fla(const std::string& defect, const Words& args) const {
    const fs::path out = dir_ / "stdout", err = dir_ / "stderr";
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_addopen(&actions, 2, err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    std::vector<char*> argv{const_cast<char*>(FLA_PROGRAM)};
    for (const auto& a : args) argv.push_back(const_cast<char*>(a.c_str()));
    argv.push_back(nullptr);
    const std::string variable = "FLA_CPP_TEST_PLUGIN=" + defect;
    std::vector<char*> env;
    for (char** e = environ; *e != nullptr; ++e) env.push_back(*e);
    env.push_back(const_cast<char*>(variable.c_str()));
    env.push_back(nullptr);
    Ended r;
    pid_t pid = -1;
    const int error = posix_spawn(&pid, FLA_PROGRAM, &actions, nullptr, argv.data(), env.data());
    posix_spawn_file_actions_destroy(&actions);
    EXPECT_EQ(error, 0);
    if (error != 0) return r;
    int status = 0;
    waitpid(pid, &status, 0);
    r.code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    r.out = read_file(out);
    r.err = read_file(err);
    return r;
  }
  // One topic of the gate: a whole gate for every defect would take long, and shows no more.
  Ended gate(const std::string& defect, const Words& more = {}, const std::string& topic = "/Shapes") const {
    Words args = {"gate", "chunk_simple_gla", "--plugin", FLA_BAD_PLUGIN, "-k", topic};
    args.insert(args.end(), more.begin(), more.end());
    return fla(defect, args);
  }
  std::string input_file() const {
    const Case c = make_case("chunk_simple_gla", {.T = 20, .K = 8, .V = 12, .cu_seqlens = {}});
    std::vector<std::pair<std::string, TensorView>> tensors;
    for (const auto& n : c.input_names()) tensors.emplace_back(n, c.input(n));
    const std::string path = (dir_ / "in.safetensors").string();
    EXPECT_TRUE(write_safetensors(path, tensors).ok());
    return path;
  }

  fs::path dir_;
};

// ---- a good one

TEST_F(PluginTool, AGoodOnePassesItsGate) {
  const Ended r = gate("");
  EXPECT_EQ(r.code, 0) << r.all();
  EXPECT_HAS(r.out, "1 passed, 0 failed, 0 skipped");
  EXPECT_HAS(r.out, "calls taken");
}

TEST_F(PluginTool, TheGateCountsWhatWasTakenAndRefused) {
  const Ended r = gate("", {"--json"});
  EXPECT_EQ(r.code, 0) << r.all();
  const Json j = Json::parse(r.out, nullptr, false);
  ASSERT_TRUE(j.is_object()) << r.out;
  EXPECT_GT(j["plugin"]["accepted"].get<int>(), 10);
  EXPECT_GT(j["plugin"]["refused"].get<int>(), 10) << "its backward";
  EXPECT_EQ(j["failures"].size(), 0U);
}

TEST_F(PluginTool, OnlyTestsThatJudgeABackendAreSelected) {
  const Ended r = gate("", {}, "/Refuses");
  EXPECT_EQ(r.code, 4) << r.all();
  EXPECT_HAS(r.all(), "no test was selected");
}

TEST_F(PluginTool, RecordedCasesAreCheckedForwardOnly) {
  const Ended r = fla("", {"check", FLA_SOURCE_DIR "/tests/golden/simple_gla", "--function", "chunk_simple_gla",
                           "--plugin", FLA_BAD_PLUGIN});
  EXPECT_EQ(r.code, 0) << r.all();
  EXPECT_HAS(r.out, "bad");
  EXPECT_HAS(r.out, "forward only chunk_simple_gla");
  EXPECT_HAS(r.out, "0 failed");
}

TEST_F(PluginTool, BenchTimesItsForward) {
  const Ended r = fla("", {"bench", "chunk_simple_gla", "--plugin", FLA_BAD_PLUGIN, "--custom-shapes",
                           R"({"small": {"T": 64, "H": 2, "D": 16}})", "--json"});
  EXPECT_EQ(r.code, 0) << r.all();
  const Json j = Json::parse(r.out, nullptr, false);
  ASSERT_TRUE(j.is_object()) << r.out;
  ASSERT_EQ(j["results"].size(), 1U) << "no row for a backward it does not have";
  EXPECT_EQ(j["results"][0]["backend"], "bad");
  EXPECT_EQ(j["results"][0]["kernel"], "recurrence");
  EXPECT_EQ(j["results"][0]["checked"], true);
}

TEST_F(PluginTool, VerifyIsGateThenBench) {
  const Words args = {"verify",
                      "--op",
                      "chunk_simple_gla",
                      "--plugin",
                      FLA_BAD_PLUGIN,
                      "--gate-k",
                      "/Shapes",
                      "--custom-shapes",
                      R"({"small": {"T": 64, "H": 2, "D": 16}})",
                      "--json"};
  Ended r = fla("", args);
  EXPECT_EQ(r.code, 0) << r.all();
  Json j = Json::parse(r.out, nullptr, false);
  ASSERT_TRUE(j.is_object()) << r.out;
  EXPECT_EQ(j["gate"]["failed"], 0);
  ASSERT_EQ(j["rows"].size(), 1U);
  EXPECT_EQ(j["rows"][0]["backend"], "bad");
  r = fla("wrong", args);
  EXPECT_EQ(r.code, 1) << r.all();
  j = Json::parse(r.out, nullptr, false);
  ASSERT_TRUE(j.is_object()) << r.out;
  EXPECT_EQ(j["rows"].size(), 0U) << "nothing is timed behind a red gate";
  EXPECT_EQ(j["verdict"], "blocked");
}

TEST_F(PluginTool, ABackwardIsJudgedAndTimedLikeAForward) {
  const Words check = {
      "check", FLA_SOURCE_DIR "/tests/golden/hgrn", "--function", "fused_recurrent_hgrn", "--plugin", FLA_HGRN_PLUGIN,
      "--json"};
  Ended r = fla("", check);
  EXPECT_EQ(r.code, 0) << r.all();
  Json j = Json::parse(r.out, nullptr, false);
  ASSERT_TRUE(j.is_object()) << r.out;
  EXPECT_GE(j["passed"].get<int>(), 3);
  int gradients = 0;
  for (const auto& c : j["cases"]) {
    EXPECT_EQ(c["uncovered_tensors"].size(), 0U) << c;
    for (const auto& t : c["tensors"]) gradients += t["name"].get<std::string>().starts_with("grad.") ? 1 : 0;
  }
  EXPECT_GE(gradients, 6);
  r = fla("wrong_backward", check);
  EXPECT_EQ(r.code, 1) << r.all();
  EXPECT_HAS(r.out, "grad.g");
  r = fla("segv_backward", check);
  EXPECT_EQ(r.code, 1) << r.all();
  EXPECT_HAS(r.out, "in backward of fused_recurrent_hgrn_backward, x F32 [");

  const Words verify = {"verify",
                        "--op",
                        "fused_recurrent_hgrn",
                        "--plugin",
                        FLA_HGRN_PLUGIN,
                        "--custom-shapes",
                        R"({"small": {"T": 64, "H": 2, "D": 16}})",
                        "--json"};
  r = fla("", verify);
  EXPECT_EQ(r.code, 0) << r.all();
  j = Json::parse(r.out, nullptr, false);
  ASSERT_TRUE(j.is_object()) << r.out;
  EXPECT_TRUE(j["gate"]["subset"].is_null());
  EXPECT_GT(j["gate"]["passed"].get<int>(), 5);
  ASSERT_EQ(j["rows"].size(), 2U);
  for (const auto& row : j["rows"]) {
    EXPECT_EQ(row["backend"], "channels");
    EXPECT_TRUE(row["new_ms"].is_number()) << row;
  }
  EXPECT_EQ(j["rows"][1]["mode"], "fwdbwd");
  r = fla("wrong_backward", verify);
  EXPECT_EQ(r.code, 1) << r.all();
  EXPECT_EQ(Json::parse(r.out, nullptr, false)["rows"].size(), 0U);
}

TEST_F(PluginTool, ExplainShowsItInTheOrderOfPriority) {
  const Words args = {"explain", "chunk_simple_gla", "--shape", "T=64,H=2,D=16", "--plugin", FLA_BAD_PLUGIN, "--json"};
  const auto steps = [&](const std::string& defect, const Words& a) {
    const Ended r = fla(defect, a);
    EXPECT_EQ(r.code, 0) << r.all();
    return Json::parse(r.out, nullptr, false)["routes"];
  };
  Json routes = steps("", args);
  EXPECT_EQ(routes[0]["chosen"], "cpu");
  EXPECT_EQ(routes[0]["steps"][1]["backend"], "bad");
  EXPECT_EQ(routes[0]["steps"][1]["outcome"], "accepted");
  EXPECT_EQ(routes[1]["steps"][1]["outcome"], "not implemented");
  routes = steps("first", args);
  EXPECT_EQ(routes[0]["chosen"], "bad");
  EXPECT_EQ(routes[1]["chosen"], "cpu");
  Words narrow = args;
  narrow.insert(narrow.end(), {"--dtype", "bf16"});
  routes = steps("first", narrow);
  EXPECT_EQ(routes[0]["chosen"], "cpu");
  EXPECT_EQ(routes[0]["steps"][0]["reason"], "q: needs F32");
  routes = steps("unavailable", args);
  EXPECT_EQ(routes[0]["steps"][1]["outcome"], "unavailable");
  EXPECT_EQ(steps("reads_data", args)[0]["chosen"], "cpu");
}

TEST_F(PluginTool, RunGoesThroughDispatch) {
  const std::string in = input_file(), a = (dir_ / "a").string(), b = (dir_ / "b").string();
  const Ended plain = fla("", {"run", "chunk_simple_gla", "--in", in, "--out", a});
  EXPECT_EQ(plain.code, 0) << plain.all();
  const Ended plugin =
      fla("", {"run", "chunk_simple_gla", "--in", in, "--out", b, "--plugin", FLA_BAD_PLUGIN, "--backend", "bad"});
  EXPECT_EQ(plugin.code, 0) << plugin.all();
  EXPECT_HAS(plugin.out, "bad (recurrence)");
  const auto x = SafeTensorsFile::open(a), y = SafeTensorsFile::open(b);
  ASSERT_TRUE(x.ok() && y.ok());
  const Difference d = compare((*x)->tensors().begin()->second, (*y)->tensors().begin()->second, {.R = 1e-5});
  EXPECT_TRUE(d.ok) << d.reason;
}

TEST_F(PluginTool, TheEnvironmentDisablesIt) {
  setenv("FLA_CPP_BACKEND_BAD", "0", 1);
  const Ended r = fla("first", {"explain", "chunk_simple_gla", "--shape", "T=64,H=2,D=16", "--plugin", FLA_BAD_PLUGIN});
  unsetenv("FLA_CPP_BACKEND_BAD");
  EXPECT_HAS(r.out, "FLA_CPP_BACKEND_BAD is 0");
}

TEST_F(PluginTool, AGreenResultStaysGreenWhenItDiesAfterwards) { EXPECT_EQ(gate("dies_at_end").code, 0); }

// ---- what cannot be loaded: exit 2

struct Refusal {
  std::string defect, text;
};

TEST_F(PluginTool, WhatCannotBeLoadedIsRefusedWithItsReason) {
  const Refusal refusals[] = {
      {"get_null", "returned NULL"},
      {"get_throw", "fla_plugin_get threw"},
      {"abi", "is for plug-in ABI 2, this library has 1"},
      {"name_null", "name: expected lower-case letters"},
      {"name_upper", "got 'Mine!'"},
      {"name_cpu", "name: 'cpu' is a backend of the library's own"},
      {"name_reference", "name: 'reference' is a backend of the library's own"},
      {"device", "device: expected kDLCPU (1) or kDLCUDA (2), got 99"},
      {"functions_none", "functions: expected at least one"},
      {"function_null", "functions[0]: expected the name of a function"},
      {"function_unknown", "unknown function 'chunk_simple_glaa'; nearest: chunk_simple_gla"},
      {"function_backward", "is a backward: name chunk_simple_gla and set .backward"},
      {"function_twice", "functions[1]: 'chunk_simple_gla' is there already"},
      {"function_empty", "expected forward, backward or both, got neither"},
  };
  for (const Refusal& x : refusals) {
    SCOPED_TRACE(x.defect);
    const Ended r = gate(x.defect);
    EXPECT_EQ(r.code, 2) << r.all();
    EXPECT_HAS(r.err, x.text);
  }
  const auto with = [&](const std::string& path) { return fla("", {"gate", "chunk_simple_gla", "--plugin", path}); };
  Ended r = with("/nonexistent/mine.so");
  EXPECT_EQ(r.code, 2) << r.all();
  EXPECT_HAS(r.err, "/nonexistent/mine.so: no such file");
  r = with(FLA_NO_ENTRY);
  EXPECT_EQ(r.code, 2) << r.all();
  EXPECT_HAS(r.err, "has no entry point fla_plugin_get");
  std::ofstream(dir_ / "text.so") << "no library at all\n";
  r = with((dir_ / "text.so").string());
  EXPECT_EQ(r.code, 2) << r.all();
  EXPECT_HAS(r.err, "cannot be loaded");
}

TEST_F(PluginTool, AnOperatorThatItDoesNotServeIsRefused) {
  for (const Words& command : {Words{"gate", "chunk_gla"}, {"bench", "chunk_gla"}, {"verify", "--op", "chunk_gla"}}) {
    Words args = command;
    args.insert(args.end(), {"--plugin", FLA_BAD_PLUGIN});
    const Ended r = fla("", args);
    EXPECT_EQ(r.code, 2) << r.all();
    EXPECT_HAS(r.err, "does not serve chunk_gla; it serves chunk_simple_gla");
  }
}

TEST_F(PluginTool, OneThatRefusesEverythingHasProvenNothing) {
  const Ended r = gate("refuse_all");
  EXPECT_EQ(r.code, 4) << r.all();
  EXPECT_HAS(r.out, "not green");
  EXPECT_EQ(gate("verify_throw").code, 4);
}

// ---- what fails its gate: exit 1

TEST_F(PluginTool, EveryDefectFailsTheGateWithItsOwnText) {
  const Refusal defects[] = {
      {"segv", "died of signal 11 (SIGSEGV"},
      {"null", "died of signal 11 (SIGSEGV"},
      {"verify_segv", "in verify of chunk_simple_gla"},
      {"abort", "died of signal 6 (SIGABRT"},
      {"throw", "the plug-in threw: out of ideas"},
      {"exit0", "ended the process (exit status 0) in forward of chunk_simple_gla"},
      {"exit3", "ended the process (exit status 3) in forward of chunk_simple_gla"},
      {"code77", "returned 77, which is no fla_code"},
      {"late_refusal", "accepted the call, then refused to compute it"},
      {"fails", "DeviceError: chunk_simple_gla: bad: no device"},
      {"write_after", "past the end of out.o"},
      {"write_before", "before"},
      {"write_far", "past the end of out.o"},
      {"write_input", "wrote to q, which it may only read"},
      {"write_workspace", "past the end of the workspace"},
      {"unwritten", "elements were not written, the first at ["},
      {"workspace_huge", "workspace: asks for"},
      {"wrong", "out.o: "},
      {"zero", "out.o: "},
  };
  for (const Refusal& x : defects) {
    SCOPED_TRACE(x.defect);
    const Ended r = gate(x.defect);
    EXPECT_EQ(r.code, 1) << r.all();
    EXPECT_HAS(r.out, "FAILED");
    EXPECT_HAS(r.out, x.text);
  }
}

TEST_F(PluginTool, AHangIsEndedAndNamed) {
  const Ended r = gate("hang", {"--plugin-timeout", "1"});
  EXPECT_EQ(r.code, 1) << r.all();
  EXPECT_HAS(r.out, "did not return within 1 s in forward of chunk_simple_gla, q F32 [");
}

TEST_F(PluginTool, ResultsThatChangeBetweenRunsFail) {
  const Ended r = gate("unstable", {}, "/Reruns");
  EXPECT_EQ(r.code, 1) << r.all();
  EXPECT_HAS(r.out, "out.o differs");
}

TEST_F(PluginTool, OneThatDiesWhileItIsLoadedIsNamed) {
  Ended r = gate("get_segv");
  EXPECT_EQ(r.code, 1) << r.all();
  EXPECT_HAS(r.err, "died of signal 11 (SIGSEGV");
  EXPECT_HAS(r.err, "in loading");
  r = gate("get_exit");
  EXPECT_EQ(r.code, 1) << r.all();
  EXPECT_HAS(r.err, "ended the process (exit status 0) in loading");
  r = gate("get_hang", {"--plugin-timeout", "1"});
  EXPECT_EQ(r.code, 1) << r.all();
  EXPECT_HAS(r.err, "did not return within 1 s in loading");
}

TEST_F(PluginTool, TheOtherCommandsSurviveACrashToo) {
  const Words commands[] = {
      {"bench", "chunk_simple_gla", "--custom-shapes", R"({"small": {"T": 64, "H": 2, "D": 16}})"},
      {"run", "chunk_simple_gla", "--in", input_file(), "--out", (dir_ / "o").string(), "--backend", "bad"},
  };
  for (const Words& command : commands) {
    SCOPED_TRACE(command[0]);
    Words args = command;
    args.insert(args.end(), {"--plugin", FLA_BAD_PLUGIN, "--json"});
    const Ended r = fla("segv", args);
    EXPECT_EQ(r.code, 1) << r.all();
    EXPECT_HAS(r.err, "died of signal 11 (SIGSEGV");
    const Json j = Json::parse(r.out, nullptr, false);
    ASSERT_TRUE(j.is_object()) << r.out;
    EXPECT_HAS(j["error"].value("message", ""), "in forward of chunk_simple_gla");
    EXPECT_EQ(j["error"].value("exit", 0), 1);
    EXPECT_TRUE(command[0] != "bench" || j.contains("results")) << r.out;
  }
}

TEST_F(PluginTool, ACrashCostsARecordedCaseAndNotTheRun) {
  const Words args = {
      "check", FLA_SOURCE_DIR "/tests/golden/simple_gla", "--function", "chunk_simple_gla", "--plugin", FLA_BAD_PLUGIN,
      "--json"};
  const Json good = Json::parse(fla("", args).out, nullptr, false);
  const int cases = good.value("passed", 0);
  ASSERT_GT(cases, 3) << good;
  // Every case in a process of its own: all die, and each says where.
  Ended r = fla("segv", args);
  EXPECT_EQ(r.code, 1) << r.all();
  Json j = Json::parse(r.out, nullptr, false);
  ASSERT_TRUE(j.is_object()) << r.out;
  EXPECT_EQ(j["failed"], cases);
  ASSERT_EQ(j["cases"].size(), good["cases"].size());
  for (std::size_t i = 0; i < good["cases"].size(); ++i) {
    EXPECT_EQ(j["cases"][i]["file"], good["cases"][i]["file"]);
    if (good["cases"][i]["status"] != "ok") continue;
    const auto reason = j["cases"][i]["reason"].get<std::string>();
    EXPECT_HAS(reason, "died of signal 11 (SIGSEGV");
    EXPECT_HAS(reason, "in forward of chunk_simple_gla, q F32 [");
  }
  // A process that dies at its fourth call leaves what it had computed, and the next one goes on behind it.
  r = fla("segv_later", args);
  EXPECT_EQ(r.code, 1) << r.all();
  j = Json::parse(r.out, nullptr, false);
  EXPECT_EQ(j["passed"].get<int>() + j["failed"].get<int>(), cases) << r.all();
  EXPECT_EQ(j["failed"], cases / 4) << r.all();
  r = fla("hang", {"check", FLA_SOURCE_DIR "/tests/golden/simple_gla/decode.safetensors", "--function",
                   "chunk_simple_gla", "--plugin", FLA_BAD_PLUGIN, "--plugin-timeout", "1"});
  EXPECT_EQ(r.code, 1) << r.all();
  EXPECT_HAS(r.out, "did not return within 1 s in forward of chunk_simple_gla");
}

TEST_F(PluginTool, DefectsThatShowOnlyWhileTimingAreSeen) {
  const Words args = {"bench",        "chunk_simple_gla", "--plugin",
                      FLA_BAD_PLUGIN, "--custom-shapes",  R"({"small": {"T": 64, "H": 2, "D": 16}})"};
  Ended r = fla("segv_later", args);
  EXPECT_EQ(r.code, 1) << r.all();
  EXPECT_HAS(r.err, "in forward of chunk_simple_gla (timed)");
  r = fla("write_after_later", args);
  EXPECT_EQ(r.code, 1) << r.all();
  EXPECT_HAS(r.out, "out.o: memory beside it was written to during timing");
}

// ---- the library's own interface

TEST(PluginLibrary, ALoadedPluginIsABackendOfEveryContext) {
  unsetenv("FLA_CPP_TEST_PLUGIN");
  const char* name = nullptr;
  EXPECT_EQ(fla_load_plugin(nullptr, nullptr), FLA_INVALID_ARGUMENT);
  EXPECT_EQ(fla_load_plugin("/nonexistent.so", &name), FLA_INVALID_ARGUMENT);
  EXPECT_HAS(std::string(fla_last_error()), "/nonexistent.so: no such file");
  const Sizes small = {.B = 2, .T = 70, .K = 20, .V = 33, .cu_seqlens = {}};
  const Outcome before = make_case("chunk_simple_gla", small).run(Context({.threads = 2}));
  EXPECT_EQ(before.backend, "cpu");
  ASSERT_EQ(fla_load_plugin(FLA_BAD_PLUGIN, &name), FLA_OK) << fla_last_error();
  EXPECT_STREQ(name, "bad");
  // Once: a second load would make two backends of one name.
  const auto again = load_plugin(FLA_BAD_PLUGIN);
  EXPECT_EQ(again.status().code(), Code::InvalidArgument);
  EXPECT_HAS(again.status().message(), "operation simple_gla has a backend 'bad' already");

  const Case c = make_case("chunk_simple_gla", small).with("initial_state").flag("scale", 0.3);
  const Outcome cpu = c.run(Context({.threads = 2})), bad = c.run(Context({.threads = 2, .backend = "bad"}));
  EXPECT_EQ(cpu.backend, "cpu") << "its priority is behind";
  ASSERT_TRUE(bad.ok()) << bad.problem();
  EXPECT_EQ(bad.backend, "bad");
  EXPECT_EQ(bad.kernel, "recurrence");
  ASSERT_EQ(bad.tensors.size(), cpu.tensors.size());
  for (const auto& [tensor, b] : bad.tensors) {
    const Difference d = compare(cpu[tensor], b.view(), {.R = 1e-5});
    EXPECT_TRUE(d.ok) << tensor << ": " << d.reason;
  }
  const Outcome backward = c.run_backward(Context({.backend = "bad"}));
  EXPECT_EQ(backward.status.code(), Code::Unsupported);
  EXPECT_TRUE(Registry::global().defects().empty());
}

}  // namespace
}  // namespace fla::tools
