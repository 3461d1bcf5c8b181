#include "tools/loop/frozen_scope.h"

#include <algorithm>
#include <set>

#include "tools/command.h"

namespace fla::tools {
namespace {

constexpr const char* kList = "tools/frozen_scope.txt";

bool match_part(std::string_view pattern, std::string_view part, std::string& star) {
  const std::size_t at = pattern.find_first_of("*=");
  if (at == std::string_view::npos) return pattern == part;
  if (!part.starts_with(pattern.substr(0, at))) return false;
  part.remove_prefix(at);
  const std::string_view rest = pattern.substr(at + 1);
  if (pattern[at] == '=') return part.starts_with(star) && match_part(rest, part.substr(star.size()), star);
  for (std::size_t n = 0; n <= part.size(); ++n) {
    std::string found = star.empty() ? std::string(part.substr(0, n)) : star;
    if (match_part(rest, part.substr(n), found)) {
      star = found;
      return true;
    }
  }
  return false;
}

}  // namespace

bool matches(std::string_view pattern, std::string_view path) {
  constexpr std::string_view kBelow = "/**";
  if (pattern.ends_with(kBelow)) return path.starts_with(pattern.substr(0, pattern.size() - 2));
  std::string star;
  for (;;) {
    const std::size_t p = pattern.find('/'), s = path.find('/');
    if ((p == std::string_view::npos) != (s == std::string_view::npos)) return false;
    if (!match_part(pattern.substr(0, p), path.substr(0, s), star)) return false;
    if (p == std::string_view::npos) return true;
    pattern.remove_prefix(p + 1);
    path.remove_prefix(s + 1);
  }
}

bool matches_any(const std::vector<std::string>& patterns, std::string_view path) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& p) { return matches(p, path); });
}

std::vector<std::string> parse_frozen_scope(const std::string& text) {
  std::vector<std::string> patterns;
  for (const std::string& line : lines_of(text))
    if (!line.empty() && line[0] != '#') patterns.push_back(line);
  return patterns;
}

std::vector<FrozenDifference> frozen_differences(const Repo& repo, const std::string& commit) {
  std::vector<std::string> patterns = parse_frozen_scope(read_text(repo.root() / kList));
  const ChildResult before = repo.try_git({"show", commit + ":" + kList});
  if (before.ok())
    for (auto& p : parse_frozen_scope(before.out)) patterns.push_back(std::move(p));
  if (patterns.empty()) refuse("{}: expected the list of frozen files, found none", kList);

  std::vector<std::string> names = repo.names_now();
  std::erase_if(names, [&](const std::string& n) { return !matches_any(patterns, n); });
  const auto now = repo.files_now(names);
  auto then = repo.files_of(commit);
  std::erase_if(then, [&](const auto& f) { return !matches_any(patterns, f.first); });

  std::vector<FrozenDifference> list;
  for (const auto& [path, id] : then) {
    const auto it = now.find(path);
    if (it == now.end())
      list.push_back({path, "removed"});
    else if (it->second != id)
      list.push_back({path, "edited"});
  }
  for (const auto& [path, id] : now)
    if (!then.contains(path)) list.push_back({path, "added"});
  return list;
}

void require_frozen(const Repo& repo, const std::string& commit, const std::string& ref) {
  const auto list = frozen_differences(repo, commit);
  if (list.empty()) return;
  std::string text =
      fmt::format("frozen scope violated: these differ from {} ({}), so nothing that was measured could be compared\n",
                  ref, short_commit(commit));
  for (const auto& d : list) text += fmt::format("  {:8} {}\n", d.what, d.path);
  text += "a change to them is a change of its own: commit it, and take that commit as the base";
  throw Stop(kFrozen, text);
}

}  // namespace fla::tools
