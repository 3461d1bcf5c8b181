// Child processes and files of the commands that must clean up after themselves.
#include "tools/compare/process.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "gtest/gtest.h"
#include "tools/command.h"
#include "tools/compare/repo.h"

namespace fla::tools {
namespace {

namespace fs = std::filesystem;

class InFolder : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "fla_process.XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    dir = fs::canonical(name);
  }
  void TearDown() override { fs::remove_all(dir); }
  fs::path dir;
};

using Files = InFolder;
using Children = InFolder;
using Hidden = InFolder;

TEST_F(Files, AreNotWrittenThroughALink) {
  write_text(dir / "victim", "mine\n");
  fs::create_symlink(dir / "victim", dir / "record.part");
  write_text(dir / "record", "new\n");
  EXPECT_EQ(read_text(dir / "victim"), "mine\n");
  EXPECT_EQ(read_text(dir / "record"), "new\n");
  EXPECT_FALSE(fs::is_symlink(fs::symlink_status(dir / "record")));
  EXPECT_FALSE(fs::exists(dir / "record.part"));
  EXPECT_THROW(write_text(dir / "victim" / "below", "x"), Stop);
}

// A child that has closed its output and goes on: a signal reaches it whenever it comes, also while nobody waits.
TEST_F(Children, EndWithTheSignalThatEndsTheirParent) {
  const fs::path ready = dir / "ready";
  for (int round = 0; round < 5; ++round) {
    fs::remove(ready);
    const pid_t parent = fork();
    ASSERT_GE(parent, 0);
    if (parent == 0) {
      catch_signals();
      try {
        run_child({"sh", "-c", "exec >&- 2>&-; touch " + ready.string() + "; exec sleep 60"});
      } catch (const Interrupted& e) {
        _exit(e.signal);
      } catch (...) {
      }
      _exit(0);
    }
    for (int i = 0; i < 2000 && !fs::exists(ready); ++i) usleep(5000);
    ASSERT_TRUE(fs::exists(ready));
    usleep(static_cast<useconds_t>(100 * round));
    const auto begin = std::chrono::steady_clock::now();
    ASSERT_EQ(kill(parent, SIGTERM), 0);
    int status = 0;
    ASSERT_EQ(waitpid(parent, &status, 0), parent);
    EXPECT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), SIGTERM);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  }
}

TEST_F(Children, ThatDoNotEndInTimeAreEnded) {
  const ChildResult r = run_child({"sh", "-c", "exec >&- 2>&-; trap '' TERM; sleep 60"}, {.timeout_s = 1});
  EXPECT_TRUE(r.timed_out);
  EXPECT_EQ(r.code, 128 + SIGKILL);
}

TEST_F(Hidden, ChangesThatGitIsToldNotToSeeAreRefused) {
  const auto git = [&](const std::vector<std::string>& args) {
    std::vector<std::string> argv = {"git", "-c", "user.name=Test", "-c", "user.email=test@example.org"};
    argv.insert(argv.end(), args.begin(), args.end());
    const ChildResult r = run_child(argv, {.directory = dir});
    ASSERT_TRUE(r.ok()) << r.err;
  };
  git({"init", "--quiet"});
  write_text(dir / "kernel.cc", "slow\n");
  git({"add", "kernel.cc"});
  git({"commit", "--quiet", "-m", "first"});
  const Repo repo(dir);
  for (const std::string bit : {"assume-unchanged", "skip-worktree"}) {
    git({"update-index", "--" + bit, "kernel.cc"});
    EXPECT_TRUE(repo.clean()) << bit;
    EXPECT_TRUE(repo.changed("HEAD").empty()) << bit;
    write_text(dir / "kernel.cc", "fast\n");
    for (const bool whole : {false, true}) {
      try {
        whole ? static_cast<void>(repo.clean()) : static_cast<void>(repo.changed("HEAD"));
        ADD_FAILURE() << bit << ": not refused";
      } catch (const Stop& e) {
        EXPECT_NE(std::string(e.what()).find("kernel.cc was changed, and git was told not to look"), std::string::npos)
            << e.what();
      }
    }
    git({"update-index", "--no-" + bit, "kernel.cc"});
    EXPECT_EQ(repo.changed("HEAD"), std::vector<std::string>{"kernel.cc"}) << bit;
    write_text(dir / "kernel.cc", "slow\n");
  }
}

}  // namespace
}  // namespace fla::tools
