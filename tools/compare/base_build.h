// The base of a comparison: the library of another commit, built the way this one was, proven by its embedded commit.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "tools/compare/repo.h"

namespace fla::tools {

inline constexpr const char* kCacheVariable = "FLA_CACHE_DIR";
// `option`, else $FLA_CACHE_DIR, else $XDG_CACHE_HOME/fla, else ~/.cache/fla.
std::filesystem::path cache_folder(const std::string& option);

struct BuiltLibrary {
  std::filesystem::path library;
  std::string ref, commit;  // commit: full
  // Of each source of the library, the flags that change its code.
  std::map<std::string, std::string> flags;
  bool from_cache = false, own = false;  // own: a copy of the candidate's, whose tree is clean at the same commit
};

// The build settings that decide what code comes out, as CMake arguments.
std::vector<std::string> code_settings(const BuildTree& tree, bool with_cuda);
// Flags by source file, out of a compile_commands.json; paths relative to `root`.
std::map<std::string, std::string> compile_flags(const std::filesystem::path& commands,
                                                 const std::filesystem::path& root);
// Sources that both sides compile, but not with the same flags: "fla/x.cc: base ..., candidate ...".
std::vector<std::string> flag_differences(const std::map<std::string, std::string>& base,
                                          const std::map<std::string, std::string>& candidate);

// From the cache, or built now in a worktree of its own, which is gone afterwards however this ends. A commit that does
// not build is refused with the end of its log. on_gpu: with CUDA, as the tree itself; a CPU needs nothing of it.
BuiltLibrary build_base(const Repo& repo, const BuildTree& tree, const std::string& ref,
                        const std::filesystem::path& cache, bool on_gpu);
// The library beside this program. Refused when sources are newer than it is.
BuiltLibrary candidate_library(const Repo& repo, const BuildTree& tree);

}  // namespace fla::tools
