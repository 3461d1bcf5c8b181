// fla verify --base and fla loop as programs, on a repository of their own whose library does what a test plants in it.
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

extern char** environ;

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
void write_file(const fs::path& p, const std::string& text) {
  fs::create_directories(p.parent_path());
  std::ofstream(p, std::ios::binary) << text;
}

class LoopProgram : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "fla_loop.XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    dir_ = fs::canonical(name);
    repo_ = dir_ / "repo";
    const fs::path fake = fs::path(FLA_SOURCE_DIR) / "tests" / "loop" / "fake";
    for (const char* f : {"CMakeLists.txt", "commit.h.in"}) copy(fake / f, repo_ / f);
    for (const char* f : {"gla_cpu.cc", "plant.h"}) copy(fake / f, repo_ / "fla" / "ops" / "gla" / f);
    copy(fs::path(FLA_SOURCE_DIR) / "cmake" / "build_info.cmake", repo_ / "cmake" / "build_info.cmake");
    copy(fs::path(FLA_SOURCE_DIR) / "tools" / "frozen_scope.txt", repo_ / "tools" / "frozen_scope.txt");
    write_file(repo_ / "fla/ops/gla/gla_spec.cc", "// tolerance 0.005\n");
    write_file(repo_ / "tests/gate/some_test.cc", "// a test\n");
    write_file(repo_ / ".gitignore", "/build/\n");
    write_file(repo_ / "real.cmake", std::string("set(FAKE_INCLUDES \"") + FLA_SOURCE_DIR + "\")\n");
    setenv("FAKE_REAL_LIBRARY", FLA_LIBRARY, 1);
    setenv("FLA_CACHE_DIR", (dir_ / "cache").c_str(), 1);
    for (const char* who : {"AUTHOR", "COMMITTER"}) {
      setenv((std::string("GIT_") + who + "_NAME").c_str(), "Test", 1);
      setenv((std::string("GIT_") + who + "_EMAIL").c_str(), "test@example.org", 1);
    }
    git({"init", "--quiet", "--initial-branch=main"});
    commit("first");
    const Ended configured =
        run({"cmake", "-S", repo_.string(), "-B", build().string(), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"});
    ASSERT_EQ(configured.code, 0) << configured.out << configured.err;
    fs::create_directories(build() / "bin");
    copy(FLA_PROGRAM, build() / "bin" / "fla");
    copy(fake / "fla_gate", build() / "bin" / "fla_gate");
    make();
  }
  void TearDown() override {
    if (HasFailure()) return;
    fs::permissions(dir_, fs::perms::owner_all);
    fs::remove_all(dir_);
  }

  fs::path build() const { return repo_ / "build" / "release"; }
  static void copy(const fs::path& from, const fs::path& to) {
    fs::create_directories(to.parent_path());
    fs::copy_file(from, to, fs::copy_options::overwrite_existing);
  }

  pid_t spawn(const Words& argv) const {
    const fs::path out = dir_ / "stdout", err = dir_ / "stderr";
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_addopen(&actions, 2, err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_addchdir_np(&actions, repo_.c_str());
    std::vector<char*> words;
    for (const auto& a : argv) words.push_back(const_cast<char*>(a.c_str()));
    words.push_back(nullptr);
    pid_t pid = -1;
    const int error = posix_spawnp(&pid, argv[0].c_str(), &actions, nullptr, words.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    return error == 0 ? pid : -1;
  }
  Ended wait(pid_t pid) const {
    Ended r;
    int status = 0;
    if (pid < 0 || waitpid(pid, &status, 0) < 0) return r;
    r.code = WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
    r.out = read_file(dir_ / "stdout");
    r.err = read_file(dir_ / "stderr");
    return r;
  }
  Ended run(const Words& argv) const { return wait(spawn(argv)); }
  Ended fla(Words args) const {
    args.insert(args.begin(), (build() / "bin" / "fla").string());
    return run(args);
  }
  std::string git(Words args) const {
    args.insert(args.begin(), "git");
    const Ended r = run(args);
    EXPECT_EQ(r.code, 0) << r.err;
    return r.out.substr(0, r.out.find_last_not_of('\n') + 1);
  }
  void commit(const std::string& message) const {
    git({"add", "--all"});
    git({"commit", "--quiet", "-m", message});
  }
  void make() const {
    const Ended r = run({"cmake", "--build", build().string()});
    ASSERT_EQ(r.code, 0) << r.out << r.err;
  }
  void plant(const std::string& what) const {
    write_file(repo_ / "fla/ops/gla/plant.h",
               "#pragma once\nenum class Plant { None, Slow, SlowSmall, SlowLarge, Tenth, Cached, SkippedShape, "
               "PartialWrite, Relaxed };\nconstexpr Plant kPlant = Plant::" +
                   what + ";\n");
  }
  // One token and one mode: what is asked here is never how fast.
  Words small(const std::string& base, const std::string& T = "1") const {
    return {"verify",
            "--op",
            "chunk_gla",
            "--base",
            base,
            "--modes",
            "fwd",
            "--custom-shapes",
            R"({"small": {"B": 1, "T": )" + T + R"(, "H": 16, "D": 64}})",
            "--json"};
  }
  Ended planted(const std::string& what, const std::string& T = "1") const {
    plant(what);
    make();
    return fla(small("HEAD", T));
  }
  static std::string first_error(const Ended& r) {
    const Json j = r.json();
    if (!j.is_object() || j["rows"].empty()) return "no rows: " + r.err;
    const Json& row = j["rows"][0];
    return row["error"].is_string() ? row["error"].get<std::string>() : row["flags"].dump();
  }
  Words init(const std::string& coverage = "B1_T1_H16_D64") const {
    return {"loop",     "init",       "chunk_gla",    "--shapes",   "B1_T1_H16_D64",   "--modes",
            "fwd",      "--speedup",  "1.5",          "--scope",    "fla/ops/gla/**",  "--languages",
            "C++",      "--entry",    "fla_call_run", "--criteria", "no shape slower", "--machine",
            "this one", "--coverage", coverage,       "--json"};
  }
  Ended step(const std::string& direction, Words more = {}) const {
    Words w = {"loop", "step", "chunk_gla", "--direction", direction, "--json"};
    w.insert(w.end(), more.begin(), more.end());
    return fla(w);
  }
  std::string state() const { return fla({"loop", "status", "chunk_gla", "--json"}).json().value("state", "?"); }

  fs::path dir_, repo_;
};

TEST_F(LoopProgram, InitRefusesWhatIsWrongBeforeItMakesAnything) {
  const std::pair<Words, const char*> bad[] = {
      {{"--device", "tpu"}, "device: expected cpu or cuda, got 'tpu'"},
      {{"--device", ""}, "device: expected cpu or cuda, got ''"},
      {{"--dtype", "f64"}, "dtype: expected f32, bf16 or f16, got 'f64'"},
      {{"--threads", "few"}, "threads: expected all or a number, got 'few'"},
      {{"--threads", ""}, "threads: expected a value, got ''"},
      {{"--file", ""}, "--file: expected a file, got ''"},
      {{"--cap", "0"}, "iteration cap: expected a number of iterations, got '0'"},
  };
  for (const auto& [more, text] : bad) {
    Words w = init();
    w.insert(w.end(), more.begin(), more.end());
    const Ended r = fla(w);
    EXPECT_EQ(r.code, 2) << text;
    EXPECT_NE(r.err.find(text), std::string::npos) << r.err;
  }
  EXPECT_EQ(fla(init("no-such-shape")).code, 2);
  EXPECT_EQ(git({"branch", "--show-current"}), "main");
  EXPECT_EQ(git({"status", "--porcelain"}), "");
  EXPECT_EQ(git({"branch", "--list", "fla-loop/*"}), "");
}

// ---- verify --base

TEST_F(LoopProgram, BaseIsProvenByItsCommitAndComparedRowByRow) {
  write_file(repo_ / "README.md", "second\n");
  commit("second");
  make();
  const Ended r = fla(small("HEAD~1"));
  const Json j = r.json();
  ASSERT_TRUE(j.is_object()) << r.err;
  EXPECT_EQ(j["base"]["commit"], git({"rev-parse", "--short=12", "HEAD~1"}));
  EXPECT_EQ(j["base"]["ref"], "HEAD~1");
  EXPECT_EQ(j["candidate"]["commit"], git({"rev-parse", "--short=12", "HEAD"}));
  EXPECT_EQ(j["candidate"]["dirty"], false);
  EXPECT_EQ(j["gate"]["passed"], 2);
  ASSERT_EQ(j["rows"].size(), 1U);
  const Json& row = j["rows"][0];
  EXPECT_TRUE(row["error"].is_null()) << row;
  for (const char* key : {"base_ms", "new_ms", "speedup", "p10", "p90", "low", "high", "err_base", "err_new"})
    EXPECT_TRUE(row[key].is_number()) << key;
  EXPECT_GE(row["n"].get<int>(), 25);
  EXPECT_EQ(row["err_base"], row["err_new"]);
  EXPECT_GT(row["peak_base"].get<int>(), 0);
  EXPECT_TRUE(j["geomean"].is_number());
  // Nothing is left but the library and its papers.
  EXPECT_EQ(git({"worktree", "list", "--porcelain"}).find("source"), std::string::npos);
  for (const auto& entry : fs::directory_iterator(dir_ / "cache" / "base"))
    if (entry.is_directory()) {
      EXPECT_TRUE(fs::exists(entry.path() / "libfla.so"));
      EXPECT_FALSE(fs::exists(entry.path() / "source"));
      EXPECT_FALSE(fs::exists(entry.path() / "build"));
    }
}

TEST_F(LoopProgram, PlantedCheatsAreCaught) {
  Ended r = planted("Relaxed");
  EXPECT_EQ(r.code, 1) << r.err;
  EXPECT_EQ(r.json()["verdict"], "blocked");
  EXPECT_NE(first_error(r).find("numeric relaxation"), std::string::npos) << first_error(r);
  r = planted("PartialWrite");
  EXPECT_EQ(r.json()["verdict"], "blocked");
  EXPECT_NE(first_error(r).find("candidate"), std::string::npos) << first_error(r);
  r = planted("SkippedShape", "512");
  EXPECT_EQ(r.json()["verdict"], "blocked");
  EXPECT_NE(first_error(r).find("candidate against the reference: out.o"), std::string::npos) << first_error(r);
  r = planted("Cached");
  EXPECT_EQ(r.json()["verdict"], "blocked");
  EXPECT_NE(first_error(r).find("kept from before"), std::string::npos) << first_error(r);
  EXPECT_EQ(r.json()["candidate"]["dirty"], true);
}

// On the emulated GPU of the preset `emulated`, whose memory the planted library reaches; elsewhere it says why not.
TEST_F(LoopProgram, OnAGpuTooBuildsAreComparedAndCheatsCaught) {
  const auto on_gpu = [](Words w) {
    w.insert(w.end(), {"--device", "cuda"});
    return w;
  };
  const Json gpu = fla({"doctor", "--json"}).json()["gpu"];
  Ended r;
  if (!gpu.is_array() || gpu[0]["name"].get<std::string>().find("emulator") == std::string::npos) {
    if (gpu.is_array()) GTEST_SKIP() << "for the emulator: the planted library writes to the device's memory itself";
    r = fla(on_gpu(small("HEAD")));
    EXPECT_EQ(r.code, 2);
    EXPECT_NE(r.err.find("--device: expected cpu, got 'cuda': "), std::string::npos) << r.err;
    return;
  }
  setenv("FLA_CPP_EMULATOR_SHARED", "1", 1);
  setenv("FLA_NVML", "/nonexistent/libnvidia-ml.so.1", 1);
  r = fla(on_gpu(small("HEAD", "20")));
  const Json j = r.json();
  ASSERT_TRUE(j.is_object()) << r.err;
  EXPECT_EQ(j["verdict"], "no_win") << j;
  EXPECT_EQ(j["rows"][0]["backend"], "cuda");
  EXPECT_EQ(j["rows"][0]["err_base"], j["rows"][0]["err_new"]);
  EXPECT_TRUE(j["machine"]["gpu"]["clocks"]["missing"].is_string());
  const std::pair<const char*, const char*> plants[] = {{"Relaxed", "numeric relaxation"},
                                                        {"PartialWrite", "candidate"},
                                                        {"SkippedShape", "candidate against the reference: out.o"},
                                                        {"Cached", "kept from before"}};
  for (const auto& [what, text] : plants) {
    plant(what);
    make();
    r = fla(on_gpu(small("HEAD", what == std::string("SkippedShape") ? "300" : "20")));
    EXPECT_EQ(r.json()["verdict"], "blocked") << what;
    EXPECT_NE(first_error(r).find(text), std::string::npos) << what << ": " << first_error(r);
  }

  // An effort there: its contract says so, its baseline is timed there, and nothing is promoted without clocks.
  plant("Slow");
  commit("slow kernel");
  r = fla(on_gpu(init()));
  ASSERT_EQ(r.code, 0) << r.err;
  const std::string draft = read_file(repo_ / "profile/chunk_gla-opt/docs/draft.md");
  for (const char* line : {"| device | cuda |", "| dtype | bf16 |", "fla gate chunk_gla --device cuda"})
    EXPECT_NE(draft.find(line), std::string::npos) << line << "\n" << draft;
  EXPECT_NE(read_file(repo_ / "profile/chunk_gla-opt/OPT_LOG.md").find("emulator on the CPU"), std::string::npos);
  plant("None");
  EXPECT_EQ(step("does not sleep").json()["status"], "keep");
  r = fla({"loop", "promote", "chunk_gla", "--summary", "do not sleep", "--impact", "every call", "--reading",
           "20 ms less", "--json"});
  EXPECT_EQ(r.code, 1) << r.err;
  EXPECT_NE(r.out.find("samples of the clocks: NVML cannot be loaded"), std::string::npos) << r.out;
}

// Ten percent of the real kernel's work, more on one side: told from noise in both directions, and no difference where
// there is none, whatever else this machine is doing (one thread: its waits are taken off).
TEST_F(LoopProgram, TenPercentMoreWorkIsToldFromNoise) {
  plant("Tenth");
  commit("more work");
  plant("None");
  commit("as before");
  const auto verdict = [&](const std::string& base) {
    make();
    Words w = small(base, "512");
    w.insert(w.end(), {"--threads", "1"});
    const Ended r = fla(w);
    EXPECT_EQ(r.json()["rows"].size(), 1U) << r.err;
    return r.json();
  };
  Json j = verdict("HEAD~1");
  EXPECT_EQ(j["verdict"], "win") << j;
  EXPECT_NEAR(j["rows"][0]["speedup"].get<double>(), 1.1, 0.03);
  j = verdict("HEAD");
  EXPECT_EQ(j["verdict"], "no_win") << j;
  EXPECT_NEAR(j["rows"][0]["speedup"].get<double>(), 1.0, 0.02);
  EXPECT_LE(j["interval"][0].get<double>(), 1.0);
  EXPECT_GE(j["interval"][1].get<double>(), 1.0);
  plant("Tenth");
  j = verdict("HEAD");
  EXPECT_EQ(j["verdict"], "regression") << j;
  EXPECT_NEAR(j["rows"][0]["speedup"].get<double>(), 1 / 1.1, 0.03);
}

// Times without proof are times: whatever they say, nobody may take them for a verdict.
TEST_F(LoopProgram, WithoutTheWholeGateThereIsNoVerdict) {
  const auto with = [&](const Words& more) {
    Words w = small("HEAD");
    w.insert(w.end(), more.begin(), more.end());
    return fla(w);
  };
  Ended r = with({"--no-gate"});
  EXPECT_EQ(r.code, 4) << r.err;
  EXPECT_TRUE(r.json()["verdict"].is_null()) << r.out;
  EXPECT_TRUE(r.json()["gate"].is_null());
  EXPECT_TRUE(r.json()["rows"][0]["speedup"].is_number());
  EXPECT_NE(r.json()["unproven"].get<std::string>().find("--no-gate"), std::string::npos);
  EXPECT_NE(r.err.find("no verdict"), std::string::npos) << r.err;
  r = with({"--gate-k", "First"});
  EXPECT_EQ(r.code, 4) << r.err;
  EXPECT_TRUE(r.json()["verdict"].is_null()) << r.out;
  EXPECT_EQ(r.json()["gate"]["passed"], 1);
  Words text = small("HEAD");
  text.back() = "--no-gate";  // instead of --json
  r = fla(text);
  EXPECT_EQ(r.code, 4) << r.err;
  EXPECT_NE(r.out.find("verdict: none (--no-gate"), std::string::npos) << r.out;
  // A slower candidate is no regression either, and a red part of the gate is red.
  plant("Slow");
  make();
  r = with({"--no-gate"});
  EXPECT_EQ(r.code, 4) << r.err;
  EXPECT_TRUE(r.json()["verdict"].is_null()) << r.out;
  git({"checkout", "--", "."});
  write_file(repo_ / "fla/ops/gla/gate_red", "");
  make();
  EXPECT_EQ(with({"--gate-k", "First"}).code, 1);
}

TEST_F(LoopProgram, EditedTestOrToleranceIsExitThreeAndNamed) {
  write_file(repo_ / "fla/ops/gla/gla_spec.cc", "// tolerance 0.5\n");
  Ended r = fla(small("HEAD"));
  EXPECT_EQ(r.code, 3);
  EXPECT_NE(r.err.find("edited   fla/ops/gla/gla_spec.cc"), std::string::npos) << r.err;
  git({"checkout", "--", "."});
  fs::remove(repo_ / "tests/gate/some_test.cc");
  write_file(repo_ / "tests/gate/other_test.cc", "// easier\n");
  commit("other tests");
  r = fla(small("HEAD~1"));
  EXPECT_EQ(r.code, 3);
  EXPECT_NE(r.err.find("removed  tests/gate/some_test.cc"), std::string::npos) << r.err;
  EXPECT_NE(r.err.find("added    tests/gate/other_test.cc"), std::string::npos) << r.err;
  // Taking the pattern away does not free the file.
  git({"reset", "--quiet", "--hard", "HEAD~1"});
  write_file(repo_ / "tools/frozen_scope.txt", "fla/fla.h\n");
  write_file(repo_ / "tests/gate/some_test.cc", "// no test\n");
  r = fla(small("HEAD"));
  EXPECT_EQ(r.code, 3);
  EXPECT_NE(r.err.find("tests/gate/some_test.cc"), std::string::npos) << r.err;
  EXPECT_NE(r.err.find("tools/frozen_scope.txt"), std::string::npos) << r.err;
}

TEST_F(LoopProgram, RefusesWhatCannotBeCompared) {
  Ended r = fla(small("no-such-ref"));
  EXPECT_EQ(r.code, 2);
  EXPECT_NE(r.err.find("no commit, branch or tag 'no-such-ref'"), std::string::npos) << r.err;
  EXPECT_EQ(fla(small("--force")).code, 2);

  // The library is older than the source.
  plant("Slow");
  r = fla(small("HEAD"));
  EXPECT_EQ(r.code, 2);
  EXPECT_NE(r.err.find("the build is older than fla/ops/gla/plant.h"), std::string::npos) << r.err;
  git({"checkout", "--", "."});

  // The base does not build: its log is shown.
  write_file(repo_ / "fla/ops/gla/plant.h", read_file(repo_ / "fla/ops/gla/plant.h") + "#error planted\n");
  commit("broken");
  git({"revert", "--no-edit", "HEAD"});
  make();
  r = fla(small("HEAD~1"));
  EXPECT_EQ(r.code, 2);
  EXPECT_NE(r.err.find("#error planted"), std::string::npos) << r.err;
  EXPECT_EQ(git({"worktree", "list", "--porcelain"}).find("source"), std::string::npos);

  // A cache that cannot be written (a file in its place: root may write into any folder).
  write_file(dir_ / "file", "");
  Words w = small("HEAD~2");
  w.insert(w.end(), {"--cache", (dir_ / "file" / "cache").string()});
  r = fla(w);
  EXPECT_EQ(r.code, 2);
  EXPECT_NE(r.err.find("cannot make the folder"), std::string::npos) << r.err;

  write_file(repo_ / "fla/ops/gla/gate_red", "");
  make();
  r = fla(small("HEAD"));
  EXPECT_EQ(r.code, 1);
  EXPECT_EQ(r.json()["verdict"], "blocked");
  EXPECT_TRUE(r.json()["rows"].empty());

  fs::rename(repo_ / ".git", dir_ / "elsewhere");
  r = fla(small("HEAD"));
  EXPECT_EQ(r.code, 2);
  EXPECT_NE(r.err.find("not a git repository"), std::string::npos) << r.err;
}

TEST_F(LoopProgram, ABaseThatCannotBeCheckedOutLeavesNoFolder) {
  write_file(repo_ / "README.md", "second\n");
  commit("second");
  make();
  write_file(
      dir_ / "bin/git",
      "#!/bin/sh\ncase \" $* \" in *' worktree add '*) echo 'fatal: No space left on device' >&2; exit 128;; esac\n"
      "exec /usr/bin/env PATH=\"${PATH#*:}\" git \"$@\"\n");
  fs::permissions(dir_ / "bin/git", fs::perms::owner_all);
  const std::string path = std::getenv("PATH");
  setenv("PATH", ((dir_ / "bin").string() + ":" + path).c_str(), 1);
  Ended r = fla(small("HEAD~1"));
  setenv("PATH", path.c_str(), 1);
  EXPECT_EQ(r.code, 2) << r.out;
  EXPECT_NE(r.err.find("No space left on device"), std::string::npos) << r.err;
  for (const auto& entry : fs::directory_iterator(dir_ / "cache/base"))
    EXPECT_FALSE(entry.is_directory()) << entry.path() << " is left";
  r = fla(small("HEAD~1"));
  EXPECT_TRUE(r.json().is_object()) << r.err;
}

TEST_F(LoopProgram, InterruptedBuildLeavesNothingAndIsResumed) {
  // A base whose build waits until it is killed: its own CMake file sleeps.
  write_file(repo_ / "real.cmake", read_file(repo_ / "real.cmake") +
                                       "if(CMAKE_BINARY_DIR MATCHES cache AND NOT EXISTS \"" + (dir_ / "go").string() +
                                       "\")\n  file(WRITE \"" + (dir_ / "waits").string() +
                                       "\" x)\n  execute_process(COMMAND sleep 60)\nendif()\n");
  commit("slow");
  write_file(repo_ / "README.md", "next\n");
  commit("next");
  make();
  Words w = small("HEAD~1");
  w.insert(w.begin(), (build() / "bin" / "fla").string());
  const pid_t pid = spawn(w);
  ASSERT_GT(pid, 0);
  for (int i = 0; i < 600 && !fs::exists(dir_ / "waits"); ++i) usleep(50000);
  ASSERT_TRUE(fs::exists(dir_ / "waits"));
  EXPECT_NE(git({"worktree", "list", "--porcelain"}).find("source"), std::string::npos);
  ASSERT_EQ(kill(pid, SIGTERM), 0);
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGTERM);
  EXPECT_EQ(git({"worktree", "list", "--porcelain"}).find("source"), std::string::npos);
  write_file(dir_ / "go", "");
  const Ended r = fla(small("HEAD~1"));
  EXPECT_TRUE(r.json().is_object()) << r.err;
  EXPECT_EQ(r.json()["base"]["commit"], git({"rev-parse", "--short=12", "HEAD~1"}));
}

// ---- loop

TEST_F(LoopProgram, ContractMustBeFilledFirst) {
  Ended r = fla({"loop", "init", "chunk_gla", "--json"});
  EXPECT_EQ(r.code, 1) << r.err;
  EXPECT_EQ(r.json()["state"], "contract-missing");
  EXPECT_GE(r.json()["missing"].size(), 5U);
  EXPECT_TRUE(fs::exists(repo_ / "profile/chunk_gla-opt/docs/draft.md"));
  EXPECT_EQ(git({"branch", "--show-current"}), "fla-loop/chunk_gla");
  EXPECT_EQ(state(), "contract-missing");
  EXPECT_EQ(step("x").json()["state"], "contract-missing");
  EXPECT_EQ(fla({"loop", "init", "chunk_gal"}).code, 2);
  EXPECT_EQ(fla({"loop", "step", "fused_recurrent_gla", "--direction", "x"}).code, 2);  // no effort of that name
}

TEST_F(LoopProgram, ADirtyTreeOrARedGateGivesNoBaseline) {
  plant("Slow");
  Ended r = fla(init());
  EXPECT_EQ(r.code, 2);
  EXPECT_NE(r.err.find("the work tree has changes"), std::string::npos) << r.err;
  git({"checkout", "--", "."});
  write_file(repo_ / "fla/ops/gla/gate_red", "");
  commit("red");
  r = fla(init());
  EXPECT_EQ(r.code, 1) << r.err;
  EXPECT_EQ(r.json()["state"], "gate-red");
}

TEST_F(LoopProgram, FromContractToPromotion) {
  plant("Slow");  // what the effort will find: 20 ms of sleep in every call
  commit("slow kernel");
  Ended r = fla(init());
  ASSERT_EQ(r.code, 0) << r.err << r.out;
  EXPECT_EQ(r.json()["state"], "ready");
  EXPECT_EQ(r.json()["iteration"], 0);
  EXPECT_EQ(r.json()["status"], "base");
  const fs::path records = repo_ / "profile/chunk_gla-opt";
  for (const char* f : {"docs/draft.md", "OPT_LOG.md", "TRAPS.md", "state.json", "trace/000.json"})
    EXPECT_TRUE(fs::exists(records / f)) << f;
  EXPECT_EQ(git({"status", "--porcelain"}), "");
  EXPECT_EQ(fla(init()).code, 2);  // a baseline is measured once

  // Refusals: nothing changed, too much changed, the frozen scope, a step without words.
  EXPECT_EQ(step("nothing").json()["missing"].size(), 1U);
  write_file(repo_ / "README.md", "beside the kernel\n");
  r = step("too much");
  EXPECT_EQ(r.code, 1);
  EXPECT_EQ(r.json()["state"], "scope-exceeded");
  fs::remove(repo_ / "README.md");
  write_file(repo_ / "fla/ops/gla/gla_spec.cc", "// tolerance 0.5\n");
  r = step("looser");
  EXPECT_EQ(r.code, 3);
  EXPECT_EQ(r.json()["state"], "frozen-scope-violated");
  git({"checkout", "--", "."});
  write_file(repo_ / "fla/ops/gla/notes.txt", "x\n");
  EXPECT_EQ(fla({"loop", "step", "chunk_gla"}).code, 2);
  EXPECT_EQ(step("half a bucket", {"--bucket", "T < 64"}).code, 2);
  EXPECT_EQ(step("a floor without a number", {"--floor", "memory"}).code, 2);

  // Another command holds the operator.
  const fs::path lock = repo_ / ".git/fla-loop/chunk_gla.lock";
  const int fd = open(lock.c_str(), O_RDWR);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(flock(fd, LOCK_EX | LOCK_NB), 0);
  r = step("two at once");
  EXPECT_EQ(r.code, 1);
  EXPECT_NE(r.err.find("another command works on chunk_gla"), std::string::npos) << r.err;
  close(fd);

  // A failed gate is a row without a time, and is taken back.
  fs::remove(repo_ / "fla/ops/gla/notes.txt");
  write_file(repo_ / "fla/ops/gla/gate_red", "");
  r = step("breaks the gate");
  EXPECT_EQ(r.code, 0) << r.err;
  EXPECT_EQ(r.json()["status"], "revert");
  EXPECT_TRUE(r.json()["bench_ms"].is_null());
  EXPECT_EQ(r.json()["gate"]["failed"], 2);
  EXPECT_FALSE(fs::exists(repo_ / "fla/ops/gla/gate_red"));
  EXPECT_EQ(git({"status", "--porcelain"}), "");

  // So is one that does not build.
  write_file(repo_ / "fla/ops/gla/plant.h", "#error planted\n");
  r = step("does not build");
  EXPECT_EQ(r.json()["status"], "revert") << r.err;
  EXPECT_TRUE(fs::exists(records / "trace/002-build.log"));

  // And one that relaxes the numerics, however fast.
  plant("Relaxed");
  r = step("fewer bits");
  EXPECT_EQ(r.json()["status"], "revert") << r.err;
  EXPECT_NE(r.json()["text"].get<std::string>().find("numeric relaxation"), std::string::npos);

  // Three without a keep: stalled until assessed.
  plant("None");
  r = step("no sleep");
  EXPECT_EQ(r.code, 1);
  EXPECT_EQ(r.json()["state"], "stalled");
  git({"stash", "--quiet"});
  r = fla({"loop", "assess", "chunk_gla", "--json"});
  EXPECT_EQ(r.code, 1);
  EXPECT_EQ(r.json()["missing"].size(), 3U) << r.out;
  r = fla({"loop", "assess", "chunk_gla", "--techniques", "not to sleep", "--next", "no sleep", "--why",
           "the profile shows 20 ms of nothing", "--json"});
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_EQ(r.json()["state"], "ready");
  EXPECT_NE(read_file(records / "OPT_LOG.md").find("does not build (revert)"), std::string::npos);

  // Promotion needs a kept candidate and its papers.
  r = fla({"loop", "promote", "chunk_gla", "--json"});
  EXPECT_EQ(r.code, 1);
  EXPECT_EQ(r.json()["missing"].size(), 4U) << r.out;

  git({"stash", "pop", "--quiet"});
  r = step("no sleep");
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_EQ(r.json()["status"], "keep") << r.out;
  EXPECT_EQ(r.json()["state"], "promotable");
  EXPECT_NE(read_file(records / "candidates/004.md").find("iteration: 4, parent 0"), std::string::npos);

  // The records are a person's too: words may be corrected, and must then be committed; figures may not.
  const std::string log = read_file(records / "OPT_LOG.md");
  std::string edited = log;
  edited.replace(edited.find("breaks the gate"), 15, "broke the gate");
  write_file(records / "OPT_LOG.md", edited);
  EXPECT_EQ(state(), "awaiting-log");
  commit("words");
  EXPECT_EQ(state(), "promotable");
  edited.replace(edited.find("| keep"), 6, "| drop");
  write_file(records / "OPT_LOG.md", edited);
  EXPECT_EQ(fla({"loop", "status", "chunk_gla"}).code, 2);
  git({"checkout", "--", "."});

  EXPECT_EQ(fla({"loop", "trap", "add", "chunk_gla", "--fact", "sleep looks like work", "--why", "the clock runs",
                 "--apply", "look at the counters"})
                .code,
            0);
  EXPECT_EQ(fla({"loop", "trap", "list", "chunk_gla", "--json"}).json()["traps"].size(), 1U);

  r = fla({"loop", "promote", "chunk_gla", "--summary", "do not sleep", "--impact", "every call", "--reading",
           "20 ms of sleep in a call of 0.05 ms", "--json"});
  ASSERT_EQ(r.code, 0) << r.err << r.out;
  EXPECT_EQ(r.json()["state"], "promoted");
  const std::string page = read_file(records / "PROMOTION.md");
  for (const char* what :
       {"do not sleep", "Test plan", "Run 1", "Run 2", "Coverage", "frozen", "load (one-minute mean)"})
    EXPECT_NE(page.find(what), std::string::npos) << what;
  // The shipped branch: the kernel alone, on the baseline.
  EXPECT_EQ(git({"diff", "--name-only", "main", "fla-promoted/chunk_gla"}), "fla/ops/gla/plant.h");
  EXPECT_EQ(git({"rev-parse", "fla-promoted/chunk_gla~1"}), git({"rev-parse", "main"}));
  EXPECT_EQ(step("after the end").json()["state"], "promoted");

  r = fla({"report", "profile/chunk_gla-opt", "-o", (dir_ / "report.html").string(), "--json"});
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_EQ(r.json()["evidence"], "trace/promote-1.json");
  EXPECT_NE(read_file(dir_ / "report.html").find("<svg"), std::string::npos);
}

TEST_F(LoopProgram, PromotionGatesEverythingThatTheChangeReaches) {
  // A stage that gla and retention share, of which gla's part becomes faster and retention's wrong.
  const fs::path stage = repo_ / "fla/engine/diag/cpu/shared.cc";
  write_file(stage, "int fla_shared_stage() { return 1; }\n");
  write_file(repo_ / "fla/ops/retention/retention_cpu.cc",
             "int fla_shared_stage();\nint fla_retention_user() { return fla_shared_stage(); }\n");
  plant("Slow");
  commit("slow kernel, shared stage");
  make();
  Words w = init();
  for (auto& word : w)
    if (word == "fla/ops/gla/**") word = "fla/ops/gla/**, fla/engine/diag/**";
  Ended r = fla(w);
  ASSERT_EQ(r.code, 0) << r.err << r.out;
  plant("None");
  write_file(stage, "int fla_shared_stage() { return 2; }  // wrong for retention\n");
  r = step("no sleep");
  ASSERT_EQ(r.json()["status"], "keep") << r.out << r.err;
  const Words promote = {"loop",       "promote",   "chunk_gla",
                         "--summary",  "no sleep",  "--impact",
                         "every call", "--reading", "20 ms of sleep in a call of 0.05 ms",
                         "--json"};
  r = fla(promote);
  EXPECT_EQ(r.code, 1) << r.out << r.err;
  EXPECT_NE(r.out.find("fla gate gla retention"), std::string::npos) << r.out;
  EXPECT_NE(r.out.find("ChunkRetention.Shared"), std::string::npos) << r.out;
  EXPECT_EQ(git({"branch", "--list", "fla-promoted/*"}), "");
  EXPECT_EQ(git({"status", "--porcelain"}), "");

  write_file(stage, "int fla_shared_stage() { return 2; }\n");
  r = step("the stage as it must be", {"--note", "retention was broken"});
  ASSERT_EQ(r.code, 0) << r.err;
  // No win over the last keep, so it is taken back; the promotion stays refused for the candidate that is wrong.
  EXPECT_EQ(r.json()["status"], "drop") << r.out;
  EXPECT_EQ(fla(promote).code, 1);
}

TEST_F(LoopProgram, CheckingOutSomethingElseInMidStepRecordsNothing) {
  plant("Slow");
  commit("slow kernel");
  ASSERT_EQ(fla(init()).code, 0);
  plant("None");
  write_file(repo_ / ".git/switch", "");
  Ended r = step("no sleep");
  EXPECT_EQ(r.code, 2) << r.out << r.err;
  EXPECT_NE(r.err.find("expected fla-loop/chunk_gla"), std::string::npos) << r.err;
  EXPECT_NE(r.err.find("got main"), std::string::npos) << r.err;
  EXPECT_EQ(git({"status", "--porcelain"}), "");
  git({"switch", "--quiet", "fla-loop/chunk_gla"});
  EXPECT_EQ(state(), "awaiting-log");
  // Nor is a tree that was edited under way what the row would name.
  plant("Tenth");
  r = step("no sleep");
  EXPECT_EQ(r.code, 2) << r.out << r.err;
  EXPECT_NE(r.err.find("other contents of fla/ops/gla/plant.h"), std::string::npos) << r.err;
  git({"checkout", "--", "."});
  r = step("no sleep");
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_EQ(r.json()["status"], "keep") << r.out;
}

TEST_F(LoopProgram, ABucketNeedsAWinOfItsOwnThatCostsNothingElsewhere) {
  plant("Slow");
  commit("slow kernel");
  Words w = init("B1_T1_H16_D128");
  w.insert(w.end(), {"--threads", "1"});
  ASSERT_EQ(fla(w).code, 0);
  EXPECT_NE(read_file(repo_ / "profile/chunk_gla-opt/docs/draft.md").find("| threads | 1 |"), std::string::npos);
  const auto bucket = [&](const std::string& direction, const std::string& shapes) {
    const Ended r = step(direction, {"--bucket", "D < 128", "--bucket-entry", "narrow_calls", "--bucket-shapes", shapes,
                                     "--bucket-why", "the profile shows sleep there alone"});
    EXPECT_EQ(r.code, 0) << r.err;
    return r.json();
  };
  const fs::path dispatch = repo_ / "profile/chunk_gla-opt/dispatch.md";
  // The other shapes win, the bucket's own does not.
  plant("SlowSmall");
  Json j = bucket("wide calls do not sleep", "B1_T1_H16_D64");
  EXPECT_EQ(j["status"], "drop") << j;
  EXPECT_NE(j["text"].get<std::string>().find("bucket: no win on its own shapes B1_T1_H16_D64"), std::string::npos)
      << j;
  EXPECT_FALSE(fs::exists(dispatch));

  plant("SlowLarge");
  j = bucket("narrow calls do not sleep", "B1_T1_H16_D64");
  EXPECT_EQ(j["status"], "keep") << j;
  EXPECT_EQ(j["phase"], "specialisation");
  const std::string table = read_file(dispatch);
  EXPECT_NE(table.find("| D < 128 | narrow_calls |"), std::string::npos) << table;
  EXPECT_NE(table.find("the profile shows sleep there alone"), std::string::npos) << table;
  const Json verify = Json::parse(read_file(repo_ / "profile/chunk_gla-opt/trace/002-whole.json"));
  EXPECT_EQ(verify["machine"]["threads"], 1);
  EXPECT_EQ(verify["rows"].size(), 4U) << "both shapes, both modes";
}

TEST_F(LoopProgram, ABucketThatSlowsOtherShapesIsTakenBack) {
  if (std::getenv("FLA_CPP_LONG_TESTS") == nullptr) GTEST_SKIP() << "takes minutes; FLA_CPP_LONG_TESTS=1 runs it";
  plant("SlowSmall");
  commit("slow kernel");
  ASSERT_EQ(fla(init("B1_T1_H16_D128")).code, 0);
  plant("SlowLarge");
  Ended r = step("sleep elsewhere", {"--bucket", "D < 128", "--bucket-entry", "narrow_calls", "--bucket-shapes",
                                     "B1_T1_H16_D64", "--bucket-why", "the profile shows sleep there alone"});
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_EQ(r.json()["status"], "revert");
  EXPECT_NE(r.json()["text"].get<std::string>().find("bucket: the whole shape set says regression"), std::string::npos)
      << r.out;
  EXPECT_FALSE(fs::exists(repo_ / "profile/chunk_gla-opt/dispatch.md"));

  // A floor stops the effort until somebody concludes or chooses again.
  write_file(repo_ / "fla/ops/gla/notes.txt", "x\n");
  r = step("a note", {"--floor", "timer resolution: 20 ms of sleep"});
  EXPECT_EQ(r.json()["status"], "floor") << r.err;
  EXPECT_EQ(r.json()["state"], "floor-claimed");
  write_file(repo_ / "fla/ops/gla/notes.txt", "y\n");
  r = step("another note");
  EXPECT_EQ(r.code, 1);
  EXPECT_EQ(r.json()["state"], "floor-claimed");
  git({"clean", "--quiet", "--force"});
  r = fla({"loop", "assess", "chunk_gla", "--techniques", "not to sleep", "--next", "sleep elsewhere", "--why",
           "the target alone counts here", "--json"});
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_EQ(r.json()["state"], "ready");

  // A shape that becomes slower is shipped only by name and with a reason.
  plant("SlowLarge");
  r = step("sleep elsewhere");
  EXPECT_EQ(r.json()["status"], "keep") << r.out << r.err;
  const Words promote = {"loop",       "promote",   "chunk_gla",      "--summary", "sleep elsewhere", "--impact",
                         "every call", "--reading", "20 ms of sleep", "--json",    "--accept"};
  const auto accepting = [&](const std::string& what) {
    Words w = promote;
    w.push_back(what);
    return fla(w);
  };
  EXPECT_EQ(accepting("B1_T1_H16_D128").code, 2);
  r = accepting("B1_T512_H16_D64=another shape");
  EXPECT_EQ(r.code, 1) << r.err;
  EXPECT_NE(r.out.find("B1_T1_H16_D128 fwd is slower"), std::string::npos) << r.out;
  EXPECT_NE(r.out.find("--accept B1_T1_H16_D128=REASON"), std::string::npos) << r.out;
  r = accepting("B1_T1_H16_D128=nobody calls it");
  ASSERT_EQ(r.code, 0) << r.err << r.out;
  EXPECT_EQ(r.json()["state"], "promoted");
  EXPECT_NE(read_file(repo_ / "profile/chunk_gla-opt/PROMOTION.md").find("B1_T1_H16_D128 may be slower: nobody calls"),
            std::string::npos);
}

TEST_F(LoopProgram, NoGoDemandsEvidenceAndAStepThatWasInterruptedIsResumed) {
  ASSERT_EQ(fla(init()).code, 0);
  Ended r = fla({"loop", "no-go", "chunk_gla", "--limit", "nothing", "--json"});
  EXPECT_EQ(r.code, 1);
  EXPECT_EQ(r.json()["state"], "no-go-incomplete");
  EXPECT_EQ(r.json()["missing"].size(), 4U);

  // The change is committed and its row is not: as after a kill.
  write_file(repo_ / "fla/ops/gla/notes.txt", "x\n");
  commit("chunk_gla: iteration 1: a note");
  write_file(repo_ / ".git/fla-loop/chunk_gla.pending.json", Json{{"iteration", 1},
                                                                  {"direction", "a note"},
                                                                  {"commit", git({"rev-parse", "HEAD"})},
                                                                  {"base", git({"rev-parse", "main"})},
                                                                  {"files", {"fla/ops/gla/notes.txt"}}}
                                                                 .dump());
  EXPECT_EQ(state(), "awaiting-log");
  r = fla({"loop", "step", "chunk_gla", "--json"});
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_EQ(r.json()["iteration"], 1);
  EXPECT_EQ(r.json()["direction"], "a note");
  EXPECT_TRUE(r.json()["bench_ms"].is_number());
  EXPECT_FALSE(fs::exists(repo_ / ".git/fla-loop/chunk_gla.pending.json"));

  r = fla({"loop", "no-go", "chunk_gla", "--limit", "launch overhead: 9 of 10 us", "--json"});
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_EQ(r.json()["state"], "no-go");
  EXPECT_TRUE(fs::exists(repo_ / "profile/chunk_gla-opt/NO_GO.md"));
  EXPECT_EQ(fla({"loop", "init", "chunk_gla"}).code, 2);
}

}  // namespace
