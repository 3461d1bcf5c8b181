// The git repository and the build tree that this program came from.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tools/compare/process.h"

namespace fla::tools {

// Of <build>/bin/fla: the folder, the source folder it was configured for, and the values of its CMakeCache.txt.
struct BuildTree {
  std::filesystem::path directory, source;
  std::map<std::string, std::string> cache;
  std::string value(const std::string& key) const;
  std::filesystem::path library() const { return directory / "lib" / "libfla.so"; }
};
// Refuses when this program is not in a build tree; `what` names the command that needs one.
BuildTree this_build_tree(const std::string& what);

class Repo {
 public:
  // Refuses when there is no git or `source` is not the top of a work tree.
  explicit Repo(std::filesystem::path source);

  const std::filesystem::path& root() const { return root_; }
  // stdout of `git ARGS`, without the last line's end. A failure is refused with git's own words.
  std::string git(const std::vector<std::string>& args, const std::string& input = "") const;
  ChildResult try_git(const std::vector<std::string>& args, const std::string& input = "") const;

  std::string resolve(const std::string& ref) const;  // full commit id; an unknown ref is refused
  std::string head() const { return resolve("HEAD"); }
  std::string branch() const;  // empty when HEAD is detached
  bool has_branch(const std::string& name) const;
  std::filesystem::path common_dir() const;
  // Files that differ between a commit and the work tree, untracked ones included; deleted ones too.
  // Refuses where git was told not to look at a file (assume-unchanged, skip-worktree) that was changed: it would stay
  // out of every comparison and of every commit.
  std::vector<std::string> changed(const std::string& commit) const;
  // Nothing differs from HEAD; the records of efforts do not count. Refuses as changed() does.
  bool clean() const;
  // Path and blob id of every file of a commit, and of every file of the work tree that git would track.
  std::map<std::string, std::string> files_of(const std::string& commit) const;
  std::map<std::string, std::string> files_now(const std::vector<std::string>& only) const;
  std::vector<std::string> names_now() const;

 private:
  void refuse_hidden_changes() const;
  std::filesystem::path root_;
};

// Lines of a text, without their ends; no empty last one.
std::vector<std::string> lines_of(const std::string& text);
inline std::string short_commit(const std::string& commit) { return commit.substr(0, 12); }

}  // namespace fla::tools
