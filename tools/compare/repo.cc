#include "tools/compare/repo.h"

#include <algorithm>
#include <set>

#include "tools/command.h"

namespace fla::tools {

namespace fs = std::filesystem;

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines = split(text, '\n');
  if (!lines.empty() && lines.back().empty()) lines.pop_back();
  return lines;
}

namespace {

std::vector<std::string> nul_separated(const std::string& text) {
  std::vector<std::string> parts = split(text, '\0');
  std::erase(parts, "");
  return parts;
}

// What git's environment would point elsewhere: hooks set these.
const std::vector<std::string> kForeign = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX"};

}  // namespace

std::string BuildTree::value(const std::string& key) const {
  const auto it = cache.find(key);
  return it == cache.end() ? "" : it->second;
}

BuildTree this_build_tree(const std::string& what) {
  std::error_code error;
  BuildTree t;
  t.directory = fs::read_symlink("/proc/self/exe", error).parent_path().parent_path();
  const fs::path cache = t.directory / "CMakeCache.txt";
  for (const std::string& line : lines_of(read_text(cache))) {
    if (line.empty() || line[0] == '#' || line.starts_with("//")) continue;
    const std::size_t colon = line.find(':'), equals = line.find('=');
    if (colon == std::string::npos || equals == std::string::npos || colon > equals) continue;
    t.cache[line.substr(0, colon)] = line.substr(equals + 1);
  }
  t.source = t.value("CMAKE_HOME_DIRECTORY");
  if (t.source.empty())
    refuse("{}: this program must lie in its build tree (build/release/bin/fla): there is no {}", what, cache.string());
  return t;
}

Repo::Repo(fs::path source) : root_(std::move(source)) {
  std::error_code error;
  const fs::path root = fs::canonical(root_, error);
  if (error) refuse("{}: {}", root_.string(), error.message());
  root_ = root;
  const ChildResult top = try_git({"rev-parse", "--show-toplevel"});
  if (!top.ok()) refuse("{} is not a git repository: {}", root_.string(), top.err.substr(0, top.err.find('\n')));
  const fs::path at = fs::canonical(lines_of(top.out).at(0), error);
  if (at != root_) refuse("{} is not the top of a git repository ({} is)", root_.string(), at.string());
}

ChildResult Repo::try_git(const std::vector<std::string>& args, const std::string& input) const {
  std::vector<std::string> argv = {"git",
                                   "-c",
                                   "core.quotePath=false",
                                   "-c",
                                   "core.hooksPath=/dev/null",
                                   "-c",
                                   "core.fsmonitor=false",
                                   "-c",
                                   "commit.gpgSign=false"};
  argv.insert(argv.end(), args.begin(), args.end());
  return run_child(argv, {.directory = root_, .unset = kForeign, .input = input});
}

std::string Repo::git(const std::vector<std::string>& args, const std::string& input) const {
  ChildResult r = try_git(args, input);
  if (!r.ok()) {
    while (!r.err.empty() && r.err.back() == '\n') r.err.pop_back();
    refuse("git {}: {}", join(args, " "), r.err.empty() ? fmt::format("exit status {}", r.code) : r.err);
  }
  while (!r.out.empty() && r.out.back() == '\n') r.out.pop_back();
  return r.out;
}

std::string Repo::resolve(const std::string& ref) const {
  if (ref.starts_with("-")) refuse("--base: expected a commit, branch or tag, got '{}'", ref);
  const ChildResult r = try_git({"rev-parse", "--verify", "--quiet", ref + "^{commit}"});
  if (!r.ok()) refuse("--base: no commit, branch or tag '{}' in {}", ref, root_.string());
  return lines_of(r.out).at(0);
}

std::string Repo::branch() const {
  const ChildResult r = try_git({"symbolic-ref", "--quiet", "--short", "HEAD"});
  return r.ok() ? lines_of(r.out).at(0) : "";
}

bool Repo::has_branch(const std::string& name) const {
  return try_git({"show-ref", "--verify", "--quiet", "refs/heads/" + name}).ok();
}

fs::path Repo::common_dir() const { return fs::path(git({"rev-parse", "--path-format=absolute", "--git-common-dir"})); }

void Repo::refuse_hidden_changes() const {
  // "S path" is out of a sparse checkout, "h path" and every other small letter assumed unchanged.
  std::vector<std::string> hidden;
  for (const auto& f : nul_separated(git({"ls-files", "-v", "-z"})))
    if (f.size() > 2 && (f[0] == 'S' || (f[0] >= 'a' && f[0] <= 'z')) && fs::is_regular_file(root_ / f.substr(2)))
      hidden.push_back(f.substr(2));
  if (hidden.empty()) return;
  std::map<std::string, std::string> index;  // "MODE ID STAGE<tab>path"
  for (const auto& line : nul_separated(git({"ls-files", "--stage", "-z"}))) {
    const std::size_t tab = line.find('\t');
    const auto head = split(line.substr(0, tab), ' ');
    if (tab != std::string::npos && head.size() == 3) index[line.substr(tab + 1)] = head[1];
  }
  for (const auto& [path, id] : files_now(hidden))
    if (index[path] != id)
      refuse(
          "{} was changed, and git was told not to look at it: git update-index --no-assume-unchanged "
          "--no-skip-worktree {}",
          path, path);
}

bool Repo::clean() const {
  refuse_hidden_changes();
  return git({"status", "--porcelain", "--", ".", ":(exclude)profile"}).empty();
}

std::vector<std::string> Repo::changed(const std::string& commit) const {
  refuse_hidden_changes();
  std::set<std::string> names;
  for (const auto& f : nul_separated(git({"diff", "--name-only", "--no-renames", "-z", commit, "--"}))) names.insert(f);
  for (const auto& f : nul_separated(git({"ls-files", "--others", "--exclude-standard", "-z"}))) names.insert(f);
  return {names.begin(), names.end()};
}

std::map<std::string, std::string> Repo::files_of(const std::string& commit) const {
  std::map<std::string, std::string> files;
  for (const auto& line : nul_separated(git({"ls-tree", "-r", "-z", commit}))) {
    const std::size_t tab = line.find('\t');
    const auto head = split(line.substr(0, tab), ' ');
    if (tab != std::string::npos && head.size() == 3) files[line.substr(tab + 1)] = head[2];
  }
  return files;
}

std::vector<std::string> Repo::names_now() const {
  std::set<std::string> names;
  for (auto& f : nul_separated(git({"ls-files", "--cached", "--others", "--exclude-standard", "-z"})))
    if (fs::is_regular_file(root_ / f)) names.insert(std::move(f));
  return {names.begin(), names.end()};
}

std::map<std::string, std::string> Repo::files_now(const std::vector<std::string>& only) const {
  std::map<std::string, std::string> files;
  if (only.empty()) return files;
  const auto ids = lines_of(git({"hash-object", "--stdin-paths"}, join(only, "\n") + "\n"));
  if (ids.size() != only.size()) throw Stop(kFailed, "git hash-object: not one id for each file");
  for (std::size_t i = 0; i < only.size(); ++i) files[only[i]] = ids[i];
  return files;
}

}  // namespace fla::tools
