#include "tools/compare/base_build.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "fla/core/version.h"
#include "tools/command.h"
#include "tools/common/machine.h"
#include "tools/compare/build_graph.h"
#include "tools/compare/loaded_library.h"

namespace fla::tools {

namespace fs = std::filesystem;

namespace {

constexpr const char* kTarget = "fla_shared";

std::string hash_text(const std::string& text) {
  std::uint64_t h = 0xcbf29ce484222325U;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return fmt::format("{:016x}", h);
}

std::string tail_of(const std::string& text, std::size_t lines) {
  const auto all = lines_of(text);
  std::string s;
  for (std::size_t i = all.size() > lines ? all.size() - lines : 0; i < all.size(); ++i) s += "  " + all[i] + "\n";
  return s;
}

void make_folder(const fs::path& p) {
  std::error_code error;
  fs::create_directories(p, error);
  if (error) refuse("cannot make the folder {}: {}", p.string(), error.message());
  if (access(p.c_str(), W_OK) != 0) refuse("cannot write into {}: {}", p.string(), std::strerror(errno));
}

// A worktree that is taken away again however the block ends, and so is one that a killed run left behind.
class Worktree {
 public:
  Worktree(const Repo& repo, fs::path at, const std::string& commit) : repo_(repo), at_(std::move(at)) {
    remove();
    try {
      repo_.git({"worktree", "add", "--detach", "--force", at_.string(), commit});
    } catch (...) {
      remove();
      throw;
    }
  }
  ~Worktree() {
    try {
      remove();
    } catch (const std::exception&) {
      // Interrupted once more: the next run removes it.
      std::error_code ignored;
      fs::remove_all(at_, ignored);
    }
  }
  Worktree(const Worktree&) = delete;
  Worktree& operator=(const Worktree&) = delete;

 private:
  void remove() const {
    std::error_code ignored;
    fs::remove_all(at_, ignored);
    const PauseSignals pause;
    repo_.try_git({"worktree", "prune"});
  }
  const Repo& repo_;
  fs::path at_;
};

// A folder of the cache that holds nothing when the block fails, as on a full disk, is taken away again.
class EntryFolder {
 public:
  explicit EntryFolder(fs::path at) : at_(std::move(at)) { make_folder(at_); }
  ~EntryFolder() {
    std::error_code ignored;
    for (const char* part : {"libfla.so.part", "entry.json.part"}) fs::remove(at_ / part, ignored);
    if (fs::file_size(at_ / kLog, ignored) == 0) fs::remove(at_ / kLog, ignored);
    fs::remove(at_ / "build", ignored);
    fs::remove(at_, ignored);  // where it is empty
  }
  EntryFolder(const EntryFolder&) = delete;
  EntryFolder& operator=(const EntryFolder&) = delete;

  static constexpr const char* kLog = "build.log";

 private:
  fs::path at_;
};

Json flags_json(const std::map<std::string, std::string>& flags) {
  Json j = Json::object();
  for (const auto& [file, text] : flags) j[file] = text;
  return j;
}

// What the cache holds for one commit and one set of flags, when it is sound.
bool load_entry(const fs::path& entry, BuiltLibrary& b) {
  const Json j = Json::parse(read_text(entry / "entry.json"), nullptr, false);
  if (!j.is_object() || j.value("commit", "") != b.commit || !fs::exists(entry / "libfla.so")) return false;
  const Json flags = j.value("flags", Json::object());
  for (const auto& [file, text] : flags.items()) b.flags[file] = text.get<std::string>();
  b.library = entry / "libfla.so";
  b.own = j.value("own", false);
  return true;
}

void store_entry(const fs::path& entry, const fs::path& library, const BuiltLibrary& b) {
  const fs::path part = entry / "libfla.so.part";
  std::error_code error;
  fs::copy_file(fs::canonical(library, error), part, fs::copy_options::overwrite_existing, error);
  if (!error) fs::rename(part, entry / "libfla.so", error);
  if (error) refuse("cannot write {}: {}", (entry / "libfla.so").string(), error.message());
  write_text(entry / "entry.json",
             Json{{"commit", b.commit}, {"own", b.own}, {"flags", flags_json(b.flags)}}.dump(1) + "\n");
}

// Of the library in the build tree, "" when there is none.
std::string own_commit(const BuildTree& tree) {
  if (!fs::exists(tree.library())) return "";
  const auto library = LoadedLibrary::open(tree.library());
  return library ? (*library)->info("commit") : "";
}

void run_logged(const std::vector<std::string>& argv, const fs::path& log, const std::string& ref,
                const std::string& commit) {
  const ChildResult r = run_child(argv, {.log = log});
  if (r.ok()) return;
  refuse("--base: {} ({}) does not build: {}: exit status {}; the end of {}:\n{}", ref, short_commit(commit),
         join(argv, " "), r.code, log.string(), tail_of(read_text(log), 40));
}

}  // namespace

fs::path cache_folder(const std::string& option) {
  if (!option.empty()) return fs::absolute(option);
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return fs::path(value != nullptr ? value : "");
  };
  if (const fs::path p = variable(kCacheVariable); !p.empty()) return fs::absolute(p);
  if (const fs::path p = variable("XDG_CACHE_HOME"); p.is_absolute()) return p / "fla";
  if (const fs::path p = variable("HOME"); p.is_absolute()) return p / ".cache" / "fla";
  refuse("--cache: no folder given, and neither {} nor XDG_CACHE_HOME nor HOME is set", kCacheVariable);
}

std::vector<std::string> code_settings(const BuildTree& tree, bool with_cuda) {
  std::string type = tree.value("CMAKE_BUILD_TYPE");
  if (type.empty()) type = "Release";
  std::string upper = type;
  std::transform(upper.begin(), upper.end(), upper.begin(), [](unsigned char c) { return std::toupper(c); });
  std::vector<std::string> settings = {"-DCMAKE_BUILD_TYPE=" + type};
  std::vector<std::string> keys = {"CMAKE_CXX_COMPILER", "CMAKE_CXX_FLAGS", "CMAKE_CXX_FLAGS_" + upper,
                                   "CMAKE_PREFIX_PATH", "FLA_SANITIZE"};
  if (with_cuda)
    keys.insert(keys.end(), {"FLA_CUDA", "FLA_CUDA_EMULATE", "FLA_CUDA_ARCHITECTURES", "CMAKE_CUDA_COMPILER",
                             "FLA_NVCC", "CMAKE_CUDA_HOST_COMPILER", "CMAKE_CUDA_FLAGS", "CMAKE_CUDA_FLAGS_" + upper});
  for (const std::string& key : keys)
    if (const auto it = tree.cache.find(key); it != tree.cache.end())
      settings.push_back(fmt::format("-D{}={}", key, it->second));
  return settings;
}

std::map<std::string, std::string> compile_flags(const fs::path& commands, const fs::path& root) {
  std::map<std::string, std::string> flags;
  const Json j = Json::parse(read_text(commands), nullptr, false);
  if (!j.is_array()) return flags;
  for (const auto& entry : j) {
    const std::string file = fs::path(entry.value("file", "")).lexically_relative(root).generic_string();
    if (!file.starts_with("fla/")) continue;
    std::string text;
    const auto words = split(entry.value("command", ""), ' ');
    for (std::size_t i = 0; i < words.size(); ++i) {
      const std::string& w = words[i];  // "--generate-code=..." is in quotes
      if (w == "-I" || w == "-isystem" || w == "-o" || w == "-c" || w == "-MT" || w == "-MF") {
        ++i;
        continue;
      }
      // Paths and warnings change no code; the rest does, or may.
      if ((!w.starts_with("-") && !w.starts_with("\"-")) || w.starts_with("-I") || w.starts_with("-W") || w == "-MD")
        continue;
      text += (text.empty() ? "" : " ") + w;
    }
    flags[file] = text;
  }
  return flags;
}

std::vector<std::string> flag_differences(const std::map<std::string, std::string>& base,
                                          const std::map<std::string, std::string>& candidate) {
  std::vector<std::string> list;
  for (const auto& [file, flags] : base)
    if (const auto it = candidate.find(file); it != candidate.end() && it->second != flags)
      list.push_back(fmt::format("{}: base '{}', candidate '{}'", file, flags, it->second));
  return list;
}

BuiltLibrary candidate_library(const Repo& repo, const BuildTree& tree) {
  BuiltLibrary b;
  b.library = tree.library();
  if (!fs::exists(b.library)) refuse("--base: {} is missing; build it with `make build`", b.library.string());
  // The gate too: an old one would prove old code.
  const auto newer = sources_newer_than_build(tree, {b.library, tree.directory / "bin" / "fla_gate"});
  if (!newer.empty())
    refuse("--base: the build is older than {}{}; build first", newer.front(),
           newer.size() > 1 ? fmt::format(" and {} more files", newer.size() - 1) : "");
  b.commit = repo.head();
  b.flags = compile_flags(tree.directory / "compile_commands.json", repo.root());
  return b;
}

BuiltLibrary build_base(const Repo& repo, const BuildTree& tree, const std::string& ref, const fs::path& cache,
                        bool on_gpu) {
  BuiltLibrary b;
  b.ref = ref;
  b.commit = repo.resolve(ref);
  const auto settings = code_settings(tree, on_gpu);
  const std::string key =
      short_commit(b.commit) + "-" + hash_text(join(settings, "\n") + "\n" + build_info().compiler).substr(0, 8);
  const fs::path entry = cache / "base" / key;
  make_folder(cache / "base");
  const FileLock lock(cache / "base" / (key + ".lock"), FileLock::When::Wait);
  const EntryFolder folder(entry);
  if (load_entry(entry, b)) {
    b.from_cache = true;
    return b;
  }
  if (own_commit(tree) == short_commit(b.commit) && repo.clean()) {
    b.own = true;
    b.flags = compile_flags(tree.directory / "compile_commands.json", repo.root());
    store_entry(entry, tree.library(), b);
  } else {
    const fs::path source = entry / "source", build = entry / "build", log = entry / EntryFolder::kLog;
    fs::remove(log);
    print(stderr, "verify: building {} ({}) in {}\n", ref, short_commit(b.commit), entry.string());
    const Worktree worktree(repo, source, b.commit);
    std::vector<std::string> configure = {"cmake", "-S", source.string(), "-B", build.string(), "-Wno-dev"};
    if (const std::string g = tree.value("CMAKE_GENERATOR"); !g.empty()) configure.insert(configure.end(), {"-G", g});
    configure.insert(configure.end(), settings.begin(), settings.end());
    for (const char* off : {"FLA_BUILD_TOOLS", "FLA_BUILD_TESTS", "FLA_INSTALL"})
      configure.push_back(fmt::format("-D{}=OFF", off));
    run_logged(configure, log, ref, b.commit);
    run_logged({"cmake", "--build", build.string(), "--target", kTarget, "-j", std::to_string(machine().processors)},
               log, ref, b.commit);
    b.flags = compile_flags(build / "compile_commands.json", source);
    if (!fs::exists(build / "lib" / "libfla.so"))
      refuse("--base: {} built no lib/libfla.so; see {}", ref, log.string());
    store_entry(entry, build / "lib" / "libfla.so", b);
    std::error_code ignored;
    fs::remove_all(build, ignored);
  }
  b.library = entry / "libfla.so";
  return b;
}

}  // namespace fla::tools
