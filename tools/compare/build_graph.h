// What the build itself knows: which sources each object was made from (Ninja's dependency log), which objects use
// which others (their symbols), and so which operator families a changed file reaches.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "tools/compare/repo.h"

namespace fla::tools {

struct ObjectDeps {
  std::string object;                // relative to the build folder
  std::vector<std::string> sources;  // absolute
};
// Of `ninja -t deps`.
std::vector<ObjectDeps> parse_ninja_deps(const std::string& text, const std::filesystem::path& build);
std::vector<ObjectDeps> read_deps(const BuildTree& tree);

struct ObjectSymbols {
  std::set<std::string> defines, uses;
};
// Of `nm --format=posix -A OBJECT...`, by object.
std::map<std::string, ObjectSymbols> parse_symbols(const std::string& text);

// "fla/ops/gla/gla_cpu.cc" -> "gla"; empty for what no single family owns (common code, core).
std::string family_of(const std::string& path);

struct Reach {
  std::set<std::string> families;
  bool everything = false;              // a file that decides for all of them: the build, the gate's own code
  std::vector<std::string> unaffected;  // changed files that reach no operator (documents)
};
// `changed`: paths relative to the source folder. `families`: those that exist.
Reach reach_of(const std::vector<std::string>& changed, const std::vector<ObjectDeps>& deps,
               const std::map<std::string, ObjectSymbols>& symbols, const std::filesystem::path& source,
               const std::set<std::string>& families);
Reach reach_of(const std::vector<std::string>& changed, const BuildTree& tree, const std::set<std::string>& families);

// Sources of the library that were changed after the first of `built` was linked; relative to the source folder.
std::vector<std::string> sources_newer_than_build(const BuildTree& tree,
                                                  const std::vector<std::filesystem::path>& built);

}  // namespace fla::tools
