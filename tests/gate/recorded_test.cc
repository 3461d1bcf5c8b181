// Recorded cases: what FLA computed, recomputed by every backend in F32, BF16 and F16. The files come from outside and
// have the last word. FLA_CPP_GOLDEN names their folder; without it the subset in tests/golden is used. Also the driver
// itself: a file it must refuse, a value it must catch.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "tests/gate/gate.h"
#include "tools/common/fixture.h"
#include "tools/common/placement.h"
#include "tools/common/safetensors.h"

namespace fla::gate {
namespace {

namespace fs = std::filesystem;
using tools::CheckOptions;
using tools::CheckResult;

fs::path golden() {
  const char* given = std::getenv("FLA_CPP_GOLDEN");
  return given != nullptr && *given != '\0' ? fs::path(given) : fs::path(FLA_SOURCE_DIR) / "tests/golden";
}

// Functions that FLA does not have are recorded in this tree alone.
std::vector<fs::path> family_files(const std::string& operation) {
  const fs::path own = fs::path(FLA_SOURCE_DIR) / "tests/golden";
  std::vector<fs::path> files = tools::find_cases(golden() / operation);
  if (golden() == own) return files;
  for (const auto& file : tools::find_cases(own / operation)) files.push_back(file);
  return files;
}

void Recorded(const Registry::Entry& e) {
  const std::vector<fs::path> files = family_files(e.spec.operation);
  ASSERT_FALSE(files.empty()) << "no recorded case in " << golden() / e.spec.operation;
  std::vector<std::string> who = backends(e);
  who.emplace_back(kReference);
  for (const auto& backend : who)
    for (const DType dtype : {DType::F32, DType::BF16, DType::F16}) {
      int ran = 0;
      for (const auto& file : files) {
        const auto results = tools::check_file(
            file, {.function = e.spec.name, .dtype = dtype, .device = tools::device_of(context(backend))},
            context(backend));
        ASSERT_TRUE(results.ok()) << results.status().message();
        for (const CheckResult& r : *results) {
          ++ran;
          if (count_call(r.status != CheckResult::Status::NotCovered)) continue;
          EXPECT_TRUE(r.ok()) << backend << " " << name_of(dtype) << " " << r.file << ": " << r.reason;
          EXPECT_EQ(r.backend, backend) << r.file;
          EXPECT_FALSE(r.tensors.empty()) << r.file;
        }
      }
      EXPECT_GT(ran, 0) << "no recorded case names " << e.spec.name;
    }
}
// The contract adds no case for deprecated names; that they equal what serves them is an equivalence.
const bool registered = for_every_backend("Recorded", Recorded, [](const FunctionSpec& s) { return !s.deprecated; });

TEST(Recorded, EveryFileOfAFamilyIsCovered) {
  int files = 0;
  for (const auto& operation : Registry::global().operations())
    for (const auto& file : family_files(operation)) {
      ++files;
      const auto results = tools::check_file(file, {}, context("cpu"));
      ASSERT_TRUE(results.ok()) << results.status().message();
      EXPECT_FALSE(results->empty()) << file;
      for (const auto& r : *results)
        EXPECT_NE(r.status, CheckResult::Status::NotCovered) << file << ": " << r.function << ": " << r.reason;
    }
  EXPECT_GT(files, 0) << golden();
}

// ---- the driver --------------------------------------------------------------------------------------------------

// A copy of a recorded case with its tensors and metadata to change.
struct Draft {
  std::shared_ptr<tools::SafeTensorsFile> file;
  std::map<std::string, Buffer> tensors;
  std::map<std::string, std::string> metadata;
  fs::path path;

  explicit Draft(const fs::path& from = fs::path(FLA_SOURCE_DIR) / "tests/golden/gla/scale.safetensors") {
    auto opened = tools::SafeTensorsFile::open(from);
    if (!opened) throw std::runtime_error(opened.status().message());
    file = *opened;
    for (const auto& [name, t] : file->tensors()) tensors.emplace(name, tools::clone(t));
    metadata = file->metadata();
    static int count = 0;
    path = fs::temp_directory_path() /
           ("fla_gate_" + std::to_string(getpid()) + "_" + std::to_string(count++) + ".safetensors");
  }
  ~Draft() {
    std::error_code ignored;
    fs::remove(path, ignored);
  }
  Draft(const Draft&) = delete;
  Draft& operator=(const Draft&) = delete;

  Result<std::vector<CheckResult>> check(const CheckOptions& o = {}) const {
    std::vector<std::pair<std::string, TensorView>> list;
    for (const auto& [name, b] : tensors) list.emplace_back(name, b.view());
    if (Status s = tools::write_safetensors(path, list, metadata); !s) return s;
    return tools::check_file(path, o, context("cpu"));
  }
  void flag(const std::string& name, const nlohmann::json& v) {
    auto j = nlohmann::json::parse(metadata["flags"]);
    j[name] = v;
    metadata["flags"] = j.dump();
  }
};

void expect_error(const Result<std::vector<CheckResult>>& r, const std::string& names) {
  ASSERT_FALSE(r.ok());
  EXPECT_EQ(r.status().code(), Code::InvalidArgument);
  EXPECT_NE(r.status().message().find(names), std::string::npos) << r.status().message();
}

TEST(RecordedDriver, UntouchedCopyPasses) {
  const Draft d;
  const auto r = d.check();
  ASSERT_TRUE(r.ok()) << r.status().message();
  ASSERT_EQ(r->size(), 2U);
  for (const auto& x : *r) EXPECT_TRUE(x.ok()) << x.reason;
}

TEST(RecordedDriver, CatchesOneWrongValueInEveryTensor) {
  const Draft pristine;
  for (const auto& [name, b] : pristine.tensors) {
    if (!name.starts_with("out.") && !name.starts_with("grad.")) continue;
    Draft d;
    std::vector<double> x = tools::values(d.tensors.at(name).view());
    x[x.size() / 2] += 1.0;
    tools::assign(d.tensors.at(name).view(), x);
    const auto r = d.check();
    ASSERT_TRUE(r.ok()) << r.status().message();
    for (const auto& result : *r) {
      EXPECT_EQ(result.status, CheckResult::Status::Failed) << name;
      EXPECT_NE(result.reason.find(name), std::string::npos) << result.reason;
      for (const auto& t : result.tensors) EXPECT_EQ(t.ok, t.name != name) << t.name;
    }
  }
}

TEST(RecordedDriver, NaNFails) {
  Draft d;
  std::vector<double> x = tools::values(d.tensors.at("q").view());
  x[3] = std::numeric_limits<double>::quiet_NaN();
  tools::assign(d.tensors.at("q").view(), x);
  const auto r = d.check();
  ASSERT_TRUE(r.ok());
  for (const auto& result : *r) {
    EXPECT_FALSE(result.ok());
    EXPECT_TRUE(std::isnan(result.tensors.front().R) || !result.tensors.front().ok ||
                result.tensors.front().name != "out.o");
  }
}

TEST(RecordedDriver, UnknownTensorIsAnError) {
  Draft d;
  d.tensors.emplace("beta", Buffer(DType::F32, {1, 35, 2}, tools::Fill::Zero));
  expect_error(d.check(), "beta");
}

TEST(RecordedDriver, UnknownGradientIsAnError) {
  Draft d;
  d.tensors.emplace("grad.beta", Buffer(DType::F32, {1, 35, 2}, tools::Fill::Zero));
  expect_error(d.check(), "grad.beta");
}

TEST(RecordedDriver, UpstreamWithoutOutputIsAnError) {
  Draft d;
  d.tensors.emplace("grad_out.lse", Buffer(DType::F32, {1, 35, 2}, tools::Fill::Zero));
  expect_error(d.check(), "grad_out.lse");
}

TEST(RecordedDriver, UnknownFlagIsAnError) {
  Draft d;
  d.flag("safe_gate", true);
  expect_error(d.check(), "safe_gate");
}

TEST(RecordedDriver, SiblingsFlagIsDroppedAndReported) {
  Draft d;
  d.flag("reverse", false);  // of fused_recurrent_gla, not of chunk_gla
  const auto r = d.check();
  ASSERT_TRUE(r.ok()) << r.status().message();
  for (const auto& x : *r) {
    EXPECT_TRUE(x.ok()) << x.reason;
    EXPECT_EQ(x.dropped_flags,
              x.function == "chunk_gla" ? std::vector<std::string>{"reverse"} : std::vector<std::string>{});
  }
}

TEST(RecordedDriver, AuxIsIgnoredAndDriverFlagsAreNotFlags) {
  Draft d;
  d.tensors.emplace("aux.anything", Buffer(DType::F32, {3}));
  d.flag("min_relative_gap", 0.5);
  const auto r = d.check();
  ASSERT_TRUE(r.ok()) << r.status().message();
  for (const auto& x : *r) EXPECT_TRUE(x.ok()) << x.reason;
}

TEST(RecordedDriver, WrongDefaultScaleFails) {
  Draft d;
  d.flag("scale_is_default", true);  // the file's scale is 1, the function's default is not
  const auto r = d.check();
  ASSERT_TRUE(r.ok()) << r.status().message();
  for (const auto& x : *r) {
    EXPECT_EQ(x.status, CheckResult::Status::Failed);
    EXPECT_NE(x.reason.find("scale"), std::string::npos) << x.reason;
  }
}

TEST(RecordedDriver, UnknownFunctionIsNotCovered) {
  Draft d;
  d.metadata["functions"] = R"(["chunk_gla", "chunk_of_the_future"])";
  const auto r = d.check();
  ASSERT_TRUE(r.ok()) << r.status().message();
  ASSERT_EQ(r->size(), 2U);
  EXPECT_TRUE((*r)[0].ok());
  EXPECT_EQ((*r)[1].status, CheckResult::Status::NotCovered);
  EXPECT_NE((*r)[1].reason.find("chunk_of_the_future"), std::string::npos);
}

TEST(RecordedDriver, MissingOutputFails) {
  Draft d;
  d.tensors.emplace("out.lse", Buffer(DType::F32, {1, 35, 2}, tools::Fill::Zero));
  const auto r = d.check();
  ASSERT_TRUE(r.ok()) << r.status().message();
  for (const auto& x : *r) EXPECT_EQ(x.status, CheckResult::Status::Failed);
}

TEST(RecordedDriver, SplitRunIsJoined) {
  Draft d;
  d.flag("split", 17);
  std::erase_if(d.tensors, [](const auto& x) { return x.first.starts_with("grad"); });
  auto r = d.check();
  ASSERT_TRUE(r.ok()) << r.status().message();
  for (const auto& x : *r) {
    EXPECT_TRUE(x.ok()) << x.reason;
    EXPECT_EQ(x.tensors.size(), 2U);
  }
  std::vector<double> x = tools::values(d.tensors.at("out.o").view());
  x.back() += 1.0;
  tools::assign(d.tensors.at("out.o").view(), x);
  r = d.check();
  ASSERT_TRUE(r.ok());
  for (const auto& result : *r) EXPECT_FALSE(result.ok());
}

TEST(RecordedDriver, BadMetadataIsAnError) {
  for (const char* key : {"functions", "grad_functions", "flags", "argument_names"}) {
    Draft d;
    d.metadata[key] = "{\"a\": [";
    expect_error(d.check(), key);
  }
  Draft d;
  d.metadata["scale"] = "one";
  expect_error(d.check(), "scale");
  EXPECT_FALSE(tools::check_file("/nonexistent/file.safetensors", {}, context("cpu")).ok());
}

// The limits of the contract's README.
TEST(RecordedDriver, LimitsFollowBackendAndType) {
  const Draft d;
  const auto limit = [&](const char* backend, DType t, const char* tensor) {
    const auto r = d.check({.backend = backend, .function = "chunk_gla", .dtype = t});
    if (r.ok() && r->size() == 1)
      for (const auto& x : r->front().tensors)
        if (x.name == tensor) return x.limit;
    return -1.0;
  };
  EXPECT_DOUBLE_EQ(limit("reference", DType::F32, "out.o"), 1e-5);
  EXPECT_DOUBLE_EQ(limit("cpu", DType::F32, "grad.q"), 1e-4);
  EXPECT_DOUBLE_EQ(limit("cpu", DType::F16, "out.o"), 0.004);
  EXPECT_DOUBLE_EQ(limit("cpu", DType::BF16, "out.o"), 0.005);
  EXPECT_DOUBLE_EQ(limit("cpu", DType::BF16, "grad.q"), 0.01);
}

// ---- the comparison ----------------------------------------------------------------------------------------------

Buffer tensor(std::vector<double> x) {
  Buffer b(DType::F32, {static_cast<std::int64_t>(x.size())});
  tools::assign(b.view(), x);
  return b;
}

TEST(Compare, FollowsTheContract) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  const auto ok = [](const Buffer& x, const Buffer& y, tools::Limits l = {.R = 0.1}) {
    return tools::compare(x.view(), y.view(), l).ok;
  };
  EXPECT_TRUE(ok(tensor({1, 2}), tensor({1, 2})));
  EXPECT_TRUE(ok(tensor({0, 1e-7}), tensor({0, 1e-6})));  // the floor, whatever R is
  EXPECT_FALSE(ok(tensor({0, 0}), tensor({0, 2e-6})));    // a zero reference passes through the floor alone
  EXPECT_TRUE(ok(tensor({0, 0}), tensor({0, 2e-6}), {.R = 0.1, .zero = 1e-5}));
  EXPECT_FALSE(ok(tensor({nan, 1}), tensor({nan, 1})));
  EXPECT_FALSE(ok(tensor({1, 1}), tensor({nan, 1})));
  EXPECT_FALSE(ok(tensor({1, 1}), tensor({inf, 1})));
  EXPECT_FALSE(ok(tensor({inf, 1}), tensor({inf, 1})));
  EXPECT_FALSE(ok(tensor({1, 1, 1}), tensor({1, 1})));
  // The reference's rms divides: the same pair in the other order has another R.
  EXPECT_TRUE(ok(tensor({10, 10}), tensor({9.05, 9.05})));
  EXPECT_FALSE(ok(tensor({9.05, 9.05}), tensor({10, 10})));
  const auto d = tools::compare(tensor({1, 2, 3}).view(), tensor({1, 2.5, 3}).view(), {.R = 1e-4});
  EXPECT_NEAR(d.max_abs, 0.5, 1e-6);
  EXPECT_EQ(d.index, std::vector<std::int64_t>{1});
}

TEST(Compare, BlockErrorShowsWhatTheWholeHides) {
  const Buffer x(DType::F32, {64 * 100, 4}), y(DType::F32, {64 * 100, 4});
  tools::fill(x.view(), 1.0);
  tools::fill(y.view(), 1.0);
  tools::fill(tools::slice(y.view(), 0, 64 * 70, 64), 1.2);  // one block of a hundred
  const auto d = tools::compare(x.view(), y.view(), {.R = 0.05});
  EXPECT_TRUE(d.ok);
  EXPECT_NEAR(d.R, 0.02, 1e-3);
  EXPECT_NEAR(d.block_R, 0.2, 1e-3);
  EXPECT_EQ(d.block, 70);
  EXPECT_FALSE(tools::compare(x.view(), y.view(), {.R = 0.05, .block = 0.1}).ok);
}

TEST(Buffer, GuardsSeeEveryByteOutside) {
  for (const Layout& l : {Layout{}, Layout{.row_pad = 2}, Layout{.last_stride = 2}, Layout{.reversed = true},
                          Layout{.offset_bytes = 4}}) {
    Buffer b(DType::F32, {3, 5}, tools::Fill::Poison, l);
    for (const double x : tools::values(b.view())) EXPECT_TRUE(std::isnan(x));
    tools::fill(b.view(), 1.0);
    EXPECT_TRUE(b.guards_intact());
    std::set<std::byte*> inside;
    tools::for_each(b.view(), [&](std::byte* p) {
      for (int i = 0; i < 4; ++i) inside.insert(p + i);
    });
    for (std::byte* p = *inside.begin() - 32; p < *inside.rbegin() + 32; ++p) {
      if (inside.contains(p)) continue;
      const std::byte old = *p;
      *p = ~old;
      EXPECT_FALSE(b.guards_intact());
      *p = old;
    }
    EXPECT_TRUE(b.guards_intact());
  }
}

TEST(Cases, SameBytesForTheSameSeedOnEveryMachine) {
  const Case c = make_case("chunk_gla", sizes(1, 7, 2, 5, 3), {.seed = 42});
  std::uint64_t sum = 0;
  for (const char* name : {"q", "k", "v", "g"})
    tools::for_each(c.input(name), [&](const std::byte* p) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, p, sizeof bits);
      sum = sum * 0x9e3779b97f4a7c15U + bits;
    });
  EXPECT_EQ(sum, 14628848960482460688U) << "recorded on x86-64";
  EXPECT_FALSE(tools::same_bits(c.input("q"), make_case("chunk_gla", sizes(1, 7, 2, 5, 3), {.seed = 43}).input("q")));
  EXPECT_FALSE(tools::same_bits(c.input("q"), c.input("k")));
  for (double x = -30.0; x < 30.0; x += 0.37)
    EXPECT_NEAR(tools::log_sigmoid(x), -std::log1p(std::exp(-x)), 1e-12 * (1 + std::abs(x)));
  double mean = 0, square = 0;
  for (std::uint64_t i = 0; i < 100000; ++i) {
    const double x = tools::normal(1, i);
    mean += x / 1e5;
    square += x * x / 1e5;
  }
  EXPECT_NEAR(mean, 0.0, 0.02);
  EXPECT_NEAR(square, 1.0, 0.02);
}

}  // namespace
}  // namespace fla::gate
