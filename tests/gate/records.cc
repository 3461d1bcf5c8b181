#include "tests/gate/records.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <new>
#include <sstream>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "fla/registry/observe.h"
#include "fla/registry/registry.h"

namespace fla::gate {

// Generated from the files of tests/gate/records: name and text of each.
struct RecordFile {
  const char* name;
  const char* text;
};
extern const RecordFile kRecordFiles[];
extern const std::size_t kRecordFileCount;

namespace {

using Lines = std::map<std::string, std::vector<std::string>>;

// "TEST: WORD WORD" of every line that is no comment.
Lines read_records(const std::string& name) {
  Lines lines;
  for (std::size_t i = 0; i < kRecordFileCount; ++i) {
    if (name != kRecordFiles[i].name) continue;
    std::istringstream in(kRecordFiles[i].text);
    for (std::string line; std::getline(in, line);) {
      const std::size_t colon = line.find(": ");
      if (line.empty() || line[0] == '#' || colon == std::string::npos) continue;
      std::istringstream words(line.substr(colon + 2));
      auto& to = lines[line.substr(0, colon)];
      for (std::string word; words >> word;) to.push_back(word);
    }
  }
  return lines;
}

// A file's lines, read once.
const Lines& records(const std::string& name) {
  static std::map<std::string, Lines> read;
  const auto [it, added] = read.try_emplace(name);
  if (added) it->second = read_records(name);
  return it->second;
}
const Lines& exercises() { return records("exercises.txt"); }

std::map<std::string, std::string>& owners() {
  static std::map<std::string, std::string> of_test;
  return of_test;
}

std::string full_name(const ::testing::TestInfo& t) { return std::string(t.test_suite_name()) + "." + t.name(); }

// One flag for each function, in memory that forked children share.
struct Seen {
  std::vector<std::string> names;                              // of forward functions
  std::unordered_map<const FunctionSpec*, std::size_t> index;  // a backward counts as its forward
  std::atomic<bool>* flags = nullptr;

  Seen() {
    std::map<std::string, std::size_t> by_name;
    for (const Registry::Entry* e : Registry::global().entries()) {
      const std::string& name = e->spec.is_backward() ? e->spec.forward : e->spec.name;
      const auto [it, added] = by_name.try_emplace(name, names.size());
      if (added) names.push_back(name);
      index[&e->spec] = it->second;
    }
    void* memory =
        mmap(nullptr, names.size() * sizeof(*flags), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    flags = static_cast<std::atomic<bool>*>(memory);
    for (std::size_t i = 0; i < names.size(); ++i) new (flags + i) std::atomic<bool>(false);
  }
  // Read first: threads that call the same function do not fight for the line.
  void note(std::size_t i) {
    if (!flags[i].load(std::memory_order_relaxed)) flags[i].store(true, std::memory_order_relaxed);
  }
  void clear() {
    for (std::size_t i = 0; i < names.size(); ++i) flags[i].store(false, std::memory_order_relaxed);
  }
};
Seen& seen() {
  static Seen s;
  return s;
}

bool& recording_flag() {
  static bool on = false;
  return on;
}

void observe(const FunctionSpec& spec) {
  Seen& s = seen();
  if (const auto it = s.index.find(&spec); it != s.index.end()) s.note(it->second);  // else of a test's own registry
}

std::string joined(const Names& names) {
  std::string s;
  for (const auto& n : names) s += (s.empty() ? "" : " ") + n;
  return s;
}

class Watch : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo& /*test*/) override { seen().clear(); }
  void OnTestEnd(const ::testing::TestInfo& test) override {
    const std::string name = full_name(test);
    Names called;
    for (std::size_t i = 0; i < seen().names.size(); ++i)
      if (seen().flags[i].load(std::memory_order_relaxed)) called.insert(seen().names[i]);
    if (recording()) {
      if (const auto it = owners().find(name); it != owners().end()) called.erase(it->second);
      ::testing::Test::RecordProperty("exercises", joined(called));
      return;
    }
    for (const auto& f : exercised_by(name)) called.erase(f);
    if (!called.empty())
      ADD_FAILURE() << name << " exercises " << joined(called)
                    << " and tests/gate/records/exercises.txt does not say so, so the gate of that would not run it: "
                       "fla gate all -k '"
                    << name << "' --record";
  }
};

}  // namespace

void belongs_to(const std::string& test, const std::string& function) { owners()[test] = function; }

Names exercised_by(const std::string& test) {
  Names names;
  if (const auto it = owners().find(test); it != owners().end()) names.insert(it->second);
  if (const auto it = exercises().find(test); it != exercises().end())
    names.insert(it->second.begin(), it->second.end());
  return names;
}

void list_exercises(bool of_one_function) {
  const auto& unit = *::testing::UnitTest::GetInstance();
  for (int i = 0; i < unit.total_test_suite_count(); ++i) {
    const ::testing::TestSuite& suite = *unit.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j) {
      const std::string name = full_name(*suite.GetTestInfo(j));
      if (of_one_function && !owners().contains(name)) continue;
      std::printf("exercises %s: %s\n", name.c_str(), joined(exercised_by(name)).c_str());
    }
  }
}

void watch_exercises(bool recording) {
  recording_flag() = recording;
  seen();
  observe_calls(observe);
  // Behind the printer of results, which must see what this one adds: a test's end is told in reverse order.
  ::testing::UnitTest::GetInstance()->listeners().Append(new Watch);
}

bool recording() { return recording_flag(); }

void note_exercise(const std::string& function) {
  Seen& s = seen();
  for (std::size_t i = 0; i < s.names.size(); ++i)
    if (s.names[i] == function) return s.note(i);
  ADD_FAILURE() << "no function " << function;
}

std::optional<Refusals> recorded_refusals(const std::string& backend, const std::string& test) {
  const std::string name = "refusals_" + backend + ".txt";
  if (std::none_of(kRecordFiles, kRecordFiles + kRecordFileCount, [&](const RecordFile& f) { return name == f.name; }))
    return std::nullopt;
  static std::map<std::string, std::map<std::string, std::vector<std::string>>> files;
  const auto [file, added] = files.try_emplace(backend);
  if (added) file->second = read_records(name);
  const auto it = file->second.find(test);
  if (it == file->second.end() || it->second.empty()) return Refusals{};
  return Refusals{std::atoi(it->second[0].c_str()), it->second.size() > 1 && it->second[1] == "none-taken"};
}

std::vector<std::string> recorded_kernels(const std::string& backend, const std::string& test) {
  const Lines& lines = records("kernels_" + backend + ".txt");
  const auto it = lines.find(test);
  return it != lines.end() ? it->second : std::vector<std::string>();
}

Names recorded_kernels(const std::string& backend) {
  Names names;
  for (const auto& [test, kernels] : records("kernels_" + backend + ".txt"))
    names.insert(kernels.begin(), kernels.end());
  return names;
}

std::string first_test(const std::string& backend, const std::string& kernel) {
  for (const auto& [test, kernels] : records("kernels_" + backend + ".txt"))
    if (std::ranges::find(kernels, kernel) != kernels.end()) return test;
  return {};
}

Names unreached_kernels(const std::string& backend) {
  Names names;
  for (const auto& [kernel, why] : records("unreached_" + backend + ".txt")) names.insert(kernel);
  return names;
}

Names without_a_case(const std::vector<std::string>& names, const Names& recorded, const Names& unreached) {
  Names left;
  for (const auto& n : names)
    if (!recorded.contains(n) && !unreached.contains(n)) left.insert(n);
  return left;
}

}  // namespace fla::gate
