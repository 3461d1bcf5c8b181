// The frozen scope (tools/frozen_scope.txt): which files it names, and which of them differ between a commit and now.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tools/compare/repo.h"

namespace fla::tools {

// Does `pattern` (see tools/frozen_scope.txt) name `path`?
bool matches(std::string_view pattern, std::string_view path);
bool matches_any(const std::vector<std::string>& patterns, std::string_view path);

std::vector<std::string> parse_frozen_scope(const std::string& text);

struct FrozenDifference {
  std::string path, what;  // "edited", "removed", "added"
};
// By the patterns of both sides together, so that a pattern cannot be taken away to free a file.
std::vector<FrozenDifference> frozen_differences(const Repo& repo, const std::string& commit);
// Ends with exit code 3 and the names when there are any.
void require_frozen(const Repo& repo, const std::string& commit, const std::string& ref);

}  // namespace fla::tools
