#include "tools/compare/verify_base.h"

#include "tools/loop/frozen_scope.h"

namespace fla::tools {
namespace {

// The library says itself which commit it was built from; anything else than expected would time the wrong build.
std::shared_ptr<LoadedLibrary> load(const BuiltLibrary& b, const std::string& expected, const char* who) {
  auto library = check(LoadedLibrary::open(b.library));
  if (const std::string commit = library->info("commit"); commit != expected)
    refuse("--base: the {}'s library {} says it was built from {}, expected {}{}", who, b.library.string(), commit,
           expected, b.ref.empty() ? "; build first" : "");
  return library;
}

}  // namespace

BaseSetup::BaseSetup(const std::string& ref, const std::string& cache, const std::string& device)
    : tree_(this_build_tree("--base")), repo_(tree_.source), ref_(ref), cache_(cache), on_gpu_(device != "cpu") {
  require_frozen(repo_, repo_.resolve(ref), ref);
}

void BaseSetup::build() {
  candidate_ = candidate_library(repo_, tree_);
  base_ = build_base(repo_, tree_, ref_, cache_folder(cache_), on_gpu_);
}

BaseComparison BaseSetup::compare(const std::vector<const Registry::Entry*>& ops, const BenchOptions& o) const {
  BaseComparison c;
  c.base = base_;
  const auto base = load(base_, short_commit(base_.commit), "base");
  const auto candidate =
      load(candidate_, short_commit(candidate_.commit) + (repo_.clean() ? "" : "-dirty"), "candidate");
  c.candidate_commit = candidate->info("commit");
  c.flag_differences = flag_differences(base_.flags, candidate_.flags);
  for (const char* key : {"flags", "compiler", "build_type", "cuda"})
    if (base->info(key) != candidate->info(key))
      c.flag_differences.push_back(
          fmt::format("{}: base '{}', candidate '{}'", key, base->info(key), candidate->info(key)));
  c.run = run_paired(ops, o, base, candidate, c.flag_differences.empty());
  return c;
}

}  // namespace fla::tools
